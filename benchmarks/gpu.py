"""Reads to and puts from a CUDA GPU: `python -m benchmarks.gpu` prints the table of `benchmarks/README.md`.

Each row of the table is a batch of one int32 column of jagged rows (lengths spread evenly between half and one and a
half times the mean, in random order). Rates count the bytes of the rows. They are best of several turns:

- pinned: the ceiling, one copy of the same bytes from torch's pinned memory to the GPU (or back, for puts).
- padded, jagged: `get_batch(device="cuda")`; put: `put_samples` of a tensor on the GPU.
- padded cpu, jagged cpu: `get_batch()` and `.cuda()`; put cpu: `.cpu()` and `put_samples`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.systems.service import Service
from dataplane import DataPlaneClient, KVBatchMeta, StreamingDataLoader, connect

MB = 1_000_000
SIZES = ((1, 64), (16, 64), (16, 1024), (128, 64), (128, 1024), (128, 8192), (1024, 64), (1024, 1024), (1024, 8192))
PARTITION, TASK, FIELD = "train", "policy", "tokens"
STEPS = 10


def best(run: Callable[[], Any], turns: int) -> float:
    """Return the shortest time of a run in seconds, after one that is not counted. Each ends with the GPU idle."""
    shortest = float("inf")
    for turn in range(turns + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        if turn:
            shortest = min(shortest, time.perf_counter() - start)
        del result
    return shortest


def rows_of(megabytes: int, count: int) -> list[torch.Tensor]:
    """Return `count` rows of int32 with `megabytes` together."""
    rng = np.random.default_rng(0)
    mean = megabytes * MB / 4 / count
    lengths = rng.permutation(np.linspace(0.5 * mean, 1.5 * mean, count).astype(np.int64))
    return [torch.randint(0, 50_000, (int(length),), dtype=torch.int32) for length in lengths]


def stored(client: DataPlaneClient, rows: Any, count: int) -> KVBatchMeta:
    """Put the rows and claim all of them."""
    client.clear_samples(None, PARTITION)
    client.register_partition(PARTITION, [FIELD], num_samples=count, consumer_tasks=[TASK])
    client.put_samples([f"{number}" for number in range(count)], PARTITION, {FIELD: rows})
    meta = client.claim_meta(PARTITION, TASK, [FIELD], batch_size=count)
    return meta.subset(np.random.default_rng(1).permutation(count).tolist())


def pinned_rates(nbytes: int, turns: int) -> tuple[float, float]:
    """Return seconds of a copy of `nbytes` from pinned memory to the GPU, and of one back."""
    host, there = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(nbytes, dtype=torch.uint8, device="cuda"),
    )
    return best(lambda: there.copy_(host, non_blocking=True), turns), best(lambda: host.copy_(there), turns)


def measure(client: DataPlaneClient, megabytes: int, count: int) -> dict[str, float]:
    """Return the rates of one batch in GB/s."""
    turns = 5 if megabytes > 500 else 15
    rows = rows_of(megabytes, count)
    nbytes = sum(row.nbytes for row in rows)
    meta = stored(client, rows, count)
    on_gpu = torch.nested.nested_tensor(rows, layout=torch.jagged).cuda()

    def put(value: Any) -> None:
        client.put_samples(meta, PARTITION, {FIELD: value})

    seconds = {
        "padded": best(lambda: client.get_batch(meta, device="cuda"), turns),
        "jagged": best(lambda: client.get_batch(meta, layout="jagged", device="cuda"), turns),
        "padded cpu": best(lambda: client.get_batch(meta)[FIELD].cuda(), min(turns, 3)),
        "jagged cpu": best(lambda: client.get_batch(meta, layout="jagged")[FIELD].cuda(), min(turns, 3)),
        "put": best(lambda: put(on_gpu), turns),
        "put cpu": best(lambda: put(on_gpu.cpu()), min(turns, 3)),
    }
    seconds["pinned"], seconds["pinned back"] = pinned_rates(nbytes, turns)
    return {name: nbytes / each / 1e9 for name, each in seconds.items()}


def prefetch(client: DataPlaneClient) -> tuple[float, float]:
    """Return the seconds of one fetch of 512 MB, and those that a step waits for its micro-batch if the loader fetches
    it during the previous step, which multiplies matrices for at least twice as long."""
    rows, count = rows_of(512, 256), 256
    fetch = best(partial(client.get_batch, stored(client, rows, count), device="cuda"), 5)
    client.clear_samples(None, PARTITION)
    client.register_partition(PARTITION, [FIELD], num_samples=count * STEPS, consumer_tasks=[TASK])
    for step in range(STEPS):
        client.put_samples([f"{step}.{number}" for number in range(count)], PARTITION, {FIELD: rows})
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    waits = []
    with StreamingDataLoader(client, PARTITION, TASK, [FIELD], batch_size=count, prefetch=2, device="cuda") as loader:
        batches = iter(loader)
        for _ in range(STEPS):
            start = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - start)
            total = batch.data[FIELD].sum()
            end = time.perf_counter() + 4 * fetch
            while time.perf_counter() < end:
                matrix @ matrix
                torch.cuda.synchronize()
            total.item()
            del batch, total
    return fetch, float(np.median(waits[2:]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-megabytes", type=int, default=1024)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; GB/s of row bytes")
    names = ["padded", "jagged", "pinned", "padded cpu", "jagged cpu", "put", "pinned back", "put cpu"]
    print("| MB | rows | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 2))
    with closing(Service({"capacity_bytes": 8 << 30})) as service, connect(service.address) as client:
        for megabytes, count in SIZES:
            if megabytes <= arguments.most_megabytes:
                rates = measure(client, megabytes, count)
                print(
                    f"| {megabytes} | {count} | " + " | ".join(f"{rates[name]:.2f}" for name in names) + " |",
                    flush=True,
                )
        fetch, wait = prefetch(client)
        print(f"one fetch of 512 MB: {1e3 * fetch:.2f} ms; a step with prefetch waits {1e3 * wait:.3f} ms for it")


if __name__ == "__main__":
    main()
