# ruff: noqa: F401
"""Peers that die, close, or are started anew."""

from __future__ import annotations

import os
import threading
from typing import Any

import psutil
import pytest
import torch

from tests.alone import alone, leaves_nothing_open
from tests.restarts import Proxy, wait_until
from tests.workers.messages.messengers import (
    Here,
    address,
    elsewhere,
    here,
    one_connection,
    shared_memory,
    until_it_fails,
)
from workers.directory import Directory, DirectoryClient, Kind
from workers.directory import client as client_module
from workers.errors import (
    MessengerClosedError,
    NameInUseError,
    WorkerLostError,
)
from workers.messages import Messenger, deliveries, messenger
from workers.messages.shared_buffers import Mappings

pytestmark = pytest.mark.slow

A, B = address(0), address(1)
BIG = 3 << 20
"""float32 values that take several chunks."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker takes the directory for lost, and none closes before what it sent is received, however slow the
    machine is."""
    monkeypatch.setattr(client_module, "AWAY_S", 600.0)
    monkeypatch.setattr(messenger, "LINGER_S", 60.0)


def _wait(messenger: Messenger, pipe: Any) -> None:
    pipe.poll(120)


def _send_then_wait(messenger: Messenger, pipe: Any) -> None:
    messenger.send("hello", A)
    messenger.send(torch.ones(BIG), A)
    assert messenger.recv(A) == "got"
    pipe.send("said")
    pipe.poll(120)


def test_a_peer_that_dies_before_first_contact(here: Here) -> None:
    (a,) = here.workers(1)
    with elsewhere(here.directory, B, _wait) as peer:
        here.client().lookup_worker(B)
        peer.kill()
        for operation in (lambda: a.recv(B), lambda: a.send(1, B)):
            with pytest.raises(WorkerLostError, match=f"g:1 is gone: its process {peer.pid} died"):
                until_it_fails(operation)


def test_a_peer_that_dies_after_first_contact(here: Here) -> None:
    (a,) = here.workers(1)
    with elsewhere(here.directory, B, _send_then_wait) as peer:
        assert a.recv(B) == "hello"
        assert a.recv(B).sum() == BIG
        a.send("got", B)
        assert peer.hear() == "said"
        waiting = here.start(a.recv, B)
        in_place = a.recv_tensor(torch.zeros(3), B, async_op=True)
        assert in_place is not None
        peer.kill()
        with pytest.raises(WorkerLostError, match=f"g:1 is gone: its process {peer.pid} died"):
            waiting.result(60)
        with pytest.raises(WorkerLostError, match="g:1"):
            in_place.wait()
        with pytest.raises(WorkerLostError, match="g:1"):
            a.send(torch.ones(BIG), B)


def test_what_a_peer_sent_before_it_died_is_received(shared_memory: Here) -> None:
    (a,) = shared_memory.workers(1)
    with elsewhere(shared_memory.directory, B, _send_then_wait) as peer:
        first = a.recv(B)
        a.send("got", B)
        assert peer.hear() == "said"
        peer.kill()
        with pytest.raises(WorkerLostError, match="g:1"):
            until_it_fails(lambda: a.send("are you there", B))
    assert first == "hello"
    assert a.recv(B).sum() == BIG
    with pytest.raises(WorkerLostError, match="g:1"):
        a.recv(B)


def test_each_message_that_died_with_its_sender_is_an_error_in_its_place(
    one_connection: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mappings, "open", lambda *_: None)  # as on another host
    (a,) = one_connection.workers(1)
    with elsewhere(one_connection.directory, B, _send_small_and_large) as peer:
        assert a.recv(B) == "hello"
        assert peer.hear() == "sent"
        queues = a._io_thread.incoming._arrivals
        wait_until(lambda: sum(map(len, list(queues.values()))) == 5, "all have come, but for large ones' values")
        peer.kill()
        with pytest.raises(WorkerLostError, match="g:1"):
            until_it_fails(lambda: a.send("are you there", B))
    for step in range(6):
        if step in (0, 2, 5):
            with pytest.raises(WorkerLostError, match="g:1"):
                a.recv(B)
        else:
            assert a.recv(B) == step


def _send_small_and_large(messenger: Messenger, pipe: Any) -> None:
    messenger.send("hello", A)
    for step in range(5):
        messenger.send(torch.ones(BIG) if step in (0, 2) else step, A, async_op=True)
    pipe.send("sent")
    pipe.poll(120)


def test_children_of_a_worker_have_addresses(one_connection: Here) -> None:
    (a,) = one_connection.workers(1)
    child = A.get_child_address(0)
    with elsewhere(one_connection.directory, child, _reply):
        a.send(torch.ones(BIG), child)
        assert a.recv(child) == ("g:0:0", BIG)


