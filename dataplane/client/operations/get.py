"""The read operations: return samples as tensors that the caller owns, or as views of shared memory.

Bytes are returned only if they match their checksums (where these exist), and only if their pins lasted until the
copy was done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from dataplane.client.operations.retry import ensure_known, with_retry
from dataplane.client.operations.sample_names import Names, ids_of, samples_of, send_for_samples
from dataplane.client.operations.short_get import Padding, get_short, prepare, remember
from dataplane.client.operations.steps import EndRead, Operation, Post, Send, Work
from dataplane.client.session_state import SessionState
from dataplane.client.unit_connections import select_values, units_of
from dataplane.core import devices
from dataplane.core.failpoints import failpoint
from dataplane.core.schema import VARIANTS, Layout, columns_of, field_of
from dataplane.core.types import FieldSpec
from dataplane.data.batch import BatchedDataDict
from dataplane.data.columns import (
    Column,
    RowSource,
    StoredSubset,
    as_tensordict,
    assemble,
    checked,
    decode_batch,
    decode_columns,
    decode_on_device,
    use_on_current_stream,
    widened,
)
from dataplane.data.jagged import checked_pads, checked_width, not_per_token
from dataplane.data.meta import KVBatchMeta, list_of_names, require_meta
from dataplane.data.row_parts import Inner, RowParts, Tokens, jagged_lengths, row_parts
from dataplane.errors import InvalidRequestError, StorageUnitError
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)

D = TypeVar("D", TensorDict, BatchedDataDict[Any])


def get(
    session_state: SessionState,
    names: Names,
    partition: str,
    select_fields: Sequence[str],
    copy: bool,
    tokens: Tokens | None = None,
    inner: Inner | None = None,
    device: torch.device | str | None = None,
) -> Operation[TensorDict]:
    """Return the fields of the samples, or parts of them, as a TensorDict on `device`, by default the CPU; there, with
    `copy=False`, as views where rows are contiguous."""
    general = partial(_get, session_state, names, partition, select_fields, copy, tokens, inner, device)
    if copy and tokens is None and inner is None and device is None:
        plan = prepare(session_state, names, partition, select_fields)
        if plan is not None:
            return get_short(session_state, names, plan, None, general)
    return general()


@with_retry
def _get(
    session_state: SessionState,
    names: Names,
    partition: str,
    select_fields: Sequence[str],
    copy: bool,
    tokens: Tokens | None = None,
    inner: Inner | None = None,
    device: torch.device | str | None = None,
) -> Operation[TensorDict]:
    """Execute `get` the general way."""
    gpu = None if device is None else devices.gpu(device)
    select_fields = tuple(list_of_names("select_fields", select_fields))
    parts = row_parts(tokens, inner, len(ids_of(names)), select_fields)

    def build(sources: Mapping[str, RowSource], _: Sequence[c.FieldLocations]) -> TensorDict:
        """Copy the rows out of the storage units' memory."""
        if gpu is not None:
            columns = decode_on_device(sources, gpu, layout="jagged", **_decoding(session_state))
            return as_tensordict(sources, columns)
        return assemble(sources, empty=session_state.empty, **_decoding(session_state))

    samples: TensorDict
    if copy or gpu is not None:
        samples = yield from _read(
            session_state,
            names,
            partition,
            select_fields,
            parts,
            build,
            on_device=gpu is not None,
        )
    else:
        samples = yield from _read_views(session_state, names, partition, select_fields, parts)
    return _placed(samples, device, gpu)


