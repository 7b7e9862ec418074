"""The Slurm script, run for real, with `srun` and `scontrol` that start processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.core.file_locks import sweep
from dataplane.core.private_dir import own_path
from tests.conftest import litter, our_files

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "tq.sbatch"
TOOLS = Path(__file__).parent / "slurm"
ONE_NODE = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "first"}
"""For what does not depend on how many there are."""

COMMAND = """
import os, signal, sys, time, torch, dataplane
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
assert len(os.environ["TQ_TOKEN"]) == 64
with dataplane.connect() as client:
    client.register_partition("train", ["x"], num_samples=2, consumer_tasks=["policy"])
    client.put_samples(["a", "b"], "train", {"x": torch.arange(2)})
    meta = client.claim_meta("train", "policy", ["x"], batch_size=2)
    print("claimed", *meta.sample_ids, "of", len(client.stats().units), "units", flush=True)
    %s
"""
WAIT = "while True: time.sleep(0.1)"
"""Until it is ended. (A signal that comes just before `signal.pause` does not end that.)"""


def job(directory: Path, then: str = "sys.exit(3)", **more: str) -> subprocess.Popen[str]:
    """The script on two nodes, whose command puts, claims, and does `then`."""
    tools, seen = directory / "bin", directory / "seen"
    tools.mkdir()
    seen.mkdir()
    (tools / "tq").write_text(f'#!/bin/sh\nexec {sys.executable} -m dataplane "$@"\n')
    (tools / "tq").chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TQ_")},
        "PATH": f"{tools}:{TOOLS}:{os.environ['PATH']}",
        "TMPDIR": str(directory),
        "FAKE_SRUN": str(seen),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "first,second",
        "TQ_HOST": "127.0.0.1",
        "TQ_CAPACITY": "8m",
        **more,
    }
    command = [SCRIPT, sys.executable, "-c", COMMAND % then]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path: Path) -> Iterator[None]:
    files = our_files()
    yield
    left = litter(files)
    assert not [name for name in left if "session" not in name]
    if left:  # the lock of a client that was ended while it looked for its controller: the next unit takes it away
        sweep(own_path("/dev/shm"))
    assert not list(tmp_path.glob("tmp*"))


def ended(running: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, errors = running.communicate(timeout=300)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
    return running.returncode, out, errors


def test_the_command_finds_the_service_and_its_code_is_the_jobs(tmp_path: Path) -> None:
    code, out, errors = ended(job(tmp_path))
    assert code == 3, errors
    assert ", 2 storage units\n" in out
    assert out.endswith("claimed a b of 2 units\n")


def test_what_slurm_asks_to_end_ends(tmp_path: Path) -> None:
    running = job(tmp_path, WAIT, **ONE_NODE)
    assert running.stdout is not None
    while not running.stdout.readline().startswith("claimed"):
        assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    assert ended(running)[0] == 143


def test_a_part_that_dies_ends_the_job(tmp_path: Path) -> None:
    then = [
        'seen = os.environ["FAKE_SRUN"] + "/serve"',
        "while not os.path.exists(seen): time.sleep(0.1)",
        "os.kill(int(open(seen).read()), signal.SIGKILL)",
        WAIT,
    ]
    code, _, errors = ended(job(tmp_path, "\n    ".join(then), **ONE_NODE))
    assert code == 1
    assert "a part of the service ended before the command" in errors


def test_a_part_that_does_not_start_says_why(tmp_path: Path) -> None:
    code, _, errors = ended(job(tmp_path, TQ_CAPACITY="1000t", **ONE_NODE))
    assert code == 1
    assert "tq.sbatch: a storage unit did not start within 120 s (TQ_START_S), or ended before; the output:\n" in errors
    assert "tq: the arena needs 1,099,511,627," in errors


def test_a_job_without_a_command_is_told_what_to_do() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "tq.sbatch: name the command to run: sbatch tq.sbatch python train.py\n",
    )
