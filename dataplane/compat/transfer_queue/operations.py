"""The adapter's operations on the service, each written once: generators of steps, which the sync and the async client
perform like the native client's operations."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from dataplane.client.operations import get, short_get
from dataplane.client.operations.field_names import fetch_schema
from dataplane.client.operations.put import put_rows
from dataplane.client.operations.sample_names import Names, ids_of, samples_of, send_for_samples
from dataplane.client.operations.short_put import (
    MAX_ROWS,
    UNCERTAIN_ERRORS,
    ShortPut,
    prepare,
    store_short,
    tag_values,
)
from dataplane.client.operations.steps import EndRead, Operation, Send
from dataplane.client.session_state import Schema, SessionState
from dataplane.compat.transfer_queue import columns
from dataplane.compat.transfer_queue.columns import tag_columns, tags_of
from dataplane.compat.transfer_queue.errors import StorageKeyNotFoundError, TransferQueueError
from dataplane.compat.transfer_queue.metadata import BatchMeta
from dataplane.data.meta import KVBatchMeta as NativeMeta
from dataplane.data.meta import name_of
from dataplane.errors import (
    DataPlaneError,
    FieldNotFoundError,
    FieldNotProducedError,
    PartitionNotFoundError,
    SampleNotFoundError,
    SchemaError,
    StaleSampleError,
    first_few,
)
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from dataplane.ledger.commands.short import decode_plan, encode_plan

log = logging.getLogger(__name__)

UNNAMED = "_unnamed/"
"""Prefix of the ids of samples that were put without keys."""

ADAPTER = "dataplane.compat.transfer_queue"
"""The partition in which the adapter stores its own data."""

MAX_SAMPLES = Limits().samples
"""The maximum number of samples of one claim."""
NO_COLUMNS = encode_plan(())
"""The plan of puts of tags."""
TRIES = 8
"""Attempts at an operation that fails if other clients clear samples meanwhile."""

SampleList = c.Claimed | c.Listed
"""Samples that the service returned: their ids, rows, generations and tags."""


def extend_partition(
    session_state: SessionState, partition: str, *, tasks: Sequence[str] = (), fields: Mapping[str, Any] | None = None
) -> Send:
    """Return the step that creates the partition, or adds tasks and fields to it."""
    if fields:  # the cached schema lacks them
        session_state.schemas.forget(partition)
    return Send(
        c.Register(partition=partition, fields=dict(fields or {}), num_samples=None, tasks=tuple(tasks), extend=True)
    )


def is_key(name: str) -> bool:
    """Whether a sample's id is a key that a caller chose."""
    return not name.startswith(UNNAMED)


# --- metas


def build_batch_meta(
    session_state: SessionState,
    partition: str,
    samples: SampleList,
    fields: Sequence[str],
    status: int | None = None,
) -> Operation[BatchMeta]:
    """Build the meta of samples that the service returned, with those of `fields` that any of them has. status: the
    production status of all of them, if known."""
    locations = yield from locate_fields(session_state, partition, samples, fields)
    count = len(samples.ids)
    known_fields = columns.known_fields(locations, fields)
    # Per sample: whether it has all of `fields` that the partition has; False if the partition has none of them.
    ready = columns.produced(locations, count, known_fields).all(axis=1) if known_fields else np.zeros(count)
    meta = BatchMeta(
        samples.generations.tolist(),
        [partition] * count,
        columns.located_schema(locations),
        ready if status is None else np.full(count, status),
        custom_meta=tags_of(samples.tags, count),
    )
    return meta._with_handles(list(samples.ids), samples.rows.tolist())


def locate_fields(
    session_state: SessionState, partition: str, samples: SampleList, fields: Sequence[str]
) -> Operation[Sequence[c.FieldLocations]]:
    """Return where these fields of the samples are stored, with their hidden columns (see `put`). Missing fields and
    cells are allowed. The memory is released at once: use the result for shapes and lengths, not to read."""
    if not len(samples.rows) or not fields:
        return ()
    handles = c.Samples(rows=samples.rows, generations=samples.generations)
    locate = c.Locate(partition=partition, samples=handles, fields=tuple(fields), missing_ok=True, brief=True)
    reply = yield Send(locate)
    yield EndRead(reply.call_id)
    locations: Sequence[c.FieldLocations] = reply.result.fields
    return locations


def list_samples(session_state: SessionState, partition: str, samples: c.Samples | None = None) -> Operation[c.Listed]:
    """List all samples, oldest first, or these samples."""
    listed = yield Send(c.List(partition=name_of("partition_id", partition), samples=samples))
    return listed.result  # type: ignore[no-any-return]


