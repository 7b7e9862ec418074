""""""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from pathlib import Path

import pytest
import zmq

from dataplane.config import MIB
from dataplane.core.addresses import boot_id
from dataplane.core.file_locks import new_session_lock_name, sweep
from dataplane.core.metrics import Op
from dataplane.core.private_dir import own_path
from dataplane.errors import SessionExpiredError, StorageUnitError
from dataplane.ledger.commands import FenceSession, SessionAlive, SessionAttached, SessionGone
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage import server
from dataplane.storage import sessions as sessions_module
from dataplane.storage.client import UnitConnection
from dataplane.storage.server import FEW_RANGES, BulkServer
from dataplane.storage.session_lock import PeerLock, SessionLock
from dataplane.storage.transport.request_chunks import MAX_HEADER_BYTES
from tests.logs import logged
from tests.storage.unit_under_test import TOKEN, UNIT, WAIT_S, Peer, Unit, changed, noise, read, refused, write
from tests.tls_hello import hello


@pytest.fixture
def unit():
    with Unit() as made:
        yield made


@pytest.fixture
def peer(unit):
    with Peer(unit) as made:
        yield made


def prove(unit, peer, lock, *, session=1, seen=None):
    """The handshake of a local client, by hand; `seen` replaces the proof."""
    challenge = peer.ask(session=session, attach=pb.Attach(lock_path=str(lock.path), boot_id=boot_id()))[0].challenge
    assert challenge.local, challenge.why
    with open(challenge.arena_path, "rb") as arena:
        arena.seek(challenge.offset)
        found = arena.read(challenge.length)
    return peer.ask(session=session, proof=pb.AttachProof(seen=found if seen is None else seen))


@pytest.mark.integration
def test_bytes_go_in_and_come_out(unit, peer):
    answer = peer.ask(b"ab", b"cdef", call=9, write=write((0, 2), (100, 1), (200, 3), frames=[1, 2]))
    assert (answer[0].call, answer[0].written.size) == (9, 6)
    assert unit.arena.data[200:203].tobytes() == b"def"
    reply, payload = peer.ask(call=10, read=read((200, 3), (0, 2), (100, 1)))
    assert (reply.call, reply.bytes.size, payload) == (10, 6, [b"defabc"])
    assert peer.ask(read=read((0, 0)))[1] == [b""]
    assert peer.ask(write=write())[0].written.size == 0


@pytest.mark.integration
def test_the_last_backed_byte_is_the_last(unit, peer):
    backed = unit.arena.backed_bytes
    assert peer.ask(b"x", write=write((backed - 1, 1)))[0].written.size == 1
    assert peer.ask(read=read((backed, 0)))[1] == [b""]


@pytest.mark.integration
@pytest.mark.parametrize(
    "ranges",
    [(16 * MIB, 1), (16 * MIB - 1, 2), (2**64 - 1, 1), (1, 2**64 - 1), (2**63, 2**63), (20 * MIB, 0)],
)
def test_outside_of_what_is_backed_nothing_is_touched(unit, peer, ranges):
    before = unit.arena.data[: 16 * MIB].sum()
    error = refused(peer.ask(b"x" * 2, write=write(ranges)))
    assert "outside" in str(error)
    assert error.unit == UNIT
    refused(peer.ask(read=read((0, 1), ranges)))
    assert unit.arena.data[: 16 * MIB].sum() == before


@pytest.mark.integration
def test_too_much_at_once_is_refused(peer, monkeypatch):
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1000)
    assert "1,001 bytes" in str(refused(peer.ask(read=read((0, 500), (0, 501)))))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("payload", "request_"),
    [
        ((b"abc",), write((0, 2))),
        ((b"a",), write((0, 2))),
        ((b"ab",), write((0, 2), (8, 2))),
        ((b"ab", b"cd", b"ef"), write((0, 2), (8, 2))),
        ((), write((0, 2))),
        ((b"ab",), write((0, 2), frames=[])),
        ((b"ab", b""), write((0, 2), frames=[1, 0])),
        ((b"ab",), write((0, 2), frames=[2])),
        ((b"abc",), write((0, 2), (8, 2), frames=[2])),
        ((b"ab",), pb.WriteRanges(offsets=[0], sizes=[1, 1], frame_ranges=[2])),
    ],
)
def test_a_torn_write_is_refused_and_the_next_request_served(peer, payload, request_):
    error = refused(peer.ask(*payload, write=request_))
    assert type(error).__name__ == "StorageUnitError"
    assert peer.ask(b"ok", write=write((64, 2)))[0].written.size == 2


