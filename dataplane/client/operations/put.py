"""The put operation: encode, allocate, copy and commit, as a generator of steps (see `steps`).

Operations take the `SessionState` of the client's session. The docstrings of `DataPlaneClient` are their contracts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from tensordict import TensorDict

from dataplane.client.operations.field_names import fetch_schema, schema_for_put
from dataplane.client.operations.retry import ensure_known, with_retry
from dataplane.client.operations.sample_names import Names, ids_of, samples_of, send_for_samples, tag_columns, tags_of
from dataplane.client.operations.short_put import (
    ShortPut,
    meta_of_short,
    prepare,
    remember,
    store_short,
    take_preallocated,
)
from dataplane.client.operations.steps import EndRead, Operation, Post, Send, Wait, Work
from dataplane.client.preallocated import PreallocatedPortion, bytes_of
from dataplane.client.session_state import Schema, SessionState, Turn
from dataplane.client.unit_connections import select_values, units_of
from dataplane.core.devices import CPU, current_stream, record_event
from dataplane.core.failpoints import failpoint
from dataplane.core.schema import EVICTED_SAMPLES, INPUT_LENGTHS
from dataplane.core.types import FieldKind, Scalar
from dataplane.data.columns import EncodedColumn, appended, checked, encode_fields, require_fields
from dataplane.data.meta import KVBatchMeta, name_of
from dataplane.errors import (
    CapacityTimeoutError,
    InvalidRequestError,
    RowsChangedError,
    SchemaError,
    ServiceRestartedError,
    StaleSchemaError,
    StorageUnitError,
)
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)

APPEND = "append"
"""A mode of puts only: its commit updates the rows that were read before, or creates missing rows."""

PUT_TRIES = 8
"""Maximum number of attempts of a put when another client changes the schema or the rows that an append extends."""


def put(
    session_state: SessionState,
    names: Names,
    partition: str,
    fields: TensorDict | Mapping[str, Any] | None,
    tags: Sequence[Mapping[str, Any]] | None,
    mode: str,
) -> Operation[KVBatchMeta]:
    """Encode, allocate, copy, commit. The rows become visible atomically; a failed put leaves nothing behind."""
    short = prepare(session_state, names, partition, fields, tags, mode)
    if short is None:
        return _put(session_state, names, partition, fields, tags, mode)
    return _put_short(session_state, short, partial(_put, session_state, names, partition, fields, tags, mode))


def _put_short(
    session_state: SessionState, short: ShortPut, general: Callable[[], Operation[KVBatchMeta]]
) -> Operation[KVBatchMeta]:
    """Store the put the short way, or if that is not possible the general one."""
    committed = yield from store_short(session_state, short)
    return (yield from general()) if committed is None else meta_of_short(short, committed)


def _put(
    session_state: SessionState,
    names: Names,
    partition: str,
    fields: TensorDict | Mapping[str, Any] | None,
    tags: Sequence[Mapping[str, Any]] | None,
    mode: str,
) -> Operation[KVBatchMeta]:
    """Execute `put` the general way."""
    name_of("partition_id", partition)
    ids = ids_of(names)
    tag_values = tag_columns(tags, len(ids))
    stored = put_rows(session_state, names, ids, partition, fields, tag_values, mode)
    if mode == APPEND:
        stored = _in_turn(session_state, Turn((partition, each) for each in ids), stored)
    encoded, committed = yield from stored
    meta_tags = None if tags is None else tags_of(tag_values, len(ids))
    names_put = [] if fields is None else list(fields.keys())  # `encoded` omits empty lists
    return _put_meta(ids, partition, names_put, meta_tags, encoded, committed)


Stored = tuple[Sequence[EncodedColumn], c.Committed]
"""The stored columns of a put, and the response to its commit."""


def _in_turn(session_state: SessionState, turn: Turn, append: Operation[Stored]) -> Operation[Stored]:
    """Execute an append after the session's earlier appends to any of its samples."""
    try:
        if not session_state.appends.enter(turn):
            yield Wait(turn.ready)
        return (yield from append)
    finally:
        session_state.appends.leave(turn)


