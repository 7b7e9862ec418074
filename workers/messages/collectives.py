"""Process groups of torch.distributed that carry the tensors of messages between devices, each with its own thread.

The user's process groups, the default one included, are not used. The backend is that of the device
(`torch.distributed.get_default_backend_for_device`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dataplane.core import devices
from dataplane.core.addresses import split_address
from workers.directory.address import WorkerAddress
from workers.messages.group_store import StoreServer, files_for
from workers.messages.wire import CollectiveGroupOptions, DeviceId
from workers.transport.pickling import Packed

AUTO, ALWAYS, NEVER = MODES = ("auto", "always", "never")
COLLECTIVES_VARIABLE = "TQ_COLLECTIVES"
"""Which tensors of messages travel by the collectives of their device: one of `MODES`, by default "auto"."""
CONNECT_S = 60.0
"""How long the members of a new process group wait for each other, if the timeout of transfers is not shorter."""
JOIN_S = 2.0
"""How long a worker that ends waits for the threads of its process groups."""
STEP_S = 0.5
"""Timeout of an attempt to connect to a store; less than `JOIN_S`."""
PAUSE_S = 0.02
"""How often a member looks whether the others have come."""
QUERY_S = 0.0002
"""How often a member looks whether its device has done a transfer."""
LONGEST_S = 365 * 86400.0
"""The timeout of a transfer for a messenger without one."""

OF_A_GROUP = 12
OF_A_MEMBER = 4
"""Upper bounds of the file descriptors that a process group and each of its members take while it is made."""

_UNUSED_TAG = 2**31 - 1
_TEARDOWN_VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")
"""By default these backends end the process if an operation fails. 0 makes them only report the failure."""
_PROCESS = uuid.uuid4().hex


def checked_mode(mode: str) -> str:
    """Return `mode` if it is one of `MODES`, otherwise raise ValueError."""
    if mode not in MODES:
        raise ValueError(f"collectives={mode!r}: expected one of {', '.join(MODES)}")
    return mode


def device_id_of(device: torch.device) -> DeviceId:
    """Return the name and the identity of a device. The identity is empty for the CPU, and if it is not known."""
    if device.type == "cpu":
        return DeviceId("cpu", "")
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda index: None)(index)
    return DeviceId(f"{device.type}:{index}", str(getattr(properties, "uuid", "")), _PROCESS)


class Road:
    """Chooses how the tensors of `worker`'s messages travel. mode: "auto": those on an accelerator by its collectives;
    "always": those on the CPU, too; "never": all through host memory. Thread-safe."""

    def __init__(self, mode: str, worker: str) -> None:
        self._mode = checked_mode(mode)
        self._worker = worker

    def device_of(self, packed: Packed, receivers: Sequence[WorkerAddress]) -> torch.device | None:
        """Return the device of a message's tensors if they are to travel by its collectives: if it has values, all of
        them are tensors on one device, and this worker is no receiver."""
        devices = {block.device if isinstance(block, Tensor) else None for block in packed.blocks}
        device = devices.pop() if len(devices) == 1 else None
        if device is None or not packed.layout.skeleton_from or not self._uses(device.type):
            return None
        names = {receiver.get_name() for receiver in receivers}
        return None if self._worker in names else device

    def receiving_device(
        self, sender: DeviceId, target: Tensor | None, current: torch.device | None
    ) -> torch.device | None:
        """Return the device on which to receive from a device: one of the same type, that of `target` or `current` if
        possible. None if this process has no such device."""
        kind = sender.device.split(":")[0]
        if self._mode == NEVER or kind == "cpu":
            return None if self._mode == NEVER else torch.device(kind)
        for device in (None if target is None else target.device, current):
            if device is not None and device.type == kind:
                return device
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != kind:
            return None
        return torch.device(kind, torch.accelerator.current_device_index())

    def _uses(self, kind: str) -> bool:
        """Whether tensors on this type of device travel by collectives."""
        if self._mode == NEVER or (kind == "cpu" and self._mode != ALWAYS):
            return False
        backend = dist.Backend.default_device_backend_map.get(kind)
        # Gloo has no other tensors than those on the CPU.
        return (
            backend is not None
            and (kind == "cpu" or backend != dist.Backend.GLOO)
            and dist.is_backend_available(backend)
        )


@dataclass(frozen=True)
class DeviceValues:
    """The tensors of a message in one uint8 tensor on their device, at the offsets of its layout. ready: an event after
    which they are there, None on the CPU."""

    flat: Tensor
    ready: Any

    @classmethod
    def copy_of(cls, packed: Packed, device: torch.device) -> DeviceValues:
        """Copy the tensors, on the device's current stream. `torch.OutOfMemoryError`."""
        values = cls.empty(packed.layout.skeleton_from, device)
        packed.write_tensors(values.flat)
        return cls(values.flat, _recorded(device))

    @property
    def device_id(self) -> DeviceId:
        return device_id_of(self.flat.device)

    def copy_to(self, host: Tensor) -> None:
        """Copy the bytes into host memory. Blocks for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        host.copy_(self.flat)

    @classmethod
    def empty(cls, nbytes: int, device: torch.device) -> DeviceValues:
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device), _recorded(device))


def _recorded(device: torch.device) -> Any:
    """Return an event of the device's current stream, None on the CPU."""
    return None if device.type == "cpu" else devices.record_event(device)