@pytest.mark.integration
def test_nothing_beyond_the_ranges_is_touched_by_a_long_frame(unit, peer):
    refused(peer.ask(b"x" * 100, write=write((0, 10))))
    assert not unit.arena.data[10:100].any()


@pytest.mark.integration
@pytest.mark.parametrize("token", [None, "wrong", TOKEN + " "])
def test_who_does_not_know_the_token_is_hung_up_on(unit, token):
    events = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with Peer(unit, token) as stranger:
        stranger.socket.disconnect(unit.server.endpoints[0])
        monitor = stranger.socket.get_monitor_socket(events)
        stranger.socket.connect(unit.server.endpoints[0])
        assert monitor.poll(WAIT_S * 1000)
        stranger.socket.disable_monitor()
        monitor.close()
    refused_so_far = unit.server._counts.verbs.get("handshake", Op()).outcomes
    assert set(refused_so_far) == ({"ok", "AuthenticationError"} if token else {"ok"})


@pytest.mark.integration
def test_another_epoch_is_refused(unit, peer):
    error = refused(peer.ask(b"x", write=write((0, 1)), epoch=2))
    assert (type(error).__name__, error.expected_epoch, error.got_epoch) == ("ServiceRestartedError", 2, 3)
    assert unit.arena.data[0] == 0


@pytest.mark.integration
def test_another_protocol_version_is_refused_by_name(peer):
    error = refused(peer.ask(protocol_version=99, attach=pb.Attach()))
    assert (type(error).__name__, error.client_version) == ("ProtocolVersionError", 99)


@pytest.mark.integration
def test_garbage_is_dropped_and_the_server_goes_on(peer):
    peer.socket.send_multipart([b"\xff\xff\xff", b"more"])
    assert peer.ask(b"x", call=8, write=write((0, 1)))[0].call == 8
    peer.socket.send(b"")
    assert type(refused(peer.reply())).__name__ == "ProtocolVersionError"


@pytest.mark.integration
def test_malformed_messages_are_one_line_in_ten_seconds(peer, caplog):
    for _ in range(5):
        peer.socket.send_multipart([b"\xff\x1b[2J" * 100, b"more"])
    assert peer.ask(b"x", call=8, write=write((0, 1)))[0].call == 8
    (line,) = [each for each in caplog.messages if "not a valid BulkRequest" in each]
    assert line.startswith(
        "Storage unit 7: dropped a message that is not a valid BulkRequest: it begins with b'\\xff\\x1b"
    )
    assert len(line) < 200


@pytest.mark.integration
def test_a_tls_handshake_is_named_in_the_log(unit):
    open_unit = BulkServer(unit.arena, epoch=3, token=None, report=unit.reports.put, tcp_host="127.0.0.1")
    open_unit.start()
    port = int(open_unit.endpoints[1].rpartition(":")[2])
    try:
        with (
            logged("dropped a message that is not a valid BulkRequest: it looks like a TLS handshake"),
            socket.create_connection(("127.0.0.1", port)) as peer,
        ):
            peer.sendall(hello())
    finally:
        open_unit.stop()


@pytest.mark.integration
def test_a_request_without_a_verb_is_refused(peer):
    assert "no verb" in str(refused(peer.ask()))


