"""What the adapter does with the service, each once: generators of steps, which the sync and the async client perform
like the client's own operations."""

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
"""Ids of samples that were put without keys begin so."""

ADAPTER = "dataplane.compat.transfer_queue"
"""The partition of what the adapter itself keeps in the service."""

EVERY = Limits().samples
TRIES = 8

Found = c.Claimed | c.Listed


def extend(
    session_state: SessionState, partition: str, *, tasks: Sequence[str] = (), fields: Mapping[str, Any] | None = None
) -> Send:
    """The step that makes the partition, or adds to it."""
    if fields:
        session_state.schemas.forget(partition)
    return Send(
        c.Register(partition=partition, fields=dict(fields or {}), num_samples=None, tasks=tuple(tasks), extend=True)
    )


def is_key(name: str) -> bool:
    """Whether a sample's id is a key that somebody gave it."""
    return not name.startswith(UNNAMED)


# --- metas


def batch_of(
    session_state: SessionState, partition: str, found: Found, fields: Sequence[str], status: int | None = None
) -> Operation[BatchMeta]:
    """The meta of samples that the service named; status: what is known already of all of them."""
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
    if not len(found.rows) or not fields:
        return ()
    samples = c.Samples(rows=found.rows, generations=found.generations)
    sent = yield Send(c.Locate(partition=partition, samples=samples, fields=tuple(fields), missing_ok=True))
    yield Post(c.Release(located=sent.number))
    located: Sequence[c.FieldLocations] = sent.result.fields
    return located


def listed(session_state: SessionState, partition: str, samples: c.Samples | None = None) -> Operation[c.Listed]:
    """All samples, oldest first, or these."""
    return (yield Send(c.List(partition=partition, samples=samples))).result  # type: ignore[no-any-return]


def named(session_state: SessionState, meta: BatchMeta) -> Operation[list[tuple[list[int], Meta]]]:
    """The samples of a meta as the service knows them, by partition: their places in the meta, and a meta of ours."""
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
        mine = Meta(partition_id=partition, task_name=None, sample_ids=names)
        found.append((places, mine.with_handles(np.array(rows, np.int64), np.array(generations, np.int64))))
    return found


def _by_index(
    session_state: SessionState, partition: str, indexes: Sequence[int]
) -> Operation[tuple[list[str], list[int]]]:
    """Ids and rows of samples of which only the global indexes are known."""
    every = yield from listed(session_state, partition)
    places = {generation: place for place, generation in enumerate(every.generations.tolist())}
    missing = [index for index in indexes if index not in places]
    if missing:
        raise StorageKeyNotFoundError(f"partition {partition!r} has no samples of indexes {first_few(missing)}")
    chosen = [places[index] for index in indexes]
    return [every.ids[place] for place in chosen], every.rows[chosen].tolist()


# --- by key


def of_keys(session_state: SessionState, keys: Sequence[str], partition: str, create: bool) -> Operation[BatchMeta]:
    """The samples of these keys that are there, with the fields that all of them have; `create` makes the missing
    ones, without fields."""
    try:
        if create:
            yield from put(session_state, keys, partition, None)
        found = yield from living(session_state, keys, partition)
        if len(found.ids) < len(keys):
            missing = sorted(set(keys).difference(found.ids))
            log.warning("partition %r: the keys %s were not found", partition, first_few(missing))
        return (yield from batch_of(session_state, partition, found, found.fields))
    except PartitionNotFoundError:
        log.warning("there is no partition %r", partition)
        return BatchMeta.empty()


def living(session_state: SessionState, keys: Sequence[str], partition: str) -> Operation[c.Listed]:
    """The samples of those of these keys that are there, one that comes twice twice."""
    samples = c.Samples(ids=tuple(keys))
    for _ in range(TRIES):
        try:
            return (yield from listed(session_state, partition, samples))
        except (SampleNotFoundError, StaleSampleError):
            every = c.Samples(ids=tuple(keys))
            sent = yield Send(c.Locate(partition=partition, samples=every, fields=(), missing_ok=True))
            yield Post(c.Release(located=sent.number))
            there = sent.result.rows >= 0
            samples = c.Samples(rows=sent.result.rows[there], generations=sent.result.generations[there])
    raise TransferQueueError(f"partition {partition!r}: its samples change faster than they can be looked up")


def put_keys(
    session_state: SessionState,
    keys: Sequence[str],
    partition: str,
    fields: Mapping[str, Any] | TensorDictBase | None,
    tags: Sequence[Mapping[str, Any]] | None,
) -> Operation[tuple[list[dict[str, Any]], list[str]]]:
    """Put by key; the tags and fields that the samples have then."""
    committed = yield from put(session_state, keys, partition, fields, tag_columns(tags, len(keys)), listed=True)
    return tags_of(committed.tags, len(keys)), sorted(committed.fields)


def clear_keys(session_state: SessionState, keys: Sequence[str], partition: str) -> Operation[None]:
    """Drop those of these keys that are there."""
    try:
        yield Send(c.Clear(partition=partition, samples=c.Samples(ids=tuple(keys))))
    except PartitionNotFoundError:
        log.warning("there is no partition %r to clear keys of", partition)