@with_retry
def get_present(
    session_state: SessionState, names: Names, partition: str, select_fields: Sequence[str]
) -> Operation[tuple[list[int], TensorDict]]:
    """Return the positions of the samples that exist, and copies of the fields that all of these samples have. A
    field with rows in hidden columns (see `schema.columns_of`) is returned as a stack of rows."""
    ids = ids_of(names)

    def attempt(failed: StorageUnitError | None) -> Operation[tuple[list[int], TensorDict]]:
        """Read once. failed: the error of the attempt before, see `_retry_relocated`."""
        located = yield from _locate(session_state, names, ids, partition, select_fields, missing_ok=True)
        try:
            existing = np.flatnonzero(located.result.rows >= 0)  # row -1: the sample does not exist
            subsets = subsets_by_field(located.result.fields, existing)
            if len(existing) == len(ids) and len(subsets) == len(select_fields):
                remember(session_state, partition, select_fields, located.result)
            columns = [subset.located for each in subsets.values() for subset in each]
            units = _refuse_failed(units_of(columns), failed)
            yield from ensure_known(session_state, units)
            existing_ids = [ids[position] for position in existing.tolist()]

            def work() -> TensorDict:
                failpoint("get.mid_copy")
                return _copy_subsets(session_state, subsets, units, partition, existing_ids)

            built: TensorDict = yield Work(work)
            yield from _check_pins_lasted(session_state)
            return existing.tolist(), built
        finally:
            failpoint("get.before_release")
            yield EndRead(located.call_id)

    return (yield from _retry_relocated(attempt))  # type: ignore[no-any-return]


class LocatedSubset(NamedTuple):
    """The rows of a field that are stored in one of its columns; `positions` are their positions in the result."""

    located: c.FieldLocations
    positions: np.ndarray[Any, Any]


class Stored(NamedTuple):
    """Where the rows of a read are. names: the fields, in order. whole: the fields whose rows are all of the present
    kind. spread: spec and subsets of each other field (see `Partition.widen`)."""

    names: tuple[str, ...]
    whole: tuple[c.FieldLocations, ...]
    spread: Mapping[str, tuple[FieldSpec, list[LocatedSubset]]]

    @property
    def columns(self) -> tuple[c.FieldLocations, ...]:
        """The locations to read."""
        return (*self.whole, *(subset.located for _, subsets in self.spread.values() for subset in subsets))


def _stored(located: Sequence[c.FieldLocations], count: int) -> Stored:
    """Sort the located columns of `count` fields by field."""
    names = tuple(field.name for field in located[:count])
    if len(located) == count:
        return Stored(names, tuple(located), {})
    specs = {field.name: field.spec for field in located[:count]}
    spread_names = {field_of(column.name) for column in located[count:]}
    subsets = subsets_by_field(located, np.arange(len(located[0].lengths)))
    spread = {name: (specs[name], subsets[name]) for name in names if name in spread_names}
    return Stored(names, tuple(field for field in located[:count] if field.name not in spread), spread)


def subsets_by_field(
    located: Sequence[c.FieldLocations], existing: np.ndarray[Any, Any]
) -> dict[str, list[LocatedSubset]]:
    """Return the locations of the samples at positions `existing` by field, for the fields that all of them have.

    located: locations by column; a field has one column with its name, and may have hidden ones."""
    by_column = {each.name: each for each in located}
    subsets: dict[str, list[LocatedSubset]] = {}
    for name in dict.fromkeys(map(field_of, by_column)):
        field_subsets = []
        for column in columns_of(name):
            locations = by_column.get(column)
            if locations is None:
                continue
            # Length -1: the sample has no value in this column.
            positions = np.flatnonzero(locations.lengths[existing] >= 0)
            if len(positions) == len(locations.lengths):  # all samples of the request: no selection is needed
                field_subsets.append(LocatedSubset(locations, positions))
            elif len(positions):
                field_subsets.append(LocatedSubset(select_values(locations, existing[positions]), positions))
        # Only if each sample has a value in one of the columns.
        found = sum([len(subset.positions) for subset in field_subsets])
        if field_subsets and found == len(existing):
            subsets[name] = field_subsets
    return subsets


