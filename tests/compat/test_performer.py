"""The client for async callers: its close can be repeated, and calls share wake-ups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from dataplane import Server, serve
from dataplane.client.operations.partitions import stats
from dataplane.compat.transfer_queue import performer
from dataplane.config import DataPlaneConfig

pytestmark = pytest.mark.integration


@pytest.fixture
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 << 20}) as running:
        yield running


def test_a_close_that_took_too_long_can_be_repeated(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    background = performer._BackgroundClient(DataPlaneConfig(address=server.address))
    asyncio.run(background.perform(stats))
    go_on = asyncio.Event()
    close = background._client.close

    async def slow() -> None:
        await go_on.wait()
        await close()

    monkeypatch.setattr(background._client, "close", slow)
    with monkeypatch.context() as patch:
        patch.setattr(performer, "CLOSE_TIMEOUT_S", 0.01)
        with pytest.raises(TimeoutError):
            background.close()
    background._loop.call_soon_threadsafe(go_on.set)
    background.close()
    background.close()
    assert background._loop.is_closed()


def test_calls_that_come_together_share_a_wake_up(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    background = performer._BackgroundClient(DataPlaneConfig(address=server.address))
    asyncio.run(background.perform(stats))
    released = threading.Event()
    background._loop.call_soon_threadsafe(released.wait)
    wake = background._loop.call_soon_threadsafe
    woken: list[Any] = []

    def counted(*args: Any) -> Any:
        woken.append(args)
        return wake(*args)

    monkeypatch.setattr(background._loop, "call_soon_threadsafe", counted)

    async def script() -> None:
        calls = [asyncio.create_task(background.perform(stats)) for _ in range(9)]
        await asyncio.sleep(0)
        count = len(woken)
        released.set()
        assert len(await asyncio.gather(*calls)) == 9
        assert count == 1

    asyncio.run(script())
    background.close()


def test_a_call_that_ends_after_its_callers_loop_disturbs_no_other(server: Server) -> None:
    background = performer._BackgroundClient(DataPlaneConfig(address=server.address))
    loop = asyncio.new_event_loop()
    outcome = loop.create_future()
    loop.close()
    call = performer._Call(partial(background._client.perform, stats), outcome, background._end)
    background._submitted.append(call)
    assert asyncio.run(background.perform(stats))
    background.close()
