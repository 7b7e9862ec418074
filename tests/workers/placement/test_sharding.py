"""Named axes over ranks."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from workers.placement.sharding import REPLICATED_AXES, NamedSharding

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


@pytest.fixture
def sharding() -> NamedSharding:
    return NamedSharding(np.arange(16).reshape(2, 2, 2, 2), AXES)


def test_axes_and_sizes(sharding: NamedSharding) -> None:
    assert sharding.shape == dict.fromkeys(AXES, 2)
    assert sharding.names == AXES
    assert (sharding.ndim, sharding.size) == (4, 16)
    assert sharding.get_axis_index("context_parallel") == 2
    assert sharding.get_axis_size("data_parallel") == 2


def test_layout_is_a_copy(sharding: NamedSharding) -> None:
    sharding.layout[0, 0, 0, 0] = 99
    assert sharding.layout[0, 0, 0, 0] == 0


def test_coords_and_ranks_are_inverse(sharding: NamedSharding) -> None:
    for rank in range(16):
        coords = sharding.get_worker_coords(rank)
        assert sharding.get_ranks_by_coord(**coords) == [rank]
        assert sharding.get_ranks(**coords) == rank


def test_coords_follow_the_layout_not_the_rank_number() -> None:
    sharding = NamedSharding([[3, 1], [0, 2]], ["data_parallel", "tensor_parallel"])
    assert sharding.get_worker_coords(0) == {"data_parallel": 1, "tensor_parallel": 0}
    assert sharding.get_ranks_by_coord(tensor_parallel=0) == [0, 3]


def test_coords_are_looked_up_not_searched(sharding: NamedSharding) -> None:
    del sharding._layout
    assert sharding.get_worker_coords(13) == dict(zip(AXES, (1, 1, 0, 1), strict=True))


def test_any_integers_will_do() -> None:
    for layout in (((4, 2), (7, 1)), np.array([[4, 2], [7, 1]], dtype=np.uint8), [range(4, 6), range(7, 9)]):
        sharding = NamedSharding(layout, ["a", "b"])
        assert sharding.layout.dtype == np.int64
        assert sharding.get_worker_coords(7) == {"a": 1, "b": 0}
        assert sharding.get_ranks(a=np.int64(1), b=0) == 7


def test_ranks_by_coord_match_free_axes(sharding: NamedSharding) -> None:
    assert sharding.get_ranks_by_coord(data_parallel=1, tensor_parallel=0) == [4, 6, 12, 14]
    assert sharding.get_ranks_by_coord() == list(range(16))
    assert sharding.get_ranks_by_coord(data_parallel=2) == []
    assert sharding.get_ranks_by_coord(data_parallel=-1) == []


def test_get_ranks_fixes_axes(sharding: NamedSharding) -> None:
    left = sharding.get_ranks(pipeline_parallel=1, context_parallel=0)
    assert left == NamedSharding([[8, 9], [12, 13]], ["data_parallel", "tensor_parallel"])
    with pytest.raises(IndexError, match="data_parallel=2: expected a position from 0 to 1"):
        sharding.get_ranks(data_parallel=2)


@pytest.mark.parametrize("call", ["get_axis_index", "get_axis_size"])
def test_unknown_axis(sharding: NamedSharding, call: str) -> None:
    with pytest.raises(ValueError, match="unknown axis 'experts'"):
        getattr(sharding, call)("experts")


@pytest.mark.parametrize("call", ["get_ranks", "get_ranks_by_coord"])
def test_unknown_axis_in_coords(sharding: NamedSharding, call: str) -> None:
    with pytest.raises(ValueError, match="unknown axis 'experts'"):
        getattr(sharding, call)(experts=0)


def test_unknown_rank(sharding: NamedSharding) -> None:
    with pytest.raises(ValueError, match="unknown rank 16"):
        sharding.get_worker_coords(16)


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([[0, 1], [1, 2]], ["a", "b"], "rank 1 more than once"),
        ([[0, 1], [2]], ["a", "b"], "ragged"),
        ([0.0, 1.0], ["a"], "float64"),
        ([True, False], ["a"], "bool"),
        (["0", "1"], ["a"], "ranks must be integers"),
        ([None, 1], ["a"], "not integers"),
        ([], ["a"], "empty"),
        ([0, 1], ["a", "b"], "1 axes, but names has 2"),
        ([[0], [1]], ["a", "a"], "names are not unique"),
    ],
)
def test_bad_layouts(layout: Any, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


def test_equality_and_hash(sharding: NamedSharding) -> None:
    same = NamedSharding(np.arange(16).reshape(2, 2, 2, 2), AXES)
    assert sharding == same
    assert hash(sharding) == hash(same)
    assert sharding != NamedSharding(np.arange(16).reshape(2, 2, 2, 2), AXES[::-1])
    assert sharding != NamedSharding(np.arange(16).reshape(4, 4), ["a", "b"])
    assert sharding != "something else"
    assert pickle.loads(pickle.dumps(sharding)) == sharding


def test_one_leader_per_data_parallel_rank(sharding: NamedSharding) -> None:
    leaders = [r for r in range(16) if sharding.is_axis_zero(sharding.get_worker_coords(r), REPLICATED_AXES)]
    assert leaders == [0, 4]


def test_an_axis_not_named_counts_as_zero() -> None:
    is_axis_zero = NamedSharding.is_axis_zero
    assert is_axis_zero({}, REPLICATED_AXES)
    assert is_axis_zero({"data_parallel": 3, "tensor_parallel": 0}, REPLICATED_AXES)
    assert not is_axis_zero({"context_parallel": 1}, REPLICATED_AXES)
    assert is_axis_zero({"x": 1}, ["y"])
    assert not is_axis_zero({"x": 1}, ["y", "x"])
