"""Messages between workers: point to point, and broadcasts among any set of workers.

Transport. Each worker has a ZMQ port, and one socket from which it sends to the ports of all others. A message is a
header, with its values if they are at most 64 KiB. Larger values, both tensors and pickles, are copied once, during
the call, into anonymous shared memory. Receivers on the same host copy them from there: a broadcast to three
receivers costs four copies and no system call that carries values. Receivers on other hosts fetch the values over
ZMQ, in chunks, once they have called `recv`. In a broadcast to many hosts the first receiver on each host forwards the
values that it fetches (`workers.messages.relays`).

Tensors on an accelerator are copied on it during the call, and travel by a process group of its backend once the
receive has the message's header (`workers.messages.transfers`). A receiver without such an accelerator
gets them through host memory, as above. Any other failure is an error at both ends.

Why not process groups of torch.distributed for everything. With Gloo and NCCL a send waits for its receive, so two
workers that both send first deadlock. A receive whose shape differs from the send gets wrong bytes, or aborts the
group. A dead peer is noticed only by a timeout. NCCL does not connect workers that share a GPU. Here a send copies its
values and returns; both ends compare form, shape, dtype and options before a byte is written to the receiver's memory
or a process group is used; and the job's directory reports which worker died. A broadcast of host memory within a host
takes a fraction of Gloo's time (`benchmarks/probes/messages.py`).

When `send` returns. It waits until the receiver's process has the message's header, not until `recv` is called there,
so both workers of a pair may send first. If the message then meets a receive with another form, shape, dtype or
options, it is dropped and both ends get an error. The sender gets it from `send`, or from the `wait` of its work, if
that has not returned yet; otherwise from its next operation with that worker, and in its log.

This file also checks tensors as arguments of `send_tensor` and `recv_tensor`, and the workers of a broadcast, as
callers of `Worker.broadcast` specify them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, NamedTuple

from torch import Tensor

from dataplane.core import devices
from dataplane.core.durations import as_timeout
from dataplane.protocol.fd_limits import OF_A_CONTEXT, allow_more
from workers.directory import DirectoryClient, Facts, Kind
from workers.directory.address import WorkerAddress
from workers.directory.server import this_host
from workers.errors import DirectoryLostError, MessageBacklogError, MessengerClosedError, OpenFilesError
from workers.messages.async_work import AsyncWork, all_of
from workers.messages.collectives import AUTO, Road
from workers.messages.deliveries import Delivery, Posting
from workers.messages.io_thread import IoThread
from workers.messages.outgoing import Sending
from workers.messages.relays import RECEIVERS_FROM, Backlog, Tree
from workers.messages.shared_buffers import Mappings, Slabs
from workers.messages.snapshots import Snapshots, ValueSnapshot, half_of_memory
from workers.messages.wire import CollectiveGroupOptions, FaultForm, Form, ObjectForm, TensorForm, checked
from workers.transport import pickling
from workers.transport.pickling import Packed
from workers.transport.waiting import DEFAULT_TIMEOUT, Timeout, timeout_or

TIMEOUT_S = 1800.0
"""Default timeout of an operation."""
LINGER_S = 5.0
"""How long `close` waits until the sent messages can outlive this worker."""
_PAIR = b""
"""The stream of messages between a pair of workers. A broadcast's stream has a name."""
Ranks = int | tuple[int, ...] | list[int] | list[tuple[int, ...]]
"""A rank, the path of one worker, or a list of ranks or of paths."""


class WithPayload(NamedTuple):
    """The result of `recv` if the sender attached a payload. Its own type distinguishes it from a tuple that was
    sent."""

    object: Any
    payload: Any


