# ruff: noqa: F401
"""Calls of a broadcast are numbered at both ends: the n-th of a receiver gets the n-th of the source, or an error."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from typing import Any

import pytest
import torch

from dataplane.core.buffer_pool import BufferPool
from tests.restarts import wait_until
from tests.workers.messages.messengers import (
    WAIT_S,
    Here,
    address,
    here,
    no_collectives,
    one_connection,
    until_it_fails,
)
from tests.workers.messages.test_late import Dam, far
from workers.errors import (
    MessageBacklogError,
    MessageMismatchError,
    MessageTimeoutError,
    SourceFailedError,
    WorkerLostError,
)
from workers.messages import Messenger
from workers.messages.deliveries import Posting
from workers.messages.incoming import Incoming
from workers.messages.outgoing import OutgoingMessages, Sending
from workers.messages.relays import Backlog, Relays
from workers.messages.shared_buffers import Mappings
from workers.messages.snapshots import ValueSnapshot
from workers.messages.wire import ObjectForm, PostMessage
from workers.transport import pickling

pytestmark = pytest.mark.integration

A, B, C = address(0), address(1), address(2)
PAIR = [A, B]
BIG = 3 << 20
"""float32 values that take several chunks."""


def _settled(source: Messenger) -> None:
    """Everything that it sent is where it goes, and its memory is its own again."""
    wait_until(lambda: not source._backlog.waiting_bytes, "nothing is kept for a receiver")


def _late(receiver: Messenger, workers: list[Any] = PAIR) -> None:
    """A call whose time is over before its broadcast begins."""
    with pytest.raises(MessageTimeoutError, match=r"g:.: broadcast from g:0 among g:0, g:1.*: not done within"):
        receiver.broadcast(None, workers, timeout_s=0.1)


@pytest.mark.parametrize("size", [10, BIG])
def test_a_call_that_gave_up_is_not_made_good_by_the_next(here: Here, size: int) -> None:
    """Also where receivers and source know each other from before."""
    a, b, c = here.workers(3)
    workers = [A, B, C]
    for first in (0, 3):
        for receiver in (b, c):
            _late(receiver, workers)
        assert int(a.broadcast(torch.full((size,), first), workers)[0]) == first
        for step in (1, 2):
            works = [receiver.broadcast(None, workers, async_op=True) for receiver in (b, c)]
            a.broadcast(torch.full((size,), first + step), workers)
            assert [int(work.wait()[0]) for work in works] == [first + step] * 2
        _settled(a)


def test_a_call_that_gives_up_while_its_bytes_come(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = far.workers(2)
    assert a.broadcast(0, PAIR, async_op=True) is not None
    assert b.broadcast(None, PAIR) == 0
    dam = Dam(a, monkeypatch)
    a.broadcast(torch.full((BIG,), 1), PAIR)
    hurried = b.broadcast(None, PAIR, async_op=True, timeout_s=600.0)
    patient = b.broadcast(None, PAIR, async_op=True, timeout_s=1200.0)
    assert dam.asked.wait(60)
    b._io_thread.call(lambda: b._io_thread.incoming.expire(time.monotonic() + 601.0))
    with pytest.raises(MessageTimeoutError):
        hurried.wait()
    dam.open()
    a.broadcast(torch.full((BIG,), 2), PAIR)
    assert int(patient.wait()[0]) == 2
    _settled(a)


def test_no_memory_for_its_bytes_costs_that_call(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = far.workers(2)
    works = [a.broadcast(torch.full((BIG,), number), PAIR, async_op=True) for number in range(2)]

    def none(*_: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr("workers.messages.fetches.fresh", none)
        with pytest.raises(MemoryError, match="none left"):
            b.broadcast(None, PAIR)
    assert int(b.broadcast(None, PAIR)[0]) == 1
    for work in works:
        work.wait()
    _settled(a)


def test_a_message_between_two_is_still_for_the_next_receive(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    with pytest.raises(MessageTimeoutError):
        b.recv(A, timeout_s=0.1)
    a.send("for the next", B, async_op=True)
    assert b.recv(A) == "for the next"


def test_a_receiver_that_begins_late_gets_the_first(one_connection: Here) -> None:
    a, b, c = one_connection.workers(3)
    works = [a.broadcast(step, [A, B, C], async_op=True) for step in range(3)]
    assert [b.broadcast(None, [A, B, C]) for _ in range(3)] == [0, 1, 2]
    assert [c.broadcast(None, [A, B, C]) for _ in range(3)] == [0, 1, 2]
    assert [work.wait() for work in works] == [0, 1, 2]


def test_a_source_that_gave_up_before_its_receiver_was_there(here: Here) -> None:
    a = here.worker(A)
    with pytest.raises(MessageTimeoutError, match="g:0: broadcast to g:1"):
        a.broadcast("never sent", PAIR, timeout_s=0.1)
    b = here.worker(B)
    works = [b.broadcast(None, PAIR, async_op=True) for _ in range(2)]
    a.broadcast("sent", PAIR)
    with pytest.raises(SourceFailedError, match=r"g:0, the source of a broadcast, failed: .* before it could send"):
        works[0].wait()
    assert works[1].wait() == "sent"


def test_a_receiver_that_gave_up_before_its_source_was_there(here: Here) -> None:
    b = here.worker(B)
    _late(b)
    a = here.worker(A)
    assert a.broadcast("given up", PAIR) == "given up"
    a.broadcast("second", PAIR, async_op=True)
    assert b.broadcast(None, PAIR) == "second"


def test_a_source_without_place_for_what_it_sends(one_connection: Here) -> None:
    """Not even for word of its failure, with a backlog that is full."""
    a = one_connection.worker(A, backlog_bytes=64 << 10)
    b = one_connection.worker(B)
    numbers = itertools.count()
    with pytest.raises(MessageBacklogError):
        until_it_fails(lambda: a.broadcast(next(numbers), PAIR, async_op=True))
    sent = next(numbers) - 1
    assert [b.broadcast(None, PAIR) for _ in range(sent)] == list(range(sent))
    _settled(a)
    failed, got = (b.broadcast(None, PAIR, async_op=True) for _ in range(2))
    a.broadcast("fits", PAIR)
    with pytest.raises(SourceFailedError):
        failed.wait()
    assert got.wait() == "fits"


@pytest.mark.parametrize("wrong", [{"timeout_s": -1.0}, {"options": "nccl"}])
def test_a_call_with_arguments_that_cannot_be_is_a_call(one_connection: Here, wrong: dict[str, Any]) -> None:
    a, b = one_connection.workers(2)
    waiting = b.broadcast(None, PAIR, async_op=True)
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        a.broadcast("not sent", PAIR, **wrong)
    with pytest.raises(SourceFailedError, match=next(iter(wrong))):
        waiting.wait()
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        b.broadcast(None, PAIR, **wrong)
    a.broadcast("skipped", PAIR, async_op=True)
    a.broadcast("got", PAIR, async_op=True)
    assert b.broadcast(None, PAIR) == "got"
    _settled(a)


def test_a_call_that_raises_what_was_refused_before_is_a_call(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    a.send("first contact", B, async_op=True)
    assert b.recv(A) == "first contact"
    a.send("object", B)
    with pytest.raises(MessageMismatchError):
        b.recv_tensor(torch.zeros(3), A)
    wait_until(lambda: a._io_thread.outgoing._late, "it is told")
    waiting = b.broadcast(None, PAIR, async_op=True)
    with pytest.raises(MessageMismatchError):
        a.broadcast("not sent", PAIR)
    with pytest.raises(SourceFailedError, match="MessageMismatchError"):
        waiting.wait()
    a.broadcast("sent", PAIR, async_op=True)
    assert b.broadcast(None, PAIR) == "sent"


@pytest.mark.parametrize("end", [A, B])
def test_an_end_that_is_started_anew_begins_anew(here: Here, end: Any) -> None:
    a, b = here.workers(2)
    for step in range(3):
        a.broadcast(step, PAIR, async_op=True)
    assert b.broadcast(None, PAIR) == 0
    assert [b.broadcast(None, PAIR) for _ in range(2)] == [1, 2]
    _late(b)
    if end == A:
        a.close()
        with pytest.raises(WorkerLostError, match="g:0 is gone"):
            b.broadcast(None, PAIR)
        a = here.worker(A)
    else:
        b.close()
        with pytest.raises(WorkerLostError, match="g:1 is gone"):
            until_it_fails(lambda: a.broadcast("to nobody", PAIR))
        b = here.worker(B)
    for step in range(3):
        waiting = b.broadcast(None, PAIR, async_op=True)
        a.broadcast(("anew", step), PAIR)
        assert waiting.wait() == ("anew", step)


class Ends:
    """A source and a receiver, and what is on its way between them; calls are numbered since either began anew."""

    def __init__(self, stream: bytes = b"s") -> None:
        self.stream = stream
        self.incarnation = 0
        self.lives: list[str] = []
        self.in_flight: deque[tuple[PostMessage, bytes]] = deque()
        nobody = Relays(Backlog(1 << 30), lambda *_: None, lambda *_: None)
        self.incoming = Incoming(
            "g:1",
            Mappings("here"),
            BufferPool(1 << 20),
            nobody,
            no_collectives(),
            reply=lambda _, answer: self.outgoing.handle_answer("g:1", answer),  # type: ignore[arg-type]
            ask_relay=lambda *_: False,
            schedule=lambda *_: None,
            call=lambda work: work(),
            contact=OutgoingMessages("g:1", lambda *_: None, lambda _: None).contact,
            forget=lambda *_: None,
            is_alive=lambda _: True,
        )
        self.begin_anew()

    def begin_anew(self) -> None:
        """The source: as a process that died and another that has its name."""
        self.incoming.lose("g:0", WorkerLostError(worker="g:0", why="died"))
        self.in_flight.clear()
        self.incarnation += 1
        self.outgoing = OutgoingMessages(
            "g:0", lambda _, *post: self.in_flight.append((post[0], post[1])), lambda _: None
        )  # type: ignore[arg-type, return-value]
        self.said = 0
        self.calls: list[tuple[int, Posting]] = []
        self.kept = 0

    def say(self, fails: bool) -> None:
        value, self.said = self.said, self.said + 1
        if fails:
            self.outgoing.skip([B], self.stream)
            return
        self.kept += 1
        packed = pickling.pack(value)
        snapshot = ValueSnapshot(ObjectForm(), packed, None, b"".join(packed.runs()), 1, self._free)
        self.outgoing.queue(Sending("g:1", self.stream, snapshot, None, "say", 0.0, 600.0))
        self.outgoing.flush("g:1", self.incarnation, 1, "")

    def _free(self, *_: object) -> None:
        self.kept -= 1

    def arrive(self) -> None:
        post, snapshot = self.in_flight.popleft()
        if self.lives[-1:] != [str(post.incarnation)]:
            self.lives.append(str(post.incarnation))
            self.incoming.outdate("g:0", post.incarnation)
        self.incoming.arrive(b"", post, snapshot.inline.bytes)  # type: ignore[attr-defined]

    def call(self, fails: bool, lives: bool = True) -> None:
        posting = Posting("g:0", self.stream, None, None, ObjectForm(), None, None, True, "call", 0.0, WAIT_S)
        if fails:
            self.incoming.skip(posting.key)
        else:
            self.incoming.post(posting, lives)
        self.calls.append((len(self.calls), posting))

    def give_up(self, chance: random.Random) -> None:
        waiting = [posting for _, posting in self.calls if not posting.future.done()]
        if waiting:
            posting = chance.choice(waiting)
            if chance.random() < 0.5:
                self.incoming.abandon(posting)
            self.incoming.withdraw(posting)
            posting.fail(MessageTimeoutError(what="call", waited_s=1.0))
        if not self.incoming._postings:
            for arrival in self.incoming._arrivals.get(("g:0", b"s"), ()):
                assert arrival.post.sequence >= len(self.calls), "what is for nobody is not kept"


@pytest.mark.parametrize("seed", range(100))
def test_whatever_fails_the_n_th_call_gets_the_n_th_or_nothing(seed: int) -> None:
    chance, ends = random.Random(seed), Ends()
    got = 0
    for _ in range(300):
        step = chance.random()
        if step < 0.3:
            ends.say(fails=chance.random() < 0.2)
        elif step < 0.6 and ends.in_flight:
            ends.arrive()
        elif step < 0.9:
            ends.call(fails=chance.random() < 0.1, lives=chance.random() < 0.8)
        elif step < 0.96:
            ends.give_up(chance)
        elif step < 0.98:
            ends.incoming.match("g:0")
        elif not ends.incoming._arrivals:
            ends.begin_anew()
        for number, posting in ends.calls:
            if posting.future.done() and posting.future.exception() is None:
                unpacked = posting.future.result().take()
                assert unpacked is not None
                assert unpacked.load() == number
                got += 1
    assert got
    while ends.in_flight:
        ends.arrive()
    ends.incoming.match("g:0")
    while ends.said > len(ends.calls):
        ends.call(fails=False)
    assert ends.kept == 0, "each was received or dropped"
