"""Processes that may have few open files: that is a named error, before a library ends the process for it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import resource
from collections.abc import Iterator

import pytest
import torch

from dataplane import LimitError, ServiceUnavailableError, connect, connect_async, serve
from dataplane.config import MIB, DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.protocol.fd_limits import ENOUGH, OF_A_SERVER, allow_more
from dataplane.storage.unit import StorageUnit
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

NONE_LEFT = r"cannot open more files \(ulimit -n \d+\).*raise the limit"


def _nobody_closes_any() -> None:
    """Until what other threads close late, such as connections that ended, is closed: each is one more that is free
    than `only` allows."""
    looks: collections.deque[list[str]] = collections.deque(maxlen=4)

    def same() -> bool:
        looks.append(os.listdir("/proc/self/fd"))
        return len(looks) == looks.maxlen and all(look == looks[0] for look in looks)

    wait_until(same, "the same files are open for a while")


@contextlib.contextmanager
def only(count: int) -> Iterator[None]:
    """This process may open at most so many more files."""
    _nobody_closes_any()
    gc.disable()  # nor does it
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.dup(0)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.enable()


@pytest.mark.parametrize("left", [0, 1, 2, 5, 9, 19])
def test_a_client_that_cannot_be_opened(left: int) -> None:
    async def opened_async() -> None:
        with only(left):
            async with connect_async(server.address):
                pass

    with serve({"capacity_bytes": 8 * MIB}) as server:
        with only(left), pytest.raises(ServiceUnavailableError, match=NONE_LEFT):
            connect(server.address)
        with pytest.raises(ServiceUnavailableError, match=NONE_LEFT):
            asyncio.run(opened_async())


def test_a_storage_unit_that_cannot_be_reached_and_then_can() -> None:
    with serve({"capacity_bytes": 8 * MIB}) as server, connect(server.address) as client:
        client.register_partition("p", ["x"], 1, ["t"])
        with only(3), pytest.raises(ServiceUnavailableError, match=NONE_LEFT):
            client.put_samples(["a"], "p", {"x": torch.arange(1)})
        client.put_samples(["a"], "p", {"x": torch.arange(1)})
        assert client.get_samples(["a"], "p", ["x"])["x"].tolist() == [0]


@pytest.mark.parametrize("left", [0, 10, OF_A_SERVER - 1])
def test_servers_that_cannot_start(left: int) -> None:
    config = DataPlaneConfig(capacity_bytes=8 * MIB)
    with Controller(config) as controller:
        unit = StorageUnit(config, controller.address)
        for server in (Controller(config), unit):
            with only(left), pytest.raises(LimitError, match=r"open files: \d+, and the limit is \d+\. Raise"):
                server.start()
        with unit:
            assert not unit.lost.is_set()


def test_no_limit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert allow_more() == ENOUGH
