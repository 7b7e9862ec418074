"""A remote put that fails half-way: the unit may still hold writes of it, and its space is not given to anybody else
before they can do no harm."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, Server, connect, connect_async, serve
from dataplane.core import failpoints
from dataplane.errors import CallTimeoutError, StorageUnitError
from dataplane.storage.client import UnitConnection
from dataplane.storage.server import BulkServer

pytestmark = pytest.mark.integration

MIB = 1 << 20
WAIT_S = 60.0
WHOLE = 7


@pytest.fixture
def server() -> Iterator[Server]:
    """Space for one put of `WHOLE` rows."""
    with serve({"capacity_bytes": 8 * MIB, "reserve_fraction": 0.0, "heartbeat_s": 0.2}) as running:
        yield running


@pytest.fixture
def other(server: Server) -> Iterator[DataPlaneClient]:
    """A local client: its puts need no help from the unit's thread."""
    with connect(server.address, put_timeout_s=WAIT_S) as client:
        client.register_partition("p", {"x": None}, None, [])
        client.put_samples(["warm"], "p", {"x": rows(1, 1)})
        client.clear_samples(["warm"], "p")
        yield client


def rows(count: int, value: int) -> torch.Tensor:
    return torch.full((count, MIB), value, dtype=torch.uint8)


def names(count: int) -> list[str]:
    return [f"s{n}" for n in range(count)]


def reserved(client: DataPlaneClient) -> int:
    (unit,) = client.stats().units
    return unit.reserved_bytes


class HeldUnit:
    """The unit's thread, stopped just before it carries out the first write that reaches it, until `go_on`.

    `began`: the thread is there; `given_up`: the client's write has ended, one way or another. Writes wait for the unit
    for `limit_s` from then on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on, self.given_up = threading.Event(), threading.Event(), threading.Event()
        self.limit_s = 0.3
        carry_out, send, written = BulkServer._write, UnitConnection.write, UnitConnection._receive_written

        def held(server: BulkServer, *request: Any) -> int:
            self.began.set()
            assert self.go_on.wait(WAIT_S)
            return carry_out(server, *request)

        def watched(connection: UnitConnection, *args: Any, **more: Any) -> None:
            try:
                send(connection, *args, **{**more, "timeout_s": self.limit_s})
            finally:
                self.given_up.set()

        def once_it_began(connection: UnitConnection, *call: Any) -> None:
            assert self.began.wait(WAIT_S)
            written(connection, *call)

        monkeypatch.setattr(BulkServer, "_write", held)
        monkeypatch.setattr(UnitConnection, "write", watched)
        monkeypatch.setattr(UnitConnection, "_receive_written", once_it_began)

    def fail_between_frames(self) -> None:
        """Arm an error in the client's second request, once its first is with the unit."""
        frames = iter(range(100))
        self.limit_s = WAIT_S

        def fail() -> None:
            if next(frames) == 3:
                assert self.began.wait(WAIT_S)
                raise RuntimeError("a failpoint")

        failpoints.arm("bulk.write.between_frames", fail)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUnit]:
    unit = HeldUnit(monkeypatch)
    yield unit
    unit.go_on.set()


def done_or_waiting(put: Any, watcher: DataPlaneClient) -> None:
    """Return when the put has its space and is done, or waits for space."""
    while not put.done() and not watcher.stats().waiting_allocations:
        pass


@pytest.mark.parametrize("how", ["error", "timeout"])
def test_space_is_reused_at_once_and_late_writes_do_not_land(
    server: Server, other: DataPlaneClient, held: HeldUnit, how: str
) -> None:
    with (
        connect(server.address, force_remote=True, connect_timeout_s=WAIT_S) as failing,
        ThreadPoolExecutor(2) as pool,
    ):
        failing.stats()
        if how == "error":
            held.fail_between_frames()
        failed = pool.submit(failing.put_samples, names(WHOLE), "p", {"x": [*rows(WHOLE, 1)]})
        assert held.given_up.wait(WAIT_S)
        failpoints.disarm()
        put = pool.submit(other.put_samples, names(WHOLE), "p", {"x": rows(WHOLE, 2)})
        done_or_waiting(put, other)
        held.go_on.set()
        with pytest.raises(RuntimeError if how == "error" else CallTimeoutError):
            failed.result(WAIT_S)
        put.result(WAIT_S)
        # The unit takes turns between sockets: once as many reads are answered as writes were left, those are done.
        for _ in range(2):
            assert torch.equal(failing.get_samples(names(WHOLE), "p", ["x"])["x"], rows(WHOLE, 2))
        assert torch.equal(other.get_samples(names(WHOLE), "p", ["x"])["x"], rows(WHOLE, 2))
        assert reserved(other) == 0


