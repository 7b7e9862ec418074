"""Asynchronous GRPO on arithmetic: rollout actors sample continuously while the policy workers train.

    python examples/grpo_async.py [--window 2] [--producers 2] [--steps 64] [--alone] ...

Task, model, workers and warm start are those of `grpo_arithmetic.py`. Samples wait in a replay buffer that lets
producers begin ahead of the trainer, within the staleness window, and returns the oldest first. Producers are
faster than the trainer, so they sample more than they put: they leave out problems whose answers are all right or
all wrong, from which the policy cannot learn. Then the synchronous loop runs from the same weights, for comparison.

| in `arithmetic/` | contents |
|---|---|
| asynchronous.py | the driver: one thread for each producer, and the training loop |
| producer.py | the rollout actor: samples, rewards, advantages, log-probabilities of the reference |
| weights.py | broadcast of the policy's weights from the first policy worker to the producers |
| comparison.py, timeline.py | the output about both runs |
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import ray
from grpo_arithmetic import start_ray

from arithmetic.actors import Actors, start_actors
from arithmetic.asynchronous import AsyncConfig, reinforce, start_crew
from arithmetic.comparison import Run, show
from arithmetic.config import JobConfig
from arithmetic.job import grpo_step, warm_start
from arithmetic.report import Accuracy, Reporter, plot
from arithmetic.task import Task
from arithmetic.weights import SendingWorker


def parse(arguments: list[str]) -> tuple[AsyncConfig, Task, dict[str, Any]]:
    """Return (the configuration, the task, the other options: whether to skip the comparison, and the Ray cluster
    to use)."""
    defaults = AsyncConfig()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ray-address", help="address of a running Ray cluster, e.g. auto (default: start one)")
    parser.add_argument(
        "--data", type=Path, default=defaults.data, help='JSONL file, one {"prompt": ..., "answer": ...} per line'
    )
    parser.add_argument("--out", type=Path, default=defaults.out, help="directory of the curves (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="skip the synchronous run")
    for name, what in (
        ("seed", "seed of the split, the initial weights and all sampling"),
        ("steps", "steps of reinforcement learning"),
        ("window", "maximum age of samples in weight versions"),
        ("ahead", "steps whose samples may be produced in advance"),
        ("producers", "number of rollout actors"),
        ("prompts", "problems per step"),
        ("prompts_at_once", "problems that one call of a producer puts samples of"),
        ("tries", "a call samples at most this multiple of the problems"),
    ):
        flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        parser.add_argument(flag, type=int, default=default, help=f"{what} (default: {default})")
    options = vars(parser.parse_args(arguments))
    known = {field.name for field in fields(AsyncConfig)}
    try:
        config = AsyncConfig(**{name: value for name, value in options.items() if name in known})
        return config, Task.of(config), {name: value for name, value in options.items() if name not in known}
    except (ValueError, OSError) as error:
        parser.error(str(error))


def synchronous(config: JobConfig, task: Task, actors: Actors, reporter: Reporter) -> Run:
    """Run the loop of `grpo_arithmetic.py`, from the initial weights of the asynchronous loop."""
    ray.get(actors.workers.run_all_workers_single_data("restart", config.optimizer))
    actors.sync_weights()
    reporter.stage("synchronous steps", total=config.steps)
    reporter.table(f"synchronous: sample, then train; {config.prompts} prompts a step")
    start = time.perf_counter()
    steps = []
    for step in range(1, config.steps + 1):
        steps.append(grpo_step(config, task, actors, step))
        reporter.step(steps[-1])
    seconds = time.perf_counter() - start
    return Run(Accuracy.of(actors.right(task.held_out)), seconds, config.steps, steps)


def asynchronous(config: AsyncConfig, task: Task, actors: Actors, reporter: Reporter) -> Run:
    """Run the asynchronous loop."""
    reporter.stage("starting producers")
    with start_crew(config, task, actors) as crew:
        reporter.stage("asynchronous steps", total=config.steps // config.examined)
        prompts, every = config.prompts, "" if config.examined == 1 else f"; one row for {config.examined} steps"
        reporter.table(f"asynchronous: sample while training; {prompts} prompts a step{every}")
        course = reinforce(config, task, crew, reporter)
    return Run(Accuracy.of(actors.right(task.held_out)), course.seconds, config.steps, course.steps, course)


def main(arguments: list[str]) -> None:
    """Run both loops, show the results, draw the curves."""
    config, task, options = parse(arguments)
    with Reporter() as reporter:
        reporter.stage("starting Ray")
        start_ray(config, options["ray_address"])
        try:
            reporter.stage("starting actors")
            with start_actors(config, task, SendingWorker) as actors:
                reporter.stage("warm start")
                warm_start(config, task, actors, reporter)
                before = Accuracy.of(actors.right(task.held_out))
                runs = {"asynchronous": asynchronous(config, task, actors, reporter)}
                if not options["alone"]:
                    same = JobConfig(data=config.data, out=config.out, seed=config.seed)
                    runs["synchronous"] = synchronous(same, task, actors, reporter)
        finally:
            ray.shutdown()
    show(before, runs)
    for name, run in runs.items():
        print("curves:", plot(run.rows, config.out / f"grpo_{name}_seed{config.seed}.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
