"""Which rows go where: what senders plan is what receivers plan, and what is cut is joined again."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.directory.address import WorkerAddress
from workers.directory.registry import WORLD_SIZE
from workers.messages import AsyncWork
from workers.rlinf.routing import (
    CommMapper,
    RoutePlan,
    RoutingWorker,
    build_recv_plan,
    build_route_channel_key,
    build_send_key,
    build_send_plan,
    decoupled_build_recv_plan,
    decoupled_build_send_plan,
    get_batch_size,
    infer_batch_size,
    merge_batches,
    split_batch,
    split_channel_message,
)

SIZES = st.integers(1, 12)


def sends(rank: int, size: int, peers: int, rows: int, **more: Any) -> RoutePlan:
    return build_send_plan(
        src_group_name="env",
        dst_group_name="rollout",
        src_rank=rank,
        src_world_size=size,
        dst_world_size=peers,
        batch_size=rows,
        **{"tag": "obs", **more},
    )


def receives(rank: int, size: int, peers: int, rows: int, **more: Any) -> RoutePlan:
    return build_recv_plan(
        src_group_name="env",
        dst_group_name="rollout",
        dst_rank=rank,
        src_world_size=peers,
        dst_world_size=size,
        batch_size=rows,
        **{"tag": "obs", **more},
    )


@given(senders=SIZES, receivers=SIZES, times=st.integers(1, 4))
def test_every_part_that_is_sent_is_received_in_order(senders: int, receivers: int, times: int) -> None:
    rows = int(np.lcm(senders, receivers)) * times
    sent = {
        each.key: each.batch_size for rank in range(senders) for each in sends(rank, senders, receivers, rows).entries
    }
    place = 0
    for rank in range(receivers):
        entries = receives(rank, receivers, senders, rows).entries
        assert [each.peer_rank for each in entries] == sorted({each.peer_rank for each in entries})
        assert sum(each.batch_size for each in entries) == rows // receivers
        for entry in entries:
            assert sent.pop(entry.key) == entry.batch_size
            assert entry.peer_rank == place // (rows // senders)
            place += entry.batch_size
    assert not sent


def test_the_parts_of_a_batch() -> None:
    assert [(each.peer_rank, each.batch_size) for each in sends(0, 2, 3, 12).entries] == [(0, 4), (1, 2)]
    assert [(each.peer_rank, each.batch_size) for each in receives(1, 3, 2, 12).entries] == [(0, 2), (1, 2)]
    assert CommMapper.get_dst_ranks(12, 3, 2, 1) == [(0, 2), (1, 2)]
    assert CommMapper.get_src_ranks(12, 3, 2, 1) == [(1, 2), (2, 4)]
    assert CommMapper.build_channel_key(0, 1, "x") == "0_1_x"


@pytest.mark.parametrize(
    ("rows", "senders", "receivers", "rank", "message"),
    [
        (10, 3, 2, 0, "evenly"),
        (9, 3, 2, 0, "evenly"),
        (0, 1, 1, 0, "evenly"),
        (6, 3, 2, 3, "rank 3"),
        (6, 3, 2, -1, "rank -1"),
    ],
)
def test_batches_that_do_not_fit(rows: int, senders: int, receivers: int, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommMapper.get_dst_ranks(rows, senders, receivers, rank)


def test_keys_differ_by_all_that_names_a_stream() -> None:
    key = build_route_channel_key("env", "rollout", 2, 1, "train")
    assert key == build_send_key(src_group_name="env", dst_group_name="rollout", src_rank=2, dst_rank=1, tag="train")
    others = [
        build_route_channel_key("a", "rollout", 2, 1, "train"),
        build_route_channel_key("env", "b", 2, 1, "train"),
        build_route_channel_key("env", "rollout", 1, 2, "train"),
        build_route_channel_key("env", "rollout", 2, 1, None),
        build_route_channel_key("env", "rollout", 2, 1, "train", 0),
        build_route_channel_key("env", "rollout", 2, 1, "train", (0, "x")),
        build_route_channel_key("env", "rollout", None, 1, "train"),
    ]
    assert len({key, *others}) == 8


def test_decoupled_parts_find_the_way_back() -> None:
    asked = [
        decoupled_build_send_plan(
            src_group_name="env", dst_group_name="rollout", src_rank=rank, src_world_size=2, dst_world_size=4,
            tag="obs", batch_size=16, mode="train",
        )
        for rank in range(2)
    ]  # fmt: skip
    routes = [each.batch_index for plan in asked for each in plan.entries]
    assert routes == ["0_0_train_obs", "0_1_train_obs", "1_0_train_obs", "1_1_train_obs"]
    taken = decoupled_build_recv_plan(
        src_group_name="env", dst_group_name="rollout", recv_rank=None, src_world_size=4, dst_world_size=2,
        tag="obs", batch_size=16,
    )  # fmt: skip
    assert {each.key for each in taken.entries} == {each.key for plan in asked for each in plan.entries}
    assert [each.batch_size for each in taken.entries] == [4]
    answer = decoupled_build_send_plan(
        src_group_name="rollout", dst_group_name="env", src_rank=None, src_world_size=4, dst_world_size=2,
        tag="obs", batch_size=16, tag_batch_router=["1_0_train_obs"],
    )  # fmt: skip
    back = decoupled_build_recv_plan(
        src_group_name="rollout", dst_group_name="env", recv_rank=1, src_world_size=2, dst_world_size=4,
        tag="obs", batch_size=16,
    )  # fmt: skip
    assert (answer.entries[0].key, answer.entries[0].batch_index) == (back.entries[0].key, "1_0_train_obs")


def test_decoupled_parts_that_do_not_fit() -> None:
    assert CommMapper.decoupled_get_batch_size(32, 2, 8) == [4] * 4
    assert CommMapper.decoupled_get_batch_size(32, 2, 8, 1) == [4]
    assert CommMapper.decoupled_get_batch_size(32, 8, 2) == [4]
    with pytest.raises(ValueError, match="evenly"):
        CommMapper.decoupled_get_batch_size(33, 2, 8)
    with pytest.raises(ValueError, match="queue_size=5"):
        CommMapper.decoupled_get_batch_size(32, 2, 8, 5)
    with pytest.raises(ValueError, match="only 0 slices were received"):
        decoupled_build_send_plan(
            src_group_name="a", dst_group_name="b", src_rank=None, src_world_size=1, dst_world_size=1,
            tag=None, batch_size=1, tag_batch_router=[],
        )  # fmt: skip


def test_routes() -> None:
    assert split_channel_message("3_0_eval_rollout_results") == (3, 0, "eval", "rollout_results")
    for wrong in ("3_0_eval", "a_0_eval_x", ""):
        with pytest.raises(ValueError, match=r"not a route|invalid literal"):
            split_channel_message(wrong)


def test_what_is_cut_is_joined_again() -> None:
    data = {
        "states": torch.arange(12.0).view(6, 2).t().contiguous().t(),
        "images": None,
        "rewards": np.arange(6),
        "tasks": [f"task {row}" for row in range(6)],
        "epoch": 3,
        "inner": {"masks": torch.ones(6, dtype=torch.bool)},
    }
    parts = split_batch(data, [4, 0, 2])
    assert [infer_batch_size(part) for part in parts] == [4, 0, 2]
    assert parts[0]["states"].is_contiguous()
    assert parts[2]["tasks"] == ["task 4", "task 5"]
    joined = merge_batches(parts)
    assert torch.equal(joined["states"], data["states"])
    assert joined["rewards"].tolist() == list(range(6))
    assert joined["inner"]["masks"].shape == (6,)
    assert {name: joined[name] for name in ("images", "tasks", "epoch")} == {
        name: data[name] for name in ("images", "tasks", "epoch")
    }
    assert get_batch_size([1, 2]) == 2
    assert get_batch_size(object(), lambda _: 7) == 7


def test_what_cannot_be_cut_or_joined() -> None:
    for call, message in (
        (lambda: infer_batch_size({"a": None}), "rows of a dict"),
        (lambda: infer_batch_size(object()), "rows of a object"),
        (lambda: split_batch(object(), [1]), "pass a split_fn"),
        (lambda: split_batch(torch.ones(3), [1, 1]), "3 rows"),
        (lambda: merge_batches([]), "at least one slice"),
        (lambda: merge_batches([None, torch.ones(1)]), "pass a merge_fn"),
        (lambda: merge_batches([1, 2]), "pass a merge_fn"),
        (lambda: merge_batches([{"a": 1}, {"b": 1}]), "pass a merge_fn"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# --- batches between two groups, over a channel and messages that are queues of this process

Queues = defaultdict[Any, deque[Any]]
WORLD_SIZES = {"two": 2, "three": 3, "four": 4}


def done(value: Any) -> AsyncWork[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return AsyncWork(future, "a part")


class LocalChannel:
    def __init__(self) -> None:
        self._queues: Queues = defaultdict(deque)

    def put(self, item: Any, weight: float = 0, key: Any = "", async_op: bool = False) -> Any:
        self._queues[key].append(item)
        return done(None) if async_op else None

    def get(self, key: Any = "", async_op: bool = False) -> Any:
        assert async_op, "recv_from starts all its requests before it waits"
        return done(self._queues[key].popleft())


class Rank(RoutingWorker):
    def __init__(self, group: str, rank: int, messages: Queues) -> None:
        self._rank, self._world_size = rank, WORLD_SIZES[group]
        self._worker_address = WorkerAddress(group, rank)
        self._directory: Any = SimpleNamespace(
            lookup_worker_group=lambda name, timeout_s: SimpleNamespace(facts={WORLD_SIZE: WORLD_SIZES[name]})
        )
        self._messages = messages
        self.batch_router = {}

    def send(self, item: Any, group: str, rank: Any, async_op: bool = False, *_: Any, **__: Any) -> Any:
        own = self.worker_address.root_group_name
        self._messages[own, self._rank, group, rank].append(item)
        return done(None) if async_op else None

    def recv(self, group: str, rank: Any, async_op: bool = False, *_: Any, **__: Any) -> Any:
        own = self.worker_address.root_group_name
        return done(self._messages[group, rank, own, self._rank].popleft())

    def deliver(self, group: str, channel: Any, rows: torch.Tensor, **more: Any) -> Any:
        return self.send_to(group, channel, rows, **{"tag": "x", "enable_p2p": channel is None, **more})

    def collect(self, group: str, channel: Any, batch_size: int | None, **more: Any) -> Any:
        how = {"tag": "x", "enable_p2p": channel is None, **more}
        return self.recv_from(group, channel, batch_size=batch_size, **how)


@pytest.fixture
def ranks() -> dict[str, list[Rank]]:
    messages: Queues = defaultdict(deque)
    return {group: [Rank(group, rank, messages) for rank in range(size)] for group, size in WORLD_SIZES.items()}


def shares(rows: int, parts: int) -> list[torch.Tensor]:
    return list(torch.arange(rows).chunk(parts))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("over_channel", [False, True])
@pytest.mark.parametrize(("source", "target"), [("two", "three"), ("three", "two"), ("two", "four")])
def test_each_rank_receives_its_rows_in_order(
    ranks: dict[str, list[Rank]], source: str, target: str, over_channel: bool, async_op: bool
) -> None:
    channel = LocalChannel() if over_channel else None
    for worker, mine in zip(ranks[source], shares(12, WORLD_SIZES[source]), strict=True):
        work = worker.deliver(target, channel, mine, async_op=async_op)
        assert (work is not None) is async_op
        if work is not None:
            assert work.done()
            assert work.wait() is None
    for worker, mine in zip(ranks[target], shares(12, WORLD_SIZES[target]), strict=True):
        got = worker.collect(source, channel, 12, async_op=async_op)
        if async_op:
            assert got.done()
            got = got.wait(1.0)
        assert torch.equal(got, mine)


def test_tags_keep_batches_of_the_same_ranks_apart(ranks: dict[str, list[Rank]]) -> None:
    channel = LocalChannel()
    for tag, rows in (("late", 12), ("early", 6)):
        for worker, mine in zip(ranks["two"], shares(rows, 2), strict=True):
            worker.deliver("three", channel, mine, tag=tag, mode="train")
    for worker, early, late in zip(ranks["three"], shares(6, 3), shares(12, 3), strict=True):
        assert torch.equal(worker.collect("two", channel, 6, tag="train_early"), early)
        assert torch.equal(worker.collect("two", channel, 12, tag="train_late"), late)


def test_async_code_awaits_a_batch_once_and_gets_it_again(ranks: dict[str, list[Rank]]) -> None:
    for worker, mine in zip(ranks["two"], shares(4, 2), strict=True):
        worker.deliver("two", None, mine)
    merged = []
    work = ranks["two"][0].collect(
        "two", None, 4, async_op=True, merge_fn=lambda parts: merged.append(parts) or parts[0]
    )
    assert torch.equal(asyncio.run(work.async_wait(1.0)), torch.arange(2))
    assert len(merged) == 1
    assert work.done()


def test_answers_return_to_the_ranks_that_asked(ranks: dict[str, list[Rank]]) -> None:
    """Whichever rank answers a part, the answer has the place of the part."""
    out, back = LocalChannel(), LocalChannel()
    for worker, mine in zip(ranks["two"], shares(16, 2), strict=True):
        worker.deliver("four", out, mine, decoupled_mode=True, mode="train")
    for worker in reversed(ranks["four"]):
        worker.batch_router["x"] = []  # the tag of parts that it answers
        rows = worker.collect("two", out, 16, decoupled_mode=True)
        worker.deliver("two", back, 2 * rows, decoupled_mode=True)
        assert worker.batch_router == {"x": []}
    for worker, mine in zip(ranks["two"], shares(16, 2), strict=True):
        assert torch.equal(worker.collect("four", back, 16, decoupled_mode=True), 2 * mine)


def test_batches_that_cannot_be_sent_or_received_are_refused(ranks: dict[str, list[Rank]]) -> None:
    worker, channel = ranks["two"][0], LocalChannel()
    with pytest.raises(
        ValueError, match="no connection to group 'three' was chosen: pass a channel, or enable_p2p=True"
    ):
        worker.deliver("three", None, torch.arange(3), enable_p2p=False)
    with pytest.raises(ValueError, match="cannot be combined with decoupled_mode"):
        worker.deliver("three", None, torch.arange(3), decoupled_mode=True)
    with pytest.raises(ValueError, match="needs batch_size"):
        worker.collect("three", channel, None)
    with pytest.raises(ValueError, match="split_fn returned 1 slices for tag 'x'; expected 2"):
        worker.deliver("four", channel, torch.arange(2), split_fn=lambda data, sizes: [data])
    worker.deliver("two", None, torch.arange(3))
    with pytest.raises(ValueError, match="has 3 rows; batch_size=4 requires 2"):
        worker.collect("two", None, 4)
