"""The client: what rollout engines, reward models, policy workers and the driver call."""

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
from dataplane.data.meta import KVBatchMeta
from dataplane.ledger import commands as c

P = ParamSpec("P")


class Owned(Protocol):
    """What a client closes with itself: the service that it was bootstrapped with."""

    def close(self) -> None: ...


class DataPlaneClient:
    """A client of one service. Thread-safe; a forked child that uses it opens a session of its own; pickling it ships
    the address and settings (token included), and the copy connects where it lands, when first used.

    Every call has a deadline: commands `config.call_timeout_s`; puts also wait up to `config.put_timeout_s` for space,
    claims up to their `timeout_s`. When the service is gone, calls fail at once, or, where it keeps its state
    (`state_dir`), wait up to `config.reconnect_s` for its return, each no longer than its own deadline; then they go on
    as if nothing had happened: what was under way is done once, claims and views stay. A service that comes back
    without its state is a `ServiceRestartedError`, which says what was lost, for every call from then on: open another
    client.

    Errors are those of `dataplane.errors`; besides those named below any call may raise `ServiceUnavailableError`,
    `SessionExpiredError`, `ServiceRestartedError`, `CallTimeoutError` or `ClientClosedError`.

    Samples are named by ids, or by a `KVBatchMeta` that the service minted, which also says *which* sample of that id
    was meant: after a clear, a read or write through the older meta is a `StaleSampleError`, never another sample's
    data.
    """

    def __init__(self, config: DataPlaneConfig, *, owns: Owned | None = None, on_event: OnEvent | None = None) -> None:
        self._config = config
        self._emitter = EventEmitter(on_event)
        self._owns = owns
        self._connections = ForkLocal(lambda: Connection(config))

    def connect(self) -> Self:
        """Open the session now rather than at the first call. `ServiceUnavailableError` or `AuthenticationError` if it
        cannot be, within `config.connect_timeout_s`."""
        self._connections.get()
        return self

    @property
    def config(self) -> DataPlaneConfig:
        """The settings this client was made with."""
        return self._config

    @property
    def on_event(self) -> OnEvent | None:
        """Called with an `OpEvent` at the end of every operation, in its thread; None: nobody is. What it raises is
        logged once and nothing else. A pickled client's copy has none, a forked child's is the parent's."""
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
        """Declare a partition, or replace schema, expected size and tasks of a live one: its rows, tags and the
        cursors of tasks that stay are kept, a seal is lifted and a new count begins.

        fields: names, or name -> FieldSpec, as in `docs/concepts.md`. num_samples: how many samples will be born until
        the partition is complete (None: not known, until `seal`). consumer_tasks: the only tasks that may claim.
        grpo_group_size: samples to a group, kept for whoever asks. enums: the values a tag may have. strict: a put of
        an undeclared field is a ValueError instead of extending the schema.

        budget_bytes: the most that the partition may occupy in all storage units (None: whatever they have; a unit's
        own budget is its capacity): rows that live, space of puts under way, and cleared rows that are still read;
        shared rows once, each column of a put rounded up to 64 bytes. As of a unit's capacity, 15 percent
        (`config.reserve_fraction`) of it is for updates of existing rows. A put larger than that is a
        `RequestTooLargeError`.

        when_full: what becomes of a put that finds no space in the budget or the units. "wait": it waits, first come
        first served, and holds up nobody who has space, until `CapacityTimeoutError`. "reject": that error at once.
        "evict": consumed samples of this partition go first, oldest first: those that every task (one at least) has
        claimed for good, and that nobody leases or reads, nor a put under way names; else it waits. A claim without a
        lease is for good as soon as its client has made another call: claim with `lease_s` and `ack` what is still to
        be read or updated. "evict_oldest": the same, and for new rows, if that is not enough, samples that were not
        consumed, oldest first; their number is in `stats()` and the service's log, their ids are in the meta of the put
        that they had to go for (`extra_info["evicted_samples"]`). Who asks for an evicted sample is told (`evicted` of
        the KeyError; the last 4,096 are remembered).

        A new registration replaces both; what waits is judged by it, and a budget below what is there just lets puts
        wait. Checkpoints keep both.
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
        """Store fields and tags of N samples, all or nothing; producing a field is the signal that its stage is done.

        sample_ids: N distinct ids, or a meta (then always an update of exactly those samples). fields: per name N
        rows, as a tensor `[N, *inner]`, nested tensor, list of tensors, `Shared(values, index)`, or a list or array
        of objects.
        tags: one mapping of small scalars per sample, merged into what is there. Without fields only the tags are set;
        without both, samples whose ids are new begin without any field. mode: "upsert", "create" (ids must be new, else
        ValueError), "update" (ids must live, else KeyError) or "append".

        "append" is for samples that are still being generated: what is given of jagged fields goes behind what their
        rows hold (a new sample or field begins with it), other fields and tags are set as ever, all of it visible at
        once or not at all; a tag such as `finished` put with the last piece is seen by predicates exactly when the
        piece is. Appends of one client are in its order; when another writes the same rows at the same time, the append
        begins anew, and after some times is a `RowsChangedError`. The rows are copied to new space each time, once more
        through this process, so that reads find every row in one piece: append what a stretch of generation gave, not
        token by token. By ids, a sample that was cleared meanwhile may begin anew; through the meta of an earlier put
        that is a `StaleSampleError`.

        Returns a meta with handles and, where all per-token columns agree, sequence lengths. When it returns, the
        bytes are in the arena and visible; the caller's tensors may change. Waits for space up to
        `config.put_timeout_s` (or as the partition's `when_full` says), then `CapacityTimeoutError`, which says who
        holds it. Raises KeyError for an unknown partition, ValueError for duplicates, wrong counts or a field whose
        kind, dtype or inner shape differs from its live rows, TypeError for arguments of another type and values no
        column can hold; `StaleSchemaError` (a ValueError) if others clear or register the partition anew at each try.
        """
        return self.perform(put.put, sample_ids, partition_id, fields, tags, mode)

    def get_samples(
        self, sample_ids: Names, partition_id: str, select_fields: Sequence[str], *, copy: bool = True
    ) -> TensorDict:
        """The fields of exactly these samples, in this order, `batch_size [N]`; no cursor moves.

        Dense fields come as `[N, *inner]`, jagged ones as nested tensors, ragged ones as lists, objects as
        `NonTensorStack`. With `copy=False` rows that lie together on this host come as read-only views of shared memory
        (do not write to them); their space is not reused while any view lives. Raises KeyError naming what is missing:
        partition, sample, field, or a field not produced for a sample.
        """
        return self.perform(get.get, sample_ids, partition_id, select_fields, copy)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """`get_samples` of the meta's samples; `select_fields` defaults to `meta.fields` (ValueError if both are
        empty)."""
        fields = get.chosen_fields(meta, select_fields)
        return self.perform(get.get, meta, meta.partition_id, fields, True)

    def locate(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> KVBatchMeta:
        """The meta, carrying where its samples' fields (default: `meta.fields`) are now, also through pickle, `subset`,
        `slice` and `concat`. `get_samples`, `get_data` and `get_batch` through it then copy from there while they ask
        the service, instead of after, and ask it once more only where something has changed meanwhile: overwritten,
        cleared, moved or damaged rows are never returned. It takes about 30 bytes a cell, and is worth it where the way
        to the service is long: locate once, after a claim, what many ranks then read. Objects are looked up first in
        any case, and so does an async client. KeyError as `get_samples`.
        """
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
    ) -> BatchedDataDict[Any]:
        """`get_data` then `materialize`, in one copy: rows go from the arena straight into the padded tensors.

        layout: "padded" makes jagged fields `[N, S, *inner]` with S the longest row or, for per-token ones (see
        `materialize`; `meta.sequence_lengths` are the tokens), `pad_to_seqlen` if that is more (ValueError if less),
        filled with `pad_value_dict[field]` (default 0); "jagged" leaves them nested. device: where the tensors end.
        """
        batch = self.perform(
            get.get_batch,
            meta,
            get.chosen_fields(meta, select_fields),
            layout=layout,
            pad_value_dict=pad_value_dict,
            pad_to_seqlen=pad_to_seqlen,
        )
        return batch if device is None else batch.to(device)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        dp_world: int | None = None,
        step: int | None = None,
        **options: Unpack[ClaimOptions],
    ) -> KVBatchMeta:
        """Move the task's cursor over `batch_size` samples whose `required_fields` are all produced and which the
        task has not claimed, oldest first; each sample goes to one claim of a task only.

        Waits on the service until that many (or `min_batch_size`) are ready. Once the partition is complete and fewer
        are left, waits for all of those and for open leases, and returns what there is, possibly nothing. At
        `timeout_s` (finite) raises TimeoutError saying what was missing, having claimed nothing. `blocking=False`
        returns what is ready, possibly none.

        options: see `ClaimOptions`. Unknown partition or task: KeyError at once.

        dp_rank with dp_world and step: the rank's share of one selection of `batch_size` samples, fixed by the first
        rank that asks for the step; the others get theirs whenever they ask, in any order. `batch_size` is that of the
        whole step and a multiple of `dp_world` (times `group_size`; groups are never split). Shares have equal numbers
        of samples (of groups), at the tail of a complete partition numbers that differ by one at most, possibly none;
        `blocking=False` returns an empty meta while the step cannot be fixed. All ranks ask on the same terms (sizes,
        fields, where, order, sampler), else ValueError naming both. A share is handed out once: asking again is a
        ValueError, unless the claim was given back (`nack`, lease over, its client died before it had the answer):
        then what came back is handed out if it is still free, and is a `ShareConflictError` if another claim took it.
        Shares nobody asked for go back after `lease_s` (600 s if None); cleared samples are left out. Steps are
        remembered for the last 256 of a task. Without the other two, `dp_rank` is only recorded. Either way it is
        `extra_info["dp_rank"]`.
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
        """Mark the leased samples of `meta` as consumed. Returns the ids of those that were cleared meanwhile.
        StaleSampleError: the claim of `meta` has lost its lease on `error.samples`; the others are acknowledged.
        ValueError: no claim returned `meta`."""
        return self.perform(claim.about_claimed, c.Ack, meta)

    def nack(self, meta: KVBatchMeta) -> list[str]:
        """Give claimed samples back; the task may claim them again. Gives the ids of those cleared meanwhile.
        StaleSampleError, once the others are back, has those that were acknowledged, or are another claim's now."""
        return self.perform(claim.about_claimed, c.Nack, meta)

    def extend(self, meta: KVBatchMeta, lease_s: float) -> list[str]:
        """Let the leases of `meta` end `lease_s` seconds from now. Cleared and stale samples: see `ack`."""
        return self.perform(claim.extend, meta, lease_s)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether the partition is complete and each task has consumed every live sample: claimed it and, where the
        claim had a `lease_s`, acknowledged it. KeyError for an unknown task."""
        return self.perform(claim.consumed, partition_id, task_names)

    def clear_samples(self, sample_ids: Names | None, partition_id: str) -> None:
        """Drop exactly these samples (unknown ones are ignored), or with None the whole partition, schema too. Their
        space is reused when nobody reads them any more. Idempotent."""
        self.perform(partitions.clear, sample_ids, partition_id)

    def seal(self, partition_id: str) -> None:
        """No new ids from now on: the partition is complete. KeyError if unknown."""
        self.perform(partitions.ask, c.Seal(partition=partition_id))

    def list_samples(self, partition_id: str) -> KVBatchMeta:
        """All live samples, oldest first, with tags; `fields` are those produced for every one of them."""
        return self.perform(partitions.list_samples, partition_id)

    def set_tags(self, sample_ids: Names, partition_id: str, tags: Sequence[Mapping[str, Any]]) -> None:
        """Merge one mapping of tags per sample into live samples, all or none. KeyError for samples that are not
        there."""
        self.perform(partitions.set_tags, sample_ids, partition_id, tags)

    def set_version(self, partition_id: str, version: int) -> None:
        """The trainer's weights are at this version now: claims with `max_lag` count from it (from 0 until it was set;
        it may go back). Waiting claims are looked at again. KeyError for an unknown partition."""
        self.perform(partitions.ask, c.SetVersion(partition=partition_id, version=version))

    def why_blocked(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str] = (),
        **conditions: Unpack[ClaimConditions],
    ) -> c.Blocked:
        """Why such a claim would wait now: which fields, groups and samples are missing, how many samples are ready,
        leased, held, or turned away by each predicate, and which sessions wrote last and how long ago. `why` says it in
        a sentence. The same facts are attributes of every claim's TimeoutError. conditions: see
        `ClaimConditions`. KeyError for an unknown partition or task."""
        return self.perform(claim.why_blocked, partition_id, task_name, required_fields, **conditions)

    def checkpoint(self, path: str | os.PathLike[str], partitions: Sequence[str] | None = None) -> CheckpointInfo:
        """Save partitions (None: all) into a directory, as they are together at one instant, while everyone else goes
        on: what is put, claimed or cleared later changes nothing of it, and its space is not reused meanwhile.

        Saved are samples in their order, fields, tags, schema, size, seal, version, and what each task has claimed for
        good. A sample on lease, held for a rank, or claimed by a client that has made no call since is saved as
        unclaimed: whoever has it is not in the checkpoint. Age for `partial_after_s` and the shares of steps are not
        saved.

        path: new, an empty directory, or an older checkpoint's, which is replaced when this one is whole and synced to
        disk, and survives any failure before; what others put into its directory stays. Rows that are shared are
        written once. Needs little memory; blocks until done. Raises KeyError for an unknown partition,
        `CheckpointWriteError` (an OSError) that names the file where the disk fails, `CheckpointError` (a ValueError)
        if something else is at `path`.
        """
        return self.perform(checkpoint, path, partitions)

    def restore(
        self, path: str | os.PathLike[str], partitions: Sequence[str] | None = None, *, replace: bool = False
    ) -> CheckpointInfo:
        """Bring partitions (None: all) of a checkpoint back, all or none, into a service with any number of storage
        units of any size. Meanwhile a newer one may be saved to the path: what is read stays until it is there.

        First every file's checksum is verified: `CheckpointError` (a ValueError) names one that is missing, truncated,
        changed or of another version, and nothing is written. A partition that exists is `PartitionExistsError` (a
        ValueError), or with `replace=True` is dropped when the saved one is there in full (whoever waits on it gets a
        `PartitionDroppedError`): there must be space for both. Too little is `RequestTooLargeError` or
        `CapacityTimeoutError`. All become visible at once; a failure leaves nothing. Metas from before are stale.
        """
        return self.perform(restore, path, partitions, replace=replace)

    def stats(self) -> c.StatsReport:
        """What the service holds: units with their bytes, partitions with their counts, sessions."""
        return self.perform(partitions.stats)

    def matrix(self, partition_id: str, *, columns: int = 256) -> c.Matrix:
        """What of a partition is produced, and claimed by its tasks: its live samples by age in `columns` parts at most
        (up to 4,096), and how many of each part have each field and are claimed by each task (estimated for many)."""
        return self.perform(partitions.matrix, partition_id, columns)

    def show_sample(self, sample_id: str, partition_id: str | None = None) -> c.Shown:
        """Everything about one sample: where each field is, how long, its tags, how each task stands to it. Without a
        partition, in the first that has it. `SampleNotFoundError` if none has."""
        return self.perform(partitions.show_sample, sample_id, partition_id)

    def memory_map(self, unit: int, *, cells: int = 256) -> c.MemoryMap:
        """What the bytes of a storage unit's arena are, by address in `cells` parts at most (up to 4,096)."""
        return self.perform(partitions.memory_map, unit, cells)

    def waits(self) -> c.WaitList:
        """Claims and puts that wait now, longest first: whose, what for, since when and until when."""
        return self.perform(partitions.waits)

    def shrink(self, timeout_s: float = 30.0) -> c.Shrunken:
        """Give memory back to the machine: that of every storage unit above its highest used byte, in whole pages. Rows
        and free space below stay; the next puts make the units grow again. Colocated trainers call it between phases.
        Returns when all units have, `timeout_s` at the latest; `given_bytes` of the result is their sum, `units` has
        each (with an `error` where one is not connected, did not answer, or has a file system without holes).
        """
        return self.perform(partitions.shrink, timeout_s)

    def drain(
        self, unit: int, timeout_s: float = 600.0, *, force: bool = False, on_progress: OnProgress | None = None
    ) -> Drained:
        """Empty a storage unit: nothing new goes there from now on, and what lives there is moved to other units while
        everybody goes on. Metas stay good, claims, tags and versions are as they were, shared rows stay shared; readers
        finish on the old bytes. Budgets do not count what is moved, and it may use the space kept for updates. Returns
        when nothing lives there and no put has space there any more, after a moment for readers who still hold bytes
        (`pinned_bytes` of the result): then `drop_unit` lets the unit go. Raises `DrainError`, which says what is left
        and why, where the other units have no space, the unit cannot be read, or `timeout_s` is over; the unit stays
        marked, and another call goes on. `ChecksumError` for a damaged row: clear or produce it anew.
        force: also where no other unit has space for new rows, else a `DrainError` at once, which changes nothing.
        on_progress: called with a `DrainProgress` after each part that was moved.
        """
        return self.perform(drain_unit.drain, unit, timeout_s, force, on_progress)

    def undrain(self, unit: int) -> None:
        """Let new rows onto a storage unit again that was to be drained. ValueError if unknown."""
        self.perform(drain_unit.undrain, unit)

    def drop_unit(self, unit: int, *, force: bool = False) -> None:
        """Forget a storage unit for good, so that its process can end. With rows living there it is a ValueError, or
        with `force=True` clears them: `drain` it first. Whoever asks for one is told (`lost` and `causes` of the
        KeyError; the last 4,096 of a partition are remembered). ValueError for an unknown unit, too."""
        self.perform(drain_unit.forget, unit, force)

    def close(self) -> None:
        """Refuse new calls, wait for copies in flight, give everything back and say good-bye; a service that this
        client was bootstrapped with ends too. Idempotent; calls waiting in other threads get `ClientClosedError`.
        Views from `copy=False` stay valid. A client that is garbage-collected is closed by itself."""
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
        """Perform an operation that is written like those of `dataplane.client.operations`; blocks as that does."""
        connection = self._connections.get()
        return connection.run(self._emitter.instrumented(operation, connection.session_state, *args, **kwargs))
