"""Reads of samples. A read by key omits missing keys and fields, as in the original. A read by meta does not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from tensordict import TensorDict

from dataplane.client.operations import get
from dataplane.client.operations.sample_names import Names, ids_of
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.compat.transfer_queue import columns
from dataplane.compat.transfer_queue.errors import StorageKeyNotFoundError
from dataplane.compat.transfer_queue.metadata import BatchMeta
from dataplane.compat.transfer_queue.operations import list_samples_of_keys, resolve_samples
from dataplane.errors import FieldNotFoundError, FieldNotProducedError, PartitionNotFoundError, first_few
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)


def get_keys(
    session_state: SessionState, keys: Sequence[str], partition: str, fields: Sequence[str] | None, strict: bool
) -> Operation[TensorDict]:
    """Return the fields (None: those that all keys have) of these keys; a repeated key gets repeated rows. Missing keys
    and fields that only some keys have are omitted, or an error if strict."""
    distinct = list(dict.fromkeys(keys))
    if strict:
        data = yield from _read_all(session_state, distinct, partition, fields)
        existing = distinct  # otherwise `_read_all` has raised an error
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
    try:
        if fields is None:
            fields = (yield from list_samples_of_keys(session_state, keys, partition)).fields
        requested = sorted(set(fields))  # as in the original, whatever the caller's order
        if requested:
            positions, read = yield from get.get_present(session_state, keys, partition, requested)
            existing, data = [keys[position] for position in positions], columns.from_columns(read)
        else:  # no fields to read: find the existing keys
            existing = list((yield from list_samples_of_keys(session_state, keys, partition)).ids)
            data = _no_data()
    except PartitionNotFoundError:
        existing, data = [], _no_data()  # the error follows
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
    parts = yield from resolve_samples(session_state, meta)
    fields = meta.field_names
    if len(parts) == 1:
        [(_, native_meta)] = parts
        return (yield from _read_exactly(session_state, native_meta, native_meta.partition_id, fields))
    # Samples of several partitions: read each partition, and put its rows at the samples' positions in the meta.
    rows_by_field: dict[str, list[Any]] = {name: [None] * meta.size for name in fields}
    for positions, native_meta in parts:
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
