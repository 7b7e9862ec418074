"""Where workers run: bundles, dispatch, environment, ports, sharding, strategies."""

from __future__ import annotations

import copy
import json
import pickle
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from workers.placement import dispatch, ports
from workers.placement.bundles import (
    RANK_VARIABLES,
    bundles_by_node,
    bundles_to_use,
    counted_by_host,
    place_workers,
    rank_environment,
)
from workers.placement.environment import Layer, driver_environment, layered
from workers.placement.ports import PortKeeper
from workers.placement.sharding import REPLICATED_AXES, NamedSharding
from workers.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)

# --- Which worker goes where.


def test_one_worker_per_bundle_by_default() -> None:
    assert bundles_to_use([2, 1], None) == [(0, [0]), (0, [1]), (1, [0])]
    assert bundles_to_use([2, 2], 1) == [(0, [0]), (1, [0])]
    assert bundles_to_use([2, 2], [2, 0]) == [(0, [0]), (0, [1])]


@pytest.mark.parametrize("count", [3, -1, [2], [0, 3]])
def test_counts_that_do_not_fit(count: int | list[int]) -> None:
    with pytest.raises(ValueError, match="workers_per_node"):
        bundles_to_use([2, 2], count)


def test_tied_groups() -> None:
    places = place_workers([2, 2], [(1, [1, 0]), (0, [0])])
    assert [(p.rank, p.node, p.bundle, p.local_rank, p.tied_group, p.tied_rank) for p in places] == [
        (0, 1, 1, 0, 0, 0),
        (1, 1, 0, 1, 0, 1),
        (2, 0, 0, 0, 1, 0),
    ]
    assert [p.bundle_indices for p in places] == [(1, [1, 0]), None, (0, [0])]


def test_tied_groups_over_several_nodes() -> None:
    places = place_workers([2, 2, 1], [(0, [1, 2]), (1, [1, 2])], spanning=True)
    assert [(p.node, p.bundle, p.local_rank) for p in places] == [(0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 0, 0)]
    assert [p.bundle_indices for p in places] == [(0, [1, 2]), None, (1, [1, 2]), None]
    with pytest.raises(
        ValueError, match="bundle 3 of node 1 does not exist; this node and the next ones together have 3, counted"
    ):
        place_workers([2, 2, 1], [(1, [3])], spanning=True)
    with pytest.raises(ValueError, match="bundle 2 of node 0 does not exist; the node has 2, counted from 0"):
        place_workers([2, 2, 1], [(0, [1, 2])])
    with pytest.raises(ValueError, match="bundle -1 of node 1"):
        place_workers([2, 2, 1], [(1, [-1])], spanning=True)


@pytest.mark.parametrize(
    ("counts", "hosts", "found"),
    [
        ([2, 2], "aabb", [[0, 1], [2, 3]]),
        ([2, 2], "abab", [[0, 2], [1, 3]]),
        ([1, 2], "aab", [[2], [0, 1]]),
        ([1, 2], "aaa", [[2], [0, 1]]),
        ([2, 1, 1], "aabb", [[0, 1], [2], [3]]),
        ([3, 1], "abab", [[0, 1, 2], [3]]),
        ([2, 2], "aaab", [[0, 1], [2, 3]]),
    ],
)
def test_the_bundles_of_a_node_are_on_one_host_where_that_works_out(
    counts: list[int], hosts: str, found: list[list[int]]
) -> None:
    assert bundles_by_node(counts, hosts) == found


def test_workers_count_themselves_to_their_node_if_it_is_on_one_host() -> None:
    places = place_workers([2, 2], [(1, [0]), (0, [0, 1])])
    assert counted_by_host(places, "abb") == places
    assert counted_by_host(places, "aaa") == places
    assert [(p.node_rank, p.local_rank) for p in places] == [(1, 0), (0, 0), (0, 1)]


def test_workers_count_themselves_to_their_host_if_a_node_is_on_several() -> None:
    places = place_workers([3, 1], bundles_to_use([3, 1], None))
    counted = counted_by_host(places, "abab")
    assert [(p.node_rank, p.local_rank) for p in counted] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(p.node, p.bundle, p.rank) for p in counted] == [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3)]
    assert rank_environment(counted[3], [("h", 1)] * 4, ("h", 2))["NODE_RANK"] == "1"


