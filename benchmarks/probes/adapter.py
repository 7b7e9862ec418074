"""Compares the TransferQueue package (0.1.11) with `dataplane.compat.transfer_queue`, which has the same interface.
One program runs with each of them, in two processes that take turns."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure import MIN_REPETITIONS, cores, percentile, ratios, seconds, uncollected
from benchmarks.payload import BatchSpec, Shape, build, digest, spans
from benchmarks.probes.base import Figure, side_by_side
from benchmarks.systems.ray_session import RaySession
from benchmarks.systems.service import Service

ORIGINAL, ADAPTER = "transfer_queue", "dataplane.compat.transfer_queue"
PARTITION = "probe"
SLICES = 8
SINGLES = 16
"""Calls with one key in one repetition."""
IN_FLIGHT = 64
PUTS_EACH = 2
"""Rollouts that a coroutine puts, one after another, in one repetition."""
TOKENS = 1000
REPETITIONS = 3
"""Repetitions of each operation in one turn. Their median counts."""
WARM_UP = 2


def beside_the_original(*, quick: bool) -> list[Figure]:
    """Return the milliseconds of a call with each, and the speed of the adapter relative to the package, round by
    round."""
    rounds = MIN_REPETITIONS if quick else 2 * MIN_REPETITIONS + 1
    keys = 10_000 if quick else 100_000
    (original, saw), (adapter, sees) = side_by_side(_side, [(number, rounds + WARM_UP, keys) for number in range(2)])
    if saw != sees:
        raise RuntimeError("the adapter returned different values than the package")
    figures = []
    for name in original:
        theirs, ours = original[name][WARM_UP:], adapter[name][WARM_UP:]
        figures += [
            Figure(name=f"adapter: {name}", rounds=[1e3 * each for each in ours], unit="ms", note=f"{rounds} rounds"),
            Figure(name=f"TransferQueue: {name}", rounds=[1e3 * each for each in theirs], unit="ms"),
            Figure(name=f"adapter : TransferQueue, {name}", rounds=ratios(theirs, ours), unit="x"),
        ]
    return figures


def _side(go: Callable[[], Any], number: int, rounds: int, keys: int) -> tuple[dict[str, list[float]], Any]:
    """Return the seconds of each operation in each round, with the package (0) or the adapter (1), and the values
    it returned. In the first half of a round one side works while the other waits, in the second half the other.
    Their order alternates."""
    os.environ.update({"TQ_NUM_THREADS": str(cores()), "TQ_LOGGING_LEVEL": "ERROR"})
    with Original() if number == 0 else _Adapter() as module:
        program = Program(module, keys=keys)
        taken: dict[str, list[float]] = {name: [] for name in program.works}
        for round_number in range(rounds):
            for name, work in program.works.items():
                for half in range(2):
                    go()
                    if (half + round_number) % 2 == number:
                        taken[name].append(turn(work))
        go()
        saw = program.saw()
        program.close()
        return taken, saw


def turn(work: Callable[[], float]) -> float:
    with uncollected():
        return percentile([work() for _ in range(REPETITIONS)], 0.5)


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
    """The timed operations with either module. Each of `works` returns the seconds of one call."""

    def __init__(self, module: Any, *, keys: int) -> None:
        self._tq = module
        batch = build(BatchSpec(shape=Shape.TOKENS, rows=512, length=1848))
        self._keys, self._names = batch.ids, batch.names
        self._batch = TensorDict(dict(batch.columns), batch_size=len(batch.ids))
        tokens = torch.arange(TOKENS)
        self._rollout = {"input_ids": tokens, "mask": tokens, "logprobs": tokens.float(), "reward": torch.tensor(1.0)}
        self._loop = asyncio.new_event_loop()
        self._singles = [f"single-{number}" for number in range(SINGLES)]
        self._tags = [{"step": 1, "status": "running"} for _ in self._keys]
        for partition, count in (("few", len(self._keys)), ("many", keys)):
            self._fill(partition, count)
        module.kv_batch_put(self._keys, "stored", self._batch, self._tags)
        self.works: Mapping[str, Callable[[], float]] = {
            "put of 512 rows": self._put,
            "read of 512 rows": lambda: seconds(lambda: module.kv_batch_get(self._keys, "stored", self._names)),
            "8 slices": self._slices,
            "kv_clear of 512 keys": self._clear,
            "put of one key": self._put_one,
            "read of one key": self._read_one,
            "tags of one key": self._tag_one,
            "tags of 512 keys": lambda: seconds(lambda: module.kv_batch_put(self._keys, "stored", tags=self._tags)),
            "kv_list of 512 keys": lambda: seconds(lambda: module.kv_list("few")),
            f"kv_list of {keys:,} keys": lambda: seconds(lambda: module.kv_list("many")),
            f"{IN_FLIGHT} in flight": self._in_flight,
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

    def _put(self) -> float:
        taken = seconds(lambda: self._tq.kv_batch_put(self._keys, PARTITION, self._batch))
        self._tq.kv_clear(self._keys, PARTITION)
        return taken

    def _slices(self) -> float:
        parts = [self._keys[first:last] for first, last in spans(len(self._keys), SLICES)]
        return seconds(lambda: [self._tq.kv_batch_get(part, "stored", self._names) for part in parts])

    def _clear(self) -> float:
        self._tq.kv_batch_put(self._keys, PARTITION, self._batch)
        return seconds(lambda: self._tq.kv_clear(self._keys, PARTITION))

    def _put_one(self) -> float:
        taken = seconds(lambda: [self._tq.kv_put(key, PARTITION, self._rollout) for key in self._singles])
        self._tq.kv_clear(self._singles, PARTITION)
        return taken / SINGLES

    def _read_one(self) -> float:
        keys = self._keys[:SINGLES]
        return seconds(lambda: [self._tq.kv_batch_get(key, "stored", self._names) for key in keys]) / SINGLES

    def _tag_one(self) -> float:
        keys = self._keys[:SINGLES]
        return seconds(lambda: [self._tq.kv_put(key, "stored", tag=self._tags[0]) for key in keys]) / SINGLES

    def _in_flight(self) -> float:
        """Return the seconds of one put, in each of many concurrent coroutines."""
        keys = [[f"{number}-{turn}" for turn in range(PUTS_EACH)] for number in range(IN_FLIGHT)]

        async def put(mine: list[str]) -> None:
            for key in mine:
                await self._tq.async_kv_put(key, PARTITION, self._rollout)

        async def all_of_them() -> None:
            await asyncio.gather(*map(put, keys))

        taken = seconds(lambda: self._loop.run_until_complete(all_of_them()))
        self._tq.kv_clear([key for mine in keys for key in mine], PARTITION)
        return taken / (IN_FLIGHT * PUTS_EACH)
