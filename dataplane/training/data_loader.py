"""A torch `DataLoader` over a partition: micro-batches in the order in which they become ready, fetched ahead."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, Unpack

import torch
from torch.utils.data import DataLoader, IterableDataset

from dataplane.client.client import DataPlaneClient
from dataplane.client.operations.claim import ClaimOptions, checked
from dataplane.client.operations.sample_names import name_tuple
from dataplane.core.durations import seconds
from dataplane.core.failpoints import hit
from dataplane.core.schema import Layout, round_up
from dataplane.data.batch import BatchedDataDict, materialize
from dataplane.data.meta import KVBatchMeta
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
CLAIM_S = 1.0
"""How long one claim of the thread that fetches ahead waits at most, and so how long closing may take."""


class MicroBatch(NamedTuple):
    """Columns, and the meta that names their samples, row for row."""

    data: BatchedDataDict[Any]
    meta: KVBatchMeta


Take = Callable[[], MicroBatch | None]
Form = Callable[[Mapping[str, Any], KVBatchMeta], BatchedDataDict[Any]]


class Replicas(Protocol):
    """Ranks that all need the same micro-batches, one of which claims them."""

    @property
    def leads(self) -> bool:
        """Whether this rank claims."""

    def share(self, take: Take, form: Form) -> MicroBatch | None:
        """What `take`, called on the rank that leads, returns, on every rank, its jagged columns made into a batch by
        `form`. An error of any rank is one on all."""


class StreamingDataLoader(DataLoader[MicroBatch]):
    """Iterates over `MicroBatch`es (data, meta) of `batch_size` samples that have all of `fields`, as they get ready.

    Each one moves the task's cursor, as `claim_meta` does: loaders of one task never get the same sample twice, however
    many ranks iterate. The stream ends when the partition is complete (sealed, or all its samples were born) and
    nothing is left to claim, nor on lease to another consumer; its last micro-batch may be smaller.

    Iterating again goes on where it stopped, after an end too: an epoch is what lies between two ends. For the next one
    register the partition again (a new count begins), put its samples, and iterate again; `first_step` counts on.
    Until then, iterating again ends at once.

    client: kept open, and used from a thread. fields: the columns to read. required_fields: those that must have been
    produced (default: `fields`). timeout_s: how long to wait for a micro-batch before a TimeoutError that says what is
    missing; iterating again goes on waiting. prefetch: how many micro-batches a thread fetches ahead and holds ready;
    with 0 each is claimed when it is asked for. num_workers: 0; what reads beside the trainer is that thread, whose
    waits and copies leave Python free.

    layout, pad_value_dict: see `materialize`; padded per-token columns are as wide as the micro-batch's longest sample
    (by the tag `input_lengths`, else each by its longest row), rounded up to `pad_to_multiple`. device: where the
    tensors end. options: see `ClaimOptions`. lease_s: micro-batches are leased from the moment they are handed out,
    acknowledged when the next is asked for (or by clearing the samples), and otherwise come back to the pool;
    `StaleSampleError` where the next was asked for after the lease, even if the samples were cleared in time.

    dp_rank, dp_world: micro-batch k is this rank's share of step k, of `batch_size * dp_world` samples, dealt so that
    tokens balance; all ranks stream with the same arguments, from the same `first_step` on. Without them every rank
    takes the next samples there are, so that fast ranks take more.

    replicas: this rank's siblings, which all get the same ones (`TQWorkerMixin.stream` knows them): all iterate in step
    and close at the same micro-batch.
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
        timeout_s: float = 60.0,
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
            raise ValueError(f"num_workers={num_workers}: a stream is read by a thread of this process; see prefetch")
        if batch_size < 1 or prefetch < 0 or pad_to_multiple < 1:
            raise ValueError(f"{batch_size=}, {prefetch=}, {pad_to_multiple=}: expected 1, 0 and 1 or more")
        if (dp_world is not None) != (dp_rank is not None):
            raise ValueError(f"{dp_rank=}, {dp_world=}: a share needs both")
        timeout_s = seconds("timeout_s", timeout_s)
        lease_s = checked(ClaimOptions, options).get("lease_s")
        fields = name_tuple("fields", fields)
        wanted = fields if required_fields is None else name_tuple("required_fields", required_fields)
        form = _Form(fields, layout, pad_value_dict, pad_to_multiple, device)
        claims = _Claims(
            client,
            {
                "partition_id": partition_id,
                "task_name": task_name,
                "required_fields": wanted,
                "batch_size": batch_size * (dp_world or 1),
                **options,
                **({} if dp_world is None else {"dp_rank": dp_rank, "dp_world": dp_world}),
            },
            lease_s=lease_s,
            read=form.read if replicas is None else form.read_jagged,
            step=None if dp_world is None else first_step,
        )
        self._stream = _Stream(claims, form, replicas, prefetch=prefetch, timeout_s=timeout_s)
        super().__init__(self._stream, batch_size=None, num_workers=0, collate_fn=_as_it_is)

    def close(self) -> None:
        """End the stream: what was fetched ahead goes back to the pool, and whoever waits gets `ClientClosedError`.

        Blocks up to `CLAIM_S` and for a read under way. Idempotent; the client stays open.
        """
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_it_is(item: Any) -> Any:
    return item


