"""The client of the low-level interface, which addresses batches of samples by `BatchMeta`."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from numbers import Integral
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from dataplane.client.operations import get, partitions
from dataplane.client.operations.sample_names import samples_of, send_for_samples
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.compat.transfer_queue import columns, fetching, operations
from dataplane.compat.transfer_queue.columns import Parser, tag_columns, tags_of
from dataplane.compat.transfer_queue.errors import RefusedCallError, TransferQueueError
from dataplane.compat.transfer_queue.metadata import BatchMeta
from dataplane.compat.transfer_queue.performer import Performer, twins
from dataplane.compat.transfer_queue.sampler import BaseSampler
from dataplane.compat.transfer_queue.settings import attach_config, sampling_of, warn_once
from dataplane.data.meta import list_of_names, name_of
from dataplane.errors import (
    NotFoundError,
    PartitionNotFoundError,
    SampleExistsError,
    StaleSampleError,
    TaskNotFoundError,
    first_few,
)
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)

E = TypeVar("E")
Status: TypeAlias = tuple[Tensor | None, Tensor | None]

CONFIG = "config"
"""Id and field of the sample in which the service stores the settings."""


class AsyncTransferQueueClient:
    """A client of one service. Each call has a blocking form, and an `async_` form that is usable
    from any event loop. Thread-safe.

    client_id: only kept as an attribute. controller_info: the service's address, or the
    `controller.zmq_info` that `init()` returned. zmq_io_threads and zmq_max_sockets are accepted
    and ignored.

    A missing key, sample, field or partition raises `StorageKeyNotFoundError`; other errors are
    those of `dataplane.errors`.

    _performer: performs operations (generators of steps), in the calling thread or awaited.
    _local_sampler: the sampler that was passed to `init()` in this process (None: none); `session`
    sets it. _stored_settings: a copy of the settings that the service stores for all processes
    (None: not read yet, or the service has none)."""

    def __init__(
        self,
        client_id: str,
        controller_info: Any,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        for name, value in (("zmq_io_threads", zmq_io_threads), ("zmq_max_sockets", zmq_max_sockets)):
            if value is not None:
                warn_once(f"{name}={value!r} is not used: a client has one background thread and few sockets")
        self.client_id = client_id
        self.config = attach_config(controller_info)
        self._performer = Performer(self.config)
        self._local_sampler: BaseSampler | None = None
        self._stored_settings: dict[str, Any] | None = None

    def initialize_storage_manager(self, manager_type: str, config: Any) -> None:
        """Do nothing: the service provides the addresses of the storage units."""
        log.debug("initialize_storage_manager(%r) does nothing", manager_type)

    def close(self) -> None:
        """Wait for copies in flight and end the sessions. Idempotent."""
        self._performer.close()

    # --- operations of both clients: each has the docstring and the signature of its two forms

    def _get_meta(
        self,
        session_state: SessionState,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> Operation[BatchMeta]:
        """Claim `batch_size` samples that have all `data_fields` for the task. The sampler, which
        gets the entries of `sampling_config`, chooses them. Return their meta.

        If too few samples are ready: with `polling_mode`, return an empty meta at once. Otherwise
        block, and raise `FetchTimeoutError` (a RuntimeError and a TimeoutError) after
        TQ_CONTROLLER_GET_METADATA_TIMEOUT or TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL seconds,
        whichever is more. An unknown partition has no ready samples; a call that waits for some
        creates it.

        mode: "fetch". "force_fetch": return all samples, ready or not, without a claim;
        `StorageKeyNotFoundError` for an unknown partition; `batch_size` is ignored. "insert":
        create samples without keys and data, and the partition if missing; none for a `batch_size`
        of 0. `RefusedCallError` (a RuntimeError and a ValueError) for arguments that the original's
        controller rejects, and for a negative `batch_size` in "fetch".
        """
        if data_fields is None:
            raise RefusedCallError("get_meta: data_fields is None; pass a list of names")
        data_fields = list_of_names("data_fields", data_fields)
        if mode == "force_fetch":
            samples = yield from operations.list_samples(session_state, partition_id)
            return (
                yield from operations.build_batch_meta(
                    session_state,
                    partition_id,
                    samples,
                    data_fields,
                )
            )
        if not isinstance(batch_size, Integral):
            raise RefusedCallError(
                f"get_meta: batch_size={batch_size!r}: expected an int, got {type(batch_size).__name__}"
            )
        count = int(batch_size)
        if mode == "insert":
            return (
                yield from operations.insert_samples(
                    session_state,
                    count,
                    partition_id,
                    coming=data_fields,
                )
            )
        if mode != "fetch":
            raise RefusedCallError(f"mode={mode!r}: expected one of fetch, force_fetch, insert")
        if not task_name:
            raise RefusedCallError("get_meta: task_name is empty; pass the name of the task that claims the samples")
        stored = yield from self.exchange_settings(session_state, to_store=None)
        sampling = sampling_of(stored, self._local_sampler)
        if count == 0 and sampling.polling:
            return BatchMeta.empty()
        if count < 1:
            raise RefusedCallError(f"batch_size={batch_size}: expected at least 1")
        request = fetching.BatchRequest(
            partition=name_of("partition_id", partition_id),
            task=name_of("task_name", task_name),
            fields=tuple(data_fields),
            batch_size=count,
            config={
                "task_name": task_name,
                "partition_id": partition_id,
                **(sampling_config or {}),
            },
        )
        return (yield from fetching.fetch(session_state, request, sampling))

    def _set_custom_meta(self, session_state: SessionState, metadata: BatchMeta) -> Operation[None]:
        """Merge the meta's `custom_meta` into the tags of its samples. An unknown partition is
        ignored."""
        for chunk in instance_of(BatchMeta, "metadata", metadata).chunk_by_partition():
            try:
                # One partition: only one pair.
                [(_, samples)] = yield from operations.resolve_samples(session_state, chunk)
                command = c.SetTags(
                    partition=samples.partition_id,
                    samples=samples_of(samples, samples.partition_id),
                    tags=tag_columns(chunk.custom_meta, chunk.size),
                )
                yield from send_for_samples(samples.sample_ids, command)
            except PartitionNotFoundError:
                log.warning(
                    "partition %r was not found; its custom_meta is ignored",
                    chunk.partition_ids[0],
                )

    def _put(
        self,
        session_state: SessionState,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> Operation[BatchMeta]:
        """Store fields and the meta's tags for the meta's samples, or, without a meta, for new
        samples in `partition_id`. The put is atomic. `data_parser` first maps the dict of fields to
        one with other values, in this process.

        Return the meta, with the new fields added. `StorageKeyNotFoundError` for samples that were
        cleared since. ValueError without meta and partition, and for a meta or data without
        samples. The first put into a partition creates it.
        """
        if metadata is None:
            if partition_id is None:
                raise ValueError("put: pass the partition_id of new samples, or the metadata of existing ones")
            rows = columns.row_count(data)
            if not rows:
                raise ValueError("put: the data has no rows; pass at least one")
            fields = columns.apply_parser(data, data_parser)
            metadata = yield from operations.insert_samples(
                session_state,
                rows,
                partition_id,
                fields,
            )
        elif not instance_of(BatchMeta, "metadata", metadata):
            raise ValueError("put: the metadata is empty; it must name at least one sample")
        else:
            columns.row_count(data)  # raises before anything is stored
            fields = columns.apply_parser(data, data_parser)
            yield from operations.put_batch(session_state, metadata, fields)
        return metadata.add_fields(data)  # only their schema

    def _get_data(self, session_state: SessionState, metadata: BatchMeta) -> Operation[TensorDict]:
        """Return the meta's fields of its samples: tensor rows nested, scalars `[N]`, objects in a
        NonTensorStack. `StorageKeyNotFoundError` if a sample or field is missing."""
        if metadata is not None:
            instance_of(BatchMeta, "metadata", metadata)
        if not metadata or not metadata.field_names:
            log.warning("get_data: the meta has no samples or no fields; an empty TensorDict is returned")
            return TensorDict({}, batch_size=0)
        return (yield from operations.get_batch(session_state, metadata))

    def _clear_partition(self, session_state: SessionState, partition_id: str) -> Operation[None]:
        """Drop the partition with all samples. Callers that wait on it get a
        `PartitionDroppedError`."""
        yield from partitions.clear(session_state, names=None, partition=partition_id)
        yield from fetching.forget_draws(session_state, partition_id)
        if self._local_sampler is not None:
            self._local_sampler.clear_cache(partition_id)

    def _clear_samples(self, session_state: SessionState, metadata: BatchMeta) -> Operation[None]:
        """Drop the samples of the meta. Samples that no longer exist are ignored."""
        for chunk in instance_of(BatchMeta, "metadata", metadata).chunk_by_partition():
            partition = chunk.partition_ids[0]
            try:
                rows = chunk._rows
                generations = chunk.global_indexes
                if rows is None:  # a meta that the caller built from global indexes
                    existing = yield from operations.list_samples(session_state, partition)
                    chosen = np.isin(existing.generations, generations)
                    rows = existing.rows[chosen].tolist()
                    generations = existing.generations[chosen].tolist()
                samples = c.Samples(
                    rows=np.array(rows, np.int64),
                    generations=np.array(generations, np.int64),
                )
                yield Send(c.Clear(partition=partition, samples=samples))
            except PartitionNotFoundError:
                log.info("partition %r was not found; no samples were cleared", partition)

    def _get_consumption_status(
        self, session_state: SessionState, task_name: str, partition_id: str
    ) -> Operation[Status]:
        """Return the samples' indexes `[N]`, and `[N]` with 1 for each sample that the task has
        claimed. (None, None) for an unknown partition.

        Until as many samples were created as expected (TQ_PRE_ALLOC_SAMPLE_NUM, by default 1), each
        missing one has the index -1 and the status 0.
        """
        stored = yield from self.exchange_settings(session_state, to_store=None)
        expected = 1 if stored is None else int(stored["expected"])  # see `settings_to_store`
        try:
            samples = yield from operations.list_samples(session_state, partition_id)
        except PartitionNotFoundError:
            return None, None
        peek = c.Claim(
            partition=partition_id,
            task=task_name,
            fields=(),
            batch_size=operations.MAX_SAMPLES,
            min_batch_size=1,
            blocking=False,
            peek=True,
        )
        try:
            # Without fields, every unclaimed sample is ready.
            unclaimed = (yield Send(peek)).result.generations
        except TaskNotFoundError:
            unclaimed = samples.generations  # a task that does not exist has claimed nothing
        not_created = 0
        if len(samples.generations) < expected:
            # Cleared samples count as created, so the number of live samples is not enough.
            report = yield from partitions.stats(session_state)
            created = sum(each.born for each in report.partitions if each.partition == partition_id)
            not_created = max(expected - created, 0)
        claimed = ~np.isin(samples.generations, unclaimed)
        indexes = np.append(samples.generations, np.full(not_created, -1))
        status = np.append(claimed, np.zeros(not_created, np.bool_))
        return torch.from_numpy(indexes), torch.from_numpy(status.astype(np.int8))

    def _get_production_status(
        self, session_state: SessionState, data_fields: list[str], partition_id: str
    ) -> Operation[Status]:
        """Return the samples' indexes `[N]`, and `[N, F]` with 1 where the sample has the field.
        The F columns are the distinct fields in the order in which the partition got them, not in
        that of `data_fields`. (None, None) for an unknown partition or field, or without fields."""
        try:
            known = (yield Send(c.Describe(partition=partition_id))).result.fields
            if not data_fields:
                return None, None
            data_fields = list_of_names("data_fields", data_fields)
            if any(name not in known for name in data_fields):
                return None, None
            requested = set(data_fields)
            fields = [name for name in known if name in requested]
            samples = yield from operations.list_samples(session_state, partition_id)
            locations = yield from operations.locate_fields(
                session_state,
                partition_id,
                samples,
                fields,
            )
        except PartitionNotFoundError:
            return None, None
        status = columns.produced(locations, len(samples.ids), fields)
        # Copied, because torch has no read-only tensors, and received arrays can be read-only.
        return torch.from_numpy(samples.generations.copy()), torch.from_numpy(status)

    def _check_consumption_status(
        self, session_state: SessionState, task_name: str, partition_id: str
    ) -> Operation[bool]:
        """Whether the task has claimed all samples of the partition, at least one. False until as
        many were created as expected (TQ_PRE_ALLOC_SAMPLE_NUM, by default 1)."""
        _, status = yield from self._get_consumption_status(session_state, task_name, partition_id)
        return status is not None and status.numel() > 0 and bool((status == 1).all())

    def _check_production_status(
        self, session_state: SessionState, data_fields: list[str], partition_id: str
    ) -> Operation[bool]:
        """Whether all samples have all these fields."""
        _, status = yield from self._get_production_status(session_state, data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    def _reset_consumption(
        self, session_state: SessionState, partition_id: str, task_name: str | None = None
    ) -> Operation[bool]:
        """Reset the claims of the task (None: of every task), so that it can claim all samples
        again. Return False if other clients cleared samples during every attempt. An unknown
        partition is logged and has nothing to reset."""
        for _ in range(operations.TRIES):
            try:
                tasks = (yield Send(c.Describe(partition=partition_id))).result.tasks
                live = yield from operations.list_samples(session_state, partition_id)
                samples = c.Samples(rows=live.rows, generations=live.generations)
                for name in tasks:
                    if task_name is None or name == task_name:
                        # Without claim ids: all samples that are not on lease, whichever claim
                        # consumed them.
                        yield Send(c.Nack(partition=partition_id, task=name, samples=samples))
            except PartitionNotFoundError:
                log.warning("partition %r was not found; no claims were reset", partition_id)
            except StaleSampleError:
                continue  # a sample was cleared after it was listed
            return True  # also if the partition was not found
        return False

    def _get_partition_list(self, session_state: SessionState) -> Operation[list[str]]:
        """Return the names of all partitions."""
        report = yield from partitions.stats(session_state)
        names = [each.partition for each in report.partitions]
        return [name for name in names if name != operations.ADAPTER]

    def _kv_retrieve_meta(
        self,
        session_state: SessionState,
        keys: list[str] | str,
        partition_id: str,
        create: bool = False,
    ) -> Operation[BatchMeta]:
        """Return the meta of these keys, with the fields that all of them have. Unknown keys are
        omitted, or created with `create`, without fields."""
        keys = key_list(keys)
        try:
            if create:
                distinct = list(dict.fromkeys(keys))
                yield from operations.put(session_state, distinct, partition_id, fields=None)
            samples = yield from operations.list_samples_of_keys(session_state, keys, partition_id)
            if len(samples.ids) < len(keys):
                missing = sorted(set(keys).difference(samples.ids))
                log.warning(
                    "partition %r: the keys %s were not found",
                    partition_id,
                    first_few(missing),
                )
            return (
                yield from operations.build_batch_meta(
                    session_state,
                    partition_id,
                    samples,
                    samples.fields,
                )
            )
        except PartitionNotFoundError:
            log.warning("partition %r was not found; an empty meta is returned", partition_id)
            return BatchMeta.empty()

    def _kv_retrieve_keys(
        self, session_state: SessionState, global_indexes: list[int] | int, partition_id: str
    ) -> Operation[list[str | None]]:
        """Return the key of each sample, or None for a sample without a key or that does not exist.
        `TransferQueueError` for an unknown partition."""
        indexes = _list_of(int, "global_indexes", global_indexes)
        try:
            samples = yield from operations.list_samples(session_state, partition_id)
        except PartitionNotFoundError:
            raise TransferQueueError(f"kv_retrieve_keys: partition {partition_id!r} was not found") from None
        names = dict(zip(samples.generations.tolist(), samples.ids, strict=True))
        keys = {index: name for index, name in names.items() if operations.is_key(name)}
        return [keys.get(index) for index in indexes]

    def _kv_list(
        self, session_state: SessionState, partition_id: str | None = None
    ) -> Operation[dict[str, dict[str, Any]]]:
        """Return the tags of every key, by partition (None: of all partitions). An unknown
        partition has no entry."""
        names: list[str]
        if partition_id is None:
            names = yield from self._get_partition_list(session_state)
        else:
            names = [partition_id]
        tags_by_partition: dict[str, dict[str, Any]] = {}
        for name in names:
            try:
                samples = yield from operations.list_samples(session_state, name)
            except PartitionNotFoundError:
                continue
            tags = dict(zip(samples.ids, tags_of(samples.tags, len(samples.ids)), strict=True))
            # One search of all ids: most partitions have no sample without a key.
            if operations.UNNAMED in "\n".join(samples.ids):
                tags = {key: value for key, value in tags.items() if operations.is_key(key)}
            tags_by_partition[name] = tags
        return tags_by_partition

    @property
    def strict_reads(self) -> bool:
        """Whether a read of a missing key or field is an error, as the service's settings say
        (False until read)."""
        return bool((self._stored_settings or {}).get("strict_reads"))

    def exchange_settings(
        self, session_state: SessionState, to_store: Mapping[str, Any] | None
    ) -> Operation[dict[str, Any] | None]:
        """Return the settings that the service stores, or None if it has none. If it has none yet
        and `to_store` is given, store these. The result is cached."""
        if self._stored_settings is None and to_store is not None:
            values = {CONFIG: [dict(to_store)]}
            try:
                yield from operations.put(
                    session_state,
                    [CONFIG],
                    operations.ADAPTER,
                    values,
                    mode="create",
                )
            except SampleExistsError:
                log.info("the service already has settings; those passed to init() are ignored")
        if self._stored_settings is None:  # read them back: another process may have stored its settings first
            try:
                stored = yield from get.get(
                    session_state,
                    [CONFIG],
                    operations.ADAPTER,
                    [CONFIG],
                    copy=True,
                )
                self._stored_settings = stored[CONFIG][0]
            except NotFoundError:
                return None
        return self._stored_settings

    def _refuse_path(self, path: str) -> NoReturn:
        """Reject a checkpoint of the controller or of the storage units alone: neither is usable
        without the other, and two separate checkpoints would not be of the same instant."""
        raise NotImplementedError(
            f"{path!r}: separate checkpoints of controller and storage are not supported; call the "
            "module's save_checkpoint or load_checkpoint, whose checkpoint has the samples and "
            "their metadata at one instant"
        )

    def _refuse_directory(self, checkpoint_dir: str) -> NoReturn:
        """See `_refuse_path`."""
        self._refuse_path(checkpoint_dir)

    # --- both forms of each operation

    get_meta, async_get_meta = twins(_get_meta)
    set_custom_meta, async_set_custom_meta = twins(_set_custom_meta)
    put, async_put = twins(_put)
    get_data, async_get_data = twins(_get_data)
    clear_partition, async_clear_partition = twins(_clear_partition)
    clear_samples, async_clear_samples = twins(_clear_samples)
    get_consumption_status, async_get_consumption_status = twins(_get_consumption_status)
    get_production_status, async_get_production_status = twins(_get_production_status)
    check_consumption_status, async_check_consumption_status = twins(_check_consumption_status)
    check_production_status, async_check_production_status = twins(_check_production_status)
    reset_consumption, async_reset_consumption = twins(_reset_consumption)
    get_partition_list, async_get_partition_list = twins(_get_partition_list)
    kv_retrieve_meta, async_kv_retrieve_meta = twins(_kv_retrieve_meta)
    kv_retrieve_keys, async_kv_retrieve_keys = twins(_kv_retrieve_keys)
    kv_list, async_kv_list = twins(_kv_list)
    save_controller_checkpoint = _refuse_path
    async_save_controller_checkpoint = _refuse_path
    save_storage_checkpoint = _refuse_directory
    async_save_storage_checkpoint = _refuse_directory
    load_controller_checkpoint = _refuse_path
    async_load_controller_checkpoint = _refuse_path
    load_storage_checkpoint = _refuse_directory
    async_load_storage_checkpoint = _refuse_directory


class TransferQueueClient(AsyncTransferQueueClient):
    """The same client, under the name of the original's blocking one."""


def key_list(keys: Any) -> list[str]:
    """Return one key or a list of keys as a list. TypeError for other types, ValueError for an
    empty list."""
    return _list_of(str, "keys", keys)


def instance_of(kind: type[E], what: str, value: Any) -> E:
    """Return the value of the argument `what`. TypeError unless it is of this type."""
    if not isinstance(value, kind):
        raise TypeError(f"{what}: expected a {kind.__name__}, got {type(value).__name__}")
    return value


def _all_are(kind: type[Any], values: list[Any]) -> bool:
    # To compare the types is much faster; subclasses are rare.
    return set(map(type, values)) == {kind} or all(isinstance(each, kind) for each in values)


def _list_of(kind: type[E], what: str, values: Any) -> list[E]:
    """Return one value or a list of them as a list. TypeError for other types, ValueError for an
    empty list. what: the name of the argument."""
    if isinstance(values, kind):
        return [values]
    if not isinstance(values, list) or not _all_are(kind, values):
        raise TypeError(
            f"{what}: expected a value of type {kind.__name__} or a list of them, got {reprlib.repr(values)}"
        )
    if not values:
        raise ValueError(f"{what}: the list is empty; pass at least one value")
    return values