def resolve_samples(session_state: SessionState, meta: BatchMeta) -> Operation[list[tuple[list[int], NativeMeta]]]:
    """Find the samples of a meta in the service. Return a pair per partition: the samples' positions in `meta`, and a
    native meta of them, with handles."""
    positions_by_partition: dict[str, list[int]] = {}
    for position, partition in enumerate(meta.partition_ids):
        positions_by_partition.setdefault(partition, []).append(position)
    resolved = []
    for partition, positions in positions_by_partition.items():
        generations = [meta.global_indexes[position] for position in positions]
        if meta._names is not None and meta._rows is not None:
            names = [meta._names[position] for position in positions]
            rows = [meta._rows[position] for position in positions]
        else:  # a meta that the caller built from global indexes
            names, rows = yield from _look_up_indexes(session_state, partition, generations)
        native = NativeMeta(partition_id=partition, task_name=None, sample_ids=names)
        resolved.append((positions, native.with_handles(np.array(rows, np.int64), np.array(generations, np.int64))))
    return resolved


def _look_up_indexes(
    session_state: SessionState, partition: str, indexes: Sequence[int]
) -> Operation[tuple[list[str], list[int]]]:
    """Return the ids and the rows of the samples with these global indexes. `StorageKeyNotFoundError` for unknown
    indexes."""
    samples = yield from list_samples(session_state, partition)
    positions = {generation: position for position, generation in enumerate(samples.generations.tolist())}
    missing = [index for index in indexes if index not in positions]
    if missing:
        raise StorageKeyNotFoundError(f"partition {partition!r} has no samples with indexes {first_few(missing)}")
    chosen = [positions[index] for index in indexes]
    return [samples.ids[position] for position in chosen], samples.rows[chosen].tolist()


# --- by key


def list_samples_of_keys(session_state: SessionState, keys: Sequence[str], partition: str) -> Operation[c.Listed]:
    """List the samples of these keys. Missing keys are omitted; a repeated key gets repeated entries."""
    samples = by_key = c.Samples(ids=tuple(keys))
    for _ in range(TRIES):
        try:
            return (yield from list_samples(session_state, partition, samples))
        except (SampleNotFoundError, StaleSampleError):
            # Some are missing. List those that exist now, by handle; if one is cleared before that, locate again.
            reply = yield Send(c.Locate(partition=partition, samples=by_key, fields=(), missing_ok=True, brief=True))
            yield EndRead(reply.call_id)
            exists = reply.result.rows >= 0  # -1: missing
            samples = c.Samples(rows=reply.result.rows[exists], generations=reply.result.generations[exists])
    raise TransferQueueError(
        f"partition {partition!r}: the keys could not be looked up, because samples were cleared during every attempt; "
        "retry, or clear less often"
    )


def clear_keys(session_state: SessionState, keys: Sequence[str], partition: str) -> Operation[None]:
    """Drop the samples of these keys. Unknown keys are ignored, as is an unknown partition."""
    try:
        samples = c.Samples(ids=tuple(keys))
        yield Send(c.Clear(partition=name_of("partition_id", partition), samples=samples))
    except PartitionNotFoundError:
        log.warning("partition %r was not found; no keys were cleared", partition)


# --- by meta


