"""The adapter's operations on the service, each written once: generators of steps, which the sync and the async client
perform like the native client's operations."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from dataplane.client.operations.partitions import stats
from dataplane.client.operations.put import put_rows
from dataplane.client.operations.sample_names import ids_of, naming, samples_of
from dataplane.client.operations.steps import Operation, Post, Send
from dataplane.client.session_state import Schema, SessionState
from dataplane.compat.transfer_queue import columns
from dataplane.compat.transfer_queue.errors import StorageKeyNotFoundError, TransferQueueError
from dataplane.compat.transfer_queue.metadata import BatchMeta
from dataplane.compat.transfer_queue.tags import tag_columns, tags_of
from dataplane.data.meta import KVBatchMeta as Meta
from dataplane.errors import (
    PartitionNotFoundError,
    SampleNotFoundError,
    SchemaError,
    StaleSampleError,
    TaskNotFoundError,
    first_few,
)
from dataplane.ledger import commands as c
from dataplane.ledger.state.limits import Limits

log = logging.getLogger(__name__)

UNNAMED = "_unnamed/"
"""Prefix of the ids of samples that were put without keys."""

ADAPTER = "dataplane.compat.transfer_queue"
"""The partition in which the adapter stores its own data."""

MAX_SAMPLES = Limits().samples
"""The maximum number of samples of one claim."""
TRIES = 8
"""Attempts at an operation that fails if other clients clear samples meanwhile."""

Found = c.Claimed | c.Listed


def extend(
    session_state: SessionState, partition: str, *, tasks: Sequence[str] = (), fields: Mapping[str, Any] | None = None
) -> Send:
    """Return the step that creates the partition, or adds tasks and fields to it."""
    if fields:
        session_state.schemas.forget(partition)
    return Send(
        c.Register(partition=partition, fields=dict(fields or {}), num_samples=None, tasks=tuple(tasks), extend=True)
    )


def is_key(name: str) -> bool:
    """Whether a sample's id is a key that a caller chose."""
    return not name.startswith(UNNAMED)


# --- metas


def batch_of(
    session_state: SessionState, partition: str, found: Found, fields: Sequence[str], status: int | None = None
) -> Operation[BatchMeta]:
    """Build the meta of samples that the service returned. status: the production status of all of them, if known."""
    located = yield from _located(session_state, partition, found, fields)
    count = len(found.ids)
    known = columns.known_fields(located, fields)
    ready = columns.produced(located, count, known).all(axis=1) if known else np.zeros(count)
    meta = BatchMeta(
        found.generations.tolist(),
        [partition] * count,
        columns.located_schema(located),
        ready if status is None else np.full(count, status),
        custom_meta=tags_of(found.tags, count),
    )
    return meta._named(list(found.ids), found.rows.tolist())


def _located(
    session_state: SessionState, partition: str, found: Found, fields: Sequence[str]
) -> Operation[Sequence[c.FieldLocations]]:
    """Return where these fields of the samples are, with their hidden columns. Missing fields and cells are allowed.
    Nothing stays pinned."""
    if not len(found.rows) or not fields:
        return ()
    samples = c.Samples(rows=found.rows, generations=found.generations)
    sent = yield Send(c.Locate(partition=partition, samples=samples, fields=tuple(fields), missing_ok=True))
    yield Post(c.Release(located=sent.number))
    located: Sequence[c.FieldLocations] = sent.result.fields
    return located


def listed(session_state: SessionState, partition: str, samples: c.Samples | None = None) -> Operation[c.Listed]:
    """List all samples, oldest first, or these samples."""
    return (yield Send(c.List(partition=partition, samples=samples))).result  # type: ignore[no-any-return]


