"""The client of the low-level interface, which addresses batches of samples by `BatchMeta`."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from dataplane.client.operations import get, partitions
from dataplane.client.operations.steps import Operation
from dataplane.client.session_state import SessionState
from dataplane.compat.transfer_queue import columns, fetching, operations, reads
from dataplane.compat.transfer_queue.columns import Parser
from dataplane.compat.transfer_queue.defaults import warn_once
from dataplane.compat.transfer_queue.errors import RefusedCallError
from dataplane.compat.transfer_queue.metadata import BatchMeta
from dataplane.compat.transfer_queue.performer import Performer
from dataplane.compat.transfer_queue.samplers import BaseSampler
from dataplane.compat.transfer_queue.settings import attach_config, sampling_of
from dataplane.errors import NotFoundError, SampleExistsError

log = logging.getLogger(__name__)

T = TypeVar("T")

CONFIG = "config"
"""Id and field of the sample in which the service stores the settings."""


class AsyncTransferQueueClient:
    """An async client of one service, usable from any event loop. Thread-safe.

    client_id: only kept as an attribute. controller_info: the service's address, or the `controller.zmq_info` that
    `init()` returned. zmq_io_threads and zmq_max_sockets are accepted and ignored.

    A missing key, sample, field or partition raises `StorageKeyNotFoundError`; other errors are those of
    `dataplane.errors`.

    _performer: performs operations (generators of steps), in the calling thread or awaited. _local_sampler: the sampler
    that was passed to `init()` in this process (None: none); `session` sets it. _stored_settings: a copy of the
    settings that the service stores for all processes (None: not read yet, or the service has none).
    """

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

    # --- awaited

    async def async_get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """See `TransferQueueClient.get_meta`."""
        arguments = data_fields, batch_size, partition_id, mode, task_name, sampling_config
        return await self._performer.do_async(self._get_meta, *arguments)

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """See `TransferQueueClient.set_custom_meta`."""
        await self._performer.do_async(operations.set_tags, metadata)

    async def async_put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """See `TransferQueueClient.put`."""
        return await self._performer.do_async(self._put, data, metadata, partition_id, data_parser)

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """See `TransferQueueClient.get_data`."""
        return await self._performer.do_async(self._get_data, metadata)

    async def async_clear_partition(self, partition_id: str) -> None:
        """See `TransferQueueClient.clear_partition`."""
        await self._performer.do_async(self._clear_partition, partition_id)

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """See `TransferQueueClient.clear_samples`."""
        await self._performer.do_async(operations.clear_batch, metadata)

    async def async_get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `TransferQueueClient.get_consumption_status`."""
        return await self._performer.do_async(self._consumption, task_name, partition_id)

    async def async_get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `TransferQueueClient.get_production_status`."""
        return await self._performer.do_async(operations.production_status, data_fields, partition_id)

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """See `TransferQueueClient.check_consumption_status`."""
        _, status = await self.async_get_consumption_status(task_name, partition_id)
        return _all_one(status, empty=False)

    async def async_check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """See `TransferQueueClient.check_production_status`."""
        _, status = await self.async_get_production_status(data_fields, partition_id)
        return _all_one(status, empty=True)

    async def async_reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """See `TransferQueueClient.reset_consumption`."""
        return await self._performer.do_async(operations.reset_claims, partition_id, task_name)

    async def async_get_partition_list(self) -> list[str]:
        """See `TransferQueueClient.get_partition_list`."""
        return await self._performer.do_async(operations.partitions)

    async def async_kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """See `TransferQueueClient.kv_retrieve_meta`."""
        return await self._performer.do_async(operations.meta_of_keys, _key_list(keys), partition_id, create)

    async def async_kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str | None]:
        """See `TransferQueueClient.kv_retrieve_keys`."""
        return await self._performer.do_async(operations.keys_of_indexes, _index_list(global_indexes), partition_id)

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """See `TransferQueueClient.kv_list`."""
        return await self._performer.do_async(operations.list_keys, partition_id)

    async def async_save_controller_checkpoint(self, path: str) -> None:
        _refuse("async_save_controller_checkpoint", path)

    async def async_load_controller_checkpoint(self, path: str) -> None:
        _refuse("async_load_controller_checkpoint", path)

    async def async_save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        _refuse("async_save_storage_checkpoint", checkpoint_dir)

    async def async_load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        _refuse("async_load_storage_checkpoint", checkpoint_dir)

    # --- operations of both clients

    def _get_meta(
        self,
        session_state: SessionState,
        data_fields: Sequence[str],
        batch_size: int,
        partition: str,
        mode: str,
        task: str | None,
        config: Mapping[str, Any] | None,
    ) -> Operation[BatchMeta]:
        """Return the batch that `mode` selects; see `TransferQueueClient.get_meta`. batch_size: callers can pass None
        with "force_fetch", which ignores it. config: the caller's `sampling_config`."""
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, Integral)):
            raise TypeError(f"batch_size={batch_size!r}: expected an int, got {type(batch_size).__name__}")
        if data_fields is None:
            raise RefusedCallError("get_meta: data_fields is None; pass a list of names")
        if batch_size is None and mode != "force_fetch":
            raise RefusedCallError("get_meta: batch_size is None; pass the number of samples")
        if mode == "insert":
            return (
                yield from operations.insert_samples(session_state, batch_size, partition, coming=list(data_fields))
            )
        if mode == "force_fetch":
            return (yield from operations.meta_of_partition(session_state, partition, list(data_fields)))
        if mode != "fetch":
            raise RefusedCallError(f"mode={mode!r}: expected one of fetch, force_fetch, insert")
        if not task:
            raise RefusedCallError("get_meta: task_name is empty; pass the name of the task that claims the samples")
        stored = yield from self.exchange_settings(session_state, to_store=None)
        sampling = sampling_of(stored, self._local_sampler)
        if batch_size == 0 and sampling.polling:
            return BatchMeta.empty()
        if batch_size < 1:
            raise RefusedCallError(f"batch_size={batch_size}: expected at least 1")
        request = fetching.BatchRequest(
            partition=partition,
            task=task,
            fields=tuple(data_fields),
            batch_size=batch_size,
            config={"task_name": task, "partition_id": partition, **(config or {})},
        )
        return (yield from fetching.fetch(session_state, request, sampling))

    @property
    def strict_reads(self) -> bool:
        """Whether a read of a missing key or field is an error, as the service's settings say (False until read)."""
        return bool((self._stored_settings or {}).get("strict_reads"))

    def exchange_settings(
        self, session_state: SessionState, to_store: Mapping[str, Any] | None
    ) -> Operation[dict[str, Any] | None]:
        """Return the settings that the service stores, or None if it has none. If it has none yet and `to_store` is
        given, store these. The result is cached."""
        if self._stored_settings is None and to_store is not None:
            values = {CONFIG: [dict(to_store)]}
            try:
                yield from operations.put(session_state, [CONFIG], operations.ADAPTER, values, mode="create")
            except SampleExistsError:
                log.info("the service already has settings; those passed to init() are ignored")
        if self._stored_settings is None:  # read them back: another process may have stored its settings first
            try:
                stored = yield from get.get(session_state, [CONFIG], operations.ADAPTER, [CONFIG], copy=True)
                self._stored_settings = stored[CONFIG][0]
            except NotFoundError:
                return None
        return self._stored_settings

    def _put(
        self,
        session_state: SessionState,
        data: TensorDict,
        metadata: BatchMeta | None,
        partition: str | None,
        parse: Parser | None,
    ) -> Operation[BatchMeta]:
        """Put into existing samples (`metadata`) or new ones (`partition`); see `TransferQueueClient.put`. ValueError
        without both, and for a meta without samples."""
        if metadata is None:
            if partition is None:
                raise ValueError("put: pass the partition_id of new samples, or the metadata of existing ones")
            rows = int(data.batch_size[0])
            if not rows:
                raise ValueError("put: the data has no rows; pass at least one")
            fields = _apply_parser(data, parse)
            metadata = yield from operations.insert_samples(session_state, rows, partition, fields)
        elif not metadata:
            raise ValueError("put: the metadata is empty; it must name at least one sample")
        else:
            yield from operations.put_batch(session_state, metadata, _apply_parser(data, parse))
        return metadata.add_fields(data)  # only their schema

    def _get_data(self, session_state: SessionState, metadata: BatchMeta) -> Operation[TensorDict]:
        if not metadata or not metadata.field_names:
            log.warning("get_data: the meta has no samples or no fields; an empty TensorDict is returned")
            return TensorDict({}, batch_size=0)
        return (yield from reads.get_batch(session_state, metadata))

    def _clear_partition(self, session_state: SessionState, partition: str) -> Operation[None]:
        yield from partitions.clear(session_state, names=None, partition=partition)
        yield from fetching.forget_draws(session_state, partition)
        if self._local_sampler is not None:
            self._local_sampler.clear_cache(partition)

    def _consumption(
        self, session_state: SessionState, task: str, partition: str
    ) -> Operation[tuple[Tensor | None, Tensor | None]]:
        """See `TransferQueueClient.get_consumption_status`."""
        stored = yield from self.exchange_settings(session_state, to_store=None)
        expected = 1 if stored is None else int(stored["expected"])  # see `settings_to_store`
        return (yield from operations.consumption_status(session_state, task, partition, expected))