def put(
    session_state: SessionState,
    names: list[str] | NativeMeta,
    partition: str,
    fields: Mapping[str, Any] | TensorDictBase | None,
    tags: Sequence[Mapping[str, Any] | None] | None = None,
    mode: str = "upsert",
    *,
    listed: bool = False,
) -> Operation[c.Committed]:
    """Put into a partition, which is created if missing. Values of a field that do not fit its live rows go to its
    hidden column, as objects. The same commit removes these rows' values from the other column.

    names: ids, or a native meta with handles. mode: that of the native put. listed: the result also has the tags of the
    samples and the fields that all of them have."""
    if fields is None:
        stored = yield from _put_few_tags(names, partition, tags, mode, listed=listed)
    else:
        short = _short_form(session_state, names, partition, fields, tags, mode, listed=listed)
        stored = None if short is None else (yield from store_short(session_state, short))
    if stored is not None:
        return stored
    name_of("partition_id", partition)
    encoded_tags = tag_columns(tags, len(names))
    ids = ids_of(names)
    encoded = {} if fields is None else columns.to_columns(fields)
    if not encoded:
        return (yield from _put_tags(session_state, names, ids, partition, encoded_tags, mode, listed=listed))
    # All fields are declared before their first put, in the order of the put: some kinds cannot be
    # inferred from the values, and the partition then keeps a field whose values were all cleared.
    declared = columns.declared_fields(encoded)
    try:
        schema = session_state.schemas.get(partition)
        if schema is None:
            schema = yield from fetch_schema(session_state, partition)
    except PartitionNotFoundError:
        schema = Schema()
    if schema.strict:
        declared = {}  # the service rejects the fields that its schema does not have
    if any(name not in schema for name in declared):
        yield extend_partition(session_state, partition, fields=declared)

    def declare() -> Send:
        """Return the step that declares the fields again, if the partition was cleared meanwhile."""
        return extend_partition(session_state, partition, fields=declared)

    while True:
        try:
            # The first value, the stored columns, is not needed here.
            _, committed = yield from put_rows(
                session_state,
                names,
                ids,
                partition,
                encoded,
                encoded_tags,
                mode,
                declare,
                listed=listed,
            )
            return committed
        except PartitionNotFoundError:
            yield declare()  # also creates the partition
        except SchemaError as error:
            # Each error moves one field to another column or encoding. Then try again.
            if not columns.to_other_column(encoded, error):
                raise


def _put_few_tags(
    names: list[str] | NativeMeta,
    partition: str,
    tags: Sequence[Mapping[str, Any] | None] | None,
    mode: str,
    *,
    listed: bool,
) -> Operation[c.Committed | None]:
    """Execute a `put` without fields, if the tags need no encoding. None if the put must take the
    general way."""
    if type(names) is not list or not 0 < len(names) <= MAX_ROWS or type(partition) is not str:
        return None
    values = {} if tags is None else tag_values(tags, len(names))
    if values is None or any(map(columns.may_be_encoded, values.values())):
        return None
    command = c.PutRows(
        partition=partition,
        mode=c.Mode(mode),
        reservation=0,
        offset=0,
        plan=NO_COLUMNS,
        lengths=(),
        ids=tuple(names),
        tags=values,
        listed=listed,
    )
    try:
        committed: c.Committed = (yield Send(command)).result
        return committed
    except UNCERTAIN_ERRORS:
        raise
    except DataPlaneError:  # the general way says why, or creates the partition
        return None


def _put_tags(
    session_state: SessionState,
    names: list[str] | NativeMeta,
    ids: list[str],
    partition: str,
    tags: tuple[c.TagColumn, ...],
    mode: str,
    *,
    listed: bool,
) -> Operation[c.Committed]:
    """Execute a `put` without fields."""
    commit = c.Commit(
        partition=partition,
        samples=samples_of(names, partition, ids),
        mode=c.Mode(mode),
        tags=tags,
        listed=listed,
    )
    while True:
        try:
            return (yield from send_for_samples(ids, commit)).result  # type: ignore[no-any-return]
        except PartitionNotFoundError:
            yield extend_partition(session_state, partition)


def _short_form(
    session_state: SessionState,
    names: list[str] | NativeMeta,
    partition: str,
    fields: Mapping[str, Any] | TensorDictBase,
    tags: Sequence[Mapping[str, Any] | None] | None,
    mode: str,
    *,
    listed: bool,
) -> ShortPut | None:
    """Return the put in its short form; None if it must take the general way."""
    if type(names) is not list or len(names) > MAX_ROWS:
        return None
    if type(fields) not in (dict, TensorDict):
        return None
    rows: dict[str, Any] = {}
    for name, value in fields.items():
        rows[name] = value.tolist() if type(value) is NonTensorStack else value
    short = prepare(session_state, names, partition, rows, tags, mode, listed=listed)
    if short is None or any(map(columns.may_be_encoded, short.tags.values())):
        return None  # a text that looks like an encoded value is encoded
    return short


def insert_samples(
    session_state: SessionState,
    count: int,
    partition: str,
    fields: Mapping[str, Any] | None = None,
    coming: Sequence[str] = (),
) -> Operation[BatchMeta]:
    """Create `count` samples (none for a negative count) without keys, with these fields if any,
    and return their meta. A missing partition is created, also for no samples. coming: fields that
    will be put later; the meta lists them."""
    batch = uuid4().hex
    names = [f"{UNNAMED}{batch}/{row}" for row in range(count)]
    committed = yield from put(session_state, names, partition, fields, mode="create")
    schema = {name: columns.unknown_schema() for name in coming}
    meta = BatchMeta(committed.generations.tolist(), [partition] * len(names), schema)
    return meta._with_handles(names, committed.rows.tolist())


