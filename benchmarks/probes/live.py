"""How the cost grows with the number of stored samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measure import MIN_REPETITIONS, alternating, anonymous_bytes, seconds, steady
from benchmarks.probes.base import PARTITION, Figure, service
from dataplane import DataPlaneClient, KVBatchMeta

ROWS = 512
FIELDS = 10
CHUNK = 10_000
WARM_UP = 2
TURN_S = 0.03


@dataclass(frozen=True, kw_only=True)
class Store:
    """A client of a service with stored samples. some: `ROWS` of them. grown_bytes: growth of the private memory of
    the service's process since it was empty."""

    client: DataPlaneClient
    some: KVBatchMeta
    grown_bytes: int


def growth(*, quick: bool) -> list[Figure]:
    """Measure reads, claims, puts and clears of 512 samples in turns on services with few and with many stored
    samples, and on one with as many of which every second was cleared; and the controller's memory."""
    sizes = (1_000, 100_000) if quick else (1_000, 10_000, 100_000, 1_000_000)
    with contextlib.ExitStack() as stack:
        stores = {f"{live:,}": stack.enter_context(_filled(live)) for live in sizes}
        memory = stores[f"{sizes[-1]:,}"].grown_bytes
        stores[f"{sizes[-1]:,}, every second cleared"] = stack.enter_context(_filled(sizes[-1], every_second=True))
        taken = _taken(stores, MIN_REPETITIONS if quick else 2 * MIN_REPETITIONS + 1)
    return [
        *(Figure(name=name, rounds=rounds[WARM_UP:], unit="ms", note="one client") for name, rounds in taken.items()),
        Figure(
            name=f"controller memory, {sizes[-1]:,} samples x {FIELDS} fields",
            rounds=[memory / 1e6],
            unit="MB",
            note="growth of the private memory of the service's process since it was empty",
        ),
    ]


def _taken(stores: Mapping[str, Store], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round, by figure. The turns of one operation on all stores are adjacent."""
    taken: dict[str, list[float]] = {}
    for order in alternating(list(stores.items()), rounds + WARM_UP):
        for work, once in WORK.items():
            for live, store in order:
                once(store)
                taken.setdefault(f"{work} at {live}", []).append(steady(partial(once, store), turn_s=TURN_S) * 1e3)
    return taken


@contextlib.contextmanager
def _filled(live: int, *, every_second: bool = False) -> Iterator[Store]:
    """Yield a service with `live` samples. `every_second`: clear half of them."""
    with service() as (running, client):
        before = anonymous_bytes(running.pid)
        metas = [_fill(client, first, min(CHUNK, live - first)) for first in range(0, live, CHUNK)]
        grown = anonymous_bytes(running.pid) - before
        if every_second:
            for meta in metas:
                client.clear_samples(meta.subset(range(0, meta.size, 2)), PARTITION)
            metas = [meta.subset(range(1, meta.size, 2)) for meta in metas]
        few = KVBatchMeta.concat(metas[:2]) if len(metas) > 1 else metas[0]
        some = few.subset(range(0, few.size, max(1, few.size // ROWS))[:ROWS])
        yield Store(client=client, some=some, grown_bytes=grown)


def _fill(client: DataPlaneClient, first: int, count: int) -> KVBatchMeta:
    columns = {f"f{field}": torch.arange(first, first + count) for field in range(FIELDS)}
    return client.put_samples([f"live-{row}" for row in range(first, first + count)], PARTITION, columns)


def _fresh(store: Store) -> KVBatchMeta:
    columns = {f"f{field}": torch.arange(ROWS) for field in range(FIELDS)}
    return store.client.put_samples([f"fresh-{row}" for row in range(ROWS)], PARTITION, columns)


def _read_by_meta(store: Store) -> float:
    return seconds(lambda: store.client.get_samples(store.some, PARTITION, ["f0"]))


def _read_by_ids(store: Store) -> float:
    ids = list(store.some.sample_ids)
    return seconds(lambda: store.client.get_samples(ids, PARTITION, ["f0"]))


def _put(store: Store) -> float:
    held: list[KVBatchMeta] = []
    taken = seconds(lambda: held.append(_fresh(store)))
    store.client.clear_samples(held[0], PARTITION)
    return taken


def _clear(store: Store) -> float:
    held = _fresh(store)
    return seconds(lambda: store.client.clear_samples(held, PARTITION))


def _claim(store: Store) -> float:
    """Claim and nack, so that the next claim finds the same number of unclaimed samples."""
    held: list[KVBatchMeta] = []
    taken = seconds(lambda: held.append(store.client.claim_meta(PARTITION, "task", ["f0", "f1"], ROWS, timeout_s=10.0)))
    store.client.nack(held[0])
    return taken


WORK: Mapping[str, Callable[[Store], float]] = {
    "read 512 rows by meta": _read_by_meta,
    "read 512 rows by ids": _read_by_ids,
    "claim 512 rows": _claim,
    "clear 512 rows": _clear,
    "put 512 rows": _put,
}
