from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import zmq

from dataplane.errors import InternalError
from tests.alone import alone, leaves_nothing_open
from tests.children import START_S
from tests.directories import client, directory  # noqa: F401
from tests.late import Late
from tests.logs import logged
from tests.processor import costs_little
from workers.directory import DIRECTORY_VARIABLE, Directory, DirectoryClient, DirectoryEntry, EntryState, Kind, server
from workers.directory import client as client_module
from workers.directory.address import WorkerAddress
from workers.directory.registry import Registry
from workers.directory.server import has_ended, this_process
from workers.directory.wire import (
    VERSION,
    End,
    Failed,
    Found,
    Gone,
    Listing,
    Lookup,
    OpenDirectory,
    RegisterProcess,
    Reply,
    decode_reply,
)
from workers.errors import DirectoryLostError, NameInUseError, NameNotFoundError, WorkerLostError
from workers.transport.encoding import encode, error_of

pytestmark = pytest.mark.integration

G0 = WorkerAddress("g", 0)


# --- the registry, without a network ------------------------------------------------------------------------------


def _register(
    registry: Registry, session: bytes, kind: Kind, name: str, *, owned: bool = True, returns: bool = False
) -> list[Any]:
    request = RegisterProcess(
        request_id=1, kind=kind, name=name, endpoints=("e",), facts={"size": 2}, owned=owned, returns=returns
    )
    return registry.register(session, request)


def _lookup(registry: Registry, session: bytes, kind: Kind, name: str, wait_s: float = 0.0) -> list[Any]:
    return registry.lookup(session, Lookup(request_id=7, kind=kind, name=name, wait_s=wait_s), now=100.0)


def _only(effects: list[tuple[bytes, Reply]]) -> tuple[bytes, Reply]:
    assert len(effects) == 1, effects
    return effects[0]


def test_a_name_in_use_is_refused_unless_it_ended() -> None:
    registry = Registry()
    first = _only(_register(registry, b"a", Kind.WORKER_GROUP, "g"))[1]
    refused = _only(_register(registry, b"b", Kind.WORKER_GROUP, "g"))[1]
    assert isinstance(first, Found)
    assert isinstance(refused, Failed)
    assert refused.error == "NameInUseError"
    registry.end(b"a", End(request_id=2, kind=Kind.WORKER_GROUP, name="g", incarnation=None, why="done"))
    again = _only(_register(registry, b"b", Kind.WORKER_GROUP, "g"))[1]
    assert isinstance(again, Found)
    assert again.entries[0].incarnation > first.entries[0].incarnation


def test_kinds_have_names_of_their_own() -> None:
    registry = Registry()
    for kind in Kind:
        assert isinstance(_only(_register(registry, b"a", kind, "n"))[1], Found)


def test_a_lookup_waits_for_the_name_and_is_told_of_its_end() -> None:
    registry = Registry()
    assert _lookup(registry, b"b", Kind.WORKER, "g:0", wait_s=5.0) == []
    assert registry.next_expiry() == 105.0
    answered, waited = _register(registry, b"a", Kind.WORKER, "g:0")
    assert answered[0] == b"a"
    assert waited == (b"b", Found(7, answered[1].entries))
    assert registry.next_expiry() is None
    told = _only(registry.leave(b"a", EntryState.LOST, "died"))
    assert told[0] == b"b"
    assert isinstance(told[1], Gone)
    assert (told[1].entry.state, told[1].entry.why) == (EntryState.LOST, "died")


def test_a_lookup_that_waited_long_enough_fails() -> None:
    registry = Registry()
    _lookup(registry, b"b", Kind.CHANNEL, "c", wait_s=5.0)
    assert registry.expire(104.9) == []
    session, reply = _only(registry.expire(105.0))
    assert session == b"b"
    assert reply == Failed(7, "NameNotFoundError", {"kind": "channel", "name": "c", "waited_s": 5.0})
    assert registry.expire(200.0) == []


