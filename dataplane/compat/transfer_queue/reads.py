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
from dataplane.compat.transfer_queue.operations import listed_keys, named
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
        found, data = distinct, (yield from _all(session_state, distinct, partition, fields))
    else:
        found, data = yield from _present(session_state, distinct, partition, fields)
    if not data.keys() or len(distinct) == len(keys):
        return data
    there = set(found)
    return _repeated(data, found, [key for key in keys if key in there])


def _all(
    session_state: SessionState, keys: Sequence[str], partition: str, fields: Sequence[str] | None
) -> Operation[TensorDict]:
    """Return the fields (None: those that all keys have) of these keys. A missing key or field is an error."""
    if fields is None:
        listed = yield Send(c.List(partition=partition, samples=c.Samples(ids=tuple(keys))))
        fields = listed.result.fields
        if not fields:
            raise _no_fields(partition, keys)
    return (yield from _strictly(session_state, keys, partition, list(fields)))


def _strictly(
    session_state: SessionState, names: Names, partition: str, fields: Sequence[str]
) -> Operation[TensorDict]:
    """Return exactly these fields of these samples. `NotFoundError` names a missing sample or field."""
    try:
        data: TensorDict = yield from get.get(session_state, names, partition, fields, True)
    except (FieldNotFoundError, FieldNotProducedError):
        # Some rows can be in the field's hidden column, which `get` does not read.
        places, data = yield from get.get_present(session_state, names, partition, fields)
        if len(places) < len(ids_of(names)) or any(name not in data for name in fields):
            raise
    return columns.from_columns(data)


def _present(
    session_state: SessionState, keys: Sequence[str], partition: str, fields: Sequence[str] | None
) -> Operation[tuple[list[str], TensorDict]]:
    """Return the keys that exist, and their fields. Missing keys and fields are logged."""
    try:
        wanted = list(
            dict.fromkeys((yield from listed_keys(session_state, keys, partition)).fields if fields is None else fields)
        )
        if wanted:
            places, read = yield from get.get_present(session_state, keys, partition, wanted)
            found, data = [keys[place] for place in places], columns.from_columns(read)
        else:
            found, data = list((yield from listed_keys(session_state, keys, partition)).ids), _nothing()
    except PartitionNotFoundError:
        found, data = [], _nothing()
    if not found:
        raise StorageKeyNotFoundError(f"the keys {first_few(keys)}, or partition {partition!r}, were not found")
    if len(found) < len(keys):
        _left_out(session_state, "keys", partition, set(keys).difference(found))
    if len(data.keys()) < len(wanted):
        _left_out(session_state, "fields", partition, [name for name in wanted if name not in data])
    if data.keys():
        return found, data
    if not (yield from listed_keys(session_state, found, partition)).fields:
        raise _no_fields(partition, keys)
    return found, _nothing()


def _nothing() -> TensorDict:
    return TensorDict({}, batch_size=0)


def _no_fields(partition: str, keys: Sequence[str]) -> StorageKeyNotFoundError:
    return StorageKeyNotFoundError(
        f"some fields are not ready: the keys {first_few(keys)} of partition {partition!r} have no field in common"
    )


def _left_out(session_state: SessionState, what: str, partition: str, names: Iterable[str]) -> None:
    """Log each omitted name once."""
    new = session_state.warned.first(f"read {what}", partition, names)
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
    if len(distinct) < meta.size:
        first = {sample: place for place, sample in reversed(list(enumerate(samples)))}
        data = yield from get_batch(session_state, meta.select_samples([first[sample] for sample in distinct]))
        return _repeated(data, distinct, samples)
    parts = yield from named(session_state, meta)
    fields = meta.field_names
    if len(parts) == 1:
        [(_, names)] = parts
        return (yield from _strictly(session_state, names, names.partition_id, fields))
    rows: dict[str, list[Any]] = {name: [None] * meta.size for name in fields}
    for places, names in parts:
        found = yield from _strictly(session_state, names, names.partition_id, fields)
        for name in fields:
            for place, row in zip(places, columns.rows_of(found.get(name)), strict=True):
                rows[name][place] = row
    return TensorDict({name: columns.packed_rows(mine) for name, mine in rows.items()}, batch_size=[meta.size])


def _repeated(data: TensorDict, there: Sequence[Any], wanted: Sequence[Any]) -> TensorDict:
    """Return the rows of `data`, which are those of `there`, in the order of `wanted`."""
    places = {sample: place for place, sample in enumerate(there)}
    return TensorDict(columns.rows_at(data, [places[sample] for sample in wanted]), batch_size=[len(wanted)])
