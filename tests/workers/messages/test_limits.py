# ruff: noqa: F401
"""Waits without an end, options that are none, many messages, many peers, few descriptors; and defects."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import resource
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import zmq

from dataplane.core.zmq_io import LONGEST_MS, poll_ms
from dataplane.errors import InternalError
from tests.alone import alone
from tests.restarts import wait_until
from tests.workers.messages.messengers import Here, address, here, one_connection, until_it_fails
from workers.directory import Directory, DirectoryClient, Kind
from workers.errors import MessageBacklogError, MessageTimeoutError, WorkerLostError
from workers.messages import CollectiveGroupOptions, io_thread, wire
from workers.messages.incoming import Incoming
from workers.messages.shared_buffers import Mappings, OwnSlab, Slabs
from workers.transport import links
from workers.transport.encoding import encode

pytestmark = pytest.mark.integration

A, B = address(0), address(1)
LARGE = 20_000
"""float32 values that are not sent in line."""
NO_TIMEOUTS = [math.nan, -1.0, -(10**400)]


@pytest.mark.parametrize(
    ("left_s", "ms"),
    [(0.0004, 1), (1.5, 1500), (0, 0), (-3.0, 0), (1e18, LONGEST_MS), (math.inf, LONGEST_MS), (-math.inf, 0)],
)
def test_polls_take_waits_of_any_size(left_s: float, ms: int) -> None:
    assert poll_ms(left_s) == ms


# --- what an operation is given ------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", NO_TIMEOUTS)
def test_a_negative_timeout_is_refused_at_the_call(one_connection: Here, timeout_s: float) -> None:
    (a,) = one_connection.workers(1)
    operations: list[Callable[[], Any]] = [
        lambda: a.recv(B, timeout_s=timeout_s),
        lambda: a.send(1, B, timeout_s=timeout_s),
        lambda: a.send_tensor(torch.ones(1), B, timeout_s=timeout_s),
        lambda: a.recv_tensor(torch.ones(1), B, timeout_s=timeout_s),
        lambda: a.broadcast(1, [A, B], timeout_s=timeout_s),
        lambda: one_connection.worker(B, timeout_s=timeout_s),
    ]
    for operation in operations:
        with pytest.raises(ValueError, match="or None or infinity for no timeout"):
            operation()
    with pytest.raises(TypeError, match="expected seconds as a number"):
        a.recv(B, timeout_s="long")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [1e18, math.inf, None])
def test_a_wait_may_have_no_timeout(one_connection: Here, timeout_s: float | None) -> None:
    (a,) = one_connection.workers(1)
    waiting = a.recv(B, timeout_s=timeout_s, async_op=True)
    b = one_connection.worker(B)
    assert [entry.name for entry in one_connection.client().listing(Kind.WORKER)] == ["g:0", "g:1"]
    b.send("late", A, timeout_s=timeout_s)
    assert waiting.wait(timeout_s) == "late"
    lasting = one_connection.start(a.recv, B, timeout_s=timeout_s)
    b.close()  # the end of the peer ends the wait
    with pytest.raises(WorkerLostError, match="g:1"):
        lasting.result(60)


def test_options_are_checked_at_the_call(here: Here) -> None:
    a, b = here.workers(2)
    wrong: Any
    for wrong in ("nccl", {"accel_max_ctas": 2}, 4):
        for operation in (partial(a.send, 1, B), partial(a.recv, B), partial(a.broadcast, 1, [A, B])):
            with pytest.raises(TypeError, match="expected a CollectiveGroupOptions or None"):
                operation(options=wrong)
    numpy_options = CollectiveGroupOptions(accel_max_ctas=np.int64(4), use_ring_broadcast=np.bool_(True))  # type: ignore[arg-type]
    receiving = here.start(b.recv, A, options=CollectiveGroupOptions(accel_max_ctas=4, use_ring_broadcast=True))
    a.send("fine", B, options=numpy_options)
    assert receiving.result(60) == "fine"


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"accel_max_ctas": "4"}, TypeError),
        ({"accel_min_ctas": 1.5}, TypeError),
        ({"accel_cluster_size": True}, TypeError),
        ({"accel_max_ctas": -1}, ValueError),
        ({"is_high_priority_stream": 1}, TypeError),
        ({"use_ring_broadcast": None}, TypeError),
    ],
)
def test_options_that_are_none(wrong: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(wrong))):
        CollectiveGroupOptions(**wrong)


# --- many messages -------------------------------------------------------------------------------------------------


def test_small_messages_count_too(one_connection: Here) -> None:
    a = one_connection.worker(A, backlog_bytes=1 << 20)
    b = one_connection.worker(B)
    numbers = iter(range(1000))
    with pytest.raises(MessageBacklogError, match="exceed this worker's limit"):
        until_it_fails(lambda: a.send(next(numbers), B, async_op=True))
    sent = next(numbers) - 1
    assert [b.recv(A) for _ in range(sent)] == list(range(sent))


class _Count:
    """Calls of Python functions in threads that were started meanwhile, by thread name."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            name = threading.current_thread().name
            self.calls[name] = self.calls.get(name, 0) + 1

    def __enter__(self) -> _Count:
        threading.setprofile(self)
        return self

    def __exit__(self, *exc: object) -> None:
        threading.setprofile(None)


