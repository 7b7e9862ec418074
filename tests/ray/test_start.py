"""How worker groups start: places, environment, ports, and what is left when a start fails."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tests import logs
from tests.ray.actors import Refused, Starter
from tests.ray.standing import alive_actors, alive_placement_groups, call_until_dead, can_bind, nothing_but, standing
from tests.restarts import wait_until
from workers import NamedSharding, RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, WorkerStartError
from workers.groups import started_group
from workers.transport import waiting

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
STARTERS = "tests.ray.actors"
INITIALIZER = "IsolatedWorkerInitializer"


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster([2, 1], use_gpus=False, max_colocated_worker_groups=3) as cluster:
        cluster.get_placement_groups()
        yield cluster


@pytest.fixture(scope="module")
def group(cluster: RayVirtualCluster) -> Iterator[RayWorkerGroup]:
    with RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Starter"), name_prefix="starter") as made:
        yield made


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return path


def environment(group: RayWorkerGroup, *names: str) -> list[list[str | None]]:
    found: list[list[str | None]] = ray.get(group.run_all_workers_single_data("environment", *names))
    return found


def told(group: RayWorkerGroup) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.get(group.run_all_workers_single_data("what_it_was_told"))
    return found


# --- places -------------------------------------------------------------------------------------------------------


def test_workers_know_their_place(group: RayWorkerGroup) -> None:
    assert environment(group, "RANK", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE") == [
        ["0", "0", "0", "3"],
        ["1", "0", "1", "3"],
        ["2", "1", "0", "3"],
    ]
    assert [entry["name"] for entry in group.worker_metadata] == ["starter-0-0", "starter-0-1", "starter-1-2"]
    assert [(entry["node_idx"], entry["local_rank"]) for entry in group.worker_metadata] == [(0, 0), (0, 1), (1, 0)]


def test_workers_know_each_others_endpoints(group: RayWorkerGroup) -> None:
    names = ["MASTER_ADDR", "MASTER_PORT", "AVAILABLE_ADDR_LIST", "AVAILABLE_PORT_LIST"]
    seen = environment(group, *names)
    assert seen[1:] == seen[:1] * 2
    host, master, addresses, ports = (str(value) for value in seen[0])
    assert json.loads(addresses) == [host] * 3 == [entry["address"] for entry in group.worker_metadata]
    assert json.loads(ports) == [entry["port"] for entry in group.worker_metadata]
    assert len({int(master), *json.loads(ports)}) == 4


def test_a_worker_binds_its_own_port_and_nobody_else(group: RayWorkerGroup) -> None:
    ports = [entry["port"] for entry in group.worker_metadata]
    for port in ports:
        with socket.socket() as sock, pytest.raises(OSError, match="in use"):
            sock.bind(("", port))
    assert ray.get(group.run_all_workers_multiple_data("serve_on", ports)) == ports
    for port in ports:
        socket.create_connection(("127.0.0.1", port)).close()


def test_colocated_groups_get_other_ports(cluster: RayVirtualCluster, group: RayWorkerGroup) -> None:
    with RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Starter"), workers_per_node=1) as second:
        assert environment(second, "RANK", "NODE_RANK", "LOCAL_RANK") == [["0", "0", "0"], ["1", "1", "0"]]
        first = {entry["port"] for entry in group.worker_metadata}
        assert len(first | {entry["port"] for entry in second.worker_metadata}) == 5
        freed = second.worker_metadata[0]["port"]
    wait_until(lambda: can_bind(freed), "a busy node has let go of the port")


def test_the_first_of_a_tied_group_is_told_of_all_its_bundles(cluster: RayVirtualCluster) -> None:
    asked = [(0, [1, 0]), (1, [0])]
    with RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Tied"), bundle_indices_list=asked) as group:
        assert [worker["bundle_indices"] for worker in told(group)] == [(0, [1, 0]), None, (1, [0])]
        assert environment(group, "RANK", "LOCAL_RANK") == [["0", "0"], ["1", "1"], ["2", "0"]]
    assert asked == [(0, [1, 0]), (1, [0])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers_per_node": 5}, "5 workers on node 0; expected 0 to 2"),
        ({"workers_per_node": [1, 1, 1]}, "3 numbers, but the cluster has 2 nodes"),
        ({"workers_per_node": 0}, "at least one worker"),
        ({"bundle_indices_list": [(2, [0])]}, "names node 2"),
        ({"bundle_indices_list": [(0, [2])]}, "bundle 2 of node 0"),
        ({"bundle_indices_list": [(0, [])]}, "has no bundles"),
        ({"sharding_annotations": NamedSharding([0, 1], ["data_parallel"])}, "has 2 ranks"),
    ],
)
def test_groups_that_do_not_fit(ray_cluster: None, arguments: dict[str, object], message: str) -> None:
    cluster, before = RayVirtualCluster([2, 1], use_gpus=False), standing()
    with pytest.raises(ValueError, match=message):
        RayWorkerGroup(cluster, RayWorkerBuilder("no.such.Class"), **arguments)  # type: ignore[arg-type]
    assert nothing_but(before)


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_come_over_each_other(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"A_DRIVER": "driver", "A_GROUP": "driver", "RAY_MADE_UP": "ray"}.items():
        monkeypatch.setenv(name, value)
    env_vars = {"A_GROUP": "group", "A_WORKER": "group", "MASTER_PORT": "1"}
    builder = RayWorkerBuilder(f"{STARTERS}.Configured", num_gpus="overridden", more="told")
    before = copy.deepcopy((env_vars, builder.kwargs))
    with (
        caplog.at_level(logging.WARNING, logger="workers"),
        RayWorkerGroup(cluster, builder, workers_per_node=1, env_vars=env_vars) as group,
    ):
        names = ["A_CLASS", "A_DRIVER", "A_GROUP", "A_WORKER", "A_RUNTIME", "RAY_MADE_UP", "RANK"]
        expected = ["class", "driver", "group", "worker", "runtime", None]
        assert environment(group, *names) == [[*expected, "0"], [*expected, "1"]]
        assert environment(group, "MASTER_PORT")[0] != ["1"]
        assert ray.get(group.run_single_worker_single_data("runtime_env", 0))["config"]["setup_timeout_seconds"] == 123
        assert "CPU" not in ray.get(group.run_single_worker_single_data("resources", 0))
        assert told(group) == [
            {"bundle_indices": (node, [0]), "num_gpus": 0.0, "num_gpus_per_node": 8, "more": "told"} for node in (0, 1)
        ]
    assert (env_vars, builder.kwargs) == before
    lines = logs.told(caplog)
    assert sorted(lines) == sorted(set(lines))
    assert set(lines) == {
        "the argument env_vars overrides variable A_GROUP of the driver's environment: it applies to this group",
        "the group overrides variable MASTER_PORT of the argument env_vars: ranks are fixed by the group",
        "the call overrides variable A_DRIVER of Configured._default_options: the caller's options take precedence",
        "Configured.configure_worker overrides variable A_WORKER of the call: the class requires it",
        "the builder overrides variable RANK of Configured.configure_worker: bundle and ranks are fixed",
    }


def test_a_decorated_class_keeps_its_options(cluster: RayVirtualCluster) -> None:
    builder = RayWorkerBuilder(f"{STARTERS}.Decorated")
    with RayWorkerGroup(cluster, builder, workers_per_node=[0, 1]) as group:
        assert environment(group, "A_DECORATOR", "RANK", "NODE_RANK") == [["decorator", "0", "1"]]
        assert "CPU" not in ray.get(group.run_single_worker_single_data("resources", 0))


# --- starts that work out -----------------------------------------------------------------------------------------


def test_workers_are_constructed_at_the_same_time(cluster: RayVirtualCluster, fifo: str) -> None:
    with RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Meeting", fifo), workers_per_node=[2, 0]) as group:
        assert len(group.workers) == 2


def test_initializers_are_pooled_and_end_with_their_group(cluster: RayVirtualCluster) -> None:
    before, initializers = standing(), alive_actors(INITIALIZER)
    builder = RayWorkerBuilder(f"{STARTERS}.Starter")
    with RayWorkerGroup(cluster, builder, workers_per_node=[2, 0]) as first:
        assert len(alive_actors(INITIALIZER) - initializers) == 1
        with RayWorkerGroup(cluster, builder, workers_per_node=1):
            assert len(alive_actors(INITIALIZER) - initializers) == 3
        wait_until(lambda: len(alive_actors(INITIALIZER) - initializers) == 1, "the second group's have ended")
        assert environment(first, "RANK") == [["0"], ["1"]]
    assert nothing_but(before)


def test_a_cluster_that_ends_first_takes_its_groups_with_it(ray_cluster: None) -> None:
    cluster = RayVirtualCluster([1], use_gpus=False)
    group = RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Starter"))
    assert cluster.shutdown()
    with pytest.raises(RayActorError):
        call_until_dead(group.workers[0].environment, "RANK")
    assert group.shutdown()


# --- starts that fail ---------------------------------------------------------------------------------------------


def test_what_a_constructor_raises_is_raised_and_nothing_is_left(ray_cluster: None, fifo: str) -> None:
    before = standing()
    cluster = RayVirtualCluster([3], use_gpus=False)
    with pytest.raises(Refused) as caught:
        RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Refusing", 1, fifo=fifo), name_prefix="bad")
    assert type(caught.value) is Refused
    assert caught.value.code == 7
    assert caught.value.__notes__ == ["raised by worker bad-0-1 (rank 1) in its constructor"]
    assert "raise Refused(7)" in str(caught.value.__cause__)
    assert nothing_but(before)
    with RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Starter"), workers_per_node=1) as group:
        assert environment(group, "RANK") == [["0"]]
    cluster.shutdown()


def test_a_reservation_outlives_a_failed_start(cluster: RayVirtualCluster, group: RayWorkerGroup) -> None:
    before = standing()
    with pytest.raises(WorkerStartError, match=r"worker 1-0 \(rank 0\) died in its constructor: "):
        RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Dying"), workers_per_node=[0, 1])
    assert nothing_but(before)
    assert environment(group, "RANK") == [["0"], ["1"], ["2"]]


def test_a_reservation_made_by_a_failed_start_outlives_it_if_another_group_is_on_it(ray_cluster: None) -> None:
    before = standing()
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster:
        assert cluster.join("another group, that starts at the same time") is False
        with pytest.raises(WorkerStartError, match="died"):
            RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Dying"), workers_per_node=1)
        assert len(alive_placement_groups() - before) == 1
        cluster.leave("another group, that starts at the same time", keep=False)
        assert nothing_but(before)


def test_more_workers_on_a_bundle_than_it_has_space_for(cluster: RayVirtualCluster, group: RayWorkerGroup) -> None:
    before = standing()
    with pytest.raises(ValueError, match=r"4 workers on bundle 0 of placement group 1; the limit is .*groups=3;"):
        RayWorkerGroup(cluster, RayWorkerBuilder("no.such.Class"), bundle_indices_list=[(1, [0, 0, 0])])
    assert nothing_but(before)


def test_an_exception_that_cannot_be_pickled_is_told_of(cluster: RayVirtualCluster) -> None:
    with pytest.raises(Exception, match=r"^what it was") as caught:
        RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Unspeakable"), workers_per_node=[0, 1])
    assert type(caught.value).__name__ == "Closed"
    assert caught.value.__notes__ == ["raised by worker 1-0 (rank 0) in its constructor"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.ray.actors.Nobody", r"^cannot import 'tests.ray.actors.Nobody'"),
        ("Nobody", r"^'Nobody' is not a full class name"),
        (f"{STARTERS}.Misconfigured", r"Misconfigured.configure_worker returned \({}, {}\); it must return"),
    ],
)
def test_workers_that_cannot_be_made(cluster: RayVirtualCluster, name: str, message: str) -> None:
    before = standing()
    with pytest.raises(ValueError, match=message) as caught:
        RayWorkerGroup(cluster, RayWorkerBuilder(name), workers_per_node=[0, 1])
    assert caught.value.__notes__ == ["raised by worker 1-0 (rank 0) being made"]
    assert nothing_but(before)


class Told(BaseException):
    """Raised by a signal's handler."""


