"""A torch `DataLoader` over a partition: micro-batches in order of readiness, with prefetching."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, Unpack

import torch
from torch.utils.data import DataLoader, IterableDataset

from dataplane.client.client import DataPlaneClient
from dataplane.client.operations.claim import ClaimOptions, convert_options
from dataplane.core import devices
from dataplane.core.arguments import whole_number
from dataplane.core.durations import as_timeout
from dataplane.core.failpoints import failpoint
from dataplane.core.schema import Layout, round_up
from dataplane.data.batch import BatchedDataDict, materialize
from dataplane.data.columns import use_on_current_stream
from dataplane.data.meta import KVBatchMeta, list_of_names, name_of
from dataplane.errors import (
    CallTimeoutError,
    ClaimTimeoutError,
    ClientClosedError,
    DataPlaneError,
    PartitionDroppedError,
    PartitionNotFoundError,
    StaleSampleError,
)

log = logging.getLogger(__name__)


class MicroBatch(NamedTuple):
    """Columns, and the meta that names their samples, row for row."""

    data: BatchedDataDict[Any]
    meta: KVBatchMeta


Take = Callable[[], MicroBatch | None]
Form = Callable[[Mapping[str, Any], KVBatchMeta], BatchedDataDict[Any]]


class Replicas(Protocol):
    """Ranks that need identical micro-batches; one of them, the leader, claims these."""

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""

    @property
    def device(self) -> torch.device | None:
        """The device to which the leader reads; None: the CPU."""

    def share(self, take: Take, form: Form) -> MicroBatch | None:
        """Return on every rank the micro-batch that `take` returns on the leader, with its jagged columns converted
        by `form`. An error on any rank is raised on all ranks."""


class StreamingDataLoader(DataLoader[MicroBatch]):
    """Iterates over `MicroBatch`es (data, meta) of `batch_size` samples that have all of `fields`, as they become
    ready.

    Each micro-batch moves the task's cursor, as `claim_meta` does: loaders of one task never get the same sample
    twice, regardless of the number of ranks. The stream ends when the partition is complete (sealed, or all samples
    created) and no samples are left to claim or leased to another consumer. Its last micro-batch may be smaller.

    Iterating again continues where the last iteration stopped, also after the end of an epoch; an epoch lasts until
    the stream ends. For the next epoch, register the partition again (its sample count restarts), put its samples,
    and iterate again; `first_step` continues to count. Until then, iterating again ends immediately.

    client: stays open; the prefetch thread uses it. fields: the columns to read. required_fields: fields that samples
    must have (default: `fields`). timeout_s: how long to wait for a micro-batch before a TimeoutError that names
    what is missing (None or infinity: without a limit); iterating again resumes the wait.
    prefetch: number of micro-batches that a thread fetches in advance; with 0, each is claimed on
    request. num_workers: must be 0; the prefetch thread reads in parallel with the trainer and
    releases the GIL while it waits and copies.

    layout, pad_value_dict: see `materialize`. Padded per-token columns have the length of the longest sample of the
    micro-batch (by the tag `input_lengths`, else each by its longest row), rounded up to `pad_to_multiple`. device:
    device of the tensors. options: see `ClaimOptions`. lease_s: the lease of a micro-batch starts when it is
    returned. It is acknowledged by requesting the next one (or by clearing the samples); otherwise the samples are
    released when the lease expires. `StaleSampleError` if the next one is requested after the lease expired, even
    if the samples were cleared in time.

    dp_rank, dp_world: micro-batch k is this rank's share of step k, which has `batch_size * dp_world` samples and
    is divided so that token counts balance. All ranks must use the same arguments, including `first_step`. Without
    them, every rank takes the next available samples, so that faster ranks take more.

    replicas: the sibling ranks that get the same micro-batches (`TQWorkerMixin.stream` sets them). All of them must
    iterate in step and close at the same micro-batch.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        task_name: str,
        fields: Sequence[str],
        *,
        batch_size: int,
        required_fields: Sequence[str] | None = None,
        timeout_s: float | None = 60.0,
        prefetch: int = 2,
        num_workers: int = 0,
        layout: Layout = "padded",
        pad_value_dict: Mapping[str, Any] | None = None,
        pad_to_multiple: int = 1,
        device: torch.device | str | None = None,
        dp_rank: int | None = None,
        dp_world: int | None = None,
        first_step: int = 0,
        replicas: Replicas | None = None,
        **options: Unpack[ClaimOptions],
    ) -> None:
        if num_workers:
            raise ValueError(f"num_workers={num_workers}: expected 0; use prefetch to read in a thread")
        batch_size = whole_number("batch_size", batch_size, 1)
        prefetch = whole_number("prefetch", prefetch, 0)
        pad_to_multiple = whole_number("pad_to_multiple", pad_to_multiple, 1)
        first_step = whole_number("first_step", first_step, 0)
        if (dp_world is not None) != (dp_rank is not None):
            raise ValueError(f"{dp_rank=}, {dp_world=}: pass both or neither")
        if dp_world is not None:
            dp_world = whole_number("dp_world", dp_world, 1)
        timeout_s = as_timeout("timeout_s", timeout_s)
        lease_s = convert_options(ClaimOptions, options).get("lease_s")
        fields = tuple(list_of_names("fields", fields))
        required = fields if required_fields is None else tuple(list_of_names("required_fields", required_fields))
        gpu = None if device is None else devices.gpu(device)  # with the index that is current in this thread
        form = _BatchForm(fields, layout, pad_value_dict, pad_to_multiple, device if gpu is None else gpu)
        claims = _ClaimReader(
            client=client,
            partition=name_of("partition_id", partition_id),
            task=name_of("task_name", task_name),
            claim={
                "required_fields": required,
                "batch_size": batch_size * (dp_world or 1),
                **options,
                **({} if dp_world is None else {"dp_rank": dp_rank, "dp_world": dp_world}),
            },
            lease_s=lease_s,
            # Replicas share the jagged columns, and each converts them by `form.convert`.
            read=form.read if replicas is None else partial(form.read_jagged, device=replicas.device),
            step=None if dp_world is None else first_step,
        )
        self._stream = _Stream(claims, form, replicas, prefetch=prefetch, timeout_s=timeout_s)
        super().__init__(self._stream, batch_size=None, num_workers=0, collate_fn=_identity)

    def close(self) -> None:
        """End the stream: prefetched micro-batches are released, and a waiting consumer gets `ClientClosedError`.

        Block up to `CLAIM_S` and for a pending read. Idempotent; the client stays open.
        """
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _identity(item: Any) -> Any:
    return item