def test_what_was_lost_is_said_at_once_and_until_it_is_registered_again() -> None:
    registry = Registry()
    _register(registry, b"a", Kind.WORKER, "g:0")
    registry.leave(b"a", EntryState.LOST, "died")
    reply = _only(_lookup(registry, b"b", Kind.WORKER, "g:0", wait_s=5.0))[1]
    assert reply == Failed(7, "WorkerLostError", {"worker": "g:0", "why": "died"})
    _register(registry, b"c", Kind.WORKER, "g:0")
    assert isinstance(_only(_lookup(registry, b"b", Kind.WORKER, "g:0"))[1], Found)


def test_what_returns_is_waited_for_once_it_is_lost() -> None:
    registry = Registry()
    _register(registry, b"a", Kind.CHANNEL, "c", returns=True)
    _lookup(registry, b"x", Kind.CHANNEL, "c")
    assert isinstance(_only(registry.leave(b"a", EntryState.LOST, "died"))[1], Gone)
    assert _lookup(registry, b"b", Kind.CHANNEL, "c", wait_s=5.0) == []
    _, told = _register(registry, b"d", Kind.CHANNEL, "c", returns=True)
    assert told[0] == b"b"
    registry.leave(b"d", EntryState.ENDED, "closed")
    assert _only(_lookup(registry, b"b", Kind.CHANNEL, "c", wait_s=5.0))[1].error == "WorkerLostError"


def test_what_returns_takes_the_place_of_the_one_before() -> None:
    registry = Registry()
    first = _only(_register(registry, b"a", Kind.CHANNEL, "c", returns=True))[1].entries[0]
    assert _only(_register(registry, b"b", Kind.CHANNEL, "c"))[1].error == "NameInUseError"
    _lookup(registry, b"x", Kind.CHANNEL, "c")
    gone, answered = _register(registry, b"b", Kind.CHANNEL, "c", returns=True)
    assert (gone[0], gone[1].entry.incarnation) == (b"x", first.incarnation)
    assert registry.leave(b"a", EntryState.LOST, "died") == []
    assert _only(_lookup(registry, b"x", Kind.CHANNEL, "c"))[1].entries == answered[1].entries


def test_a_rank_that_a_group_has_not_is_said_at_once() -> None:
    registry = Registry()
    for name in ("g:1", "g:2", "gg:2", "g:²"):
        _lookup(registry, name.encode(), Kind.WORKER, name, wait_s=5.0)
    request = RegisterProcess(
        request_id=1, kind=Kind.WORKER_GROUP, name="g", endpoints=(), facts={"world_size": 2}, owned=False
    )
    waited, registered = registry.register(b"d", request)
    no_such_rank = Failed(7, "NoSuchRankError", {"group": "g", "rank": 2, "size": 2})
    assert registered[0] == b"d"
    assert waited == (b"g:2", no_such_rank)
    assert _only(_lookup(registry, b"x", Kind.WORKER, "g:2:0", wait_s=5.0)) == (b"x", no_such_rank)
    for name in ("g", "g:1", "g:1:7", "g:" + "9" * 9999):
        assert _lookup(registry, b"y", Kind.WORKER, name, wait_s=5.0) == []


def test_the_end_of_a_group_is_that_of_its_workers_and_of_waits_for_them() -> None:
    registry = Registry()
    _register(registry, b"d", Kind.WORKER_GROUP, "g", owned=False)
    _register(registry, b"d", Kind.WORKER_GROUP, "gg", owned=False)
    for name in ("g:0", "g:0:1", "gg:0"):
        _register(registry, name.encode(), Kind.WORKER, name)
    _lookup(registry, b"x", Kind.WORKER, "g:0:1")
    _lookup(registry, b"y", Kind.WORKER, "g:1", wait_s=60.0)
    effects = registry.end(b"d", End(request_id=3, kind=Kind.WORKER_GROUP, name="g", incarnation=None, why="shut down"))
    by_session = dict(effects)
    assert isinstance(by_session[b"x"], Gone)
    assert by_session[b"x"].entry.name == "g:0:1"
    assert isinstance(by_session[b"y"], Failed)
    assert by_session[b"y"].error == "WorkerLostError"
    left = _only(registry.listing(b"x", Listing(request_id=4, kind=Kind.WORKER)))[1]
    assert [entry.name for entry in left.entries] == ["gg:0"]