@pytest.mark.integration
def test_a_defect_is_logged_with_its_verb_and_answered(unit, peer, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(BulkServer, "_read", broken)
    with caplog.at_level(logging.ERROR):
        error = refused(peer.ask(read=read((0, 1))))
    assert type(error).__name__ == "InternalError"
    assert "read of session 1" in caplog.text
    assert "a bug" in caplog.text
    assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1


@pytest.mark.integration
def test_a_fenced_session_is_refused_for_good(unit, peer):
    assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1
    for _ in range(2):
        unit.server.order(FenceSession(unit=UNIT, session=1))
        assert unit.expect(SessionGone).session == 1
    for verb in (
        {"write": write((0, 1))},
        {"read": read((0, 1))},
        {"attach": pb.Attach()},
        {"proof": pb.AttachProof()},
    ):
        error = refused(peer.ask(b"y", **verb))
        assert (type(error).__name__, error.session) == ("SessionExpiredError", 1)
    assert unit.arena.data[0] == ord("x")
    assert peer.ask(b"z", session=2, write=write((0, 1)))[0].written.size == 1


@pytest.mark.integration
def test_a_stopped_puts_writes_are_refused_and_all_others_served(unit, peer):
    def put(reservation, data, session=1):
        request = write((0, len(data)))
        request.reservation = reservation
        return peer.ask(data, session=session, write=request)

    assert put(8, b"early")[0].written.size == 5
    for _ in range(2):
        assert peer.ask(call=4, stop=pb.StopPut(reservation=8))[0].WhichOneof("outcome") == "stopped"
    error = refused(put(8, b"late!"))
    assert (type(error).__name__, error.unit) == ("StorageUnitError", UNIT)
    assert "put 8 of session 1 was aborted" in str(error)
    assert unit.arena.data[:5].tobytes() == b"early"
    for call_id, session in ((7, 1), (9, 1), (8, 2)):
        assert put(call_id, b"other", session)[0].written.size == 5
    unit.server.order(FenceSession(unit=UNIT, session=1))
    unit.expect(SessionGone)
    assert type(refused(peer.ask(stop=pb.StopPut(reservation=9)))).__name__ == "SessionExpiredError"


@pytest.mark.integration
def test_a_fenced_sessions_stops_are_forgotten(unit):
    sessions = sessions_module.Sessions(unit.arena, lock_directories=())
    sessions.stop_put(1, 8)
    sessions.stop_put(2, 8)
    assert sessions.fence(1)
    assert not sessions.is_stopped(1, 8), "it is refused as a whole"
    assert sessions.is_stopped(2, 8)
    sessions.close()


@pytest.mark.integration
def test_what_is_kept_of_fenced_sessions_is_bounded_by_those_that_live(unit):
    sessions = sessions_module.Sessions(unit.arena, lock_directories=())
    for session_id in range(3, 2000, 2):
        assert sessions.fence(session_id, first=session_id - 1, last=session_id)
    assert sessions._fenced.ranges == 1
    for session_id in (2, 3, 1000, 1999):
        with pytest.raises(SessionExpiredError):
            sessions.admit(session_id)
    for session_id in (1, 2000):
        sessions.admit(session_id)
    sessions.close()


@pytest.mark.integration
def test_reports_carry_the_unit_of_the_order(unit):
    unit.server.order(FenceSession(unit=41, session=1))
    assert unit.expect(SessionGone).unit == 41


@pytest.mark.integration
def test_a_session_with_proof_is_attached_and_then_alive_until_its_lock_is_free(unit, peer):
    lock = SessionLock.create()
    assert prove(unit, peer, lock)[0].WhichOneof("outcome") == "attached"
    attached = unit.expect(SessionAttached)
    assert (attached.unit, attached.session, attached.lock_path) == (UNIT, 1, str(lock.path))
    unit.server.order(FenceSession(unit=UNIT, session=1))
    assert unit.expect(SessionAlive).session == 1
    assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1, "alive, so not fenced"
    lock.close()
    unit.server.order(FenceSession(unit=UNIT, session=1))
    assert unit.expect(SessionGone).session == 1
    assert "SessionExpired" in type(refused(peer.ask(b"x", write=write((0, 1))))).__name__


@pytest.mark.integration
def test_a_unit_that_was_restarted_finds_the_locks_of_those_attached_before(unit, peer):
    """It has not seen them attach: the ledger tells it where their locks are."""
    lock = SessionLock.create()
    for _ in range(2):
        unit.server.order(FenceSession(unit=UNIT, session=1, lock_path=str(lock.path)))
        assert unit.expect(SessionAlive).session == 1
    assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1, "alive, so not fenced"
    lock.close()
    unit.server.order(FenceSession(unit=UNIT, session=1, lock_path=str(lock.path)))
    assert unit.expect(SessionGone).session == 1
    unit.server.order(FenceSession(unit=UNIT, session=2, lock_path=str(lock.path)))
    assert unit.expect(SessionGone).session == 2, "its lock is not there any more"


@pytest.mark.integration
@pytest.mark.parametrize("trouble", [errno.EMFILE, errno.ENFILE, errno.EIO])
def test_a_lock_that_cannot_be_looked_at_proves_nothing(unit, peer, monkeypatch, caplog, trouble):
    """A restarted unit that has no descriptor left must not take the living for dead: their bytes would be reused."""
    real = os.open

    def fail(path, *arguments, **settings):
        if str(path).endswith(".lock"):
            raise OSError(trouble, os.strerror(trouble))
        return real(path, *arguments, **settings)

    with SessionLock.create() as lock:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            unit.server.order(FenceSession(unit=UNIT, session=1, lock_path=str(lock.path)))
            assert unit.expect(SessionAlive).session == 1
            asked = pb.Attach(lock_path=str(lock.path), boot_id=boot_id())
            challenge = peer.ask(session=2, attach=asked)[0].challenge
            assert (challenge.local, os.strerror(trouble) in challenge.why) == (False, True)
        assert "cannot determine whether session 1 still runs" in caplog.text
        assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1, "alive, so not fenced"
    unit.server.order(FenceSession(unit=UNIT, session=1, lock_path=str(lock.path)))
    assert unit.expect(SessionGone).session == 1


@pytest.mark.integration
def test_attaching_twice_with_one_lock_is_fine_and_with_two_is_not(unit, peer):
    with SessionLock.create() as lock, SessionLock.create() as other:
        for _ in range(2):
            prove(unit, peer, lock)
            unit.expect(SessionAttached)
        request = pb.Attach(lock_path=str(other.path), boot_id=boot_id())
        assert "another lock" in str(refused(peer.ask(attach=request)))


@pytest.mark.integration
def test_a_wrong_proof_leaves_the_session_remote(unit, peer):
    with SessionLock.create() as lock:
        assert "does not map" in str(refused(prove(unit, peer, lock, seen=bytes(32))))
        assert "without a pending challenge" in str(refused(peer.ask(proof=pb.AttachProof(seen=bytes(32)))))
        unit.server.order(FenceSession(unit=UNIT, session=1))
        assert unit.expect(SessionGone).session == 1, "not attached: fenced though the lock is held"


@pytest.mark.integration
def test_a_fence_between_challenge_and_proof_wins(unit, peer):
    with SessionLock.create() as lock:
        peer.ask(attach=pb.Attach(lock_path=str(lock.path), boot_id=boot_id()))
        unit.server.order(FenceSession(unit=UNIT, session=1))
        unit.expect(SessionGone)
        assert "SessionExpired" in type(refused(peer.ask(proof=pb.AttachProof(seen=bytes(32))))).__name__


@pytest.mark.integration
@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"lock_path": ""}, "requested a remote connection"),
        ({"boot_id": "elsewhere"}, "another host"),
        ({"lock_path": "/etc/passwd"}, "directory"),
    ],
)
def test_who_cannot_be_local_stays_remote(unit, peer, facts, why):
    with SessionLock.create() as lock:
        request = pb.Attach(**({"lock_path": str(lock.path), "boot_id": boot_id()} | facts))
        challenge = peer.ask(attach=request)[0].challenge
        assert not challenge.local
        assert why in challenge.why
        assert challenge.arena_path == ""


