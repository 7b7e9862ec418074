"""verl's own trainer, unmodified, trains alike with the package TransferQueue and with the adapter.

`make soak` makes the environment that they need (`.venv-verl`); elsewhere the tests are skipped without one.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.faults.hosts import missing

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
LIMIT_S = 3600.0

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(not (ROOT / ".venv-verl" / ".ready").exists(), reason="no .venv-verl: make demo-verl makes it"),
]

VARIANTS = {
    "two workers, critic, KL in the reward, rollout correction, dumps": [
        *("--workers", "2", "--critic", "--validate", "--dump"),
        *("--set", "algorithm.use_kl_in_reward=true"),
        *("--set", "algorithm.rollout_correction.rollout_is=token"),
        *("--set", "actor_rollout_ref.rollout.calculate_log_probs=true"),
    ],
    "groups that fail": ["--fail-every", "3"],
    "dynamic filter, failed groups are replaced": ["--filter", "--fail-every", "5"],
    "skipped rollouts": ["--skip"],
    "separate_async": ["--mode", "separate_async", "--apart", "1", "--parts", "2"],
    "colocate_async": ["--mode", "colocate_async"],
    "images in the prompts": ["--images"],
}


def run(script: str, *arguments: str) -> None:
    program = ROOT / "tests" / "frameworks" / "verl" / script
    with tempfile.TemporaryDirectory(prefix="verl-", dir="/tmp") as work:  # a short path: Ray has sockets in it
        done = subprocess.run(
            [PYTHON, program, "--work", work, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS.keys())
def test_both_queues_train_alike(arguments: list[str]) -> None:
    run("train.py", *arguments)


@pytest.mark.parametrize("fault", ["resume", "unit", "controller"])
def test_no_sample_is_lost_or_trained_twice(fault: str) -> None:
    run("faults.py", "--queues", "adapter", "--fault", fault)


@pytest.mark.skipif(bool(missing()), reason=f"no hosts can be made here: {missing()}")
def test_both_queues_train_alike_on_two_hosts() -> None:
    run("nodes.py")
