"""Connections to a storage unit that fails, or that has another epoch than the client knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dataplane.client.session_state import SessionState
from dataplane.client.unit_connections import UnitConnections
from dataplane.config import DataPlaneConfig
from dataplane.core.buffer_pool import BufferPool
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import ClientClosedError, ServiceRestartedError, StorageUnitError
from dataplane.ledger import commands as c
from dataplane.storage.client import UnitConnection
from dataplane.storage.server import BulkServer
from tests.restarts import wait_until
from tests.storage.unit_under_test import EPOCH, TOKEN, UNIT, WAIT_S, Unit, changed

pytestmark = pytest.mark.integration

ROW = c.FieldLocations(
    name="x",
    spec=FieldSpec(FieldKind.DENSE, "uint8", (64,)),
    units=np.full(1, UNIT, np.int32),
    offsets=np.zeros(1, np.int64),
    lengths=np.ones(1, np.int64),
)


@pytest.fixture
def unit() -> Iterator[Unit]:
    with Unit() as made:
        yield made


@pytest.fixture
def unit_connections(unit: Unit) -> Iterator[UnitConnections]:
    config = DataPlaneConfig(address="nowhere:1", force_remote=True, token=TOKEN)
    made = UnitConnections(config, session=1, lock=None, memory=BufferPool(0))
    made.learn([unit.info])
    yield made
    made.close()


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A unit that reads nothing: (a read came, go on)."""
    came, go_on = threading.Event(), threading.Event()
    read = BulkServer._read

    def slow(server: BulkServer, request: Any) -> Any:
        came.set()
        assert go_on.wait(WAIT_S)
        return read(server, request)

    monkeypatch.setattr(BulkServer, "_read", slow)
    yield came, go_on
    go_on.set()


def test_a_unit_that_failed_is_asked_about_before_it_is_used_again(
    unit: Unit, unit_connections: UnitConnections
) -> None:
    unit_connections.gather([ROW], {UNIT})
    assert not unit_connections.unknown({UNIT})
    unit.server.stop()
    with pytest.raises(StorageUnitError):
        unit_connections.gather([ROW], {UNIT})
    assert unit_connections.unknown({UNIT})
    unit_connections.learn([unit.info])
    assert not unit_connections.unknown({UNIT})


def test_a_unit_of_another_epoch_is_asked_about_too(unit: Unit) -> None:
    config = DataPlaneConfig(address="nowhere:1", force_remote=True, token=TOKEN)
    unit_connections = UnitConnections(config, session=1, lock=None, memory=BufferPool(0))
    unit_connections.learn([changed(unit.info, epoch=EPOCH - 1)])
    with pytest.raises(StorageUnitError, match="was restarted"):
        unit_connections.gather([ROW], {UNIT})
    assert unit_connections.unknown({UNIT})
    unit_connections.learn([unit.info])
    unit_connections.gather([ROW], {UNIT})
    unit_connections.close()


@pytest.mark.parametrize(
    ("later", "kind", "message"),
    [
        ({"epoch": EPOCH + 1}, ServiceRestartedError, f"storage unit {UNIT} has epoch 4, expected epoch 3"),
        ({"unit": UNIT + 1}, StorageUnitError, "has no storage unit with this id"),
    ],
    ids=["another epoch", "removed"],
)
def test_a_call_under_way_at_a_unit_that_is_over_says_so(
    unit: Unit,
    unit_connections: UnitConnections,
    held_up: tuple[threading.Event, threading.Event],
    later: dict[str, int],
    kind: type[Exception],
    message: str,
) -> None:
    came, _ = held_up
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(unit_connections.gather, [ROW], {UNIT})
        assert came.wait(WAIT_S)
        unit_connections.learn([changed(unit.info, **later)])
        with pytest.raises(kind, match=message):
            reading.result(WAIT_S)


def test_a_call_under_way_when_the_client_closes_says_so(
    unit_connections: UnitConnections, held_up: tuple[threading.Event, threading.Event]
) -> None:
    came, _ = held_up
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(unit_connections.gather, [ROW], {UNIT})
        assert came.wait(WAIT_S)
        unit_connections.close()
        with pytest.raises(ClientClosedError):
            reading.result(WAIT_S)
    with pytest.raises(ClientClosedError):
        unit_connections.gather([ROW], {UNIT})