@pytest.mark.integration
def test_an_arena_on_a_network_is_never_mapped(monkeypatch):
    monkeypatch.setattr(sessions_module, "is_local", lambda _: False)
    with Unit() as unit, Peer(unit) as peer, SessionLock.create() as lock:
        challenge = peer.ask(attach=pb.Attach(lock_path=str(lock.path), boot_id=boot_id()))[0].challenge
        assert (challenge.local, challenge.why) == (False, "the arena is not on a local file system")


@pytest.mark.integration
def test_a_forked_child_that_closes_everything_hurts_nobody(unit, peer):
    child = os.fork()
    if child == 0:
        unit.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert unit.arena.path.exists()
    assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1


@pytest.mark.integration
def test_descriptors_of_sessions_that_ended_do_not_pile_up(unit, peer):
    with SessionLock.create() as lock:
        prove(unit, peer, lock, session=1)
        unit.expect(SessionAttached)
    with SessionLock.create() as lock:
        prove(unit, peer, lock, session=2)
        assert unit.expect(SessionGone).session == 1
        assert unit.expect(SessionAttached).session == 2


@pytest.mark.integration
def test_an_attach_before_the_unit_has_its_id_waits(unit):
    with Unit(unit_id=0) as early, Peer(early) as peer, SessionLock.create() as lock:
        peer.send(call=4, attach=pb.Attach(lock_path=str(lock.path), boot_id=boot_id()))
        assert peer.ask(b"x", call=5, write=write((0, 1)))[0].call == 5, "the attach is not answered yet"
        early.server.unit = UNIT
        reply, _ = peer.reply()
        assert (reply.call, reply.challenge.local) == (4, True)


