"""Runs NeMo-RL's own unmodified tests, once with each queue, and prints a table of what passes:

    git --git-dir=NEMO_RL.git archive HEAD | tar x -C /tmp/nemo-rl
    python -m tests.frameworks.nemo_rl.run /tmp/nemo-rl                                  # all suites
    python -m tests.frameworks.nemo_rl.run /tmp/nemo-rl --suite data_plane --queue adapter

`original` is NeMo-RL's adapter and the package TransferQueue; `adapter` is `dataplane.compat.nemo_rl` by its switch.
The environment has what is in `requirements.txt`, and torch. NeMo-RL's tests write their results (`unit_results`,
`test_assets`) into its directory. Its `conftest.py` leaves out tests with the marks mcore, hf_gated, automodel, vllm,
sglang, trtllm and nemo_gym. Its own adapter has Ray copy the whole environment in the first test that uses a queue.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.frameworks.suites import Framework, main

PACKAGE = "Metadata-Version: 2.1\nName: nemo-rl\nVersion: 0.0.0\nRequires-Dist: TransferQueue==0.1.11\n"
"""NeMo-RL's adapter reads the required TransferQueue version from the metadata of the installed package `nemo-rl`. A
clone has no such metadata."""

NEMO_RL = Framework(
    name="nemo_rl",
    tests="tests/unit",
    suites={
        "data_plane": ("data_plane",),
        "single_controller": ("single_controller",),
        "packing": ("data/packing", "data/test_llm_message_utils.py"),
        "async": ("algorithms/test_async_utils.py", "algorithms/test_grpo_router_replay_async.py"),
        "algorithms": tuple(f"algorithms/test_{name}.py" for name in ("grpo", "ppo", "opd")),
        "sglang": ("models/generation/sglang/test_utils_smoke.py",),
    },
    queues={"original": ("-m", "pytest"), "adapter": ("-m", "dataplane.compat.nemo_rl", "-m", "pytest")},
    python_path=(Path(__file__).parent / "python311",),
    files={"nemo_rl-0.0.0.dist-info/METADATA": PACKAGE},
)

if __name__ == "__main__":
    sys.exit(main(NEMO_RL, str(__doc__)))