def test_a_group_registered_again_knows_nothing_of_the_one_before() -> None:
    registry = Registry()
    _register(registry, b"d", Kind.WORKER_GROUP, "g", owned=False)
    _register(registry, b"a", Kind.WORKER, "g:0")
    registry.end(b"d", End(request_id=3, kind=Kind.WORKER_GROUP, name="g", incarnation=None, why="shut down"))
    _register(registry, b"d", Kind.WORKER_GROUP, "g", owned=False)
    assert _lookup(registry, b"x", Kind.WORKER, "g:0", wait_s=60.0) == []


def test_the_end_of_another_incarnation_is_none() -> None:
    registry = Registry()
    entry = _only(_register(registry, b"a", Kind.CHANNEL, "c"))[1].entries[0]
    other = End(request_id=3, kind=Kind.CHANNEL, name="c", incarnation=entry.incarnation + 1, why="")
    assert _only(registry.end(b"a", other)) == (b"a", Found(3))
    assert _only(_lookup(registry, b"b", Kind.CHANNEL, "c"))[1] == Found(7, (entry,))


def test_who_leaves_waits_and_watches_no_more() -> None:
    registry = Registry()
    _register(registry, b"a", Kind.WORKER, "g:0")
    _lookup(registry, b"b", Kind.WORKER, "g:0")
    _lookup(registry, b"b", Kind.WORKER, "g:1", wait_s=60.0)
    assert registry.leave(b"b", EntryState.LOST, "died") == []
    assert registry.next_expiry() is None
    assert registry.leave(b"a", EntryState.LOST, "died") == []


# --- served --------------------------------------------------------------------------------------------------------


@pytest.fixture
def other(directory: Directory) -> Iterator[DirectoryClient]:
    with DirectoryClient(directory.address) as made:
        yield made


def test_what_one_registers_another_finds(client: DirectoryClient, other: DirectoryClient) -> None:
    group = client.register_worker_group("g", {"class": "Actor", "world_size": 2})
    worker = client.register_worker(G0, "tcp://127.0.0.1:1", {"node": 3})
    channel = client.register_channel("c", ("ipc://x", "tcp://y:1"), {"maxsize": 4})
    assert other.lookup_worker_group("g") == group
    assert other.lookup_worker(G0) == worker
    assert other.lookup_channel("c") == channel
    assert group.facts == {"class": "Actor", "world_size": 2}
    assert channel.endpoints == ("ipc://x", "tcp://y:1")
    assert other.listing(Kind.WORKER) == [worker]


def test_names_in_use_and_names_unknown(client: DirectoryClient, other: DirectoryClient) -> None:
    client.register_worker(G0, "e")
    with pytest.raises(NameInUseError, match="g:0"):
        other.register_worker(G0, "f")
    with pytest.raises(NameNotFoundError, match="channel named 'c'"):
        other.lookup_channel("c")
    with pytest.raises(NameNotFoundError, match="g:1"):
        other.lookup_worker(WorkerAddress("g", 1), wait_s=0.05)


def test_a_lookup_waits_until_the_name_comes(client: DirectoryClient, other: DirectoryClient) -> None:
    future = other.ask(Kind.CHANNEL, "late", 30.0)
    assert client.listing(Kind.CHANNEL) == []
    entry = client.register_channel("late", (), {})
    assert future.result(60) == (entry,)


