"""Tensors that travel by process groups: on the CPU here, with Gloo."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.restarts import wait_until
from tests.workers.messages.messengers import WAIT_S, Here, address, elsewhere, fails_at_both_ends, until_it_fails
from tests.workers.messages.test_messenger import Batch, _same
from workers.errors import (
    DeviceTransferError,
    GroupOptionsError,
    MessageMismatchError,
    MessageTimeoutError,
    WorkerLostError,
)
from workers.messages import CollectiveGroupOptions, Messenger, collectives
from workers.messages.collectives import COLLECTIVES_VARIABLE, CollectiveGroup, Road
from workers.messages.wire import DeviceId

pytestmark = pytest.mark.integration

A, B, C = address(0), address(1), address(2)
NAMES = [A, B, C]
BIG = 3 << 20


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setenv(COLLECTIVES_VARIABLE, "always")
    submit = CollectiveGroup.submit

    def counted(self: Any, values: Any, done: Any) -> None:
        self.submitted = getattr(self, "submitted", 0) + 1
        submit(self, values, done)

    monkeypatch.setattr(CollectiveGroup, "submit", counted)
    workers = Here(True, collectives="always")
    yield workers
    workers.close()


def _collectives(messenger: Messenger) -> list[CollectiveGroup]:
    return list(messenger._io_thread._collectives._collectives.values())


def _sent_by_collectives(messenger: Messenger) -> int:
    groups: list[Any] = _collectives(messenger)
    return sum(group.submitted for group in groups if group.membership.rank == 0)


# --- the choice of the road -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(7),
        [torch.ones(2), torch.zeros(BIG)],
        {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)},
        Batch(torch.arange(9), [torch.ones(1)], "n"),
    ],
    ids=["tensor", "list", "dict", "dataclass"],
)
def test_tensors_travel_by_a_process_group(switched: Here, value: Any) -> None:
    a, b = switched.workers(2)
    a.send(value, B)
    _same(b.recv(A), value)
    assert _sent_by_collectives(a) == 1


@pytest.mark.parametrize(
    "value",
    [None, "text", {"deep": [1]}, torch.empty(0, 3), np.arange(BIG), {"a": torch.ones(3), "b": np.arange(BIG)}],
    ids=["none", "text", "objects", "empty", "array", "mixed"],
)
def test_other_values_travel_through_host_memory(switched: Here, value: Any) -> None:
    a, b = switched.workers(2)
    a.send(value, B)
    _same(b.recv(A), value)
    assert not _collectives(a)


def test_tensors_on_the_cpu_use_no_process_group_by_default() -> None:
    workers = Here(True)
    a, b = workers.workers(2)
    a.send(torch.ones(BIG), B)
    assert b.recv(A).sum() == BIG
    assert not _collectives(a)
    workers.close()


def test_an_unknown_mode_is_an_error(switched: Here) -> None:
    with pytest.raises(ValueError, match=r"collectives='sometimes': expected one of auto, always, never"):
        switched.worker(A, collectives="sometimes")


def test_a_tensor_in_place(switched: Here) -> None:
    a, b = switched.workers(2)
    source, target = torch.randn(1200, 1000).t(), torch.zeros(1200, 1000).t()
    a.send_tensor(source, B)
    b.recv_tensor(target, A)
    assert torch.equal(source, target)
    a.send_tensor(source, B)
    with pytest.raises(MessageMismatchError):
        b.recv_tensor(torch.zeros(5), A)
    with pytest.raises(MessageMismatchError):
        until_it_fails(lambda: a.send(1, B))
    assert _sent_by_collectives(a) == 1


def test_the_user_s_process_group_is_not_used(switched: Here) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        a, b = switched.workers(2)
        a.send(torch.arange(5), B)
        assert torch.equal(b.recv(A), torch.arange(5))
        assert _sent_by_collectives(a) == 1
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_devices_on_which_tensors_are_received() -> None:
    road, cpu = Road("auto", "g:0"), torch.device("cpu")
    assert road.receiving_device(DeviceId("cpu", ""), None, None) == cpu
    assert Road("never", "g:0").receiving_device(DeviceId("cpu", ""), None, None) is None
    meta = torch.device("meta")
    assert road.receiving_device(DeviceId("meta:0", ""), torch.empty(1, device=meta), None) == meta
    assert road.receiving_device(DeviceId("meta:0", ""), None, meta) == meta
    assert road.receiving_device(DeviceId("meta:0", ""), torch.empty(1), None) is None


# --- order ----------------------------------------------------------------------------------------------------------


def _mixture(seed: int) -> list[tuple[bool, Any]]:
    """Messages of both roads: whether with send_tensor, and the value."""
    chance = random.Random(seed)
    kinds = [
        lambda n: (False, n),
        lambda n: (False, torch.full((3,), n)),
        lambda n: (True, torch.full((chance.choice([1, 1000, 100_000]),), n)),
        lambda n: (False, {"a": torch.full((70_000,), n), "n": n}),
        lambda n: (False, [np.full(2000, n), torch.full((2,), n)]),
    ]
    return [chance.choice(kinds)(number) for number in range(30)]


def _exchange(messenger: Messenger, peer: Any, mine: int, theirs: int) -> None:
    """Send a mixture, all before the first receive, and receive another."""
    chance = random.Random(mine)
    works = []
    for in_place, value in _mixture(mine):
        send = messenger.send_tensor if in_place else messenger.send
        works.append(send(value, peer, async_op=chance.random() < 0.5))
    received, expected = [], _mixture(theirs)
    for in_place, value in expected:
        async_op = chance.random() < 0.5
        if in_place:
            target = torch.zeros_like(value)
            received.append((messenger.recv_tensor(target, peer, async_op=async_op), target))
        else:
            got = messenger.recv(peer, async_op=async_op)
            received.append((got, None) if async_op else (None, got))
    for (work, result), (_, value) in zip(received, expected, strict=True):
        got = work.wait() if work is not None else result
        _same(result if result is not None else got, value)
    for work in works:
        if work is not None:
            work.wait()


def _exchange_here(messenger: Messenger, pipe: Any) -> None:
    _exchange(messenger, A, *pipe.recv())
    pipe.send("done")
    pipe.poll(120)


@pytest.mark.parametrize("seed", range(4))
def test_order_holds_across_both_roads_and_directions(switched: Here, seed: int) -> None:
    (a,) = switched.workers(1)
    with elsewhere(switched.directory, B, _exchange_here) as peer:
        peer.pipe.send((2 * seed + 1, 2 * seed))
        _exchange(a, B, 2 * seed, 2 * seed + 1)
        assert peer.hear() == "done"
        assert _sent_by_collectives(a)


# --- options --------------------------------------------------------------------------------------------------------

OPTIONS = CollectiveGroupOptions(accel_cluster_size=2, accel_max_ctas=8, accel_min_ctas=4, is_high_priority_stream=True)


def test_options_reach_the_group_of_both_ends(switched: Here) -> None:
    a, b = switched.workers(2)
    a.send(torch.ones(2), B, options=OPTIONS)
    b.recv(A, options=OPTIONS)
    assert [group.membership.options for each in (a, b) for group in _collectives(each)] == [OPTIONS, OPTIONS]


def test_different_options_are_an_error_at_both_ends(switched: Here) -> None:
    a, b = switched.workers(2)
    work = a.send(torch.ones(2), B, options=OPTIONS, async_op=True)
    with pytest.raises(GroupOptionsError):
        b.recv(A)
    with pytest.raises(GroupOptionsError):
        work.wait()
    assert not _collectives(a)


@pytest.mark.parametrize("has_settings", [True, False])
def test_options_are_those_of_the_backend(has_settings: bool) -> None:
    class Options:
        def __init__(self) -> None:
            if has_settings:
                self.is_high_priority_stream = False
                self.config = SimpleNamespace(cga_cluster_size=0, max_ctas=0, min_ctas=0)

    kind, timeout = SimpleNamespace(Options=Options), timedelta(seconds=5)
    made = collectives._backend_options(kind, OPTIONS, timeout)
    assert made._timeout == timeout
    if has_settings:
        assert made.is_high_priority_stream
        assert vars(made.config) == {"cga_cluster_size": 2, "max_ctas": 8, "min_ctas": 4}
    else:
        assert vars(made) == {"_timeout": timeout}


# --- broadcast ------------------------------------------------------------------------------------------------------


def test_the_receivers_of_a_broadcast_are_one_group(switched: Here) -> None:
    workers = switched.workers(3)
    for number in range(3):
        works = [each.broadcast(torch.full((BIG,), number), NAMES, async_op=True) for each in workers]
        for work in works:
            assert torch.equal(work.wait(), torch.full((BIG,), number))
    groups: list[Any] = _collectives(workers[0])
    assert [(group.membership.size, group.submitted) for group in groups] == [(3, 3)]


@pytest.mark.parametrize("way", ["closes", "gives up", "has no device"])
def test_a_broadcast_begins_without_a_receiver_that_gets_nothing_by_it(switched: Here, way: str) -> None:
    a, b = switched.workers(2)
    c = switched.worker(C, collectives="never" if way == "has no device" else "always")
    if way == "closes":
        c.close()
    works = [each.broadcast(torch.arange(BIG), NAMES, async_op=True) for each in (b, a)]
    if way == "gives up":
        with pytest.raises(MessageTimeoutError):
            c.broadcast(None, NAMES, timeout_s=0.01)
    elif way == "has no device":
        assert torch.equal(c.broadcast(None, NAMES), torch.arange(BIG))
    assert torch.equal(works[0].wait(), torch.arange(BIG))
    if way == "closes":
        with pytest.raises(WorkerLostError, match="g:2 is gone"):
            works[1].wait()
    else:
        works[1].wait()
    if way != "gives up":  # it may have been ready before
        assert [group.membership.peers for group in _collectives(a)] == [{"g:1"}]


def test_receivers_that_give_up_do_not_stop_a_group(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = switched.workers(2)
    real, hold, held = CollectiveGroup._broadcast, threading.Event(), threading.Event()

    def wait_first(self: CollectiveGroup, values: Any) -> Any:
        held.set()
        assert hold.wait(WAIT_S)
        return real(self, values)

    monkeypatch.setattr(CollectiveGroup, "_broadcast", wait_first)
    a.send(torch.arange(5), B)
    work = b.recv(A, async_op=True)
    assert held.wait(WAIT_S)
    del work
    hold.set()
    assert torch.equal(b.recv(A), torch.arange(5))


# --- no such device, and failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_receiver_without_such_a_device(switched: Here, shared_memory: bool) -> None:
    switched.shared_memory = shared_memory
    a, b = switched.worker(A), switched.worker(B, collectives="never")
    for number in range(3):
        works = [a.send(torch.full((size,), number), B, async_op=True) for size in (10, BIG)]
        for size in (10, BIG):
            assert torch.equal(b.recv(A), torch.full((size,), number))
        for work in works:
            work.wait()
    target = torch.zeros(BIG)
    a.send_tensor(torch.ones(BIG), B)
    b.recv_tensor(target, A)
    assert target.sum() == BIG
    assert not _collectives(a)


def _fail_once(monkeypatch: pytest.MonkeyPatch, part: str, failing_rank: int) -> None:
    """Let the first call of one part of the way fail at the member of this rank."""
    owner: Any = collectives if part == "make_process_group" else CollectiveGroup
    real, failed = getattr(owner, part), threading.Event()

    def fail(self: Any, *args: Any) -> Any:
        membership = self if part == "make_process_group" else self.membership
        if membership.rank == failing_rank and not failed.is_set():
            failed.set()
            raise RuntimeError("broken")
        return real(self, *args)

    monkeypatch.setattr(owner, part, fail)


@pytest.mark.parametrize("part", ["make_process_group", "_broadcast"])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_transfer_that_fails_is_an_error_at_both_ends(
    switched: Here, monkeypatch: pytest.MonkeyPatch, part: str, failing_rank: int
) -> None:
    """The next message has a new group."""
    a, b = switched.workers(2)
    _fail_once(monkeypatch, part, failing_rank)
    fails_at_both_ends(a, b, DeviceTransferError, "broken")
    a.send(torch.arange(5), B, async_op=True)
    assert torch.equal(b.recv(A), torch.arange(5))
    assert [group.closed for group in _collectives(a)] == [False]


@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_a_broadcast_whose_group_fails(switched: Here, monkeypatch: pytest.MonkeyPatch, failing_rank: int) -> None:
    workers = switched.workers(3)
    _fail_once(monkeypatch, "make_process_group", failing_rank)
    sent, *received = [each.broadcast(torch.arange(BIG), NAMES, async_op=True) for each in workers]
    for work in received:
        with pytest.raises(DeviceTransferError, match="broken"):
            work.wait()
    with contextlib.suppress(DeviceTransferError):  # otherwise the source's next call raises it
        sent.wait()
    wait_until(lambda: not workers[0]._backlog.waiting_bytes, "the refusals are known")
    handled = threading.Event()
    workers[0]._io_thread.call(handled.set)
    assert handled.wait(WAIT_S)
    workers[0]._io_thread.outgoing._late.clear()
    works = [each.broadcast(torch.arange(BIG), NAMES, async_op=True) for each in workers]
    for work in works:
        assert torch.equal(work.wait(), torch.arange(BIG))


def test_a_transfer_that_makes_no_progress_ends(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = switched.worker(A, timeout_s=0.5), switched.worker(B)
    go_on, real = threading.Event(), CollectiveGroup._broadcast

    def hang(self: CollectiveGroup, values: Any) -> Any:
        if self.membership.rank == 1:
            go_on.wait(WAIT_S)
        return real(self, values)

    monkeypatch.setattr(CollectiveGroup, "_broadcast", hang)
    a.send(torch.arange(BIG), B, async_op=True, timeout_s=WAIT_S)
    with pytest.raises(DeviceTransferError, match="the tensors were not transferred"):
        b.recv(A)
    go_on.set()


# --- the ends -------------------------------------------------------------------------------------------------------


def _hang_at(transfer: int) -> threading.Event:
    """Let this process hang in the transfer of this number. The event says that it does."""
    asked, numbers, real = threading.Event(), itertools.count(), CollectiveGroup._outcome

    def outcome(self: CollectiveGroup, values: Any) -> Any:
        if next(numbers) == transfer:
            asked.set()
            threading.Event().wait()
        return real(self, values)

    CollectiveGroup._outcome = outcome  # type: ignore[method-assign]
    return asked


def _send_and_hang(messenger: Messenger, pipe: Any) -> None:
    """Send two tensors, and hang in the group of the second, or of the first."""
    asked = _hang_at(pipe.recv())
    for _ in range(2):
        messenger.broadcast(torch.arange(BIG), NAMES, async_op=True)
    asked.wait(120)
    pipe.send("hangs")
    pipe.poll(120)


@pytest.mark.slow
@pytest.mark.parametrize("hangs_at", [0, 1])
def test_a_source_that_dies_in_a_transfer(switched: Here, monkeypatch: pytest.MonkeyPatch, hangs_at: int) -> None:
    b, c = switched.worker(B), switched.worker(C)
    with elsewhere(switched.directory, A, _send_and_hang) as source:
        source.pipe.send(hangs_at)
        works = [each.broadcast(None, NAMES, async_op=True) for _ in range(2) for each in (b, c)]
        assert source.hear() == "hangs"
        source.kill()
        for work in works[: 2 * hangs_at]:
            assert torch.equal(work.wait(), torch.arange(BIG))
        for work in works[2 * hangs_at :]:
            with pytest.raises((WorkerLostError, DeviceTransferError), match="g:0"):
                work.wait()
    wait_until(lambda: not _collectives(b), "the death is known")
    a = switched.worker(A)
    a.send(torch.arange(3), B)
    assert torch.equal(b.recv(A), torch.arange(3))
    assert _sent_by_collectives(a) == 1


def _receive_and_hang(messenger: Messenger, pipe: Any) -> None:
    """Receive a tensor, and hang in the group of the next, or of the first."""
    asked = _hang_at(pipe.recv())
    works = [messenger.recv(A, async_op=True) for _ in range(2)]
    asked.wait(120)
    pipe.send("hangs")
    pipe.poll(120)
    del works


@pytest.mark.slow
@pytest.mark.parametrize("hangs_at", [0, 1])
def test_a_receiver_that_dies_in_a_transfer(switched: Here, hangs_at: int) -> None:
    a = switched.worker(A)
    with elsewhere(switched.directory, B, _receive_and_hang) as peer:
        peer.pipe.send(hangs_at)
        for _ in range(2):
            a.send(torch.arange(BIG), B, async_op=True)
        waiting = a.recv(B, async_op=True)
        assert peer.hear() == "hangs"
        peer.kill()
        with pytest.raises(WorkerLostError, match="g:1 is gone"):
            waiting.wait()
    wait_until(lambda: not a._backlog.waiting_bytes, "nothing is kept for it")
    assert not _collectives(a)
    a._io_thread.outgoing._late.clear()
    b = switched.worker(B)
    a.send(torch.arange(3), B)
    assert torch.equal(b.recv(A), torch.arange(3))
    assert _sent_by_collectives(a) == 1


def _receive_broadcast_and_hang(messenger: Messenger, pipe: Any) -> None:
    asked = _hang_at(0)
    work = messenger.broadcast(None, NAMES, async_op=True)
    asked.wait(120)
    pipe.send("hangs")
    pipe.poll(120)
    del work


@pytest.mark.slow
def test_a_receiver_that_dies_in_a_broadcast(switched: Here) -> None:
    """The broadcast fails at all receivers."""
    a, c = switched.worker(A), switched.worker(C)
    with elsewhere(switched.directory, B, _receive_broadcast_and_hang) as peer:
        sent = a.broadcast(torch.arange(BIG), NAMES, async_op=True)
        received = c.broadcast(None, NAMES, async_op=True)
        assert peer.hear() == "hangs"
        peer.kill()
        with pytest.raises((DeviceTransferError, WorkerLostError), match="g:1"):
            received.wait()
        with pytest.raises((DeviceTransferError, WorkerLostError), match="g:1"):
            sent.wait()
    a._io_thread.outgoing._late.clear()
    a.send(torch.arange(3), C)
    assert torch.equal(c.recv(A), torch.arange(3))
    assert [group.membership.peers for group in _collectives(a)] == [{"g:2"}]


def test_a_receive_that_times_out_in_a_transfer(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = switched.workers(2)
    real, go_on = CollectiveGroup._broadcast, threading.Event()

    def wait_first(self: CollectiveGroup, values: Any) -> Any:
        assert go_on.wait(WAIT_S)
        return real(self, values)

    monkeypatch.setattr(CollectiveGroup, "_broadcast", wait_first)
    a.send(torch.arange(5), B)
    with pytest.raises(MessageTimeoutError):
        b.recv(A, timeout_s=0.1)
    go_on.set()
    assert torch.equal(b.recv(A), torch.arange(5))
    assert _sent_by_collectives(a) == 1
