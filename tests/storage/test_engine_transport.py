"""Payloads by transfer engine: what passes, what is refused, and that nothing lands where it may not."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import numpy as np
import pytest

from dataplane.config import MIB, DataPlaneConfig
from dataplane.errors import ClientClosedError, SessionExpiredError, StorageUnitError, from_wire
from dataplane.ledger.commands import FenceSession, SessionGone
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.server import BulkServer
from dataplane.storage.transport.mooncake import engine_transport, peers
from dataplane.storage.transport.mooncake.engine_transport import ClientEngine, EngineTransport, UnitEngine, open_slots
from dataplane.storage.transport.mooncake.slots import SLOT_BYTES, SLOTS, TAG_BYTES, Slots
from dataplane.storage.transport.request_chunks import CHUNK_BYTES, READ_BYTES
from tests.alone import alone
from tests.restarts import wait_until
from tests.storage.engine_under_test import require_engine, use_at_once
from tests.storage.unit_under_test import UNIT, WAIT_S, Peer, Process, Unit, noise

CONFIG = DataPlaneConfig(bulk_transport="mooncake")


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    """Transfers have long enough on a busy machine: none that begins ends in frames for want of time."""
    require_engine()
    monkeypatch.setattr(engine_transport, "FETCH_S", WAIT_S / 2)
    monkeypatch.setattr(peers, "TRIAL_S", WAIT_S)
    return use_at_once(monkeypatch)


@pytest.fixture
def unit():
    with Unit(engine=UnitEngine.open(CONFIG)) as made:
        yield made


@pytest.fixture
def transport():
    made = EngineTransport(CONFIG)
    yield made
    made.close()


@pytest.fixture
def connection(unit, transport):
    with unit.connect("tcp", transport=transport) as made:
        yield made


@pytest.fixture
def slots():
    """A client's memory, for requests that are made by hand."""
    made = open_slots(CONFIG, "127.0.0.1")
    yield made
    made.close(trying=False)


@pytest.fixture
def peer(unit):
    with Peer(unit) as made:
        yield made