@with_retry
def put_rows(
    session_state: SessionState,
    names: Names,
    ids: list[str],
    partition: str,
    fields: TensorDict | Mapping[str, Any] | None,
    tags: tuple[c.TagColumn, ...],
    mode: str,
    declare: Callable[[], Send] | None = None,
    *,
    listed: bool = False,
) -> Operation[Stored]:
    """Execute `put` for callers that need no meta; return the stored columns and the response to the commit.

    ids: the result of `ids_of(names)`. declare: for a caller that declares its fields itself, so
    that rows are stored alike in any form, returns the step that does so; it is sent again if the
    schema has lost them. Without it, undeclared field names are logged. listed: as in `Commit`.
    """
    commit = c.Commit(
        partition=partition,
        samples=samples_of(names, partition, ids),
        mode=_mode(mode),
        tags=tags,
        listed=listed,
    )
    if fields is not None:
        require_fields(fields)
    if fields is None or not len(fields.keys()):  # a put of tags, or only of the samples
        return (), (yield from send_for_samples(ids, commit)).result
    if mode == APPEND:
        return (yield from _append(session_state, commit, ids, fields))
    token_lengths = names.sequence_lengths if isinstance(names, KVBatchMeta) else None
    wide: set[str] = set()  # fields to encode as ragged rows, which each field accepts whose kind nobody declared
    for turn in range(PUT_TRIES):
        encoded, schema = yield from _encode(
            session_state, partition, fields, len(ids), token_lengths, warn=declare is None, wide=wide
        )
        try:
            committed = yield from store(session_state, commit, ids, encoded)
            if encoded:
                remember(session_state, partition, fields, encoded, any_form=declare is not None)
            return encoded, committed
        except (SchemaError, StaleSchemaError) as error:
            # Stale: the schema has no kind for the field any longer, so it has lost the declaration.
            if declare is not None and isinstance(error, StaleSchemaError):
                yield declare()
            if turn + 1 == PUT_TRIES:
                raise
            is_new = yield from _refresh_schema(session_state, partition, schema, error)
            name = error.facts["field"]
            is_open = name not in schema or name in schema.open
            if is_open and name not in wide and isinstance(error, SchemaError):
                # Others put and clear rows of the field: the schema may be another one again at the next commit.
                if turn or not is_new:
                    wide.add(name)
            elif not is_new:
                raise
    raise AssertionError("the last turn returns or raises")


def _append(
    session_state: SessionState, commit: c.Commit, ids: list[str], fields: TensorDict | Mapping[str, Any]
) -> Operation[Stored]:
    """Read the jagged rows, append the new values and put the result, provided that no other client wrote the rows
    in the meantime: while the rows that were read are pinned, until the commit, no other rows take their place."""
    partition = commit.partition
    samples = commit.samples
    # Without token lengths: a meta has those of whole rows, not of the appended pieces.
    encoded, schema = yield from _encode(session_state, partition, fields, len(ids), token_lengths=None, widens=False)
    for turn in range(PUT_TRIES):
        for column in encoded:
            if column.name in schema.widened and column.spec.kind is FieldKind.RAGGED:
                raise InvalidRequestError(
                    f"append: the rows of field {column.name!r} have different shapes, so that no values can be "
                    'appended to them; declare FieldSpec("jagged") for it in register_partition'
                )
        jagged = tuple(column.name for column in encoded if column.spec.kind is FieldKind.JAGGED)
        locate = c.Locate(partition=partition, samples=samples, fields=jagged, missing_ok=True, brief=True)
        located = yield from send_for_samples(ids, locate)
        try:
            extended = yield from _extend_stored(session_state, encoded, located.result, partition, ids)
            mode = c.Mode.UPDATE if bool((located.result.rows >= 0).all()) else c.Mode.UPSERT  # row -1: not there yet
            # The commit fails with `RowsChangedError` if the rows are no longer at these locations.
            read_from = tuple(replace(each, checksums=None) for each in located.result.fields)
            conditional = replace(commit, mode=mode, located=located.call_id, expected=read_from)
            return extended, (yield from store(session_state, conditional, ids, extended))
        except RowsChangedError:  # another client wrote the rows: read them again
            if turn + 1 == PUT_TRIES:
                raise
        except (SchemaError, StaleSchemaError) as error:
            if turn + 1 == PUT_TRIES or not (yield from _refresh_schema(session_state, partition, schema, error)):
                raise
            encoded, schema = yield from _encode(
                session_state, partition, fields, len(ids), token_lengths=None, widens=False
            )
        finally:
            yield EndRead(located.call_id)
    raise AssertionError("the last turn returns or raises")


def _extend_stored(
    session_state: SessionState,
    encoded: Sequence[EncodedColumn],
    located: c.Located,
    partition: str,
    ids: Sequence[str],
) -> Operation[list[EncodedColumn]]:
    """Read the stored values and return the columns to put, in which the new values of jagged columns follow the
    stored values of their rows. Other columns are returned unchanged."""
    # Field name -> positions of the samples that have a stored value (length -1: none).
    positions = {field.name: np.flatnonzero(field.lengths >= 0) for field in located.fields}
    stored = [select_values(field, positions[field.name]) for field in located.fields if len(positions[field.name])]
    if not stored:
        return list(encoded)
    units = units_of(stored)
    lengths = {field.name: field.lengths for field in stored}
    yield from ensure_known(session_state, units)

    def work() -> list[EncodedColumn]:
        """Read the stored values, with a check of their checksums, and join them with the new ones."""
        sources = session_state.connections.gather(stored, units)
        for field in stored:
            stored_ids = [ids[position] for position in positions[field.name].tolist()]
            sources |= checked({field.name: sources[field.name]}, [field], partition, stored_ids)
        return [
            appended(column, sources[column.name], lengths[column.name], positions[column.name])
            if column.name in sources
            else column
            for column in encoded
        ]

    return (yield Work(work))  # type: ignore[no-any-return]


