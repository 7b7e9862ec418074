"""The short way of a small put: the columns of an earlier put of the same fields are known, so that
nothing has to be derived from the values but their lengths.

In all other cases the put takes the general way (`put`), before anything is copied or sent.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from dataplane.client.operations.steps import Operation, Send, Wait, Work, always
from dataplane.client.preallocated import MOST_BYTES, SHARE, SMALL_BYTES, PreallocatedPortion
from dataplane.client.session_state import Schema, SessionState
from dataplane.core.checksums import checksums_of
from dataplane.core.devices import CPU
from dataplane.core.failpoints import armed, failpoint
from dataplane.core.plain_numbers import numbers_dtype
from dataplane.core.row_copy import Int64s, UInt8s, address
from dataplane.core.schema import EVICTED_SAMPLES, INPUT_LENGTHS
from dataplane.core.types import GRANULE_BYTES, INT64_MAX, INT64_MIN, FieldKind, Scalar
from dataplane.data.columns import EncodedColumn
from dataplane.data.jagged import detached_values, host_starts_and_lengths, is_jagged
from dataplane.data.meta import KVBatchMeta
from dataplane.data.object_codec import encode_rows
from dataplane.data.tensor_memory import TORCH_DTYPES
from dataplane.errors import (
    CallTimeoutError,
    CapacityTimeoutError,
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    ServiceUnavailableError,
    SessionExpiredError,
    UnsupportedValueError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.commands.short import PlanColumn, encode_plan

log = logging.getLogger(__name__)

UNCERTAIN_ERRORS = (CallTimeoutError, ClientClosedError, ServiceUnavailableError, SessionExpiredError)
"""Errors of a commit after which it is unknown whether it was executed."""
MAX_ROWS = 32
MAX_COLUMNS = 64
"""Maximum numbers of samples and columns of a small put."""
MAX_REQUESTS = 3
"""Maximum number of requests for space, of its own or of others, that a put waits for."""
MAX_PLANS = 256
"""Maximum number of plans that a session remembers."""
_MODES = {mode.value: mode for mode in c.Mode}
_STRIDED = torch.strided
_FORMS = (Tensor, NestedTensor, list)
_PLAIN_TAGS = frozenset({str, bool, int, float, type(None)})
_KINDS = frozenset({FieldKind.DENSE, FieldKind.JAGGED, FieldKind.OBJECT})
_Source = tuple[int | bytes, int, object]
"""Bytes to copy: their address, or the bytes themselves; their number; and what keeps them alive."""


class _Column(NamedTuple):
    """How the values of a column are given and stored. form: the type of the values, a tensor, a
    jagged tensor or a list of rows; None if all forms are stored alike. dims: the number of
    dimensions of each row."""

    name: str
    kind: FieldKind
    dtype: torch.dtype | None
    numbers: str | None
    inner: tuple[int, ...]
    dims: int
    form: type | None
    unit_bytes: int


class PutPlan:
    """What puts of some fields into a partition have in common while the client's `schema` of the
    partition is the same object."""

    def __init__(
        self,
        schema: Schema,
        columns: Sequence[EncodedColumn],
        forms: Sequence[type | None],
    ) -> None:
        self.schema = schema
        self.columns: list[_Column] = []
        for column, form in zip(columns, forms, strict=True):
            spec = column.spec
            inner = spec.inner or ()
            dims = len(inner) + (spec.kind is FieldKind.JAGGED)
            assert spec.kind is not None
            dtype = None if spec.kind is FieldKind.OBJECT else TORCH_DTYPES[spec.dtype or ""]
            self.columns.append(_Column(column.name, spec.kind, dtype, spec.dtype, inner, dims, form, spec.unit_bytes))
        self.encoded = encode_plan(
            tuple([PlanColumn(each.name, each.spec, by_schema=each.by_schema) for each in columns])
        )


def remember(
    session_state: SessionState,
    partition: str,
    fields: Mapping[str, Any],
    encoded: Sequence[EncodedColumn],
    *,
    any_form: bool,
) -> None:
    """Remember the plan of a put that was stored, if further ones like it are possible the short
    way. any_form: the caller stores rows alike in whichever form they are given."""
    if session_state.connections.local_unit() is None:
        return
    names = list(fields.keys())
    if len(names) != len(encoded) or len(encoded) > MAX_COLUMNS or len(encoded[0].lengths) > MAX_ROWS:
        return
    forms: list[type | None] = []
    for column, value in zip(encoded, fields.values(), strict=True):
        spec = column.spec
        if column.index is not None or spec.kind not in _KINDS or column.values.device != CPU:
            return
        if (spec.dtype or "").startswith("complex"):
            return
        if not any_form and type(value) not in _FORMS:
            return
        forms.append(None if any_form else type(value))
    schema = session_state.schemas.get(partition)
    if schema is None:
        return
    plans = session_state.put_plans
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[partition, *names] = PutPlan(schema, encoded, forms)


class ShortPut(NamedTuple):
    """A put that can take the short way. names: of the fields. sources: by column, the bytes to
    copy. sizes: by column, their number in whole granules. tag_dicts: for the meta of the put; None
    without tags, or if `listed`."""

    partition: str
    ids: list[str]
    handles: tuple[Int64s, Int64s] | None
    mode: c.Mode
    names: list[str]
    plan: PutPlan
    lengths: list[int]
    sources: list[list[_Source]]
    sizes: list[int]
    tags: dict[str, tuple[Scalar, ...]]
    tag_dicts: list[dict[str, Scalar]] | None
    listed: bool


def prepare(
    session_state: SessionState,
    names: Any,
    partition: str,
    fields: Any,
    tags: Any,
    mode: str,
    *,
    listed: bool = False,
) -> ShortPut | None:
    """Return the put in its short form; None if it must take the general way. Change nothing."""
    handles = names.handles if type(names) is KVBatchMeta else None
    if handles is None and type(names) is not list:
        return None
    if not 0 < len(names) <= MAX_ROWS or type(partition) is not str:
        return None
    if type(fields) is TensorDict:
        if fields.batch_size[:1] != (len(names),):
            return None
    elif type(fields) is not dict:
        return None
    field_names = list(fields.keys())
    plan = session_state.put_plans.get((partition, *field_names))
    if plan is None or plan.schema is not session_state.schemas.get(partition):
        return None
    ids = names if handles is None else list(names.sample_ids)
    for name in ids:
        if type(name) is not str:
            return None
    token_lengths = None if handles is None else names.sequence_lengths
    count = len(ids)
    values = {} if tags is None else tag_values(tags, count)
    mode_of_rows = _MODES.get(mode) if type(mode) is str else None
    if values is None or mode_of_rows is None:
        return None
    lengths: list[int] = []
    sources = []
    sizes = []
    for column, value in zip(plan.columns, fields.values(), strict=True):
        if column.dtype is None:
            found = _object_sources(column, value, count, lengths, session_state.config.pickles)
        else:
            found = _tensor_sources(column, value, count, lengths, token_lengths)
        if found is None:
            return None
        sources.append(found)
        nbytes = found[0][1] if len(found) == 1 else sum([source[1] for source in found])
        sizes.append(-(-nbytes // GRANULE_BYTES) * GRANULE_BYTES)
    return ShortPut(
        partition,
        ids,
        handles,
        mode_of_rows,
        field_names,
        plan,
        lengths,
        sources,
        sizes,
        values,
        tag_dicts=None if tags is None or listed else [dict(each) for each in tags],
        listed=listed,
    )


def tag_values(tags: Any, count: int) -> dict[str, tuple[Scalar, ...]] | None:
    """Return the values of each tag, one per sample; None if they must take the general way."""
    if type(tags) is not list or len(tags) != count:
        return None
    names = None
    for mapping in tags:
        if type(mapping) is not dict or (names is not None and mapping.keys() != names):
            return None
        names = mapping.keys()
        for name, value in mapping.items():
            if type(name) is not str or type(value) not in _PLAIN_TAGS:
                return None
            if type(value) is int and not INT64_MIN <= value <= INT64_MAX:
                return None
    return {name: tuple([mapping[name] for mapping in tags]) for name in tags[0]}


def _tensor_sources(
    column: _Column, value: Any, count: int, lengths: list[int], token_lengths: list[int] | None
) -> list[_Source] | None:
    """Return the bytes of a column of tensors, and add the length of each row to `lengths`; None if
    they must take the general way, which cuts padded rows to the `token_lengths`."""
    form = type(value)
    if column.form is not None and column.form is not form:
        return None
    if form is NestedTensor:
        return _jagged_sources(column, value, count, lengths)
    is_list = form is list
    if is_list and len(value) != count:
        return None
    rows = value if is_list else (value,)
    sources: list[_Source] = []
    dims = column.dims if is_list else column.dims + 1
    first = dims - len(column.inner)  # the number of dimensions before the inner shape
    for row in rows:
        if type(row) is not Tensor or row.dtype is not column.dtype or row.layout is not _STRIDED:
            return None
        if not row.is_cpu or row.is_nested or not row.is_contiguous() or row.is_neg():
            return None
        shape = row.shape
        if len(shape) != dims or shape[first:] != column.inner:
            return None
        if not is_list:
            if shape[0] != count:
                return None
            width = shape[1] if column.kind is FieldKind.JAGGED else 1
            if token_lengths is not None and column.kind is FieldKind.JAGGED and set(token_lengths) != {width}:
                return None
            lengths += [width] * count
        else:
            lengths.append(shape[0] if column.kind is FieldKind.JAGGED else 1)
        sources.append((row.data_ptr(), row.nbytes, row))
    return sources


def _jagged_sources(column: _Column, value: Any, count: int, lengths: list[int]) -> list[_Source] | None:
    """As `_tensor_sources`, of one jagged tensor."""
    if column.kind is not FieldKind.JAGGED or not is_jagged(value):
        return None
    values = detached_values(value)
    if type(values) is not Tensor or values.dtype is not column.dtype or values.shape[1:] != column.inner:
        return None
    if not values.is_cpu or not values.is_contiguous() or values.is_neg():
        return None
    starts, row_lengths = host_starts_and_lengths(value)
    if len(starts) != count:
        return None
    begin = values.data_ptr()
    sources: list[_Source] = []
    for start, length in zip(starts.tolist(), row_lengths.tolist(), strict=True):
        if start < 0 or length < 0 or start + length > len(values):  # the general way says so
            return None
        sources.append((begin + start * column.unit_bytes, length * column.unit_bytes, values))
        lengths.append(length)
    return sources


def _object_sources(column: _Column, value: Any, count: int, lengths: list[int], pickles: bool) -> list[_Source] | None:
    """As `_tensor_sources`, of a column of objects."""
    if type(value) is not list or len(value) != count or numbers_dtype(value) != column.numbers:
        return None
    if any(isinstance(row, Tensor | np.ndarray) for row in value):
        return None
    try:
        buffer, row_sizes = encode_rows(value, field=column.name, pickles=pickles)
    except UnsupportedValueError:  # the general way says so
        return None
    lengths += row_sizes
    return [(bytes(buffer), len(buffer), None)]


def store_short(session_state: SessionState, put: ShortPut) -> Operation[c.Committed | None]:
    """Copy the values into preallocated space and commit them. Return None if nothing was stored,
    because the client has no such space or the service rejected the put: then the put must take the
    general way."""
    nbytes = sum(put.sizes)
    if nbytes > SMALL_BYTES:
        return None
    buffer = session_state.preallocated
    portion = buffer.take(nbytes)
    failed = True
    try:
        if portion is None and buffer.in_use:
            portion = yield from take_preallocated(session_state, nbytes)
        if portion is None:
            return None
        space = portion.space
        memory = session_state.connections.mapped_memory(space.unit, portion.offset + nbytes)
        if memory is None:
            return None
        copy = partial(_copy, put, memory, portion.offset, checksums=space.checksums)
        checksums = yield Work(copy, always)
        if armed:
            failpoint("put.before_commit")
        command = c.PutRows(
            partition=put.partition,
            mode=put.mode,
            reservation=space.call_id,
            offset=portion.offset,
            plan=put.plan.encoded,
            lengths=tuple(put.lengths),
            ids=tuple(put.ids) if put.handles is None else (),
            rows=() if put.handles is None else tuple(put.handles[0].tolist()),
            generations=() if put.handles is None else tuple(put.handles[1].tolist()),
            checksums=checksums,
            tags=put.tags,
            listed=put.listed,
        )
        committed: c.Committed = (yield Send(command)).result
        failed = False
        return committed
    except UNCERTAIN_ERRORS:
        raise
    except DataPlaneError as error:
        session_state.put_plans.pop((put.partition, *put.names), None)
        log.debug("A short put was rejected (%s) and takes the general way", error)
        return None
    finally:
        if portion is not None:
            buffer.finish(portion, failed=failed)


def take_preallocated(session_state: SessionState, nbytes: int) -> Operation[PreallocatedPortion | None]:
    """Return preallocated space of the session for a small put, after a request for more if
    necessary: its own one, or that of another put. None if no space is available."""
    buffer = session_state.preallocated
    for _ in range(MAX_REQUESTS):
        portion = buffer.take(nbytes)
        if portion is not None:
            return portion
        unit = session_state.connections.local_unit()
        capacity_bytes = 0 if unit is None else session_state.connections.capacity_of(unit)
        request = buffer.next_request(nbytes, unit, min(MOST_BYTES, capacity_bytes // SHARE))
        if request is None:  # the put allocates its own space
            return None
        if isinstance(request, Future):
            yield Wait(request)
            continue
        try:
            granted = yield Send(request)
            space = granted.result
            buffer.add(granted.call_id, request, space.offset, checksums=space.checksums)
        except (CapacityTimeoutError, InvalidRequestError):  # no space, or the unit is not local
            buffer.record_rejection()
            return None
        finally:
            buffer.end_request()
    return buffer.take(nbytes)  # None if other puts have taken the new space


def _copy(put: ShortPut, memory: UInt8s, offset: int, *, checksums: bool) -> tuple[int, ...]:
    """Copy the values of the put to `offset` of an arena. Return their checksums if `checksums` is
    set."""
    if armed:
        failpoint("put.mid_copy")
    begin = address(memory) + offset
    for sources, size in zip(put.sources, put.sizes, strict=True):
        at = begin
        for content, nbytes, _ in sources:
            ctypes.memmove(at, content, nbytes)
            at += nbytes
        begin += size
    if not checksums:
        return ()
    count = len(put.ids)
    units = [column.unit_bytes for column in put.plan.columns]
    sizes = np.array(put.lengths, np.int64).reshape(len(units), count) * np.array(units)[:, None]
    begins = np.cumsum([0, *put.sizes[:-1]]) + offset
    offsets = np.cumsum(sizes, axis=1) - sizes + begins[:, None]
    return tuple(checksums_of(memory, offsets.reshape(-1), sizes.reshape(-1)).tolist())


def meta_of_short(put: ShortPut, committed: c.Committed) -> KVBatchMeta:
    """Return the meta of the stored samples, as that of a general put."""
    return KVBatchMeta.of_service(
        put.partition,
        list(put.ids),
        put.names,
        sequence_lengths=_sequence_lengths(put),
        extra_info={EVICTED_SAMPLES: list(committed.evicted)} if committed.evicted else {},
        tags=put.tag_dicts,
        rows=committed.rows,
        generations=committed.generations,
    )


def _sequence_lengths(put: ShortPut) -> list[Any] | None:
    """Return the tags `input_lengths`, or the lengths on which all jagged columns agree."""
    if INPUT_LENGTHS in put.tags:
        return list(put.tags[INPUT_LENGTHS])
    count = len(put.ids)
    agreed = None
    for position, column in enumerate(put.plan.columns):
        if column.kind is FieldKind.JAGGED:
            lengths = put.lengths[position * count : (position + 1) * count]
            if agreed is not None and lengths != agreed:
                return None
            agreed = lengths
    return agreed