@pytest.mark.slow
def test_the_work_for_a_message_does_not_grow_with_their_number() -> None:
    def calls_per_message(count: int) -> float:
        with _Count() as counted:
            workers = Here(True)
            a, b = workers.workers(2)
            for sender, receiver in ((a, B), (b, A)):
                sent = [sender.send(number, receiver, async_op=True) for number in range(count)]
                for each in sent:
                    assert each is not None
                    each.wait()
            for receiver, sender in ((a, B), (b, A)):
                works = [receiver.recv(sender, async_op=True) for _ in range(count)]
                assert [work.wait() for work in works] == list(range(count))
            workers.close()
        return sum(calls for name, calls in counted.calls.items() if name.startswith("tq-messages")) / count

    assert calls_per_message(1200) < 2 * calls_per_message(150)


def test_unreceived_messages_hold_few_descriptors() -> None:
    alone(_send_more_than_there_are_descriptors)


def _send_more_than_there_are_descriptors() -> None:
    limit = psutil.Process().num_fds() + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    workers = Here(True)
    a, b = workers.workers(2)
    values = [torch.full((LARGE,), number) for number in range(300)]
    works = [a.send(value, B, async_op=True) for value in values]
    for work in works:
        assert work is not None
        work.wait()
    for value in values:
        assert torch.equal(b.recv(A), value)
    a.send("still there", B)
    assert b.recv(A) == "still there"
    workers.close()


def test_a_slab_without_a_descriptor_is_of_this_process_only() -> None:
    slabs, mappings = Slabs("here", open_limit=2), Mappings("here", held_limit=2)
    first, second, third = (slabs.take(100_000) for _ in range(3))
    assert [slab.shared for slab in (first, second, third)] == [True, True, False]
    for slab in (first, second, third):
        slab.memory[:100_000] = slab.memory.size % 251
    seen = [mappings.open(slab.name) for slab in (first, second, third)]
    assert seen[2] is None
    assert [bytes(memory[:9]) for memory in seen if memory is not None] == [bytes(first.memory[:9])] * 2
    slabs.give_back(third)
    slabs.give_back(first)
    larger = slabs.take(1 << 20)
    assert larger.shared, "an idle one went for it"
    assert mappings.open(larger.name) is None, "two are mapped"
    mappings.forget(slabs.pop_closed())
    del seen
    assert mappings.open(larger.name) is not None
    mappings.close()
    for slab in (second, larger):
        slabs.give_back(slab)
    slabs.close()


def test_shared_memory_holds_one_descriptor_and_its_mapping_none() -> None:
    alone(_count_descriptors)


def _count_descriptors() -> None:
    process = psutil.Process()
    before = process.num_fds()
    slab = OwnSlab("here", 1 << 20)
    mappings = Mappings("here")
    memory = mappings.open(slab.name)
    assert memory is not None
    assert process.num_fds() == before + 1
    slab.memory[7] = 7
    assert memory[7] == 7
    slab.close()
    mappings.close()
    assert process.num_fds() == before
    assert memory[7] == 7


# --- many peers ----------------------------------------------------------------------------------------------------

MANY = 1_500


def test_a_broadcast_to_more_workers_than_a_context_has_sockets() -> None:
    alone(_broadcast_to_many)