def _copy_subsets(
    session_state: SessionState,
    subsets: Mapping[str, Sequence[LocatedSubset]],
    units: set[int],
    partition: str,
    ids: Sequence[str],
) -> TensorDict:
    """Copy the fields into a TensorDict. subsets: of `subsets_by_field`. ids: the samples, for checksum errors."""
    located = [subset.located for each in subsets.values() for subset in each]
    sources = session_state.connections.gather(located, units)
    empty = session_state.empty
    copier = session_state.copier.copy
    pickles = session_state.config.pickles
    if sources and sources.keys() == subsets.keys():  # no field has rows in a hidden column
        sources = checked(sources, located, partition, ids)
        return assemble(sources, empty=empty, copier=copier, pickles=pickles)
    for subset in (subset for each in subsets.values() for subset in each):
        subset_ids = (
            [ids[position] for position in subset.positions.tolist()] if len(subset.positions) < len(ids) else ids
        )
        name = subset.located.name
        # Adds a comparison with the checksums, made when the rows are copied below.
        sources |= checked({name: sources[name]}, [subset.located], partition, subset_ids)
    # A field without rows in hidden columns is read whole; the columns of the others are decoded and interleaved.
    plain = {name: sources[name] for name in subsets if [subset.located.name for subset in subsets[name]] == [name]}
    mixed = {name: source for name, source in sources.items() if name not in plain}
    data = assemble(plain, empty=empty, copier=copier, pickles=pickles)
    columns = decode_columns(mixed, empty=empty, copier=copier, pickles=pickles)
    fields = {
        name: data.get(name) if name in plain else _stacked(each, columns, len(ids)) for name, each in subsets.items()
    }
    copied: TensorDict = TensorDict._new_unsafe(fields, batch_size=torch.Size([len(ids)]))
    return copied


def _stacked(subsets: Sequence[LocatedSubset], columns: Mapping[str, Column], count: int) -> NonTensorStack:
    """Stack the `count` rows of a field that is spread over several columns. Variants are stored as 1-tuples and are
    unwrapped."""
    rows: list[Any] = [None] * count
    for subset in subsets:
        name = subset.located.name
        column = columns[name]
        values = list(column.unbind()) if isinstance(column, Tensor) else list(column)
        for position, value in zip(subset.positions.tolist(), values, strict=True):
            rows[position] = value[0] if name.endswith(VARIANTS) else value
    return NonTensorStack(*rows)


def get_batch(
    session_state: SessionState,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    layout: Layout,
    pad_value_dict: Mapping[str, Any] | None,
    pad_to_seqlen: int,
    tokens: Tokens | None = None,
    inner: Inner | None = None,
    device: torch.device | str | None = None,
) -> Operation[BatchedDataDict[Any]]:
    """Gather the fields of the samples, or parts of them, directly into padded tensors, on `device`, by default the
    CPU."""
    width = checked_width(pad_to_seqlen)
    general = partial(
        _get_batch, session_state, meta, select_fields, layout, pad_value_dict, width, tokens, inner, device
    )
    if layout == "padded" and tokens is None and inner is None and device is None:
        plan = prepare(session_state, meta, meta.partition_id, select_fields)
        if plan is not None:
            padding = Padding(checked_pads(pad_value_dict), width, meta.sequence_lengths)
            return get_short(session_state, meta, plan, padding, general)
    return general()


