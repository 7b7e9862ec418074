"""`workers.rlinf`, which stands in for `rlinf.scheduler`: its names, and what it makes of RLinf's configuration."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workers
from workers import rlinf
from workers.rlinf import cluster as cluster_module
from workers.rlinf.cluster import load_user_extension_module, parse_rank_config
from workers.rlinf.placement import ComponentPlacement, PackedPlacementStrategy

EXPORTED = [
    "AcceleratorUtil",
    "AcceleratorType",
    "HardwareInfo",
    "DOSW1HWInfo",
    "DualFrankaHWInfo",
    "FrankaHWInfo",
    "GimArmHWInfo",
    "Turtle2HWInfo",
    "CollectiveGroupOptions",
    "Cluster",
    "ClusterConfig",
    "ComponentPlacement",
    "PlacementStrategy",
    "FlexiblePlacementStrategy",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Worker",
    "WorkerAddress",
    "WorkerGroupFuncResult",
    "CommMapper",
    "split_channel_message",
    "build_send_plan",
    "build_send_key",
    "build_recv_plan",
    "build_route_channel_key",
    "decoupled_build_recv_plan",
    "get_batch_size",
    "get_group_world_size",
    "infer_batch_size",
    "split_batch",
    "merge_batches",
    "WorkerInfo",
    "Channel",
    "ChannelWorker",
    "WeightedItem",
    "Tracer",
]
"""Names of `rlinf.scheduler`."""


def test_every_name_is_there_or_says_what_to_do() -> None:
    assert {*rlinf.__all__, *rlinf.MISSING} == set(EXPORTED)
    assert not {*rlinf.__all__} & {*rlinf.MISSING}
    for name in rlinf.__all__:
        assert getattr(rlinf, name) is not None
    for name in rlinf.MISSING:
        with pytest.raises(ImportError, match=f"cannot import '{name}' from rlinf.scheduler.*without TQ_REPLACE"):
            getattr(rlinf, name)
    with pytest.raises(AttributeError):
        rlinf.anything_else  # noqa: B018


IMPORTED = {
    "channel": ["Channel"],
    "cluster": ["Cluster", "load_user_extension_module", "parse_rank_config"],
    "collective": ["AsyncRouteWork", "AsyncWork", "CollectiveGroupOptions"],
    "dynamic_scheduler.manager": ["RolloutScalingScheduler"],
    "dynamic_scheduler.scheduler_worker": ["SchedulerWorker"],
    "dynamic_scheduler.utils": ["get_scheduler_channel", "get_scheduler_request_queue", "get_valid_dp_sizes"],
    "hardware": ["AcceleratorType"],
    "manager": ["Tracer", "WorkerAddress", "WorkerInfo"],
    "manager.worker_manager": ["WorkerAddress", "WorkerInfo"],
    "placement": ["ComponentPlacement", "NodePlacementStrategy", "PackedPlacementStrategy", "PlacementStrategy"],
    "worker": ["Worker", "WorkerAddress", "WorkerGroup", "WorkerGroupFuncResult"],
    "worker.routing": ["decoupled_build_send_plan", "get_group_world_size"],
    "worker.worker": ["Worker", "WorkerAddress"],
    "worker.worker_group": ["WorkerGroup"],
}
"""Submodules of `rlinf.scheduler` that RLinf's code imports from."""


@pytest.mark.parametrize("module", IMPORTED)
def test_submodules(module: str) -> None:
    found = importlib.import_module(f"workers.rlinf.{module}")
    for name in IMPORTED[module]:
        assert getattr(found, name) is not None


def test_what_is_ours_is_the_same() -> None:
    assert rlinf.Channel is workers.Channel
    assert rlinf.WorkerAddress is workers.WorkerAddress
    assert issubclass(rlinf.Worker, workers.Worker)
    assert issubclass(rlinf.Cluster, workers.Cluster)


def test_dynamic_scheduling_is_refused() -> None:
    module = importlib.import_module("workers.rlinf.dynamic_scheduler.scheduler_worker")
    with pytest.raises(NotImplementedError, match="auto_scheduler"):
        module.SchedulerWorker.create_group("cfg")


def test_the_tracer_records_nothing() -> None:
    rlinf.Tracer.trace_begin("x", cat="runner", args={})
    rlinf.Tracer.trace_end("x", cat="runner")
    with rlinf.Tracer.trace_span("x"):
        pass
    assert rlinf.Tracer.trace_func(len) is len
    assert rlinf.Tracer.trace_func(cat="x")(len) is len


# --- placements


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0-3", [0, 1, 2, 3]), (2, [2]), ("5, 0-1,", [0, 1, 5]), ("all", [0, 1, 2, 3, 4, 5, 6, 7]), ("3-3", [3])],
)
def test_ranks(text: str | int, ranks: list[int]) -> None:
    assert parse_rank_config(text, list(range(8))) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-2-3", "3-1", "7-8", "-1"])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="rank"):
        parse_rank_config(text, list(range(8)))


