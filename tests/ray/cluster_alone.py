"""A Ray cluster in a process of its own: prints its address, and ends when its standard input does.

Arguments: the directory for Ray's files. Imports nothing of this project.
"""

from __future__ import annotations

import sys

import ray
from ray._private import worker

from tests.children import START_S
from tests.ray.slow_start import allow_slow_starts


def main(directory: str) -> None:
    allow_slow_starts()
    context = ray.init(
        num_cpus=4, num_gpus=0, include_dashboard=False, _temp_dir=directory, object_store_memory=100 << 20
    )
    processes = [each.process for several in worker._global_node.all_processes.values() for each in several]
    try:
        print(context.address_info["gcs_address"], flush=True)
        sys.stdin.read()
    finally:
        ray.shutdown()
        for process in processes:  # Ray waits for those that it kills for a second only
            process.wait(START_S)


if __name__ == "__main__":
    main(sys.argv[1])