def _reply(messenger: Messenger, pipe: Any) -> None:
    got = messenger.recv(A)
    messenger.send((messenger.address.get_name(), int(got.sum())), A)
    pipe.poll(120)


def test_a_worker_started_anew_gets_nothing_stale(here: Here) -> None:
    a = here.worker(A)
    b = here.worker(B)
    for step in range(3):
        a.send(("old", step), B)
    b.send("also old", A)
    assert b.recv(A) == ("old", 0)
    b.close()
    with pytest.raises(WorkerLostError, match="g:1 is gone: it was closed"):
        until_it_fails(lambda: a.send("to nobody", B))
    again = here.worker(B)
    again.send("new", A)
    a.send("fresh", B)
    assert again.recv(A) == "fresh"
    assert a.recv(B) == "new"


def test_what_one_sent_that_was_started_anew_is_not_received(here: Here) -> None:
    """Also by one who never asked for it: it learns of the new one by asking, before it takes what is queued."""
    a = here.worker(A)
    b = here.worker(B)
    for value in ("stale", torch.ones(3)):
        b.send(value, A, async_op=True)
    b.close()
    again = here.worker(B)
    works = [a.recv(B, async_op=True) for _ in range(2)]
    for value in ("fresh", "second"):
        again.send(value, A)
    assert [work.wait() for work in works] == ["fresh", "second"]
    again.send("left", A)
    again.close()
    assert a.recv(B) == "left"
    with pytest.raises(WorkerLostError, match="g:1"):
        a.recv(B)


def test_the_end_of_a_group_ends_waits_for_its_workers(one_connection: Here) -> None:
    (a,) = one_connection.workers(1)
    client = one_connection.client()
    client.register_worker_group("h", {})
    waiting = a.recv(address(0, "h"), async_op=True)
    never = a.send(1, address(1, "h"), async_op=True)
    assert never is not None
    one_connection.worker(address(0, "h"))
    client.end(Kind.WORKER_GROUP, "h", why="it was shut down")
    for each in (waiting, never):
        with pytest.raises(WorkerLostError, match=r"h:\d is gone"):
            each.wait()


def test_closing_wakes_who_waits_and_refuses_the_rest(here: Here) -> None:
    a, b = here.workers(2)
    waiting = a.recv(B, async_op=True)
    a.close()
    a.close()
    with pytest.raises(MessengerClosedError, match="g:0"):
        waiting.wait()
    with pytest.raises(MessengerClosedError, match="g:0"):
        a.send(1, B)
    with pytest.raises(WorkerLostError, match="g:0 is gone: it was closed"):
        b.recv(A)


@pytest.mark.parametrize("size", [10, BIG])
def test_what_was_sent_outlives_its_sender(shared_memory: Here, size: int) -> None:
    a, b = shared_memory.workers(2)
    for _ in range(3):
        a.send(torch.ones(size), B, async_op=True)
    a.close()
    for _ in range(3):
        assert b.recv(A).sum() == size


def test_closing_waits_until_values_were_pulled() -> None:
    workers = Here(False)
    a, b = workers.workers(2)
    a.send(torch.ones(BIG), B)
    closing = workers.start(a.close)
    assert b.recv(A).sum() == BIG
    closing.result(60)
    workers.close()


def test_a_name_is_one_workers(one_connection: Here) -> None:
    (a,) = one_connection.workers(1)
    with pytest.raises(NameInUseError, match="g:0"):
        one_connection.worker(A)
    a.close()
    one_connection.worker(A).close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_nothing_is_left_open(shared_memory: bool) -> None:
    alone(_send_again_and_again, shared_memory)


def _send_again_and_again(shared_memory: bool) -> None:
    def once() -> None:
        workers = Here(shared_memory)
        a, b = workers.workers(2)
        a.send(torch.ones(BIG), B, async_op=True)
        b.recv(A)
        workers.close()

    leaves_nothing_open(once)


def test_the_directory_has_no_entry_after_close() -> None:
    with Directory.serve() as directory:
        workers = Here(True)
        workers.directory.close()
        workers.directory = directory
        (a,) = workers.workers(1)
        client = workers.client()
        assert [entry.name for entry in client.listing(Kind.WORKER)] == ["g:0"]
        a.close()
        assert client.listing(Kind.WORKER) == []
        workers.close()