def test_rank_environment() -> None:
    places = place_workers([1, 1], [(0, [0]), (1, [0])])
    endpoints = [("10.0.0.1", 1000), ("10.0.0.2", 1001)]
    variables = rank_environment(places[1], endpoints, ("10.0.0.1", 999))
    assert tuple(variables) == RANK_VARIABLES
    assert variables["RANK"] == "1"
    assert variables["LOCAL_RANK"] == "0"
    assert variables["WORLD_SIZE"] == "2"
    assert variables["NODE_RANK"] == "1"
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "999")
    assert json.loads(variables["AVAILABLE_ADDR_LIST"]) == ["10.0.0.1", "10.0.0.2"]
    assert json.loads(variables["AVAILABLE_PORT_LIST"]) == [1000, 1001]


# --- Which workers a call reaches, and with what.


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


# --- Options laid over each other, and what workers get of the driver's environment.


def variables(**values: str) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": values}}


def test_later_layers_win_and_say_why() -> None:
    layers = [
        Layer("the class", {"num_cpus": 1, "name": None, **variables(A="class", B="class", C="class")}, "never said"),
        Layer("the call", {"num_cpus": 1, "num_gpus": 0.5, "name": "x", **variables(B="call", D="call")}, "you asked"),
        Layer("configure_worker", {"num_gpus": 0, **variables(B="worker", C="worker", D="worker")}, "it has to"),
    ]
    before = copy.deepcopy(layers)
    options, overrides = layered(layers)
    assert options == {
        "num_cpus": 1,
        "num_gpus": 0,
        "name": "x",
        **variables(A="class", B="worker", C="worker", D="worker"),
    }
    assert overrides == [
        "the call overrides variable B of the class: you asked",
        "configure_worker overrides num_gpus=0.5 with 0, variable B, variable D of the call: it has to",
        "configure_worker overrides variable C of the class: it has to",
    ]
    options["runtime_env"]["env_vars"]["A"] = "changed"
    assert layers == before


def test_runtime_environments_are_merged_by_key() -> None:
    layers = [
        Layer("lower", {"runtime_env": {"pip": ["a"], "env_vars": {"A": "1"}}}, ""),
        Layer("upper", {"runtime_env": {"pip": ["b"], "config": {"eager_install": False}, "env_vars": None}}, "so"),
        Layer("top", {"runtime_env": None}, ""),
    ]
    options, overrides = layered(layers)
    assert options == {"runtime_env": {"pip": ["b"], "config": {"eager_install": False}, "env_vars": {"A": "1"}}}
    assert overrides == ["upper overrides pip=['a'] with ['b'] of lower: so"]


def test_values_of_variables_are_not_told() -> None:
    _, overrides = layered([Layer("a", variables(TOKEN="secret"), ""), Layer("b", variables(TOKEN="hidden"), "new")])
    assert overrides == ["b overrides variable TOKEN of a: new"]


@pytest.mark.parametrize(
    ("name", "value", "passed"),
    [
        ("A_SETTING", "anything", True),
        ("RAY_JOB_ID", "01000000", False),
        ("RAY_ADDRESS", "127.0.0.1:1", False),
        ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1", True),
        ("CUDA_VISIBLE_DEVICES", "7", False),
        ("HIP_VISIBLE_DEVICES", "7", False),
        ("A_PRICE", "5$HOME", False),
        ("A_BYTE", "\udcff", False),
    ],
)
def test_what_is_passed_on(monkeypatch: pytest.MonkeyPatch, name: str, value: str, passed: bool) -> None:
    monkeypatch.setenv(name, value)
    assert driver_environment().get(name) == (value if passed else None)


# --- Ports that are held for workers.


@pytest.fixture
def keeper() -> Iterator[PortKeeper]:
    made = PortKeeper()
    yield made
    made.release(list(made._held))


def bind(port: int, *options: int) -> None:
    with socket.socket() as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(("", port))
        sock.listen()


