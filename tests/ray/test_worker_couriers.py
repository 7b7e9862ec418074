"""What workers have beside messages, on real workers: logs, ports, the lock of accelerators, batches between groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.children import Child
from tests.ray.couriers import Courier
from tests.ray.jobs import ROOT
from workers import Channel, Cluster, NodePlacementStrategy, WorkerGroup
from workers.directory import DIRECTORY_VARIABLE
from workers.errors import NameNotFoundError, WorkerLostError
from workers.rlinf import routing

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

Group = WorkerGroup[Courier]


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[Cluster]:
    with Cluster(num_nodes=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def groups(cluster: Cluster) -> Iterator[tuple[Group, Group]]:
    """Of 2 and of 3 workers."""
    with (
        Courier.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="two", max_concurrency=4) as two,
        Courier.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name="three") as three,
    ):
        yield two, three


@pytest.fixture
def channel(cluster: Cluster) -> Iterator[Channel]:
    with cluster.create_channel("batches") as channel:
        yield channel


def test_lines_of_the_log_are_of_their_caller(groups: tuple[Group, Group]) -> None:
    two, _ = groups
    for level in ("debug", "info", "warning", "error"):
        line = (level.upper(), f"100% of log_{level}", "records", "couriers.py")
        assert two.records(f"log_{level}").wait() == [[line]] * 2
        assert two.logged(f"log_{level}").wait() == [line] * 2
    first = ("INFO", "100% of log_on_first_rank", "records", "couriers.py")
    assert two.records("log_on_first_rank").wait() == [[first], []]
    assert [len(lines) for lines in two.records("log_on_last_rank").wait()] == [0, 1]
    assert two.log_info("from the driver").wait() == [None, None]


def test_no_two_workers_of_a_node_have_a_port(groups: tuple[Group, Group]) -> None:
    two, three = groups
    ports = [port for group in (two, three) for each in group.ports(20).wait() for port in each]
    assert len(set(ports)) == 100
    assert all(port <= 30_000 for each in two.ports(2, 30_000).wait() for port in each)
    with pytest.raises(ValueError, match="up to 80"):
        two.ports(1, 80).wait()


def test_accelerators_are_used_by_one_worker_at_a_time(groups: tuple[Group, Group], tmp_path: Path) -> None:
    two, three = groups
    two.see("0,1").wait()
    three.see("1,2").wait()
    log = tmp_path / "log"
    calls = [two.use(str(log), 20), three.use(str(log), 20)]
    for call in calls:
        call.wait()
    lines = log.read_text().splitlines()
    assert len(lines) == 200
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin.split()[0], begin.split()[1]) == (end.split()[0], "begins")


def test_a_worker_that_dies_releases_its_accelerators(cluster: Cluster, tmp_path: Path) -> None:
    with Courier.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="dying") as dying:
        dying.see("3").wait()
        with pytest.raises(WorkerLostError):
            dying.execute_on(0).use_and_die().wait()
        dying.execute_on(1).use(str(tmp_path / "log"), 1).wait()


WAYS: list[dict[str, Any]] = [
    {},
    {"tag": "obs", "route_key": 3},
    {"tag": "obs", "async_op": True},
    {"enable_p2p": True},
    {"enable_p2p": True, "async_op": True},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_are_laid_over_the_ranks_of_another_group(
    groups: tuple[Group, Group], channel: Channel, way: dict[str, Any]
) -> None:
    two, three = groups
    through = None if way.get("enable_p2p") else channel
    for source, target, size in ((two, three, 4), (three, two, 6)):
        sent = source.deliver(target.worker_group_name, 12, through, **way)
        got = target.collect(source.worker_group_name, 12, through, **way).wait()
        sent.wait()
        rows = [list(range(size * rank, size * (rank + 1))) for rank in range(12 // size)]
        assert got == [(mine, [str(row) for row in mine]) for mine in rows]


def test_answers_find_the_ranks_that_asked(groups: tuple[Group, Group], cluster: Cluster) -> None:
    two, _ = groups
    with (
        Courier.create_group().launch(cluster, NodePlacementStrategy([0] * 4), name="four") as four,
        cluster.create_channel("out") as out,
        cluster.create_channel("back") as back,
    ):
        asked = two.ask("four", 16, out, back)
        assert four.answer("two", 16, out, back).wait() == [4] * 4
        assert asked.wait() == [[2 * row for row in range(8)], [2 * row for row in range(8, 16)]]


def test_a_group_that_is_not_there_is_a_named_error(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "GROUP_WAIT_S", 0.0)
    with pytest.raises(NameNotFoundError, match="nobody"):
        routing.get_group_world_size(cluster.directory, "nobody")


ALONE = """
import sys
import ray
from tests.ray.slow_start import allow_slow_starts
from workers import Channel, Cluster

allow_slow_starts()
ray.init(address=sys.argv[1], namespace="tests", log_to_driver=False)
try:
    Channel.connect("first")
except LookupError:
    print("no job yet", flush=True)
channel = Channel.create("first")
with Cluster(num_nodes=1) as cluster:
    channel.put(1)
    assert cluster.connect_channel("first").get() == 1
    assert Channel.create("first").name == "first"
print("done", flush=True)
"""


def test_a_channel_may_be_created_before_any_cluster() -> None:
    """By a driver of its own, which no environment names a directory."""
    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
    with Child([sys.executable, "-c", ALONE, address], env={**environment, "PYTHONPATH": str(ROOT)}) as child:
        assert [child.line(), child.line()] == ["no job yet", "done"]