@pytest.mark.integration
def test_a_report_that_fails_is_logged_and_the_server_goes_on(unit, peer, monkeypatch, caplog):
    def broken(_):
        raise ConnectionError("the controller is gone")

    monkeypatch.setattr(unit.server, "_report", broken)
    with SessionLock.create() as lock:
        assert type(refused(prove(unit, peer, lock))).__name__ == "InternalError"
    unit.server.order(FenceSession(unit=UNIT, session=9))
    assert peer.ask(b"x", write=write((0, 1)))[0].written.size == 1
    assert "the controller is gone" in caplog.text
    assert unit.server.alive


@pytest.mark.integration
def test_the_thread_does_not_die_in_silence(unit, peer, monkeypatch, caplog):
    """The unit has a token: its monitor, too, is closed by `stop`."""
    monkeypatch.setattr(BulkServer, "_serve_messages", lambda _: 1 / 0)
    monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.send(read=read((0, 1)))
    assert monitor.poll(WAIT_S * 1000), "peers find the socket closed"
    monitor.close()
    assert "Bulk server of storage unit 7 failed" in caplog.text
    unit.server.stop()
    assert not unit.server.alive


@pytest.mark.integration
def test_stopping_twice_and_ordering_after_is_harmless():
    unit = Unit()
    unit.close()
    unit.server.stop()
    unit.server.order(FenceSession(unit=UNIT, session=1))
    assert not unit.server.alive
    assert unit.reports.empty()


@pytest.mark.integration
def test_tcp_beyond_loopback_needs_a_guard(unit):
    open_server = BulkServer(unit.arena, epoch=1, token=None, report=unit.reports.put, tcp_host="0.0.0.0")
    with pytest.raises(ValueError, match="loopback"):
        open_server.start()


@pytest.mark.integration
def test_no_token_serves_who_gives_none_and_refuses_who_gives_one(unit):
    open_unit = BulkServer(unit.arena, epoch=3, token=None, report=unit.reports.put)
    open_unit.start()
    open_unit.unit = UNIT
    try:
        info = changed(unit.info, endpoints=open_unit.endpoints)
        with UnitConnection(info, session=1, timeout_s=WAIT_S) as connection:
            connection.write([0], [b"x"], reservation=1, timeout_s=WAIT_S)
        with pytest.raises(StorageUnitError, match="cannot be reached"):
            UnitConnection(info, session=1, token=TOKEN, timeout_s=WAIT_S)
    finally:
        open_unit.stop()


@pytest.mark.integration
def test_replies_do_not_refer_to_the_arena(unit, peer):
    """A reply that waits to be received keeps its bytes though the arena's change meanwhile."""
    unit.arena.data[: 2 * MIB] = 1
    for _ in range(4):
        peer.send(read=read((0, 2 * MIB)))
    peer.send(bytes(2 * MIB), call=2, write=write((0, 2 * MIB)))
    answers = [peer.reply() for _ in range(5)]
    assert answers[-1][0].written.size == 2 * MIB
    assert all(payload == b"\1" * (2 * MIB) for _, (payload,) in answers[:-1])


