"""Batches between the ranks of two groups, over a channel and messages that are queues of this process."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.directory.registry import WORLD_SIZE
from workers.groups.routed import BatchRoute, recv_batch, send_batch

Queues = defaultdict[Any, deque[Any]]
SIZES = {"two": 2, "three": 3, "four": 4}


class Received:
    """The handle of an item that its queue has or will have."""

    def __init__(self, queue: deque[Any]) -> None:
        self._queue = queue

    def done(self) -> bool:
        return bool(self._queue)

    def wait(self, timeout: float | None = None) -> Any:
        return self._queue.popleft()

    async def async_wait(self, timeout: float | None = None) -> Any:
        return self.wait(timeout)


class Sent(Received):
    def __init__(self) -> None:
        super().__init__(deque([None]))


class LocalChannel:
    def __init__(self) -> None:
        self._queues: Queues = defaultdict(deque)

    def put(self, item: Any, weight: float = 0, key: Any = "", async_op: bool = False) -> Any:
        self._queues[key].append(item)
        return Sent() if async_op else None

    def get(self, key: Any = "", async_op: bool = False) -> Any:
        assert async_op, "recv_from starts all its requests before it waits"
        return Received(self._queues[key])


class Rank:
    """A worker with the attributes that `send_batch` and `recv_batch` use."""

    def __init__(self, group: str, rank: int, messages: Queues) -> None:
        self._rank, self._world_size = rank, SIZES[group]
        self.worker_address = SimpleNamespace(root_group_name=group)
        self._directory = SimpleNamespace(
            lookup_group=lambda name, timeout_s: SimpleNamespace(facts={WORLD_SIZE: SIZES[name]})
        )
        self._messages = messages
        self.router: dict[str, list[str]] = {}

    def send(self, item: Any, group: str, rank: int, async_op: bool = False, options: Any = None) -> Any:
        self._messages[self.worker_address.root_group_name, self._rank, group, rank].append(item)
        return Sent() if async_op else None

    def recv(self, group: str, rank: int, async_op: bool = False, options: Any = None) -> Any:
        return Received(self._messages[group, rank, self.worker_address.root_group_name, self._rank])

    def route(self, group: str, channel: LocalChannel | None, *, decoupled: bool = False, **changed: Any) -> BatchRoute:
        settings = {"route_key": None, "tag": "x", "enable_p2p": channel is None, "options": None, "queue_size": 0}
        return BatchRoute(
            group_name=group, channel=channel, router=self.router if decoupled else None, **{**settings, **changed}
        )

    def deliver(self, route: BatchRoute, rows: torch.Tensor, *, mode: str | None = None, **more: Any) -> Any:
        return send_batch(
            self, route, rows, mode=mode, **{"batch_size": None, "split_fn": None, "async_op": False, **more}
        )

    def collect(self, route: BatchRoute, batch_size: int | None, *, async_op: bool = False, **more: Any) -> Any:
        settings = {"merge_fn": None, "infer_batch_size_fn": None, **more}
        return recv_batch(self, route, batch_size=batch_size, async_op=async_op, **settings)


@pytest.fixture
def ranks() -> dict[str, list[Rank]]:
    messages: Queues = defaultdict(deque)
    return {group: [Rank(group, rank, messages) for rank in range(size)] for group, size in SIZES.items()}


def shares(rows: int, parts: int) -> list[torch.Tensor]:
    return list(torch.arange(rows).chunk(parts))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("over_channel", [False, True])
@pytest.mark.parametrize(("source", "target"), [("two", "three"), ("three", "two"), ("two", "four")])
def test_each_rank_receives_its_rows_in_order(
    ranks: dict[str, list[Rank]], source: str, target: str, over_channel: bool, async_op: bool
) -> None:
    channel = LocalChannel() if over_channel else None
    for worker, mine in zip(ranks[source], shares(12, SIZES[source]), strict=True):
        work = worker.deliver(worker.route(target, channel), mine, async_op=async_op)
        assert (work is not None) is async_op
        if work is not None:
            assert work.done()
            assert work.wait() is None
    for worker, mine in zip(ranks[target], shares(12, SIZES[target]), strict=True):
        got = worker.collect(worker.route(source, channel), 12, async_op=async_op)
        if async_op:
            assert got.done()
            got = got.wait(1.0)
        assert torch.equal(got, mine)


def test_async_code_awaits_a_batch_once_and_gets_it_again(ranks: dict[str, list[Rank]]) -> None:
    for worker, mine in zip(ranks["two"], shares(4, 2), strict=True):
        worker.deliver(worker.route("two", None), mine)
    merged = []
    work = ranks["two"][0].collect(
        ranks["two"][0].route("two", None), 4, async_op=True, merge_fn=lambda parts: merged.append(parts) or parts[0]
    )
    assert torch.equal(asyncio.run(work.async_wait(1.0)), torch.arange(2))
    assert len(merged) == 1
    assert work.done()


def test_answers_return_to_the_ranks_that_asked(ranks: dict[str, list[Rank]]) -> None:
    """Whichever rank answers a part, the answer has the place of the part."""
    out, back = LocalChannel(), LocalChannel()
    for worker, mine in zip(ranks["two"], shares(16, 2), strict=True):
        worker.deliver(worker.route("four", out, decoupled=True), mine, mode="train")
    for worker in reversed(ranks["four"]):
        worker.router["x"] = []  # the tag of parts that it answers
        rows = worker.collect(worker.route("two", out, decoupled=True), 16)
        worker.deliver(worker.route("two", back, decoupled=True), 2 * rows)
        assert worker.router == {"x": []}
    for worker, mine in zip(ranks["two"], shares(16, 2), strict=True):
        assert torch.equal(worker.collect(worker.route("four", back, decoupled=True), 16), 2 * mine)


def test_batches_that_cannot_be_sent_or_received_are_refused(ranks: dict[str, list[Rank]]) -> None:
    worker, channel = ranks["two"][0], LocalChannel()
    with pytest.raises(
        ValueError, match="no connection to group 'three' was chosen: pass a channel, or enable_p2p=True"
    ):
        worker.route("three", None, enable_p2p=False)
    with pytest.raises(ValueError, match="cannot be combined with decoupled_mode"):
        worker.route("three", None, decoupled=True)
    with pytest.raises(ValueError, match="needs batch_size"):
        worker.collect(worker.route("three", channel), None)
    with pytest.raises(ValueError, match="split_fn returned 1 parts for tag 'x'; expected 2"):
        worker.deliver(worker.route("four", channel), torch.arange(2), split_fn=lambda data, sizes: [data])
    worker.deliver(worker.route("two", None), torch.arange(3))
    with pytest.raises(ValueError, match="has 3 rows; batch_size=4 requires 2"):
        worker.collect(worker.route("two", None), 4)
