"""The short way of a small read: the specs of the fields are known from an earlier read, and the
rows are in one mapped arena.

If a read turns out to need the general way (`get`), that way repeats it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, repeat
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from dataplane.client.operations.sample_names import Names
from dataplane.client.operations.short_put import UNCERTAIN_ERRORS
from dataplane.client.operations.steps import EndRead, Operation, Send, Work
from dataplane.client.preallocated import SMALL_BYTES
from dataplane.client.session_state import SessionState
from dataplane.client.unit_connections import units_of
from dataplane.core.checksums import damaged
from dataplane.core.failpoints import armed, failpoint
from dataplane.core.row_copy import Run, UInt8s, address, copy_padded
from dataplane.core.types import FieldKind
from dataplane.data.batch import BatchedDataDict
from dataplane.data.jagged import jagged_from_values, not_per_token, pad_element, padded_width
from dataplane.data.meta import KVBatchMeta
from dataplane.data.object_codec import decode_object, object_array
from dataplane.data.tensor_memory import TORCH_DTYPES, byte_view
from dataplane.errors import DataPlaneError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.ledger.commands.short import PlanColumn, encode_plan

MAX_ROWS = 64
MAX_COLUMNS = 64
"""Maximum numbers of samples and columns of a small read."""
MAX_PLANS = 256
"""Maximum number of plans that a session remembers."""


class _Column(NamedTuple):
    name: str
    kind: FieldKind | None
    dtype: torch.dtype
    inner: tuple[int, ...]
    unit_bytes: int


class ReadPlan(NamedTuple):
    """What reads of some fields of a partition have in common while the fields have these specs.
    key: its key in `SessionState.read_plans`. encoded: for `LocateRows`."""

    key: tuple[str, ...]
    columns: list[_Column]
    encoded: bytes


class Padding(NamedTuple):
    """How `get_batch` pads jagged columns. tokens: the lengths of the samples (see `not_per_token`)."""

    pads: Mapping[str, Any]
    width: int
    tokens: Sequence[int] | None


def _plan_of(key: tuple[str, ...], located: Sequence[c.FieldLocations]) -> ReadPlan:
    columns = [
        _Column(
            each.name,
            each.spec.kind,
            TORCH_DTYPES[each.spec.dtype or "uint8"],
            each.spec.inner or (),
            each.spec.unit_bytes,
        )
        for each in located
    ]
    plan_columns = [PlanColumn(each.name, each.spec, by_schema=False) for each in located]
    return ReadPlan(key, columns, encode_plan(tuple(plan_columns)))


def remember(session_state: SessionState, partition: str, select_fields: Sequence[str], located: c.Located) -> None:
    """Remember the plan of a read, if further ones like it can take the short way: of any fields
    but ragged ones, whose rows are in one mapped arena."""
    key = (partition, *select_fields)
    fields = located.fields
    if key in session_state.read_plans or len(fields) != len(select_fields) or located.widened:
        return
    if not 0 < len(located.rows) <= MAX_ROWS or not 0 < len(fields) <= MAX_COLUMNS:
        return
    if len(set(select_fields)) < len(fields) or any(each.spec.kind is FieldKind.RAGGED for each in fields):
        return
    units = units_of(fields)
    if len(units) > 1 or session_state.connections.readable_memory(min(units)) is None:
        return
    if len(session_state.read_plans) >= MAX_PLANS:
        session_state.read_plans.clear()
    session_state.read_plans[key] = _plan_of(key, fields)


def prepare(session_state: SessionState, names: Any, partition: str, select_fields: Any) -> ReadPlan | None:
    """Return the plan of a read that can take the short way, else None."""
    if type(select_fields) not in (list, tuple) or type(partition) is not str:
        return None
    if type(names) is list:
        if not 0 < len(names) <= MAX_ROWS:
            return None
        for name in names:
            if type(name) is not str:
                return None
        if len(set(names)) < len(names):
            return None
    elif type(names) is not KVBatchMeta or names.partition_id != partition or not 0 < len(names) <= MAX_ROWS:
        return None
    for name in select_fields:
        if type(name) is not str:
            return None
    return session_state.read_plans.get((partition, *select_fields))


def get_short(
    session_state: SessionState,
    names: Names,
    plan: ReadPlan,
    padding: Padding | None,
    general: Callable[[], Operation[Any]],
) -> Operation[Any]:
    """Locate and pin, copy, end the read; return the result of `get`, or with `padding` of
    `get_batch`. If the service rejects the read or has no short answer, or the rows cannot be copied
    so, perform the operation of `general` instead."""
    partition = plan.key[0]
    handles = names.handles if isinstance(names, KVBatchMeta) else None
    if handles is not None:
        rows, generations = handles
        command = c.LocateRows(
            partition=partition,
            plan=plan.encoded,
            rows=tuple(rows.tolist()),
            generations=tuple(generations.tolist()),
        )
    else:
        ids = names.sample_ids if isinstance(names, KVBatchMeta) else names
        command = c.LocateRows(partition=partition, plan=plan.encoded, ids=tuple(ids))
    data = None
    try:
        sent = yield Send(command)
    except UNCERTAIN_ERRORS:
        raise
    except DataPlaneError:  # the general way says why, or tries again
        session_state.read_plans.pop(plan.key, None)
        return (yield from general())
    try:
        located: c.RowsLocated = sent.result
        memory = None
        if located.general is None:
            memory = session_state.connections.readable_memory(located.unit)
        if memory is not None:
            copy = partial(_copy, session_state, plan, located, memory, padding)
            data = yield Work(copy, partial(_is_small, plan, located, padding))
            if armed:
                failpoint("get.copied")
            if not session_state.lock_stands:
                yield Send(c.Units())  # any command: it fails if the session has ended
    finally:
        if armed:
            failpoint("get.before_release")
        yield EndRead(sent.call_id)
    if data is not None:
        return data
    session_state.read_plans.pop(plan.key, None)
    if located.general is not None and len(units_of(located.general.fields)) > 1:
        session_state.read_plans[plan.key] = None  # the next such read would be in vain, too
    return (yield from general())


def _is_small(plan: ReadPlan, located: c.RowsLocated, padding: Padding | None) -> bool:
    """Return whether the copies have at most `SMALL_BYTES`, if every row were as long as the longest of its column."""
    count = len(located.rows)
    nbytes = 0
    for first, column in zip(range(0, count * len(plan.columns), count), plan.columns, strict=True):
        longest = max(located.lengths[first : first + count])
        if padding is not None and column.kind is FieldKind.JAGGED:
            longest = max(longest, padding.width)
        nbytes += count * longest * column.unit_bytes
    return nbytes <= SMALL_BYTES


def _copy(
    session_state: SessionState, plan: ReadPlan, located: c.RowsLocated, memory: UInt8s, padding: Padding | None
) -> Any:
    """Copy the rows into new memory. Return a TensorDict, or with `padding` a BatchedDataDict. Return
    None if a row is outside the memory, does not match its checksum, or cannot be padded so: the
    general way raises the error."""
    if armed:
        failpoint("get.mid_copy")
    count = len(located.rows)
    firsts = range(0, count * len(plan.columns), count)
    begin = address(memory)
    fields: dict[str, Any] = {}
    shared_offsets: dict[tuple[int, ...], Tensor] = {}  # columns of equal lengths can be combined
    others: frozenset[str] = frozenset()
    if padding is not None:
        jagged = {
            column.name: located.lengths[first : first + count]
            for first, column in zip(firsts, plan.columns, strict=True)
            if column.kind is FieldKind.JAGGED
        }
        others = not_per_token(jagged, padding.tokens)
    for first, column in zip(firsts, plan.columns, strict=True):
        offsets = located.offsets[first : first + count]
        lengths = located.lengths[first : first + count]
        checksums = located.checksums[first : first + count]
        sizes = [length * column.unit_bytes for length in lengths]
        stops = list(map(add, offsets, sizes))
        if min(offsets) < 0 or min(sizes) < 0 or max(stops) > len(memory):
            return None
        if column.kind is FieldKind.OBJECT:
            if checksums and not _intact(memory, offsets, sizes, checksums):
                return None
            rows = [memory[at:stop].data for at, stop in zip(offsets, stops, strict=True)]
            objects = [decode_object(row, pickles=session_state.config.pickles) for row in rows]
            fields[column.name] = NonTensorStack(*objects) if padding is None else object_array(objects)
            continue
        starts: Sequence[int] = [0, *accumulate(sizes)]
        if column.kind is FieldKind.JAGGED and padding is not None:
            try:
                width = padded_width(max(lengths), 0 if column.name in others else padding.width)
                pad = pad_element(padding.pads.get(column.name, 0), column.dtype)
            except InvalidRequestError:
                return None
            values, target = session_state.empty((count, width, *column.inner), column.dtype)
            if len(target):
                ranges = list(zip(repeat(0), offsets, stops, strict=False))
                long_copies: list[Run] = []
                copy_padded([memory], ranges, target.reshape(count, -1), pad, long_copies)
                session_state.copier.copy(long_copies)
            starts = range(0, len(target) + 1, max(1, len(target) // count))
        else:
            values = torch.empty((sum(lengths), *column.inner), dtype=column.dtype)
            position = values.data_ptr()
            for start, at, size in zip(starts, offsets, sizes, strict=False):
                ctypes.memmove(position + start, begin + at, size)
        if checksums and not _intact(byte_view(values), starts[:count], sizes, checksums):
            return None
        if column.kind is FieldKind.JAGGED and padding is None:
            row_offsets = shared_offsets.get(lengths)
            if row_offsets is None:
                row_offsets = shared_offsets[lengths] = torch.tensor([0, *accumulate(lengths)])
            values = jagged_from_values(values, row_offsets, span=(min(lengths), max(lengths)))
        fields[column.name] = values
    if padding is None:
        return TensorDict._new_unsafe(fields, batch_size=torch.Size([count]))
    batch: BatchedDataDict[Any] = BatchedDataDict(fields)
    batch.not_per_token = others
    return batch


def _intact(memory: UInt8s, offsets: Sequence[int], sizes: Sequence[int], checksums: Sequence[int]) -> bool:
    """Whether the rows match their checksums."""
    wrong, _ = damaged(memory, np.array(offsets), np.array(sizes), np.array(checksums, np.uint32))
    return not len(wrong)
