"""The synchronous client for rollout engines, reward models, policy workers and the driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, Unpack

import torch
from tensordict import TensorDict

from dataplane.client.checkpoint import CheckpointInfo, checkpoint, restore
from dataplane.client.events import EventEmitter, OnEvent
from dataplane.client.operations import claim, drain_unit, get, partitions, put
from dataplane.client.operations.claim import ClaimConditions, ClaimOptions
from dataplane.client.operations.drain_unit import Drained, OnProgress
from dataplane.client.operations.sample_names import Names
from dataplane.client.operations.steps import Operation, T
from dataplane.client.session import Connection, ForkLocal
from dataplane.client.session_state import SessionState
from dataplane.config import DataPlaneConfig
from dataplane.core.schema import Layout
from dataplane.data.batch import BatchedDataDict
from dataplane.data.meta import KVBatchMeta, name_of
from dataplane.data.row_parts import Inner, Tokens
from dataplane.ledger import commands as c

P = ParamSpec("P")


class Owned(Protocol):
    """A resource that the client closes together with itself: the service that it was bootstrapped with."""

    def close(self) -> None: ...


class DataPlaneClient:
    """A client of one service. It is thread-safe. A forked child opens its own session on first use. Pickling a
    client serializes its address and settings (token included); the unpickled copy connects on first use.

    Every call has a deadline, unless its `timeout_s` is None or infinity. Commands are limited by
    `config.call_timeout_s`. Puts also wait up to `config.put_timeout_s` for space, and claims up to
    their `timeout_s`. If the service stops, calls fail at once, also those without a deadline.
    If the service has a `state_dir`, calls wait up to `config.reconnect_s` for its restart instead, but no longer
    than their own deadline. Then they continue: each pending command is executed exactly once, and claims and views
    remain valid. If a service restarts without its state, every later call raises `ServiceRestartedError`, which
    reports the lost state: open a new client.

    Errors are those of `dataplane.errors`. Besides the errors listed below, any call may raise
    `ServiceUnavailableError`, `SessionExpiredError`, `ServiceRestartedError`, `CallTimeoutError` or
    `ClientClosedError`.

    Samples are addressed by ids, or by a `KVBatchMeta` that the service returned. A meta also identifies the
    *generation* of each sample: after a clear, a read or write through an older meta raises `StaleSampleError` and
    never touches another sample's data. A call with a meta of another partition than its
    `partition_id` raises `InvalidRequestError` (a ValueError).
    """

    def __init__(self, config: DataPlaneConfig, *, owns: Owned | None = None, on_event: OnEvent | None = None) -> None:
        self._config = config
        self._emitter = EventEmitter(on_event)
        self._owns = owns  # closed together with this client
        self._connections = ForkLocal(lambda: Connection(config))

    def connect(self) -> Self:
        """Open the session now instead of at the first call. Raise `ServiceUnavailableError` or
        `AuthenticationError` if the session cannot be opened within `config.connect_timeout_s`."""
        self._connections.get()
        return self

    @property
    def config(self) -> DataPlaneConfig:
        """The settings of this client."""
        return self._config

    @property
    def on_event(self) -> OnEvent | None:
        """Callback that receives an `OpEvent` at the end of every operation, in the thread of the operation; None
        disables it. The first exception that it raises is logged; exceptions never fail the operation. A pickled
        copy of the client has no callback; a forked child keeps the parent's callback."""
        return self._emitter.on_event

    @on_event.setter
    def on_event(self, on_event: OnEvent | None) -> None:
        self._emitter.on_event = on_event

    def register_partition(
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
        """Declare a partition, or replace the schema, expected size and tasks of an existing one. An existing
        partition keeps its rows, its tags and the claims of the tasks that remain. A seal is lifted and the sample
        count starts again at the number of live samples.

        fields: names, or name -> FieldSpec, as in `docs/concepts/fields.md`. num_samples: number of samples to create
        until the partition is complete (None: unknown, until `seal`). consumer_tasks: the only tasks that may
        claim. grpo_group_size: samples per group, stored for consumers. enums: permitted values of a tag. strict:
        reject a put of an undeclared field with a ValueError instead of extending the schema.

        budget_bytes: maximum size of the partition in all storage units (None: limited only by the units; the
        budget of a unit is its capacity). The budget covers live rows, reservations of pending puts, and cleared
        rows that are still being read. Shared rows count once; each column of a put is rounded up to 64 bytes. As
        with a unit's capacity, 15 percent of the budget (`config.reserve_fraction`) is reserved for updates of
        existing rows. A put that can never fit raises `RequestTooLargeError`.

        when_full: how to handle a put when the budget or the units have no free space. "wait": the put waits in
        FIFO order, without blocking puts that have space, until `CapacityTimeoutError`. "reject": raise that error
        immediately. "evict": remove consumed samples of this partition, oldest first, then wait if that is not
        enough. A sample is consumed when every task (at least one) has claimed it permanently; leased samples,
        samples being read and samples named by a pending put are not evicted. A claim without a lease becomes
        permanent at the next call of its client: claim with `lease_s` and `ack` samples that are still to be read
        or updated. "evict_oldest": as "evict"; if a put of new rows still has no space, remove unconsumed samples
        too, oldest first. Their number is in `stats()` and the service log; their ids are in the meta of the put
        that evicted them (`extra_info["evicted_samples"]`). A later request for an evicted sample raises a KeyError
        with it in `evicted` (the last 4,096 evicted ids of a partition are remembered).

        A new registration replaces both settings and also applies to waiting puts. If the new budget is smaller
        than the current size, puts wait until enough space is free. Checkpoints include both settings.
        """
        self.perform(
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

    def put_samples(
        self,
        sample_ids: Names,
        partition_id: str,
        fields: TensorDict | Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        mode: str = "upsert",
    ) -> KVBatchMeta:
        """Store fields and tags of N samples atomically. A stage signals its completion by producing its field.

        sample_ids: N distinct ids, or a meta (with handles, the put updates exactly those samples). fields: N rows
        for each name, as a tensor `[N, *inner]`, nested tensor, list of tensors, `Shared(values, index)`, or a list
        or array of objects. tags: one mapping per sample of small scalars (integers of at most 64 bits), merged into
        the existing tags. Without fields, only the tags are set. Without fields and tags, samples with new ids are
        created without any field.
        mode: "upsert", "create" (ids must be new, else ValueError), "update" (samples must exist, else KeyError) or
        "append".

        "append" is for samples that are still being generated. Values of jagged fields are appended to the stored
        rows; a new sample or field starts with the given values. Other fields and tags are replaced. The whole
        append becomes visible atomically, so a tag such as `finished` that is put with the last piece matches
        predicates exactly when the piece is visible. Appends of one client to a sample are executed one after another,
        in the order of their calls. If another client writes the same rows concurrently, the append is retried, and
        after several attempts raises `RowsChangedError`. Every append copies the existing rows through this process to
        new space, so that reads find each row contiguous: append the output of a stretch of generation, not single
        tokens. With ids, a sample that was cleared in the meantime may be created again; with the meta of an earlier
        put, that raises `StaleSampleError`.

        Return a meta with handles and, if all per-token columns agree, sequence lengths. On return the bytes are in
        the arena and visible, and the caller may modify its tensors. Wait for space up to `config.put_timeout_s`
        (or as the partition's `when_full` says), then raise `CapacityTimeoutError`, which lists the holders of the
        space. Raise KeyError for an unknown partition; ValueError for duplicate ids, wrong counts, or a field whose
        kind, dtype or inner shape differs from its live rows; TypeError for arguments of a wrong type and values
        that no column can hold; `StaleSchemaError` (a ValueError) if other clients clear or re-register the
        partition during every attempt.
        """
        return self.perform(put.put, sample_ids, partition_id, fields, tags, mode)

    def get_samples(
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
        """Return the fields of exactly these samples, in this order, with `batch_size [N]`. Nothing is claimed.

        Dense fields are tensors `[N, *inner]`, jagged fields nested tensors, ragged fields lists, objects
        `NonTensorStack`. With `copy=False`, rows that are contiguous on this host are read-only views of shared
        memory; their space is not reused while any view exists. A write to a view ends the process
        with SIGSEGV, because torch has no read-only tensors: clone the view first. Raise KeyError
        naming the missing partition, sample or field, or the field not produced for a sample.

        tokens, inner: read parts of the rows, and transfer nothing else. `tokens` is one (start, stop) for all samples,
        one for each, or the `ContextParallel` rank whose chunks are read, one after another; ranges end with the row.
        They apply to jagged fields with one element per token (as in `get_batch`; without a meta, to those as long as
        one of `TOKEN_ALIGNED_FIELDS` in this read, or to all). `inner` maps names of dense and jagged fields to slices
        of their first inner dimensions, for example `{"routed_experts": slice(12, 24)}`. Parts are not compared with
        the checksums of their rows. ValueError for ranges and slices that do not fit.

        device: device of the returned tensors, by default the CPU; objects stay Python values. A CUDA GPU reads rows
        on this host from the shared memory itself, on a stream of its own; the call returns when they have arrived.
        `copy=False` then has no effect. ValueError if this process sees no such GPU.
        """
        return self.perform(get.get, sample_ids, partition_id, select_fields, copy, tokens, inner, device)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Return `get_samples` of the meta's samples. `select_fields` defaults to `meta.fields` (ValueError if both
        are empty)."""
        fields = get.chosen_fields(meta, select_fields)
        return self.perform(get.get, meta, meta.partition_id, fields, copy=True)

    def locate(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> get.SampleHosts:
        """Return (meta, hosts): the meta with the row handles of its samples, and for each sample the host (the boot id
        of its machine) that stores most bytes of the fields (default: `meta.fields`), None without any bytes. Later
        puts and moves can change the hosts. The service's metrics count it as a read. KeyError as `get_samples`."""
        return self.perform(get.locate, meta, get.chosen_fields(meta, select_fields))

    def get_batch(
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
        """Return `get_data` followed by `materialize`, with a single copy from the arena into the padded tensors.

        layout: "padded" makes jagged fields `[N, S, *inner]`. S is the longest row or, for per-token fields (see
        `materialize`; `meta.sequence_lengths` are the token counts), `pad_to_seqlen` if that is larger (ValueError
        if it is smaller). The padding is `pad_value_dict[field]` (default 0). "jagged" keeps them nested. device,
        tokens, inner: as in `get_samples`. With a `ContextParallel` that has `pad_to`, per-token fields have at least
        `pad_to / size` columns.
        """
        return self.perform(
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

    def claim_meta(
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
        """Claim `batch_size` samples, oldest first, for which all `required_fields` are produced and which the task
        has not claimed. Each sample goes to only one claim of a task.

        Wait on the service until that many samples (or `min_batch_size`) are ready. If the
        partition is complete and fewer samples remain, wait until all of them are ready and open
        leases have ended, then return the remaining samples, possibly none. After `timeout_s` (None
        or infinity: never), raise TimeoutError, which names what was missing; nothing is claimed
        then. `blocking=False` returns the samples that are ready, possibly none.

        options: see `ClaimOptions`. An unknown partition or task raises KeyError immediately.

        dp_rank with dp_world and step: claim the rank's share of one selection of `batch_size` samples. The first
        rank that requests the step fixes the selection; the other ranks may request their shares later, in any
        order. `batch_size` is that of the whole step and a multiple of `dp_world` (times `group_size`; groups are
        never split). All shares have equal numbers of samples (of groups). At the tail of a complete partition the
        numbers may differ by one and may be zero. `blocking=False` returns an empty meta while the step cannot be
        fixed. All ranks must use the same arguments (sizes, fields, where, order, sampler), else ValueError naming
        both variants. A share is returned once: requesting it again raises ValueError, unless the claim was
        released (`nack`, lease expiry, or the client ended before it received the response). Then the released
        samples are returned if they are still free; if another claim has taken them, `ShareConflictError` is
        raised. Shares that no rank requests are released after `lease_s` (600 s if None); cleared samples are left
        out. The last 256 steps of a task are remembered. Without dp_world and step, `dp_rank` is only recorded. In
        both cases it is in `extra_info["dp_rank"]`.
        """
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
        return self.perform(claim.claim, command, dp_rank)

    def ack(self, meta: KVBatchMeta) -> list[str]:
        """Mark the leased samples of `meta` as consumed. Return the ids of samples that were cleared in the
        meantime. Raise StaleSampleError if the claim of `meta` has lost its lease on `error.samples`; the other
        samples are acknowledged. Raise ValueError if `meta` does not come from a claim."""
        return self.perform(claim.settle_claims, c.Ack, meta)

    def nack(self, meta: KVBatchMeta) -> list[str]:
        """Release claimed samples, so that the task can claim them again. Return the ids of samples that were
        cleared in the meantime. Raise StaleSampleError, after releasing the others, for samples that were
        acknowledged or that another claim holds now."""
        return self.perform(claim.settle_claims, c.Nack, meta)

    def extend(self, meta: KVBatchMeta, lease_s: float) -> list[str]:
        """Set the leases of `meta` to end `lease_s` seconds from now. Cleared and stale samples are handled as in
        `ack`."""
        return self.perform(claim.extend, meta, lease_s)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Return whether the partition is complete and each task has consumed every live sample. A sample is
        consumed when it is claimed and, for claims with a `lease_s`, acknowledged. KeyError for an unknown task."""
        return self.perform(claim.consumed, partition_id, task_names)

    def clear_samples(self, sample_ids: Names | None, partition_id: str) -> None:
        """Delete exactly these samples (unknown ids and stale samples of a meta are ignored), or
        with None the whole partition including its schema. Their space is reused after the last
        reader has finished. Idempotent."""
        self.perform(partitions.clear, sample_ids, partition_id)

    def seal(self, partition_id: str) -> None:
        """Reject new sample ids from now on: the partition is complete. KeyError if it is unknown."""
        self.perform(partitions.ask, c.Seal(partition=name_of("partition_id", partition_id)))

    def list_samples(self, partition_id: str) -> KVBatchMeta:
        """Return all live samples, oldest first, with tags. `fields` lists the fields that every sample has."""
        return self.perform(partitions.list_samples, partition_id)

    def set_tags(self, sample_ids: Names, partition_id: str, tags: Sequence[Mapping[str, Any]]) -> None:
        """Merge one mapping of tags per sample into live samples, atomically. KeyError if any sample does not
        exist."""
        self.perform(partitions.set_tags, sample_ids, partition_id, tags)

    def set_version(self, partition_id: str, version: int) -> None:
        """Set the version of the trainer's weights. Claims with `max_lag` are relative to it (0 until it is set; it
        may decrease). Waiting claims are evaluated again. KeyError for an unknown partition."""
        name_of("partition_id", partition_id)
        self.perform(partitions.ask, c.SetVersion(partition=partition_id, version=version))

    def why_blocked(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str] = (),
        **conditions: Unpack[ClaimConditions],
    ) -> c.Blocked:
        """Explain why such a claim would wait now: the missing fields, groups and samples; how many samples are
        ready, leased, held, or rejected by each predicate; which sessions wrote last and how long ago. `why`
        summarizes this in a sentence. The TimeoutError of every claim has the same attributes. conditions: see
        `ClaimConditions`. KeyError for an unknown partition or task."""
        return self.perform(claim.why_blocked, partition_id, task_name, required_fields, **conditions)

    def checkpoint(self, path: str | os.PathLike[str], partitions: Sequence[str] | None = None) -> CheckpointInfo:
        """Save partitions (None: all) to a directory as one consistent snapshot, while other clients continue.
        Later puts, claims and clears do not change the snapshot, and the space of its rows is not reused until it
        is written.

        The checkpoint contains samples in their order, fields, tags, schema, size, seal, version, and the permanent
        claims of each task. A sample that is leased, held for a rank, or claimed by a client that has made no call
        since is saved as unclaimed, because its holder is not part of the checkpoint. The age for `partial_after_s`
        and the shares of steps are not saved.

        path: a new path, an empty directory, or an older checkpoint, but not a mount point. An older
        checkpoint is replaced when the new one is complete and synced to disk, and survives any
        earlier failure; foreign files in its directory are kept. Rows that samples share are written
        once (once for each 2^18 samples of a partition). Memory use is about 300 MB, or
        twice the largest value; the call blocks until done. Raise KeyError for an unknown partition,
        `CheckpointWriteError` (an OSError) naming the file on a disk failure, `CheckpointError` (a
        ValueError) if `path` holds something else, or another process saves to it.
        """
        return self.perform(checkpoint, path, partitions)

    def restore(
        self, path: str | os.PathLike[str], partitions: Sequence[str] | None = None, *, replace: bool = False
    ) -> CheckpointInfo:
        """Restore partitions (None: all) from a checkpoint, atomically, into a service with any number and size of
        storage units. If another process saves to the path meanwhile, `CheckpointError` is raised: restore again.

        First the checksum of every file is verified: `CheckpointError` (a ValueError) names a file that is missing,
        truncated, changed or of another format, and nothing is written. An existing partition raises
        `PartitionExistsError` (a ValueError). With `replace=True` it is dropped after the saved one is completely
        written (its waiting callers get a `PartitionDroppedError`), so both must fit. Too little space raises
        `RequestTooLargeError` or `CapacityTimeoutError`. All partitions become visible at once; a failure leaves
        nothing behind. Metas from before the restore are stale.
        """
        return self.perform(restore, path, partitions, replace=replace)

    def stats(self) -> c.StatsReport:
        """Return the state of the service: units with their bytes, partitions with their counts, sessions."""
        return self.perform(partitions.stats)

    def matrix(self, partition_id: str, *, columns: int = 256) -> c.Matrix:
        """Return production and consumption of a partition. Its live samples are divided by age into at most
        `columns` parts (up to 4,096). For each part, the result counts the samples that have each field and that
        each task has claimed (estimated for large partitions)."""
        return self.perform(partitions.matrix, partition_id, columns)

    def show_sample(self, sample_id: str, partition_id: str | None = None) -> c.Shown:
        """Return all facts about one sample: location and length of each field, its tags, and its state for each
        task. Without a partition, search the first that contains the sample. `SampleNotFoundError` if none does."""
        return self.perform(partitions.show_sample, sample_id, partition_id)

    def memory_map(self, unit: int, *, cells: int = 256) -> c.MemoryMap:
        """Return the usage of a storage unit's arena by address, in at most `cells` parts (up to 4,096)."""
        return self.perform(partitions.memory_map, unit, cells)

    def waits(self) -> c.WaitList:
        """Return the waiting claims and puts, longest wait first: the session, what it waits for, its start and its
        deadline."""
        return self.perform(partitions.waits)

    def drain(
        self,
        unit: int,
        timeout_s: float | None = 600.0,
        *,
        force: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Drained:
        """Empty a storage unit: the service places no new rows there, and existing rows move to other units while
        clients continue. Metas, claims, tags and versions stay valid, and shared rows stay shared; readers finish
        on the old bytes. Space for the copies does not count against budgets and may be space reserved for updates.
        Return when the unit has no rows and no reservations, after a short wait for readers that still hold bytes
        (`pinned_bytes` of the result); then `drop_unit` can remove the unit. Raise `DrainError`, which lists the
        remaining rows and the reason, if the other units have no space, the unit cannot be read, or `timeout_s`
        expires. The unit stays marked, and another call continues the drain. Raise `ChecksumError` for a damaged
        row: clear it or produce it again. force: drain even if no other unit accepts new rows; otherwise that is an
        immediate `DrainError` without any change. on_progress: called with a `DrainProgress` after each moved part."""
        return self.perform(drain_unit.drain, unit, timeout_s, force, on_progress)

    def undrain(self, unit: int) -> None:
        """Allow new rows again on a storage unit that was marked for draining. ValueError if it is unknown."""
        self.perform(drain_unit.undrain, unit)

    def drop_unit(self, unit: int, *, force: bool = False) -> None:
        """Remove a storage unit permanently, so that its process can end. If it holds rows, raise ValueError, or
        with `force=True` clear the rows: `drain` the unit first. Later requests for such a row raise a KeyError
        with it in `lost` and `causes` (the last 4,096 of a partition are remembered). ValueError also for an
        unknown unit."""
        self.perform(drain_unit.forget, unit, force)

    def close(self) -> None:
        """Reject new calls, wait for copies in flight, release everything that the session holds, and close it. A
        service that this client was bootstrapped with stops too. Idempotent. Calls waiting in other threads raise
        `ClientClosedError`. Views from `copy=False` stay valid. Garbage collection of a client closes it as well.

        It can be repeated after an error. After an interrupt, a thread closes the session. Raises `ReentrantCallError`
        in a signal handler or finalizer that interrupts a call of this client."""
        self._connections.close()
        if self._owns is not None:
            self._owns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return DataPlaneClient, (self._config,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config.address!r})"

    def perform(
        self, operation: Callable[Concatenate[SessionState, P], Operation[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Execute a custom operation, written like those of `dataplane.client.operations`. Block as long as the
        operation does."""
        connection = self._connections.get()
        steps = operation(connection.session_state, *args, **kwargs)
        if self._emitter.on_event is not None:
            steps = self._emitter.observed(steps, operation.__name__)
        return connection.run(steps)
