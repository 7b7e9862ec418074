"""Every operation of the client, written once as a generator of steps (see `steps`).

Each takes the `Desk` of the client's session. The docstrings of `DataPlaneClient` are their contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from dataplane import failpoints
from dataplane.batch import BatchedDataDict
from dataplane.columns import EncodedColumn, RowSource, assemble, declared_specs, decode_batch, encode_fields
from dataplane.desk import Desk
from dataplane.errors import InvalidRequestError, SchemaError, StaleSampleError
from dataplane.ledger import commands as c
from dataplane.meta import KVBatchMeta
from dataplane.samples import Names, ids_of, meta_of, samples_of, scalar, tag_columns
from dataplane.schema import Layout
from dataplane.steps import Operation, Post, Send, Work
from dataplane.types import FieldKind

PREDICATE_OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "in")


# --- put ------------------------------------------------------------------------------------------------------


def put(
    desk: Desk,
    names: Names,
    partition: str,
    fields: TensorDict | Mapping[str, Any] | None,
    tags: Sequence[Mapping[str, Any]] | None,
    mode: str,
) -> Operation[KVBatchMeta]:
    """Encode, allocate, copy, commit: the rows become visible all at once, or nothing is left behind."""
    ids = ids_of(names)
    samples = samples_of(names, ids)
    columns_of_tags = tag_columns(tags, len(ids))
    chosen = _mode(mode)
    if fields is None or not len(fields.keys()):
        commit = c.Commit(partition=partition, samples=samples, mode=chosen, tags=columns_of_tags)
        committed = (yield from _naming(ids, commit)).result
        return _put_meta(ids, partition, (), tags, committed)
    lengths = names.sequence_lengths if isinstance(names, KVBatchMeta) else None
    encoded = yield from _encode(desk, partition, fields, len(ids), lengths)
    try:
        committed = yield from _store(desk, partition, samples, ids, encoded, columns_of_tags, chosen)
    except SchemaError:
        if not (yield from _schema_moved(desk, partition)):
            raise
        encoded = yield from _encode(desk, partition, fields, len(ids), lengths)
        committed = yield from _store(desk, partition, samples, ids, encoded, columns_of_tags, chosen)
    return _put_meta(ids, partition, encoded, tags, committed)


def _mode(mode: str) -> c.Mode:
    try:
        return c.Mode(mode)
    except ValueError:
        raise InvalidRequestError(f"mode={mode!r}: expected one of {', '.join(c.Mode)}") from None


def _encode(
    desk: Desk,
    partition: str,
    fields: TensorDict | Mapping[str, Any],
    rows: int,
    token_lengths: Sequence[int] | None,
) -> Operation[list[EncodedColumn]]:
    """Columns as the partition's schema wants them; a schema this client remembers wrongly is asked for again once."""

    def encode() -> list[EncodedColumn]:
        specs = desk.schemas[partition]
        return encode_fields(fields, rows=rows, specs=specs, partition=partition, token_lengths=token_lengths)

    if partition not in desk.schemas:
        yield from _schema_moved(desk, partition)
        return encode()
    try:
        return encode()
    except SchemaError:
        if not (yield from _schema_moved(desk, partition)):
            raise
    return encode()


def _schema_moved(desk: Desk, partition: str) -> Operation[bool]:
    """Ask for the partition's schema; whether it differs from what was remembered."""
    before = desk.schemas.pop(partition, None)
    described = yield Send(c.Describe(partition=partition))
    desk.schemas[partition] = described.result.fields
    return bool(before != described.result.fields)


def _store(
    desk: Desk,
    partition: str,
    samples: c.Samples,
    ids: Sequence[str],
    encoded: Sequence[EncodedColumn],
    tags: tuple[c.TagColumn, ...],
    mode: c.Mode,
) -> Operation[c.Committed]:
    room = yield Send(
        c.Allocate(
            partition=partition,
            columns=tuple(c.ColumnSizes(name=column.name, sizes=column.sizes) for column in encoded),
            update=mode is c.Mode.UPDATE or samples.ids is None,
            timeout_s=desk.config.put_timeout_s,
        )
    )
    unfinished: set[int] = set()
    try:
        placements: tuple[c.Placement, ...] = room.result.placements
        yield from _know(desk, {placement.unit for placement in placements})
        yield Work(lambda: desk.roads.write(placements, encoded, room.number, unfinished))
        failpoints.hit("put.before_commit")
        commit = c.Commit(
            partition=partition,
            samples=samples,
            mode=mode,
            reservation=room.number,
            columns=tuple(
                c.CommitColumn(name=column.name, spec=column.spec, lengths=column.lengths, index=column.index)
                for column in encoded
            ),
            tags=tags,
        )
        return (yield from _naming(ids, commit)).result  # type: ignore[no-any-return]
    except BaseException:
        yield from _give_back(desk, room.number, unfinished)
        raise


