"""The driver of asynchronous training: producers sample while the policy workers train on earlier samples."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import TracebackType

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from torch import Tensor

from dataplane import KVBatchMeta, ReplayBuffer, Reservation, RolloutAbortedError, WeightFifo
from dataplane.core.schema import WEIGHT_VERSION
from dataplane.errors import CallTimeoutError
from dataplane.training.staleness import Flow
from workers.directory import Directory

from .actors import TRAIN, Actors
from .config import JobConfig
from .data import Problem
from .job import ROLLOUT_FIELDS, live_bytes
from .learner import OptimizerConfig
from .loss import GRPOLoss, Metrics
from .producer import Produced, Producer
from .report import Reporter, StepRow
from .task import Task
from .timeline import Span, common, covered

FIELDS = [*ROLLOUT_FIELDS, "reference_policy_logprobs", "advantages"]
"""The fields that the policy workers read to train."""
WAIT_S = 120.0
LOOK_UP_S = 1.0
CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AsyncConfig(JobConfig):
    """As `JobConfig`, with smaller steps: producers get new weights after every optimizer step.

    producers: number of rollout actors. Each call of one puts samples of `prompts_at_once` problems and samples at
    most `tries` times as many problems: it prefers problems whose answers are neither all right nor all wrong,
    because the others give no gradient. window: maximum age of a step's samples in weight versions. ahead: steps
    whose samples may be produced in advance; fewer keep samples fresher. examined: number of steps between
    measurements of the held-out accuracy. optimizer: has a larger learning rate, because samples without a gradient
    are left out.
    """

    steps: int = 64
    prompts: int = 32
    updates: int = 1
    producers: int = 2
    prompts_at_once: int = 32
    tries: int = 3
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=5.6e-4, warmup_steps=8))
    window: int = 2
    ahead: int = 1
    examined: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts % self.prompts_at_once:
            raise ValueError(
                f"{self.prompts} prompts per step must be a multiple of prompts_at_once={self.prompts_at_once}"
            )

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.prompts * self.group_size


class JustInTime(WeightFifo):
    """`WeightFifo` with at most `ahead` batches stored or in production, so that samples are as fresh as the
    producers' speed allows. The window bounds the age of late samples."""

    def __init__(self, *, batch_size: int, window: int, ahead: int) -> None:
        super().__init__(batch_size=batch_size, window=window)
        self._most = ahead * batch_size

    def headroom(self, flow: Flow) -> int:
        return max(min(super().headroom(flow), self._most - flow.stored - flow.running), 0)


@dataclass(frozen=True, kw_only=True)
class BehaviorLoss(GRPOLoss):
    """`GRPOLoss` whose ratio is relative to the weights that sampled, whatever their version. Their
    log-probabilities are stored with the samples, so they need not be recomputed."""

    def __call__(self, logprobs: Tensor, batch: Mapping[str, Tensor], tokens: float) -> tuple[Tensor, Metrics]:
        return super().__call__(logprobs, {**batch, "prev_logprobs": batch["generation_logprobs"]}, tokens)


@dataclass
class Course:
    """The course of a run. ages: counts of trained samples by their age in versions. evicted, aborted: unused
    samples, complete or not. left: unused samples at the end. spared: samples left out in favour of more useful
    ones. trained, waited, produced: time spans on the trainer's clock; seconds: of all steps together."""

    steps: list[StepRow] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    evicted: int = 0
    aborted: int = 0
    left: int = 0
    spared: int = 0
    trained: list[Span] = field(default_factory=list)
    waited: list[Span] = field(default_factory=list)
    produced: list[Span] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def wasted(self) -> int:
        """Samples that were begun for a step and not used."""
        return self.evicted + self.aborted + self.left

    @property
    def hidden(self) -> float:
        """The share of the production time during which the trainer was training."""
        return common(self.produced, self.trained) / covered(self.produced)

    @property
    def waiting(self) -> float:
        """The share of the run during which the trainer waited for samples."""
        return covered(self.waited) / self.seconds