def _broadcast_to_many() -> None:
    names = [address(rank) for rank in range(1, MANY)]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(Directory.serve())
        context = stack.enter_context(zmq.Context())
        peers = stack.enter_context(context.socket(zmq.ROUTER))
        peers.set(zmq.LINGER, 0)
        client = stack.enter_context(DirectoryClient(directory.address))
        registered = []
        for name in names:
            endpoints = (f"127.0.0.1:{peers.bind_to_random_port('tcp://127.0.0.1')}",)
            registered.append(client._ask_register(Kind.WORKER, name.get_name(), endpoints, {}, owned=True))
        for each in registered:
            each.result(60)
        workers = Here(True)
        workers.directory.close()
        workers.directory = directory
        a = workers.worker(A)
        value = "to all" * 10_000
        work = a.broadcast(value, [A, *names], async_op=True)
        for _ in names:
            assert peers.poll(60_000), "not all were reached"
            route, head, inline = peers.recv_multipart()
            assert pickle.loads(inline) == value
            post = wire.decode_request(head)
            assert isinstance(post, wire.PostMessage)
            peers.send_multipart((route, encode(wire.MessageReceived(stream=post.stream, sequence=post.sequence))))
        assert work.wait() == value
        workers.close()


def test_idle_connections_are_closed_and_made_again(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LINKS_MOST", 2)
    first, *others = here.workers(6)
    for turn in range(3):
        for other in others:
            work = first.send((turn, torch.arange(LARGE)), other.address, async_op=True)
            turned, values = other.recv(first.address)
            assert turned == turn
            assert torch.equal(values, torch.arange(LARGE))
            work.wait()
            other.send("taken", first.address)
            assert first.recv(other.address) == "taken"
            # What it answers comes by another connection than what it sends.
            wait_until(lambda: first._io_thread.outgoing.idle(other.address.get_name()), "nothing is under way to it")  # noqa: B023
    assert len(first._io_thread._links) <= 2
    busy = [first.send(rank, other.address, async_op=True) for rank, other in enumerate(others)]
    assert [other.recv(first.address) for other in others] == list(range(len(others))), "those in use stay"
    for work in busy:
        work.wait()


def test_a_message_for_another_incarnation_is_dropped(one_connection: Here) -> None:
    """The process that has a peer's port by now is not that peer."""
    a, b = one_connection.workers(2)
    a.send("first contact", B, async_op=True)
    assert b.recv(A) == "first contact"
    peer = a._io_thread._peers["g:1"]
    peer.incarnation += 1000
    lost = a.send("to another", B, async_op=True)
    assert lost is not None
    a._io_thread.call(lambda: setattr(peer, "incarnation", peer.incarnation - 1000))
    a.send("to this one", B, async_op=True)
    assert b.recv(A) == "to this one"
    assert not lost.done()


@pytest.mark.parametrize("end", ["incarnation", "receiver"])
def test_parts_of_a_message_between_others_are_dropped(
    one_connection: Here, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A connection that was cut may bring them late, under the number of a message that is on its way."""
    a, b = (one_connection.worker(address(rank), shared_memory=False) for rank in range(2))
    real = a._io_thread._send_chunk

    def serve_twice(name: str, pull: wire.Pull) -> None:
        ends = {"incarnation": a._io_thread.incarnation, "receiver": b._io_thread.incarnation}
        ends[end] -= 1
        data = wire.Data(stream=pull.stream, sequence=pull.sequence, source="g:0", start=pull.start, **ends)
        frames = (encode(data), bytes(pull.nbytes))
        a._io_thread._links.send(name, a._io_thread._peer(name).endpoint, frames, a._io_thread.outgoing.idle)
        real(name, pull)

    monkeypatch.setattr(a._io_thread, "_send_chunk", serve_twice)
    sent = torch.arange(4 * LARGE)
    a.send(sent, B, async_op=True)
    assert torch.equal(b.recv(A), sent)


def test_a_port_that_was_something_else_s_is_tried_again(one_connection: Here) -> None:
    (a,) = one_connection.workers(1)
    client = one_connection.client()
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))  # while it is open, the kernel gives the port to nobody
        port = held.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)) as stranger:
            client.register_worker(B, f"127.0.0.1:{port}")
            lost = a.send("to a stranger", B, async_op=True)
            connection, _ = stranger.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            connection.close()
        assert lost is not None
        with zmq.Context() as context, context.socket(zmq.ROUTER) as peer:
            peer.linger = 0
            peer.bind(f"tcp://127.0.0.1:{port}")
            heard = False
            for _ in range(100):
                a.send("again", B, async_op=True)
                if heard := bool(peer.poll(500)):
                    break
            assert heard


# --- defects -------------------------------------------------------------------------------------------------------


def _once(real: Callable[..., Any]) -> Callable[..., Any]:
    left = [1]

    def fails(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()
            raise ZeroDivisionError("a defect")
        return real(*args, **kwargs)

    return fails


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Incoming, "arrive"),
        (links.Links, "send"),
        (io_thread.IoThread, "_contact_peer"),
        (io_thread.IoThread, "_handle_lookup"),
    ],
)
def test_a_defect_at_one_message_is_that_message_s(
    one_connection: Here, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    a, b = one_connection.workers(2)
    monkeypatch.setattr(owner, name, _once(getattr(owner, name)))
    with pytest.raises(InternalError, match="a defect"):
        a.send("fails", B)
    a.send("fine", B, async_op=True)
    assert b.recv(A) == "fine"


@pytest.mark.parametrize("name", ["post", "_handle_match", "_deliver"])
@pytest.mark.parametrize("met", [True, False])
def test_a_defect_at_one_receive_is_that_receive_s(
    one_connection: Here, monkeypatch: pytest.MonkeyPatch, name: str, met: bool
) -> None:
    """Whether the message meets its receive at once, or when the directory has said that its sender lives."""
    a, b = one_connection.workers(2)
    if met:
        a.send("first contact", B, async_op=True)
        assert b.recv(A) == "first contact"
    monkeypatch.setattr(Incoming, name, _once(getattr(Incoming, name)))
    a.send("one", B, async_op=True)
    with pytest.raises(InternalError, match="a defect"):
        b.recv(A)
    for after in ("two", "three"):
        with contextlib.suppress(InternalError):  # one of them may tell what became of "one"
            a.send(after, B)
    assert b.recv(A) in ("one", "two", "three")


def test_a_defect_at_a_message_that_was_pulled_is_its_receive_s(
    one_connection: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (one_connection.worker(address(rank), shared_memory=False) for rank in range(2))
    monkeypatch.setattr(Incoming, "_deliver", _once(Incoming._deliver))
    sent = a.send(torch.arange(LARGE), B, async_op=True)
    with pytest.raises(InternalError, match="a defect"):
        b.recv(A)
    assert sent is not None
    with pytest.raises(InternalError, match="internal error: g:1: recv from g:0: ZeroDivisionError"):
        sent.wait()
    a.send("fine", B, async_op=True)
    assert b.recv(A) == "fine"


def test_a_defect_as_a_receive_gives_up_is_that_receive_s(
    one_connection: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = one_connection.workers(2)
    real = Incoming._drop_abandoned_broadcasts
    monkeypatch.setattr(Incoming, "_drop_abandoned_broadcasts", _once(real))
    first, second = (b.recv(A, async_op=True, timeout_s=0.1) for _ in range(2))
    with pytest.raises(InternalError, match="a defect"):
        first.wait(60)
    with pytest.raises(MessageTimeoutError):
        second.wait(60)
    a.send("fine", B, async_op=True)
    assert b.recv(A) == "fine"


def test_the_end_of_an_engine_by_a_defect_is_known_to_its_peers(
    one_connection: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = one_connection.workers(2)
    b.send(0, A, async_op=True)
    assert a.recv(B) == 0  # so b has looked a up, and the directory tells it of a's end
    waiting = b.recv(A, async_op=True)
    monkeypatch.setattr(a._io_thread, "_run_timers", _once(a._io_thread._run_timers))
    a._io_thread.call(lambda: None)
    with pytest.raises(WorkerLostError, match="g:0 is gone: message thread failed"):
        waiting.wait()
    with pytest.raises(WorkerLostError, match="g:0 is gone: message thread failed"):
        b.send(1, A)
    with pytest.raises(InternalError, match="a defect"):
        a.recv(B)
    a._io_thread.settled().result(60)
