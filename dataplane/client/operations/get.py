"""Reading, as operations of the client: what samples hold, copied into tensors of the caller's or as views of it.

Bytes are handed out only if they are what was written (where that has checksums), and only if the pins on them were
there until they were copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from dataplane.client.operations.retry import ensure_known, with_retry
from dataplane.client.operations.sample_names import Names, ids_of, naming, samples_of
from dataplane.client.operations.steps import Operation, Post, Send, Work
from dataplane.client.session_state import SessionState
from dataplane.client.unit_connections import chosen, units_of
from dataplane.core import failpoints
from dataplane.core.schema import VARIANTS, Layout, field_of, variants_of
from dataplane.core.types import FieldKind
from dataplane.data.batch import BatchedDataDict
from dataplane.data.columns import Column, RowSource, assemble, checked, decode_batch, decode_columns
from dataplane.data.jagged import not_per_token
from dataplane.data.meta import CellPlaces, KVBatchMeta
from dataplane.errors import InvalidRequestError, StorageUnitError, UnsupportedValueError
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)


@with_retry
def get(
    session_state: SessionState, names: Names, partition: str, select_fields: Sequence[str], copy: bool
) -> Operation[TensorDict]:
    """The fields of the samples as a TensorDict; with `copy=False`, views where rows lie together."""
    if copy:

        def build(sources: Mapping[str, RowSource]) -> TensorDict:
            return assemble(
                sources,
                empty=session_state.empty,
                copier=session_state.copier.copy,
                pickles=session_state.config.pickles,
            )

        return (yield from _read(session_state, names, partition, select_fields, build))
    return (yield from _read_views(session_state, names, partition, select_fields))


@with_retry
def get_present(
    session_state: SessionState, names: Names, partition: str, select_fields: Sequence[str]
) -> Operation[tuple[list[int], TensorDict]]:
    """The places of those of the samples that live, and of the fields those that all of these have, copied. A field
    some of whose rows are in its hidden column comes back as a stack of the rows."""
    ids = ids_of(names)

    def attempt(failed: StorageUnitError | None) -> Operation[tuple[list[int], TensorDict]]:
        located = yield from _locate(session_state, names, ids, partition, select_fields, missing_ok=True)
        try:
            there = np.flatnonzero(located.result.rows >= 0)
            parts = parts_of(located.result.fields, there)
            units = _without(units_of([part.located for each in parts.values() for part in each]), failed)
            yield from ensure_known(session_state, units)
            living = [ids[place] for place in there.tolist()]

            def work() -> TensorDict:
                failpoints.hit("get.mid_copy")
                return _joined(session_state, parts, units, partition, living)

            built: TensorDict = yield Work(work)
            yield from _pinned_until_now(session_state)
            return there.tolist(), built
        finally:
            failpoints.hit("get.before_release")
            yield Post(c.Release(located=located.number))

    return (yield from _elsewhere(attempt))  # type: ignore[no-any-return]


class ReadPart(NamedTuple):
    """Rows of a field that are in one of its columns: `places` says which rows of the result they are."""

    located: c.FieldLocations
    places: np.ndarray[Any, Any]


def parts_of(located: Sequence[c.FieldLocations], there: np.ndarray[Any, Any]) -> dict[str, list[ReadPart]]:
    """By field, where the rows of those samples are, for the fields that all of them have."""
    columns = {found.name: found for found in located}
    parts: dict[str, list[ReadPart]] = {}
    for name in dict.fromkeys(map(field_of, columns)):
        mine = []
        for column in (name, variants_of(name)):
            found = columns.get(column)
            if found is None:
                continue
            places = np.flatnonzero(found.lengths[there] >= 0)
            if len(places) == len(found.lengths):
                mine.append(ReadPart(found, places))
            elif len(places):
                mine.append(ReadPart(chosen(found, there[places]), places))
        if mine and sum(len(part.places) for part in mine) == len(there):
            parts[name] = mine
    return parts


def _joined(
    session_state: SessionState,
    parts: Mapping[str, Sequence[ReadPart]],
    units: set[int],
    partition: str,
    ids: Sequence[str],
) -> TensorDict:
    """The fields, copied."""
    located = [part.located for each in parts.values() for part in each]
    sources = session_state.connections.gather(located, units)
    for part in (part for each in parts.values() for part in each):
        mine = [ids[place] for place in part.places.tolist()] if len(part.places) < len(ids) else ids
        name = part.located.name
        sources |= checked({name: sources[name]}, [part.located], partition, mine)
    plain = {name: sources[name] for name in parts if [part.located.name for part in parts[name]] == [name]}
    several = {name: source for name, source in sources.items() if name not in plain}
    empty, copier, pickles = session_state.empty, session_state.copier.copy, session_state.config.pickles
    data = assemble(plain, empty=empty, copier=copier, pickles=pickles)
    columns = decode_columns(several, empty=empty, copier=copier, pickles=pickles)
    fields = {
        name: data.get(name) if name in plain else _stacked(each, columns, len(ids)) for name, each in parts.items()
    }
    made: TensorDict = TensorDict._new_unsafe(fields, batch_size=torch.Size([len(ids)]))
    return made


def _stacked(parts: Sequence[ReadPart], columns: Mapping[str, Column], count: int) -> NonTensorStack:
    """The rows of a field that are in several columns. Each row of a hidden column is the one item of a tuple."""
    rows: list[Any] = [None] * count
    for part in parts:
        name = part.located.name
        column = columns[name]
        values = list(column.unbind()) if isinstance(column, Tensor) else list(column)
        for place, value in zip(part.places.tolist(), values, strict=True):
            rows[place] = value[0] if name.endswith(VARIANTS) else value
    return NonTensorStack(*rows)


@with_retry
def get_batch(
    session_state: SessionState,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    layout: Layout,
    pad_value_dict: Mapping[str, Any] | None,
    pad_to_seqlen: int,
) -> Operation[BatchedDataDict[Any]]:
    """The fields of the samples, gathered straight into padded tensors."""

    def build(sources: Mapping[str, RowSource]) -> BatchedDataDict[Any]:
        jagged = {name: each.lengths for name, each in sources.items() if each.spec.kind is FieldKind.JAGGED}
        others = not_per_token(jagged, meta.sequence_lengths)
        columns = decode_batch(
            sources,
            layout=layout,
            pad_value_dict=pad_value_dict,
            pad_to_seqlen=pad_to_seqlen,
            others=others,
            empty=session_state.empty,
            copier=session_state.copier.copy,
            pickles=session_state.config.pickles,
        )
        batch: BatchedDataDict[Any] = BatchedDataDict(columns)
        batch.not_per_token = others
        return batch

    batch: BatchedDataDict[Any] = yield from _read(session_state, meta, meta.partition_id, select_fields, build)
    return batch


def chosen_fields(meta: KVBatchMeta, select_fields: Sequence[str] | None) -> Sequence[str]:
    """`select_fields`, else the meta's own. ValueError if neither names any, `UnsupportedValueError` for what is no
    meta."""
    if not isinstance(meta, KVBatchMeta):
        raise UnsupportedValueError(field="meta", row=None, got=type(meta).__name__, hint="Pass a KVBatchMeta.")
    chosen = meta.fields if select_fields is None else select_fields
    if not chosen:
        raise InvalidRequestError("name the fields to read: select_fields is empty and so is meta.fields")
    return chosen


def locate(session_state: SessionState, meta: KVBatchMeta, select_fields: Sequence[str]) -> Operation[KVBatchMeta]:
    """The meta, carrying where its samples' fields are now."""
    ids = ids_of(meta)
    located = yield from _locate(
        session_state, meta, ids, meta.partition_id, select_fields, serials=True, unpinned=True
    )
    found: c.Located = located.result
    yield from ensure_known(session_state, units_of(found.fields))
    epochs = session_state.connections.epochs(units_of(found.fields))
    places = {
        field.name: CellPlaces(
            spec=field.spec,
            epochs=epochs,
            units=field.units,
            offsets=field.offsets,
            lengths=field.lengths,
            serials=np.zeros(0, np.int64) if field.serials is None else field.serials,
            checksums=field.checksums,
        )
        for field in found.fields
    }
    return meta.with_handles(found.rows, found.generations).with_places({**meta.places, **places})


