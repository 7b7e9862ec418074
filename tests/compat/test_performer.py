"""The client for async callers: its close can be repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

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
