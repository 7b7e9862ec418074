"""Runs RLinf's own unmodified tests of workers, channels and messages, on its classes and on ours, and prints a table
of what passes:

    git --git-dir=RLINF.git archive HEAD | tar x -C /tmp/rlinf
    python -m tests.frameworks.rlinf.run /tmp/rlinf
    python -m tests.frameworks.rlinf.run /tmp/rlinf --suite comm --queue adapter

`original` is `rlinf.scheduler`; `adapter` is `workers.rlinf` by its switch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.frameworks.suites import Framework, main

SUITES = ("worker", "comm", "comm_mapper", "auto_placement", "weight_syncer")
"""Each file is a session of its own, as in RLinf's CI: a file's cluster is the whole process's. Files that test RLinf's
internals alone (`test_cluster_config.py`, `test_placement.py`, `test_broadcast_sync.py`), or make every channel from
them (`test_channel.py`), are left out."""

RLINF = Framework(
    name="rlinf",
    tests="tests/unit_tests",
    suites={name: (f"test_{name}.py",) for name in SUITES},
    queues={"original": ("-m", "pytest"), "adapter": ("-m", "workers.rlinf", "-m", "pytest")},
    python_path=(Path("tests/unit_tests"), Path(__file__).parent / "internals"),
)

if __name__ == "__main__":
    sys.exit(main(RLINF, str(__doc__)))