def _locate(
    session_state: SessionState,
    names: Names,
    ids: list[str],
    partition: str,
    select_fields: Sequence[str],
    meanwhile: Callable[[], Any] | None = None,
    **more: bool,
) -> Operation[Any]:
    if isinstance(select_fields, str) or not select_fields:
        raise InvalidRequestError(f"select_fields={select_fields!r}: name at least one field, in a list")
    locate = c.Locate(partition=partition, samples=samples_of(names, ids), fields=tuple(select_fields), **more)
    return (yield from naming(ids, locate, meanwhile))


def _remembered(
    session_state: SessionState, names: Names, select_fields: Sequence[str]
) -> tuple[c.FieldLocations, ...] | None:
    """Where the meta says the fields are, if they may be copied from there before that is confirmed: from units that
    this client is connected to, in the lives that the meta knows. Objects may not: what reads them does not expect
    bytes that change."""
    if not isinstance(names, KVBatchMeta) or isinstance(select_fields, str) or not names.size:
        return None
    known = names.places
    if not select_fields or not all(name in known for name in select_fields):
        return None
    places = {name: known[name] for name in select_fields}
    if any(
        cells.spec.kind is FieldKind.OBJECT or not session_state.connections.lives(cells.epochs)
        for cells in places.values()
    ):
        return None
    return tuple(
        c.FieldLocations(
            name=name,
            spec=cells.spec,
            units=cells.units,
            offsets=cells.offsets,
            lengths=cells.lengths,
            checksums=cells.checksums,
            serials=cells.serials,
        )
        for name, cells in places.items()
    )


def _still(remembered: Sequence[c.FieldLocations], found: Sequence[c.FieldLocations]) -> bool:
    """Whether what was remembered is so now, and therefore was all the time, with checksums where they are wanted."""
    return all(map(_same, remembered, found))


