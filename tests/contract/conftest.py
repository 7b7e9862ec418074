"""One service for the suite, and one client per kind of connection and style: every test of the
contract runs with all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dataplane import Server, connect, connect_async, serve
from dataplane.client.client import DataPlaneClient
from dataplane.client.unit_connections import UnitConnections
from tests.short_ways import short_ways_off
from tests.storage.engine_under_test import require_engine, use_at_once, why_not

MIB = 1 << 20


class Blocking:
    """An async client driven from a test thread, so that one suite covers both: each method blocks for its
    coroutine."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop).result(120)

        return call

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = {"capacity_bytes": 64 * MIB, "heartbeat_s": 0.5, "session_timeout_s": 20.0}
    with serve({**settings, "bulk_transport": unit_transport()}) as running:
        yield running


def unit_transport() -> str:
    """Of units: by engine for those clients who want it too, where there is one."""
    return "zmq" if why_not() else "mooncake"


KINDS = ["local", "remote", "local-async", "remote-async", "engine", "engine-async"]
GENERAL = ["local-general", "local-general-async"]


@pytest.fixture(params=[*KINDS, *GENERAL])
def connection_kind(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """How a client reaches the arena: mapped ("general": with the short ways switched off), by ZMQ,
    by transfer engine."""
    if request.param.startswith("engine"):
        require_engine()
        use_at_once(monkeypatch)
    with short_ways_off() if request.param in GENERAL else contextlib.nullcontext():
        yield request.param


def settings_of(connection_kind: str) -> dict[str, Any]:
    """Of a client with that kind of connection."""
    is_engine = connection_kind.startswith("engine")
    return {
        "force_remote": is_engine or connection_kind.startswith("remote"),
        "bulk_transport": "mooncake" if is_engine else "zmq",
    }


@pytest.fixture
def open_client(server: Server, connection_kind: str) -> Iterator[Callable[[], DataPlaneClient]]:
    """Makes clients with the kind of connection under test; they are closed afterwards."""
    opened: list[Any] = []

    def make(**settings: Any) -> Any:
        settings = {**settings_of(connection_kind), "heartbeat_s": 0.5, **settings}
        client: Any
        if connection_kind.endswith("async"):
            client = Blocking(connect_async(server.address, **settings))
        else:
            client = connect(server.address, **settings)
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()


@pytest.fixture
def client(open_client: Callable[[], DataPlaneClient]) -> DataPlaneClient:
    return open_client()


_names = itertools.count()


@pytest.fixture
def partition(client: DataPlaneClient) -> Iterator[str]:
    """A name nobody has used; dropped afterwards."""
    name = f"p{next(_names)}"
    yield name
    client.clear_samples(None, name)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Space handed out for a put is overwritten before the put's own bytes come: whoever still reads there sees it."""
    honest = UnitConnections.write

    def write(self: UnitConnections, placements: Any, columns: Any, reservation: int, unfinished: set[int]) -> None:
        for placement in placements:
            sizes = columns[placement.column].sizes[placement.first : placement.last]
            garbage = np.full(int(sizes.sum()), 0xA5, np.uint8)
            connection = self.connection(placement.unit)
            if connection.local:
                connection.arena.writable(placement.offset, garbage.size)[:] = garbage
            else:
                connection.write([placement.offset], [[garbage]], reservation=reservation, timeout_s=30)
        honest(self, placements, columns, reservation, unfinished)

    monkeypatch.setattr(UnitConnections, "write", write)
