import threading

import pytest

from dataplane.config import MIB
from dataplane.core import failpoints
from dataplane.errors import CallTimeoutError, StorageUnitError
from dataplane.storage import client as client_module
from dataplane.storage.server import BulkServer
from dataplane.storage.sessions import MAX_STOPS, StoppedPuts
from tests.storage.unit_under_test import WAIT_S, Unit, interrupt_when, noise


@pytest.fixture
def unit():
    with Unit() as made:
        yield made


@pytest.fixture(params=["ipc", "tcp"])
def connection(unit, request):
    with unit.connect(request.param) as made:
        yield made


def test_puts_are_told_apart_by_session_and_call_id():
    stops = StoppedPuts()
    assert not stops.covers(1, 5)
    stops.stop(1, 5)
    stops.stop(1, 5)
    assert [stops.covers(1, call_id) for call_id in (4, 5, 6)] == [False, True, False]
    assert not stops.covers(2, 5)
    assert len(stops) == 1


def test_what_is_forgotten_stays_stopped():
    stops = StoppedPuts()
    call_ids = range(10, 10 * (3 * MAX_STOPS + 1), 10)
    for call_id in call_ids:
        stops.stop(1, call_id)
    assert len(stops) <= MAX_STOPS + 1
    assert all(stops.covers(1, call_id) for call_id in call_ids)
    newest = call_ids[-1]
    assert not stops.covers(1, newest - 1), "a put between those that are told apart goes on"
    assert not stops.covers(1, newest + 1)
    stops.stop(1, 10)
    assert stops.covers(1, newest)


def test_a_fenced_session_is_forgotten_alone():
    stops = StoppedPuts()
    for session in (1, 2):
        stops.stop(session, 5)
    stops.forget(1)
    stops.forget(1)
    assert (stops.covers(1, 5), stops.covers(2, 5), len(stops)) == (False, True, 1)


# --- over the wire ------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("way", ["interrupt", "timeout"])
def test_what_is_left_of_a_stopped_put_does_not_land(unit, connection, monkeypatch, way):
    """The requests of a failed write wait at the unit; none that is looked at after the stop touches the arena."""
    began, given_up = threading.Event(), threading.Event()
    carry_out = BulkServer._write

    def in_turn(server, request, fill):
        if request.write.reservation == 5:
            began.set()
            assert given_up.wait(WAIT_S)
        return carry_out(server, request, fill)

    monkeypatch.setattr(BulkServer, "_write", in_turn)
    if way == "interrupt":
        frames = iter(range(100))
        failpoints.arm("bulk.write.between_frames", lambda: interrupt_when(next(frames) == 3 and began.wait(WAIT_S)))
    with pytest.raises(KeyboardInterrupt if way == "interrupt" else CallTimeoutError):
        connection.write(
            list(range(0, 8 * MIB, MIB)),
            [noise(MIB)] * 8,
            reservation=5,
            timeout_s=WAIT_S if way == "interrupt" else 0.2,
        )
    failpoints.disarm()
    given_up.set()
    connection.stop_put(5, WAIT_S)
    with unit.connect(session=2) as other:
        other.write([0], [b"x" * 8 * MIB], reservation=5, timeout_s=WAIT_S)
    with pytest.raises(StorageUnitError, match="put 5 of session 1 was aborted"):
        connection.write([0], [noise(MIB)], reservation=5, timeout_s=WAIT_S)
    assert unit.arena.data[: 8 * MIB].tobytes() == b"x" * 8 * MIB
    connection.write([0], [b"abc"], reservation=6, timeout_s=WAIT_S)
    assert unit.arena.data[:3].tobytes() == b"abc", "other puts go on"


@pytest.mark.integration
def test_a_stop_that_is_not_acknowledged_raises(unit, connection, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(
        BulkServer, "_execute", lambda *_: release.wait(WAIT_S) and (client_module.pb.BulkReply(), None)
    )
    with pytest.raises(CallTimeoutError, match="abort of a put"):
        connection.stop_put(5, 0.05)
    release.set()
    with pytest.raises(StorageUnitError, match="abort of a put"):
        connection.stop_put(5, WAIT_S)