@pytest.mark.integration
def test_many_short_ranges_come_in_their_order(unit, peer):
    unit.arena.data[:MIB] = noise(MIB)
    ranges = [(at, 5) for at in range(MIB - 5, 0, -997)]
    assert len(ranges) > FEW_RANGES
    _, (payload,) = peer.ask(read=read(*ranges))
    assert payload == b"".join(unit.arena.data[at : at + size].tobytes() for at, size in ranges)


@pytest.mark.integration
def test_a_header_too_large_is_dropped_unread(unit, peer):
    peer.send(call=1, read=pb.ReadRanges(offsets=[0] * MAX_HEADER_BYTES, sizes=[0]))
    peer.send(call=2, read=read((0, 1)))
    reply, _ = peer.reply()
    assert reply.call == 2


@pytest.mark.integration
def test_a_fault_outside_of_a_request_is_logged_and_the_thread_goes_on(unit, peer, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(unit.server, "_execute_and_reply", lambda peer, request: 1 // 0)
        with logged("a message could not be handled; the server continues", times=2):
            peer.send(b"and a frame", call=1, read=read((0, 1)))
            peer.send(call=2, read=read((0, 1)))
    assert peer.ask(call=3, read=read((0, 1)))[0].call == 3


# --- session lock


SHM = own_path("/dev/shm")


@pytest.fixture
def lock():
    with SessionLock.create() as made:
        yield made


def test_a_lock_is_held_until_closed(lock):
    assert re.fullmatch(rf"/dev/shm/tq-{os.geteuid()}/tq-session-[0-9a-f]{{32}}\.lock", str(lock.path))
    peer = PeerLock.open(str(lock.path), directories=[SHM])
    assert isinstance(peer, PeerLock)
    assert peer.held()
    lock.close()
    lock.close()
    assert not lock.held
    assert not peer.held()
    assert not lock.path.exists()
    peer.bury()
    peer.drop()


@pytest.mark.integration
def test_the_name_stays_while_a_forked_child_holds_the_lock(lock):
    """A storage unit that is restarted meanwhile finds by the name that somebody may still have views."""
    end = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(end[0], 1)
        os._exit(0)
    lock.close()
    peer = PeerLock.open(str(lock.path), directories=[SHM])
    assert isinstance(peer, PeerLock)
    assert peer.held()
    os.write(end[1], b"x")
    os.waitpid(child, 0)
    assert not peer.held()
    peer.bury()
    assert not lock.path.exists()
    for fd in end:
        os.close(fd)


@pytest.mark.integration
def test_a_forked_child_cannot_drop_the_parents(lock):
    peer = PeerLock.open(str(lock.path), directories=[SHM])
    assert isinstance(peer, PeerLock)
    child = os.fork()
    if child == 0:
        lock.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert lock.path.exists()
    assert peer.held()
    peer.drop()


def test_a_path_from_the_wire_is_opened_only_if_it_is_a_session_lock(lock, tmp_path):
    def why(path, *directories):
        answer = PeerLock.open(str(path), directories=directories or [SHM])
        assert isinstance(answer, str)
        return answer

    assert "directory" in why("/etc/passwd")
    assert "directory" in why(SHM / "tq-session-x.lock")
    assert "directory" in why(f"{SHM}/../{SHM.name}/{lock.path.name}")
    assert "directory" in why(lock.path, tmp_path)
    assert "directory" in why(lock.path.name)
    assert "local file system" in why(Path("/proc") / lock.path.name, Path("/proc"))
    assert "not found" in why(SHM / new_session_lock_name())
    link = tmp_path / new_session_lock_name()
    link.symlink_to(lock.path)
    assert "not found" in why(link, tmp_path)
    unheld = tmp_path / new_session_lock_name()
    unheld.write_bytes(b"")
    assert "not held" in why(unheld, tmp_path)


def test_sweep_removes_locks_of_the_dead_only(tmp_path):
    dead = tmp_path / new_session_lock_name()
    dead.write_bytes(b"")
    with SessionLock.create(tmp_path) as held:
        assert sweep(tmp_path) == [dead]
        assert held.path.exists()


def test_boot_id_is_one_line():
    assert re.fullmatch(r"[0-9a-f-]{36}", boot_id())
