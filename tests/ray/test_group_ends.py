"""Tied groups of workers, and the ends that workers and groups come to."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from workers import MultiWorkerFuture, RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=2) as made:
        yield made


@pytest.fixture(scope="module")
def tied(cluster: RayVirtualCluster) -> Iterator[RayWorkerGroup]:
    """Workers 0 and 1 are tied, 2 is alone."""
    builder = RayWorkerBuilder("tests.ray.actors.Member")
    with RayWorkerGroup(cluster, builder, bundle_indices_list=[(0, [2, 0]), (0, [1])]) as made:
        yield made


@pytest.fixture
def left(tmp_path: Path) -> Path:
    (tmp_path / "left").mkdir()
    return tmp_path / "left"


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    (tmp_path / "gates").mkdir()
    for rank in range(4):
        os.mkfifo(tmp_path / "gates" / str(rank))
    return tmp_path / "gates"


def start(cluster: RayVirtualCluster, workers: int, left: Path, gates: Path) -> RayWorkerGroup:
    return RayWorkerGroup(
        cluster,
        RayWorkerBuilder("tests.ray.actors.Member"),
        workers_per_node=workers,
        name_prefix="leaver",
        env_vars={"LEFT": str(left), "GATES": str(gates)},
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def call_until_dead(worker: ActorHandle) -> None:
    """Ray kills soon after it is told to: until then a worker may answer."""
    while True:
        ray.get(worker.rank.remote(), timeout=30)


def assert_dead(workers: list[ActorHandle]) -> None:
    for worker in workers:
        with pytest.raises(RayActorError):
            call_until_dead(worker)


# --- tied groups ----------------------------------------------------------------------------------------------


def test_the_first_worker_of_a_tied_group_leads_it(tied: RayWorkerGroup) -> None:
    assert tied.worker_to_tied_group_index == {0: 0, 1: 0, 2: 1}
    assert tied.dp_size == 2
    assert [tied.get_dp_leader_worker_idx(shard) for shard in range(2)] == [0, 2]
    with pytest.raises(IndexError, match="shard 2 does not exist"):
        tied.get_dp_leader_worker_idx(2)
    assert [(entry["dp_shard_idx"], entry["tied_rank"], entry["bundle_idx"]) for entry in tied.worker_metadata] == [
        (0, 0, 2),
        (0, 1, 0),
        (1, 0, 1),
    ]


def test_one_worker_of_each_tied_group_answers(tied: RayWorkerGroup) -> None:
    futures = tied.run_all_workers_single_data("rank")
    assert ray.get(futures) == [0, 1, 2]
    assert tied.get_all_worker_results(MultiWorkerFuture(futures)) == [0, 2]
    assert tied.get_all_worker_results(MultiWorkerFuture(futures[1:], called_workers=[1, 2])) == [1, 2]
    assert tied.get_all_worker_results(MultiWorkerFuture(futures, return_from_workers=[0, 1])) == [0, 1]


def test_generators_of_tied_groups_answer_once_too(tied: RayWorkerGroup) -> None:
    consumed = MultiWorkerFuture(tied.run_all_workers_single_data("ranks_of", 2))
    assert consumed.get_results(tied) == [0, 0, 2, 2]
    proxies = MultiWorkerFuture(tied.run_all_workers_single_data("ranks_of", 1)).get_results(tied, True)
    assert all(isinstance(proxy, ObjectRefGenerator) for proxy in proxies)
    assert [[ray.get(item) for item in proxy] for proxy in proxies] == [[0], [2]]


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.run_all_workers_sharded_data("rank"),
        lambda group: group.run_all_workers_single_data("rank", run_rank_0_only_axes=["tensor_parallel"]),
    ],
    ids=["sharded", "rank 0 only"],
)
def test_axes_need_sharding_annotations(tied: RayWorkerGroup, call: object) -> None:
    with pytest.raises(ValueError, match="has no sharding_annotations"):
        call(tied)  # type: ignore[operator]


# --- the end --------------------------------------------------------------------------------------------------


def test_a_graceful_end(cluster: RayVirtualCluster, left: Path, gates: Path) -> None:
    with start(cluster, 2, left, gates) as group:
        workers = list(group.workers)
        assert group.shutdown(cleanup_method="leave") is True
        assert names(left) == ["0", "1"]
        assert_dead(workers)
        assert (group.workers, group.worker_metadata, group.worker_to_tied_group_index) == ([], [], {})
        assert group.dp_size == 0
        with pytest.raises(IndexError, match="shard 0 does not exist"):
            group.get_dp_leader_worker_idx(0)
        assert group.shutdown(cleanup_method="leave") is True
        for call in (
            lambda: group.run_single_worker_single_data("rank", 0),
            lambda: group.run_all_workers_single_data("rank"),
            lambda: group.run_all_workers_multiple_data("rank"),
            lambda: group.run_all_workers_sharded_data("rank"),
        ):
            with pytest.raises(RuntimeError, match="'leaver' has been shut down"):
                call()


def test_an_end_that_waits_as_long_as_it_takes(cluster: RayVirtualCluster, left: Path, gates: Path) -> None:
    group = start(cluster, 1, left, gates)
    opener = Thread(target=lambda: open(gates / "0", "w").close())  # returns once the worker is at the gate
    opener.start()
    assert group.shutdown("wait_and_leave", timeout=None) is True
    opener.join()
    assert names(left) == ["0"]


def test_an_end_by_force_calls_nobody(cluster: RayVirtualCluster, left: Path, gates: Path) -> None:
    with start(cluster, 1, left, gates) as group:
        workers = list(group.workers)
        assert group.shutdown(cleanup_method="leave", force=True) is True
    assert names(left) == []
    assert_dead(workers)


def test_a_group_left_as_a_context_ends(cluster: RayVirtualCluster, left: Path, gates: Path) -> None:
    with start(cluster, 1, left, gates) as group:
        workers = list(group.workers)
    assert_dead(workers)
    assert group.workers == []


@pytest.fixture
def wait_for_all_but_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that changes every later `ray.wait` whose timeout is `wait_s`: it first waits, up to 60 s, until all
    of its futures but one are done, and then 0.1 s for the last. On a busy machine only the worker that really hangs
    is late."""
    wait = ray.wait

    def replace(wait_s: float) -> None:
        def waited(futures: list[ObjectRef], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
            if timeout == wait_s:
                wait(futures, num_returns=num_returns - 1, timeout=60)
                timeout = 0.1
            return wait(futures, num_returns=num_returns, timeout=timeout)

        monkeypatch.setattr(ray, "wait", waited)

    return replace


def test_one_dead_one_stuck_and_one_that_cannot_leave(
    cluster: RayVirtualCluster,
    left: Path,
    gates: Path,
    caplog: pytest.LogCaptureFixture,
    wait_for_all_but_one: Callable[[float], None],
) -> None:
    group = start(cluster, 4, left, gates)
    workers = list(group.workers)

    dead = MultiWorkerFuture([group.run_single_worker_single_data("die", 1)], called_workers=[1])
    with pytest.raises(RayActorError) as caught:
        dead.get_results(group)
    assert caught.value.__notes__ == ["raised by worker leaver-0-1"]
    assert [ray.get(group.run_single_worker_single_data("rank", rank)) for rank in (0, 2, 3)] == [0, 2, 3]

    group.run_single_worker_single_data("wait_at", 2, str(gates))
    wait_for_all_but_one(8.0)
    with caplog.at_level(logging.WARNING, logger="workers"):
        assert group.shutdown(cleanup_method="leave_or_fail", timeout=8.0) is False
    assert names(left) == ["3"]
    assert_dead(workers)
    assert group.workers == []
    for what in (
        "leaver-0-0: leave_or_fail failed",
        "leaver-0-1: leave_or_fail failed",
        "leaver-0-2: leave_or_fail did not return within 8.0 s",
    ):
        assert what in caplog.text
    assert "leaver-0-3" not in caplog.text
    assert group.shutdown(cleanup_method="leave_or_fail") is True


def test_a_clean_up_that_is_not_there(
    cluster: RayVirtualCluster, left: Path, gates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = start(cluster, 1, left, gates)
    workers = list(group.workers)
    with caplog.at_level(logging.WARNING, logger="workers"):
        assert group.shutdown(cleanup_method="tidy") is False
    assert "Worker leaver-0-0: cannot call tidy" in caplog.text
    assert_dead(workers)


AFTER_RAY = """
import sys
import ray
from tests.ray.slow_start import allow_slow_starts
from workers import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup

allow_slow_starts()
ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[1], log_to_driver=False)
cluster = RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2)
builder = RayWorkerBuilder("collections.Counter")
first, second = (RayWorkerGroup(cluster, builder) for _ in range(2))
ray.shutdown()
try:
    first.run_all_workers_single_data("total")
except RuntimeError as error:
    print(error)
print(first.shutdown(), second.shutdown("clear"), second.shutdown("clear"), ray.is_initialized())
"""


def test_an_end_after_the_end_of_ray() -> None:
    directory = tempfile.mkdtemp(prefix="tqe", dir="/tmp")
    try:
        done = subprocess.run(
            [sys.executable, "-c", AFTER_RAY, directory],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.stdout.splitlines()[-2:] == [
        "worker group '' ended with its Ray cluster; start both again",
        "True False True False",
    ]