def put_batch(session_state: SessionState, meta: BatchMeta, data: Mapping[str, Any]) -> Operation[None]:
    """Put fields and the meta's tags for the samples of a meta."""
    metas = yield from resolve_samples(session_state, meta)  # one per partition
    for positions, samples in metas:
        tags = [meta.custom_meta[position] for position in positions]
        fields = data if len(metas) == 1 else columns.rows_at(data, positions)  # one part has all rows
        some_tags = tags if any(tags) else None
        yield from put(session_state, samples, samples.partition_id, fields, some_tags)


def get_keys(
    session_state: SessionState, keys: Sequence[str], partition: str, fields: Sequence[str] | None, strict: bool
) -> Operation[TensorDict]:
    """Return the fields (None: those that all keys have) of these keys; a repeated key gets repeated rows. Missing keys
    and fields that only some keys have are omitted, or an error if strict."""
    existing = distinct = list(dict.fromkeys(keys))
    short = yield from _read_short(session_state, distinct, partition, fields)
    if short is not None:
        data = short
    elif strict:  # a missing key is an error
        data = yield from _read_all(session_state, distinct, partition, fields)
    else:
        existing, data = yield from _read_existing(session_state, distinct, partition, fields)
    if not data.keys() or len(distinct) == len(keys):  # no rows to repeat, or no repeated key
        return data
    exists = set(existing)
    return _repeat_rows(data, existing, [key for key in keys if key in exists])


def _read_all(
    session_state: SessionState, keys: Sequence[str], partition: str, fields: Sequence[str] | None
) -> Operation[TensorDict]:
    """Return the fields (None: those that all keys have) of these keys. A missing key or field is an error."""
    if fields is None:
        listed = yield Send(c.List(partition=partition, samples=c.Samples(ids=tuple(keys))))
        fields = listed.result.fields
        if not fields:
            raise _no_fields(partition, keys)
        data = yield from _read_exactly(session_state, keys, partition, sorted(set(fields)))
        _remember_all_fields(session_state, partition, sorted(set(fields)))
        return data
    return (yield from _read_exactly(session_state, keys, partition, sorted(set(fields))))


def _read_exactly(
    session_state: SessionState, names: Names, partition: str, fields: Sequence[str]
) -> Operation[TensorDict]:
    """Return exactly these fields of these samples. A `NotFoundError` names the missing sample or field."""
    try:
        data: TensorDict = yield from get.get(session_state, names, partition, fields, copy=True)
    except (FieldNotFoundError, FieldNotProducedError):
        # Some rows can be in the field's hidden column (see `operations.put`), which `get` does not read.
        positions, data = yield from get.get_present(session_state, names, partition, fields)
        if len(positions) < len(ids_of(names)) or any(name not in data for name in fields):
            raise  # the first error: a value is in neither column
    return columns.from_columns(data)


def _read_existing(
    session_state: SessionState, keys: Sequence[str], partition: str, fields: Sequence[str] | None
) -> Operation[tuple[list[str], TensorDict]]:
    """Return those of `keys` that exist, and the fields (None: all) that each of these has. The data is empty if there
    is no such field. Missing keys and fields are logged. `StorageKeyNotFoundError` if no key exists, or if the existing
    keys have no field in common."""
    all_fields = fields is None
    try:
        if fields is None:
            fields = (yield from list_samples_of_keys(session_state, keys, partition)).fields
        requested = sorted(set(fields))  # as in the original, whatever the caller's order
        if requested:
            positions, read = yield from get.get_present(session_state, keys, partition, requested)
            if all_fields:
                _remember_all_fields(session_state, partition, requested)
            existing = [keys[position] for position in positions]
            data = columns.from_columns(read)
        else:  # no fields to read: find the existing keys
            existing = list((yield from list_samples_of_keys(session_state, keys, partition)).ids)
            data = _no_data()
    except PartitionNotFoundError:
        existing = []
        data = _no_data()  # the error follows
    if not existing:
        found = f"partition {partition!r} has none of the keys {first_few(keys)}"
        raise StorageKeyNotFoundError(f"keys or partition were not found: {found}")
    if len(existing) < len(keys):
        _log_omitted(session_state, "keys", partition, set(keys).difference(existing))
    if len(data.keys()) < len(requested):
        _log_omitted(session_state, "fields", partition, [name for name in requested if name not in data])
    if data.keys():
        return existing, data
    # None of the requested fields can be returned: an error only if the keys have no other field in common.
    if not (yield from list_samples_of_keys(session_state, existing, partition)).fields:
        raise _no_fields(partition, keys)
    return existing, _no_data()