@with_retry
def _get_batch(
    session_state: SessionState,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    layout: Layout,
    pad_value_dict: Mapping[str, Any] | None,
    width: int,
    tokens: Tokens | None,
    inner: Inner | None,
    device: torch.device | str | None,
) -> Operation[BatchedDataDict[Any]]:
    """Execute `get_batch` the general way."""
    gpu = None if device is None else devices.gpu(device)
    parts = row_parts(tokens, inner, meta.size, select_fields)

    def build(sources: Mapping[str, RowSource], located: Sequence[c.FieldLocations]) -> BatchedDataDict[Any]:
        """Copy the rows into a batch, which records which of its columns do not have one element per token."""
        others = not_per_token(jagged_lengths(located), meta.sequence_lengths)
        if gpu is None:
            decode: Any = partial(decode_batch, empty=session_state.empty)
        else:
            decode = partial(decode_on_device, device=gpu)
        columns = decode(
            sources,
            layout=layout,
            pad_value_dict=pad_value_dict,
            pad_to_seqlen=width if parts is None else max(width, parts.width),
            others=others,
            **_decoding(session_state),
        )
        batch: BatchedDataDict[Any] = BatchedDataDict(columns)
        batch.not_per_token = others
        return batch

    batch: BatchedDataDict[Any] = yield from _read(
        session_state, meta, meta.partition_id, select_fields, parts, build, on_device=gpu is not None
    )
    return _placed(batch, device, gpu)


def _placed(result: D, device: torch.device | str | None, gpu: torch.device | None) -> D:
    """Return the result of a read on `device` (None: the CPU). It is already there if `gpu` is not None. Call this in
    the thread that will use the result."""
    if gpu is not None:
        use_on_current_stream(result.values())
        return result
    return result if device is None else result.to(device)


def _decoding(session_state: SessionState) -> dict[str, Any]:
    """Return the arguments that all functions which decode rows take from the session."""
    return {"copier": session_state.copier.copy, "pickles": session_state.config.pickles}


def chosen_fields(meta: KVBatchMeta, select_fields: Sequence[str] | None) -> Sequence[str]:
    """Return `select_fields`, or the fields of the meta if it is None. Raise ValueError if there are none,
    `UnsupportedValueError` if `meta` is not a KVBatchMeta, or `select_fields` no list of strings."""
    fields: Sequence[str] | None = require_meta(meta).fields
    if select_fields is not None:
        fields = tuple(list_of_names("select_fields", select_fields))
    if not fields:
        raise InvalidRequestError("no fields to read: select_fields and meta.fields are both empty; pass select_fields")
    return fields


class SampleHosts(NamedTuple):
    """Where samples are. meta: with the row handles of its samples. hosts: `[N]` for each sample the host (the boot id
    of its machine) with the most bytes of its fields; None without any bytes."""

    meta: KVBatchMeta
    hosts: list[str | None]


def locate(session_state: SessionState, meta: KVBatchMeta, select_fields: Sequence[str]) -> Operation[SampleHosts]:
    """Return the row handles and the hosts of the samples. Later puts and moves can change the hosts."""
    located = yield from _locate(session_state, meta, ids_of(meta), meta.partition_id, select_fields)
    yield EndRead(located.call_id)
    result: c.Located = located.result
    yield from ensure_known(session_state, units_of(_stored(result.fields, len(select_fields)).columns))
    nbytes: dict[str, np.ndarray[Any, Any]] = {}  # by host, `[N]` bytes of each sample
    for field in result.fields:
        sizes = field.lengths.clip(0) * field.spec.unit_bytes  # negative: the value is in another column
        for unit in set(field.units[sizes > 0].tolist()):
            host = session_state.connections.host_of(unit)
            if host is not None:
                nbytes[host] = nbytes.get(host, 0) + np.where(field.units == unit, sizes, 0)
    hosts: list[str | None] = [None] * meta.size
    if nbytes:
        table = np.stack(list(nbytes.values()))  # [hosts, N]
        names = list(nbytes)
        for row, best in enumerate(table.argmax(axis=0).tolist()):
            if table[best, row]:
                hosts[row] = names[best]
    return SampleHosts(meta.with_handles(result.rows, result.generations), hosts)