class TransferQueueClient(AsyncTransferQueueClient):
    """A client that has every method in a blocking form, too."""

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Claim `batch_size` samples that have all `data_fields` for the task. The sampler, which gets the entries of
        `sampling_config`, chooses them. Return their meta.

        If too few samples are ready: with `polling_mode`, return an empty meta at once. Otherwise block, and raise
        `FetchTimeoutError` (a RuntimeError and a TimeoutError) after TQ_CONTROLLER_GET_METADATA_TIMEOUT or
        TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL seconds, whichever is more. An unknown
        partition has no ready samples; a call that waits for some creates it.

        mode: "fetch". "force_fetch": return all samples, ready or not, without a claim;
        `StorageKeyNotFoundError` for an unknown partition. "insert": create samples without keys
        and data, and the partition if missing; none for a `batch_size` of 0.
        """
        return self._performer.do(
            self._get_meta, data_fields, batch_size, partition_id, mode, task_name, sampling_config
        )

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Merge the meta's `custom_meta` into the tags of its samples."""
        self._performer.do(operations.set_tags, metadata)

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """Store fields and the meta's tags for the meta's samples, or, without a meta, for new samples in
        `partition_id`. The put is atomic. `data_parser` first maps the dict of fields to one with other values, in this
        process.

        Return the meta, with the new fields added. `StorageKeyNotFoundError` for samples that were cleared since. The
        first put into a partition creates it.
        """
        return self._performer.do(self._put, data, metadata, partition_id, data_parser)

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return the meta's fields of its samples: tensor rows nested, scalars `[N]`, objects in a NonTensorStack.
        `StorageKeyNotFoundError` if a sample or field is missing."""
        return self._performer.do(self._get_data, metadata)

    def clear_partition(self, partition_id: str) -> None:
        """Drop the partition with all samples. Callers that wait on it get a `PartitionDroppedError`."""
        self._performer.do(self._clear_partition, partition_id)

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Drop the samples of the meta. Samples that no longer exist are ignored."""
        self._performer.do(operations.clear_batch, metadata)

    def get_consumption_status(self, task_name: str, partition_id: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the samples' indexes `[N]`, and 1 for each sample that the task has claimed. (None, None) for an
        unknown partition."""
        return self._performer.do(self._consumption, task_name, partition_id)

    def get_production_status(self, data_fields: list[str], partition_id: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the samples' indexes `[N]`, and `[N, F]` with 1 where the sample has the field.
        The F columns are the distinct fields in the order in which the partition got them, not in
        that of `data_fields`. (None, None) for an unknown partition or field, or without fields."""
        return self._performer.do(operations.production_status, data_fields, partition_id)

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether the task has claimed all samples of the partition, at least one. False until as many were created as
        expected (TQ_PRE_ALLOC_SAMPLE_NUM, by default 1)."""
        _, status = self.get_consumption_status(task_name, partition_id)
        return _all_one(status, empty=False)

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether all samples have all these fields."""
        _, status = self.get_production_status(data_fields, partition_id)
        return _all_one(status, empty=True)

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Reset the claims of the task (None: of every task), so that it can claim all samples again. Return False if
        that failed because other clients cleared samples meanwhile."""
        return self._performer.do(operations.reset_claims, partition_id, task_name)

    def get_partition_list(self) -> list[str]:
        """Return the names of all partitions."""
        return self._performer.do(operations.partitions)

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Return the meta of these keys, with the fields that all of them have. Unknown keys are omitted, or created
        with `create`."""
        return self._performer.do(operations.meta_of_keys, _key_list(keys), partition_id, create)

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str | None]:
        """Return the key of each sample, or None for a sample without a key."""
        return self._performer.do(operations.keys_of_indexes, _index_list(global_indexes), partition_id)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the tags of every key, by partition (None: of all partitions)."""
        return self._performer.do(operations.list_keys, partition_id)

    def save_controller_checkpoint(self, path: str) -> None:
        _refuse("save_controller_checkpoint", path)

    def load_controller_checkpoint(self, path: str) -> None:
        _refuse("load_controller_checkpoint", path)

    def save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        _refuse("save_storage_checkpoint", checkpoint_dir)

    def load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        _refuse("load_storage_checkpoint", checkpoint_dir)


def _apply_parser(data: TensorDict, parse: Callable[[dict[str, Any]], Any] | None) -> Any:
    return data if parse is None else columns.apply_parser(data, parse)


def _all_one(status: Tensor | None, *, empty: bool) -> bool:
    """Whether all elements are 1. None (an unknown partition or field): False. empty: the result without elements."""
    if status is None:
        return False
    if not status.numel():
        return empty
    return bool(torch.all(status == 1).item())


def _key_list(keys: Any) -> list[str]:
    """Return one key or a list of keys as a list. TypeError for other types, ValueError for an empty list."""
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"keys: expected a string or a list of strings, got {reprlib.repr(keys)}")
    if not keys:
        raise ValueError("keys: the list is empty; pass at least one key")
    return keys


def _index_list(indexes: Any) -> list[int]:
    """Return one global index or a list of them as a list. TypeError for other types, ValueError for an empty list."""
    if isinstance(indexes, int):
        return [indexes]
    if not isinstance(indexes, list) or not all(isinstance(index, int) for index in indexes):
        raise TypeError(f"global_indexes: expected an integer or a list of integers, got {reprlib.repr(indexes)}")
    if not indexes:
        raise ValueError("global_indexes: the list is empty; pass at least one index")
    return indexes


def _refuse(name: str, path: str) -> NoReturn:
    """Reject a checkpoint of the controller or of the storage units alone: neither is usable without the other, and two
    separate checkpoints would not be of the same instant."""
    verb = "load" if "load" in name else "save"
    raise NotImplementedError(
        f"{name}({path!r}): separate checkpoints of controller and storage are not supported; call the module's "
        f"{verb}_checkpoint, whose checkpoint has the samples and their metadata at one instant"
    )