def test_a_start_that_is_interrupted_leaves_nothing(cluster: RayVirtualCluster, fifo: str) -> None:
    def tell(*_: object) -> None:
        raise Told

    before = standing()
    handler = signal.signal(signal.SIGUSR1, tell)
    try:
        with pytest.raises((Told, SystemError)):  # Ray makes the one into the other where it was waiting
            RayWorkerGroup(cluster, RayWorkerBuilder(f"{STARTERS}.Signalling", os.getpid(), fifo), [0, 1])
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert nothing_but(before)


def test_late_workers_are_named(ray_cluster: None, fifo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        def __init__(self) -> None:
            with open(fifo):
                pass

    lines: list[str] = []
    monkeypatch.setattr(waiting, "LOG_EVERY_S", 0.0625)
    monkeypatch.setattr(waiting._log, "log", lambda _, text, *values: lines.append(text % values))
    late = started_group.StartedGroup()
    late.actors.append(ray.remote(Late).remote())
    with pytest.raises(WorkerStartError, match=r"after 5 s still in its constructor: late-0\. Check that"):
        late.await_constructed(["late-0"], timeout_s=5.0)
    assert re.fullmatch(r"in its constructor: late-0: waiting for \d+ s so far", lines[0])
    late.actors *= 2
    assert late.end()


def test_killing_goes_on_whatever_goes_wrong_with_one(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def kill(actor: str, no_restart: bool) -> None:
        asked.append(actor)
        if actor == "stuck":
            raise RuntimeError("no answer")

    elsewhere = ray.remote(Starter).options(resources={"nowhere": 1}).remote()
    monkeypatch.setattr(elsewhere, "_ray_cluster_and_job", (object(), None))  # of a Ray cluster that has ended
    monkeypatch.setattr(ray, "kill", kill)
    with caplog.at_level(logging.WARNING, logger="workers"):
        assert started_group.kill([elsewhere, "well"]) is True  # type: ignore[list-item]
        assert started_group.kill(["stuck", "well"]) is False  # type: ignore[list-item]
    assert asked == ["well", "stuck", "well"]
    assert logs.told(caplog) == ["Cannot kill stuck: no answer"]