def _locate(
    session_state: SessionState,
    names: Names,
    ids: list[str],
    partition: str,
    select_fields: Sequence[str],
    *,
    missing_ok: bool = False,
    brief: bool = True,
) -> Operation[Any]:
    """Look up the fields of the samples, and pin them. Return `Sent` with `Located`. missing_ok, brief: see `Locate`.
    Raise `InvalidRequestError` for no fields."""
    if not select_fields:
        raise InvalidRequestError(f"select_fields={select_fields!r}: expected a list of at least one field name")
    samples = samples_of(names, partition, ids)
    fields = tuple(select_fields)
    locate = c.Locate(partition=partition, samples=samples, fields=fields, missing_ok=missing_ok, brief=brief)
    return (yield from send_for_samples(ids, locate))


def _read(
    session_state: SessionState,
    names: Names,
    partition: str,
    select_fields: Sequence[str],
    parts: RowParts | None,
    build: Callable[[Mapping[str, RowSource], Sequence[c.FieldLocations]], Any],
    *,
    on_device: bool = False,
) -> Operation[Any]:
    """Locate and pin, copy, end the read; return what `build` makes of the located rows, or of
    these parts. on_device: it copies to a GPU."""
    ids = ids_of(names)

    def work(stored: Stored, units: set[int]) -> Any:
        failpoint("get.mid_copy")
        sources = _sources(session_state, names, partition, ids, stored, units, parts, on_device=on_device)
        return build(sources, stored.whole)

    def attempt(failed: StorageUnitError | None) -> Operation[Any]:
        """Read once. failed: the error of the attempt before, see `_retry_relocated`."""
        located = yield from _locate(session_state, names, ids, partition, select_fields)
        try:
            stored = _stored(located.result.fields, len(select_fields))
            _log_widened(session_state, partition, located.result.widened)
            if parts is None:
                remember(session_state, partition, select_fields, located.result)
            units = _refuse_failed(units_of(stored.columns), failed)
            yield from ensure_known(session_state, units)
            built = yield Work(partial(work, stored, units))
            yield from _check_pins_lasted(session_state)
            return built
        finally:
            failpoint("get.before_release")
            yield EndRead(located.call_id)

    return (yield from _retry_relocated(attempt))


def _sources(
    session_state: SessionState,
    names: Names,
    partition: str,
    ids: Sequence[str],
    stored: Stored,
    units: set[int],
    parts: RowParts | None,
    guard: object | None = None,
    on_device: bool = False,
) -> dict[str, RowSource]:
    """Return where the rows, or these parts of them, are in this process's memory. Whole rows are compared with
    their checksums, if they have any, when they are read. guard, on_device: see `UnitConnections.gather`."""
    gather = partial(session_state.connections.gather, guard=guard, on_device=on_device)
    if stored.spread:
        whole = Stored(tuple(field.name for field in stored.whole), stored.whole, {})
        sources = _sources(session_state, names, partition, ids, whole, units, parts, guard, on_device)
        for name, (spec, subsets) in stored.spread.items():
            if parts is not None and name in parts.slices:
                raise InvalidRequestError(f"inner: field {name!r} is {spec} now, and its rows cannot be sliced")
            sources[name] = _spread_source(partial(gather, units=units), partition, ids, spec, subsets)
        return {name: sources[name] for name in stored.names}
    if parts is None:
        return checked(gather(stored.whole, units), stored.whole, partition, ids)
    chosen = parts.of(stored.whole, names.sequence_lengths if isinstance(names, KVBatchMeta) else None)
    sources = gather(
        [part.entries for part in chosen],
        units,
        parts={part.entries.name: part.inner for part in chosen if part.inner is not None},
    )
    return {part.entries.name: replace(sources[part.entries.name], pieces=part.pieces) for part in chosen}


def _spread_source(
    gather: Callable[..., dict[str, RowSource]],
    partition: str,
    ids: Sequence[str],
    spec: FieldSpec,
    subsets: Sequence[LocatedSubset],
) -> RowSource:
    """Return the rows of a field with rows of an earlier kind. gather: of these columns."""
    located = [subset.located for subset in subsets]
    sources = gather(located)
    stored_subsets = []
    for subset in subsets:
        name = subset.located.name
        subset_ids = [ids[position] for position in subset.positions.tolist()]
        source = checked({name: sources[name]}, [subset.located], partition, subset_ids)[name]
        stored_subsets.append(StoredSubset(subset.positions, source))
    return widened(spec, stored_subsets, len(ids))


