"""Compares the TransferQueue package (0.1.11) with `dataplane.compat.transfer_queue`, which has the same interface.
One program runs with each of them, in two processes that take turns."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure import Cost, cost
from benchmarks.payload import BatchSpec, Shape, build, digest, spans
from benchmarks.probes.base import Figure, side_by_side
from benchmarks.probes.beside import (
    IN_FLIGHT,
    KEYS,
    SINGLES,
    WIDE,
    Costs,
    Work,
    compared,
    count_rounds,
    in_flight,
    in_turns,
    prepare_side,
    rollout,
    small_columns,
)
from benchmarks.systems.ray_session import RaySession
from benchmarks.systems.service import Service

ORIGINAL, ADAPTER = "transfer_queue", "dataplane.compat.transfer_queue"
PARTITION = "probe"
SLICES = 8


def beside_the_original(*, quick: bool) -> list[Figure]:
    """Measure the calls of a program that either module serves."""
    keys = 10_000 if quick else 100_000
    sides = [(number, count_rounds(quick=quick), keys) for number in (0, 1)]
    (original, saw), (adapter, sees) = side_by_side(_side, sides)
    if saw != sees:
        raise RuntimeError("the adapter returned different values than the package")
    return compared("adapter", original, adapter)


def _side(go: Callable[[], Any], number: int, rounds: int, keys: int) -> tuple[Costs, Any]:
    """Return the costs with the package (0) or the adapter (1), and the values it returned."""
    prepare_side()
    with Original() if number == 0 else _Adapter() as module:
        program = Program(module, keys=keys)
        costs = in_turns(go, number, rounds, program.works)
        saw = program.saw()
        program.close()
        return costs, saw


class Original:
    """The package's controller and two storage units as Ray actors, its client in this process."""

    def __enter__(self) -> Any:
        self._ray = RaySession()
        self._module = importlib.import_module(ORIGINAL)
        conf = {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 2}}}
        self._module.init(importlib.import_module("omegaconf").OmegaConf.create(conf))
        return self._module

    def __exit__(self, *_: object) -> None:
        self._module.close()
        self._ray.close()


class _Adapter:
    """A service process with one unit, and the adapter's client in this process."""

    def __enter__(self) -> Any:
        self._service = Service({"capacity_bytes": 2 << 30})
        self._module = importlib.import_module(ADAPTER)
        self._module.init({"controller": {"polling_mode": True}, "dataplane": {"address": self._service.address}})
        return self._module

    def __exit__(self, *_: object) -> None:
        self._module.close()
        self._service.close()


class Program:
    """The timed operations with either module. Each of `works` returns the cost of one call."""

    def __init__(self, module: Any, *, keys: int) -> None:
        self._tq = module
        batch = build(BatchSpec(shape=Shape.TOKENS, rows=512, length=1848))
        self._keys, self._names = batch.ids, batch.names
        self._batch = TensorDict(dict(batch.columns), batch_size=len(batch.ids))
        wide = build(WIDE)
        self._wide = TensorDict(dict(wide.columns), batch_size=len(wide.ids))
        self._loop = asyncio.new_event_loop()
        self._tags = [{"step": 1, "status": "running"} for _ in self._keys]
        for partition, count in (("few", len(self._keys)), ("many", keys)):
            self._fill(partition, count)
        module.kv_batch_put(self._keys, "stored", self._batch, self._tags)
        self.works: Mapping[str, Work] = {
            "put of 512 rows": self._put,
            "read of 512 rows": lambda: cost(lambda: self._read(self._keys)),
            "8 slices": self._slices,
            "kv_clear of 512 keys": self._clear,
            "put of one key": self._put_one,
            "read of one key": self._read_one,
            "tags of one key": self._tag_one,
            "tags of 512 keys": lambda: cost(self._tag_all),
            "kv_list of 512 keys": lambda: cost(self._list, SINGLES),
            f"kv_list of {keys:,} keys": lambda: cost(lambda: module.kv_list("many")),
            "kv_clear of 512 keys x 28 fields": self._clear_wide,
            f"{IN_FLIGHT} in flight": lambda: self._in_flight(rollout),
            f"{IN_FLIGHT} in flight, 20 small columns": lambda: self._in_flight(small_columns),
        }

    def saw(self) -> Any:
        """Return the values that both modules must return: a batch, and the keys and tags that were put."""
        return digest(self._tq.kv_batch_get(self._keys, "stored", self._names)), self._tq.kv_list()

    def close(self) -> None:
        self._loop.close()

    def _fill(self, partition: str, count: int) -> None:
        """Put samples with a tag and a number."""
        for first in range(0, count, 10_000):
            numbers = torch.arange(first, min(first + 10_000, count))
            keys = [f"{partition}-{number}" for number in numbers.tolist()]
            fields = TensorDict({"number": numbers}, batch_size=len(keys))
            self._tq.kv_batch_put(keys, partition, fields, [{"step": 1, "status": "done"} for _ in keys])

    def _read(self, keys: list[str] | str) -> Any:
        return self._tq.kv_batch_get(keys, "stored", self._names)

    def _tag_all(self) -> Any:
        return self._tq.kv_batch_put(self._keys, "stored", tags=self._tags)

    def _list(self) -> None:
        for _ in range(SINGLES):
            self._tq.kv_list("few")

    def _put(self) -> Cost:
        used = cost(lambda: self._tq.kv_batch_put(self._keys, PARTITION, self._batch))
        self._tq.kv_clear(self._keys, PARTITION)
        return used

    def _slices(self) -> Cost:
        parts = [self._keys[first:last] for first, last in spans(len(self._keys), SLICES)]
        return cost(lambda: [self._read(part) for part in parts])

    def _clear(self) -> Cost:
        self._tq.kv_batch_put(self._keys, PARTITION, self._batch)
        return cost(lambda: self._tq.kv_clear(self._keys, PARTITION))

    def _clear_wide(self) -> Cost:
        self._tq.kv_batch_put(self._keys, PARTITION, self._wide)
        return cost(lambda: self._tq.kv_clear(self._keys, PARTITION))

    def _put_one(self) -> Cost:
        used = cost(lambda: [self._tq.kv_put(key, PARTITION, rollout()) for key in KEYS], SINGLES)
        self._tq.kv_clear(KEYS, PARTITION)
        return used

    def _read_one(self) -> Cost:
        keys = self._keys[:SINGLES]
        return cost(lambda: [self._read(key) for key in keys], SINGLES)

    def _tag_one(self) -> Cost:
        keys = self._keys[:SINGLES]
        tag = self._tags[0]
        return cost(lambda: [self._tq.kv_put(key, "stored", tag=tag) for key in keys], SINGLES)

    def _in_flight(self, make: Callable[[], dict[str, Tensor]]) -> Cost:
        def clear(keys: list[str]) -> None:
            self._tq.kv_clear(keys, PARTITION)

        def put(key: str, values: dict[str, Tensor]) -> Awaitable[Any]:
            done: Awaitable[Any] = self._tq.async_kv_put(key, PARTITION, values)
            return done

        return in_flight(self._loop, put, clear, make)
