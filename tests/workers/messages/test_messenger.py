# ruff: noqa: F401
"""What is sent arrives, in order, whoever sends first: shared memory and frames keep the same contract."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.messages.messengers import Here, address, here, one_connection
from workers.directory.address import WorkerAddress
from workers.messages import Messenger, WithPayload

pytestmark = pytest.mark.integration

A, B, C = address(0), address(1), address(2)
BIG = 3 << 20
"""float32 values that take several chunks."""


@dataclass
class Batch:
    tokens: Tensor
    masks: list[Tensor]
    note: str


def _same(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    if isinstance(sent, Tensor):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert torch.equal(got.resolve_conj(), sent.resolve_conj())
    elif isinstance(sent, np.ndarray):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key in sent:
            _same(got[key], sent[key])
    elif isinstance(sent, list | tuple):
        assert len(got) == len(sent)
        for ours, theirs in zip(got, sent, strict=True):
            _same(ours, theirs)
    elif isinstance(sent, Batch):
        _same(vars(got), vars(sent))
    else:
        assert got == sent


def _values() -> list[Any]:
    grid = torch.arange(24).reshape(4, 6)
    return [
        torch.tensor(1.5),
        torch.empty(0, 3),
        grid.t(),
        grid[::2, 1::2],
        grid[:1].expand(5, 6),
        torch.arange(5).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.randn(BIG),
        [torch.ones(2), torch.zeros(3, dtype=torch.int8)],
        (torch.ones(2), 3),
        {"a": torch.randn(70_000), "b": torch.arange(3)},
        {"deep": [{"er": (torch.ones(2), "x")}]},
        Batch(torch.arange(9), [torch.ones(1)], "n"),
        np.arange(100_000).reshape(100, 1000)[:, ::3],
        {"list": [1, "zwei", None, b"3"]},
        None,
        (1, None),
        "x" * 200_000,
    ]


def test_any_object_arrives_as_it_was(here: Here) -> None:
    a, b = here.workers(2)
    sent = _values()
    for value in sent:
        assert a.send(value, B) is None
    for value in sent:
        _same(b.recv(A), value)


def test_what_cannot_be_imported_goes_by_value(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    a.send(lambda x: x + 1, B)
    assert b.recv(A)(1) == 2


def test_one_tensor_in_two_places_stays_one(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    tensor = torch.ones(3)
    a.send([tensor, tensor], B)
    first, second = b.recv(A)
    assert first is second


def test_received_values_may_be_written(here: Here) -> None:
    a, b = here.workers(2)
    for value in (torch.zeros(4), torch.zeros(BIG), np.zeros(4), np.zeros(BIG)):
        a.send(value, B)
        got = b.recv(A)
        got += 1
        assert (got == 1).all()
        assert (value == 0).all()


@pytest.mark.parametrize("async_op", [False, True])
def test_received_values_go_with_their_owner(here: Here, async_op: bool) -> None:
    a, b = here.workers(2)
    a.send(torch.ones(BIG), B, async_op=True)
    gc.disable()
    try:
        got = b.recv(A, async_op=async_op)
        if async_op:
            got = got.wait()
        memory = weakref.ref(got)
        b.send("received", A, async_op=True)
        assert a.recv(B) == "received"
        del got
        assert memory() is None
    finally:
        gc.enable()


def test_tensors_in_place(here: Here) -> None:
    a, b = here.workers(2)
    for source in (torch.randn(5, 7), torch.randn(1200, 1000).t(), torch.randn(BIG), torch.empty(0, 2)):
        target = torch.zeros(tuple(reversed(source.shape)), dtype=source.dtype).permute(
            tuple(reversed(range(source.dim())))
        )
        assert a.send_tensor(source, B) is None
        assert b.recv_tensor(target, A) is None
        assert torch.equal(target, source)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_tensor_of_inference_mode_takes_the_values_in_place(here: Here, async_op: bool) -> None:
    """Also outside of that mode. So does another tensor in that mode."""
    a, b = here.workers(2)
    for size in (3, BIG):
        with torch.inference_mode():
            target, source = torch.zeros(size), torch.ones(size)
            a.send_tensor(source, B)
        work = b.recv_tensor(target, A, async_op=async_op)
        if async_op:
            work.wait()
        assert torch.equal(target, source)
        other = torch.zeros(size)
        with torch.inference_mode():
            a.send_tensor(source, B)
            b.recv_tensor(other, A)
        assert torch.equal(other, source)
        other.requires_grad_().sum().backward()


def test_a_parameter_takes_the_values_in_place(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    weight = torch.nn.Parameter(torch.zeros(3))
    a.send_tensor(torch.nn.Parameter(torch.ones(3)), B)
    b.recv_tensor(weight, A)
    assert weight.tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [10, BIG])
def test_an_asynchronous_send_delivers_the_values_at_the_call(here: Here, size: int) -> None:
    a, b = here.workers(2)
    values = torch.zeros(size)
    works = []
    for step in range(4):
        values.fill_(step)
        works.append(a.send(values, B, async_op=True))
        works.append(a.send_tensor(values, B, async_op=True))
    values.fill_(99)
    for step in range(4):
        assert torch.equal(b.recv(A), torch.full((size,), float(step)))
        target = torch.empty(size)
        b.recv_tensor(target, A)
        assert torch.equal(target, torch.full((size,), float(step)))
    for each in works:
        assert each is not None
        assert each.wait() is None
        assert each.done()


@pytest.mark.parametrize("size", [1, BIG])
@pytest.mark.parametrize("async_op", [False, True])
def test_both_sides_may_send_first(here: Here, size: int, async_op: bool) -> None:
    a, b = here.workers(2)

    def exchange(me: Messenger, peer: WorkerAddress) -> Tensor:
        mine = torch.full((size,), float(me.address.rank or 0))
        works = [me.send(mine, peer, async_op=async_op) for _ in range(3)]
        if async_op:
            for each in works:
                assert each is not None
                each.wait()
        return torch.stack([me.recv(peer) for _ in range(3)])

    first, second = here.start(exchange, a, B), here.start(exchange, b, A)
    assert torch.equal(first.result(60), torch.ones(3, size))
    assert torch.equal(second.result(60), torch.zeros(3, size))


def test_a_ring_may_send_first(one_connection: Here) -> None:
    ring = one_connection.workers(3)

    def pass_on(me: Messenger, rank: int) -> Any:
        me.send(rank, address((rank + 1) % 3))
        return me.recv(address((rank - 1) % 3))

    passed = [one_connection.start(pass_on, me, rank) for rank, me in enumerate(ring)]
    assert [each.result(60) for each in passed] == [2, 0, 1]


def test_a_worker_sends_to_itself(here: Here) -> None:
    (a,) = here.workers(1)
    a.send(torch.ones(BIG), A)
    assert a.recv(A).sum() == BIG


def test_a_payload_comes_along_and_differs_from_a_tuple(here: Here) -> None:
    a, b = here.workers(2)
    a.send([torch.ones(2)], B, piggyback_payload={"step": 3})
    a.send("x", B, piggyback_payload=None)
    a.send(("x", None), B)
    a.send(torch.ones(BIG), B, piggyback_payload=torch.zeros(BIG))
    value, payload = b.recv(A)
    _same(value, [torch.ones(2)])
    assert payload == {"step": 3}
    assert b.recv(A) == "x"
    assert type(b.recv(A)) is tuple
    value, payload = b.recv(A)
    assert value.sum() == BIG
    assert payload.sum() == 0


def test_several_threads_share_a_pair(here: Here) -> None:
    a, b = here.workers(2)
    threads, each = 4, 25

    def send(number: int) -> None:
        for step in range(each):
            a.send((number, step, torch.full((20_000 * (step % 2),), number)), B)

    def recv() -> list[Any]:
        return [b.recv(A) for _ in range(each)]

    sending = [here.start(send, number) for number in range(threads)]
    receiving = [here.start(recv) for _ in range(threads)]
    for future in sending:
        future.result(60)
    got = [message for future in receiving for message in future.result(60)]
    assert sorted((number, step) for number, step, _ in got) == [
        (number, step) for number in range(threads) for step in range(each)
    ]
    assert all((values == number).all() for number, _, values in got)


def test_receives_are_served_in_the_order_of_their_calls(here: Here) -> None:
    a, b = here.workers(2)
    works = [b.recv(A, async_op=True) for _ in range(10)]
    for step in range(10):
        a.send((step, torch.ones(20_000 * (step % 2))), B, async_op=True)
    assert [each.wait()[0] for each in reversed(works)] == list(reversed(range(10)))


class Unanswered:
    """What a worker asks the directory of `peer` is held back until `answer`; `asked` once it has asked."""

    def __init__(self, here: Here, peer: WorkerAddress) -> None:
        self.client = here.client()
        self._peer = peer.get_name()
        self.asked = threading.Event()
        self._real = self.client.ask
        self._held: list[Callable[[], None]] = []
        self.client.ask = self._ask  # type: ignore[method-assign]

    def _ask(self, *question: Any) -> Future[Any]:
        if self._peer not in question:
            return self._real(*question)
        answered: Future[Any] = Future()
        self._held.append(lambda: answered.set_result(self._real(*question).result(60)))
        self.asked.set()
        return answered

    def answer(self) -> None:
        for each in self._held:
            each()


def test_a_message_does_not_overtake_those_that_are_queued_while_a_receive_waits(here: Here) -> None:
    """The receiver has yet to learn whether the sender lives; until then its receive is given nothing."""
    held = Unanswered(here, A)
    a = here.worker(A)
    with Messenger(B, held.client, timeout_s=60.0, shared_memory=here.shared_memory) as b:
        b.recv(C, async_op=True)  # one that waits for something answers senders at once
        for step in range(2):
            a.send((step, torch.ones(20_000)), B)
        works = [b.recv(A, async_op=True)]
        assert held.asked.wait(60)
        a.send((2, None), B)
        assert not works[0].done()
        held.answer()
        works += [b.recv(A, async_op=True) for _ in range(2)]
        assert [each.wait()[0] for each in works] == [0, 1, 2]


def test_messages_to_a_worker_that_is_not_there_yet_arrive_in_order(here: Here) -> None:
    a = here.worker(A)
    for step in range(10):
        a.send((step, torch.ones(20_000 * (step % 2))), B, async_op=True)
    b = here.worker(B)
    a.send((10, None), B, async_op=True)
    assert [b.recv(A)[0] for _ in range(11)] == list(range(11))


def test_pairs_do_not_wait_for_each_other(one_connection: Here) -> None:
    a, b, c = one_connection.workers(3)
    from_b = a.recv(B, async_op=True)
    c.send("c", A)
    assert a.recv(C) == "c"
    assert not from_b.done()
    b.send("b", A)
    assert from_b.wait() == "b"