def list_keys(session_state: SessionState, partition: str | None) -> Operation[dict[str, dict[str, Any]]]:
    """The tags of every key, by partition; an unknown partition has none."""
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
    """The key of each sample; None for one that has none, or is not there."""
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
    """Put into a partition that is made if it is not there. Values of a field that do not fit its live rows go to its
    hidden column, as objects; those of these rows that are in the other column go with the same commit."""
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
            done = yield from put_rows(
                session_state, names, ids, partition, encoded, tags, mode, declare, listed=listed
            )
            return done[1]
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
    """New samples without keys, with these fields if any; `coming` are fields that will be put later."""
    if count < 1:
        raise ValueError(f"{count} new samples: put at least one")
    batch = uuid4().hex
    names = [f"{UNNAMED}{batch}/{row}" for row in range(count)]
    made = yield from put(session_state, names, partition, fields, mode="create")
    meta = BatchMeta(
        made.generations.tolist(), [partition] * count, {name: columns.unknown_schema() for name in coming}
    )
    return meta._named(names, made.rows.tolist())


def put_batch(session_state: SessionState, meta: BatchMeta, data: Mapping[str, Any]) -> Operation[None]:
    """Fields and tags of the samples of a meta."""
    parts = yield from named(session_state, meta)
    for places, names in parts:
        tags = [meta.custom_meta[place] for place in places]
        mine = data if len(parts) == 1 else columns.rows_at(data, places)
        told = tag_columns(tags, len(tags)) if any(tags) else ()
        yield from put(session_state, names, names.partition_id, mine, told)


def clear_batch(session_state: SessionState, meta: BatchMeta) -> Operation[None]:
    """Drop those samples of a meta that still are there."""
    for part in meta.chunk_by_partition():
        partition = part.partition_ids[0]
        try:
            rows, generations = part._rows, part.global_indexes
            if rows is None:
                every = yield from listed(session_state, partition)
                there = np.isin(every.generations, generations)
                rows, generations = every.rows[there].tolist(), every.generations[there].tolist()
            samples = c.Samples(rows=np.array(rows, np.int64), generations=np.array(generations, np.int64))
            yield Send(c.Clear(partition=partition, samples=samples))
        except PartitionNotFoundError:
            log.info("there is no partition %r to clear samples of", partition)


def set_tags(session_state: SessionState, meta: BatchMeta) -> Operation[None]:
    """Merge the meta's tags into those of its samples. A partition that is not there is ignored."""
    for part in meta.chunk_by_partition():
        try:
            for places, names in (yield from named(session_state, part)):
                tags = tag_columns([part.custom_meta[place] for place in places], len(places))
                told = c.SetTags(partition=names.partition_id, samples=samples_of(names), tags=tags)
                yield from naming(names.sample_ids, told)
        except PartitionNotFoundError:
            log.warning("there is no partition %r: its custom_meta is ignored", part.partition_ids[0])


def whole_partition(session_state: SessionState, partition: str, fields: Sequence[str]) -> Operation[BatchMeta]:
    """Every sample, ready or not, claimed or not."""
    found = yield from listed(session_state, partition)
    return (yield from batch_of(session_state, partition, found, fields))


# --- partitions and tasks


def partitions(session_state: SessionState) -> Operation[list[str]]:
    """All but the adapter's own."""
    report = yield from stats(session_state)
    return [found.partition for found in report.partitions if found.partition != ADAPTER]


def consumption(
    session_state: SessionState, task: str, partition: str, expected: int
) -> Operation[tuple[Tensor | None, Tensor | None]]:
    """Indexes of the samples, and 1 for those that the task has claimed. Until `expected` samples were born, an index
    of -1 stands for each that is to come."""
    try:
        every = yield from listed(session_state, partition)
    except PartitionNotFoundError:
        return None, None
    look = c.Claim(
        partition=partition, task=task, fields=(), batch_size=EVERY, min_batch_size=1, blocking=False, peek=True
    )
    try:
        unclaimed = (yield Send(look)).result.generations
    except TaskNotFoundError:
        unclaimed = every.generations
    coming = 0
    if len(every.generations) < expected:
        report = yield from stats(session_state)
        born = [found.born for found in report.partitions if found.partition == partition]
        coming = max(expected - sum(born), 0)
    status = ~np.isin(every.generations, unclaimed)
    return (
        torch.cat([torch.from_numpy(every.generations.copy()), torch.full((coming,), -1)]),
        torch.cat([torch.from_numpy(status.astype(np.int8)), torch.zeros(coming, dtype=torch.int8)]),
    )


def production(
    session_state: SessionState, fields: Sequence[str], partition: str
) -> Operation[tuple[Tensor | None, Tensor | None]]:
    """Indexes of the samples, and for each field 1 where it was put, `[N, F]`; (None, None) for what is unknown."""
    try:
        described = (yield Send(c.Describe(partition=partition))).result
        if not fields or any(name not in described.fields for name in fields):
            return None, None
        every = yield from listed(session_state, partition)
        located = yield from _located(session_state, partition, every, fields)
    except PartitionNotFoundError:
        return None, None
    status = columns.produced(located, len(every.ids), fields)
    return torch.from_numpy(every.generations.copy()), torch.from_numpy(status)


def reset(session_state: SessionState, partition: str, task: str | None) -> Operation[bool]:
    """Nothing counts as claimed any more, by the task or by all of them."""
    for _ in range(TRIES):
        try:
            tasks = (yield Send(c.Describe(partition=partition))).result.tasks
            every = yield from listed(session_state, partition)
            samples = c.Samples(rows=every.rows, generations=every.generations)
            for name in tasks if task is None else [found for found in tasks if found == task]:
                yield Send(c.Nack(partition=partition, task=name, samples=samples))
        except PartitionNotFoundError:
            log.warning("there is no partition %r to reset", partition)
        except StaleSampleError:
            continue
        return True
    return False
