# ruff: noqa: F401
"""A receive whose handle is deleted: a message that arrives later is for the next receive, in its place."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.restarts import wait_until
from tests.workers.messages.messengers import WAIT_S, Here, address, here, one_connection
from tests.workers.messages.test_calls import Ends
from tests.workers.messages.test_late import Dam, far
from workers.errors import MessageMismatchError, MessageTimeoutError, NotSerializableError
from workers.messages import Messenger, WithPayload
from workers.messages.deliveries import Posting

pytestmark = pytest.mark.integration

A, B = address(0), address(1)
PAIR = [A, B]
BIG = 3 << 20
"""float32 values that take several chunks."""


def _wait_for(receiver: Messenger) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver.recv(A, async_op=True).async_wait(), 0.01)

    asyncio.run(give_up())


def _cancel(receiver: Messenger) -> None:
    async def give_up() -> None:
        waiting = asyncio.ensure_future(receiver.recv(A, async_op=True).async_wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())


def _wait(receiver: Messenger) -> None:
    work = receiver.recv(A, async_op=True)
    with pytest.raises(MessageTimeoutError):
        work.wait(timeout=0.01)


def _drop(receiver: Messenger) -> None:
    receiver.recv(A, async_op=True)


def _has_come(work: Any) -> None:
    wait_until(work.done, "the message is here")


@pytest.mark.parametrize("give_up", [_wait_for, _cancel, _wait, _drop])
@pytest.mark.parametrize("size", [10, BIG])
def test_the_next_receive_has_the_message(here: Here, give_up: Callable[[Messenger], None], size: int) -> None:
    a, b = here.workers(2)
    for number in range(2):
        give_up(b)
        gc.collect()
        a.send(torch.full((size,), number), B, async_op=True)
        assert int(b.recv(A)[0]) == number


@pytest.mark.parametrize("size", [10, BIG])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_message_that_had_arrived_is_gone_with_its_handle(here: Here, size: int, in_place: bool) -> None:
    a, b = here.workers(2)
    values = torch.ones(size)
    if in_place:
        work: Any = b.recv_tensor(torch.zeros(size), A, async_op=True)
        a.send_tensor(values, B, async_op=True)
    else:
        work = b.recv(A, async_op=True)
        a.send(values, B, async_op=True)
    a.send("next", B, async_op=True)
    _has_come(work)
    del work
    assert b.recv(A) == "next"
    wait_until(lambda: not a._backlog.waiting_bytes, "the sender's memory is its own again")


def test_a_handle_that_somebody_has_goes_on(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    got: list[Any] = []
    came = threading.Event()
    b.recv(A, async_op=True).then(came.set)
    work = b.recv(A, async_op=True)
    gc.collect()
    a.send("for the function", B)
    a.send("for the handle", B)
    assert came.wait(WAIT_S)
    assert work.wait() == "for the handle"
    del work
    a.send("next", B)
    got.append(b.recv(A))
    assert got == ["next"], "what was taken does not come again"


def test_a_pull_under_way_is_left_to_the_next(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = far.workers(2)
    dam = Dam(a, monkeypatch)
    work = b.recv(A, async_op=True)
    a.send(torch.arange(BIG), B, async_op=True)
    assert dam.asked.wait(WAIT_S)
    gone = threading.Event()
    weakref.finalize(work, gone.set)
    del work
    assert gone.wait(WAIT_S), "a thread of the messenger may hold it for another moment"
    waiting = b.recv(A, async_op=True)
    dam.open()
    assert torch.equal(waiting.wait(), torch.arange(BIG))


def _broken() -> Any:
    raise ImportError("no such class here")


class _Broken:
    def __reduce__(self) -> Any:
        return _broken, ()


def test_what_cannot_be_loaded_does_not_come_again(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    a.send(_Broken(), B, async_op=True)
    a.send("second", B, async_op=True)
    with pytest.raises(NotSerializableError, match="a received object cannot be loaded: ImportError"):
        b.recv(A)
    assert b.recv(A) == "second"


# --- into a tensor ------------------------------------------------------------------------------------------------


def test_nothing_is_written_once_the_handle_is_gone(here: Here) -> None:
    a, b = here.workers(2)
    target, kept = torch.zeros(BIG), torch.zeros(BIG)
    gone = weakref.ref(target)
    b.recv_tensor(target, A, async_op=True)
    b.recv_tensor(kept, A, async_op=True)
    del target
    a.send_tensor(torch.ones(BIG), B, async_op=True)
    second = torch.zeros(BIG)
    b.recv_tensor(second, A)
    assert second.sum() == BIG
    assert not kept.any()
    assert gone() is None


# --- broadcasts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, BIG])
def test_a_broadcast_has_its_sequence_number_whoever_drops_its_handle(here: Here, size: int) -> None:
    """Before it comes, and after."""
    a, b = here.workers(2)
    b.broadcast(None, PAIR, async_op=True)
    a.broadcast(torch.full((size,), 0), PAIR)
    came = b.broadcast(None, PAIR, async_op=True)
    a.broadcast(torch.full((size,), 1), PAIR)
    _has_come(came)
    del came
    a.broadcast(torch.full((size,), 2), PAIR, async_op=True)
    assert int(b.broadcast(None, PAIR)[0]) == 2
    wait_until(lambda: not a._backlog.waiting_bytes, "nothing is kept for a receiver")


# --- the ends -----------------------------------------------------------------------------------------------------


def test_a_handle_may_go_after_its_messenger(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    waiting, came = (b.recv(A, async_op=True) for _ in range(2))
    a.send("to nobody", B)
    b.close()
    del waiting, came


@pytest.mark.parametrize("seed", range(100))
def test_each_message_is_received_once_and_in_order(seed: int) -> None:
    """Whatever comes, is dropped, or is taken, when: the oldest message there is goes to who waits longest."""
    chance, ends = random.Random(seed), Ends(b"")
    queued: list[int] = []
    waiting: list[Posting] = []
    given: list[tuple[Posting, int]] = []
    taken: list[int] = []

    def match() -> None:
        while queued and waiting:
            given.append((waiting.pop(0), queued.pop(0)))

    def take(posting: Posting, number: int) -> None:
        unpacked = posting.future.result(0).take()
        assert unpacked is not None
        assert unpacked.load() == number
        taken.append(number)

    for _ in range(300):
        step = chance.random()
        if step < 0.25:
            ends.say(fails=False)
        elif step < 0.5 and ends.in_flight:
            queued.append(ends.said - len(ends.in_flight))
            ends.arrive()
        elif step < 0.7:
            ends.call(fails=False)
            waiting.append(ends.calls[-1][1])
        elif step < 0.8 and waiting:
            ends.incoming.abandon(waiting.pop(chance.randrange(len(waiting))))
        elif step < 0.85 and given:
            posting, number = given.pop(chance.randrange(len(given)))
            ends.incoming.abandon(posting)
            taken.append(number)
        elif given:
            take(*given.pop(chance.randrange(len(given))))
        match()
        assert all(posting.future.done() for posting, _ in given)
        assert not any(posting.future.done() for posting in waiting)
    while ends.in_flight:
        queued.append(ends.said - len(ends.in_flight))
        ends.arrive()
        match()
    for posting, number in given:
        take(posting, number)
    while queued:
        ends.call(fails=False)
        take(ends.calls[-1][1], queued.pop(0))
    assert sorted(taken) == list(range(ends.said))
    assert ends.kept == 0, "the source's memory is its own again"
