"""The measured work: one repetition of each operation on any system."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from benchmarks.measure import seconds
from benchmarks.payload import Batch, BatchSpec, spans
from benchmarks.systems.base import System

PARTS = 8
"""Number of data-parallel slices."""
SINGLE_PUTS = 16
"""Number of single-sample puts in one repetition of SINGLE."""


class Op(StrEnum):
    """PUT, READ: the whole batch. SLICES: the batch as padded data-parallel slices, one after another. SINGLE: puts
    of one sample each, one after another; the time is that of one put. STEP: the operations of a GRPO step on its
    batch."""

    PUT = "put"
    READ = "read"
    SLICES = "slices"
    SINGLE = "single"
    STEP = "step"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table. `systems` in the order of a round."""

    name: str
    op: Op
    batch: BatchSpec
    systems: tuple[str, ...]


def stored(op: Op) -> bool:
    """Whether the batch is stored in the system before the clock starts."""
    return op in (Op.READ, Op.SLICES)


def repeat(op: Op, system: System, batch: Batch, held: Any) -> float:
    """Run one repetition and return its seconds. `held` is the stored batch if `stored(op)`."""
    return _REPEAT[op](system, batch, held)


def read_back(op: Op, system: System, batch: Batch, held: Any) -> list[Mapping[str, Any]]:
    """Return the values of a stored batch, for a comparison with the values that were put: the whole batch or its
    padded slices."""
    if op is Op.SLICES:
        return [system.read_padded(part, batch.names) for part in _parts(system, batch, held)]
    return [system.read(held, batch.names)]


def _put(system: System, batch: Batch, _: Any) -> float:
    begun = time.perf_counter()
    held = system.put(batch)
    taken = time.perf_counter() - begun
    system.drop(held)
    return taken


def _read(system: System, batch: Batch, held: Any) -> float:
    return seconds(lambda: system.read(held, batch.names))


def _slices(system: System, batch: Batch, held: Any) -> float:
    parts = _parts(system, batch, held)
    return sum(seconds(partial(system.read_padded, part, batch.names)) for part in parts)


def _single(system: System, batch: Batch, _: Any) -> float:
    singles = [_rows(batch, row, row + 1) for row in range(SINGLE_PUTS)]
    begun = time.perf_counter()
    held = [system.put(single) for single in singles]
    taken = time.perf_counter() - begun
    for each in held:
        system.drop(each)
    return taken / SINGLE_PUTS


def _step(system: System, batch: Batch, _: Any) -> float:
    """Put rollouts; read the data-parallel slices three times; clear. The first two passes write log-probabilities
    back. Before the third pass the driver reads rewards and writes advantages."""
    results = [
        [_results(batch, name, first, last) for first, last in spans(len(batch.ids), PARTS)]
        for name in ("prev_logprobs", "reference_policy_logprobs")
    ]
    begun = time.perf_counter()
    held = system.put(batch)
    for written in results:
        for part, result in zip(_parts(system, batch, held), written, strict=True):
            system.read_padded(part, batch.names)
            system.put(result, part)
    rewards = system.read(held, ["reward"])["reward"]
    system.put(Batch(ids=batch.ids, columns={"advantage": rewards - rewards.mean()}), held)
    names = [*batch.names, "prev_logprobs", "reference_policy_logprobs"]
    for part in _parts(system, batch, held):
        system.read_padded(part, names)
    system.drop(held)
    return time.perf_counter() - begun


_REPEAT: Mapping[Op, Callable[[System, Batch, Any], float]] = {
    Op.PUT: _put,
    Op.READ: _read,
    Op.SLICES: _slices,
    Op.SINGLE: _single,
    Op.STEP: _step,
}


def _parts(system: System, batch: Batch, held: Any) -> list[Any]:
    return [system.part(held, first, last) for first, last in spans(len(batch.ids), PARTS)]


def _rows(batch: Batch, first: int, last: int) -> Batch:
    return Batch(
        ids=batch.ids[first:last], columns={name: _cut(column, first, last) for name, column in batch.columns.items()}
    )


def _results(batch: Batch, name: str, first: int, last: int) -> Batch:
    """Return a per-token column of results for these rows."""
    ids: Any = _cut(batch.columns["input_ids"], first, last)
    logprobs = torch.nested.nested_tensor_from_jagged(ids.values().float(), ids.offsets())
    return Batch(ids=batch.ids[first:last], columns={name: logprobs})


def _cut(column: Any, first: int, last: int) -> Any:
    """Return rows of a column in newly allocated memory."""
    if not isinstance(column, torch.Tensor):
        return column[first:last]
    if not column.is_nested:
        return column[first:last].clone()
    jagged: Any = column
    offsets = jagged.offsets()[first : last + 1]
    values = jagged.values()[int(offsets[0]) : int(offsets[-1])].clone()
    return torch.nested.nested_tensor_from_jagged(values, offsets - offsets[0])
