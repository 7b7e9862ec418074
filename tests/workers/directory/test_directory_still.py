"""A directory, or a process that it knows, that stands still or is cut off: judged again when it answers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import zmq

from tests.children import START_S
from tests.directories import client, directory  # noqa: F401
from tests.restarts import Proxy, wait_until
from workers.directory import Directory, DirectoryClient, DirectoryEntry, EntryState, Kind, server
from workers.directory import client as client_module
from workers.directory.address import WorkerAddress
from workers.directory.registry import Registry
from workers.directory.server import this_process
from workers.directory.wire import Lookup, OpenDirectory, RegisterProcess
from workers.errors import DirectoryLostError, NameInUseError, WorkerLostError
from workers.transport.encoding import encode

pytestmark = pytest.mark.integration

G0 = WorkerAddress("g", 0)


def _serve_until_told(pipe: Connection) -> None:
    _hurry()
    with Directory.serve() as directory:
        pipe.send(directory.address)
        pipe.poll(300)


def _hurry() -> None:
    server.HEARTBEAT_MS, server.SILENCE_MS, server.GRACE_S = 100, 500, 60.0


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frozen]:
    """A directory in a process of its own, and clients that notice soon that it says nothing."""
    monkeypatch.setattr(client_module, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(client_module, "SILENCE_MS", 500)
    made = Frozen()
    yield made
    made.close()


class Frozen:
    """`stop` and `go_on` are its process's."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve_until_told, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(START_S)
        self.address = self._pipe.recv()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        self._pipe.send("end")
        self._process.join(60)
        self._process.close()
        self._pipe.close()


def _until_taken(client: DirectoryClient) -> None:
    """Its silence was noticed, and the kernel took another connection for the process that stands still. It stays so:
    no answer from before comes over that connection."""

    def since() -> float | None:
        return client._away_since if client._accepted else None

    while True:
        noticed = wait_until(since, "the silence is noticed")
        time.sleep(1.0)
        if since() == noticed:
            return