class Production:
    """Producers, each driven by a thread of the driver until the samples of all steps are produced. A context
    manager: the threads run inside the context."""

    def __init__(self, config: AsyncConfig, task: Task, producers: list[ActorHandle], buffer: ReplayBuffer) -> None:
        self._config = config
        self._task = task
        self._producers = producers
        self._buffer = buffer
        self._calls = iter(range(config.steps * config.prompts // config.prompts_at_once))  # the threads share it
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(len(producers))
        self._running: list[Future[None]] = []
        self.spans: list[Span] = []
        self.made: list[Produced] = []
        self.aborted = 0

    def _keep_busy(self, producer: ActorHandle) -> None:
        for number in self._calls:
            rng = random.Random(f"{self._config.seed}/{number}")
            least = self._config.prompts_at_once
            problems = rng.sample(self._task.train, max(least, min(least * self._config.tries, len(self._task.train))))
            while not self._stopping.is_set() and not self._produce(producer, problems):
                pass

    def _produce(self, producer: ActorHandle, problems: list[Problem]) -> bool:
        """Return whether the samples were put. False if there is no space for samples yet or the reservation was
        aborted."""
        count = self._config.prompts_at_once * self._config.group_size
        try:
            with self._buffer.reserve(count, LOOK_UP_S) as reservation:
                meta, made = self._made(producer, problems, reservation)
                self._buffer.commit(reservation, meta, [{"reward": reward} for reward in made.rewards])
        except CallTimeoutError:
            return False
        except RolloutAbortedError:
            self.aborted += count
            return False
        return True

    def _made(
        self, producer: ActorHandle, problems: list[Problem], reservation: Reservation
    ) -> tuple[KVBatchMeta, Produced]:
        called = producer.produce.remote(
            problems,
            group_size=self._config.group_size,
            version=reservation.version,
            names=reservation.sample_ids,
            partition_id=TRAIN,
        )
        meta, made = ray.get(called)
        now = time.perf_counter()
        self.spans.append((now - made.seconds, now))
        self.made.append(made)
        return meta, made

    @property
    def spared(self) -> int:
        """Samples left out in favour of groups whose rewards differ."""
        return sum(len(made.sampled) - len(made.rewards) for made in self.made)

    def reward(self, first: int) -> float:
        """Return the mean reward of all responses sampled since call number `first`, or of the last call if there
        was none."""
        return fmean(reward for made in self.made[first:] or self.made[-1:] for reward in made.sampled)

    def check(self) -> None:
        """Raise the error that ended a thread."""
        for thread in self._running:
            if thread.done():
                thread.result()

    def __enter__(self) -> Production:
        self._running = [self._threads.submit(self._keep_busy, producer) for producer in self._producers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._threads.shutdown()


@dataclass(frozen=True)
class Crew:
    """The producers, and one more actor that answers held-out problems during training. All receive the policy's
    weights."""

    actors: Actors
    producers: list[ActorHandle]
    examinee: ActorHandle

    def begin(self) -> None:
        """Send the policy's weights to all actors as version 0 and as the reference."""
        self.actors.workers.run_all_workers_single_data("send_weights")
        ray.get([listener.begin.remote() for listener in (*self.producers, self.examinee)])

    def renew(self, version: int) -> None:
        """Send the policy's weights to all actors. Their later calls use these weights."""
        self.actors.workers.run_all_workers_single_data("send_weights")
        for listener in (*self.producers, self.examinee):
            listener.renew.remote(version)

    def right(self, problems: list[Problem]) -> ObjectRef:
        """Start `Actors.right` without waiting for it."""
        return self.examinee.right.remote(problems)


@contextmanager
def start_crew(config: AsyncConfig, task: Task, actors: Actors) -> Iterator[Crew]:
    """Start all actors, and end them on exit."""
    with ExitStack() as stack:
        directory = stack.enter_context(Directory.serve(ray.util.get_node_ip_address()))
        count = config.producers + 1
        made = [start_producer(config, task, actors, seed=config.seed + 1 + rank) for rank in range(count)]
        for actor in made:
            stack.callback(ray.kill, actor)
        ray.get([actor.join.remote(directory.address, count, rank) for rank, actor in enumerate(made)])
        ray.get(actors.workers.run_all_workers_single_data("join", directory.address, count))
        stack.callback(lambda: ray.get(actors.workers.run_all_workers_single_data("leave")))
        try:
            yield Crew(actors, made[:-1], made[-1])
        finally:
            left = [actor.close.remote() for actor in made]
            ray.wait(left, num_returns=len(left), timeout=CLOSE_S)


def start_producer(config: AsyncConfig, task: Task, actors: Actors, *, seed: int) -> ActorHandle:
    """Start one producer, without waiting for it."""
    actor = ray.remote(Producer).options(num_cpus=0)
    return actor.remote(task.model, task.tokenizer, actors.client.config, max_new_tokens=task.max_new_tokens, seed=seed)


def reinforce(config: AsyncConfig, task: Task, crew: Crew, reporter: Reporter) -> Course:
    """Run all steps of asynchronous reinforcement learning, from the policy's current weights."""
    actors = crew.actors
    policy = JustInTime(batch_size=config.samples, window=config.window, ahead=config.ahead)
    actors.client.register_partition(TRAIN, FIELDS, None, ["train"], config.group_size)
    buffer = ReplayBuffer(actors.client, TRAIN, policy, required_fields=FIELDS, group_size=config.group_size)
    course = Course()
    crew.begin()
    with Production(config, task, crew.producers, buffer) as production:
        start = time.perf_counter()
        asked: deque[tuple[StepRow, ObjectRef]] = deque()
        for step in range(1, config.steps + 1):
            row = one_step(crew, buffer, production, course, step)
            if step % config.examined == 0:
                right = crew.right(task.held_out[: config.monitored])
                asked.append((replace(row, plane_s=actors.plane_s()), right))
            while asked and ray.wait([asked[0][1]], timeout=0)[0]:
                report(course, reporter, *asked.popleft())
        course.seconds = time.perf_counter() - start
        for row, right in asked:
            report(course, reporter, row, right)
        course.produced, course.aborted = production.spans, production.aborted
        course.left, course.spared = buffer.flow.stored, production.spared
    actors.client.clear_samples(None, TRAIN)
    actors.sync_weights()
    return course


def one_step(crew: Crew, buffer: ReplayBuffer, production: Production, course: Course, step: int) -> StepRow:
    """Train on the next batch and send the new weights. The caller adds the accuracy and the time in the data
    plane."""
    start, before = time.perf_counter(), len(production.made)
    meta = take(buffer, production)
    begun = time.perf_counter()
    actors, tags = crew.actors, meta.tags or []
    metrics = actors.policy.train_from_meta(meta, BehaviorLoss())["all_mb_metrics"]
    course.waited.append((start, begun))
    course.trained.append((begun, time.perf_counter()))
    course.ages.update(step - 1 - int(tag[WEIGHT_VERSION]) for tag in tags)
    plane_bytes = live_bytes(actors.client)
    actors.policy.finish_step(meta)
    crew.renew(step)
    course.evicted += buffer.advance(step)[0]
    return StepRow(
        step=step,
        reward=production.reward(before),
        accuracy=math.nan,
        kl=fmean(metrics["kl"]),
        grad_norm=fmean(metrics["grad_norm"]),
        sampling_gap=fmean(metrics["sampling_gap"]),
        tokens=sum(meta.sequence_lengths or []),
        seconds=time.perf_counter() - start,
        plane_s=math.nan,
        plane_bytes=plane_bytes,
    )


def take(buffer: ReplayBuffer, production: Production) -> KVBatchMeta:
    """Return the next batch. TimeoutError after `WAIT_S`; raises the error that ended a producer."""
    end = time.monotonic() + WAIT_S
    while True:
        production.check()
        try:
            return buffer.take(LOOK_UP_S)
        except TimeoutError:
            if time.monotonic() > end:
                raise


def report(course: Course, reporter: Reporter, row: StepRow, right: ObjectRef) -> None:
    """Show a step with its accuracy. Blocks until that is known."""
    course.steps.append(replace(row, accuracy=fmean(ray.get(right))))
    reporter.step(course.steps[-1])
