"""Reading, as operations of the client: what samples hold, copied into tensors of the caller's or as views of it.

Bytes are handed out only if they are what was written (where that has checksums), and only if the pins on them were
there until they were copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from dataplane import failpoints
from dataplane.batch import BatchedDataDict
from dataplane.columns import RowSource, assemble, checked, decode_batch
from dataplane.desk import Desk
from dataplane.errors import InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.meta import KVBatchMeta
from dataplane.operations import naming
from dataplane.patience import know, patient
from dataplane.roads import units_of
from dataplane.samples import Names, ids_of, samples_of
from dataplane.schema import Layout
from dataplane.steps import Operation, Post, Send, Work


@patient
def get(desk: Desk, names: Names, partition: str, select_fields: Sequence[str], copy: bool) -> Operation[TensorDict]:
    """The fields of the samples as a TensorDict; with `copy=False`, views where rows lie together."""
    if copy:

        def build(sources: Mapping[str, RowSource]) -> TensorDict:
            return assemble(sources, empty=desk.empty, copier=desk.copier.copy)

        return (yield from _read(desk, names, partition, select_fields, build))
    return (yield from _read_views(desk, names, partition, select_fields))


@patient
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
                sources,
                layout=layout,
                pad_value_dict=pad_value_dict,
                pad_to_seqlen=pad_to_seqlen,
                empty=desk.empty,
                copier=desk.copier.copy,
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


def _locate(desk: Desk, names: Names, ids: list[str], partition: str, select_fields: Sequence[str]) -> Operation[Any]:
    if isinstance(select_fields, str) or not select_fields:
        raise InvalidRequestError(f"select_fields={select_fields!r}: name at least one field, in a list")
    locate = c.Locate(partition=partition, samples=samples_of(names, ids), fields=tuple(select_fields))
    return (yield from naming(ids, locate))


def _read(
    desk: Desk,
    names: Names,
    partition: str,
    select_fields: Sequence[str],
    build: Callable[[Mapping[str, RowSource]], Any],
) -> Operation[Any]:
    ids = ids_of(names)
    located = yield from _locate(desk, names, ids, partition, select_fields)
    try:
        fields: tuple[c.FieldLocations, ...] = located.result.fields
        units = units_of(fields)
        yield from know(desk, units)

        def work() -> Any:
            failpoints.hit("get.mid_copy")
            return build(checked(desk.roads.gather(fields, units), fields, partition, ids))

        built = yield Work(work)
        yield from _pinned_until_now(desk)
        return built
    finally:
        failpoints.hit("get.before_release")
        yield Post(c.Release(located=located.number))


def _read_views(desk: Desk, names: Names, partition: str, select_fields: Sequence[str]) -> Operation[TensorDict]:
    """Like `_read`; the pin goes when the last view does."""
    ids = ids_of(names)
    located = yield from _locate(desk, names, ids, partition, select_fields)
    pins = [desk.pin(located.number)]
    try:
        fields: tuple[c.FieldLocations, ...] = located.result.fields
        units = units_of(fields)
        yield from know(desk, units)

        def work() -> TensorDict:
            failpoints.hit("get.mid_copy")
            sources = checked(desk.roads.gather(fields, units, guard=pins[0]), fields, partition, ids)
            return assemble(sources, copy=False, empty=desk.empty, copier=desk.copier.copy)

        views: TensorDict = yield Work(work)
        yield from _pinned_until_now(desk)
        return views
    finally:
        pins.clear()
        for number in desk.pins.dropped():
            yield Post(c.Release(located=number))


def _pinned_until_now(desk: Desk) -> Operation[None]:
    """Raises `SessionExpiredError` unless the pins on what was read have been there all the time: what was read is then
    to be discarded.

    A unit that sends bytes refuses whose pins may be gone, and pins on what this process has mapped stay while its lock
    does. Without the lock (something closed its descriptor, or removed the file) the service is asked: the session's
    end comes before that of any pin.
    """
    failpoints.hit("get.copied")
    if not desk.lock_stands:
        yield Send(c.Units())
