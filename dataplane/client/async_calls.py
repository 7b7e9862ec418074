"""The calls of `AsyncDataPlaneClient`. Generated from `client.py` by `make async-client`: do not edit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Unpack

import torch
from tensordict import TensorDict

from dataplane.client.checkpoint import CheckpointInfo, checkpoint, restore
from dataplane.client.operations import claim, drain_unit, get, partitions, put
from dataplane.client.operations.claim import ClaimConditions, ClaimOptions
from dataplane.client.operations.drain_unit import Drained, OnProgress
from dataplane.client.operations.sample_names import Names
from dataplane.client.operations.steps import Operation, T
from dataplane.client.session_state import SessionState
from dataplane.core.schema import Layout
from dataplane.data.batch import BatchedDataDict
from dataplane.data.meta import KVBatchMeta, name_of
from dataplane.data.row_parts import Inner, Tokens
from dataplane.ledger import commands as c

P = ParamSpec("P")


class AsyncCalls:
    """The calls of `DataPlaneClient`, awaited."""

    async def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str] | Mapping[str, Any],
        num_samples: int | None,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        strict: bool = False,
        budget_bytes: int | None = None,
        when_full: str = "wait",
    ) -> None:
        """See `DataPlaneClient.register_partition`."""
        await self.perform(
            partitions.register,
            partition_id,
            fields,
            num_samples,
            consumer_tasks,
            grpo_group_size,
            enums,
            strict=strict,
            budget_bytes=budget_bytes,
            when_full=when_full,
        )

    async def put_samples(
        self,
        sample_ids: Names,
        partition_id: str,
        fields: TensorDict | Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        mode: str = "upsert",
    ) -> KVBatchMeta:
        """See `DataPlaneClient.put_samples`."""
        return await self.perform(put.put, sample_ids, partition_id, fields, tags, mode)

    async def get_samples(
        self,
        sample_ids: Names,
        partition_id: str,
        select_fields: Sequence[str],
        *,
        copy: bool = True,
        tokens: Tokens | None = None,
        inner: Inner | None = None,
        device: torch.device | str | None = None,
    ) -> TensorDict:
        """See `DataPlaneClient.get_samples`."""
        return await self.perform(get.get, sample_ids, partition_id, select_fields, copy, tokens, inner, device)

    async def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """See `DataPlaneClient.get_data`."""
        fields = get.chosen_fields(meta, select_fields)
        return await self.perform(get.get, meta, meta.partition_id, fields, copy=True)

    async def locate(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> get.SampleHosts:
        """See `DataPlaneClient.locate`."""
        return await self.perform(get.locate, meta, get.chosen_fields(meta, select_fields))

    async def get_batch(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "padded",
        pad_value_dict: Mapping[str, Any] | None = None,
        pad_to_seqlen: int = 0,
        device: torch.device | str | None = None,
        tokens: Tokens | None = None,
        inner: Inner | None = None,
    ) -> BatchedDataDict[Any]:
        """See `DataPlaneClient.get_batch`."""
        return await self.perform(
            get.get_batch,
            meta,
            get.chosen_fields(meta, select_fields),
            layout=layout,
            pad_value_dict=pad_value_dict,
            pad_to_seqlen=pad_to_seqlen,
            tokens=tokens,
            inner=inner,
            device=device,
        )

    async def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float | None = 60.0,
        *,
        dp_world: int | None = None,
        step: int | None = None,
        **options: Unpack[ClaimOptions],
    ) -> KVBatchMeta:
        """See `DataPlaneClient.claim_meta`."""
        command = claim.claim_command(
            partition_id,
            task_name,
            required_fields,
            batch_size,
            dp_rank=dp_rank,
            dp_world=dp_world,
            step=step,
            blocking=blocking,
            timeout_s=timeout_s,
            **options,
        )
        return await self.perform(claim.claim, command, dp_rank)

    async def ack(self, meta: KVBatchMeta) -> list[str]:
        """See `DataPlaneClient.ack`."""
        return await self.perform(claim.settle_claims, c.Ack, meta)

    async def nack(self, meta: KVBatchMeta) -> list[str]:
        """See `DataPlaneClient.nack`."""
        return await self.perform(claim.settle_claims, c.Nack, meta)

    async def extend(self, meta: KVBatchMeta, lease_s: float) -> list[str]:
        """See `DataPlaneClient.extend`."""
        return await self.perform(claim.extend, meta, lease_s)

    async def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """See `DataPlaneClient.check_consumption_status`."""
        return await self.perform(claim.consumed, partition_id, task_names)

    async def clear_samples(self, sample_ids: Names | None, partition_id: str) -> None:
        """See `DataPlaneClient.clear_samples`."""
        await self.perform(partitions.clear, sample_ids, partition_id)

    async def seal(self, partition_id: str) -> None:
        """See `DataPlaneClient.seal`."""
        await self.perform(partitions.ask, c.Seal(partition=name_of("partition_id", partition_id)))

    async def list_samples(self, partition_id: str) -> KVBatchMeta:
        """See `DataPlaneClient.list_samples`."""
        return await self.perform(partitions.list_samples, partition_id)

    async def set_tags(self, sample_ids: Names, partition_id: str, tags: Sequence[Mapping[str, Any]]) -> None:
        """See `DataPlaneClient.set_tags`."""
        await self.perform(partitions.set_tags, sample_ids, partition_id, tags)

    async def set_version(self, partition_id: str, version: int) -> None:
        """See `DataPlaneClient.set_version`."""
        name_of("partition_id", partition_id)
        await self.perform(partitions.ask, c.SetVersion(partition=partition_id, version=version))

    async def why_blocked(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str] = (),
        **conditions: Unpack[ClaimConditions],
    ) -> c.Blocked:
        """See `DataPlaneClient.why_blocked`."""
        return await self.perform(claim.why_blocked, partition_id, task_name, required_fields, **conditions)

    async def checkpoint(self, path: str | os.PathLike[str], partitions: Sequence[str] | None = None) -> CheckpointInfo:
        """See `DataPlaneClient.checkpoint`."""
        return await self.perform(checkpoint, path, partitions)

    async def restore(
        self, path: str | os.PathLike[str], partitions: Sequence[str] | None = None, *, replace: bool = False
    ) -> CheckpointInfo:
        """See `DataPlaneClient.restore`."""
        return await self.perform(restore, path, partitions, replace=replace)

    async def stats(self) -> c.StatsReport:
        """See `DataPlaneClient.stats`."""
        return await self.perform(partitions.stats)

    async def matrix(self, partition_id: str, *, columns: int = 256) -> c.Matrix:
        """See `DataPlaneClient.matrix`."""
        return await self.perform(partitions.matrix, partition_id, columns)

    async def show_sample(self, sample_id: str, partition_id: str | None = None) -> c.Shown:
        """See `DataPlaneClient.show_sample`."""
        return await self.perform(partitions.show_sample, sample_id, partition_id)

    async def memory_map(self, unit: int, *, cells: int = 256) -> c.MemoryMap:
        """See `DataPlaneClient.memory_map`."""
        return await self.perform(partitions.memory_map, unit, cells)

    async def waits(self) -> c.WaitList:
        """See `DataPlaneClient.waits`."""
        return await self.perform(partitions.waits)

    async def drain(
        self,
        unit: int,
        timeout_s: float | None = 600.0,
        *,
        force: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Drained:
        """See `DataPlaneClient.drain`."""
        return await self.perform(drain_unit.drain, unit, timeout_s, force, on_progress)

    async def undrain(self, unit: int) -> None:
        """See `DataPlaneClient.undrain`."""
        await self.perform(drain_unit.undrain, unit)

    async def drop_unit(self, unit: int, *, force: bool = False) -> None:
        """See `DataPlaneClient.drop_unit`."""
        await self.perform(drain_unit.forget, unit, force)

    async def perform(
        self, operation: Callable[Concatenate[SessionState, P], Operation[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `DataPlaneClient.perform`."""
        raise NotImplementedError