def named(session_state: SessionState, meta: BatchMeta) -> Operation[list[tuple[list[int], Meta]]]:
    """Resolve the samples of a meta, by partition: their positions in the meta, and a native meta of them."""
    parts: dict[str, list[int]] = {}
    for place, partition in enumerate(meta.partition_ids):
        parts.setdefault(partition, []).append(place)
    found = []
    for partition, places in parts.items():
        generations = [meta.global_indexes[place] for place in places]
        if meta._names is not None and meta._rows is not None:
            names, rows = [meta._names[place] for place in places], [meta._rows[place] for place in places]
        else:
            names, rows = yield from _by_index(session_state, partition, generations)
        native = Meta(partition_id=partition, task_name=None, sample_ids=names)
        found.append((places, native.with_handles(np.array(rows, np.int64), np.array(generations, np.int64))))
    return found


def _by_index(
    session_state: SessionState, partition: str, indexes: Sequence[int]
) -> Operation[tuple[list[str], list[int]]]:
    """Look up ids and rows by global index. `StorageKeyNotFoundError` for unknown indexes."""
    found = yield from listed(session_state, partition)
    places = {generation: place for place, generation in enumerate(found.generations.tolist())}
    missing = [index for index in indexes if index not in places]
    if missing:
        raise StorageKeyNotFoundError(f"partition {partition!r} has no samples with indexes {first_few(missing)}")
    chosen = [places[index] for index in indexes]
    return [found.ids[place] for place in chosen], found.rows[chosen].tolist()


# --- by key


def of_keys(session_state: SessionState, keys: Sequence[str], partition: str, create: bool) -> Operation[BatchMeta]:
    """Return the meta of the samples with these keys, with the fields that all of them have. `create` adds missing
    samples, without fields."""
    try:
        if create:
            yield from put(session_state, keys, partition, None)
        found = yield from listed_keys(session_state, keys, partition)
        if len(found.ids) < len(keys):
            missing = sorted(set(keys).difference(found.ids))
            log.warning("partition %r: the keys %s were not found", partition, first_few(missing))
        return (yield from batch_of(session_state, partition, found, found.fields))
    except PartitionNotFoundError:
        log.warning("partition %r was not found; an empty meta is returned", partition)
        return BatchMeta.empty()


def listed_keys(session_state: SessionState, keys: Sequence[str], partition: str) -> Operation[c.Listed]:
    """List the samples of these keys. Missing keys are omitted; a repeated key gets repeated entries."""
    samples = wanted = c.Samples(ids=tuple(keys))
    for _ in range(TRIES):
        try:
            return (yield from listed(session_state, partition, samples))
        except (SampleNotFoundError, StaleSampleError):
            # Some are missing. List those that exist now, by handle: if one is cleared before that, look again.
            sent = yield Send(c.Locate(partition=partition, samples=wanted, fields=(), missing_ok=True))
            yield Post(c.Release(located=sent.number))
            there = sent.result.rows >= 0
            samples = c.Samples(rows=sent.result.rows[there], generations=sent.result.generations[there])
    raise TransferQueueError(
        f"partition {partition!r}: keys were cleared during every lookup; retry, or clear less often"
    )


def put_keys(
    session_state: SessionState,
    keys: Sequence[str],
    partition: str,
    fields: Mapping[str, Any] | TensorDictBase | None,
    tags: Sequence[Mapping[str, Any]] | None,
) -> Operation[tuple[list[dict[str, Any]], list[str]]]:
    """Put by key. Return all tags of each sample, and the fields that all of them have, after the put."""
    committed = yield from put(session_state, keys, partition, fields, tag_columns(tags, len(keys)), listed=True)
    return tags_of(committed.tags, len(keys)), sorted(committed.fields)


def clear_keys(session_state: SessionState, keys: Sequence[str], partition: str) -> Operation[None]:
    """Drop the samples of these keys. Unknown keys are ignored."""
    try:
        yield Send(c.Clear(partition=partition, samples=c.Samples(ids=tuple(keys))))
    except PartitionNotFoundError:
        log.warning("partition %r was not found; no keys were cleared", partition)