def _mode(mode: str) -> c.Mode:
    """Return the mode of a commit for the mode of a put. An append becomes an upsert: without fields, it also creates
    missing samples; with fields, `_append` sets the mode. Raise `InvalidRequestError` for an unknown mode."""
    try:
        return c.Mode.UPSERT if mode == APPEND else c.Mode(mode)
    except ValueError:
        raise InvalidRequestError(f"mode={mode!r}: expected one of {', '.join(c.Mode)}, {APPEND}") from None


def _encode(
    session_state: SessionState,
    partition: str,
    fields: TensorDict | Mapping[str, Any],
    rows: int,
    token_lengths: Sequence[int] | None,
    *,
    warn: bool = True,
    widens: bool = True,
    wide: Collection[str] = (),
) -> Operation[tuple[list[EncodedColumn], Schema]]:
    """Return the columns encoded for the partition's schema, and that schema. An outdated cached schema is fetched
    again once. token_lengths: the number of tokens of each sample, if known. warn: log undeclared field names. widens:
    values that do not fit a kind that nobody declared are encoded as a wider kind. wide: see `encode_fields`."""

    def encode(specs: Schema) -> tuple[list[EncodedColumn], Schema]:
        """Return the encoded columns and `specs`. Raise `SchemaError` or `InvalidRequestError` if values do not
        match."""
        columns = encode_fields(
            fields,
            rows=rows,
            specs=specs,
            open_fields=specs.open if widens else (),
            wide_fields=wide,
            partition=partition,
            token_lengths=token_lengths,
            pickles=session_state.config.pickles,
        )
        return columns, specs

    known = yield from schema_for_put(session_state, partition, fields.keys() if warn else ())
    try:
        return encode(known)
    except (SchemaError, InvalidRequestError):
        fresh = yield from fetch_schema(session_state, partition)
        if fresh == known:  # the cached schema was up to date: the values are wrong
            raise
    return encode(fresh)


def _refresh_schema(
    session_state: SessionState, partition: str, schema: Schema, rejection: SchemaError | StaleSchemaError
) -> Operation[bool]:
    """Fetch and cache the schema again after the service rejected a put that was encoded for `schema`. Return whether
    to encode the put again."""
    fresh = yield from fetch_schema(session_state, partition)
    return isinstance(rejection, StaleSchemaError) or fresh != schema


def store(
    session_state: SessionState,
    commit: c.Commit,
    ids: Sequence[str],
    encoded: Sequence[EncodedColumn],
) -> Operation[c.Committed]:
    """Reserve space, copy and commit the columns together with the rest of `commit`. A small put uses
    preallocated space of the client, if there is any, instead of its own reservation. ids: the caller's ids of the
    samples."""
    committed: c.Committed
    try:
        portion = yield from take_preallocated(session_state, bytes_of(encoded))
        if portion is not None:
            return (yield from _store_preallocated(session_state, portion, commit, ids, encoded))
    except (ServiceRestartedError, StorageUnitError) as error:
        log.info("Preallocated space was lost (%s); allocating new space", error)
    except CapacityTimeoutError:
        # A commit into preallocated space cannot wait for space; the `Allocate` below can.
        log.debug("Partition %r is full; applying its when_full policy", commit.partition)
    # Without preallocated space, the put reserves its own.
    allocated = yield Send(
        c.Allocate(
            partition=commit.partition,
            columns=tuple(_sizes(column) for column in encoded),
            update=commit.mode is c.Mode.UPDATE or commit.samples.ids is None,  # row handles name existing samples
            timeout_s=session_state.put_timeout_s,
            samples=commit.samples,
        )
    )
    unfinished: set[int] = set()  # units that may still execute writes, kept up to date by the copy
    try:
        placements: tuple[c.Placement, ...] = allocated.result.placements
        yield from ensure_known(session_state, {placement.unit for placement in placements})
        write = _writer(
            session_state, placements, encoded, allocated.call_id, unfinished, checksums=allocated.result.checksums
        )
        written: Sequence[EncodedColumn] = yield Work(write)
        failpoint("put.before_commit")
        committed = (yield from send_for_samples(ids, _with_columns(commit, written, allocated.call_id))).result
        return replace(committed, evicted=allocated.result.evicted)  # samples evicted to make space
    except BaseException:
        yield from release_space(session_state, allocated.call_id, unfinished)
        raise


