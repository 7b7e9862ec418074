"""Channels between Ray actors, through brokers that are actors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from workers.channels import Channel, ChannelLostError, EndOfChannelError, start_brokers
from workers.directory import Directory, DirectoryClient, Kind

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

WAIT_S = 60.0
CAPACITY = 64 << 20


@pytest.fixture(scope="module")
def directory(ray_cluster: None) -> Iterator[DirectoryClient]:
    server = Directory.serve()
    with DirectoryClient(server.address) as client:
        yield client
    server.close()


@pytest.fixture
def brokers(directory: DirectoryClient) -> Iterator[dict[int, ActorHandle]]:
    """Of two logical nodes, which are one here."""
    node = ray.get_runtime_context().get_node_id()
    started = start_brokers({0: node, 1: node}, directory.address, capacity_bytes=CAPACITY)
    yield started
    for each in started.values():
        ray.kill(each)
    _gone(directory, "@broker/")


def _gone(directory: DirectoryClient, prefix: str) -> None:
    """Returns once the directory has noticed that nobody has such a channel any more."""

    async def look() -> None:
        while any(entry.name.startswith(prefix) for entry in directory.listing(Kind.CHANNEL)):
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(look(), WAIT_S))


@ray.remote(num_cpus=1)
class Rollout:
    def produce(self, channel: Channel, count: int) -> None:
        for number in range(count):
            channel.put({"tokens": torch.full((50_000,), number), "reward": number}, weight=1)

    def fill_and_empty(self, channel: Channel) -> str:
        channel.put_nowait(1)
        try:
            channel.put_nowait(2)
        except asyncio.QueueFull as error:
            full = type(error).__name__
        try:
            return f"{full}, {channel.get_nowait()}, {channel.get_nowait()}"
        except asyncio.QueueEmpty as error:
            return f"{full}, {type(error).__name__}"

    def make(self, directory: str, name: str) -> Channel:
        with DirectoryClient(directory) as client:
            return Channel.create(name, distributed=True, directory=client, here=1)


@ray.remote(num_cpus=1)
class Trainer:
    def batches(self, channel: Channel, target: int) -> list[list[int]]:
        got = []
        while True:
            try:
                got.append([int(item["tokens"][-1]) for item in channel.get_batch(target)])
            except EndOfChannelError:
                return got

    def process(self) -> int:
        return os.getpid()

    def hold(self, channel: Channel) -> None:
        self._work = channel.get(async_op=True)
        while not self._work.done():
            pass


@ray.remote(num_cpus=1)
class AsyncTrainer:
    async def consume(self, channel: Channel, count: int) -> list[int]:
        works = [channel.get(async_op=True) for _ in range(count)]
        items = await asyncio.gather(*(work.async_wait() for work in works))
        return [item["reward"] for item in items]


@pytest.mark.usefixtures("brokers")
def test_a_rollout_feeds_a_trainer(directory: DirectoryClient) -> None:
    rollout, trainer = Rollout.remote(), Trainer.remote()
    channel = Channel.create("feed", maxsize=4, directory=directory)
    batches = trainer.batches.remote(channel, 3)
    ray.get(rollout.produce.remote(channel, 10), timeout=WAIT_S)
    channel.close()
    assert ray.get(batches, timeout=WAIT_S) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


@pytest.mark.usefixtures("brokers")
def test_the_driver_and_async_actors_have_their_part(directory: DirectoryClient) -> None:
    trainer, rollout = AsyncTrainer.remote(), Rollout.remote()
    with Channel.create("async", directory=directory) as channel:
        got = trainer.consume.remote(channel, 5)
        ray.get(rollout.produce.remote(channel, 4), timeout=WAIT_S)
        channel.put({"reward": 4})
        assert sorted(ray.get(got, timeout=WAIT_S)) == list(range(5))


@pytest.mark.usefixtures("brokers")
def test_nowait_raises_in_workers_what_it_raises_here(directory: DirectoryClient) -> None:
    with Channel.create("full", maxsize=1, directory=directory) as channel:
        assert ray.get(Rollout.remote().fill_and_empty.remote(channel), timeout=WAIT_S) == "QueueFull, QueueEmpty"


@pytest.mark.usefixtures("brokers")
def test_a_worker_makes_a_channel_that_outlives_it(directory: DirectoryClient) -> None:
    rollout = Rollout.remote()
    made = ray.get(rollout.make.remote(directory.address, "made"), timeout=WAIT_S)
    made.put("a", key="k")
    ray.kill(rollout)
    found = Channel.connect("made", directory=directory)
    assert found.distributed
    assert found.get(key="k") == "a"
    found.close()


@pytest.mark.usefixtures("brokers")
def test_what_a_killed_actor_had_not_taken_goes_to_the_next_getter(directory: DirectoryClient) -> None:
    trainer = Trainer.remote()
    with Channel.create("held", directory=directory) as channel:
        channel.put("a")
        ray.get(trainer.hold.remote(channel), timeout=WAIT_S)
        assert channel.empty()
        os.kill(ray.get(trainer.process.remote(), timeout=WAIT_S), signal.SIGKILL)
        assert channel.get(timeout_s=WAIT_S) == "a"


def test_a_broker_that_is_killed_is_named_and_the_name_is_free(
    directory: DirectoryClient, brokers: dict[int, ActorHandle]
) -> None:
    channel = Channel.create("lost", node_rank=1, directory=directory)
    work: Any = channel.get(async_op=True)
    ray.kill(brokers[1])
    with pytest.raises(ChannelLostError, match=r"'lost'.*was lost"):
        work.wait()
    again = Channel.create("lost", node_rank=0, directory=directory)
    again.put(1)
    assert again.get() == 1
    again.close()


def test_a_broker_whose_process_dies_is_started_again(
    directory: DirectoryClient, brokers: dict[int, ActorHandle]
) -> None:
    channel = Channel.create("again", directory=directory)
    work: Any = channel.get(async_op=True)
    os.kill(ray.get(brokers[0].__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT_S), signal.SIGKILL)
    with pytest.raises(ChannelLostError, match=r"'again'.*was lost"):
        work.wait()
    rollout = Rollout.remote()
    for name in ("again", "another"):
        with Channel.create(name, directory=directory) as made:
            ray.get(rollout.produce.remote(made, 2), timeout=WAIT_S)
            assert made.get()["reward"] == 0
    with ray.get(rollout.make.remote(directory.address, "everywhere"), timeout=WAIT_S) as made:
        made.put("a")
        assert made.get() == "a"


def test_brokers_need_no_torch_and_end_with_their_handles(
    directory: DirectoryClient, brokers: dict[int, ActorHandle]
) -> None:
    process = psutil.Process(ray.get(brokers[0].__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT_S))
    assert not any("libtorch" in mapped.path for mapped in process.memory_maps())
    ray.get(brokers[0].close.remote(), timeout=WAIT_S)
    _gone(directory, "@broker/0")


def test_where_one_broker_cannot_start_none_stays_and_its_node_is_named(directory: DirectoryClient) -> None:
    """The second finds its name taken; or what is said to be its node is none."""
    node, none = ray.get_runtime_context().get_node_id(), "f" * 56
    directory.register_channel("@broker/8", ("somewhere",), {})
    with pytest.raises(RayError) as raised:
        start_brokers({7: node, 8: node}, directory.address, capacity_bytes=CAPACITY)
    assert raised.value.__notes__ == [f"The channel broker on node 8 ({node}) did not start"]
    _gone(directory, "@broker/7")
    with pytest.raises(ValueError, match=none):
        start_brokers({7: node, 8: none}, directory.address, capacity_bytes=CAPACITY)
    _gone(directory, "@broker/7")
    directory.end(Kind.CHANNEL, "@broker/8")