@pytest.mark.integration
def test_no_two_are_the_same(keeper: PortKeeper) -> None:
    other = PortKeeper()
    found = [*keeper.hold(20), *other.hold(20), *keeper.hold(20)]
    other.release(found)
    assert len(set(found)) == 60


@pytest.mark.integration
def test_a_held_port_is_for_its_worker_only(keeper: PortKeeper) -> None:
    (port,) = keeper.hold(1)
    with pytest.raises(OSError, match="in use"):
        bind(port)
    bind(port, socket.SO_REUSEADDR)
    bind(port, socket.SO_REUSEPORT)
    with socket.create_server(("", port)), pytest.raises(OSError, match="in use"):
        bind(port, socket.SO_REUSEADDR)


@pytest.mark.integration
def test_a_released_port_is_anyones(keeper: PortKeeper) -> None:
    kept, released = keeper.hold(2)
    keeper.release([released, released])
    bind(released)
    with pytest.raises(OSError, match="in use"):
        bind(kept)


@pytest.mark.integration
@pytest.mark.parametrize("dual", [True, False])
def test_hosts_with_and_without_ipv6(keeper: PortKeeper, monkeypatch: pytest.MonkeyPatch, dual: bool) -> None:
    if dual and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dual)
    (port,) = keeper.hold(1)
    with pytest.raises(OSError, match="in use"):
        bind(port)