def _sizes(column: EncodedColumn) -> c.ColumnSizes:
    return c.ColumnSizes(name=column.name, sizes=column.sizes, by_schema=column.by_schema)


def _writer(
    session_state: SessionState,
    placements: Sequence[c.Placement],
    encoded: Sequence[EncodedColumn],
    reservation: int,
    unfinished: set[int],
    *,
    checksums: bool,
) -> Callable[[], Sequence[EncodedColumn]]:
    """Return the function that copies the columns to their places, for a `Work` step. It returns the copied columns;
    with `checksums`, they have these. reservation, unfinished: see `UnitConnections.write`."""
    # The step may run in another thread, whose current stream does not follow that of the caller.
    ready = {device: record_event(device) for device in _devices(encoded)}

    def write() -> Sequence[EncodedColumn]:
        for device, event in ready.items():
            current_stream(device).wait_event(event)
        columns = [column.with_checksums() for column in encoded] if checksums else encoded
        session_state.connections.write(placements, columns, reservation, unfinished)
        return columns

    return write


def _devices(encoded: Sequence[EncodedColumn]) -> set[torch.device]:
    """Return the accelerators that hold values of these columns."""
    return {column.values.device for column in encoded} - {CPU}


def _with_columns(
    commit: c.Commit, encoded: Sequence[EncodedColumn], reservation: int, offset: int | None = None
) -> c.Commit:
    """Return the commit with the columns and the place of their values: the space of a reservation, or (with
    `offset`) the portion of preallocated space that begins there."""
    columns = tuple(
        c.CommitColumn(
            name=column.name,
            spec=column.spec,
            lengths=column.lengths,
            index=column.index,
            checksums=column.checksums,
            by_schema=column.by_schema,
        )
        for column in encoded
    )
    return replace(commit, reservation=reservation, offset=offset, columns=columns)


def _store_preallocated(
    session_state: SessionState,
    portion: PreallocatedPortion,
    commit: c.Commit,
    ids: Sequence[str],
    encoded: Sequence[EncodedColumn],
) -> Operation[c.Committed]:
    """Copy the columns into the preallocated portion and commit them."""
    space = portion.space

    # A small copy into a mapped arena does not block: the async client makes it on its event loop.
    def brief() -> bool:
        return session_state.connections.mapped([space.unit]) and not _devices(encoded)

    failed = True
    try:
        write = _writer(
            session_state,
            portion.placements(encoded),
            encoded,
            reservation=space.call_id,
            unfinished=set(),  # stays empty: the arena is mapped, so no unit executes the write
            checksums=space.checksums,
        )
        written = yield Work(write, brief)
        failpoint("put.before_commit")
        full = _with_columns(commit, written, space.call_id, portion.offset)
        committed = yield from send_for_samples(ids, full)
        failed = False
        return committed.result  # type: ignore[no-any-return]
    finally:
        session_state.preallocated.finish(portion, failed=failed)


def release_space(session_state: SessionState, reservation: int, unfinished: set[int]) -> Operation[None]:
    """Free the space of a failed put, unless one of the `unfinished` units may still write to it. Such space stays
    reserved until these units have confirmed the stop or have another epoch, or until the session ends (see
    `UnitConnections.take_settled`)."""
    try:
        if unfinished:
            yield Work(lambda: session_state.connections.stop(reservation, unfinished))
    finally:
        if not unfinished:  # `stop` removes the units that confirm
            yield Post(c.Abort(reservation=reservation))


def _put_meta(
    ids: list[str],
    partition: str,
    fields: list[str],
    tags: list[dict[str, Scalar]] | None,
    encoded: Sequence[EncodedColumn],
    committed: c.Committed,
) -> KVBatchMeta:
    """Return the meta of a put, with the sequence lengths of the tags `input_lengths`, or those on which all jagged
    columns agree."""
    # The row lengths of each jagged column. index: number of each row's value, where rows share values.
    lengths = [
        column.lengths if column.index is None else column.lengths[column.index]
        for column in encoded
        if column.spec.kind is FieldKind.JAGGED
    ]
    agreed = bool(lengths) and all(np.array_equal(lengths[0], other) for other in lengths[1:])
    sequence_lengths: list[Any] | None = lengths[0].tolist() if agreed else None
    if tags and all(INPUT_LENGTHS in each for each in tags):
        sequence_lengths = [each[INPUT_LENGTHS] for each in tags]
    return KVBatchMeta(
        partition_id=partition,
        task_name=None,
        sample_ids=ids,
        fields=fields or None,
        sequence_lengths=sequence_lengths,
        extra_info={EVICTED_SAMPLES: list(committed.evicted)} if committed.evicted else {},
        tags=tags,
        _rows=committed.rows,
        _generations=committed.generations,
    )