def list_keys(session_state: SessionState, partition: str | None) -> Operation[dict[str, dict[str, Any]]]:
    """Return the tags of every key, by partition. An unknown partition has no entry."""
    names = (yield from partitions(session_state)) if partition is None else [partition]
    info: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            found = yield from listed(session_state, name)
        except PartitionNotFoundError:
            continue
        tags = tags_of(found.tags, len(found.ids))
        info[name] = dict(zip(found.ids, tags, strict=True))
        if UNNAMED in "\n".join(found.ids):
            info[name] = {key: mine for key, mine in info[name].items() if is_key(key)}
    return info


def keys_of(session_state: SessionState, indexes: Sequence[int], partition: str) -> Operation[list[str | None]]:
    """Return the key of each sample, or None if the sample has no key or does not exist."""
    try:
        found = yield from listed(session_state, partition)
    except PartitionNotFoundError:
        raise TransferQueueError(f"kv_retrieve_keys: partition {partition!r} was not found") from None
    keys = dict(zip(found.generations.tolist(), found.ids, strict=True))
    return [key if (key := keys.get(index)) is not None and is_key(key) else None for index in indexes]


# --- by meta


def put(
    session_state: SessionState,
    names: Sequence[str] | Meta,
    partition: str,
    fields: Mapping[str, Any] | TensorDictBase | None,
    tags: tuple[c.TagColumn, ...] = (),
    mode: str = "upsert",
    *,
    listed: bool = False,
) -> Operation[c.Committed]:
    """Put into a partition, which is created if missing. Values of a field that do not fit its live rows go to its
    hidden column, as objects. The same commit removes these rows' values from the other column."""
    ids, encoded = ids_of(names), None if fields is None else columns.to_columns(fields)
    declared = columns.declared_fields(encoded or {})
    known = session_state.schemas.get(partition) or Schema()
    undeclared = {name: spec for name, spec in declared.items() if name not in known}
    if undeclared:
        yield extend(session_state, partition, fields=undeclared)

    def declare() -> Send:
        return extend(session_state, partition, fields=declared)

    while True:
        try:
            _, committed = yield from put_rows(
                session_state, names, ids, partition, encoded, tags, mode, declare, listed=listed
            )
            return committed
        except PartitionNotFoundError:
            yield declare()
        except SchemaError as error:
            if encoded is None or not columns.to_other_column(encoded, error):
                raise


def insert(
    session_state: SessionState,
    count: int,
    partition: str,
    fields: Mapping[str, Any] | None = None,
    coming: Sequence[str] = (),
) -> Operation[BatchMeta]:
    """Create samples without keys, with these fields if any. coming: fields that will be put later."""
    if count < 1:
        raise ValueError(f"{count} new samples: expected at least 1")
    batch = uuid4().hex
    names = [f"{UNNAMED}{batch}/{row}" for row in range(count)]
    made = yield from put(session_state, names, partition, fields, mode="create")
    meta = BatchMeta(
        made.generations.tolist(), [partition] * count, {name: columns.unknown_schema() for name in coming}
    )
    return meta._named(names, made.rows.tolist())


def put_batch(session_state: SessionState, meta: BatchMeta, data: Mapping[str, Any]) -> Operation[None]:
    """Put fields and the meta's tags for the samples of a meta."""
    parts = yield from named(session_state, meta)
    for places, names in parts:
        tags = [meta.custom_meta[place] for place in places]
        fields = data if len(parts) == 1 else columns.rows_at(data, places)
        encoded_tags = tag_columns(tags, len(tags)) if any(tags) else ()
        yield from put(session_state, names, names.partition_id, fields, encoded_tags)


def clear_batch(session_state: SessionState, meta: BatchMeta) -> Operation[None]:
    """Drop the samples of a meta. Samples that no longer exist are ignored."""
    for part in meta.chunk_by_partition():
        partition = part.partition_ids[0]
        try:
            rows, generations = part._rows, part.global_indexes
            if rows is None:
                found = yield from listed(session_state, partition)
                chosen = np.isin(found.generations, generations)
                rows, generations = found.rows[chosen].tolist(), found.generations[chosen].tolist()
            samples = c.Samples(rows=np.array(rows, np.int64), generations=np.array(generations, np.int64))
            yield Send(c.Clear(partition=partition, samples=samples))
        except PartitionNotFoundError:
            log.info("partition %r was not found; no samples were cleared", partition)