def placed(placement: dict[str, Any], *accelerators: int) -> tuple[ComponentPlacement, Any]:
    counts = accelerators or (8,)
    cluster: Any = SimpleNamespace(
        num_nodes=len(counts), num_accelerators=sum(counts), accelerators_per_node=list(counts)
    )
    return ComponentPlacement(SimpleNamespace(cluster=SimpleNamespace(component_placement=placement)), cluster), cluster


def where(placement: ComponentPlacement, cluster: Any, component: str) -> list[tuple[int, tuple[int, ...]]]:
    return [
        (each.cluster_node_rank, each.accelerators) for each in placement.get_strategy(component).get_placement(cluster)
    ]


def test_components_are_placed_on_accelerators() -> None:
    placement, cluster = placed(
        {"actor, rollout": "0-3", "env": "4-5:0-3", "reward": "6-7:0", "agent": "0-1,3:2-3"}, 4, 4
    )
    assert placement.components == ["actor", "rollout", "env", "reward", "agent"]
    assert where(placement, cluster, "rollout") == [(0, (rank,)) for rank in range(4)]
    assert where(placement, cluster, "env") == [(1, (0,)), (1, (0,)), (1, (1,)), (1, (1,))]
    assert where(placement, cluster, "reward") == [(1, (2, 3))]
    assert where(placement, cluster, "agent") == [(0, (0,)), (0, (1,)), (0, (3,)), (0, (3,))]
    assert placement.get_world_size("env") == 4
    assert placement.get_hardware_ranks("agent") == [0, 1, 3]
    assert placement.placement_mode is None
    with pytest.raises(ValueError, match="no component 'value'"):
        placement.get_strategy("value")


def test_components_are_placed_on_nodes() -> None:
    placement, cluster = placed({"env": "0-1:0-3", "agent": "all"}, 0, 0)
    assert where(placement, cluster, "env") == [(0, ()), (0, ()), (1, ()), (1, ())]
    assert placement.get_world_size("agent") == 2
    placement, cluster = placed(
        {"agent": {"node_group": "node", "placement": "1:0-1"}, "actor": {"placement": 0}}, 2, 2
    )
    assert where(placement, cluster, "agent") == [(1, ()), (1, ())]
    assert where(placement, cluster, "actor") == [(0, (0,))]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"a": "0-1", "b,a": "2"}, "'a' twice"),
        ({"a": "0-1,1"}, "ascending order"),
        ({"a": "0-1:1-2"}, "from 0 without gaps"),
        ({"a": "0-1:0-2"}, "3 processes cannot share 2 accelerators"),
        ({"a": "8"}, "do not exist"),
        ({"a": ""}, "names no accelerator"),
        ({"a": "0:all"}, "cannot name processes"),
        ({"a": {"node_group": "robot", "placement": "0"}}, "node_group='robot' is not supported"),
        ({"a": {"node_group": "node", "placement": "0-1:0"}}, "do not exist"),
    ],
)
def test_placements_that_cannot_be(placement: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placed(placement)


def test_a_packed_strategy_remembers_its_arguments() -> None:
    strategy = PackedPlacementStrategy(0, 3, num_hardware_per_process=2, stride=2)
    assert (strategy._num_hardware_per_process, strategy._stride) == (2, 2)


# --- the configuration of a cluster, and extensions


def test_configurations(caplog: pytest.LogCaptureFixture) -> None:
    configured = cluster_module._read_num_nodes
    assert configured({"num_nodes": 2, "component_placement": {}}, None) == 2
    assert configured({"num_nodes": 2, "profiling": {"enabled": False}}, 2) == 2
    assert not caplog.text
    assert configured({"num_nodes": 2, "tracer": {"enabled": True}}, None) == 2
    assert "cluster.tracer is ignored" in caplog.text
    with pytest.raises(ValueError, match="num_nodes=3 conflicts with"):
        configured({"num_nodes": 2}, 3)
    with pytest.raises(ValueError, match=r"cluster\.node_groups is not supported"):
        configured({"num_nodes": 2, "node_groups": [{"label": "a800"}]}, None)


def test_an_extension_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_extension.py").write_text("calls = []\ndef register(): calls.append(1)\n")
    monkeypatch.delenv("RLINF_EXT_MODULE", raising=False)
    load_user_extension_module()
    monkeypatch.setenv("RLINF_EXT_MODULE", "their_extension")
    load_user_extension_module()
    assert sys.modules.pop("their_extension").calls == [1]
    monkeypatch.setenv("RLINF_EXT_MODULE", "no_extension")
    load_user_extension_module(logging.getLogger("of a worker"))
    assert "no_extension" in caplog.text