def test_a_worker_that_was_given_up_learns_it_and_goes_on(here: Here) -> None:
    """It stood still, or was cut off, for so long that its peers were told that it is gone."""
    a = here.worker(A)
    proxy = Proxy(int(here.directory.address.rpartition(":")[2]))
    with DirectoryClient(f"127.0.0.1:{proxy.port}") as client:
        b = Messenger(B, client, timeout_s=60.0, shared_memory=here.shared_memory)
        for sender, receiver in ((a, b), (b, a)):
            sender.send("first contact", receiver.address, async_op=True)
            assert receiver.recv(sender.address) == "first contact"
        waiting = b.recv(address(8), async_op=True)
        unreceived = b.send(torch.ones(BIG), A, async_op=True)
        assert unreceived is not None
        unreceived.wait()
        unmet = b.send("to one who never comes", address(7), async_op=True)
        a.send("what B has not received", B)
        proxy.cut()
        with pytest.raises(WorkerLostError, match="g:1 is gone: its connection broke"):
            until_it_fails(lambda: a.send("are you there", B))
        proxy.heal()
        for work in (waiting, unmet):
            assert work is not None
            with pytest.raises(WorkerLostError, match="g:1 is gone: the job's directory gave it up"):
                work.wait()
        wait_until(lambda: b._io_thread.incarnation, "it is registered anew")
        for lost in (lambda: b.send("after what A has not received", A), lambda: b.recv(A)):
            with pytest.raises(WorkerLostError, match="g:1 is gone: the job's directory gave it up"):
                lost()
        b.send("fresh", A, async_op=True)
        a.send("fresh too", B, async_op=True)
        assert a.recv(B) == "fresh"
        assert b.recv(A) == "fresh too"
        b.close()
    proxy.close()


def test_a_message_may_come_before_its_receiver_knows_that_it_is_registered_anew(one_connection: Here) -> None:
    a = one_connection.worker(A)
    proxy = Proxy(int(one_connection.directory.address.rpartition(":")[2]))
    with DirectoryClient(f"127.0.0.1:{proxy.port}") as client:
        real, held = client._on_registered_again, []
        client._on_registered_again = lambda *args: held.append(args)  # type: ignore[method-assign]
        b = Messenger(B, client, timeout_s=60.0)
        waiting = a.recv(B, async_op=True)
        proxy.cut()
        with pytest.raises(WorkerLostError, match="g:1 is gone"):
            waiting.wait()
        proxy.heal()
        wait_until(lambda: held, "it is registered anew")
        sent = a.send("early", B, async_op=True)
        assert sent is not None
        wait_until(lambda: b._io_thread._until_registered, "the message is there")
        real(*held[0])
        assert b.recv(A) == "early"
        sent.wait()
        b.close()
    proxy.close()


def test_what_a_given_up_worker_is_reading_is_not_written_over(
    shared_memory: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still in the middle of a receive from memory that its sender had back meanwhile."""
    a, c = shared_memory.worker(A), shared_memory.worker(address(2))
    proxy = Proxy(int(shared_memory.directory.address.rpartition(":")[2]))
    reads, go_on, real = threading.Event(), threading.Event(), deliveries.unpack

    def stand_still(*args: Any, **kwargs: Any) -> Any:
        if not reads.is_set():
            reads.set()
            assert go_on.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(deliveries, "unpack", stand_still)
    with DirectoryClient(f"127.0.0.1:{proxy.port}") as client:
        b = Messenger(B, client, timeout_s=60.0)
        works = [b.recv(A, async_op=True)]
        a.send(torch.full((BIG,), 1.0), B, async_op=True)
        assert reads.wait(60)
        proxy.cut()
        with pytest.raises(WorkerLostError, match="g:1 is gone"):
            a.recv(B)
        a.send(torch.full((BIG,), 2.0), c.address, async_op=True)
        go_on.set()
        assert works[0].wait().sum() == BIG
        assert c.recv(A).sum() == 2 * BIG
        proxy.heal()
        b.close()
    proxy.close()


def test_a_worker_whose_name_was_taken_meanwhile_ends(one_connection: Here) -> None:
    a = one_connection.worker(A)
    proxy = Proxy(int(one_connection.directory.address.rpartition(":")[2]))
    with DirectoryClient(f"127.0.0.1:{proxy.port}") as client:
        b = Messenger(B, client, timeout_s=60.0)
        waiting = b.recv(A, async_op=True)
        waiting_for = a.recv(B, async_op=True)
        proxy.cut()
        with pytest.raises(WorkerLostError, match="g:1"):
            waiting_for.wait()
        another = one_connection.worker(B)
        proxy.heal()
        with pytest.raises(WorkerLostError, match="g:1 is gone: the job's directory gave it up"):
            waiting.wait()
        wait_until(lambda: b._io_thread._ended is not None, "it has ended")
        with pytest.raises(WorkerLostError, match="g:1 is gone: the job's directory gave it up"):
            b.recv(A)
        a.send("to the one there is", B, async_op=True)
        assert another.recv(A) == "to the one there is"
        b.close()
    proxy.close()
