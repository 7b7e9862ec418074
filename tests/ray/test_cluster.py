"""Clusters of bundles on a real Ray cluster of one node; test_nodes.py has those of several."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group_table

from tests.logs import told
from tests.ray.standing import alive_actors, alive_placement_groups, call_until_dead, can_bind, nothing_but, standing
from tests.restarts import wait_until
from workers import RayVirtualCluster, ResourcesNotReadyError
from workers.groups import virtual_cluster as module

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster([2, 1], use_gpus=False, max_colocated_worker_groups=2) as cluster:
        cluster.get_placement_groups()
        yield cluster


# --- placement groups ---------------------------------------------------------------------------------------------


def test_one_placement_group_per_node(cluster: RayVirtualCluster) -> None:
    assert (cluster.world_size(), cluster.node_count(), cluster.bundle_counts) == (3, 2, [2, 1])
    groups = cluster.get_placement_groups()
    assert [group.bundle_specs for group in groups] == [[{"CPU": 2.0}, {"CPU": 2.0}], [{"CPU": 2.0}]]
    assert [placement_group_table(group)["strategy"] for group in groups] == ["STRICT_PACK", "STRICT_PACK"]
    assert cluster.get_placement_groups() == groups
    assert cluster.locate(1, 0) == (1, 0)


def test_a_unified_placement_group(ray_cluster: None) -> None:
    with RayVirtualCluster([1, 2], use_gpus=False, placement_group_strategy="PACK") as cluster:
        cluster._init_placement_groups(use_unified_pg=True)
        assert cluster.unified
        (group,) = cluster.get_placement_groups()
        assert (group.bundle_count, placement_group_table(group)["strategy"]) == (3, "PACK")
        assert sorted([cluster.locate(0, 0), cluster.locate(1, 0), cluster.locate(1, 1)]) == [(0, 0), (0, 1), (0, 2)]


def test_nothing_is_reserved_before_use_and_after_the_end(ray_cluster: None) -> None:
    before = standing()
    cluster = RayVirtualCluster([1], use_gpus=False)
    assert cluster.shutdown()
    assert nothing_but(before)
    first = cluster.get_placement_groups()
    assert alive_placement_groups() - before == {first[0].id.hex()}
    assert cluster.shutdown()
    assert cluster.shutdown()
    assert nothing_but(before)
    with cluster:
        assert cluster.get_placement_groups() != first
    assert nothing_but(before)


@pytest.mark.parametrize("name", ["", "twin"])
def test_clusters_of_the_same_name_do_not_collide(ray_cluster: None, name: str) -> None:
    with RayVirtualCluster([1], False, name=name) as first, RayVirtualCluster([1], False, name=name) as second:
        groups = [*first.get_placement_groups(), *second.get_placement_groups()]
        names = {placement_group_table(group)["name"] for group in groups}
        assert len(names) == 2
        assert all(shown.startswith(name or "cluster") for shown in names)
        first.shutdown()
        assert alive_placement_groups() >= {groups[1].id.hex()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bundle_ct_per_node_list": []}, "one number of bundles per node"),
        ({"bundle_ct_per_node_list": [2, 0]}, "one number of bundles per node"),
        ({"bundle_ct_per_node_list": [1], "max_colocated_worker_groups": 0}, "at least 1"),
        (
            {"bundle_ct_per_node_list": [1, 3], "num_gpus_per_node": 2},
            "3 bundles with a GPU each on one node, but num_gpus_per_node=2",
        ),
    ],
)
def test_clusters_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayVirtualCluster(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharing", [1, 2, 3, 6, 7, 10_000])
def test_colocated_groups_fit_on_a_gpu(sharing: int) -> None:
    share = RayVirtualCluster([1], max_colocated_worker_groups=sharing).num_gpus_per_worker
    assert round(share * 10_000) == pytest.approx(share * 10_000)
    assert 0.99 < share * sharing <= 1
    assert RayVirtualCluster([1], False, max_colocated_worker_groups=sharing).num_gpus_per_worker == 0


# --- resources ----------------------------------------------------------------------------------------------------


def test_resources_that_never_come_are_an_error_that_counts_them(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.0625)
    waits: list[float] = []
    wait = module.wait_for_all

    def wait_a_moment(futures: list[ray.ObjectRef], *, timeout_s: float) -> list[ray.ObjectRef]:
        waits.append(timeout_s)
        return wait(futures, timeout_s=min(timeout_s, 0.0625))

    monkeypatch.setattr(module, "wait_for_all", wait_a_moment)
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=time.sleep)  # only waits take time
    monkeypatch.setattr(module, "time", clock)
    before = standing()
    cluster = RayVirtualCluster([100, 1], num_gpus_per_node=100)
    cluster.ready_timeout_s = 5.0
    with caplog.at_level(logging.WARNING, logger="workers"), pytest.raises(ResourcesNotReadyError) as caught:
        cluster.get_placement_groups()
    for part in (
        "requested 101 bundles of 1 CPU, 1 GPU on 2 nodes ([100, 1], one placement group per node)",
        "the Ray cluster has 16 CPU (free: ",
        "on nodes of (16 CPU)",
        "Not reserved within 5 s",
    ):
        assert part in str(caught.value)
    said = told(caplog)
    assert len(said) == len(waits) - 1 >= 1
    assert waits[1] == 2 * waits[0]
    assert all("waiting for another" in line for line in said)
    assert nothing_but(before)


def test_resources_that_come_later_are_waited_for(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.125)
    with RayVirtualCluster([1], False, max_colocated_worker_groups=9) as first:
        first.get_placement_groups()
        monkeypatch.setattr(module.logger, "warning", lambda *_: first.shutdown())
        with RayVirtualCluster([1], False, max_colocated_worker_groups=9) as second:
            assert len(second.get_placement_groups()) == 1
            assert first._placement_groups is None


def test_a_strategy_ray_does_not_know_leaves_nothing(ray_cluster: None) -> None:
    before = standing()
    cluster = RayVirtualCluster([1], use_gpus=False, placement_group_strategy="TIGHT")
    with pytest.raises(ValueError, match="TIGHT"):
        cluster._init_placement_groups(use_unified_pg=True)
    assert nothing_but(before)
    assert not cluster.unified


def test_what_there_is_is_told_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = {"Alive": False, "Resources": {"CPU": 99.0}}
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0, "memory": 1.0}}] * 7 + [{"Alive": True, "Resources": {}}] * 3
    monkeypatch.setattr(ray, "nodes", lambda: [dead, *nodes])
    assert module._nodes_text() == " + ".join([*["(2 CPU)"] * 7, "(no CPU and no GPU)"]) + " and 2 more"


def test_an_end_that_goes_wrong_is_told_and_goes_on(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = RayVirtualCluster([1, 1], use_gpus=False)
    first, second = cluster.get_placement_groups()
    remove = module.remove_placement_group

    def remove_all_but_the_first(group: PlacementGroup) -> None:
        if group == first:
            raise RuntimeError("no answer")
        remove(group)

    monkeypatch.setattr(module, "remove_placement_group", remove_all_but_the_first)
    with caplog.at_level(logging.WARNING, logger="workers"):
        assert cluster.shutdown() is False
    assert told(caplog) == [f"Cannot remove placement group {first.id.hex()}: no answer"]
    assert alive_placement_groups() & {first.id.hex(), second.id.hex()} == {first.id.hex()}
    remove(first)


# --- endpoints ----------------------------------------------------------------------------------------------------


def test_endpoints_are_held_until_they_are_released(cluster: RayVirtualCluster) -> None:
    before = standing()
    held = [cluster.get_available_address_and_port(0, 1), cluster.get_master_address_and_port()]
    held += cluster.hold_endpoints([(0, 0), (1, 0), (0, 1)])
    ports = [port for _, port in held]
    assert len(set(ports)) == 5
    assert {address for address, _ in held} == {ray.util.get_node_ip_address()}
    assert len(alive_actors() - before) == 1
    assert [can_bind(port) for port in ports] == [False] * 5
    cluster.release_endpoints(held[:2])
    wait_until(lambda: all(map(can_bind, ports[:2])), "a busy node has let go of the ports")
    assert [can_bind(port) for port in ports[2:]] == [False] * 3
    cluster.release_endpoints(held)
    wait_until(lambda: all(map(can_bind, ports)), "a busy node has let go of the ports")
    assert nothing_but(before)
    cluster.release_endpoints(held)


@pytest.mark.parametrize("others", [0, 1])
def test_no_port_stays_held_when_a_node_fails(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    before, held_ports = standing(), cluster._held_ports
    kept = cluster.hold_endpoints([(0, 0)] * others)
    asked: list[int] = []

    def fail(*args: Any) -> list[int]:
        asked.extend(held_ports(*args))
        raise ResourcesNotReadyError("no response")

    monkeypatch.setattr(cluster, "_held_ports", fail)
    with pytest.raises(ResourcesNotReadyError):
        cluster.hold_endpoints([(0, 1), (1, 0)])
    assert len(asked) == 2
    wait_until(lambda: all(map(can_bind, asked)), "a busy node has let go of the ports")
    assert [can_bind(port) for _, port in kept] == [False] * others
    cluster.release_endpoints(kept)
    assert nothing_but(before)


def test_endpoints_go_with_their_cluster(ray_cluster: None) -> None:
    before = standing()
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        held = cluster.get_master_address_and_port()
        assert len(alive_actors() - before) == 1
    assert nothing_but(before)
    cluster.release_endpoints([held])


def test_ports_that_cannot_be_released_are_told(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        held = cluster.get_master_address_and_port()

        def wait(*_: object, **__: object) -> None:
            raise RuntimeError("no answer")

        monkeypatch.setattr(ray, "wait", wait)
        with caplog.at_level(logging.WARNING, logger="workers"):
            cluster.release_endpoints([held])
        assert told(caplog) == ["Cannot release ports: no answer"]


@pytest.mark.parametrize("bundle", [(2, 0), (0, 2), (-1, 0)])
def test_endpoints_of_bundles_that_are_not_there(cluster: RayVirtualCluster, bundle: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match=r"\(placement group, bundle\)"):
        cluster.get_available_address_and_port(*bundle)


def test_a_node_that_cannot_give_ports_is_asked_anew_the_next_time(cluster: RayVirtualCluster) -> None:
    kept = cluster.get_master_address_and_port()
    (keeper,) = cluster._keepers.values()
    ray.kill(keeper)
    with pytest.raises(RayActorError):
        call_until_dead(keeper.release, [])
    with pytest.raises(ResourcesNotReadyError, match=r"cannot hold ports on node .*: "):
        cluster.get_master_address_and_port()
    held = cluster.get_master_address_and_port()
    assert not can_bind(held[1])
    cluster.release_endpoints([kept, held])
