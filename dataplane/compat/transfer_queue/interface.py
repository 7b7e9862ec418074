"""The high-level interface, which addresses samples by key. Each function has a blocking and an async form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from dataplane.client.operations.steps import Operation
from dataplane.client.session_state import SessionState
from dataplane.compat.transfer_queue import columns, operations, reads
from dataplane.compat.transfer_queue.client import _key_list
from dataplane.compat.transfer_queue.columns import Parser
from dataplane.compat.transfer_queue.keyed import KVBatchMeta
from dataplane.compat.transfer_queue.session import current_client

Fields: TypeAlias = "TensorDict | Mapping[str, Any]"
Tag: TypeAlias = Mapping[str, Any]


def kv_put(
    key: str,
    partition_id: str,
    fields: Fields | None = None,
    tag: Tag | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Store fields and tags of one sample. Its other fields and tags stay. A missing partition is created.

    fields: a TensorDict of one row, or a mapping of the sample's values without a batch dimension. data_parser first
    maps the dict of fields to one with other values, in this process. Return the meta of the sample, with all its tags
    and fields. ValueError without fields and tag, and for nested tensors.
    """
    return current_client()._performer.do(_put, [key], partition_id, _one_row(fields, tag), _tag_list(tag), data_parser)


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: Fields | None = None,
    tag: Tag | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """See `kv_put`."""
    arguments = [key], partition_id, _one_row(fields, tag), _tag_list(tag), data_parser
    return await current_client()._performer.do_async(_put, *arguments)


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: Fields | None = None,
    tags: Sequence[Tag] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Store fields and tags of N samples atomically; see `kv_put`.

    fields: N rows each. tags: one mapping of scalars per key. Return the meta of the samples, with all their tags and
    the fields that all of them have. ValueError without both, and for a number of rows or tags other than N.
    """
    _check_batch(keys, fields, tags)
    return current_client()._performer.do(_put, keys, partition_id, fields, tags, data_parser)


async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: Fields | None = None,
    tags: Sequence[Tag] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """See `kv_batch_put`."""
    _check_batch(keys, fields, tags)
    return await current_client()._performer.do_async(_put, keys, partition_id, fields, tags, data_parser)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> TensorDict:
    """Return the fields (None: those that all keys have), sorted by name, of these keys, in this
    order: tensor rows nested, scalars `[N]`, objects in a NonTensorStack.

    Missing keys are omitted, as are fields that not all of the other keys have. Each omitted name is logged once, as a
    warning. `StorageKeyNotFoundError` (a KeyError and a ValueError) if no key exists or the keys have no field in
    common; with `strict_reads`, if any key or field is missing.
    """
    client = current_client()
    arguments = _key_list(keys), partition_id, _field_list(select_fields), client.strict_reads
    return client._performer.do(reads.get_keys, *arguments)


async def async_kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """See `kv_batch_get`."""
    client = current_client()
    arguments = _key_list(keys), partition_id, _field_list(select_fields), client.strict_reads
    return await client._performer.do_async(reads.get_keys, *arguments)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """Call `kv_batch_get` for the meta's keys. `select_fields` defaults to the meta's fields. ValueError if it names
    other fields."""
    return kv_batch_get(meta.keys, *_partition_and_fields(meta, select_fields))


async def async_kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """See `kv_batch_get_by_meta`."""
    return await async_kv_batch_get(meta.keys, *_partition_and_fields(meta, select_fields))


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the tags of every key, by partition (None: of all partitions). An unknown partition has no entry."""
    return current_client().kv_list(partition_id)


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """See `kv_list`."""
    return await current_client().async_kv_list(partition_id)


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Drop the samples of these keys. Unknown keys are ignored."""
    current_client()._performer.do(operations.clear_keys, _key_list(keys), partition_id)


async def async_kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """See `kv_clear`."""
    await current_client()._performer.do_async(operations.clear_keys, _key_list(keys), partition_id)


def _put(
    session_state: SessionState,
    keys: Sequence[str],
    partition: str,
    fields: Fields | None,
    tags: Sequence[Tag] | None,
    parse: Parser | None,
) -> Operation[KVBatchMeta]:
    """Put by key, and return the meta of the samples, with all their tags and the fields that all of them have."""
    if fields is not None and parse is not None:
        fields = columns.apply_parser(fields, parse)
    keys = list(keys)  # a copy, which becomes that of the meta
    all_tags, all_fields = yield from operations.put_keys(session_state, keys, partition, fields, tags)
    meta = KVBatchMeta(partition_id=partition, fields=all_fields)
    # Not passed above: __post_init__ would copy the tags, but nobody else has these lists.
    meta.keys, meta.tags = keys, all_tags
    return meta


def _one_row(fields: Fields | None, tag: Tag | None) -> Fields | None:
    """Return the fields of one sample as a batch of one row (None without fields). ValueError without fields and tag,
    unless `fields` is a TensorDict or a mapping, for nested tensors, and for names that are not strings."""
    if fields is None and tag is None:
        raise ValueError("kv_put: pass fields, a tag, or both")
    if fields is None or isinstance(fields, TensorDict):  # a TensorDict has one row already
        return fields
    if not isinstance(fields, Mapping):
        raise ValueError(f"kv_put: fields must be a TensorDict or a mapping, got {type(fields).__name__}")
    if any(isinstance(value, Tensor) and value.is_nested for value in fields.values()):
        raise ValueError("kv_put: a nested tensor is a batch of rows, but kv_put stores one row; use kv_batch_put")
    if any(type(name) is not str for name in fields):
        raise ValueError(f"kv_put: field names must be strings, got {list(fields)}")
    return {
        name: value.unsqueeze(0) if isinstance(value, Tensor) else NonTensorStack(value)
        for name, value in fields.items()
    }


def _tag_list(tag: Tag | None) -> list[Tag] | None:
    return None if tag is None else [tag]


def _check_batch(keys: Sequence[str], fields: Fields | None, tags: Sequence[Tag] | None) -> None:
    """Check the arguments of `kv_batch_put`. ValueError without fields and tags, and for a TensorDict of fields or a
    list of tags whose length is not the number of keys. (The put checks the fields of other mappings.)"""
    _key_list(keys)  # for its check only
    if fields is None and tags is None:
        raise ValueError("kv_batch_put: pass fields, tags, or both")
    if isinstance(fields, TensorDictBase) and fields.batch_size[0] != len(keys):
        raise ValueError(
            f"kv_batch_put: got fields of batch_size {list(fields.batch_size)} for {len(keys)} keys; pass one row "
            "per key"
        )
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"kv_batch_put: got {len(tags)} tags for {len(keys)} keys; pass one mapping per key")


def _field_list(fields: list[str] | str | None) -> list[str] | None:
    return [fields] if isinstance(fields, str) else fields


def _partition_and_fields(meta: KVBatchMeta, select_fields: list[str] | str | None) -> tuple[str, list[str] | None]:
    """Return the meta's partition, and the fields to read: `select_fields`, or by default those of the meta. ValueError
    without a partition, or if the meta lacks a selected field."""
    if meta.partition_id is None:
        raise ValueError("kv_batch_get_by_meta: the meta has no partition_id; set it to the partition of its keys")
    chosen = _field_list(select_fields)
    if chosen is None:
        return meta.partition_id, meta.fields
    unknown = [name for name in chosen if name not in (meta.fields or ())]
    if unknown:
        raise ValueError(
            f"kv_batch_get_by_meta: select_fields {unknown} were not found in the meta; it has the fields {meta.fields}"
        )
    return meta.partition_id, chosen
