"""What is left of a transfer engine that ends: slots still written to, memory out of reach, threads and files."""

import logging
import os
import time

import pytest

from dataplane.config import DataPlaneConfig
from dataplane.storage.server import BulkServer
from dataplane.storage.transport.mooncake.engine_transport import UnitEngine, open_slots
from dataplane.storage.transport.mooncake.slots import SLOTS
from tests.alone import alone
from tests.restarts import wait_until
from tests.storage.engine_under_test import require_engine
from tests.storage.unit_under_test import WAIT_S, Unit

CONFIG = DataPlaneConfig(bulk_transport="mooncake")


@pytest.fixture(autouse=True)
def _engine():
    require_engine()


@pytest.fixture
def slots():
    made = open_slots(CONFIG, "127.0.0.1")
    yield made
    made.close(trying=False)


def test_a_slot_with_a_transfer_under_way_is_nobodys(slots, monkeypatch):
    slot = slots.take()
    slot.transfer = 1
    monkeypatch.setattr(slots.engine, "status", lambda _: 0)
    slots.give(slot)
    others = [slots.take() for _ in range(SLOTS)]
    assert slot not in others
    assert others.count(None) == 1
    monkeypatch.setattr(slots.engine, "status", lambda _: -1)
    assert slots.take() is None, "a failed transfer may still land for a while"
    slot.rests_until = 0.0
    assert slots.take() is slot


def test_closed_memory_is_out_of_reach(slots):
    other = open_slots(CONFIG, "127.0.0.1")
    source = other.trial()
    assert slots.try_peer(source, time.monotonic() + WAIT_S)
    other.close(trying=False)
    assert not slots.try_peer(source, time.monotonic() + WAIT_S)


@pytest.mark.integration
def test_closing_leaves_no_more_than_one_engine_behind():
    alone(_open_and_close_again_and_again)


def _open_and_close_again_and_again():
    def kept():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    for _ in range(2):
        open_slots(CONFIG, "127.0.0.1").close(trying=False)
    before = kept()
    for _ in range(5):
        open_slots(CONFIG, "127.0.0.1").close(trying=False)
    wait_until(lambda: all(now <= then for now, then in zip(kept(), before, strict=True)), "no more than before")


def test_transfers_that_do_not_end_keep_their_memory(monkeypatch, caplog):
    monkeypatch.setattr("dataplane.storage.transport.mooncake.slots.CLOSE_S", 0.01)
    slots = open_slots(CONFIG, "127.0.0.1")
    slot = slots.take()
    slot.transfer = 1
    monkeypatch.setattr(slots.engine, "status", lambda _: 0)
    slots.give(slot)
    with caplog.at_level(logging.WARNING):
        slots.close(trying=False)
    assert "1 transfers did not end" in caplog.text


@pytest.mark.integration
def test_a_server_that_cannot_start_gives_its_engine_back(monkeypatch):
    closed = []
    monkeypatch.setattr(UnitEngine, "close", lambda self: closed.append(self))
    engine = UnitEngine.open(CONFIG)
    with Unit() as unit:
        server = BulkServer(unit.arena, epoch=1, token=None, report=unit.reports.put, tcp_host="0.0.0.0", engine=engine)
        with pytest.raises(ValueError, match="not loopback"):
            server.start()
    assert closed == [engine]
    engine._slots.close(trying=False)