def set_tags(session_state: SessionState, meta: BatchMeta) -> Operation[None]:
    """Merge the meta's tags into those of its samples. An unknown partition is ignored."""
    for part in meta.chunk_by_partition():
        try:
            for places, names in (yield from named(session_state, part)):
                tags = tag_columns([part.custom_meta[place] for place in places], len(places))
                command = c.SetTags(partition=names.partition_id, samples=samples_of(names), tags=tags)
                yield from naming(names.sample_ids, command)
        except PartitionNotFoundError:
            log.warning("partition %r was not found; its custom_meta is ignored", part.partition_ids[0])


def whole_partition(session_state: SessionState, partition: str, fields: Sequence[str]) -> Operation[BatchMeta]:
    """Return the meta of every sample, ready or not, claimed or not."""
    found = yield from listed(session_state, partition)
    return (yield from batch_of(session_state, partition, found, fields))


# --- partitions and tasks


def partitions(session_state: SessionState) -> Operation[list[str]]:
    """Return the names of all partitions except the adapter's own."""
    report = yield from stats(session_state)
    return [part.partition for part in report.partitions if part.partition != ADAPTER]


def consumption(
    session_state: SessionState, task: str, partition: str, expected: int
) -> Operation[tuple[Tensor | None, Tensor | None]]:
    """Return the indexes of the samples, and 1 for each sample that the task has claimed. Each of the `expected`
    samples that has not been created yet has the index -1."""
    try:
        found = yield from listed(session_state, partition)
    except PartitionNotFoundError:
        return None, None
    peek = c.Claim(
        partition=partition, task=task, fields=(), batch_size=MAX_SAMPLES, min_batch_size=1, blocking=False, peek=True
    )
    try:
        unclaimed = (yield Send(peek)).result.generations
    except TaskNotFoundError:
        unclaimed = found.generations
    coming = 0
    if len(found.generations) < expected:
        report = yield from stats(session_state)
        created = sum(part.born for part in report.partitions if part.partition == partition)
        coming = max(expected - created, 0)
    status = ~np.isin(found.generations, unclaimed)
    return (
        torch.cat([torch.from_numpy(found.generations.copy()), torch.full((coming,), -1)]),
        torch.cat([torch.from_numpy(status.astype(np.int8)), torch.zeros(coming, dtype=torch.int8)]),
    )


def production(
    session_state: SessionState, fields: Sequence[str], partition: str
) -> Operation[tuple[Tensor | None, Tensor | None]]:
    """Return the indexes of the samples `[N]`, and 1 for each field that was put, `[N, F]`. (None, None) for an unknown
    partition or field."""
    try:
        described = (yield Send(c.Describe(partition=partition))).result
        if not fields or any(name not in described.fields for name in fields):
            return None, None
        found = yield from listed(session_state, partition)
        located = yield from _located(session_state, partition, found, fields)
    except PartitionNotFoundError:
        return None, None
    status = columns.produced(located, len(found.ids), fields)
    return torch.from_numpy(found.generations.copy()), torch.from_numpy(status)


def reset(session_state: SessionState, partition: str, task: str | None) -> Operation[bool]:
    """Reset the claims of the task (None: of all tasks). Return False if samples changed during every try."""
    for _ in range(TRIES):
        try:
            tasks = (yield Send(c.Describe(partition=partition))).result.tasks
            found = yield from listed(session_state, partition)
            samples = c.Samples(rows=found.rows, generations=found.generations)
            for name in tasks if task is None else [known for known in tasks if known == task]:
                yield Send(c.Nack(partition=partition, task=name, samples=samples))
        except PartitionNotFoundError:
            log.warning("partition %r was not found; no claims were reset", partition)
        except StaleSampleError:
            continue
        return True
    return False
