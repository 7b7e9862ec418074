"""A storage unit's arena grows when it is told to, while requests are served."""

import threading

import pytest

from dataplane.config import MIB
from dataplane.errors import ArenaSpaceError
from dataplane.ledger.commands import GrowArena, Grown
from tests.storage.unit_under_test import UNIT, Peer, Unit, refused, write

pytestmark = pytest.mark.integration


@pytest.fixture
def unit():
    with Unit() as made:
        yield made


@pytest.fixture
def peer(unit):
    with Peer(unit) as made:
        yield made


def test_growing_is_reported(unit, peer):
    assert "outside" in str(refused(peer.ask(b"x", write=write((20 * MIB, 1)))))
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
    grown = unit.expect(Grown)
    assert (grown.unit, grown.backed_bytes, grown.error) == (UNIT, 24 * MIB, None)
    assert peer.ask(b"x", write=write((20 * MIB, 1)))[0].written.size == 1
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=MIB))
    assert unit.expect(Grown).backed_bytes == 24 * MIB


def test_growing_that_fails_says_why(unit, peer, monkeypatch):
    def full(*_):
        raise ArenaSpaceError(directory="/dev/shm", found_bytes=5, wanted_bytes=9)
        yield

    monkeypatch.setattr(unit.arena, "grow_steps", full)
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
    grown = unit.expect(Grown)
    assert grown.backed_bytes == 16 * MIB
    assert "--capacity" in str(grown.error)


def test_growing_that_breaks_is_reported_too(unit, monkeypatch, caplog):
    def broken(*_):
        raise OSError(5, "Input/output error")
        yield

    monkeypatch.setattr(unit.arena, "grow_steps", broken)
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
    assert "Input/output" in str(unit.expect(Grown).error)
    assert unit.server.alive


FULL = ArenaSpaceError(directory="/x", found_bytes=5, wanted_bytes=9)


@pytest.mark.parametrize("error", [FULL, OSError(5, "broken")])
def test_growing_that_goes_on_failing_is_logged_once(unit, monkeypatch, caplog, error):
    def fails(*_):
        raise error
        yield

    def grow(patched):
        unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
        assert bool(unit.expect(Grown).error) == patched
        return sum("cannot grow" in each for each in caplog.messages)

    with monkeypatch.context() as broken:
        broken.setattr(unit.arena, "grow_steps", fails)
        assert [grow(True) for _ in range(3)] == [1, 1, 1]
    assert grow(False) == 1
    monkeypatch.setattr(unit.arena, "grow_steps", fails)
    assert grow(True) == 2


def test_requests_are_served_between_the_steps_of_growing(unit, peer, monkeypatch):
    served = threading.Event()

    def steps(_):
        while not served.is_set():
            yield 0

    monkeypatch.setattr(unit.arena, "grow_steps", steps)
    unit.server.order(GrowArena(unit=UNIT, backed_bytes=24 * MIB))
    assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1
    assert unit.reports.empty()
    served.set()
    unit.expect(Grown)