class _Stream(IterableDataset[MicroBatch]):
    """The dataset of the loader: yields the micro-batches that this process, or the leader of
    `replicas`, claims. A lease starts when its micro-batch is returned, and is acknowledged when
    the next one is requested. After `close`, iterating raises `ClientClosedError`."""

    def __init__(
        self,
        claims: _ClaimReader,
        form: _BatchForm,
        replicas: Replicas | None,
        *,
        prefetch: int,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._claims = claims
        self._form = form
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._leased: KVBatchMeta | None = None
        """The last returned micro-batch; None without leases, and after its acknowledgement."""
        self._leased_until = 0.0
        """The monotonic time at which the lease of `_leased` ends."""
        self._closed = False
        self._prefetcher: Prefetcher[MicroBatch] | None = None
        if prefetch and (replicas is None or replicas.leads):
            self._prefetcher = Prefetcher(
                claims.next,
                lambda batch: claims.release(batch.meta),
                capacity=prefetch,
                name=f"stream of {claims.partition}/{claims.task}",
                timeout_s=timeout_s,
            )
            weakref.finalize(self, self._prefetcher.stop)  # its thread does not refer to this object

    def __iter__(self) -> Iterator[MicroBatch]:
        while not self._closed:
            if self._replicas is None:
                batch = self._take()
            else:
                batch = self._replicas.share(self._take, self._form.convert)
            if batch is None:
                return
            yield batch
        raise closed_error()

    def _take(self) -> MicroBatch | None:
        """Acknowledge the last micro-batch and return the next one; None at the end. Raise
        TimeoutError after the timeout, and the errors of claims and reads."""
        leased = self._leased
        self._leased = None  # first: after an error, it is not acknowledged again
        if leased is not None:
            self._acknowledge(leased)
        deadline = time.monotonic() + self._timeout_s
        take = self._claims.next if self._prefetcher is None else self._prefetcher.take
        while True:  # until a micro-batch need not be skipped
            batch = take(max(deadline - time.monotonic(), 0.0))
            if batch is None:
                return None
            if self._renew_lease(batch.meta):
                use_on_current_stream(batch.data.values())
                return batch

    def _acknowledge(self, meta: KVBatchMeta) -> None:
        """Acknowledge the last micro-batch. Samples cleared during the lease were cleared by the
        caller. After it, another consumer may have used and cleared them: raise
        `StaleSampleError`."""
        cleared = self._claims.client.ack(meta)
        if cleared and time.monotonic() > self._leased_until:
            task = self._claims.task
            raise StaleSampleError(partition=meta.partition_id, task=task, samples=cleared, positions=[])

    def _renew_lease(self, meta: KVBatchMeta) -> bool:
        """Start the lease of a micro-batch again and set `_leased`, if there are leases. Return
        False if it must be skipped: another claim could have taken samples of it, or all of them
        were cleared."""
        if self._claims.lease_s is None:
            return True
        until = time.monotonic() + self._claims.lease_s  # before the call: the lease ends later at the service
        try:
            cleared = self._claims.client.extend(meta, self._claims.lease_s)
        except StaleSampleError as error:
            log.warning("Leases of prefetched samples expired; reduce prefetch or increase lease_s (%s)", error)
            self._claims.release(meta)
            return False
        if len(cleared) == meta.size:
            return False
        self._leased = meta
        self._leased_until = until
        failpoint("stream.handed_out")  # a failpoint, for tests
        return True

    def close(self) -> None:
        self._closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()


@dataclass(frozen=True)
class _BatchForm:
    """The form of micro-batches: columns, layout, width and device."""

    fields: tuple[str, ...]
    layout: Layout
    pad_value_dict: Mapping[str, Any] | None
    pad_to_multiple: int
    device: torch.device | str | None

    def read(self, client: DataPlaneClient, meta: KVBatchMeta) -> BatchedDataDict[Any]:
        """Read the columns of the meta's samples in this form."""
        if self.layout == "padded" and self.pad_to_multiple > 1 and not meta.sequence_lengths:
            # The width, the longest row rounded up to a multiple, is known only after the rows were read.
            batch = self.convert(self.read_jagged(client, meta, device=self.device), meta)
            if self.device is not None and devices.gpu(self.device) is not None:  # the consumer may use another stream
                devices.current_stream(torch.device(self.device)).synchronize()
            return batch
        return client.get_batch(
            meta,
            self.fields,
            layout=self.layout,
            pad_value_dict=self.pad_value_dict,
            pad_to_seqlen=self._width(meta),
            device=self.device,
        )

    def read_jagged(
        self, client: DataPlaneClient, meta: KVBatchMeta, *, device: torch.device | str | None
    ) -> BatchedDataDict[Any]:
        return client.get_batch(meta, self.fields, layout="jagged", device=device)

    def convert(self, columns: Mapping[str, Any], meta: KVBatchMeta) -> BatchedDataDict[Any]:
        """Convert the result of `read_jagged` to that of `read`."""
        batch = materialize(
            columns,
            self.layout,
            self.pad_value_dict,
            self._width(meta),
            sequence_lengths=meta.sequence_lengths,
            pad_to_multiple=self.pad_to_multiple,
        )
        return batch if self.device is None else batch.to(self.device)

    def _width(self, meta: KVBatchMeta) -> int:
        """Return the length to pad to, or 0 if the columns are not padded or the meta has no sequence lengths."""
        if self.layout != "padded" or not meta.sequence_lengths:
            return 0
        return round_up(max(meta.sequence_lengths), self.pad_to_multiple)


@dataclass(kw_only=True)
class _ClaimReader:
    """Claims and reads one micro-batch after another. Not thread-safe.
    claim: further arguments of each `claim_meta`. lease_s: duration of the leases, or None. read:
    reads the columns of claimed samples. step: step of the next share, or None if claims are not
    shares.
    """

    client: DataPlaneClient
    partition: str
    task: str
    claim: dict[str, Any]
    lease_s: float | None
    read: Callable[[DataPlaneClient, KVBatchMeta], BatchedDataDict[Any]]
    step: int | None

    def next(self, timeout_s: float) -> MicroBatch | None:
        """Return the next micro-batch, None at the end. Raise `ClaimTimeoutError` after `timeout_s`, with nothing
        claimed. If the read fails, the claimed samples are released."""
        meta = self._next_meta(timeout_s)
        if not meta.size:
            return None
        try:
            failpoint("stream.claimed")  # a failpoint, for tests
            batch = MicroBatch(self.read(self.client, meta), meta)
            failpoint("stream.read")
            return batch
        except BaseException:
            self.release(meta)
            raise

    def _next_meta(self, timeout_s: float) -> KVBatchMeta:
        """Claim the next micro-batch, skipping shares whose samples were all cleared. The meta is empty at the end."""
        if self.step is None:
            return self.client.claim_meta(self.partition, self.task, **self.claim, timeout_s=timeout_s)
        while True:
            meta = self.client.claim_meta(self.partition, self.task, **self.claim, timeout_s=timeout_s, step=self.step)
            self.step += 1
            # An empty share is the end only if the partition is complete and consumed.
            if meta.size or self.client.check_consumption_status(self.partition, [self.task]):
                return meta
            log.debug("All samples of this rank's share of step %d were cleared", self.step - 1)

    def release(self, meta: KVBatchMeta) -> None:
        """Release these samples, except those that other claims hold now. Failures are logged."""
        try:
            self.client.nack(meta)
        except DataPlaneError as error:
            log.warning("Not all of %d samples of the stream of task %r were released: %s", meta.size, self.task, error)


T = TypeVar("T")
CLAIM_S = 1.0
"""Longest wait of one claim by the prefetch thread, and thus the longest delay of closing."""


def closed_error() -> ClientClosedError:
    return ClientClosedError(why="the StreamingDataLoader was closed; create another one")


class Prefetcher(Generic[T]):
    """Keeps up to `capacity` micro-batches ready for one consumer. Its thread starts at once, and
    ends with the stream, at an error of a claim, or when it is stopped. After `take` has reported
    the end or an error, the next `take` starts a new thread.

    claim: waits up to the given seconds for the next micro-batch and returns None at the end of the
    stream. release: gives a micro-batch that nobody took back to the task. timeout_s: of the
    consumer, which the message of its TimeoutError states.
    """

    def __init__(
        self,
        claim: Callable[[float], T | None],
        release: Callable[[T], None],
        *,
        capacity: int,
        name: str,
        timeout_s: float,
    ) -> None:
        self._claim = claim
        self._release = release
        self._capacity = capacity
        self._name = name
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._late: ClaimTimeoutError | None = None
        """The error of the last claim, if it timed out."""
        self._ended = False
        """Whether the thread has ended, at the end of the stream or with `_failure`."""
        self._failure: Exception | None = None
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._late = None
        self._ended = False
        self._failure = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Claim and read while there is space, until the end, an error or `stop`."""
        # The consumer's timeout error reports why the last claim timed out, so a claim must have timed out before that.
        claim_s = min(CLAIM_S, max(self._timeout_s / 2, 0.05))  # at least 50 ms
        while self._wait_for_space():
            try:
                batch = self._claim(claim_s)
            except ClaimTimeoutError as error:
                self._late = error
                continue
            except Exception as error:
                self._end(error)
                return
            if batch is None:
                self._end(None)
                return
            with self._changed:
                self._ready.append(batch)
                self._late = None
                self._changed.notify_all()
        self._release_rest()  # stopped, perhaps during a claim, whose micro-batch nobody takes

    def _wait_for_space(self) -> bool:
        """Block until there is space. Return False after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._capacity)
            return not self._closed

    def _end(self, failure: Exception | None) -> None:
        with self._changed:
            self._ended = True
            self._failure = failure
            self._changed.notify_all()

    def take(self, timeout_s: float) -> T | None:
        """Remove and return the first micro-batch, None at the end. Raise `ClientClosedError` after
        `stop`, the error that ended the thread, or TimeoutError after `timeout_s`."""
        with self._changed:
            if self._must_start():
                self._start()
            in_time = self._changed.wait_for(lambda: self._ready or self._ended or self._closed, timeout_s)
            if self._closed:
                raise closed_error()
            if self._ready:  # also after the end or an error, which come last
                self._changed.notify_all()  # the thread has space
                return self._ready.popleft()
            if not in_time:
                raise self._timeout_error()
            self._thread = None  # the end is reported now
            if self._failure is not None:
                raise self._failure
            return None

    def _must_start(self) -> bool:
        """Return whether the end was reported, or the partition did not exist: it may exist again."""
        no_partition = isinstance(self._failure, PartitionNotFoundError | PartitionDroppedError)
        return not self._closed and (self._thread is None or (no_partition and not self._ready))

    def _timeout_error(self) -> Exception:
        """Return the error of the last claim, or one without a reason if no claim has timed out."""
        if self._late is None:
            what = "the next micro-batch of a loader"
            return CallTimeoutError(what=what, waited_s=self._timeout_s, peer="the service")
        return ClaimTimeoutError(**{**self._late.facts, "waited_s": self._timeout_s})

    def stop(self) -> None:
        """End the thread, which releases what is ready. Do not wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread, wait for its end and release what is ready. Idempotent."""
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join()
        self._release_rest()

    def _release_rest(self) -> None:
        with self._changed:
            rest = list(self._ready)
            self._ready.clear()
        for batch in rest:
            self._release(batch)