class Messenger:
    """The messages of one worker. Thread-safe. Operations of one worker on one peer are matched in the order of
    calls.

    address: of this worker, which is registered in the directory until `close`; host: the address
    at which the other workers of the job reach this host; facts: for the directory entry;
    timeout_s: default timeout of operations; backlog_bytes: limit of the bytes that are sent and
    not yet received (each message counts `MESSAGE_BYTES` for itself and for each receiver, besides
    its values) or are forwarded for other broadcasts, half of the host's memory if None;
    shared_memory: whether receivers on this host may map this worker's memory; collectives: which
    tensors travel by the collectives of their device, see `Road`. `NameInUseError` if another
    process is registered under the address; `OpenFilesError`; ValueError for an unknown mode of
    collectives.

    An operation with `timeout_s=None` or infinity has no timeout: it ends by a result or another
    error. Operations raise these errors, from the call or from the `wait` of their work.
    `MessageTimeoutError` or `NameNotFoundError`: the timeout passed. `WorkerLostError`, which names
    the peer: within seconds after the peer died or its group ended, also before first contact.
    Messages that arrived completely before can still be received; each incomplete one raises this
    error in its place. `MessageMismatchError`, `GroupOptionsError`: on both ends.
    `NotSerializableError`, `MessageBacklogError`, `MessengerClosedError`. ValueError or TypeError:
    invalid arguments, such as a negative timeout. After any of them the pair is unchanged, except
    after a send that timed out: its message may still arrive and be received.

    If a worker was paused until the directory declared it lost (and informed its peers), its pending operations raise
    `WorkerLostError` with this worker's name when it resumes; later operations work, under a new incarnation.
    Messages from and to it that were delivered and not received are lost. If no operation was pending, the next one
    on that pair raises the same error.

    File descriptors: a connection per peer to which a message was sent (idle ones of many are closed), one per peer
    that sends here, and one per large message that waits to be received, up to a limit. Messages beyond that limit
    are sent over the connection. The limit of open files of this process is raised to its hard limit.
    """

    def __init__(
        self,
        address: WorkerAddress,
        directory: DirectoryClient,
        *,
        host: str = "127.0.0.1",
        facts: Facts | None = None,
        timeout_s: float | None = TIMEOUT_S,
        backlog_bytes: int | None = None,
        shared_memory: bool = True,
        collectives: str = AUTO,
    ) -> None:
        allow_more()  # open files: raises this process's limit
        self.address = address
        self.timeout_s = as_timeout("timeout_s", timeout_s)
        self._directory = directory
        self._name = address.get_name()
        self._closed = False
        self._guard = threading.Lock()
        road = Road(collectives, self._name)
        self._backlog = Backlog(half_of_memory() if backlog_bytes is None else backlog_bytes)
        with OpenFilesError.of(f"messages of worker {self._name}", least=OF_A_CONTEXT):
            # Memory is shared among workers with equal `here`; a unique one shares none.
            here = this_host() if shared_memory else f"only {this_host()}/{os.getpid()}/{self._name}"
            self._slabs = Slabs(here)
            self._snapshots = Snapshots(self._slabs, self._backlog, road)
            self._io_thread = IoThread(
                address,
                directory,
                self._slabs,
                Mappings(here),
                self._backlog,
                road,
                host=host,
                facts=facts or {},
                lookup_s=self.timeout_s,
            )

    # --- point to point -------------------------------------------------------------------------------------------

    def send(
        self,
        object: Any,
        dst: WorkerAddress,
        *,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        piggyback_payload: Any = None,
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> AsyncWork[None] | None:
        """Send any Python object to `dst`, which receives it with `recv`. The values are copied during the call;
        later writes do not affect the message. Tensors arrive without autograd history, those of a GPU on the
        receiver's current GPU. The receiver gets the object, or with a `piggyback_payload` other than None a
        `WithPayload` of both.

        Blocks for the copy, and without `async_op` until the receiver's process has the header (see the module's
        docstring).
        """
        self._check_arguments(options, timeout_s, dst)
        if piggyback_payload is None:
            form = ObjectForm()
            packed = pickling.pack(object)
        else:
            form = ObjectForm(piggyback=True)
            packed = pickling.pack((object, piggyback_payload))
        return self._send_to_one(form, packed, dst, options, timeout_s, async_op)

    def recv(
        self,
        src: WorkerAddress,
        *,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """Return the next object that `src` sends with `send`, or a `WithPayload` if a payload is attached. Blocks
        until it arrives, unless `async_op`: then the work's result is the object. If the work is garbage-collected
        before the object arrives, the next receive gets it."""
        self._check_arguments(options, timeout_s, src)
        what = f"{self._name}: recv from {src}"
        return self._receive(src, _PAIR, ObjectForm(), options, timeout_s, async_op, what, finish=_load_result)

    def send_tensor(
        self,
        tensor: Tensor,
        dst: WorkerAddress,
        *,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> AsyncWork[None] | None:
        """Send one tensor, of any strides, for the `recv_tensor` of `dst`. Otherwise like `send`."""
        self._check_arguments(options, timeout_s, dst)
        return self._send_to_one(form_of(tensor), pickling.pack_tensor(tensor), dst, options, timeout_s, async_op)

    def recv_tensor(
        self,
        tensor: Tensor,
        src: WorkerAddress,
        *,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> AsyncWork[None] | None:
        """Write the next tensor that `src` sends with `send_tensor` into `tensor`, which has the same shape and
        dtype, on any device, with any strides for which its elements do not overlap. Blocks until it arrives, unless
        `async_op`: then do not use `tensor` until the work is done. If the work is garbage-collected before the
        message arrives, `tensor` is not written, and the next receive gets the message."""
        self._check_arguments(options, timeout_s, src)
        form = form_of(tensor)
        what = f"{self._name}: recv_tensor from {src}"
        check_target(tensor)
        work: AsyncWork[None] | None = self._receive(
            src, _PAIR, form, options, timeout_s, async_op, what, finish=_take_tensor, target=tensor
        )
        return work

    # --- broadcast ------------------------------------------------------------------------------------------------

    def broadcast(
        self,
        object: Any,
        workers: Sequence[WorkerAddress],
        src: WorkerAddress | None = None,
        *,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """Return the `object` of `src` (the first of `workers`, if None) on all `workers`; the objects of the others
        are ignored. Every one of these workers has to call this, with the same `workers` and `src`, in the same order
        of calls.

        Both ends number their calls among these workers since the later of the two started. The n-th call of a
        receiver gets the object of the source's n-th call, never another one, however late it arrives. Calls that
        fail, time out or whose work is garbage-collected count, too. A message for such a call is dropped, and the
        source treats it as received. If the source's call failed, the receiver's raises `SourceFailedError`, at the
        latest when the next message arrives. A worker that omits a call stays one call behind. After a
        `WorkerLostError` that names an end, both restart the numbering.

        The source gets its own object back once all receivers have the header, or the error of a receiver that died;
        the other workers block for the object. If the source cannot send, or dies, all raise: the source its error,
        the others `SourceFailedError` or `WorkerLostError`. A receiver that dies or hangs does not delay other
        receivers.

        Receivers on many other hosts forward large values to each other. The first receiver on each host keeps them
        for `KEEP_S` (see `workers.messages.relays`) after their last use, counted in its backlog. If its backlog has
        no space for them, it forwards nothing, and the source sends them to each receiver.
        """
        check(workers)
        source = workers[0] if src is None else src
        for role, needed, remedy in (
            ("src", source, "pass one of them as src, or add it"),
            ("the calling worker", self.address, "add it, or do not call broadcast here"),
        ):
            if needed not in workers:
                names = listed(workers)
                raise ValueError(
                    f"{role} {needed} is not among the workers of the broadcast, which are {names}; {remedy}"
                )
        others = [worker for worker in workers if worker != source]
        stream = stream_of(workers)
        if source == self.address:
            return self._broadcast_from_here(object, others, stream, options, timeout_s, async_op)
        try:
            self._check_arguments(options, timeout_s, source)
        except Exception:
            # The call counts, so the source's message of this sequence number must be dropped.
            self._io_thread.call(lambda: self._io_thread.incoming.skip((source.get_name(), stream)))
            raise
        among = listed(workers)
        what = f"{self._name}: broadcast from {source} among {among} (all of these workers must pass the same list)"
        return self._receive(source, stream, ObjectForm(), options, timeout_s, async_op, what, finish=_load_result)

    def _broadcast_from_here(
        self,
        object: Any,
        others: list[WorkerAddress],
        stream: bytes,
        options: CollectiveGroupOptions | None,
        timeout_s: Timeout,
        async_op: bool,
    ) -> Any:
        """Send `object` to `others`, and return it, or with `async_op` the work for it. If it cannot be sent, raise the
        error, and send it to the others instead."""
        try:
            self._check_arguments(options, timeout_s, *others)
            snapshot = self._snapshots.take(ObjectForm(), pickling.pack(object), others, f"{self._name}: broadcast")
        except BaseException as error:
            self._send_fault(error, others, stream, options)
            raise
        # Receivers of large values on many hosts forward them to each other.
        if snapshot.slab is not None and len(others) >= RECEIVERS_FROM:
            snapshot.tree = Tree(self._io_thread.host)
        works = self._submit_sends(snapshot, others, stream, options, timeout_s)
        work = all_of(works, f"{self._name}: broadcast to {len(others)} workers", object)
        return work if async_op else work.wait()

    def _send_fault(
        self, error: BaseException, others: list[WorkerAddress], stream: bytes, options: CollectiveGroupOptions | None
    ) -> None:
        """Send the other workers the reason why this call brings no object. Without space in the backlog they get none;
        the call uses up its sequence number in either case."""
        fault = FaultForm(f"{type(error).__name__}: {error}")
        try:
            nothing = self._snapshots.take(fault, pickling.NOTHING, others, "a fault")
        except MessageBacklogError:
            # The receivers' calls of this sequence number then fail when the message of a later call arrives.
            self._io_thread.call(lambda: self._io_thread.outgoing.skip(others, stream))
        else:
            # Invalid options may be the reason of the fault.
            options = options if isinstance(options, CollectiveGroupOptions) else None
            self._submit_sends(nothing, others, stream, options, DEFAULT_TIMEOUT)

    # --- close ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove this worker from the directory and close its connections. Waits at most `LINGER_S` until sent
        messages are in memory that their receivers can read without this worker. Waiting receives raise
        `MessengerClosedError`. Idempotent."""
        with self._guard:
            closed, self._closed = self._closed, True
        if closed:
            return
        # Before the directory entry is ended: that fails the receives of messages whose values are incomplete.
        with contextlib.suppress(FutureTimeout):
            self._io_thread.settled().result(LINGER_S)
        with contextlib.suppress(DirectoryLostError):
            self._directory.end(Kind.WORKER, self._name, self._io_thread.incarnation, why="it was closed")
        self._io_thread.close()
        self._slabs.close()

    def __enter__(self) -> Messenger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- internals ------------------------------------------------------------------------------------------------

    def _check_arguments(self, options: object, timeout_s: Timeout, *peers: WorkerAddress) -> None:
        """Check the arguments of an operation before it begins, and raise the late error of an earlier operation with
        one of `peers`. `MessengerClosedError` after `close`."""
        if self._closed:
            raise MessengerClosedError(worker=self._name)
        checked(options)
        timeout_or(self.timeout_s, timeout_s)  # raises for an invalid timeout
        for peer in peers:
            if not peer.rank_path:
                raise ValueError(
                    f"{peer} is a whole worker group: name one of its workers, by a rank or a list of ranks"
                )
            # The error of an earlier message, whose `send` had returned before the receiver refused it.
            late = self._io_thread.outgoing.late_error(peer.get_name())
            if late is not None:
                raise late

    def _send_to_one(
        self,
        form: Form,
        packed: Packed,
        dst: WorkerAddress,
        options: CollectiveGroupOptions | None,
        timeout_s: Timeout,
        async_op: bool,
    ) -> AsyncWork[None] | None:
        """Send to one worker. Return the work with `async_op`, otherwise wait for it."""
        snapshot = self._snapshots.take(form, packed, [dst], f"{self._name}: send to {dst}")
        (work,) = self._submit_sends(snapshot, [dst], _PAIR, options, timeout_s)
        if async_op:
            return work
        work.wait()
        return None

    def _submit_sends(
        self,
        snapshot: ValueSnapshot,
        receivers: Sequence[WorkerAddress],
        stream: bytes,
        options: CollectiveGroupOptions | None,
        timeout_s: Timeout,
    ) -> list[AsyncWork[None]]:
        """Pass one message for each receiver to the I/O thread. Return their works, in the order of `receivers`."""
        now = time.monotonic()
        deadline = now + timeout_or(self.timeout_s, timeout_s)
        verb = "broadcast" if stream else "send"
        sendings = [
            Sending(
                to=peer.get_name(),
                stream=stream,
                snapshot=snapshot,
                options=options,
                what=f"{self._name}: {verb} to {peer}",
                begun=now,
                deadline=deadline,
            )
            for peer in receivers
        ]
        self._io_thread.submit_send(sendings)
        return [AsyncWork(sending.future, sending.what) for sending in sendings]

    def _receive(
        self,
        src: WorkerAddress,
        stream: bytes,
        form: ObjectForm | TensorForm,
        options: CollectiveGroupOptions | None,
        timeout_s: Timeout,
        async_op: bool,
        what: str,
        finish: Callable[[Delivery], Any],
        target: Tensor | None = None,
    ) -> Any:
        """Submit a receive, and wait for it unless `async_op`. The receive is dropped if the wait fails. finish: makes
        the result from the delivery; target: the tensor of recv_tensor."""
        now = time.monotonic()
        posting = Posting(
            source=src.get_name(),
            stream=stream,
            options=options,
            target=target,
            form=form,
            device=devices.current_device(),
            ready=record_event(target),
            eager=async_op,
            what=what,
            begun=now,
            deadline=now + timeout_or(self.timeout_s, timeout_s),
        )
        self._io_thread.submit_recv(posting)
        work: AsyncWork[Any] = AsyncWork(posting.future, what, finish)
        if async_op:
            # If the work is garbage-collected (not: at the exit of Python), the receive is withdrawn.
            weakref.finalize(work, self._io_thread.drop, posting).atexit = False
            return work
        try:
            return work.wait()
        except BaseException:
            self._io_thread.drop(posting)
            raise


def _load_result(delivery: Delivery) -> Any:
    """Take the message. Return its object, or a `WithPayload` if it has a payload."""
    unpacked = delivery.take()
    assert unpacked is not None, delivery.form  # None is for recv_tensor
    value = unpacked.load()
    has_payload = isinstance(delivery.form, ObjectForm) and delivery.form.piggyback
    return WithPayload(*value) if has_payload else value


def _take_tensor(delivery: Delivery) -> None:
    delivery.take()


def form_of(tensor: Tensor) -> TensorForm:
    """Return the form of a tensor for send_tensor and recv_tensor. TypeError for anything but a plain tensor."""
    if not isinstance(tensor, Tensor) or not pickling.is_plain(tensor):
        raise TypeError(
            "send_tensor and recv_tensor expect a dense tensor (strided, not nested, not quantized, on the CPU or the "
            "accelerator), got a "
            f"{type(tensor).__name__}{f' ({tensor.layout}, {tensor.device})' if isinstance(tensor, Tensor) else ''}"
        )
    return TensorForm(str(tensor.dtype), tuple(tensor.shape))


def check_target(tensor: Tensor) -> None:
    """Raise ValueError for a tensor with overlapping elements, such as an expanded tensor."""
    span = 0  # distance of the first and the last element in the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # From the smallest stride on, a dimension must step over all elements of the dimensions before it.
        if tensor.numel() and size > 1:  # otherwise it has no steps
            if stride <= span:
                raise ValueError(
                    f"recv_tensor cannot write into a tensor of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}: some of its elements overlap in memory; pass a clone()"
                )
            span += stride * (size - 1)


def record_event(target: Tensor | None) -> Any:
    """Record and return an event on the current stream of an accelerator's tensor, after which the tensor may be
    written. None for other tensors."""
    return None if target is None or target.is_cpu else devices.record_event(target.device)


def participants(groups: Sequence[tuple[str, Ranks]]) -> list[WorkerAddress]:
    """Return the workers of `groups` in their order: `("g", 0)` is one worker, `("g", [0, 1])` are two, `("g", (0,
    1))` is the worker of that path, `("g", [(0, 0), (0, 1)])` are the two of those paths. ValueError if there are
    none or one occurs twice."""
    workers = []
    for name, ranks in groups:
        rank_list: Sequence[int | tuple[int, ...]] = ranks if isinstance(ranks, list) else [ranks]
        workers += [WorkerAddress(name, rank) for rank in rank_list]
    check(workers)
    return workers


def check(workers: Sequence[WorkerAddress]) -> None:
    """Raise ValueError if there are no workers or one occurs twice."""
    if not workers:
        raise ValueError("workers is empty: a broadcast needs at least one worker")
    twice = {name for name, count in Counter(worker.get_name() for worker in workers).items() if count > 1}
    if twice:
        raise ValueError(f"the workers of a broadcast must be distinct; named more than once: {sorted(twice)}")


def stream_of(workers: Sequence[WorkerAddress]) -> bytes:
    """Return the name of the stream of broadcasts among these workers, the same on each of them."""
    names = "\n".join(sorted(worker.get_name() for worker in workers))
    return hashlib.sha256(names.encode()).digest()[:16]


def listed(workers: Sequence[WorkerAddress]) -> str:
    """Return the names of the workers for messages, at most 10."""
    more = f" and {len(workers) - 10} more" if len(workers) > 10 else ""
    return ", ".join(worker.get_name() for worker in workers[:10]) + more