def _give_back(desk: Desk, reservation: int, unfinished: set[int]) -> Operation[None]:
    """Free the room of a put that failed, unless one of the `unfinished` units may still write to it. Such room stays
    reserved until the session ends: then the service has the unit fence it first."""
    try:
        if unfinished:
            yield Work(lambda: desk.roads.stop(reservation, unfinished))
    finally:
        if not unfinished:
            yield Post(c.Abort(reservation=reservation))


def _naming(ids: Sequence[str], command: c.Command) -> Operation[Any]:
    """Send; an error about row handles is raised with the ids the caller knows them by."""
    try:
        return (yield Send(command))
    except StaleSampleError as error:
        raise error.with_ids(ids) from None


def _know(desk: Desk, units: set[int]) -> Operation[None]:
    if desk.roads.unknown(units):
        listed = yield Send(c.Units())
        desk.roads.learn(listed.result.units)


def _put_meta(
    ids: list[str],
    partition: str,
    encoded: Sequence[EncodedColumn],
    tags: Sequence[Mapping[str, Any]] | None,
    committed: c.Committed,
) -> KVBatchMeta:
    lengths = [
        column.lengths if column.index is None else column.lengths[column.index]
        for column in encoded
        if column.spec.kind is FieldKind.JAGGED
    ]
    agreed = bool(lengths) and all(np.array_equal(lengths[0], other) for other in lengths[1:])
    meta = KVBatchMeta(
        partition_id=partition,
        task_name=None,
        sample_ids=ids,
        fields=[column.name for column in encoded] or None,
        sequence_lengths=lengths[0].tolist() if agreed else None,
        tags=[dict(tag) for tag in tags] if tags is not None else None,
    )
    return meta.with_handles(committed.rows, committed.births)


# --- get ------------------------------------------------------------------------------------------------------


def get(desk: Desk, names: Names, partition: str, select_fields: Sequence[str], copy: bool) -> Operation[TensorDict]:
    """The fields of the samples as a TensorDict; with `copy=False`, views where rows lie together."""
    if copy:

        def build(sources: Mapping[str, RowSource]) -> TensorDict:
            return assemble(sources, empty=desk.empty)

        return (yield from _read(desk, names, partition, select_fields, build))
    return (yield from _read_views(desk, names, partition, select_fields))


def get_batch(
    desk: Desk,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    layout: Layout,
    pad_value_dict: Mapping[str, Any] | None,
    pad_to_seqlen: int,
) -> Operation[BatchedDataDict[Any]]:
    """The fields of the samples, gathered straight into padded tensors."""

    def build(sources: Mapping[str, RowSource]) -> BatchedDataDict[Any]:
        return BatchedDataDict(
            decode_batch(
                sources, layout=layout, pad_value_dict=pad_value_dict, pad_to_seqlen=pad_to_seqlen, empty=desk.empty
            )
        )

    batch: BatchedDataDict[Any] = yield from _read(desk, meta, meta.partition_id, select_fields, build)
    return batch


def chosen_fields(meta: KVBatchMeta, select_fields: Sequence[str] | None) -> Sequence[str]:
    """`select_fields`, else the meta's own. ValueError if neither names any."""
    chosen = meta.fields if select_fields is None else select_fields
    if not chosen:
        raise InvalidRequestError("name the fields to read: select_fields is empty and so is meta.fields")
    return chosen


def _locate(desk: Desk, names: Names, partition: str, select_fields: Sequence[str]) -> Operation[Any]:
    if isinstance(select_fields, str) or not select_fields:
        raise InvalidRequestError(f"select_fields={select_fields!r}: name at least one field, in a list")
    ids = ids_of(names)
    locate = c.Locate(partition=partition, samples=samples_of(names, ids), fields=tuple(select_fields))
    return (yield from _naming(ids, locate))


def _read(
    desk: Desk,
    names: Names,
    partition: str,
    select_fields: Sequence[str],
    build: Callable[[Mapping[str, RowSource]], Any],
) -> Operation[Any]:
    located = yield from _locate(desk, names, partition, select_fields)
    try:
        fields: tuple[c.FieldLocations, ...] = located.result.fields
        yield from _know(desk, _units(fields))

        def work() -> Any:
            failpoints.hit("get.mid_copy")
            return build(desk.roads.gather(fields))

        return (yield Work(work))
    finally:
        failpoints.hit("get.before_release")
        yield Post(c.Release(located=located.number))


def _read_views(desk: Desk, names: Names, partition: str, select_fields: Sequence[str]) -> Operation[TensorDict]:
    """Like `_read`; the pin goes when the last view does."""
    located = yield from _locate(desk, names, partition, select_fields)
    pins = [desk.pin(located.number)]
    try:
        fields: tuple[c.FieldLocations, ...] = located.result.fields
        yield from _know(desk, _units(fields))
        views: TensorDict = yield Work(lambda: assemble(desk.roads.gather(fields, guard=pins[0]), copy=False))
        return views
    finally:
        pins.clear()
        for number in desk.pins.dropped():
            yield Post(c.Release(located=number))


def _units(fields: Sequence[c.FieldLocations]) -> set[int]:
    return {int(unit) for field in fields for unit in np.unique(field.units)}


# --- cursors and the rest ---------------------------------------------------------------------------------------


