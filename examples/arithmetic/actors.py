"""The actors of a run, their start and their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import ray
from ray.actor import ActorHandle

from dataplane import DataPlaneClient, DataPlaneConfig
from workers import NamedSharding, RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, TQPolicy, launch_service

from .config import JobConfig
from .data import Problem
from .rollout import RolloutWorker
from .task import Task
from .worker import PolicyWorker

TRAIN = "train"
"""Partition of the samples that a step trains on."""


@dataclass(frozen=True)
class Actors:
    """The policy, which represents its workers and has the driver's client; the workers; and the rollout actor."""

    policy: TQPolicy
    workers: RayWorkerGroup
    rollout: ActorHandle

    @property
    def client(self) -> DataPlaneClient:
        """The driver's client of the data plane."""
        return self.policy.dp_client

    def sync_weights(self) -> None:
        """Send the policy's weights to the rollout actor: the first rank gathers them, and Ray sends them."""
        first, *others = self.workers.run_all_workers_single_data("weights")
        ray.get([self.rollout.set_weights.remote(first), *others])

    def right(self, problems: list[Problem]) -> list[float]:
        """Return for each problem 1 if the rollout actor's greedy answer is right, else 0."""
        return ray.get(self.rollout.right.remote(problems))

    def plane_s(self) -> float:
        """Return the seconds in the data plane since the last call, of the policy worker with the most."""
        return max(ray.get(self.workers.run_all_workers_single_data("take_plane_s")))


@contextmanager
def start_actors(config: JobConfig, task: Task, worker: type[PolicyWorker] = PolicyWorker) -> Iterator[Actors]:
    """Start all actors in the Ray cluster that this process is connected to, and end them on exit."""
    ranks = config.data_parallel * config.tensor_parallel
    with ExitStack() as stack:
        service = stack.enter_context(launch_service(DataPlaneConfig(capacity_bytes=config.capacity_bytes)))
        rollout = start_rollout(config, task, service.config)
        stack.callback(ray.kill, rollout)
        cluster = stack.enter_context(RayVirtualCluster([ranks], use_gpus=False, name="policy"))
        workers = stack.enter_context(start_workers(config, task, cluster, worker))
        policy = stack.enter_context(start_policy(config, workers, service.config))
        yield Actors(policy, workers, rollout)
        ray.get(rollout.close.remote())
        workers.shutdown("shutdown")


def start_rollout(config: JobConfig, task: Task, plane: DataPlaneConfig) -> ActorHandle:
    """Start the rollout actor, without waiting for it."""
    actor = ray.remote(RolloutWorker).options(num_cpus=0)
    return actor.remote(task.model, task.tokenizer, plane, max_new_tokens=task.max_new_tokens, seed=config.seed)


def start_workers(
    config: JobConfig, task: Task, cluster: RayVirtualCluster, worker: type[PolicyWorker] = PolicyWorker
) -> RayWorkerGroup:
    """Start the policy workers and wait for them. Consecutive ranks differ along the tensor-parallel axis."""
    layout = np.arange(config.data_parallel * config.tensor_parallel).reshape(config.data_parallel, -1)
    return RayWorkerGroup(
        cluster,
        RayWorkerBuilder(f"{worker.__module__}.{worker.__qualname__}", config, task.model),
        name_prefix="policy",
        sharding_annotations=NamedSharding(layout, ["data_parallel", "tensor_parallel"]),
    )


def start_policy(config: JobConfig, workers: RayWorkerGroup, plane: DataPlaneConfig) -> TQPolicy:
    """Return the policy of all workers, after they are attached to the data plane."""
    settings = {
        "train_global_batch_size": config.batch_size,
        "train_micro_batch_size": config.micro_batch_size,
        "logprob_batch_size": config.micro_batch_size,
    }
    return TQPolicy(workers, dp_cfg=plane, cfg=settings, tq_partition_id=TRAIN)