def _same(before: c.FieldLocations, now: c.FieldLocations) -> bool:
    pairs: list[tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None]] = [
        (before.serials, now.serials),
        (before.offsets, now.offsets),
        (before.units, now.units),
        (before.lengths, now.lengths),
    ]
    if now.checksums is not None:
        pairs.append((before.checksums, now.checksums))
    alike = all(one is not None and other is not None and np.array_equal(one, other) for one, other in pairs)
    return alike and before.spec == now.spec


def _read(
    session_state: SessionState,
    names: Names,
    partition: str,
    select_fields: Sequence[str],
    build: Callable[[Mapping[str, RowSource]], Any],
) -> Operation[Any]:
    """Look up and pin, copy, release. Where the meta carries places, the copy from there is made while the look-up is
    under way, and counts only if that finds the same: then each cell was there from before the copy until it was
    pinned. Else what was copied is thrown away, and what was found is copied."""
    ids = ids_of(names)

    def work(fields: tuple[c.FieldLocations, ...], units: set[int]) -> Any:
        failpoints.hit("get.mid_copy")
        return build(checked(session_state.connections.gather(fields, units), fields, partition, ids))

    def attempt(failed: StorageUnitError | None) -> Operation[Any]:
        remembered = _remembered(session_state, names, select_fields) if failed is None else None
        if remembered is None:
            located = yield from _locate(session_state, names, ids, partition, select_fields)
        else:
            guess = partial(_guess, session_state, work, remembered)
            located = yield from _locate(session_state, names, ids, partition, select_fields, guess, serials=True)
        try:
            fields: tuple[c.FieldLocations, ...] = located.result.fields
            if remembered is not None and located.meanwhile is not None and _still(remembered, fields):
                built = located.meanwhile
            else:
                units = _without(units_of(fields), failed)
                yield from ensure_known(session_state, units)
                built = yield Work(partial(work, fields, units))
            yield from _pinned_until_now(session_state)
            return built
        finally:
            failpoints.hit("get.before_release")
            yield Post(c.Release(located=located.number))

    return (yield from _elsewhere(attempt))


def _elsewhere(attempt: Callable[[StorageUnitError | None], Operation[Any]]) -> Operation[Any]:
    """What the attempt reads. Rows may have been moved away from a unit that fails under it, which may have gone for
    that reason: it is made once more, and told."""
    try:
        return (yield from attempt(None))
    except StorageUnitError as error:
        failed = error
        log.debug("what was being read is looked up once more: %s", failed, exc_info=True)
        _drop_frames(failed)
    return (yield from attempt(failed))


def _drop_frames(error: BaseException | None) -> None:
    """The frames in which it came up go, and with them the pins that they hold: an error and a frame that refer to each
    other stay until Python collects garbage."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _without(units: set[int], failed: StorageUnitError | None) -> set[int]:
    """The units, none of which is the one that failed: else that is raised again."""
    if failed is not None and failed.facts["unit"] in units:
        raise failed
    return units


def _guess(session_state: SessionState, work: Callable[..., Any], remembered: tuple[c.FieldLocations, ...]) -> Any:
    """What is where the samples were; None if that cannot be read."""
    try:
        return work(remembered, units_of(remembered)) if session_state.connections.backed(remembered) else None
    except Exception as error:
        log.debug("what a meta remembers cannot be read there: %s", error)
        return None


def _read_views(
    session_state: SessionState, names: Names, partition: str, select_fields: Sequence[str]
) -> Operation[TensorDict]:
    """Like `_read`; the pin goes when the last view does."""
    ids = ids_of(names)

    def attempt(failed: StorageUnitError | None) -> Operation[Any]:
        located = yield from _locate(session_state, names, ids, partition, select_fields)
        pins = [session_state.pin(located.number)]
        try:
            fields: tuple[c.FieldLocations, ...] = located.result.fields
            units = _without(units_of(fields), failed)
            yield from ensure_known(session_state, units)

            def work() -> TensorDict:
                failpoints.hit("get.mid_copy")
                sources = checked(
                    session_state.connections.gather(fields, units, guard=pins[0]), fields, partition, ids
                )
                return assemble(
                    sources,
                    copy=False,
                    empty=session_state.empty,
                    copier=session_state.copier.copy,
                    pickles=session_state.config.pickles,
                )

            views: TensorDict = yield Work(work)
            yield from _pinned_until_now(session_state)
            return views
        finally:
            pins.clear()
            for command in session_state.leftovers():
                yield Post(command)

    views: TensorDict = yield from _elsewhere(attempt)
    return views


def _pinned_until_now(session_state: SessionState) -> Operation[None]:
    """Raises `SessionExpiredError` unless the pins on what was read have been there all the time: what was read is then
    to be discarded.

    A unit that sends bytes refuses whose pins may be gone, and pins on what this process has mapped stay while its lock
    does. Without the lock (something closed its descriptor, or removed the file) the service is asked: the session's
    end comes before that of any pin.
    """
    failpoints.hit("get.copied")
    if not session_state.lock_stands:
        yield Send(c.Units())