def _log_widened(session_state: SessionState, partition: str, fields: Sequence[str]) -> None:
    """Log once for each field that its kind is another one than that of its first put."""
    for name in session_state.warned.filter_new("get", partition, fields) if fields else ():
        log.warning(
            "get: the kind of field %r of partition %r has widened since its first put, because later rows did not fit "
            "it; reads return the wider kind. To have that from the first put on, declare it in register_partition.",
            name,
            partition,
        )


def _retry_relocated(attempt: Callable[[StorageUnitError | None], Operation[Any]]) -> Operation[Any]:
    """Run `attempt(None)`. If a unit fails, run the attempt once more with the error: the rows may have moved to other
    units, for example because the failed unit was drained."""
    try:
        return (yield from attempt(None))
    except StorageUnitError as error:
        failed = error  # Python deletes `error` at the end of this block
        log.debug("Read failed; locating the rows again: %s", failed, exc_info=True)
        _drop_frames(failed)
    return (yield from attempt(failed))


def _drop_frames(error: BaseException | None) -> None:
    """Drop the traceback frames of the error and of its causes, and the pins that they hold. The error and its frames
    refer to each other, so they would otherwise live until the next garbage collection."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _refuse_failed(units: set[int], failed: StorageUnitError | None) -> set[int]:
    """Return the units; raise the error `failed` again if its unit is among them."""
    if failed is not None and failed.facts["unit"] in units:
        raise failed
    return units


def _read_views(
    session_state: SessionState,
    names: Names,
    partition: str,
    select_fields: Sequence[str],
    parts: RowParts | None,
) -> Operation[TensorDict]:
    """Read like `_read`, but hold the pin until the last view is deleted."""
    ids = ids_of(names)

    def attempt(failed: StorageUnitError | None) -> Operation[Any]:
        """Read once. failed: the error of the attempt before, see `_retry_relocated`."""
        located = yield from _locate(session_state, names, ids, partition, select_fields, brief=False)
        # A list, so that `pins.clear()` drops the last reference of this frame and of `work`: only views keep the pin.
        pins = [session_state.pin(located.call_id)]
        try:
            stored = _stored(located.result.fields, len(select_fields))
            _log_widened(session_state, partition, located.result.widened)
            units = _refuse_failed(units_of(stored.columns), failed)
            yield from ensure_known(session_state, units)

            def work() -> TensorDict:
                """Return views of mapped arenas; `pins[0]` lives as long as any of them."""
                failpoint("get.mid_copy")
                sources = _sources(session_state, names, partition, ids, stored, units, parts, guard=pins[0])
                return assemble(sources, copy=False, empty=session_state.empty, **_decoding(session_state))

            views: TensorDict = yield Work(work)
            yield from _check_pins_lasted(session_state)
            return views
        finally:
            pins.clear()
            # If there is no view, the pin has ended: its release is among the commands to send.
            for command in session_state.leftovers():
                yield Post(command)

    views: TensorDict = yield from _retry_relocated(attempt)
    return views


def _check_pins_lasted(session_state: SessionState) -> Operation[None]:
    """Raise `SessionExpiredError` unless all pins on the copied bytes lasted until now; the copy must then be
    discarded.

    A unit that sends bytes rejects sessions whose pins may have ended, and pins on mapped arenas last as long as
    the lock of this process. If the lock is lost (its descriptor was closed or its file removed), send a command to
    the service: it ends a session before it drops any of its pins.
    """
    failpoint("get.copied")
    if not session_state.lock_stands:
        yield Send(c.Units())  # any command: it fails if the session has ended