def test_a_closed_client_takes_its_own_with_it(
    directory: Directory, client: DirectoryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_CLOSE_S", 60.0)
    told: list[DirectoryEntry] = []
    heard = threading.Event()
    client.subscribe(lambda entry: (told.append(entry), heard.set()))  # type: ignore[func-returns-value]
    leaving = DirectoryClient(directory.address)
    leaving.register_worker(G0, "e")
    leaving.register_worker_group("g", {})
    client.lookup_worker(G0)
    leaving.close()
    leaving.close()
    assert heard.wait(60)
    assert [(entry.name, entry.state) for entry in told] == [("g:0", EntryState.ENDED)]
    assert client.lookup_worker_group("g").live
    with pytest.raises(WorkerLostError, match="g:0 is gone: it was closed"):
        client.lookup_worker(G0)
    with pytest.raises(DirectoryLostError, match="this client was closed"):
        leaving.lookup_worker_group("g")


def _hold(address: str, pipe: Connection, environment: bool) -> None:
    if environment:
        os.environ[DIRECTORY_VARIABLE] = address
        client = DirectoryClient.from_environment()
    else:
        client = DirectoryClient(address)
    client.register_worker(G0, "e")
    pipe.send(os.getpid())
    pipe.poll(120)


@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_is_noticed(
    directory: Directory, client: DirectoryClient, fatal: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its end: nobody waits to see whether it comes back."""
    monkeypatch.setattr(server, "GRACE_S", 600.0)
    told: list[DirectoryEntry] = []
    heard = threading.Event()
    client.subscribe(lambda entry: (told.append(entry), heard.set()))  # type: ignore[func-returns-value]
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_hold, args=(directory.address, theirs, fatal is signal.SIGKILL), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(START_S)
    pid = ours.recv()
    client.lookup_worker(G0)
    os.kill(pid, fatal)
    assert heard.wait(60)
    process.join()
    assert told[0].state is EntryState.LOST
    assert f"process {pid} died" in told[0].why
    with pytest.raises(WorkerLostError, match=f"g:0 is gone: its process {pid} died"):
        client.lookup_worker(G0, wait_s=60)
    client.register_worker(G0, "f")
    process.close()
    ours.close()


def test_a_directory_that_ends_is_noticed() -> None:
    with Directory.serve() as directory, DirectoryClient(directory.address) as client:
        future = client.ask(Kind.WORKER_GROUP, "never", 300.0)
        client.register_worker_group("g", {})
        directory.close()
        with pytest.raises(DirectoryLostError, match="accepted no connection"):
            future.result(60)
        with pytest.raises(DirectoryLostError, match=directory.address):
            client.lookup_worker_group("g")


def test_no_directory_at_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with DirectoryClient(address) as client, pytest.raises(DirectoryLostError, match=address):
            client.lookup_worker_group("g", wait_s=60)


def test_outside_of_a_job_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    with pytest.raises(LookupError, match=DIRECTORY_VARIABLE):
        DirectoryClient.from_environment()


def test_nothing_is_left_open() -> None:
    alone(_serve_again_and_again)


def _serve_again_and_again() -> None:
    def once() -> None:
        with Directory.serve() as directory, DirectoryClient(directory.address) as client:
            client.register_worker_group("g", {})

    leaves_nothing_open(once)


def test_an_answer_that_comes_as_its_wait_runs_out_is_taken(client: DirectoryClient) -> None:
    assert client._wait(Late(()), "an answer") == ()


def test_waiting_costs_no_processor_time(directory: Directory, client: DirectoryClient) -> None:
    client.register_worker_group("g", {})
    future = client.ask(Kind.WORKER_GROUP, "never", 60.0)

    def wait() -> None:
        with pytest.raises(TimeoutError):
            future.result(1.0)

    assert costs_little(wait)


def test_a_process_that_runs_has_not_ended() -> None:
    assert not has_ended(this_process())


@pytest.mark.parametrize("frames", [[b""], [b"\x81\xa4type\xa1\xff"], [b"\xff", b"two"], [b"\x91" * 5000]])
def test_a_message_that_makes_no_sense_is_dropped(frames: list[bytes]) -> None:
    with Directory("127.0.0.1") as directory, zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(f"tcp://{directory.address}")
        with logged("Malformed message to the directory dropped"):
            peer.send_multipart(frames)
        client = DirectoryClient(directory.address)
        assert client.register_worker_group("g", {}).live
        client.close()


def test_a_defect_in_one_request_is_told_and_the_directory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Directory("127.0.0.1") as directory:
        client = DirectoryClient(directory.address)
        with monkeypatch.context() as patched:
            patched.setattr(Registry, "register", lambda *_: 1 // 0)
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                client.register_worker_group("g", {})
        assert client.register_worker_group("g", {}).live
        client.close()


def test_a_defect_at_one_answer_is_its_call_s(client: DirectoryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(client_module, "error_of", lambda _: 1 // 0)
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            client.lookup_worker_group("g")
    with pytest.raises(NameNotFoundError):
        client.lookup_worker_group("g")


# --- what makes no sense -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_s", [math.inf, math.nan, -1.0, 10**400])
def test_a_wait_without_an_end_is_refused(client: DirectoryClient, wait_s: float) -> None:
    with pytest.raises(ValueError, match="and finite"):
        client.ask(Kind.WORKER, "g:0", wait_s)
    assert client.listing(Kind.WORKER) == []


@pytest.mark.parametrize("wait_s", [math.inf, math.nan, -1.0, 1e18, 1e308])
def test_no_wait_of_a_peer_ends_the_directory(directory: Directory, client: DirectoryClient, wait_s: float) -> None:
    lookup = {"type": "Lookup", "request_id": 1, "kind": "worker", "name": "g:0", "wait_s": wait_s}
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(f"tcp://{directory.address}")
        peer.send(encode(OpenDirectory(this_process())))
        peer.send(msgspec.msgpack.encode(lookup))
        peer.send(encode(Listing(request_id=2, kind=Kind.WORKER)))
        assert peer.poll(60_000)
        assert decode_reply(peer.recv()) == Found(2)
    assert client.listing(Kind.WORKER) == []


@pytest.mark.parametrize("name", ["", "a:b"])
def test_a_group_whose_name_no_address_can_have_is_not_registered(client: DirectoryClient, name: str) -> None:
    with pytest.raises(ValueError, match="must not be empty and must not contain"):
        client.register_worker_group(name, {})
    assert client.listing(Kind.WORKER_GROUP) == []


def test_a_client_of_another_version_is_refused_and_others_are_not(
    directory: Directory, client: DirectoryClient
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(f"tcp://{directory.address}")
        peer.send(encode(OpenDirectory(this_process(), version=VERSION + 1)))
        peer.send(encode(Listing(request_id=1, kind=Kind.WORKER)))
        assert peer.poll(60_000)
        reply = decode_reply(peer.recv())
    assert isinstance(reply, Failed)
    assert str(error_of(reply)) == (
        f"client has protocol version {VERSION + 1}, the service has {VERSION}; install the same release on both"
    )
    assert client.listing(Kind.WORKER) == []


def test_arguments_that_cannot_be_sent_are_refused_at_the_call(client: DirectoryClient) -> None:
    with pytest.raises(TypeError, match="unsupported"):
        client.register_worker_group("g", {"size": object()})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="Expected"):
        client.register_worker_group("g", {"size": {}})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="Expected `str`"):
        client.lookup_worker_group(5)  # type: ignore[arg-type]
    assert client.register_worker_group("g", {}).live


def test_a_defect_in_one_step_leaves_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    with Directory("127.0.0.1") as directory, DirectoryClient(directory.address) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Registry, "expire", lambda *_: 1 // 0)
            with logged("Directory failed in _expire"):
                assert client.register_worker_group("g", {}).live
        with pytest.raises(NameNotFoundError):
            client.lookup_worker_group("h", wait_s=0.01)