class _Stream(IterableDataset[MicroBatch]):
    """What the loader iterates over: hands out what is claimed here, or what the rank that leads claimed."""

    def __init__(
        self, claims: _Claims, form: _Form, replicas: Replicas | None, *, prefetch: int, timeout_s: float
    ) -> None:
        super().__init__()
        self._form = form
        self._replicas = replicas
        self._taking = _Taking(claims, prefetch, timeout_s) if replicas is None or replicas.leads else None
        self._closed = False

    def __iter__(self) -> Iterator[MicroBatch]:
        while not self._closed:
            taken = self._next()
            if taken is None:
                return
            yield taken
        raise ClientClosedError(why="the stream was closed")

    def _next(self) -> MicroBatch | None:
        if self._replicas is None:
            assert self._taking is not None
            return self._taking()
        return self._replicas.share(self._take_for_all, self._form.of)

    def _take_for_all(self) -> MicroBatch | None:
        assert self._taking is not None, "only the rank that leads claims"
        return self._taking()

    def close(self) -> None:
        self._closed = True
        if self._taking is not None:
            self._taking.close()


@dataclass(frozen=True)
class _Form:
    """How micro-batches come: which columns, in which layout, how wide, where."""

    fields: tuple[str, ...]
    layout: Layout
    pad_value_dict: Mapping[str, Any] | None
    pad_to_multiple: int
    device: torch.device | str | None

    def read(self, client: DataPlaneClient, meta: KVBatchMeta) -> BatchedDataDict[Any]:
        if self.layout == "padded" and self.pad_to_multiple > 1 and not meta.sequence_lengths:
            return self.of(self.read_jagged(client, meta), meta)
        return client.get_batch(
            meta,
            self.fields,
            layout=self.layout,
            pad_value_dict=self.pad_value_dict,
            pad_to_seqlen=self._width(meta),
            device=self.device,
        )

    def read_jagged(self, client: DataPlaneClient, meta: KVBatchMeta) -> BatchedDataDict[Any]:
        return client.get_batch(meta, self.fields, layout="jagged")

    def of(self, columns: Mapping[str, Any], meta: KVBatchMeta) -> BatchedDataDict[Any]:
        """What `read` gives, of what `read_jagged` gave."""
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
        """0 where the meta does not know its lengths."""
        if self.layout != "padded" or not meta.sequence_lengths:
            return 0
        return round_up(max(meta.sequence_lengths), self.pad_to_multiple)


