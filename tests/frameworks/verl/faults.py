"""Faults while an unmodified verl trains in its mode `colocate_async`, which keeps samples in the queue between steps:

    python faults.py --fault resume                # the whole run is killed in step 3, and goes on from its checkpoint
    python faults.py --fault unit                  # a storage unit's process is killed in step 2
    python faults.py --fault controller            # the controller's
    python faults.py --fault unit --queues original

No sample may be lost or trained twice. The adapter's service has a state directory, so that it goes on by itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import psutil
from train import Batches, Training, arguments, check, sampled, start, training

SAVE_EVERY = 2
LIMIT_S = 900.0
"""Of a whole run: a queue that does not come back leaves its trainer waiting for ever."""
RESUMED = 1000
"""The first uid of a prompt after a resume."""
NAMES = {
    ("adapter", "unit"): "ray::StorageUnitActor",
    ("adapter", "controller"): "ray::ControllerActor",
    ("original", "unit"): "ray::SimpleStorageUnit",
    ("original", "controller"): "ray::TransferQueueController",
}
"""How Ray names the process of a part of a queue."""


def processes(begun: Training, name: str = "") -> list[psutil.Process]:
    """Those of a run, or those of them whose command begins with a name."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("VERL_CPU_SAMPLED") == begun.environment["VERL_CPU_SAMPLED"]
            if ours and " ".join(process.cmdline()).startswith(name):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], begun: Training, what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            state = "runs" if process.poll() is None else f"ended with exit code {process.poll()}"
            raise SystemExit(f"no {what}: the run {state}; the end of {begun.log}:\n{begun.log.read_text()[-3000:]}")
        time.sleep(0.2)


def step(name: str, options: argparse.Namespace) -> int:
    """The last one that a run has samples for."""
    return max((step for _, step, _ in sampled(name, options.work)), default=0)


def end(begun: Training, process: subprocess.Popen[bytes]) -> None:
    """The whole run is killed."""
    process.kill()
    process.wait()
    while left := processes(begun):
        for each in left:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.5)


def resume(queue: str, options: argparse.Namespace) -> Batches:
    """What both runs trained on; of the first, up to the checkpoint."""
    options.set = [*options.set, f"trainer.save_freq={SAVE_EVERY}"]
    first, second = f"{queue}-first", f"{queue}-resumed"
    begun = training(queue, options, first)
    process = start(begun)
    try:
        wait_until(lambda: step(first, options) > SAVE_EVERY, process, begun, f"samples for step {SAVE_EVERY + 1}")
    finally:
        end(begun, process)
    latest = options.work / "checkpoints" / "latest_checkpointed_iteration.txt"
    saved = int(latest.read_text())
    print(f"{first}: killed in step {step(first, options)}; there is a checkpoint of step {saved}", flush=True)
    options.set = [*options.set, "trainer.resume_mode=auto"]
    begun = training(queue, options, second, VERL_CPU_FIRST_UID=str(RESUMED))
    process, killed = start(begun), time.monotonic()
    try:
        wait_until(lambda: step(second, options) > 0, process, begun, "samples after the resume")
        print(f"{second}: first samples {time.monotonic() - killed:.0f} s after its start", flush=True)
        code = process.wait(LIMIT_S)
    finally:
        end(begun, process)
    if code:
        raise SystemExit(f"{second}: exit code {code}; the end of {begun.log}:\n{begun.log.read_text()[-3000:]}")
    return [batch for batch in sampled(first, options.work) if batch[1] <= saved] + sampled(second, options.work)


def kill(queue: str, options: argparse.Namespace) -> Batches:
    """What the run trained on, a part of whose queue was killed in step 2."""
    begun = training(queue, options)
    process = start(begun)
    try:
        wait_until(lambda: step(queue, options) > 1, process, begun, "samples for step 2")
        parts = processes(begun, NAMES[queue, options.fault])
        if not parts:
            raise SystemExit(f"no process {NAMES[queue, options.fault]} of {begun.log}")
        os.kill(parts[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        print(f"{queue}: killed {parts[0].pid}, {NAMES[queue, options.fault]}", flush=True)
        wait_until(lambda: step(queue, options) > 2, process, begun, "samples for step 3")
        print(f"{queue}: samples for step 3 {time.monotonic() - killed:.1f} s after that", flush=True)
        code = process.wait(LIMIT_S)
    finally:
        end(begun, process)
    if code:
        raise SystemExit(f"{queue}: exit code {code}; the end of {begun.log}:\n{begun.log.read_text()[-3000:]}")
    return sampled(queue, options.work)


def nothing_lost(queue: str, options: argparse.Namespace, batches: Batches) -> None:
    """Prompts have ascending uids, older ones are trained first: those trained have no gap, and all of their responses
    are there."""
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
    print(f"{queue}: no prompt of {max(before)} is missing; {len(uids) - len(before)} are of after a resume")


def main() -> None:
    options = arguments(str(__doc__), fault=["resume", "unit", "controller"])
    options.mode = "colocate_async"
    options.steps = max(options.steps, 5)
    state = Path(options.work) / "state"
    for queue in options.queues.split(","):
        if queue == "adapter":
            options.set = [*options.set, f"+transfer_queue.dataplane.state_dir={state}"]
        batches = resume(queue, options) if options.fault == "resume" else kill(queue, options)
        nothing_lost(queue, options, batches)


if __name__ == "__main__":
    main()
