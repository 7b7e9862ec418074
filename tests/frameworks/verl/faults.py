"""Faults while an unmodified verl trains in its mode `colocate_async`, which keeps samples in the queue between steps:

    python faults.py --fault resume                # the whole run is killed in step 3, and resumes from its checkpoint
    python faults.py --fault unit                  # a storage unit's process is killed in step 2
    python faults.py --fault controller            # the controller's
    python faults.py --fault unit --queues original

No sample may be lost or trained twice. The default queue is the adapter. Its service has a state directory, so that it
recovers by itself. The training fails if a part of TransferQueue is killed.
"""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from typing import NoReturn, Self
from uuid import UUID

import psutil
from train import Batches, arguments, check, sampled, start, training

from dataplane.config import DataPlaneConfig
from dataplane.storage.arena_record import discard
from dataplane.storage.capacity import sweep_leftovers

SAVE_EVERY = 2
LIMIT_S = 900.0
"""Time limit of each wait: without its queue, a trainer waits for ever."""
RESUMED = 1000
"""The first uid of a prompt after a resume."""
NAMES = {
    ("adapter", "unit"): "ray::StorageUnitActor",
    ("adapter", "controller"): "ray::ControllerActor",
    ("original", "unit"): "ray::SimpleStorageUnit",
    ("original", "controller"): "ray::TransferQueueController",
}
"""Ray's name for the process of each part of a queue."""


class Run:
    """A running training. A context manager that kills all of its processes at the end."""

    def __init__(self, queue: str, options: argparse.Namespace, name: str = "", **more: str) -> None:
        self.name, self._work = name or queue, options.work
        self._training = training(queue, options, self.name, **more)
        self._process = start(self._training)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        while left := self.processes():
            for each in left:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            time.sleep(0.5)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Return the processes of the training whose command begins with `name`."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                marker = process.environ().get("VERL_CPU_SAMPLED")
                ours = marker == self._training.environment["VERL_CPU_SAMPLED"]
                if ours and " ".join(process.cmdline()).startswith(name):
                    found.append(process)
        return found

    def step(self) -> int:
        """Return the last step whose samples were read."""
        return max((step for _, step, _ in self.batches()), default=0)

    def batches(self) -> Batches:
        return sampled(self.name, self._work)

    def reaches(self, step: int) -> None:
        """Wait until that step reads its samples."""
        end = time.monotonic() + LIMIT_S
        while self.step() < step:
            if self._process.poll() is not None or time.monotonic() > end:
                self._fail(f"no samples for step {step}")
            time.sleep(0.2)

    def ends(self) -> None:
        """Wait until the training is done."""
        if self._process.wait(LIMIT_S):
            self._fail("the training failed")

    def _fail(self, what: str) -> NoReturn:
        code, log = self._process.poll(), self._training.log
        raise SystemExit(f"{self.name}: {what} (exit code {code}); the end of {log}:\n{log.read_text()[-3000:]}")


def resume(queue: str, options: argparse.Namespace) -> Batches:
    """Kill a run in the step after a checkpoint, and resume it. Return the batches of the first run up to
    the checkpoint, and those of the second run."""
    options.set = [*options.set, f"trainer.save_freq={SAVE_EVERY}"]
    with Run(queue, options, f"{queue}-first") as first:
        first.reaches(SAVE_EVERY + 1)
    saved = int((options.work / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    print(f"{first.name}: killed in step {first.step()}; the last checkpoint is of step {saved}", flush=True)
    options.set = [*options.set, "trainer.resume_mode=auto"]
    begin = time.monotonic()
    with Run(queue, options, f"{queue}-resumed", VERL_CPU_FIRST_UID=str(RESUMED)) as second:
        second.reaches(saved + 1)
        print(f"{second.name}: first samples {time.monotonic() - begin:.0f} s after its start", flush=True)
        second.ends()
    return [batch for batch in first.batches() if batch[1] <= saved] + second.batches()


def kill(queue: str, options: argparse.Namespace) -> Batches:
    """Kill a part of the queue in step 2 of a run. Return the batches of the run."""
    name = NAMES[queue, options.fault]
    with Run(queue, options) as run:
        run.reaches(2)
        parts = run.processes(name)
        if not parts:
            raise SystemExit(f"{queue}: found no process with the name {name}")
        parts[0].kill()
        killed = time.monotonic()
        print(f"{queue}: killed {parts[0].pid}, {name}", flush=True)
        run.reaches(3)
        print(f"{queue}: samples for step 3 {time.monotonic() - killed:.1f} s after that", flush=True)
        run.ends()
    return run.batches()


def nothing_lost(queue: str, options: argparse.Namespace, batches: Batches) -> None:
    """Fail unless the uids of the trained prompts have no gap and each prompt has both responses. (The uids ascend, and
    older prompts are trained first.)"""
    check(queue, batches)
    trained = [key for _, _, keys in batches for key in keys]
    uids = {UUID(key.split("_")[0]).int for key in trained}
    if len(trained) != 2 * len(uids):
        raise SystemExit(f"{queue}: {len(trained)} responses of {len(uids)} prompts, each of which has two")
    steps = sorted({step for _, step, _ in batches})
    if steps != list(range(1, options.steps + 1)) or len(uids) != options.prompts * options.steps:
        raise SystemExit(f"{queue}: {len(uids)} prompts in the steps {steps}")
    before = {uid for uid in uids if uid < RESUMED}
    missing = set(range(1, max(before) + 1)) - before
    if missing:
        raise SystemExit(f"{queue}: the prompts {sorted(missing)} were never trained; {sorted(uids)} were")
    print(f"{queue}: no prompt of {max(before)} is missing; {len(uids) - len(before)} are from after a resume")


def main() -> None:
    options = arguments(str(__doc__), queues="adapter", fault=["resume", "unit", "controller"])
    options.mode = "colocate_async"
    options.steps = max(options.steps, 5)
    state = options.work / "state"
    for queue in options.queues.split(","):
        if queue == "adapter":
            options.set = [*options.set, f"+transfer_queue.dataplane.state_dir={state}"]
        try:
            batches = resume(queue, options) if options.fault == "resume" else kill(queue, options)
        finally:
            if queue == "adapter":
                # A killed service leaves its arenas for the next start; killed clients leave their locks.
                discard(state, ["/dev/shm"])
                sweep_leftovers(DataPlaneConfig())
        nothing_lost(queue, options, batches)


if __name__ == "__main__":
    main()