def test_a_cancelled_puts_space_comes_back_while_its_client_closes(
    server: Server, other: DataPlaneClient, held: HeldUnit
) -> None:
    """The copy that a cancelled call left behind fails; its stop is not refused by the close that waits for it."""
    stops: list[int] = []
    stop = UnitConnection.stop_put

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        client = connect_async(server.address, force_remote=True, connect_timeout_s=WAIT_S)
        await client.stats()
        put = asyncio.ensure_future(client.put_samples(names(WHOLE), "p", {"x": rows(WHOLE, 1)}))
        await loop.run_in_executor(None, held.began.wait, WAIT_S)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        closing = asyncio.ensure_future(client.close())
        await loop.run_in_executor(None, held.given_up.wait, WAIT_S)
        assert not closing.done()
        held.go_on.set()
        await closing

    def counted(connection: UnitConnection, reservation: int, timeout_s: float) -> None:
        stop(connection, reservation, timeout_s)
        stops.append(reservation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitConnection, "stop_put", counted)
        asyncio.run(scenario())
    assert len(stops) == 1
    other.put_samples(names(WHOLE), "p", {"x": rows(WHOLE, 2)})
    assert torch.equal(other.get_samples(names(WHOLE), "p", ["x"])["x"], rows(WHOLE, 2))


def test_a_failing_put_is_stopped_while_its_client_closes(
    server: Server, other: DataPlaneClient, held: HeldUnit
) -> None:
    failing = connect(server.address, force_remote=True, connect_timeout_s=WAIT_S)
    failing.stats()
    with ThreadPoolExecutor(2) as pool:
        failed = pool.submit(failing.put_samples, names(WHOLE), "p", {"x": rows(WHOLE, 1)})
        assert held.began.wait(WAIT_S)
        close = pool.submit(failing.close)
        assert held.given_up.wait(WAIT_S)
        held.go_on.set()
        with pytest.raises(CallTimeoutError, match="write of rows"):
            failed.result(WAIT_S)
        close.result(WAIT_S)
    other.put_samples(names(WHOLE), "p", {"x": rows(WHOLE, 2)})


def refuse(*_: Any) -> None:
    raise StorageUnitError(unit=1, endpoint="here", why="it is not in the mood")


def fail_at_the_third_frame() -> Callable[[], None]:
    frames = iter(range(100))

    def fail() -> None:
        if next(frames) == 3:
            raise RuntimeError("a failpoint")

    return fail


def test_without_an_acknowledged_stop_the_space_stays_reserved_until_the_session_ends(
    server: Server, other: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BulkServer, "_stop_put", refuse)
    failing = connect(server.address, force_remote=True)
    failpoints.arm("bulk.write.between_frames", fail_at_the_third_frame())
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError):
        failing.put_samples(names(WHOLE), "p", {"x": [*rows(WHOLE, 1)]})
    failpoints.disarm()
    assert "Storage unit 1 did not confirm" in caplog.text
    assert "not in the mood" in caplog.text
    failing.list_samples("p")
    assert reserved(other) == WHOLE * MIB
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(other.put_samples, names(WHOLE), "p", {"x": rows(WHOLE, 2)})
        done_or_waiting(put, other)
        assert not put.done()
        failing.close()
        put.result(WAIT_S)
    assert reserved(other) == 0
    assert torch.equal(other.get_samples(names(WHOLE), "p", ["x"])["x"], rows(WHOLE, 2))


def test_a_put_that_fails_after_its_write_asks_no_unit(
    server: Server, other: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnitConnection, "stop_put", refuse)

    def fail() -> None:
        raise RuntimeError("a failpoint")

    with connect(server.address, force_remote=True) as failing:
        failpoints.arm("put.before_commit", fail)
        with pytest.raises(RuntimeError):
            failing.put_samples(names(WHOLE), "p", {"x": rows(WHOLE, 1)})
        failpoints.disarm()
        other.put_samples(names(WHOLE), "p", {"x": rows(WHOLE, 2)})
