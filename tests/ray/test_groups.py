"""Worker groups on a real Ray cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import ray
from ray import ObjectRefGenerator
from ray.util.placement_group import placement_group_table

from workers.builder import RayWorkerBuilder
from workers.cluster import RayVirtualCluster, ResourcesNotReadyError
from workers.engine import WorkerStartError
from workers.group import RayWorkerGroup
from workers.sharding import NamedSharding

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
ECHO = "tests.ray.actors.Echo"
SHARDING = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=2, name="echo") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group(cluster: RayVirtualCluster) -> Iterator[RayWorkerGroup]:
    os.environ["FROM_DRIVER"] = "driver"
    try:
        made = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(ECHO, greeting="hi"),
            name_prefix="echo",
            sharding_annotations=SHARDING,
            env_vars={"FROM_GROUP": "group", "RANK": "overridden"},
        )
    finally:
        del os.environ["FROM_DRIVER"]
    with made:
        yield made


def alive_placement_groups() -> int:
    return sum(entry["state"] == "CREATED" for entry in placement_group_table().values())


def test_workers_know_their_place(group: RayWorkerGroup) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
    more = ["AVAILABLE_ADDR_LIST", "AVAILABLE_PORT_LIST", "FROM_DRIVER", "FROM_GROUP"]
    seen = ray.get(group.run_all_workers_single_data("environment", *names, *more))
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["NODE_RANK"]) for env in seen] == [
        (str(rank), str(rank), "4", "0") for rank in range(4)
    ]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in seen}) == 1
    ports = json.loads(seen[0]["AVAILABLE_PORT_LIST"])
    assert len({*ports, int(seen[0]["MASTER_PORT"])}) == 5
    assert len(json.loads(seen[0]["AVAILABLE_ADDR_LIST"])) == 4
    assert {(env["FROM_DRIVER"], env["FROM_GROUP"]) for env in seen} == {("driver", "group")}


def test_metadata(group: RayWorkerGroup) -> None:
    assert len(group.workers) == 4
    assert [entry["name"] for entry in group.worker_metadata] == [f"echo-0-{rank}" for rank in range(4)]
    assert [entry["dp_shard_idx"] for entry in group.worker_metadata] == [0, 1, 2, 3]
    assert group.dp_size == 2
    assert [group.get_dp_leader_worker_idx(shard) for shard in range(2)] == [0, 2]
    with pytest.raises(IndexError, match="shard 2 of 2"):
        group.get_dp_leader_worker_idx(2)


def test_single_worker(group: RayWorkerGroup) -> None:
    assert ray.get(group.run_single_worker_single_data("echo", 2, "a", b=1)) == (2, ("a",), {"b": 1})
    with pytest.raises(IndexError, match="worker 4 of 4"):
        group.run_single_worker_single_data("echo", 4)


def test_all_workers_same_data(group: RayWorkerGroup) -> None:
    assert ray.get(group.run_all_workers_single_data("echo", [1], b="x")) == [
        (rank, ([1],), {"b": "x"}) for rank in range(4)
    ]
    only = group.run_all_workers_single_data("echo", run_rank_0_only_axes=["tensor_parallel"])
    assert [rank for rank, _, _ in ray.get(only)] == [0, 2]
    with pytest.raises(ValueError, match="unknown axis 'experts'"):
        group.run_all_workers_single_data("echo", run_rank_0_only_axes=["experts"])


def test_all_workers_different_data(group: RayWorkerGroup) -> None:
    got = group.run_all_workers_multiple_data("echo", list("abcd"), b=[1, 2, 3, 4], common_kwargs={"c": 0})
    assert ray.get(got) == [(rank, ("abcd"[rank],), {"b": rank + 1, "c": 0}) for rank in range(4)]
    some = group.run_all_workers_multiple_data("echo", ["x", "y"], run_rank_0_only_axes=["tensor_parallel"])
    assert ray.get(some) == [(0, ("x",), {}), (2, ("y",), {})]
    with pytest.raises(ValueError, match="argument b: 4 workers run, so it needs a list of 4; got 3"):
        group.run_all_workers_multiple_data("echo", b=[1, 2, 3])


def test_sharded_and_replicated(group: RayWorkerGroup) -> None:
    bundle = group.run_all_workers_sharded_data(
        "echo",
        ["first", "second"],
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel"],
        output_is_replicated=["tensor_parallel"],
        common_kwargs={"c": 1},
        b=[{"n": 1}, {"n": 2}],
    )
    assert bundle.called_workers == [0, 1, 2, 3]
    assert bundle.return_from_workers == [0, 2]
    assert group.get_all_worker_results(bundle) == [
        (0, ("first",), {"b": {"n": 1}, "c": 1}),
        (2, ("second",), {"b": {"n": 2}, "c": 1}),
    ]
    assert ray.get(bundle.futures[3])[1] == ("second",)


def test_two_sharded_axes_are_nested_lists(group: RayWorkerGroup) -> None:
    axes = ["tensor_parallel", "data_parallel"]
    bundle = group.run_all_workers_sharded_data("echo", [["00", "01"], ["10", "11"]], in_sharded_axes=axes)
    assert [args[0] for _, args, _ in group.get_all_worker_results(bundle)] == ["00", "10", "01", "11"]


@pytest.mark.parametrize("dummies", [False, True])
def test_free_axes(group: RayWorkerGroup, dummies: bool) -> None:
    bundle = group.run_all_workers_sharded_data(
        "echo", x=[1, 2], in_sharded_axes=["data_parallel"], make_dummy_calls_to_free_axes=dummies
    )
    assert bundle.called_workers == ([0, 1, 2, 3] if dummies else [0, 2])
    assert group.get_all_worker_results(bundle) == [(0, (), {"x": 1}), (2, (), {"x": 2})]
    if dummies:
        assert ray.get(bundle.futures[1]) == (1, (), {"x": None})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"in_sharded_axes": ["data_parallel"], "x": [1, 2, 3]}, "'data_parallel' has 2 places, got 3 shards"),
        ({"in_sharded_axes": ["data_parallel"], "x": 1}, "needs a list of 2, got int"),
        ({"in_sharded_axes": ["experts"], "x": [1]}, "in_sharded_axes: unknown axis 'experts'"),
        ({"replicate_on_axes": ["experts"], "x": 1}, "replicate_on_axes: unknown axis"),
        ({"output_is_replicated": ["experts"], "x": 1}, "output_is_replicated: unknown axis"),
        (
            {"in_sharded_axes": ["data_parallel"], "replicate_on_axes": ["data_parallel"], "x": [1, 2]},
            "'data_parallel' is in in_sharded_axes and in replicate_on_axes",
        ),
    ],
)
def test_sharded_mistakes(group: RayWorkerGroup, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group.run_all_workers_sharded_data("echo", **kwargs)  # type: ignore[arg-type]


def test_one_failing_worker_raises_its_own_exception(group: RayWorkerGroup) -> None:
    bundle = group.run_all_workers_sharded_data(
        "fail_on", replicate_on_axes=["data_parallel", "tensor_parallel"], common_kwargs={"rank": 2}
    )
    with pytest.raises(KeyError, match="told to fail") as caught:
        group.get_all_worker_results(bundle)
    assert "raised by worker echo-0-2" in caught.value.__notes__
    assert ray.get(group.run_single_worker_single_data("rank", 2)) == 2


def test_generators(group: RayWorkerGroup) -> None:
    def call() -> object:
        return group.run_all_workers_sharded_data("count_to", [2, 3], in_sharded_axes=["data_parallel"])

    assert group.get_all_worker_results(call()) == [0, 1, 0, 1, 2]  # type: ignore[arg-type]
    proxies = group.get_all_worker_results(call(), return_generators_as_proxies=True)  # type: ignore[arg-type]
    assert all(isinstance(proxy, ObjectRefGenerator) for proxy in proxies)
    assert [ray.get(item) for item in proxies[1]] == [0, 1, 2]


def test_tied_groups_and_configured_workers(ray_cluster: None) -> None:
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder("tests.ray.actors.Configured"),
            bundle_indices_list=[(0, [2, 0]), (0, [1])],
            env_vars={"SHARED": "group"},
        ) as group,
    ):
        assert group.dp_size == 2
        assert group.worker_to_tied_group_index == {0: 0, 1: 0, 2: 1}
        assert [group.get_dp_leader_worker_idx(shard) for shard in range(2)] == [0, 2]
        seen = ray.get(group.run_all_workers_single_data("environment", "CONFIGURED", "SHARED"))
        assert [env["CONFIGURED"] for env in seen] == ["(0, [2, 0])", "None", "(0, [1])"]
        assert {env["SHARED"] for env in seen} == {"class"}
        assert ray.get(group.run_all_workers_single_data("rank")) == [0, 1, 2]
        futures = group.run_all_workers_single_data("greet")
        assert ray.get(futures) == ["configured"] * 3
        with pytest.raises(ValueError, match="without sharding_annotations"):
            group.run_all_workers_sharded_data("greet")


def test_a_constructor_that_raises_names_the_worker_and_leaves_nothing(cluster: RayVirtualCluster) -> None:
    with pytest.raises(WorkerStartError, match=r"(?s)bad-0-0.*ValueError: this constructor always fails"):
        RayWorkerGroup(cluster, RayWorkerBuilder(ECHO, fail_on_rank=0), workers_per_node=1, name_prefix="bad")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers_per_node": 5}, "5 workers on node 0, which has 4 bundles"),
        ({"workers_per_node": [1, 1]}, "2 counts, the cluster has 1 nodes"),
        ({"workers_per_node": 0}, "at least one worker"),
        ({"bundle_indices_list": [(1, [0])]}, "names node 1"),
        ({"bundle_indices_list": [(0, [4])]}, "bundle 4 of node 0"),
        ({"bundle_indices_list": [(0, [])]}, "has no bundles"),
        ({"sharding_annotations": NamedSharding([0, 1], ["data_parallel"])}, "names 2 ranks"),
    ],
)
def test_groups_that_do_not_fit(cluster: RayVirtualCluster, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayWorkerGroup(cluster, RayWorkerBuilder(ECHO), **arguments)  # type: ignore[arg-type]


def test_unknown_worker_class(cluster: RayVirtualCluster) -> None:
    with pytest.raises(ValueError, match=r"cannot import 'tests.ray.actors.Nobody'"):
        RayWorkerGroup(cluster, RayWorkerBuilder("tests.ray.actors.Nobody"), workers_per_node=1)


def test_shutdown_cleans_up_kills_and_reports(ray_cluster: None) -> None:
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        group = RayWorkerGroup(cluster, RayWorkerBuilder(ECHO))
        workers = list(group.workers)
        assert group.shutdown(cleanup_method="stop") is False
        for worker in workers:
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(worker.rank.remote())
        assert group.shutdown() is True
        assert (group.workers, group.worker_metadata, group.dp_size) == ([], [], 0)
        stuck = RayWorkerGroup(cluster, RayWorkerBuilder(ECHO), workers_per_node=1)
        assert stuck.shutdown(cleanup_method="hang", timeout=0.1) is False


def test_clusters_of_the_same_name_do_not_collide_and_end_twice(ray_cluster: None) -> None:
    before = alive_placement_groups()
    first, second = (RayVirtualCluster([1], use_gpus=False, name="twin") for _ in range(2))
    assert (first.world_size(), first.node_count()) == (1, 1)
    assert len(first.get_placement_groups() + second.get_placement_groups()) == 2
    assert alive_placement_groups() == before + 2
    for cluster in (first, second, first):
        assert cluster.shutdown()
    assert alive_placement_groups() == before


def test_a_unified_placement_group(ray_cluster: None) -> None:
    with RayVirtualCluster([1, 2], use_gpus=False, placement_group_strategy="PACK") as cluster:
        cluster._init_placement_groups(use_unified_pg=True)
        assert len(cluster.get_placement_groups()) == 1
        with RayWorkerGroup(cluster, RayWorkerBuilder(ECHO)) as group:
            seen = ray.get(group.run_all_workers_single_data("environment", "NODE_RANK", "LOCAL_RANK"))
        assert [(env["NODE_RANK"], env["LOCAL_RANK"]) for env in seen] == [("0", "0"), ("1", "0"), ("1", "1")]


def test_resources_that_never_come_are_an_error_that_counts_them(ray_cluster: None) -> None:
    before = alive_placement_groups()
    cluster = RayVirtualCluster([100], use_gpus=False)
    cluster.ready_timeout_s = 0.2
    with pytest.raises(ResourcesNotReadyError, match=r"asked for 100 bundles .* The Ray cluster has 16 CPU"):
        cluster.get_placement_groups()
    assert alive_placement_groups() == before


def test_a_strategy_ray_does_not_know_leaves_nothing(ray_cluster: None) -> None:
    before = alive_placement_groups()
    cluster = RayVirtualCluster([1], use_gpus=False, placement_group_strategy="TIGHT")
    with pytest.raises(ValueError, match="TIGHT"):
        cluster._init_placement_groups(use_unified_pg=True)
    assert alive_placement_groups() == before


def test_ports_handed_out_are_distinct(cluster: RayVirtualCluster) -> None:
    handed = [cluster.get_available_address_and_port(0, bundle % 4) for bundle in range(6)]
    handed.append(cluster.get_master_address_and_port())
    assert len(set(handed)) == 7
