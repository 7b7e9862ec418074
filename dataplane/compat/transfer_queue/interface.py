"""The high-level interface, which addresses samples by key. Each function has a blocking and an
async form, made from one operation (see `performer`)."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from tensordict import NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from dataplane.client.operations.steps import Operation
from dataplane.client.session_state import SessionState
from dataplane.compat.transfer_queue import columns, fetching, operations
from dataplane.compat.transfer_queue.client import TransferQueueClient, instance_of, key_list
from dataplane.compat.transfer_queue.columns import Parser, tags_of
from dataplane.compat.transfer_queue.metadata import KVBatchMeta
from dataplane.compat.transfer_queue.performer import describe, twins
from dataplane.compat.transfer_queue.session import current_client, get_client
from dataplane.core.private_dir import MODE, private
from dataplane.data.meta import list_of_names, name_of

P = ParamSpec("P")
T = TypeVar("T")
Fields: TypeAlias = "TensorDictBase | Mapping[str, Any]"
Tag: TypeAlias = Mapping[str, Any]


def _one_row(fields: Fields | None, tag: Tag | None, parse: Parser | None) -> Fields | None:
    """Return the fields of one sample as a batch of one row (None without fields), tensors as lists
    unless a parser gets them. ValueError without fields and tag, unless `fields` is a TensorDict or
    a mapping, for nested tensors, and for names that are not strings."""
    if fields is None and tag is None:
        raise ValueError("kv_put: pass fields, a tag, or both")
    if fields is None or isinstance(fields, TensorDict):  # a TensorDict has one row already
        return fields
    if not isinstance(fields, Mapping):
        raise ValueError(f"kv_put: fields must be a TensorDict or a mapping, got {type(fields).__name__}")
    rows: dict[str, Any] = {}
    for name, value in fields.items():
        if type(name) is not str:
            raise ValueError(f"kv_put: field names must be strings, got {list(fields)}")
        if isinstance(value, Tensor):
            if value.is_nested:
                what = "a nested tensor is a batch of rows, but kv_put stores one row"
                raise ValueError(f"kv_put: {what}; use kv_batch_put")
            rows[name] = [value] if parse is None else value.unsqueeze(0)
        else:
            rows[name] = NonTensorStack(value) if is_tensor_collection(value) else [value]
    return rows


def _field_list(fields: list[str] | str | None) -> list[str] | None:
    """Return the fields of the argument `select_fields` as a list. None stays None."""
    if fields is None:
        return None
    return [fields] if isinstance(fields, str) else list_of_names("select_fields", fields)


def _kv_put(
    client: TransferQueueClient,
    session_state: SessionState,
    key: str,
    partition_id: str,
    fields: Fields | None = None,
    tag: Tag | None = None,
    data_parser: Parser | None = None,
) -> Operation[KVBatchMeta]:
    """Store fields and tags of one sample. Its other fields and tags stay. A missing partition is
    created.

    fields: a TensorDict of one row, or a mapping of the sample's values without a batch dimension.
    data_parser first maps the dict of fields to one with other values, in this process. Return the
    meta of the sample, with all its tags and fields. ValueError without fields and tag, and for
    nested tensors.
    """
    rows = _one_row(fields, tag, data_parser)
    tags = None if tag is None else [tag]
    return _put(session_state, [name_of("key", key)], partition_id, rows, tags, data_parser)


def _kv_batch_put(
    client: TransferQueueClient,
    session_state: SessionState,
    keys: list[str],
    partition_id: str,
    fields: Fields | None = None,
    tags: Sequence[Tag] | None = None,
    data_parser: Parser | None = None,
) -> Operation[KVBatchMeta]:
    """Store fields and tags of N samples atomically; see `kv_put`.

    fields: N rows each. tags: one mapping of scalars per key. Return the meta of the samples, with
    all their tags and the fields that all of them have. ValueError without both, and for a number
    of rows or tags other than N.
    """
    key_list(keys)  # for its check only
    if fields is None and tags is None:
        raise ValueError("kv_batch_put: pass fields, tags, or both")
    if fields is not None and not isinstance(fields, Mapping | TensorDictBase):
        raise TypeError(f"fields: expected a TensorDict or a mapping, got {type(fields).__name__}")
    if tags is not None and not isinstance(tags, Sequence):
        raise TypeError(f"tags: expected a list of mappings, got {type(tags).__name__}")
    # The put checks the rows of other mappings.
    if isinstance(fields, TensorDictBase) and columns.row_count(fields) != len(keys):
        raise ValueError(
            f"kv_batch_put: got fields of batch_size {list(fields.batch_size)} for {len(keys)} "
            "keys; pass one row per key"
        )
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"kv_batch_put: got {len(tags)} tags for {len(keys)} keys; pass one mapping per key")
    return _put(session_state, keys, partition_id, fields, tags, data_parser)


def _put(
    session_state: SessionState,
    keys: Sequence[str],
    partition: str,
    fields: Fields | None,
    tags: Sequence[Tag] | None,
    parse: Parser | None,
) -> Operation[KVBatchMeta]:
    """Put by key. Return the meta of the samples, with all their tags and the fields that all of
    them have, after the put."""
    if fields is not None:
        fields = columns.apply_parser(fields, parse)
    keys = list(keys)  # a copy, which becomes that of the meta
    committed = yield from operations.put(session_state, keys, partition, fields, tags, listed=True)
    tags_put = tags_of(committed.tags, len(keys))
    return KVBatchMeta.of_put(keys, tags_put, partition, sorted(committed.fields))


def _kv_batch_get(
    client: TransferQueueClient,
    session_state: SessionState,
    keys: list[str] | str,
    partition_id: str,
    select_fields: list[str] | str | None = None,
) -> Operation[TensorDict]:
    """Return the fields (None: those that all keys have), sorted by name, of these keys, in this
    order: tensor rows nested, scalars `[N]`, objects in a NonTensorStack.

    Missing keys are omitted, as are fields that not all of the other keys have. Each omitted name
    is logged once, as a warning. `StorageKeyNotFoundError` (a KeyError and a ValueError) if no key
    exists or the keys have no field in common; with `strict_reads`, if any key or field is missing.
    """
    fields = _field_list(select_fields)
    strict = client.strict_reads
    return (
        yield from operations.get_keys(
            session_state,
            key_list(keys),
            partition_id,
            fields,
            strict,
        )
    )


def _kv_batch_get_by_meta(
    client: TransferQueueClient,
    session_state: SessionState,
    meta: KVBatchMeta,
    select_fields: list[str] | str | None = None,
) -> Operation[TensorDict]:
    """Call `kv_batch_get` for the meta's keys. `select_fields` defaults to the meta's fields.
    ValueError if it names other fields, and for a meta without a partition."""
    partition = instance_of(KVBatchMeta, "meta", meta).partition_id
    if partition is None:
        raise ValueError("kv_batch_get_by_meta: the meta has no partition_id; set it to the partition of its keys")
    chosen = _field_list(select_fields)
    unknown = [name for name in chosen or () if name not in (meta.fields or ())]
    if unknown:
        raise ValueError(
            f"kv_batch_get_by_meta: select_fields {unknown} were not found in the meta; it has the fields {meta.fields}"
        )
    fields = meta.fields if chosen is None else chosen
    return (yield from _kv_batch_get(client, session_state, meta.keys, partition, fields))


def _kv_clear(
    client: TransferQueueClient,
    session_state: SessionState,
    keys: list[str] | str,
    partition_id: str,
) -> Operation[None]:
    """Drop the samples of these keys. Unknown keys are ignored."""
    return operations.clear_keys(session_state, key_list(keys), partition_id)


def _functions(
    operation: Callable[Concatenate[TransferQueueClient, SessionState, P], Operation[T]],
) -> tuple[Callable[P, T], Callable[P, Coroutine[Any, Any, T]]]:
    """Return the blocking and the async function that perform the operation with this process's
    client."""
    perform, perform_async = twins(operation)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return perform(current_client(), *args, **kwargs)

    async def call_async(*args: P.args, **kwargs: P.kwargs) -> T:
        return await perform_async(current_client(), *args, **kwargs)

    blocking = describe(call, operation, client=False)
    return blocking, describe(call_async, operation, prefix="async_", client=False)


kv_put, async_kv_put = _functions(_kv_put)
kv_batch_put, async_kv_batch_put = _functions(_kv_batch_put)
kv_batch_get, async_kv_batch_get = _functions(_kv_batch_get)
kv_batch_get_by_meta, async_kv_batch_get_by_meta = _functions(_kv_batch_get_by_meta)
kv_list, async_kv_list = _functions(TransferQueueClient._kv_list)
kv_clear, async_kv_clear = _functions(_kv_clear)


log = logging.getLogger(__name__)

METADATA = "metadata.json"
SAMPLES = "samples"


def save_checkpoint(
    checkpoint_dir: str | Path,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save a consistent snapshot of all partitions: samples, tags, and the samples that each task
    has consumed.

    checkpoint_dir: a path on this machine, created with permissions for this user only. An older
    checkpoint there is replaced when this one is complete. include_storage: False is ignored,
    samples are always saved. metadata: values that JSON can represent. RuntimeError before
    `init()`, `CheckpointWriteError` (an OSError) if the disk fails."""
    client = get_client()
    if not include_storage:
        log.warning("include_storage=False is ignored: a checkpoint without samples could not be loaded")
    save_from(client, checkpoint_dir, metadata)


