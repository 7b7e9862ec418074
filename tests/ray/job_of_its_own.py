"""A driver with a Ray job of its own on a cluster that a test started; run by test_rendezvous.py.

Arguments: the cluster's address. Reads calls of `ACTIONS`, [name, argument], line by line, and prints what each
returns, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import ray
import torch

import dataplane.compat.transfer_queue as tq
from tests.ray.plain_job import job
from tests.ray.slow_start import allow_slow_starts
from workers.service.discovery import RayRendezvous

SMALL = {"capacity_bytes": 32 << 20}


def init(name: str | None) -> str | None:
    """The address of the service in use."""
    tq.init({"controller": {"name": name, "polling_mode": True}, "dataplane": SMALL})
    return tq.get_client().config.address


def put(key: str) -> list[str]:
    """All keys that there are afterwards."""
    tq.kv_put(key, "p", {"v": torch.tensor([1])}, {})
    return sorted(tq.kv_list("p")["p"])


def put_by_worker(key: str) -> list[str]:
    remote = ray.remote(num_cpus=0, max_calls=1)(job)
    return sorted(ray.get(remote.remote(key)))


def close(_: None) -> bool:
    """Whether processes of this job find a service even so."""
    tq.close()
    return RayRendezvous().find() is not None


ACTIONS: dict[str, Callable[[Any], Any]] = {"init": init, "put": put, "put_by_worker": put_by_worker, "close": close}


def main(address: str) -> None:
    allow_slow_starts()
    ray.init(address=address, namespace="tests", log_to_driver=False)
    try:
        for line in sys.stdin:
            name, argument = json.loads(line)
            print(json.dumps(ACTIONS[name](argument)), flush=True)
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