def test_learning_does_not_wait_for_a_handshake(
    unit: Unit, unit_connections: UnitConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats bring what is learned."""
    came, go_on = threading.Event(), threading.Event()
    attach = BulkServer._execute_and_reply

    def slow(server: BulkServer, peer: bytes, request: Any) -> None:
        came.set()
        assert go_on.wait(WAIT_S)
        attach(server, peer, request)

    monkeypatch.setattr(BulkServer, "_execute_and_reply", slow)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(unit_connections.gather, [ROW], {UNIT})
        assert came.wait(WAIT_S)
        other = changed(unit.info, unit=UNIT + 1)
        unit_connections.learn([unit.info, other])
        assert not unit_connections.unknown({UNIT + 1})
        go_on.set()
        assert set(reading.result(WAIT_S)) == {"x"}


def test_space_that_could_not_be_given_back_is_once_the_unit_has_another_epoch(
    unit: Unit, unit_connections: UnitConnections
) -> None:
    unit_connections.gather([ROW], {UNIT})
    unit.server.stop()
    unfinished = {UNIT}
    unit_connections.stop(5, unfinished)
    assert unfinished == {UNIT}
    assert unit_connections.take_settled() == []
    unit_connections.learn([unit.info])
    assert unit_connections.take_settled() == []
    unit_connections.learn([changed(unit.info, epoch=EPOCH + 1)])
    assert unit_connections.take_settled() == [5]
    assert unit_connections.take_settled() == []


def test_a_session_gives_such_space_back(unit: Unit) -> None:
    session_state = SessionState(
        DataPlaneConfig(address="nowhere:1", token=TOKEN, connect_timeout_s=0.1), session=1, lock=None
    )
    session_state.connections.learn([unit.info])
    unit.server.stop()
    session_state.connections.stop(5, {UNIT})
    session_state.connections.learn([changed(unit.info, epoch=EPOCH + 1)])
    assert [command.reservation for command in session_state.leftovers() if isinstance(command, c.Abort)] == [5]
    assert list(session_state.leftovers()) == []
    session_state.close()


def test_a_unit_that_did_not_confirm_is_asked_again(
    unit_connections: UnitConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, refusals = UnitConnection.stop_put, iter(range(2))

    def refusing(connection: UnitConnection, reservation: int, timeout_s: float) -> None:
        for _ in refusals:
            raise StorageUnitError(unit=UNIT, endpoint="here", why="not yet")
        stop(connection, reservation, timeout_s)

    monkeypatch.setattr(UnitConnection, "stop_put", refusing)
    unit_connections.gather([ROW], {UNIT})
    unfinished = {UNIT}
    unit_connections.stop(5, unfinished)
    assert unfinished == {UNIT}
    wait_until(lambda: unit_connections.take_settled() == [5])
    assert unit_connections.take_settled() == []


def test_a_unit_that_the_service_has_no_more_is_let_go_of(unit: Unit, unit_connections: UnitConnections) -> None:
    other, later = changed(unit.info, unit=UNIT + 1), changed(unit.info, unit=UNIT + 2)
    unit_connections.gather([ROW], {UNIT})
    connection = unit_connections.connection(UNIT)
    unit_connections.learn([changed(unit.info, unit=UNIT - 1)])
    assert not unit_connections.unknown({UNIT}), "a list from before it joined"
    unit.server.stop()
    unit_connections.stop(5, {UNIT})
    unit_connections.learn([other, later])
    assert unit_connections.unknown({UNIT, UNIT - 1})
    assert not unit_connections.unknown({UNIT + 1, UNIT + 2})
    assert unit_connections.take_settled() == [5]
    with pytest.raises(ClientClosedError):
        connection.read([0], [8], timeout_s=1.0)
    with pytest.raises(StorageUnitError, match="has no storage unit with this id"):
        unit_connections.gather([ROW], {UNIT})