class _Claims:
    """Claims one micro-batch after another and reads it. For one thread at a time.

    claim: the arguments of each `claim_meta`. lease_s: of its leases, None where there are none. read: the columns of
    what was claimed. step: of the first share, None where the claims are no shares.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        claim: dict[str, Any],
        *,
        lease_s: float | None,
        read: Callable[[DataPlaneClient, KVBatchMeta], BatchedDataDict[Any]],
        step: int | None,
    ) -> None:
        self.client = client
        self.partition: str = claim["partition_id"]
        self.task: str = claim["task_name"]
        self.lease_s = lease_s
        self._claim = claim
        self._read = read
        self._step = step

    def next(self, timeout_s: float) -> MicroBatch | None:
        """The next micro-batch, None at the end. `ClaimTimeoutError` after `timeout_s`, with nothing claimed; what was
        claimed and could not be read goes back."""
        meta = self._next_meta(timeout_s)
        if not meta.size:
            return None
        try:
            hit("stream.claimed")
            taken = MicroBatch(self._read(self.client, meta), meta)
            hit("stream.read")
            return taken
        except BaseException:
            self.give_back(meta)
            raise

    def _next_meta(self, timeout_s: float) -> KVBatchMeta:
        if self._step is None:
            return self.client.claim_meta(**self._claim, timeout_s=timeout_s)
        while True:
            meta = self.client.claim_meta(**self._claim, timeout_s=timeout_s, step=self._step)
            self._step += 1
            if meta.size or self.client.check_consumption_status(self.partition, [self.task]):
                return meta
            log.debug("all samples of this rank's share of step %d were cleared", self._step - 1)

    def give_back(self, meta: KVBatchMeta) -> None:
        """Let others claim these samples, but those that others have by now. Where that fails, the log says so."""
        try:
            self.client.nack(meta)
        except DataPlaneError as error:
            log.warning("of %d samples of a stream of task %r not all went back: %s", meta.size, self.task, error)


class _Taking:
    """Hands out what `claims` gives, up to `ahead` micro-batches of it fetched by a thread before they are asked for.

    For one consumer. Leases count from the moment of handing out, and end when the next is asked for.
    """

    def __init__(self, claims: _Claims, ahead: int, timeout_s: float) -> None:
        self._claims = claims
        self._timeout_s = timeout_s
        self._out: KVBatchMeta | None = None
        self._out_until = 0.0
        self._queue = _Queue(ahead)
        self._thread = self._fetcher() if ahead else None
        weakref.finalize(self, self._queue.drop)

    def _fetcher(self) -> threading.Thread:
        """A new thread that fetches ahead, until the end or an error."""
        name = f"stream of {self._claims.partition}/{self._claims.task}"
        # A call of the loader that runs out of time is told what the last claim was waiting for: one has to end before.
        claim_s = min(CLAIM_S, max(self._timeout_s / 2, 0.05))
        arguments = (self._claims, self._queue, claim_s)
        thread = threading.Thread(target=_fetch_ahead, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def __call__(self) -> MicroBatch | None:
        """The next micro-batch, None at the end. Raises TimeoutError after the timeout, what a claim or read raised."""
        out, self._out = self._out, None
        if out is not None:
            self._acknowledge(out)
        deadline = time.monotonic() + self._timeout_s
        while True:
            taken = self._take(max(deadline - time.monotonic(), 0.0))
            if taken is None or self._still_ours(taken.meta):
                return taken

    def _acknowledge(self, out: KVBatchMeta) -> None:
        """What was cleared while its lease lasted, the caller cleared; after that, another may have had it before."""
        cleared = self._claims.client.ack(out)
        if cleared and time.monotonic() > self._out_until:
            task = self._claims.task
            raise StaleSampleError(partition=out.partition_id, task=task, samples=cleared, positions=[])

    def _take(self, timeout_s: float) -> MicroBatch | None:
        if self._thread is None:
            self._queue.refuse_if_closed()
            return self._claims.next(timeout_s)
        if self._queue.resumed():
            self._thread = self._fetcher()
        return self._queue.take(timeout_s, waited_s=self._timeout_s)

    def _still_ours(self, meta: KVBatchMeta) -> bool:
        """Whether nobody else could have claimed it while it was held ready."""
        if self._claims.lease_s is None:
            return True
        until = time.monotonic() + self._claims.lease_s
        try:
            cleared = self._claims.client.extend(meta, self._claims.lease_s)
        except StaleSampleError as error:
            log.warning("leases ended before their samples were asked for; fetch fewer ahead (%s)", error)
            self._claims.give_back(meta)
            return False
        if len(cleared) == meta.size:
            return False
        self._out, self._out_until = meta, until
        hit("stream.handed_out")
        return True

    def close(self) -> None:
        self._queue.drop()
        if self._thread is not None:
            self._thread.join()
        _give_back(self._claims, self._queue)


class _Queue:
    """Micro-batches on their way from the thread that fetches to the one that trains; `capacity` at most."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._ready: deque[MicroBatch] = deque()
        self._late: ClaimTimeoutError | None = None
        self._failure: Exception | None = None
        self._ended = self._told = self._closed = False

    def wait_for_space(self) -> bool:
        """Blocks until there is space; False once it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._capacity)
            return not self._closed

    def put(self, taken: MicroBatch | None) -> None:
        """None: that was all for now. What comes once it was closed is `left`."""
        with self._changed:
            if taken is None:
                self._ended = True
            else:
                self._ready.append(taken)
            self._late = None
            self._changed.notify_all()

    def late(self, error: ClaimTimeoutError) -> None:
        """A claim got nothing for a while, and why."""
        with self._changed:
            self._late = error

    def fail(self, error: Exception) -> None:
        """Nothing more will come for now."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def take(self, timeout_s: float, *, waited_s: float) -> MicroBatch | None:
        """What is first, None at the end. `ClientClosedError` once closed, the fetching thread's error where it ended
        in one, TimeoutError after `timeout_s`."""
        with self._changed:
            over = self._changed.wait_for(
                lambda: self._ready or self._ended or self._failure or self._closed, timeout_s
            )
            self.refuse_if_closed()
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if not over:
                raise self._timeout(waited_s)
            self._told = True
            if self._failure is not None:
                raise self._failure
            return None

    def resumed(self) -> bool:
        """Whether a new thread is needed: the end, or the error, was taken; or it says that the partition was gone
        before anybody asked, and may be there again by now. It is forgotten."""
        with self._changed:
            gone = isinstance(self._failure, PartitionNotFoundError | PartitionDroppedError) and not self._ready
            needed, self._told = (self._told or gone) and not self._closed, False
            if needed:
                self._ended, self._failure, self._late = False, None, None
            return needed

    def _timeout(self, waited_s: float) -> Exception:
        if self._late is None:
            return CallTimeoutError(what="the next micro-batch of a stream", waited_s=waited_s, peer="the service")
        return ClaimTimeoutError(**{**self._late.facts, "waited_s": waited_s})

    def refuse_if_closed(self) -> None:
        if self._closed:
            raise ClientClosedError(why="the stream was closed")

    def drop(self) -> None:
        """Close: nobody takes any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def left(self) -> list[MicroBatch]:
        """What nobody took before it was closed, once."""
        with self._changed:
            left, self._ready = list(self._ready), deque()
            return left


def _fetch_ahead(claims: _Claims, queue: _Queue, claim_s: float) -> None:
    """The thread: claims and reads while there is space, until the end, an error or `queue.drop`."""
    more = True
    while more and queue.wait_for_space():
        try:
            taken = claims.next(claim_s)
        except ClaimTimeoutError as error:
            queue.late(error)
        except Exception as error:
            queue.fail(error)
            return
        else:
            queue.put(taken)
            more = taken is not None
    if more:
        _give_back(claims, queue)


def _give_back(claims: _Claims, queue: _Queue) -> None:
    for taken in queue.left():
        claims.give_back(taken.meta)
