"""Workers of groups, their children and the driver, that send each other messages and share channels."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.ray.actors import Talker
from tests.restarts import wait_until
from tests.workers.messages.messengers import until_it_fails
from workers import Channel, Cluster, CollectiveGroupOptions, NodePlacementStrategy, WorkerGroup
from workers.directory import DIRECTORY_VARIABLE
from workers.errors import GroupEndedError, GroupOptionsError, MessageMismatchError, WorkerLostError
from workers.messages.collectives import COLLECTIVES_VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


@pytest.fixture(scope="module", params=["auto", "always"])
def cluster(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(COLLECTIVES_VARIABLE, request.param)
        with Cluster(num_nodes=1) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[WorkerGroup[Talker]]:
    strategy = NodePlacementStrategy([0, 0])
    with Talker.create_group().launch(cluster, strategy, name="talk", max_concurrency=4) as group:
        yield group


def test_both_may_send_first(group: WorkerGroup[Talker]) -> None:
    large = torch.arange(1_000_000)
    first = group.execute_on(0).swap(large, 1)
    (got,) = group.execute_on(1).swap({"x": torch.ones(2), "why": "because"}, 0).wait()
    assert torch.equal(got, large)
    (answer,) = first.wait()
    assert torch.equal(answer["x"], torch.ones(2))
    assert answer["why"] == "because"


def test_methods_of_every_worker_are_called_too(group: WorkerGroup[Talker]) -> None:
    waiting = group.execute_on(1).recv("talk", 0)
    group.execute_on(0).send("from the base class", "talk", 1).wait()
    assert waiting.wait() == ["from the base class"]


def test_a_pair_that_does_not_fit_is_an_error_of_both(group: WorkerGroup[Talker]) -> None:
    receiving = group.execute_on(1).expect_tensor(0)
    with pytest.raises(MessageMismatchError, match="talk:0 sent"):
        group.execute_on(0).send_object_once_expected(1).wait()
    with pytest.raises(MessageMismatchError, match="but talk:1 expected"):
        receiving.wait()


def test_child_processes_have_addresses(group: WorkerGroup[Talker]) -> None:
    assert group.execute_on(1).with_child().wait() == [("to the child", "talk:1:0")]


def test_broadcasts_reach_all(group: WorkerGroup[Talker], cluster: Cluster) -> None:
    assert group.spread("to my group", None).wait() == ["to my group"] * 2
    with Talker.create_group().launch(cluster, name="more") as more:
        groups = [("talk", [0, 1]), ("more", 0)]
        others = more.execute_on(0).broadcast(None, groups, ("talk", 0))
        assert group.broadcast(torch.ones(3), groups, ("talk", 0)).wait()[1].sum() == 3
        assert others.wait()[0].sum() == 3


def test_who_waits_for_a_worker_that_ends_or_has_other_options_is_told(
    group: WorkerGroup[Talker], cluster: Cluster
) -> None:
    doomed = Talker.create_group().launch(cluster, name="doomed")
    ours, theirs = CollectiveGroupOptions(accel_max_ctas=2), CollectiveGroupOptions(accel_max_ctas=4)
    waiting = doomed.recv("talk", 0, options=theirs)
    with pytest.raises(
        GroupOptionsError,
        match=r"talk:0 and doomed:0 exchange messages with different options: talk:0 with .*accel_max_ctas=2",
    ):
        until_it_fails(lambda: group.execute_on(0).send("too often", "doomed", 0, options=ours).wait())
    with pytest.raises(
        GroupOptionsError,
        match=r"doomed:0 and talk:0 exchange messages with different options: doomed:0 with .*accel_max_ctas=4",
    ):
        waiting.wait()
    waiting = group.execute_on(0).recv("doomed", 0)
    with pytest.raises(WorkerLostError):
        doomed.die().wait()
    with pytest.raises(WorkerLostError, match="doomed:0"):
        waiting.wait()
    doomed.end_group()
    with pytest.raises(WorkerLostError, match="doomed:0"):
        group.execute_on(0).send("too late", "doomed", 0).wait()


def test_channels_are_for_workers_the_driver_and_async_code(group: WorkerGroup[Talker], cluster: Cluster) -> None:
    items = [torch.full((3,), 1.0), "two", {"three": 3}]
    producing = group.execute_on(0).produce("items", items)
    consumed = group.execute_on(1).consume("items", 2)
    producing.wait()
    got = [*consumed.wait()[0], cluster.connect_channel("items").get()]
    assert torch.equal(got[0], items[0])
    assert got[1:] == items[1:]
    made = Channel.create("from the driver", maxsize=1)
    made.put("full")
    with pytest.raises(asyncio.QueueFull):
        made.put_nowait("more")
    assert group.execute_on(0).consume("from the driver", 1).wait() == [["full"]]

    async def get_and_put() -> str:
        getting = made.get(async_op=True)
        await made.put("async", async_op=True).async_wait()
        found: str = await getting.async_wait()
        return found

    assert asyncio.run(get_and_put()) == "async"
    for name in ("items", "from the driver"):
        cluster.connect_channel(name).close()


def test_a_channel_is_not_made_on_a_node_that_there_is_not(cluster: Cluster, group: WorkerGroup[Talker]) -> None:
    said = f"node_rank=7 is out of range; the cluster has {cluster.num_nodes} nodes, counted from 0"
    with pytest.raises(ValueError, match=said):
        cluster.create_channel("nowhere", node_rank=7)
    with pytest.raises(ValueError, match=said):
        group.make_on(7).wait()


def our_threads() -> str:
    return " ".join(thread.name for thread in threading.enumerate() if thread.name.startswith("tq-"))


def test_a_closed_cluster_leaves_no_threads_of_ours(group: WorkerGroup[Talker]) -> None:
    """All clusters of a process have one link, which the first to be shut down closes."""
    with Cluster() as cluster:
        channel = cluster.create_channel("short")
        channel.put(1)
        assert channel.get() == 1
        channel.close()
        channel.disconnect()
    assert DIRECTORY_VARIABLE not in os.environ
    wait_until(lambda: not our_threads(), our_threads)
    with pytest.raises(GroupEndedError):
        group.rank()