@pytest.mark.integration
def test_ports_that_run_out_are_an_error_that_holds_nothing(
    keeper: PortKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    class Third(socket.socket):
        def __init__(self, *family: int) -> None:
            super().__init__(*family)
            made.append(self)

        def bind(self, address: tuple[str, int]) -> None:
            if len(made) == 3:
                raise OSError("no port is free")
            super().bind(address)

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    monkeypatch.setattr(socket, "socket", Third)
    with pytest.raises(OSError, match="no port is free"):
        keeper.hold(5)
    assert [sock.fileno() for sock in made] == [-1] * 3


@pytest.mark.integration
def test_a_port_is_not_above_the_highest_that_is_asked_for(keeper: PortKeeper) -> None:
    low = keeper.hold(3, 20_000)
    assert all(1024 <= port <= 20_000 for port in low)
    assert len(set(low)) == 3
    with pytest.raises(OSError, match="in use"):
        bind(low[0])
    bind(low[0], socket.SO_REUSEADDR)
    with pytest.raises(ValueError, match="up to 80"):
        keeper.hold(1, 80)


@pytest.mark.integration
def test_keepers_share_no_port_that_is_named(keeper: PortKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel's choice is too high, and one port only may be given out."""
    (port,) = keeper.hold(1)
    bound, other = ports._bind, PortKeeper()
    monkeypatch.setattr(ports, "LOWEST", port)
    monkeypatch.setattr(ports, "_bind", lambda named: bound(named) if named else _TooHigh())
    with pytest.raises(OSError, match=f"all ports from {port} to {port}"):
        other.hold(1, port)
    keeper.close()
    keeper.close()
    assert other.hold(1, port) == [port]
    other.close()


class _TooHigh(socket.socket):
    def getsockname(self) -> tuple[str, int]:
        return "", 65535


# --- Named axes over ranks.


FOUR_AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


@pytest.fixture
def sharding() -> NamedSharding:
    return NamedSharding(np.arange(16).reshape(2, 2, 2, 2), FOUR_AXES)


def test_axes_and_sizes(sharding: NamedSharding) -> None:
    assert sharding.shape == dict.fromkeys(FOUR_AXES, 2)
    assert sharding.names == FOUR_AXES
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
    assert sharding.get_worker_coords(13) == dict(zip(FOUR_AXES, (1, 1, 0, 1), strict=True))


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
    same = NamedSharding(np.arange(16).reshape(2, 2, 2, 2), FOUR_AXES)
    assert sharding == same
    assert hash(sharding) == hash(same)
    assert sharding != NamedSharding(np.arange(16).reshape(2, 2, 2, 2), FOUR_AXES[::-1])
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


# --- Placement strategies: which worker is where.


@dataclass
class Counts:
    accelerators_per_node: list[int]


TWO_NODES = Counts([4, 4])
NO_ACCELERATORS = Counts([0, 0])


def own(strategy: PlacementStrategy, cluster: Counts = TWO_NODES) -> list[tuple[int, tuple[int, ...]]]:
    return [(place.cluster_node_rank, place.accelerators) for place in strategy.get_placement(cluster)]


def test_packed_fills_node_after_node() -> None:
    places = PackedPlacementStrategy(2, 5).get_placement(TWO_NODES)
    assert [(p.rank, p.cluster_node_rank, p.local_rank, p.local_world_size, p.visible) for p in places] == [
        (0, 0, 0, 2, (2,)),
        (1, 0, 1, 2, (3,)),
        (2, 1, 0, 2, (0,)),
        (3, 1, 1, 2, (1,)),
    ]
    assert all(place.isolated for place in places)
    assert [place.local_accelerator_rank for place in places] == [2, 3, 0, 1]


def test_packed_in_chunks_and_strides() -> None:
    assert own(PackedPlacementStrategy(0, 3, 2)) == [(0, (0, 1)), (0, (2, 3))]
    assert own(PackedPlacementStrategy(0, 7, 2, 2)) == [(0, (0, 2)), (0, (1, 3)), (1, (0, 2)), (1, (1, 3))]


def test_nodes_of_a_group_are_counted_from_its_first() -> None:
    (place,) = PackedPlacementStrategy(6, 6).get_placement(TWO_NODES)
    assert (place.cluster_node_rank, place.placement_node_rank, place.accelerators) == (1, 0, (2,))


def test_without_isolation_all_of_a_node_is_seen() -> None:
    (place,) = PackedPlacementStrategy(5, 5).get_placement(TWO_NODES, isolate_accelerator=False)
    assert (place.accelerators, place.visible, place.isolated, place.local_accelerator_rank) == (
        (1,),
        (0, 1, 2, 3),
        False,
        1,
    )


def test_flexible_sorts_within_and_across_workers() -> None:
    strategy = FlexiblePlacementStrategy([[6], [1, 0], [3]])
    assert own(strategy) == [(0, (0, 1)), (0, (3,)), (1, (2,))]
    assert [place.rank for place in strategy.get_placement(TWO_NODES)] == [0, 1, 2]


def test_node_placement_sorts_and_isolates_nothing() -> None:
    places = NodePlacementStrategy([1, 0, 1]).get_placement(TWO_NODES)
    assert [(p.cluster_node_rank, p.local_rank, p.local_world_size) for p in places] == [
        (0, 0, 1),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert [(p.visible, p.local_accelerator_rank, p.isolated) for p in places[:1]] == [((0, 1, 2, 3), 0, False)]
    (place,) = NodePlacementStrategy([1]).get_placement(NO_ACCELERATORS)
    assert (place.local_accelerator_rank, place.visible, place.placement_node_rank) == (-1, (), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PackedPlacementStrategy(0, 2, 2), "3 accelerators are not a multiple of 2"),
        (lambda: PackedPlacementStrategy(3, 1), "expected 0 <= start <= end"),
        (lambda: PackedPlacementStrategy(0, 0, 0), "at least 1"),
        (lambda: FlexiblePlacementStrategy([]), "at least one list"),
        (lambda: FlexiblePlacementStrategy([[0], []]), "at least one list"),
        (lambda: FlexiblePlacementStrategy([[1, 1]]), "twice for one worker"),
        (lambda: NodePlacementStrategy([]), "at least one worker"),
        (lambda: PackedPlacementStrategy(4, 8).get_placement(TWO_NODES), r"\[8\] do not exist; the cluster has 8"),
        (lambda: PackedPlacementStrategy(2, 5, 4).get_placement(TWO_NODES), "must all be on one node"),
        (lambda: PackedPlacementStrategy(0, 0).get_placement(NO_ACCELERATORS), "NodePlacementStrategy"),
        (lambda: FlexiblePlacementStrategy([[-1]]).get_placement(TWO_NODES), r"\[-1\] do not exist"),
        (lambda: NodePlacementStrategy([2]).get_placement(TWO_NODES), "node 2 does not exist; the cluster has 2"),
    ],
)
def test_what_cannot_be(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
