"""A Ray driver that was written for the TransferQueue package, on a cluster that is there already.

Arguments: the cluster's address; "use" to put and get samples as well. Run by the interpreter that a wheel is installed
for. Prints, as JSON, the file that `transfer_queue` is in each of its processes.
"""
# ruff: noqa: PLC0415 (what imports do in workers is what is tried)

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import sys
from typing import Any

import ray
from ray.job_config import JobConfig

from tests.children import START_S
from tests.ray.slow_start import allow_slow_starts

MINE = {"env_vars": {"MINE": "job"}}
OWN = {"env_vars": {"OWN": "here"}}
PICKLED = datetime.date(2026, 1, 2)
"""What no column carries."""


def where() -> list[str | None]:
    """The file of the package, and the variables that the user gave."""
    found = importlib.util.find_spec("transfer_queue")
    return [found.origin if found else None, os.environ.get("MINE"), os.environ.get("OWN")]


@ray.remote(num_cpus=0)
def task() -> list[str | None]:
    return where()


@ray.remote(num_cpus=0)
def nested() -> list[list[str | None]]:
    """In a task that a task started, and in one with a runtime environment of its own."""
    return ray.get([task.remote(), task.options(runtime_env=OWN).remote()])


@ray.remote(num_cpus=0)
class Worker:
    def where(self) -> list[str | None]:
        return where()

    def nested(self) -> list[list[str | None]]:
        return ray.get(nested.remote())

    def use(self) -> Any:
        """A meta of what the driver has put, with another sample."""
        import torch
        import transfer_queue as tq

        tq.init()
        try:
            got = tq.kv_batch_get(["a"], "train")
            assert got["x"].unbind()[0].tolist() == [1, 2, 3]
            assert got["day"].tolist() == [PICKLED]
            return tq.kv_put("b", "train", {"x": torch.tensor([4])}, {"from": "worker"})
        finally:
            tq.close()


def everywhere() -> list[list[str | None]]:
    worker = Worker.options(runtime_env=OWN).remote()
    calls = [task.remote(), worker.where.remote()]
    several = [nested.remote(), worker.nested.remote()]
    return [*ray.get(calls, timeout=START_S), *(each for some in ray.get(several, timeout=START_S) for each in some)]


def use() -> None:
    import torch
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta

    tq.init({"dataplane": {"capacity_bytes": 32 << 20, "connect_timeout_s": START_S}})
    tq.kv_put("a", "train", {"x": torch.tensor([1, 2, 3]), "day": PICKLED}, {"from": "driver"})
    meta = ray.get(Worker.options(runtime_env=OWN).remote().use.remote(), timeout=START_S)
    assert type(meta) is KVBatchMeta, type(meta)
    assert tq.kv_list("train") == {"train": {"a": {"from": "driver"}, "b": {"from": "worker"}}}
    tq.close()


def main(address: str, *more: str) -> None:
    allow_slow_starts()
    saw: dict[str, Any] = {"driver": where()}
    common: dict[str, Any] = {"address": address, "log_to_driver": False}
    os.environ["RAY_ADDRESS"] = address
    saw["implied"] = [ray.get(task.remote(), timeout=START_S)]
    ray.shutdown()
    if more:
        ray.init(**common)
        saw["plain"] = [ray.get(task.remote(), timeout=START_S)]
        ray.shutdown()
        ray.init(**common, job_config=JobConfig(runtime_env=MINE))
        saw["job config"] = [ray.get(task.remote(), timeout=START_S)]
        ray.shutdown()
        ray.init(**common, runtime_env=MINE)
        saw["runtime env"] = everywhere()
        use()
        ray.shutdown()
    print(json.dumps(saw))


if __name__ == "__main__":
    main(*sys.argv[1:])
