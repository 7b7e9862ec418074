"""Runs RLinf's own unmodified tests of workers, channels and messages, on its classes and on ours, and prints a table
of what passes:

    git --git-dir=RLINF.git archive HEAD | tar x -C /tmp/rlinf
    python -m tests.frameworks.rlinf.run /tmp/rlinf
    python -m tests.frameworks.rlinf.run /tmp/rlinf --suite channel --queue adapter

`original` is `rlinf.scheduler`; `adapter` is `workers.rlinf` by its switch.
"""

from __future__ import annotations

import sys

from tests.frameworks.suites import Framework, main

RLINF = Framework(
    name="rlinf",
    tests="tests/unit_tests",
    suites={
        "worker": ("test_worker.py",),
        "channel": ("test_channel.py",),
        "comm": ("test_comm.py", "test_broadcast_sync.py", "test_comm_mapper.py"),
        "placement": ("test_placement.py", "test_auto_placement.py", "test_cluster_config.py"),
        "weights": ("test_weight_syncer.py",),
    },
    queues={"original": ("-m", "pytest"), "adapter": ("-m", "workers.rlinf", "-m", "pytest")},
)

if __name__ == "__main__":
    sys.exit(main(RLINF, str(__doc__)))