def test_what_is_asked_while_the_directory_stands_still_is_answered_when_it_goes_on(
    frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DirectoryClient(frozen.address) as client, DirectoryClient(frozen.address) as other:
        told: list[DirectoryEntry] = []
        client.subscribe(told.append)
        mine = client.register_worker(G0, "e")
        assert other.listing(Kind.WORKER_GROUP) == [], "it is connected"
        waiting = other.ask(Kind.WORKER_GROUP, "late", 60.0)
        frozen.stop()
        for each in (client, other):
            _until_taken(each)
        monkeypatch.setattr(client_module, "AWAY_S", 0.2)
        asked = client._ask_register(Kind.WORKER_GROUP, "late", (), {}, owned=False)
        again = other.ask(Kind.WORKER, "g:0", 0.0)
        time.sleep(1.0)
        assert not asked.done()
        monkeypatch.undo()
        frozen.go_on()
        assert waiting.result(60) == asked.result(60)
        (found,) = again.result(60)
        assert found.name == "g:0"
        assert found.incarnation == mine.incarnation or told


def test_a_directory_that_stood_still_for_longer_is_lost_until_it_answers(
    frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DirectoryClient(frozen.address) as client:
        client.register_worker_group("g", {})
        waiting = client.ask(Kind.WORKER_GROUP, "never", 600.0)
        frozen.stop()
        _until_taken(client)
        with monkeypatch.context() as hurried:
            hurried.setattr(client_module, "AWAY_S", 0.2)
            hurried.setattr(client_module, "STILL_S", 1.0)
            with pytest.raises(DirectoryLostError, match="sent nothing for 1 s"):
                waiting.result(60)
        with pytest.raises(DirectoryLostError, match="sent nothing"):
            client.lookup_worker_group("g")
        frozen.go_on()
        wait_until(lambda: client._lost_error is None, "it is found again")
        assert client.lookup_worker_group("g").live


@pytest.fixture
def apart(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What lies between the directory and some of its clients, which wait for it for as long as a test takes."""
    monkeypatch.setattr(client_module, "AWAY_S", 600.0)
    monkeypatch.setattr(client_module, "_CLOSE_S", 60.0)
    proxy = Proxy(int(directory.address.rpartition(":")[2]))
    yield proxy
    proxy.close()


def _cut_for_long(proxy: Proxy, watching: DirectoryClient) -> None:
    """Until the directory gives up who is behind it."""
    gone = threading.Event()
    leave = watching.subscribe(lambda entry: gone.set())
    watching.lookup_worker(G0)
    proxy.cut()
    assert gone.wait(60)
    leave()


def test_a_process_that_was_given_up_learns_it_and_is_registered_anew(
    directory: Directory, client: DirectoryClient, apart: Proxy
) -> None:
    with DirectoryClient(f"127.0.0.1:{apart.port}") as other:
        told: list[DirectoryEntry] = []
        other.subscribe(told.append)
        mine = other.register_worker(G0, "e", {"rank": 3})
        _cut_for_long(apart, client)
        with pytest.raises(WorkerLostError, match="its connection broke"):
            client.lookup_worker(G0)
        waiting = other.ask(Kind.WORKER_GROUP, "late", 60.0)
        apart.heal()
        wait_until(lambda: len(told) == 2, "it learns it")
        lost, anew = told
        assert (lost.incarnation, lost.state, lost.name) == (mine.incarnation, EntryState.LOST, "g:0")
        assert "silent for too long" in lost.why
        assert anew.live
        assert anew.incarnation > mine.incarnation
        assert client.lookup_worker(G0) == anew
        assert (anew.endpoints, anew.facts) == (("e",), {"rank": 3})
        late = client.register_worker_group("late", {})
        assert waiting.result(60) == (late,)
    with pytest.raises(WorkerLostError, match="it was closed"):
        client.lookup_worker(G0)


def test_a_process_whose_name_was_taken_meanwhile_is_told_so(
    directory: Directory, client: DirectoryClient, apart: Proxy
) -> None:
    with DirectoryClient(f"127.0.0.1:{apart.port}") as other:
        told: list[DirectoryEntry] = []
        other.subscribe(told.append)
        other.register_worker(G0, "e")
        _cut_for_long(apart, client)
        taken = client.register_worker(G0, "f")
        apart.heal()
        wait_until(lambda: len(told) == 2, "it learns it")
        assert [entry.state for entry in told] == [EntryState.LOST, EntryState.LOST]
        assert other.lookup_worker(G0) == taken


def test_what_was_asked_before_a_short_break_is_answered_once(
    directory: Directory, client: DirectoryClient, apart: Proxy
) -> None:
    with DirectoryClient(f"127.0.0.1:{apart.port}") as other:
        other.register_worker_group("before", {})
        apart.pause()
        asked = [other._ask_register(Kind.WORKER_GROUP, "g", (), {}, owned=False) for _ in range(2)]
        apart.cut()
        apart.heal()
        (entry,) = asked[0].result(60)
        assert entry.live
        with pytest.raises(NameInUseError):
            asked[1].result(60)
        assert client.lookup_worker_group("g") == entry


def test_a_registration_that_nobody_waits_for_any_more_is_undone(
    directory: Directory, client: DirectoryClient, apart: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DirectoryClient(f"127.0.0.1:{apart.port}") as other:
        wait_until(lambda: other._away_since is None, "it is connected")
        apart.pause()
        with monkeypatch.context() as hurried:
            hurried.setattr(client_module, "ANSWER_S", 0.1)
            with pytest.raises(DirectoryLostError, match=r"waited 0.1 s for registering group 'g'"):
                other.register_worker_group("g", {})
        apart.heal()

        def is_free() -> bool:
            try:
                return client.register_worker_group("g", {}).live
            except NameInUseError:
                return False

        wait_until(lambda: not other._calls, "the late answer came")
        wait_until(is_free, "the name is free again")


def test_what_a_connection_brought_last_does_not_make_it_live_again(
    client: DirectoryClient, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is seen before the message that came over it is read."""
    held, go_on = threading.Event(), threading.Event()
    real = Registry.expire

    def hold(registry: Registry, now: float) -> Any:
        if held.is_set():
            assert go_on.wait(60)
        return real(registry, now)

    monkeypatch.setattr(Registry, "expire", hold)
    gone = threading.Event()
    client.subscribe(lambda entry: gone.set())
    port = int(directory.address.rpartition(":")[2])
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.connect(f"tcp://{directory.address}")
        peer.send(encode(OpenDirectory(this_process())))
        facts = {"request_id": 1, "kind": Kind.WORKER, "name": "g:0"}
        peer.send(encode(RegisterProcess(endpoints=(), facts={}, owned=True, **facts)))  # type: ignore[arg-type]
        assert peer.poll(60_000)
        client.lookup_worker(G0)
        held.set()
        client.ask(Kind.WORKER, "g:9", 0.0)
        peer.send(encode(Lookup(wait_s=0.0, **facts)))  # type: ignore[arg-type]
    connections = psutil.Process().net_connections

    def is_closed() -> bool:
        return sum(each.laddr.port == port and each.status == "ESTABLISHED" for each in connections("tcp")) == 1

    wait_until(is_closed, "the directory's end is closed")
    go_on.set()
    assert gone.wait(60)
