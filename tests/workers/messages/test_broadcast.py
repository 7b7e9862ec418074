# ruff: noqa: F401
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.restarts import wait_until
from tests.workers.messages.messengers import Here, address, elsewhere, here, reported_to_sender, until_it_fails
from workers.directory.address import WorkerAddress
from workers.errors import GroupOptionsError, NotSerializableError, SourceFailedError, WorkerLostError
from workers.messages import CollectiveGroupOptions, Messenger, participants
from workers.messages.shared_buffers import OwnSlab

pytestmark = pytest.mark.integration

BIG = 3 << 20


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ([("g", 0)], ["g:0"]),
        ([("g", [0, 2]), ("h", 1)], ["g:0", "g:2", "h:1"]),
        ([("g", (0, 1))], ["g:0:1"]),
        ([("g", [(0, 0), (0, 1)]), ("h", (3,))], ["g:0:0", "g:0:1", "h:3"]),
    ],
)
def test_groups_as_they_are_written(written: Any, names: list[str]) -> None:
    assert [worker.get_name() for worker in participants(written)] == names


def test_groups_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least one"):
        participants([])
    with pytest.raises(ValueError, match=r"more than once: .*g:0"):
        participants([("g", [0, 1]), ("g", (0,))])


@pytest.mark.parametrize("value", ["text", torch.arange(BIG), {"a": torch.ones(3), "b": [1]}])
@pytest.mark.parametrize("source", [None, 2])
def test_every_worker_gets_the_object_of_the_source(here: Here, value: Any, source: int | None) -> None:
    workers = here.workers(4)
    names = [worker.address for worker in workers]
    src = None if source is None else address(source)
    results = [
        here.start(worker.broadcast, value if rank == (source or 0) else None, names, src)
        for rank, worker in enumerate(workers)
    ]
    got = [result.result(60) for result in results]
    assert got[source or 0] is value
    for each in got:
        assert str(each) == str(value)


def test_broadcasts_keep_their_order_and_do_not_cross_messages(here: Here) -> None:
    workers = here.workers(3)
    names = [worker.address for worker in workers]
    first, second, third = workers
    first.send("a message", names[1], async_op=True)
    works = [first.broadcast(step, names, async_op=True) for step in range(3)]
    works.append(first.broadcast("pair", names[:2], async_op=True))
    assert second.broadcast(None, names[:2], names[0]) == "pair"
    for worker in (second, third):
        assert [worker.broadcast(None, names) for _ in range(3)] == [0, 1, 2]
    assert [work.wait() for work in works] == [0, 1, 2, "pair"]
    assert second.recv(names[0]) == "a message"
    back = [worker.broadcast(None, names, names[1], async_op=True) for worker in (first, third)]
    assert second.broadcast("back", names, names[1]) == "back"
    assert [work.wait() for work in back] == ["back", "back"]


def test_alone(here: Here) -> None:
    (a,) = here.workers(1)
    assert a.broadcast("mine", [a.address]) == "mine"
    assert a.broadcast("mine", [a.address], async_op=True).wait() == "mine"


def test_who_is_not_part_of_it(here: Here) -> None:
    a, _ = here.workers(2)
    with pytest.raises(ValueError, match=r"src g:5 is not among.*; pass one of them"):
        a.broadcast(1, [address(0), address(1)], address(5))
    with pytest.raises(ValueError, match="the calling worker g:0 is not among"):
        a.broadcast(1, [address(1)])
    with pytest.raises(ValueError, match="more than once"):
        a.broadcast(1, [address(0), address(0)])


def test_a_source_that_cannot_send_fails_everywhere(here: Here) -> None:
    a, b, c = here.workers(3)
    names = [address(rank) for rank in range(3)]
    waiting = [worker.broadcast(None, names, async_op=True) for worker in (b, c)]
    with pytest.raises(NotSerializableError, match="cannot be sent"):
        a.broadcast([torch.ones(3), threading.Lock()], names)
    for work in waiting:
        with pytest.raises(SourceFailedError, match="g:0, the source of a broadcast, failed: NotSerializableError"):
            work.wait()
    again = [worker.broadcast(None, names, async_op=True) for worker in (b, c)]
    a.broadcast("fine", names)
    assert [work.wait() for work in again] == ["fine", "fine"]


def _wait(messenger: Messenger, pipe: Any) -> None:
    pipe.poll(120)


def test_a_source_that_dies_fails_everywhere(here: Here) -> None:
    b, c = here.worker(address(1)), here.worker(address(2))
    names = [address(rank) for rank in range(3)]
    with elsewhere(here.directory, address(0), _wait) as source:
        waiting = [worker.broadcast(None, names, async_op=True) for worker in (b, c)]
        source.kill()
        for work in waiting:
            with pytest.raises(WorkerLostError, match=f"g:0 is gone: its process {source.pid} died"):
                work.wait()


@pytest.mark.slow
def test_the_source_is_told_of_a_receiver_that_died(here: Here) -> None:
    a, b = here.workers(2)
    names = [address(rank) for rank in range(3)]
    with elsewhere(here.directory, address(2), _wait) as receiver:
        receiver.kill()
        other = b.broadcast(None, names, async_op=True)
        with pytest.raises(WorkerLostError, match="g:2"):
            until_it_fails(lambda: a.broadcast("x", names))
        assert other.wait() == "x"


def test_options_of_a_broadcast_group(here: Here) -> None:
    a, b = here.workers(2)
    names = [address(0), address(1)]
    waiting = b.broadcast(None, names, async_op=True)
    sent = a.broadcast(1, names, options=CollectiveGroupOptions(accel_min_ctas=1), async_op=True)
    with pytest.raises(GroupOptionsError, match="g:0 and g:1 exchange messages"):
        reported_to_sender(sent, a, b.address)
    with pytest.raises(GroupOptionsError, match="g:1 and g:0 exchange messages"):
        waiting.wait()


def test_the_values_are_copied_in_once_and_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Here(True)
    everyone = workers.workers(4)
    names = [worker.address for worker in everyone]
    made: list[int] = []
    real = OwnSlab.__init__

    def count(self: OwnSlab, host: str, nbytes: int) -> None:
        made.append(nbytes)
        real(self, host, nbytes)

    monkeypatch.setattr(OwnSlab, "__init__", count)
    for step in range(5):
        waiting = [worker.broadcast(None, names, async_op=True) for worker in everyone[1:]]
        everyone[0].broadcast(torch.full((BIG,), step), names)
        for work in waiting:
            assert (work.wait() == step).all()
        # That it was taken comes by another connection than what its receivers send.
        wait_until(lambda: everyone[0]._slabs._idle, "its memory is the source's own again")
    workers.close()
    assert len(made) == 1


def test_a_child_takes_part(here: Here) -> None:
    a = here.worker(address(0))
    child = here.worker(WorkerAddress("g", (0, 0)))
    names = participants([("g", [(0,), (0, 0)])])
    work = child.broadcast(None, names, async_op=True)
    a.broadcast("x", names)
    assert work.wait() == "x"