ALL_FIELDS = ("", "")
"""A session remembers the plan of reads of all fields under these names, which no read can have."""


def _remember_all_fields(session_state: SessionState, partition: str, fields: Sequence[str]) -> None:
    """Remember the plan of a read of all fields, which were these, if further ones like it can take
    the short way."""
    plans = session_state.read_plans
    plan = plans.get((partition, *fields))
    key = (partition, *ALL_FIELDS)
    if plan is not None and key not in plans:
        encoded = encode_plan(decode_plan(plan.encoded).columns, complete=True)
        plans[key] = plan._replace(key=key, encoded=encoded)


def _read_short(
    session_state: SessionState, keys: Sequence[str], partition: str, fields: Sequence[str] | None
) -> Operation[TensorDict | None]:
    """Return the fields (None: all) of these keys, the short way (see `short_get`). None if a key
    or field is missing, or if the fields are not known from an earlier read."""
    requested = ALL_FIELDS if fields is None else sorted(set(fields))
    plan = short_get.prepare(session_state, keys, partition, requested)
    if plan is None:
        return None
    data = yield from short_get.get_short(session_state, keys, plan, None, _not_read)
    if data is not None:
        return columns.from_columns(data)
    if fields is None:  # the specs of its fields may have changed, too
        session_state.read_plans.pop((partition, *[column.name for column in plan.columns]), None)
    return None


def _not_read() -> Operation[Any]:
    """Return None, after no step."""
    return None
    yield


def _no_data() -> TensorDict:
    return TensorDict({}, batch_size=0)


def _no_fields(partition: str, keys: Sequence[str]) -> StorageKeyNotFoundError:
    return StorageKeyNotFoundError(
        f"Some fields are not ready in all the requested keys: {first_few(keys)} of partition "
        f"{partition!r} have no field in common"
    )


def _log_omitted(session_state: SessionState, what: str, partition: str, names: Iterable[str]) -> None:
    """Log the omitted keys or fields (`what`). Each name is logged once per session."""
    new = session_state.warned.filter_new(f"read {what}", partition, names)
    if new:
        log.warning(
            "partition %r: a read omitted the %s %s, which are missing or incomplete; set strict_reads=True to make "
            "this an error",
            partition,
            what,
            first_few(new),
        )


def get_batch(session_state: SessionState, meta: BatchMeta) -> Operation[TensorDict]:
    """Return the fields of the samples of a meta. A repeated sample gets repeated rows."""
    samples = list(zip(meta.partition_ids, meta.global_indexes, strict=True))
    distinct = list(dict.fromkeys(samples))
    if len(distinct) < meta.size:  # read each sample once
        # Reversed, so that the first position of a sample is entered last and stays.
        first_position = {sample: position for position, sample in reversed(list(enumerate(samples)))}
        distinct_meta = meta.select_samples([first_position[sample] for sample in distinct])
        data = yield from get_batch(session_state, distinct_meta)  # has no repeated sample: no further recursion
        return _repeat_rows(data, distinct, samples)
    metas = yield from resolve_samples(session_state, meta)
    fields = meta.field_names
    if len(metas) == 1:
        [(_, native_meta)] = metas
        return (yield from _read_exactly(session_state, native_meta, native_meta.partition_id, fields))
    # Samples of several partitions: read each partition, and put its rows at the samples' positions in the meta.
    rows_by_field: dict[str, list[Any]] = {name: [None] * meta.size for name in fields}
    for positions, native_meta in metas:
        data = yield from _read_exactly(session_state, native_meta, native_meta.partition_id, fields)
        for name in fields:
            for position, row in zip(positions, columns.rows_of(data.get(name)), strict=True):
                rows_by_field[name][position] = row
    packed = {name: columns.packed_rows(rows) for name, rows in rows_by_field.items()}
    return TensorDict(packed, batch_size=[meta.size])


def _repeat_rows(data: TensorDict, samples: Sequence[Any], repeated: Sequence[Any]) -> TensorDict:
    """Return the rows of `data` in the order of `repeated`, which can name a sample more than once. samples: the sample
    of each row of `data`."""
    positions = {sample: position for position, sample in enumerate(samples)}
    rows = columns.rows_at(data, [positions[sample] for sample in repeated])
    return TensorDict(rows, batch_size=[len(repeated)])
