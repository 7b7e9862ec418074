"""How a client and a storage unit meet: who is local, who is remote, and who is refused."""

import pytest

from dataplane.errors import AuthenticationError, StorageUnitError
from dataplane.ledger.commands import SessionAttached
from dataplane.storage import client as client_module
from dataplane.storage.client import UnitConnection
from dataplane.storage.session_lock import SessionLock
from tests.storage.unit_under_test import EPOCH, TOKEN, UNIT, WAIT_S, Unit, changed

pytestmark = pytest.mark.integration


@pytest.fixture
def unit():
    with Unit() as made:
        yield made


@pytest.fixture
def lock():
    with SessionLock.create() as made:
        yield made


def test_a_client_with_a_lock_on_the_same_host_is_local(unit, lock):
    with unit.connect(session=5, lock=lock) as connection:
        assert connection.local
        report = unit.expect(SessionAttached)
        assert (report.unit, report.session) == (UNIT, 5)
        connection.arena.writable(100, 3)[:] = [1, 2, 3]
        assert unit.arena.data[100:103].tolist() == [1, 2, 3]
        view = connection.arena.readonly(100, 3)
    assert connection.arena.closed
    assert view.tolist() == [1, 2, 3]


@pytest.mark.parametrize("why", ["forced", "no lock", "other host", "lock gone", "arena gone"])
def test_who_is_not_local_is_remote(unit, lock, why):
    facts, more = unit.info, {"lock": lock}
    if why == "forced":
        more["force_remote"] = True
    elif why == "no lock":
        more = {}
    elif why == "other host":
        facts = changed(unit.info, host="elsewhere")
    elif why == "lock gone":
        lock.path.unlink()
    else:
        unit.arena.path.unlink()
    with UnitConnection(facts, session=5, token=TOKEN, timeout_s=WAIT_S, **more) as connection:
        assert not connection.local
        assert connection.arena is None
        connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)
        assert connection.read([0], [3], timeout_s=WAIT_S).range(0, 3).tobytes() == b"abc"
    assert unit.reports.empty()


def test_a_proof_that_the_unit_does_not_believe_is_no_error(unit, lock, monkeypatch):
    monkeypatch.setattr(client_module.MappedArena, "header", lambda *_: bytes(32))
    with unit.connect(lock=lock) as connection:
        assert not connection.local
        connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("facts", "more", "error"),
    [
        ({}, {"token": "wrong"}, AuthenticationError),
        ({}, {"token": None}, StorageUnitError),
        ({"epoch": EPOCH - 1}, {}, StorageUnitError),
        ({"endpoints": ()}, {}, StorageUnitError),
        ({"endpoints": ("ipc://@tq-nobody",)}, {}, StorageUnitError),
        ({"endpoints": ("tcp://127.0.0.1:9",)}, {}, StorageUnitError),
    ],
)
def test_refusals_of_the_server(unit, facts, more, error):
    with pytest.raises(error):
        UnitConnection(changed(unit.info, **facts), **({"session": 1, "token": TOKEN, "timeout_s": WAIT_S} | more))


def test_an_endpoint_that_does_not_answer_is_passed_over(unit):
    endpoints = ("ipc://@tq-nobody", "tcp://127.0.0.1:9", unit.info.endpoints[1])
    facts = changed(unit.info, endpoints=endpoints)
    with UnitConnection(facts, session=1, token=TOKEN, timeout_s=WAIT_S) as connection:
        connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)


def test_a_shared_context_is_left_open(unit):
    context = client_module.zmq.Context()
    with UnitConnection(unit.info, session=1, token=TOKEN, timeout_s=WAIT_S, context=context) as connection:
        connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)
    assert not context.closed
    context.term()
