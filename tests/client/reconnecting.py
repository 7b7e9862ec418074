"""Fixtures and helpers for tests of clients and storage units whose controller stops: a restartable service, clients of
several kinds, and small puts and reads that check values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import connect, connect_async
from dataplane.client.rpc import handshake
from dataplane.controller.event_loop import LedgerThread
from tests.contract.conftest import Blocking
from tests.restarts import CONFIG, NO_HEARTBEATS, Proxy, RestartableService, wait_until

FIELDS = ["x", "n"]
STILL = replace(CONFIG, **NO_HEARTBEATS)
"""A client whose heartbeat is late would take the service to be gone."""


@pytest.fixture
def restartable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RestartableService]:
    """With `CONFIG`, or what a test says."""
    made = RestartableService(tmp_path / "state", getattr(request, "param", CONFIG))
    made.start()
    made.unit()
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture(params=["local", "remote-async"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Open = Callable[..., Any]


@pytest.fixture
def proxy_to() -> Iterator[Callable[[int], Proxy]]:
    """Makes proxies, which are closed at the end, after the clients."""
    made: list[Proxy] = []

    def proxy(port: int) -> Proxy:
        made.append(Proxy(port))
        return made[-1]

    yield proxy
    for each in made:
        each.close()


@pytest.fixture
def open_client(restartable: RestartableService, pool: ThreadPoolExecutor, proxy_to: object) -> Iterator[Open]:
    """Makes clients, which are closed at the end."""
    made: list[Any] = []

    def client(style: str = "local", address: str = "", **settings: Any) -> Any:
        changed = {"force_remote": style.startswith("remote"), "address": address or restartable.address, **settings}
        config = {**vars(restartable.config), **changed}
        made.append(Blocking(connect_async(**config)) if style.endswith("async") else connect(**config))
        made[-1].stats()
        return made[-1]

    yield client
    for each in made:
        each.close()


@pytest.fixture(params=["stopped", "killed"])
def ending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the controller ends: saying so to whoever waits, or without a word."""
    if request.param == "killed":
        monkeypatch.setattr(LedgerThread, "_shut_down", lambda self: self._zmq.close())
    return str(request.param)


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of connection to the controller. An ipc endpoint has another name in each epoch."""
    if request.param == "tcp":
        monkeypatch.setattr(handshake, "boot_id", lambda: "another host")
    return str(request.param)


def register(client: Any) -> None:
    client.register_partition("p", FIELDS, None, ["train"])


def rows(*numbers: int) -> dict[str, Any]:
    return {
        "x": torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 1000).contiguous(),
        "n": torch.tensor(numbers),
    }


def put(client: Any, *numbers: int) -> Any:
    return client.put_samples([f"s{number}" for number in numbers], "p", rows(*numbers))


def check(client: Any, *numbers: int) -> None:
    found = client.get_samples([f"s{number}" for number in numbers], "p", FIELDS)
    assert found["n"].tolist() == list(numbers)
    assert torch.equal(found["x"], rows(*numbers)["x"])


def claim_two(pool: ThreadPoolExecutor, client: Any, other: Any) -> Future[Any]:
    """A claim of two samples that waits at the service, as `other` sees."""
    claim = pool.submit(client.claim_meta, "p", "train", FIELDS, 2)
    wait_until(lambda: [partition.waiting_claims for partition in other.stats().partitions] == [1])
    return claim


def calls_of(client: Any) -> Any:
    """The calls of a client's session."""
    if isinstance(client, Blocking):
        return client._client._opening.result()._channel._calls
    return client._connections.get()._channel._calls
