"""How cost grows with the number of samples that are stored."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.measure import Spread, anonymous_bytes, seconds
from benchmarks.probes.base import PARTITION, Figure, service
from dataplane import DataPlaneClient, KVBatchMeta

ROWS = 512
FIELDS = 10
CHUNK = 10_000
REPETITIONS = 15


def growth(*, quick: bool) -> list[Figure]:
    """Reads, claims, puts and clears of 512 samples with few and with many stored; the controller's memory; the same
    puts once every second stored sample has been cleared."""
    figures: list[Figure] = []
    with service(capacity_bytes=2 << 30) as (running, client):
        before = anonymous_bytes(running.pid)
        metas: list[KVBatchMeta] = []
        stored = 0
        for live in (1_000, 100_000) if quick else (1_000, 10_000, 100_000, 1_000_000):
            while stored < live:
                step = min(CHUNK, live - stored)
                metas.append(_fill(client, stored, step))
                stored += step
            figures += _at(client, live, KVBatchMeta.concat(metas[:2] if len(metas) > 1 else metas))
        figures.append(
            Figure(
                name=f"controller memory, {stored:,} samples x {FIELDS} fields",
                value=(anonymous_bytes(running.pid) - before) / 1e6,
                unit="MB",
                note="private memory of the service's process, less what it had when empty",
            )
        )
        put = _repeated(lambda: _put(client))
        for meta in metas:
            client.clear_samples(meta.subset(range(0, meta.size, 2)), PARTITION)
        again = _repeated(lambda: _put(client))
        figures.append(_figure(f"put 512 rows at {stored:,}", put))
        figures.append(_figure(f"put 512 rows at {stored:,}, every second cleared", again))
    return figures


def _at(client: DataPlaneClient, live: int, some: KVBatchMeta) -> list[Figure]:
    chosen = some.subset(range(0, some.size, max(1, some.size // ROWS))[:ROWS])
    ids = list(chosen.sample_ids)
    return [
        _figure(
            f"read 512 rows by meta at {live:,}",
            _repeated(lambda: seconds(lambda: client.get_samples(chosen, PARTITION, ["f0"]))),
        ),
        _figure(
            f"read 512 rows by ids at {live:,}",
            _repeated(lambda: seconds(lambda: client.get_samples(ids, PARTITION, ["f0"]))),
        ),
        _figure(f"claim 512 rows at {live:,}", _repeated(lambda: _claim(client))),
        _figure(f"clear 512 rows at {live:,}", _repeated(lambda: _clear(client))),
    ]


def _fill(client: DataPlaneClient, first: int, count: int) -> KVBatchMeta:
    columns = {f"f{field}": torch.arange(first, first + count) for field in range(FIELDS)}
    return client.put_samples([f"live-{row}" for row in range(first, first + count)], PARTITION, columns)


def _fresh(client: DataPlaneClient) -> KVBatchMeta:
    columns = {f"f{field}": torch.arange(ROWS) for field in range(FIELDS)}
    return client.put_samples([f"fresh-{row}" for row in range(ROWS)], PARTITION, columns)


def _put(client: DataPlaneClient) -> float:
    held: list[KVBatchMeta] = []
    taken = seconds(lambda: held.append(_fresh(client)))
    client.clear_samples(held[0], PARTITION)
    return taken


def _clear(client: DataPlaneClient) -> float:
    held = _fresh(client)
    return seconds(lambda: client.clear_samples(held, PARTITION))


def _claim(client: DataPlaneClient) -> float:
    """Then given back, so that the next finds as many unclaimed."""
    held: list[KVBatchMeta] = []
    taken = seconds(lambda: held.append(client.claim_meta(PARTITION, "task", ["f0", "f1"], ROWS, timeout_s=10.0)))
    client.nack(held[0])
    return taken


def _repeated(once: Callable[[], float]) -> Spread:
    for _ in range(10):
        once()
    return Spread.of([once() for _ in range(REPETITIONS)])


def _figure(name: str, spread: Spread) -> Figure:
    return Figure(
        name=name, value=spread.median * 1e3, unit="ms", spread=(spread.p10 * 1e3, spread.p90 * 1e3), note="one client"
    )