class Held:
    """Every payload stays under way until `go_on`, however long that takes; `begun`: one is."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(engine_transport, "FETCH_S", 10 * WAIT_S)
        self.begun, self.go_on = threading.Event(), threading.Event()
        fetched = Slots.fetched

        def held(slots, slot, source):
            self.begun.set()
            return fetched(slots, slot, source) if self.go_on.is_set() else None

        monkeypatch.setattr(Slots, "fetched", held)


@pytest.fixture
def held(monkeypatch):
    return Held(monkeypatch)


def in_thread(work, *call, **more):
    """Begin it; a function that waits for its error, or None."""
    ended = []

    def run():
        try:
            work(*call, **more)
            ended.append(None)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def outcome():
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return ended[0]

    return outcome


def source_of(slots, payload):
    slot = slots.take()
    slot.payload(len(payload))[:] = np.frombuffer(payload, np.uint8)
    return slots.offer(slot, len(payload))


def write_of(source, offset=0, **more):
    return pb.WriteRanges(offsets=[offset], sizes=[source.size], reservation=1, source=source, **more)


# --- what passes ----------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_more_than_any_request_takes_there_and_back(unit, connection, counts):
    data = noise(10 * MIB + 77)
    connection.write([64], [data], reservation=1, timeout_s=WAIT_S)
    assert unit.arena.data[64 : 64 + len(data)].tobytes() == data.tobytes()
    assert counts["stored"] == -(-len(data) // CHUNK_BYTES)
    got = connection.read([64], [len(data)], timeout_s=WAIT_S)
    assert got.range(0, len(data)).tobytes() == data.tobytes()
    assert counts["fetched"] == -(-len(data) // READ_BYTES)


@pytest.mark.integration
def test_scattered_rows_some_of_them_empty(unit, connection, counts):
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 200_000, 60)
    sizes[::7] = 0
    offsets = np.concatenate([[0], np.cumsum(sizes + rng.integers(0, 500, 60))[:-1]])
    rows = [noise(size, seed=int(size)) for size in sizes]
    order = rng.permutation(60)
    connection.write(offsets[order].tolist(), [rows[k] for k in order], reservation=1, timeout_s=WAIT_S)
    wanted = np.concatenate([order, order[:20]])
    got = connection.read(offsets[wanted], sizes[wanted], timeout_s=WAIT_S)
    for number, k in enumerate(wanted):
        assert got.range(number, sizes[k]).tobytes() == rows[k].tobytes()
    assert counts["stored"]
    assert counts["fetched"]


@pytest.mark.integration
def test_nothing_to_move_asks_nobody(connection, counts):
    connection.write([], [], reservation=1, timeout_s=WAIT_S)
    connection.write([5], [b""], reservation=1, timeout_s=WAIT_S)
    assert connection.read([7], [0], timeout_s=WAIT_S).range(0, 0).tobytes() == b""
    assert not counts


@pytest.mark.integration
def test_two_clients_of_several_threads(unit, counts):
    def work(connection, number):
        data = noise(MIB, seed=number)
        for _ in range(4):
            connection.write([number * MIB], [data], reservation=1, timeout_s=WAIT_S)
            got = connection.read([number * MIB], [MIB], timeout_s=WAIT_S)
            assert got.range(0, MIB).tobytes() == data.tobytes()

    transports = [EngineTransport(CONFIG) for _ in range(2)]
    connections = [unit.connect("tcp", session=n, transport=each) for n, each in enumerate(transports, 1)]
    outcomes = [in_thread(work, connections[number % 2], number) for number in range(6)]
    assert [outcome() for outcome in outcomes] == [None] * 6
    for each in [*connections, *transports]:
        each.close()
    assert counts["stored"] > 0
    assert counts["fetched"] > 0


@pytest.mark.integration
def test_a_client_without_an_engine_talks_zmq_to_the_same_unit(unit, counts):
    with unit.connect("tcp") as plain:
        plain.write([0], [noise(MIB)], reservation=1, timeout_s=WAIT_S)
        assert plain.read([0], [MIB], timeout_s=WAIT_S).range(0, MIB).tobytes() == noise(MIB).tobytes()
    assert not counts


@pytest.mark.integration
def test_small_payloads_go_in_frames(connection, counts, monkeypatch):
    monkeypatch.setattr(engine_transport, "FROM_BYTES", 1000)
    connection.write([0], [noise(999)], reservation=1, timeout_s=WAIT_S)
    assert connection.read([0], [999], timeout_s=WAIT_S).range(0, 999).tobytes() == noise(999).tobytes()
    assert not counts


# --- fences and stops -----------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_fence_waits_for_no_transfer_and_nothing_lands_after_it(unit, connection, held):
    outcome = in_thread(connection.write, [0], [noise(MIB)], reservation=1, timeout_s=WAIT_S)
    assert held.begun.wait(WAIT_S)
    unit.server.order(FenceSession(unit=UNIT, session=1))
    assert unit.expect(SessionGone).session == 1
    held.go_on.set()
    assert isinstance(outcome(), SessionExpiredError)
    assert not unit.arena.data[:MIB].any()


@pytest.mark.integration
def test_what_is_fetched_of_a_stopped_put_does_not_land(unit, connection, held):
    outcome = in_thread(connection.write, [0], [noise(MIB)], reservation=5, timeout_s=WAIT_S)
    assert held.begun.wait(WAIT_S)
    connection.stop_put(5, WAIT_S)
    held.go_on.set()
    assert "was aborted" in str(outcome())
    assert not unit.arena.data[:MIB].any()


@pytest.mark.integration
def test_a_slot_used_again_after_a_failed_call_spoils_only_its_own_put(unit, connection, held):
    """The client gives up, stops the put, and fills the same slots anew; the unit fetches from them late."""
    outcome = in_thread(connection.write, [0], [noise(MIB)], reservation=5, timeout_s=0.2)
    assert type(outcome()).__name__ == "CallTimeoutError"
    connection.stop_put(5, WAIT_S)
    again = in_thread(connection.write, [2 * MIB], [noise(MIB, seed=2)], reservation=6, timeout_s=WAIT_S)
    held.go_on.set()
    assert again() is None
    assert not unit.arena.data[: 2 * MIB].any()
    assert unit.arena.data[2 * MIB : 3 * MIB].tobytes() == noise(MIB, seed=2).tobytes()


@pytest.mark.integration
def test_a_session_fenced_while_it_fetches_is_told_so(unit, connection, monkeypatch):
    fetch = ClientEngine._fetch

    def late(*call):
        is_there = fetch(*call)
        unit.server.order(FenceSession(unit=UNIT, session=1))
        unit.expect(SessionGone)
        return is_there

    monkeypatch.setattr(ClientEngine, "_fetch", late)
    with pytest.raises(SessionExpiredError):
        connection.read([0], [MIB], timeout_s=WAIT_S)


@pytest.mark.integration
def test_what_was_taken_back_before_it_was_settled_is_not_returned(unit, connection, monkeypatch):
    monkeypatch.setattr(engine_transport, "OFFER_S", -1.0)
    monkeypatch.setattr(engine_transport, "MOST_OFFERS", 1)
    fetch = ClientEngine._fetch
    others = iter([True])

    def late(*call):
        if next(others, False):  # another thread's read takes the only slot there is for them
            connection.read([0], [MIB], timeout_s=WAIT_S)
        return fetch(*call)

    monkeypatch.setattr(ClientEngine, "_fetch", late)
    with pytest.raises(StorageUnitError, match="released the rows of this read before"):
        connection.read([MIB], [MIB], timeout_s=WAIT_S)


# --- who dies, and what is refused ----------------------------------------------------------------------------


CLIENT = """
import sys
from dataplane.storage.transport.mooncake.engine_transport import open_slots
from dataplane.config import DataPlaneConfig

