"""Which rows go where: what senders plan is what receivers plan, and what is cut is joined again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.groups.batch_routing import (
    CommMapper,
    RoutePlan,
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
    with pytest.raises(ValueError, match="only 0 parts were received"):
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
        (lambda: merge_batches([]), "at least one part"),
        (lambda: merge_batches([None, torch.ones(1)]), "pass a merge_fn"),
        (lambda: merge_batches([1, 2]), "pass a merge_fn"),
        (lambda: merge_batches([{"a": 1}, {"b": 1}]), "pass a merge_fn"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
