"""Groups of workers: names, constructors that fail, workers that die, and that nothing is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayActorError

from tests.ray.actors import Forgetful, NeedsTwo, Talker
from tests.ray.standing import call_until_dead
from tests.restarts import wait_until
from workers import Cluster, ClusterResource, NodePlacementStrategy, ResourcesNotReadyError, WorkerGroup
from workers.directory import Kind
from workers.errors import NameInUseError, NameNotFoundError, WorkerLostError
from workers.groups import actor_class

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def names(cluster: Cluster) -> set[str]:
    """What the directory has, but for channels' brokers."""
    return {entry.name for kind in (Kind.WORKER_GROUP, Kind.WORKER) for entry in cluster.directory.listing(kind)}


def our_threads() -> list[str]:
    """But for the one that ends once it has started the brokers."""
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("tq-") and name != "tq-brokers")


def test_a_name_is_free_once_its_group_has_ended(cluster: Cluster) -> None:
    cluster.await_brokers()
    threads, listeners = our_threads(), len(cluster.directory._listeners)
    first = Talker.create_group().launch(cluster, name="again")
    assert names(cluster) == {"again", "again:0"}
    process = first.process().wait()
    with pytest.raises(NameInUseError, match="'again' is in use"):
        Talker.create_group().launch(cluster, name="again")
    assert first.process().wait() == process
    assert first.end_group()
    assert first.end_group()
    assert names(cluster) == set()
    assert (our_threads(), len(cluster.directory._listeners)) == (threads, listeners)
    with Talker.create_group("second").launch(cluster, name="again") as second:
        assert second.greet("you").wait() == ["second you from 0!"]
        assert second != first
        ray.kill(second.worker_info_list[0].worker)
        with pytest.raises(RayActorError):
            call_until_dead(second.worker_info_list[0].worker.__ray_ready__)
        with Talker.create_group().launch(cluster, name="again") as third:
            assert third.rank().wait() == [0]
            second.end_group()
            assert third.rank().wait() == [0]
    assert names(cluster) == set()
    with pytest.raises(WorkerLostError, match="again"):
        WorkerGroup.from_group_name(Talker, "again")
    with pytest.raises(NameNotFoundError):
        WorkerGroup.from_group_name(Talker, "never")


def test_a_constructors_own_exception_and_nothing_left(cluster: Cluster) -> None:
    group = Talker.create_group(fail_on_rank=1)
    with pytest.raises(NeedsTwo, match="code 7: told to fail") as caught:
        group.launch(cluster, NodePlacementStrategy([0, 0]), name="bad")
    assert "raised by worker bad:1 in its constructor" in caught.value.__notes__
    assert names(cluster) == set()
    with Talker.create_group().launch(cluster, name="bad") as good:
        assert good.rank().wait() == [0]


@pytest.mark.parametrize(
    ("group", "name", "error", "message"),
    [
        (Talker.create_group(1, 2), "odd", TypeError, "positional arguments"),
        (Forgetful.create_group(), "odd", RuntimeError, r"Forgetful.__init__ must call super"),
        (Talker.create_group(), "a:b", ValueError, "'a:b'"),
    ],
)
def test_what_cannot_be_launched(
    cluster: Cluster, group: WorkerGroup[Talker], name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        group.launch(cluster, name=name)
    assert names(cluster) == set()


def test_a_killed_worker_is_reported_by_name(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with Talker.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="mortal") as group:
        with pytest.raises(WorkerLostError, match="worker mortal:1"):
            group.execute_on(1).die().wait()
        wait_until(lambda: "Worker mortal:1 was lost" in caplog.text, "another thread has logged it")
        assert group.execute_on(0).rank().wait() == [0]
        with pytest.raises(WorkerLostError, match="worker mortal:1"):
            group.rank().wait()


@pytest.mark.parametrize(("asked", "variable"), [(False, "1"), (None, "0")])
def test_without_catching_an_exit_ends_the_worker(
    cluster: Cluster, asked: bool | None, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_CATCH_FAILURE", variable)
    with Talker.create_group().launch(cluster, name="leaving", catch_system_failure=asked) as group:
        with pytest.raises(WorkerLostError, match="worker leaving:0"):
            group.fail("exit").wait()
        with pytest.raises(WorkerLostError, match="worker leaving:0"):
            group.rank().wait()


def test_a_signal_that_ends_a_worker_is_in_its_log(cluster: Cluster) -> None:
    with Talker.create_group().launch(cluster, name="told") as group:
        log = Path(group.output().wait()[0])
        with pytest.raises(WorkerLostError, match="worker told:0"):
            group.end_by(signal.SIGTERM).wait()
        text = log.read_text()
    assert "Worker told:0 ended by SIGTERM at" in text
    assert "in end_by" in text


def test_a_driver_keeps_its_own_signals(cluster: Cluster) -> None:
    kept = {number: signal.getsignal(number) for number in actor_class._CAUGHT_SIGNALS}
    assert actor_class._end_by_signal not in kept.values()
    with pytest.raises(TypeError, match="positional arguments"):
        Talker.create_group(1, 2).launch(cluster, name="odd", catch_system_failure=True)
    assert {number: signal.getsignal(number) for number in kept} == kept


def test_nodes_that_do_not_come_are_an_error(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.groups.cluster.NODES_TIMEOUT_S", 0.0)
    with pytest.raises(ResourcesNotReadyError, match=r"needs 3 nodes, but after \d+ s Ray only has 1"):
        Cluster(num_nodes=3)
    with pytest.raises(ValueError, match="num_nodes=-1"):
        Cluster(-1)
    assert (cluster.num_nodes, cluster.num_accelerators, ClusterResource) == (1, 0, Cluster)


def test_catching_is_set_by_the_environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_CATCH_FAILURE", "maybe")
    with pytest.raises(ValueError, match="RLINF_CATCH_FAILURE='maybe'"):
        Talker.create_group().launch(cluster, name="maybe")
    assert names(cluster) == set()
