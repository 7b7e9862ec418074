"""A shortened run of the example on real actors: it learns, and its ranks compute what one process computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from statistics import fmean

import pytest
import ray

from dataplane import KVBatchMeta, ReplayBuffer, WeightFifo, shard_meta_for_dp
from examples.arithmetic.actors import TRAIN, Actors, start_actors
from examples.arithmetic.asynchronous import FIELDS, AsyncConfig, Crew, Production, reinforce, start_crew, take
from examples.arithmetic.config import JobConfig, WarmStart
from examples.arithmetic.data import sums, write_problems
from examples.arithmetic.job import ROLLOUT_FIELDS, grpo_step, rollout, score, warm_start
from examples.arithmetic.learner import OptimizerConfig
from examples.arithmetic.loss import token_logprobs
from examples.arithmetic.model import build
from examples.arithmetic.report import Reporter, StepRow
from examples.arithmetic.task import Task
from examples.arithmetic.weights import SendingWorker
from tests.ray.standing import call_until_dead

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(1200)]

STEPS = 10
TRAIN_FIELDS = [*ROLLOUT_FIELDS, "prev_logprobs", "reference_policy_logprobs", "advantages"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """Few and easy problems, all of which are asked in every step, so that reward rises soon and clearly."""
    data = tmp_path_factory.mktemp("data") / "own.jsonl"
    write_problems(data, sums(count=90, below=10, seed=0))
    return JobConfig(
        data=data,
        seed=1,
        held_out=26,
        steps=STEPS,
        prompts=64,
        group_size=8,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=8),
        warm_start=WarmStart(accuracy=0.5, batch_size=64, updates_per_round=4),
    )


@pytest.fixture(scope="module")
def task(config: JobConfig) -> Task:
    return Task.of(config)


@pytest.fixture(scope="module")
def actors(ray_cluster: None, config: JobConfig, task: Task) -> Iterator[Actors]:
    with start_actors(config, task, SendingWorker) as actors:
        yield actors


@pytest.fixture(scope="module")
def rows(config: JobConfig, task: Task, actors: Actors) -> list[StepRow]:
    with Reporter() as reporter:
        warm_start(config, task, actors, reporter)
    return [grpo_step(config, task, actors, step) for step in range(1, STEPS + 1)]


def test_reward_rises(rows: list[StepRow]) -> None:
    first, last = (fmean(row.reward for row in part) for part in (rows[:3], rows[-3:]))
    assert last > first + 0.06, [row.reward for row in rows]


def test_steps_are_measured(rows: list[StepRow]) -> None:
    for row in rows:
        assert row.kl >= 0
        assert row.grad_norm > 0
        assert row.plane_bytes > 0
        assert 0 < row.plane_s < row.seconds
    assert rows[-1].kl > 1e-3, "the policy has left its reference"


def test_rollouts_are_sampled_from_the_weights_that_train(rows: list[StepRow]) -> None:
    """Else the log-probabilities of sampling and those recomputed by the workers would be apart."""
    assert max(row.sampling_gap for row in rows) < 1e-4


def test_every_step_leaves_the_data_plane_empty(rows: list[StepRow], actors: Actors) -> None:
    stats = actors.client.stats()
    assert sum(unit.live_bytes for unit in stats.units) == 0
    assert all(partition.live == 0 for partition in stats.partitions)


def test_every_rank_computes_the_loss_that_one_process_computes(
    config: JobConfig, task: Task, actors: Actors, rows: list[StepRow]
) -> None:
    actors.policy.prepare_step(num_samples=config.prompts * config.group_size, group_size=config.group_size)
    meta, _ = rollout(config, actors, task.train, STEPS + 1)
    score(config, actors.policy, meta)
    actors.policy.train_from_meta(meta, config.loss, gbs=meta.size)  # so that the policy has left `prev_logprobs`
    shards, _ = shard_meta_for_dp(meta.with_fields(TRAIN_FIELDS), dp_world=config.data_parallel)
    reports = actors.workers.run_all_workers_sharded_data(
        "train_presharded",
        meta=shards,
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel"],
        common_kwargs={"loss_fn": config.loss, "eval_mode": True},
    ).get_results(actors.workers)
    expected = _loss_in_one_process(config, task, actors, meta)
    assert len(reports) == config.data_parallel * config.tensor_parallel
    for report in reports:
        assert report["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    actors.policy.finish_step(meta)


@pytest.fixture(scope="module")
def concurrent(config: JobConfig) -> AsyncConfig:
    """Three steps."""
    same = {field.name: getattr(config, field.name) for field in fields(config)}
    return AsyncConfig(**{**same, "steps": 3, "window": 1, "examined": 1})


@pytest.fixture(scope="module")
def crew(concurrent: AsyncConfig, task: Task, actors: Actors, rows: list[StepRow]) -> Iterator[Crew]:
    sessions = len(actors.client.stats().sessions)
    with start_crew(concurrent, task, actors) as crew:
        yield crew
    while len(actors.client.stats().sessions) > sessions:
        time.sleep(0.05)  # until the service has seen to what the dead one left


def test_asynchronous_steps_train_on_every_sample_once(concurrent: AsyncConfig, task: Task, crew: Crew) -> None:
    ray.get(crew.actors.workers.run_all_workers_single_data("restart"))
    with Reporter() as reporter:
        course = reinforce(concurrent, task, crew, reporter)
    assert course.ages.total() == 3 * concurrent.samples
    assert set(course.ages) <= {0, 1}
    assert course.wasted == 0
    assert course.spared > 0, "more were sampled than trained on"
    assert [row.step for row in course.steps] == [1, 2, 3]
    assert course.steps[0].kl < 0.02 < course.steps[-1].kl, "the policy began at its reference and left it"
    assert 0 < course.hidden <= 1
    assert sum(unit.live_bytes for unit in crew.actors.client.stats().units) == 0


def test_a_dead_producer_ends_the_run(concurrent: AsyncConfig, task: Task, crew: Crew) -> None:
    client = crew.actors.client
    client.register_partition(TRAIN, FIELDS, None, ["train"])
    policy = WeightFifo(batch_size=concurrent.samples, window=1)
    buffer = ReplayBuffer(client, TRAIN, policy, required_fields=FIELDS)
    crew.begin()
    ray.kill(crew.producers[0])
    with pytest.raises(ray.exceptions.RayActorError):
        call_until_dead(crew.producers[0].__ray_ready__)

    def run() -> None:
        with Production(concurrent, task, crew.producers[:1], buffer) as production:
            take(buffer, production)

    with pytest.raises(ray.exceptions.RayActorError):
        run()
    client.clear_samples(None, TRAIN)


def _loss_in_one_process(config: JobConfig, task: Task, actors: Actors, meta: KVBatchMeta) -> float:
    batch = actors.client.get_batch(meta, TRAIN_FIELDS)
    model = build(task.model, seed=0)
    model.load_state_dict(ray.get(actors.workers.run_all_workers_single_data("weights"))[0])
    logprobs = token_logprobs(model(batch["input_ids"]), batch["input_ids"]).detach()
    loss, metrics = config.loss(logprobs, batch, float(batch["token_mask"].sum()))
    assert (logprobs - batch["prev_logprobs"]).abs().max() > 1e-3
    assert metrics["sampling_gap"] < 1e-4
    return float(loss)
