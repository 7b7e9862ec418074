"""Which workers a call reaches, and with what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workers.placement import dispatch
from workers.placement.sharding import NamedSharding

AXES = ["data_parallel", "context_parallel", "tensor_parallel"]
SHARDING = NamedSharding(np.arange(8).reshape(2, 2, 2), AXES)


def reached(
    sharded: list[str], replicated: list[str], dummies: bool = False
) -> list[tuple[int, tuple[int, ...], bool]]:
    targets = dispatch.shard_targets(SHARDING, sharded, replicated, dummies=dummies)
    return [(target.worker, target.shard, target.dummy) for target in targets]


def test_sharded_replicated_and_free_axes() -> None:
    assert reached(["data_parallel"], ["tensor_parallel"]) == [
        (0, (0,), False),
        (1, (0,), False),
        (4, (1,), False),
        (5, (1,), False),
    ]
    assert [worker for worker, _, dummy in reached(["data_parallel"], [], dummies=True) if dummy] == [1, 2, 3, 5, 6, 7]
    assert [worker for worker, _, _ in reached([], AXES)] == list(range(8))
    assert reached([], []) == [(0, (), False)]


def test_several_sharded_axes_keep_their_order() -> None:
    assert [shard for _, shard, _ in reached(["tensor_parallel", "data_parallel"], [])] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
    assert dispatch.shards_of([["a", "b"], ["c", "d"]], (1, 0)) == "c"


def test_workers_are_called_in_their_order_whatever_the_layout() -> None:
    sharding = NamedSharding([[3, 1], [0, 2]], ["data_parallel", "tensor_parallel"])
    targets = dispatch.shard_targets(sharding, ["data_parallel"], ["tensor_parallel"], dummies=False)
    assert [(target.worker, target.shard) for target in targets] == [(0, (1,)), (1, (0,)), (2, (1,)), (3, (0,))]
    assert dispatch.result_workers(sharding, targets, ["tensor_parallel"]) == [0, 3]
    assert dispatch.workers_at_zero(sharding, ["data_parallel"]) == [1, 3]


def test_results_come_from_place_zero_of_replicated_outputs() -> None:
    targets = dispatch.shard_targets(SHARDING, ["data_parallel"], ["tensor_parallel"], dummies=True)
    assert dispatch.result_workers(SHARDING, targets, ["tensor_parallel"]) == [0, 4]
    assert dispatch.result_workers(SHARDING, targets, []) == [0, 1, 4, 5]


def test_workers_at_zero() -> None:
    assert dispatch.workers_at_zero(SHARDING, ["context_parallel", "tensor_parallel"]) == [0, 4]
    assert dispatch.workers_at_zero(SHARDING, []) == list(range(8))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([1], "got 1 shards, expected 2, one per position on axis 'data_parallel'"),
        ([[1], [1, 2]], "got 1 shards, expected 2, one per position on axis 'tensor_parallel'"),
        ([1, 2], "expected a list of 2 shards, one per position on axis 'tensor_parallel', got int"),
        ("ab", "expected a list of 2 shards, one per position on axis 'data_parallel', got str"),
    ],
)
def test_shards_fit_their_axes(shards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"argument x: {message}"):
        dispatch.check_shards("x", shards, SHARDING, ["data_parallel", "tensor_parallel"])


def test_shards_that_fit() -> None:
    dispatch.check_shards("x", [[1, 2], (3, 4)], SHARDING, ["data_parallel", "tensor_parallel"])
    dispatch.check_shards("x", "anything", SHARDING, [])


def test_outputs_may_be_replicated_on_sharded_axes() -> None:
    targets = dispatch.shard_targets(SHARDING, ["data_parallel"], ["tensor_parallel"], dummies=False)
    assert dispatch.result_workers(SHARDING, targets, ["data_parallel", "tensor_parallel"]) == [0]
    with pytest.raises(ValueError, match="output_is_replicated: unknown axis 'experts'"):
        dispatch.result_workers(SHARDING, targets, ["experts"])


def test_axes_have_one_role_and_are_named_once() -> None:
    with pytest.raises(ValueError, match="in replicate_on_axes; remove it"):
        reached(["data_parallel"], ["data_parallel"])
    with pytest.raises(ValueError, match="named twice"):
        reached(["data_parallel", "data_parallel"], [])
    with pytest.raises(ValueError, match="in_sharded_axes: unknown axis 'experts'"):
        reached(["experts"], [])
    with pytest.raises(ValueError, match="replicate_on_axes must be a list of names of axes, got 'data_parallel'"):
        reached([], "data_parallel")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="run_rank_0_only_axes: unknown axis 'experts'"):
        dispatch.workers_at_zero(SHARDING, ["experts"])


def test_one_value_per_worker() -> None:
    dispatch.check_counts(2, [[1, 2]], {"a": (1, 2)})
    with pytest.raises(ValueError, match="argument 0: expected a list of 2 values, one for each called worker; got 3"):
        dispatch.check_counts(2, [[1, 2, 3]], {})
    with pytest.raises(ValueError, match=r"argument a: .*; got int"):
        dispatch.check_counts(2, [], {"a": 1})
    with pytest.raises(ValueError, match=r"argument a: .*; got dict"):
        dispatch.check_counts(2, [], {"a": {0: "x", 1: "y"}})


def test_an_argument_is_common_or_not() -> None:
    dispatch.check_common({"a": 1}, {"b": [1]})
    with pytest.raises(ValueError, match="argument b is also in common_kwargs"):
        dispatch.check_common({"b": 1}, {"b": [1]})