slots = open_slots(DataPlaneConfig(bulk_transport="mooncake"), "127.0.0.1")
slot = slots.take()
slot.payload(1000)[:] = 7
print(slots.offer(slot, 1000).SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.integration
def test_a_client_that_dies_while_its_payload_is_fetched(unit, peer, connection):
    with Process(CLIENT) as client:
        source = pb.Memory.FromString(bytes.fromhex(client.line()))
        assert peer.ask(write=write_of(source))[0].WhichOneof("outcome") == "written"
        assert unit.arena.data[:1000].tobytes() == bytes([7]) * 1000
        client.signal(signal.SIGSTOP)
        os.waitpid(client.pid, os.WUNTRACED)
        peer.send(write=write_of(source, offset=2 * MIB))
        connection.write([0], [noise(MIB)], reservation=2, timeout_s=WAIT_S)  # others are served meanwhile
        client.kill()
    reply, _ = peer.reply()
    assert reply.WhichOneof("outcome") == "not_fetched"
    assert not unit.arena.data[2 * MIB : 2 * MIB + 1000].any()
    reply, _ = peer.ask(write=write_of(source))
    assert "has not been reached" in reply.not_fetched.why


@pytest.mark.integration
def test_a_unit_that_dies_while_a_client_fetches_from_it(unit, transport, monkeypatch):
    connection = unit.connect("tcp", transport=transport)
    fetch = ClientEngine._fetch

    def late(*call):
        unit.server.stop()
        return fetch(*call)

    monkeypatch.setattr(ClientEngine, "_fetch", late)
    with connection, pytest.raises(StorageUnitError):
        connection.read([0], [MIB], timeout_s=WAIT_S)


@pytest.mark.integration
def test_bounds_are_looked_at_before_anything_is_fetched(unit, peer, slots):
    source = source_of(slots, b"abc")
    beyond = unit.arena.backed_bytes - 2
    for write in (
        write_of(source, offset=beyond),
        pb.WriteRanges(offsets=[0], sizes=[2], reservation=1, source=source),
        pb.WriteRanges(offsets=[0, 9], sizes=[3], reservation=1, source=source),
    ):
        reply, _ = peer.ask(write=write)
        assert isinstance(from_wire(reply.error.name, reply.error.facts), StorageUnitError)
    assert not unit.arena.data[:16].any()


@pytest.mark.integration
@pytest.mark.parametrize("wrong", ["tag", "address", "engine", "size", "short tag"])
def test_what_is_not_there_is_not_stored(unit, peer, slots, wrong):
    source = source_of(slots, b"abc" * 100)
    if wrong == "tag":
        source.tag = bytes(TAG_BYTES)
    elif wrong == "short tag":
        source.tag = b"abc"
    elif wrong == "address":
        source.address = 4096
    elif wrong == "engine":
        source.engine = "127.0.0.1:9"
    else:
        source.size = SLOT_BYTES + 1
    reply, _ = peer.ask(write=write_of(source))
    assert reply.not_fetched.why
    assert not unit.arena.data[:1000].any()
    assert peer.ask(b"xyz", write=pb.WriteRanges(offsets=[0], sizes=[3], frame_ranges=[1], reservation=1))[0].written


@pytest.mark.integration
def test_a_unit_without_an_engine_refuses_to_fetch(slots):
    with Unit() as unit, Peer(unit) as peer:
        reply, _ = peer.ask(write=write_of(source_of(slots, b"abc")))
        assert "cannot fetch a payload" in str(from_wire(reply.error.name, reply.error.facts))


@pytest.mark.integration
def test_nobody_settles_what_is_anothers(unit, peer):
    reply, _ = peer.ask(read=pb.ReadRanges(offsets=[0], sizes=[100], fetch=True))
    tag = reply.bytes.source.tag
    refused, _ = peer.ask(session=2, settle=pb.Settle(tag=tag))
    assert refused.WhichOneof("outcome") == "error"
    assert peer.ask(settle=pb.Settle(tag=tag))[0].WhichOneof("outcome") == "settled"
    assert peer.ask(settle=pb.Settle(tag=tag))[0].WhichOneof("outcome") == "error"


@pytest.mark.integration
def test_one_client_has_few_transfers_at_a_time(unit, peer, slots, held, monkeypatch):
    begun, begin = [], Slots.begin
    monkeypatch.setattr(Slots, "begin", lambda *call: begun.append(begin(*call)))
    source = source_of(slots, b"abc")
    for number in range(5):
        peer.send(call=number, write=write_of(source, offset=100 * number))
    assert peer.ask(call=5, read=pb.ReadRanges(offsets=[0], sizes=[1]))[0].call == 5
    for _ in range(3):  # the unit has looked at all five jobs when it has looked at the first one again, and again
        held.begun.clear()
        assert held.begun.wait(WAIT_S)
    assert len(begun) == engine_transport.PEER_TRANSFERS
    held.go_on.set()
    assert sorted(peer.reply()[0].call for _ in range(5)) == [0, 1, 2, 3, 4]
    assert len(begun) == 5


@pytest.mark.integration
def test_a_payload_that_takes_too_long_is_not_waited_for(unit, peer, slots, held, monkeypatch):
    monkeypatch.setattr(engine_transport, "FETCH_S", 0.05)
    reply, _ = peer.ask(write=write_of(source_of(slots, b"abc")))
    assert "did not complete within" in reply.not_fetched.why
    held.go_on.set()
    assert peer.ask(read=pb.ReadRanges(offsets=[0], sizes=[3]))[1] == [bytes(3)]


@pytest.mark.integration
def test_more_jobs_than_are_kept_are_refused(unit, peer, slots, monkeypatch):
    monkeypatch.setattr(engine_transport, "MOST_JOBS", 0)
    reply, _ = peer.ask(write=write_of(source_of(slots, b"abc")))
    assert "queue of fetches is full" in reply.not_fetched.why


# --- what the engine cannot do --------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_payload_that_the_unit_cannot_fetch_is_sent_in_frames(unit, connection, counts, monkeypatch):
    begin = Slots.begin
    refusals = iter([True])

    def refusing(slots, slot, source):
        if next(refusals, False):
            raise engine_transport.EngineError("not today")
        begin(slots, slot, source)

    monkeypatch.setattr(Slots, "begin", refusing)
    slots = unit.server._engine._slots
    unused = len(slots._free) + len(slots._returned)
    data = noise(9 * MIB)
    connection.write([0], [data], reservation=1, timeout_s=WAIT_S)
    wait_until(lambda: len(slots._free) + len(slots._returned) == unused)
    assert unit.arena.data[: len(data)].tobytes() == data.tobytes()
    assert counts["stored"] < -(-len(data) // CHUNK_BYTES)


@pytest.mark.integration
def test_a_payload_that_the_client_cannot_fetch_is_asked_for_in_frames(unit, connection, monkeypatch):
    unit.arena.data[: 9 * MIB] = noise(9 * MIB)
    monkeypatch.setattr(Slots, "fetched", lambda *_: False)
    for sizes in ([9 * MIB], [MIB]):
        got = connection.read([0], sizes, timeout_s=WAIT_S)
        assert got.range(0, sizes[0]).tobytes() == unit.arena.data[: sizes[0]].tobytes()
    assert not unit.server._engine._offered, "a slot that was not fetched from is not settled"


@pytest.mark.integration
def test_without_free_slots_everything_goes_in_frames(unit, connection, counts, monkeypatch):
    monkeypatch.setattr(Slots, "take", lambda _: None)
    data = noise(9 * MIB)
    connection.write([0], [data], reservation=1, timeout_s=WAIT_S)
    assert connection.read([0], [len(data)], timeout_s=WAIT_S).range(0, len(data)).tobytes() == data.tobytes()
    assert not counts


@pytest.mark.integration
def test_an_engine_that_is_not_reached_is_not_used(unit, connection, counts, monkeypatch):
    monkeypatch.setattr(Slots, "try_peer", lambda *_: False)
    with unit.connect("tcp", session=3, transport=EngineTransport(CONFIG)) as other:
        other.write([0], [noise(MIB)], reservation=1, timeout_s=WAIT_S)
        assert other.read([0], [MIB], timeout_s=WAIT_S).range(0, MIB).tobytes() == noise(MIB).tobytes()
        other._transport.close()
    assert not counts


@pytest.mark.integration
def test_closing_ends_a_fetch_under_way(unit, transport, held):
    connection = unit.connect("tcp", transport=transport)
    outcome = in_thread(connection.read, [0], [MIB], timeout_s=WAIT_S)
    assert held.begun.wait(WAIT_S)
    connection.close()
    assert isinstance(outcome(), ClientClosedError)
    held.go_on.set()


@pytest.mark.integration
def test_a_forked_child_has_an_engine_of_its_own(unit, connection, counts):
    connection.write([0], [noise(MIB)], reservation=1, timeout_s=WAIT_S)
    info = unit.info
    child = os.fork()
    if child == 0:
        code = 1
        try:
            transport = EngineTransport(CONFIG)
            mine = type(connection)(info, session=2, token="sesame", transport=transport)
            counts.clear()
            mine.write([2 * MIB], [noise(MIB, seed=2)], reservation=1, timeout_s=WAIT_S)
            got = mine.read([0], [MIB], timeout_s=WAIT_S)
            mine.close()
            transport.close()
            code = 0 if counts["fetched"] and got.range(0, MIB).tobytes() == noise(MIB).tobytes() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert unit.arena.data[2 * MIB : 3 * MIB].tobytes() == noise(MIB, seed=2).tobytes()
    assert connection.read([0], [MIB], timeout_s=WAIT_S).range(0, MIB).tobytes() == noise(MIB).tobytes()


# --- What is left of a transfer engine that ends: slots still written to, memory out of reach,
# threads and files.


@pytest.fixture(autouse=True)
def _engine():
    require_engine()


@pytest.fixture
def end_slots():
    made = open_slots(CONFIG, "127.0.0.1")
    yield made
    made.close(trying=False)


def test_a_slot_with_a_transfer_under_way_is_nobodys(end_slots, monkeypatch):
    slot = end_slots.take()
    slot.transfer = 1
    monkeypatch.setattr(end_slots.engine, "status", lambda _: 0)
    end_slots.give(slot)
    others = [end_slots.take() for _ in range(SLOTS)]
    assert slot not in others
    assert others.count(None) == 1
    monkeypatch.setattr(end_slots.engine, "status", lambda _: -1)
    assert end_slots.take() is None, "a failed transfer may still land for a while"
    slot.rests_until = 0.0
    assert end_slots.take() is slot


def test_closed_memory_is_out_of_reach(end_slots):
    other = open_slots(CONFIG, "127.0.0.1")
    source = other.trial()
    assert end_slots.try_peer(source, time.monotonic() + WAIT_S)
    other.close(trying=False)
    assert not end_slots.try_peer(source, time.monotonic() + WAIT_S)


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
    end_slots = open_slots(CONFIG, "127.0.0.1")
    slot = end_slots.take()
    slot.transfer = 1
    monkeypatch.setattr(end_slots.engine, "status", lambda _: 0)
    end_slots.give(slot)
    with caplog.at_level(logging.WARNING):
        end_slots.close(trying=False)
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