Outcome = Tensor | Exception
Done = Callable[[Outcome], None]


@dataclass(eq=False)
class _Job:
    """A broadcast. values: to send, or the number of bytes to receive; done: gets the outcome."""

    values: DeviceValues | int
    done: Done


@dataclass(frozen=True)
class Membership:
    """What a member knows of a group. store: address of the store; rank 0 sends, the others receive; host: address at
    which the others reach this member; peers: names of the other members that this one knows; server: of the store, at
    rank 0."""

    name: str
    store: str
    rank: int
    size: int
    device: torch.device
    options: CollectiveGroupOptions
    host: str
    peers: frozenset[str]
    server: StoreServer | None = None


class CollectiveGroup:
    """One sender and its receivers. Broadcasts run one after another, in the order of `submit` at each member, in the
    group's own thread, which first makes the process group. The first failure ends the group: this broadcast and all
    later ones fail. timeout_s: of each broadcast. `_pending`: those that have no outcome yet."""

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self.membership = membership
        self._timeout = timedelta(seconds=min(timeout_s, LONGEST_S))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: set[_Job] = set()
        self._guard = threading.Lock()
        self._process_group: Any = None
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._threads = [self._start(f"tq-collective-{membership.name}", self._run)]
        atexit.register(self._end)

    @property
    def name(self) -> str:
        return self.membership.name

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def submit(self, values: DeviceValues | int, done: Done) -> None:
        """Send these values, or receive this number of bytes. `done` gets the tensor or the error, in the thread of the
        group or of `close`; in this one after `close`."""
        job = _Job(values, done)
        with self._guard:
            if not self.closed:
                self._pending.add(job)
                self._jobs.put(job)
                return
            error = self._error
        assert error is not None, self.name
        done(error)

    def close(self, why: str) -> None:
        """End the group: its broadcasts fail at once. Does not wait. Idempotent."""
        with self._guard:
            if self.closed:
                return
            self._closing.set()
            self._error = error = self._error or ConnectionError(f"process group {self.name} was closed: {why}")
            process_group = self._process_group
            pending = list(self._pending)
        for job in pending:
            self._finish(job, error)
        if process_group is not None:  # aborting may block
            with contextlib.suppress(RuntimeError):  # the system starts no more threads
                self._threads.append(self._start(f"tq-abort-{self.name}", partial(self._abort, process_group)))
        self._jobs.put(None)

    def join(self, within_s: float) -> None:
        """Wait for the threads of a closed group, at most so long. One that is in the backend's code when Python ends
        would abort the process."""
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _end(self) -> None:
        """Called at the exit of Python."""
        self.close("Python exits")
        self.join(JOIN_S)

    def _start(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        if self.membership.device.type != "cpu":
            torch.accelerator.set_device_index(self.membership.device)
        while (job := self._jobs.get()) is not None:
            self._finish(job, self._outcome(job.values))
            del job  # this thread keeps no values while it waits
        self._process_group = None
        for aborting in self._threads[1:]:  # until it has ended, the exit of Python has to wait
            aborting.join()
        atexit.unregister(self._end)

    def _finish(self, job: _Job, outcome: Outcome) -> None:
        """Report the outcome of a broadcast, unless `close` has reported its failure."""
        with self._guard:
            if job not in self._pending:
                return
            self._pending.remove(job)
        job.done(outcome)

    def _outcome(self, values: DeviceValues | int) -> Outcome:
        if self._error is None:
            try:
                self._connect()
                return self._broadcast(values)
            except Exception as error:
                self._error = self._error or error
        return self._error

    def _connect(self) -> None:
        """Make the process group if there is none yet. Blocks for its other members, at most `CONNECT_S`."""
        if self._process_group is not None:
            return
        process_group = make_process_group(self.membership, self._timeout, self._closing)
        with self._guard:
            self._process_group = process_group
            if self._error is not None:
                raise self._error

    def _broadcast(self, values: DeviceValues | int) -> Tensor:
        """Take part in a broadcast, and block until it is done on the device."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0  # the index of the tensor in the list below
        options.timeout = self._timeout
        device = self.membership.device
        values = DeviceValues.empty(values, device) if isinstance(values, int) else values
        if values.ready is None:
            self._process_group.broadcast([values.flat], options).wait(self._timeout)
            return values.flat
        module = torch.get_device_module(device)
        stream = module.Stream(device)  # not the thread's default one, for which the user's operations would wait
        stream.wait_event(values.ready)
        with module.stream(stream):
            self._process_group.broadcast([values.flat], options).wait()
        until = time.monotonic() + self._timeout.total_seconds()
        while not stream.query():
            if time.monotonic() > until or self._closing.wait(QUERY_S):
                raise TimeoutError(f"a transfer to {device} was not done within {self._timeout}")
        return values.flat

    def _abort(self, process_group: Any) -> None:
        """End operations under way. Gloo has no call for that, but closes all connections if an operation times out:
        receive what no member sends."""
        with contextlib.suppress(RuntimeError):
            if _backend(self.membership.device) != dist.Backend.GLOO:
                process_group.abort()
                return
        for rank in range(self.membership.size):
            if rank != self.membership.rank:
                with contextlib.suppress(RuntimeError):
                    process_group.recv([torch.empty(1, dtype=torch.uint8)], rank, _UNUSED_TAG).wait(
                        timedelta(milliseconds=1)
                    )


def _backend(device: torch.device) -> str:
    return dist.get_default_backend_for_device(device)


def make_process_group(membership: Membership, timeout: timedelta, closing: threading.Event) -> Any:
    """Return a new process group of the device's backend, which needs no default group. Blocks for the other members,
    until `closing` is set. timeout: of transfers. RuntimeError if they do not connect; `OpenFilesError`; other errors
    of the backend."""
    if membership.server is not None:
        membership.server.serve()
    count = OF_A_GROUP + OF_A_MEMBER * membership.size
    with files_for(f"a process group of {membership.size} workers", count):
        return _connected_process_group(membership, timeout, closing)


def _connected_process_group(membership: Membership, timeout: timedelta, closing: threading.Event) -> Any:
    host, port = split_address(membership.store)
    connect = min(timeout, timedelta(seconds=CONNECT_S))
    until = time.monotonic() + connect.total_seconds()
    # A connection of its own, because one that waits for a member blocks all users of the connection.
    connection = _connected_store(host, port, until, closing)
    connection.set_timeout(connect)
    store = PrefixStore(membership.name, connection)
    _wait_for_members(store, membership, until, closing)
    name = _backend(membership.device)
    if name == dist.Backend.GLOO:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=membership.host)]
        options._timeout = connect
        return dist.ProcessGroupGloo(store, membership.rank, membership.size, options)
    kind = getattr(dist, f"ProcessGroup{name.upper()}", None)
    with _failures_reported:
        if kind is None:
            process_group = _plugin_process_group(name, store, membership, timeout)
        else:
            process_group = kind(
                store, membership.rank, membership.size, _backend_options(kind, membership.options, timeout)
            )
    # These backends would otherwise connect in the first operation.
    if hasattr(process_group, "eager_connect_single_device"):
        process_group.eager_connect_single_device(membership.device)
    return process_group


def _connected_store(host: str, port: int, until: float, closing: threading.Event) -> Any:
    """Return a connection to a store. RuntimeError if there is none by that time, or `closing` is set."""
    while True:
        try:
            return TCPStore(host, port, None, False, timedelta(seconds=STEP_S), False)
        except RuntimeError:
            if time.monotonic() > until or closing.wait(PAUSE_S):
                raise


def _wait_for_members(store: Any, membership: Membership, until: float, closing: threading.Event) -> None:
    """Wait until all members have come here. A backend's own wait for them does not end with `closing`. RuntimeError
    as in `_connected_store`."""
    store.add("members", 1)
    while (present := store.add("members", 0)) < membership.size:
        if time.monotonic() > until or closing.wait(PAUSE_S):
            raise RuntimeError(f"{present} of {membership.size} members of process group {membership.name} connected")


def _backend_options(kind: Any, options: CollectiveGroupOptions, timeout: timedelta) -> Any:
    """Return the options of a backend that is part of torch. Settings that it does not have are ignored."""
    backend_options = kind.Options()
    backend_options._timeout = timeout
    if hasattr(backend_options, "is_high_priority_stream"):
        backend_options.is_high_priority_stream = options.is_high_priority_stream
    config = getattr(backend_options, "config", None)
    for name, value in (
        ("cga_cluster_size", options.accel_cluster_size),
        ("max_ctas", options.accel_max_ctas),
        ("min_ctas", options.accel_min_ctas),
    ):
        if value is not None and hasattr(config, name):
            setattr(config, name, value)
    return backend_options


def _plugin_process_group(name: str, store: Any, membership: Membership, timeout: timedelta) -> Any:
    """Return a process group of a backend that a package registered with `torch.distributed`."""
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, membership.rank, membership.size, timeout)
    facts = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    facts.store = store
    facts.group_id = membership.name
    facts.timeout = timeout
    facts.group_rank = membership.rank
    facts.group_size = membership.size
    facts.global_ranks_in_group = list(range(membership.size))
    return plugin.creator_fn(facts, None)


class _FailuresReported:
    """While groups are made in this context, the backends are set to report a failed operation, and not to end the
    process. Several threads may be in it, because a backend may block for the other members. `_makers`: their number;
    `_before`: the values of the variables at other times."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._makers = 0
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        with self._guard:
            if not self._makers:
                self._before = {name: os.environ.get(name) for name in _TEARDOWN_VARIABLES}
                os.environ.update(dict.fromkeys(_TEARDOWN_VARIABLES, "0"))
            self._makers += 1

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._makers -= 1
            if self._makers:
                return
            for name, value in self._before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


_failures_reported = _FailuresReported()
