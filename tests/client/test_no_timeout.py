"""Calls without a timeout wait until they succeed, or until service, session or partition end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, Server, StreamingDataLoader, connect, connect_async, serve
from dataplane.errors import ClientClosedError, PartitionDroppedError, ServiceUnavailableError
from tests.restarts import WAIT_S, wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
Submit = Callable[..., "Future[Any]"]


@pytest.fixture
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 * MIB, "put_timeout_s": math.inf}) as running:
        yield running


@pytest.fixture
def observer(server: Server) -> Iterator[DataPlaneClient]:
    with connect(server.address) as client:
        client.register_partition("p", ["x"], None, ["train"])
        yield client


@pytest.fixture
def submit() -> Iterator[Submit]:
    with ThreadPoolExecutor(4) as threads:
        yield threads.submit


def claim(client: DataPlaneClient, timeout_s: float | None = None) -> list[str]:
    return client.claim_meta("p", "train", ["x"], 1, timeout_s=timeout_s).sample_ids


def stream(client: DataPlaneClient, prefetch: int = 0, timeout_s: float | None = None) -> list[str]:
    options: dict[str, Any] = {"batch_size": 1, "prefetch": prefetch, "timeout_s": timeout_s}
    with StreamingDataLoader(client, "p", "train", ["x"], **options) as loader:
        return next(iter(loader)).meta.sample_ids


def prefetch(client: DataPlaneClient) -> list[str]:
    return stream(client, prefetch=1, timeout_s=math.inf)


def claim_infinitely(client: DataPlaneClient) -> list[str]:
    return claim(client, math.inf)


def claim_in_async_code(client: DataPlaneClient) -> list[str]:
    async def call() -> list[str]:
        async with connect_async(client.config.address or "") as other:
            return (await other.claim_meta("p", "train", ["x"], 1, timeout_s=None)).sample_ids

    return asyncio.run(call())


def put(client: DataPlaneClient) -> list[str]:
    """Waits for space: the partition is full."""
    return client.put_samples(["late"], "p", {"x": torch.zeros(1, MIB)}).sample_ids


CALLS = [claim, claim_infinitely, claim_in_async_code, stream, prefetch, put]


def parked(
    call: Callable[[DataPlaneClient], list[str]], client: DataPlaneClient, observer: DataPlaneClient, submit: Submit
) -> Future[list[str]]:
    """The call, which waits now."""
    if call is put:
        observer.put_samples(["full"], "p", {"x": torch.zeros(1, MIB)})
    waiting = submit(call, client)
    wait_until(lambda: len(observer.waits().waits) == 1)
    if call is not prefetch:  # its thread claims for a short time, again and again
        assert observer.waits().waits[0].until == math.inf
    assert not waiting.done()
    return waiting


@pytest.mark.parametrize("call", CALLS)
def test_the_wait_ends_when_the_call_succeeds(
    call: Callable[[DataPlaneClient], list[str]], server: Server, observer: DataPlaneClient, submit: Submit
) -> None:
    with connect(server.address) as client:
        waiting = parked(call, client, observer, submit)
        if call is put:
            observer.clear_samples(["full"], "p")
        else:
            observer.put_samples(["late"], "p", {"x": torch.zeros(1, 1)})
        assert waiting.result(WAIT_S) == ["late"]


@pytest.mark.parametrize(
    ("call", "ended"),
    [(call, "service") for call in CALLS] + [(call, "session") for call in (claim, stream, prefetch, put)],
)
def test_the_end_of_the_service_or_of_the_session_ends_the_wait(
    call: Callable[[DataPlaneClient], list[str]], ended: str, server: Server, observer: DataPlaneClient, submit: Submit
) -> None:
    client = connect(server.address)
    waiting = parked(call, client, observer, submit)
    if ended == "service":
        server.close()
    else:
        client.close()
    with pytest.raises(ServiceUnavailableError if ended == "service" else ClientClosedError):
        waiting.result(WAIT_S)
    client.close()


@pytest.mark.parametrize("call", CALLS)
def test_the_end_of_the_partition_ends_the_wait(
    call: Callable[[DataPlaneClient], list[str]], server: Server, observer: DataPlaneClient, submit: Submit
) -> None:
    with connect(server.address) as client:
        waiting = parked(call, client, observer, submit)
        observer.clear_samples(None, "p")
        with pytest.raises(PartitionDroppedError):
            waiting.result(WAIT_S)
