"""The driver: the order of all operations. It handles metas, and of the samples it reads only their rewards."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from statistics import fmean

import ray
from torch import Tensor

from dataplane import DataPlaneClient, KVBatchMeta
from workers import TQPolicy

from .actors import TRAIN, Actors, start_actors
from .config import JobConfig
from .data import Problem
from .loss import SupervisedLoss, group_advantages
from .report import Accuracy, Reporter, Result, StepRow
from .rollout import RolloutStats
from .task import Task

TEXTS = "texts"
"""Partition of the warm start."""
TEXT_FIELDS = ["input_ids", "token_mask"]
ROLLOUT_FIELDS = [*TEXT_FIELDS, "generation_logprobs"]
"""The fields of a rollout that the policy workers read. To train they also read the fields that later stages
wrote."""


def warm_start(config: JobConfig, task: Task, actors: Actors, reporter: Reporter) -> None:
    """Run supervised rounds until the policy is sometimes right (see `WarmStart`). The texts are put once, and each
    pass reads them in another order."""
    plan, rng = config.warm_start, random.Random(config.seed)
    actors.client.register_partition(TEXTS, TEXT_FIELDS, len(task.train), [])
    texts: KVBatchMeta = ray.get(actors.rollout.put_texts.remote(task.train, partition_id=TEXTS))
    texts = texts.with_fields(TEXT_FIELDS)
    batch_size = min(plan.batch_size, texts.size // config.data_parallel * config.data_parallel)
    updates = min(plan.updates_per_round, texts.size // batch_size)  # in one pass
    probes = task.train[: config.monitored]
    for number in range(1, plan.max_rounds + 1):
        for _ in range(math.ceil(plan.updates_per_round / updates)):
            rows = rng.sample(range(texts.size), updates * batch_size)
            report = actors.policy.train_from_meta(texts.subset(rows), SupervisedLoss(), gbs=batch_size)
        actors.sync_weights()
        accuracy = Accuracy.of(actors.right(probes))
        reporter.note(f"warm start, round {number}: loss {report['loss']:.3f}, accuracy {accuracy}")
        if accuracy.mean >= plan.accuracy:
            break
    actors.client.clear_samples(None, TEXTS)
    actors.plane_s()  # reset the counters
    ray.get(actors.workers.run_all_workers_single_data("begin_reinforcement"))


def grpo_step(config: JobConfig, task: Task, actors: Actors, step: int) -> StepRow:
    """Run one step of GRPO: rollout, log-probabilities, advantages, optimizer steps, new weights for the rollout
    actor."""
    start = time.perf_counter()
    policy, rng = actors.policy, random.Random(f"{config.seed}/{step}")
    policy.prepare_step(num_samples=config.prompts * config.group_size, group_size=config.group_size)
    meta, made = rollout(config, actors, rng.sample(task.train, config.prompts), step)
    driver_s = score(config, policy, meta)
    shuffled = meta.subset(rng.sample(range(meta.size), meta.size))
    report = policy.train_from_meta(shuffled, config.loss)
    plane_bytes = live_bytes(actors.client)
    policy.finish_step(meta)
    actors.sync_weights()
    right = actors.right(task.held_out[: config.monitored])
    metrics = report["all_mb_metrics"]
    return StepRow(
        step=step,
        reward=made.reward,
        accuracy=fmean(right),
        kl=fmean(metrics["kl"]),
        grad_norm=fmean(metrics["grad_norm"]),
        sampling_gap=fmean(metrics["sampling_gap"]),
        tokens=made.tokens,
        seconds=time.perf_counter() - start,
        plane_s=made.put_s + driver_s + actors.plane_s(),
        plane_bytes=plane_bytes,
    )


def rollout(config: JobConfig, actors: Actors, prompts: list[Problem], step: int) -> tuple[KVBatchMeta, RolloutStats]:
    """Sample responses to `prompts`, reward them and put them. Return their meta and statistics."""
    asked = actors.rollout.rollout.remote(prompts, group_size=config.group_size, step=step, partition_id=TRAIN)
    meta, made = ray.get(asked)
    return meta.with_fields(ROLLOUT_FIELDS), made


def score(config: JobConfig, policy: TQPolicy, meta: KVBatchMeta) -> float:
    """Add the inputs of the loss: log-probabilities, by the policy workers, and advantages, by the driver.

    Return the seconds that the driver itself spent in the data plane.
    """
    policy.get_logprobs_from_meta(meta)
    policy.get_reference_policy_logprobs_from_meta(meta)
    start = time.perf_counter()
    rewards = policy.read_from_dataplane(meta, select_fields=["reward"])["reward"]
    advantages = group_advantages(rewards, group_size=config.group_size)
    policy.write_to_dataplane(meta, {"advantages": token_column(advantages, meta.sequence_lengths)})
    return time.perf_counter() - start


def token_column(values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return per-sample `values` [N] as a per-token column: row i is `values[i]`, repeated `lengths[i]` times."""
    return [value.expand(length) for value, length in zip(values, lengths, strict=True)]


def live_bytes(client: DataPlaneClient) -> int:
    """Return the bytes of the samples that are stored in the data plane now."""
    return sum(unit.live_bytes for unit in client.stats().units)


def run(config: JobConfig, task: Task, reporter: Reporter) -> Result:
    """Run the whole job, in the Ray cluster that this process is connected to."""
    reporter.stage("starting actors")
    with start_actors(config, task) as actors:
        reporter.stage("warm start")
        warm_start(config, task, actors, reporter)
        reporter.stage("held-out accuracy")
        before = actors.right(task.held_out)
        reporter.stage("reinforcement learning", total=config.steps)
        steps = []
        for step in range(1, config.steps + 1):
            steps.append(grpo_step(config, task, actors, step))
            reporter.step(steps[-1])
        reporter.stage("held-out accuracy")
        return Result.of(before, actors.right(task.held_out), steps)