def save_from(
    client: TransferQueueClient,
    directory: str | Path,
    metadata: Mapping[str, Any] | None,
) -> None:
    """Implement `save_checkpoint` for this client."""
    target = _path(directory)
    new = _sibling(target, "tmp")
    old = _sibling(target, "old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(MODE, parents=True)
    try:
        names = client.get_partition_list()
        if names:  # a checkpoint of no partitions has only the metadata
            client._performer.client.checkpoint(new / SAMPLES, names)
        _write_json(new / METADATA, {"storage_saved": True, "user_metadata": dict(metadata or {})})
        _fsync_directory(new)
        # Write beside the target, then rename: at any instant a complete checkpoint is at `target`
        # or at `old`.
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)  # left by an interrupted save
            target.rename(old)
        new.rename(target)
        _fsync_directory(target.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not target.exists():  # between the two renames: put the older checkpoint back
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replace all partitions by the saved ones. Samples get new global indexes: older metas are
    rejected, and batches that ranks share are drawn again.

    All checksums are verified first (`CheckpointError`, a ValueError, names the damaged file). The
    saved partitions are restored atomically; then all other partitions are dropped.
    FileNotFoundError without a checkpoint, RuntimeError before `init()`."""
    load_into(get_client(), checkpoint_dir)


def load_into(client: TransferQueueClient, directory: str | Path) -> None:
    """Implement `load_checkpoint` for this client."""
    source = _path(directory)
    old = _sibling(source, "old")
    if not source.exists() and old.exists():  # a save ended between its two renames; see `save_from`
        log.warning("a save to %s was interrupted: the previous checkpoint is loaded", source)
        old.rename(source)
    if not (source / METADATA).exists():
        raise FileNotFoundError(f"no checkpoint was found in {source}: {METADATA} is missing")
    restored: set[str] = set()
    if (source / SAMPLES).exists():
        restored = set(client._performer.client.restore(source / SAMPLES, replace=True).partitions)
    for name in client.get_partition_list():
        if name not in restored:
            client.clear_partition(name)
    for name in restored:  # `clear_partition` has deleted the draws of the others
        client._performer.do(fetching.forget_draws, name)


def _path(directory: str | Path) -> Path:
    """Return the absolute path. TypeError for another type than a path."""
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"checkpoint_dir: expected a path, got {type(directory).__name__}")
    return Path(directory).absolute()


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a new file with permissions for this user only, and flush it to disk."""
    with open(path, "x", encoding="utf-8", opener=private) as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(directory: Path) -> None:
    """Flush the directory's entries to disk, so that new and renamed files are still there after a
    power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