def register(
    desk: Desk,
    partition: str,
    fields: Sequence[str] | Mapping[str, Any],
    num_samples: int | None,
    consumer_tasks: Sequence[str],
    grpo_group_size: int | None,
    enums: Mapping[str, Sequence[str]] | None,
    strict: bool,
) -> Operation[None]:
    """Declare a partition; what was remembered of its schema is forgotten."""
    command = c.Register(
        partition=partition,
        fields=declared_specs(fields),
        num_samples=num_samples,
        tasks=_names("consumer_tasks", consumer_tasks),
        group_size=grpo_group_size,
        enums=None if enums is None else {name: tuple(values) for name, values in enums.items()},
        strict=strict,
    )
    desk.schemas.pop(partition, None)
    yield Send(command)


def claim(desk: Desk, command: c.Claim, dp_rank: int | None) -> Operation[KVBatchMeta]:
    """Wait on the service for the claim; the samples come with tags and, from `input_lengths`, sequence lengths."""
    if command.batch_size < 1:
        raise InvalidRequestError(f"batch_size={command.batch_size}: claim at least one sample")
    claimed = yield Send(command)
    meta = meta_of(claimed.result, command.partition, task=command.task, fields=command.fields)
    if dp_rank is not None:
        meta.extra_info["dp_rank"] = dp_rank
    return meta


def claim_command(
    partition: str,
    task: str,
    required_fields: Sequence[str],
    batch_size: int,
    *,
    where: Sequence[tuple[str, str, Any]] = (),
    order: str = "oldest",
    **more: Any,
) -> c.Claim:
    """The command of a claim, its predicates and order checked."""
    try:
        chosen = c.Order(order)
    except ValueError:
        raise InvalidRequestError(f"order={order!r}: expected one of {', '.join(c.Order)}") from None
    return c.Claim(
        partition=partition,
        task=task,
        fields=_names("required_fields", required_fields),
        batch_size=batch_size,
        where=tuple(_predicate(number, part) for number, part in enumerate(where)),
        order=chosen,
        **more,
    )


def _predicate(number: int, part: tuple[str, str, Any]) -> c.Predicate:
    if len(part) != 3 or part[1] not in PREDICATE_OPERATORS:
        raise InvalidRequestError(
            f"where[{number}]={part!r}: expected (tag, operator, value) with one of {' '.join(PREDICATE_OPERATORS)}"
        )
    tag, op, value = part
    if op == "in":
        return c.Predicate(tag=tag, op=op, value=tuple(scalar(tag, row, item) for row, item in enumerate(value)))
    return c.Predicate(tag=tag, op=op, value=scalar(tag, number, value))


def _names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise InvalidRequestError(f"{what}={names!r}: pass a list of names, not one string")
    return tuple(names)


def list_samples(desk: Desk, partition: str) -> Operation[KVBatchMeta]:
    """Every live sample of the partition, oldest first."""
    listed = yield Send(c.List(partition=partition))
    return meta_of(listed.result, partition)


def clear(desk: Desk, names: Names | None, partition: str) -> Operation[None]:
    """Drop samples, or the partition with its schema."""
    if names is None:
        desk.schemas.pop(partition, None)
    yield Send(c.Clear(partition=partition, samples=None if names is None else samples_of(names)))


def set_tags(desk: Desk, names: Names, partition: str, tags: Sequence[Mapping[str, Any]]) -> Operation[None]:
    """Merge tags into live samples, all or none."""
    ids = ids_of(names)
    yield from _naming(
        ids, c.SetTags(partition=partition, samples=samples_of(names, ids), tags=tag_columns(tags, len(ids)))
    )


def about_claimed(desk: Desk, /, make: Callable[..., c.Command], meta: KVBatchMeta, **more: Any) -> Operation[None]:
    """Acknowledge, give back or extend what `meta` claimed."""
    if not meta.task_name:
        raise InvalidRequestError("this meta was not claimed by a task; pass one that claim_meta returned")
    command = make(partition=meta.partition_id, task=meta.task_name, samples=samples_of(meta), **more)
    yield from _naming(list(meta.sample_ids), command)


def consumed(desk: Desk, partition: str, task_names: Sequence[str]) -> Operation[bool]:
    """Whether the partition is complete and the tasks have claimed all of it."""
    checked = yield Send(c.CheckConsumption(partition=partition, tasks=_names("task_names", task_names)))
    return bool(checked.result.consumed)


def why_blocked(desk: Desk, partition: str, task: str, fields: Sequence[str]) -> Operation[c.Blocked]:
    """Why a claim would wait now."""
    asked = yield Send(c.WhyBlocked(partition=partition, task=task, fields=_names("required_fields", fields)))
    return asked.result  # type: ignore[no-any-return]


def stats(desk: Desk) -> Operation[c.StatsReport]:
    """What the service holds."""
    return (yield Send(c.Stats())).result  # type: ignore[no-any-return]


def ask(desk: Desk, command: c.Command) -> Operation[Any]:
    """Send one command and return its result."""
    return (yield Send(command)).result
