"""GRPO of a small transformer on arithmetic with checkable answers. All tensors move through the data plane.

    python examples/grpo_arithmetic.py [--data MINE.jsonl] [--seed 1] [--steps 40] ...

| in `arithmetic/` | contents |
|---|---|
| job.py | the driver: warm start, then steps of rollout, log-probabilities, advantages, training, new weights |
| actors.py | the processes of a run and their start: the service, policy workers, the rollout actor |
| worker.py, rollout.py | those actors, which use the data plane |
| learner.py, parallel.py | optimizer steps of the sharded model: plain torch and torch.distributed |
| model.py, sampling.py, loss.py | transformer, generation with a key-value cache, losses and advantages |
| data.py, tokenizer.py, task.py | problems from JSONL, one token per character, and the task made from them |
| config.py, report.py | settings, and output |
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import ray

from arithmetic.config import JobConfig
from arithmetic.job import run
from arithmetic.report import Reporter, plot
from arithmetic.task import Task

OBJECT_STORE_BYTES = 128 << 20


def parse(arguments: list[str]) -> tuple[JobConfig, Task, str | None]:
    """Return (the configuration, the task, the address of the Ray cluster to use or None to start one here)."""
    defaults = JobConfig()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=defaults.data, help='JSONL file, one {"prompt": ..., "answer": ...} per line'
    )
    parser.add_argument("--out", type=Path, default=defaults.out, help="directory of the curves (default: %(default)s)")
    parser.add_argument("--ray-address", help="address of a running Ray cluster, e.g. auto (default: start one)")
    for name, what in (
        ("seed", "seed of the split, the initial weights and all sampling"),
        ("steps", "steps of reinforcement learning"),
        ("prompts", "problems per step"),
        ("group_size", "responses to each problem"),
        ("held_out", "problems that are not used for training"),
        ("data_parallel", "policy workers that split a batch"),
        ("tensor_parallel", "policy workers that split the weights"),
    ):
        flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        parser.add_argument(flag, type=int, default=default, help=f"{what} (default: {default})")
    options = vars(parser.parse_args(arguments))
    address = options.pop("ray_address")
    try:
        config = JobConfig(**options)
        return config, Task.of(config), address
    except (ValueError, OSError) as error:
        parser.error(str(error))


def start_ray(config: JobConfig, address: str | None) -> None:
    """Connect to a Ray cluster, or start one with a logical CPU for each worker, even if there are fewer cores."""
    if address is not None:
        ray.init(address=address, logging_level="ERROR")
        return
    ray.init(
        num_cpus=max(os.cpu_count() or 1, config.data_parallel * config.tensor_parallel),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level="ERROR",
    )


def main(arguments: list[str]) -> None:
    """Run the job, show the result, draw the curves."""
    config, task, address = parse(arguments)
    start = time.perf_counter()
    with Reporter() as reporter:
        reporter.stage("starting Ray")
        start_ray(config, address)
        try:
            result = run(config, task, reporter)
        finally:
            ray.shutdown()
    curves = plot(result.steps, config.out / f"grpo_arithmetic_seed{config.seed}.png")
    reporter.result(result, curves)
    print(f"{time.perf_counter() - start:.0f} seconds in total")


if __name__ == "__main__":
    main(sys.argv[1:])
