"""A process's side of the directory."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

import msgspec
import zmq

from dataplane.core.addresses import split_address
from dataplane.core.durations import seconds
from dataplane.core.wakeup import poll_ms
from dataplane.errors import InternalError
from dataplane.protocol.fd_limits import OF_A_CONTEXT
from workers import errors
from workers.directory import wire
from workers.directory.address import WorkerAddress
from workers.directory.process import this_process
from workers.directory.server import HEARTBEAT_MS, SILENCE_MS
from workers.directory.wire import DirectoryEntry, EntryState, Facts, Kind
from workers.transport.encoding import encode, error_of
from workers.transport.poll_thread import PollThread
from workers.transport.waiting import done_within
from workers.transport.zmq_sockets import Socket, connect, end_silent, events, open_socket, poller, received

DIRECTORY_VARIABLE = "TQ_DIRECTORY"
"""Where a worker's process, and the children it starts, find the directory's address."""
ANSWER_S = 15.0
"""How long a directory may take to answer what needs no waiting, or beyond the wait asked for."""
AWAY_S = 5.0
"""A directory that does not take connections for so long is lost, until it does."""
STILL_S = 30.0
"""The same for one that takes connections but does not speak: its process, or its host, stands still."""
_BYE_S = 2.0
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED

_log = logging.getLogger(__name__)

Listener = Callable[[DirectoryEntry], None]
Answer = Future[tuple[DirectoryEntry, ...]]


@dataclass(frozen=True)
class _Call:
    """What was asked, until it is answered: asked again on every new connection."""

    request: wire.Question
    data: bytes
    future: Answer = field(default_factory=Future)


class DirectoryClient:
    """One per process, or more; thread-safe, also from async code by `ask_*`. Ends with `close`, or with its process.

    address: "host:port" of a `Directory`. Opening does not wait for it, and raises `OpenFilesError` only; every call
    raises `DirectoryLostError` when nothing answers there for `ANSWER_S`, and at once while nobody has taken a
    connection there for `AWAY_S` (`STILL_S`, where the kernel took it for a process that stands still). When the
    directory answers again, so do calls. Arguments that cannot be sent are a TypeError or ValueError from the call.

    Listeners are called with each entry that this client had found or registered by waiting for it and that is gone, on
    this client's own thread: they must not block. A process that was silent for so long that the directory gave it up
    learns it when the directory hears it again: its listeners are told that what it had registered as its own is LOST,
    then of the entry that it was registered as anew, under another incarnation, or once more of the loss if another has
    the name by then. What it had found is watched no more.
    """

    def __init__(self, address: str) -> None:
        split_address(address)
        self.address = address
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._guard = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._outbox: collections.deque[bytes] = collections.deque()
        self._own: dict[tuple[Kind, str], tuple[DirectoryEntry, wire.RegisterProcess]] = {}
        self._known = False
        self._taken = False
        self._listeners: list[Listener] = []
        self._lost: errors.DirectoryLostError | None = None
        self._away_since: float | None = time.monotonic()
        with errors.OpenFilesError.of(f"a client of the job's directory at {address}", least=OF_A_CONTEXT):
            self._process = this_process()
            self._context: zmq.Context[Socket] = zmq.Context()
            try:
                self._socket = open_socket(self._context, zmq.DEALER)
                self._monitor = self._socket.get_monitor_socket(_EVENTS)
                self._connect()
                sources = poller(self._socket, self._monitor)
                self._thread = PollThread(
                    "tq-directory-client", sources, self._turn, self._over, timeout_ms=self._timeout_ms
                )
            except BaseException:
                self._context.destroy(linger=0)
                raise
        self._thread.start()

    @classmethod
    def from_environment(cls) -> DirectoryClient:
        """The directory of the job that this process belongs to. LookupError outside of one."""
        address = os.environ.get(DIRECTORY_VARIABLE)
        if not address:
            raise LookupError(f"{DIRECTORY_VARIABLE} is not set: this process belongs to no cluster of workers")
        return cls(address)

    # --- what is registered ---------------------------------------------------------------------------------------

    def register_group(self, name: str, facts: Facts) -> DirectoryEntry:
        """Take a group's name: its workers may register, and what is known of workers of an ended group of that name is
        forgotten. Stays until `end`, whatever becomes of this process. `NameInUseError` while another has it;
        ValueError or TypeError for a name that no worker's address can have."""
        WorkerAddress(name)
        return self._one(self._ask_register(Kind.GROUP, name, (), facts, owned=False), f"registering group {name!r}")

    def register_worker(self, address: WorkerAddress, endpoint: str, facts: Facts | None = None) -> DirectoryEntry:
        """Say that this process is the worker of that address. It is until `end`, `close` or this process's death.
        `NameInUseError` while another process is."""
        asked = self._ask_register(Kind.WORKER, address.get_name(), (endpoint,), facts or {}, owned=True)
        return self._one(asked, f"registering worker {address}")

    def register_channel(
        self, name: str, endpoints: tuple[str, ...], facts: Facts, *, owned: bool = True, returns: bool = False
    ) -> DirectoryEntry:
        """Take a channel's name. owned: it is lost when this process dies; returns: another process registers it again
        then, and who looks it up meanwhile waits. `NameInUseError` while another has it."""
        asked = self._ask_register(Kind.CHANNEL, name, endpoints, facts, owned=owned, returns=returns)
        return self._one(asked, f"registering channel {name!r}")

    # --- what is found --------------------------------------------------------------------------------------------

    def lookup_group(self, name: str, wait_s: float = 0.0) -> DirectoryEntry:
        """The live entry of that name, once there is one: waits at the directory for up to `wait_s`.

        `NameNotFoundError` if nobody registered it in time; `WorkerLostError`, at once, if it was there and is gone."""
        return self._one(self.ask(Kind.GROUP, name, wait_s), f"group {name!r} to be registered", wait_s)

    def lookup_worker(self, address: WorkerAddress, wait_s: float = 0.0) -> DirectoryEntry:
        """The same for a worker. `WorkerLostError` also if its group has ended, or ends meanwhile."""
        name = address.get_name()
        return self._one(self.ask(Kind.WORKER, name, wait_s), f"worker {name} to be registered", wait_s)

    def lookup_channel(self, name: str, wait_s: float = 0.0) -> DirectoryEntry:
        """The same for a channel."""
        return self._one(self.ask(Kind.CHANNEL, name, wait_s), f"channel {name!r} to be registered", wait_s)

    def ask(self, kind: Kind, name: str, wait_s: float) -> Answer:
        """The same without blocking: a future of one entry, done within `wait_s` unless the directory is lost."""
        wait_s = seconds("wait_s", wait_s)
        return self._ask(wire.Lookup(number=next(self._numbers), kind=kind, name=name, wait_s=wait_s))

    def listing(self, kind: Kind) -> list[DirectoryEntry]:
        """The live entries of a kind, oldest first."""
        return list(self._wait(self._ask(wire.Listing(number=next(self._numbers), kind=kind)), f"a list of {kind}s"))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` told of what this client found and is gone since; what comes back ends that."""
        with self._guard:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._guard, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    # --- ends -----------------------------------------------------------------------------------------------------

    def end(
        self, kind: Kind, name: str, incarnation: int | None = None, why: str = "it ended"
    ) -> DirectoryEntry | None:
        """End a live entry (of that incarnation only, if one is given), and a group's workers with it; all who found it
        are told. None if it lives no more."""
        entries = self._wait(self.ask_end(kind, name, incarnation, why), f"ending {kind} {name!r}")
        return entries[0] if entries else None

    def ask_end(self, kind: Kind, name: str, incarnation: int | None, why: str) -> Answer:
        """The same without blocking: a future of that entry, or of nothing."""
        number = next(self._numbers)
        return self._ask(wire.End(number=number, kind=kind, name=name, incarnation=incarnation, why=why))

    def close(self) -> None:
        """Say Bye: what this process had registered as its own ends. Blocks for that, seconds at most. Idempotent."""
        if self._pid != os.getpid():
            return
        with contextlib.suppress(errors.DirectoryLostError, FutureTimeout):
            self._ask(wire.LeaveJob(number=next(self._numbers))).result(_BYE_S)
        self._thread.close()

    def __enter__(self) -> DirectoryClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- calls ----------------------------------------------------------------------------------------------------

    def _ask_register(
        self,
        kind: Kind,
        name: str,
        endpoints: tuple[str, ...],
        facts: Facts,
        *,
        owned: bool,
        returns: bool = False,
    ) -> Answer:
        request = wire.RegisterProcess(
            number=next(self._numbers),
            kind=kind,
            name=name,
            endpoints=endpoints,
            facts=facts,
            owned=owned,
            returns=returns,
        )
        return self._ask(request)

    def _ask(self, request: wire.Question) -> Answer:
        if self._pid != os.getpid():
            raise RuntimeError("a forked process needs a DirectoryClient of its own")
        call = _Call(request, encode(request))
        wire.decode_request(call.data)
        with self._guard:
            if self._lost is not None:
                call.future.set_exception(self._lost)
                return call.future
            self._calls[request.number] = call
            self._outbox.append(call.data)
        self._thread.wake()
        return call.future

    def _one(self, future: Answer, what: str, wait_s: float = 0.0) -> DirectoryEntry:
        return self._wait(future, what, wait_s)[0]

    def _wait(self, future: Answer, what: str, wait_s: float = 0.0) -> tuple[DirectoryEntry, ...]:
        limit_s = wait_s + ANSWER_S
        if done_within(future, what, limit_s):
            return future.result()
        future.cancel()
        raise errors.DirectoryLostError(address=self.address, why=f"waited {limit_s:.1f} s for {what}")

    # --- the thread -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._socket.set(zmq.ROUTING_ID, b"c" + secrets.token_bytes(15))
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        end_silent(self._socket, HEARTBEAT_MS, SILENCE_MS)
        connect(self._socket, self.address)

    def _turn(self, _: object) -> None:
        self._look()
        self._read()
        while self._away_since is None and self._outbox:
            self._socket.send(self._outbox.popleft())

    def _over(self, defect: BaseException | None) -> None:
        why = "this client was closed"
        if defect is not None:
            _log.error("the thread that speaks to the directory failed", exc_info=defect)
            why = f"this client's thread failed: {defect!r}"
        self._context.destroy(linger=0)
        self._fail(errors.DirectoryLostError(address=self.address, why=why))

    def _timeout_ms(self) -> int | None:
        return None if self._away_since is None or self._lost is not None else poll_ms(AWAY_S / 4)

    def _look(self) -> None:
        """At the connection. One that does not come back is an end, until it does."""
        for event, _ in events(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected()
                continue
            self._taken = event == zmq.EVENT_CONNECTED
            if self._away_since is None:
                self._away_since = time.monotonic()
        if self._away_since is None or self._lost is not None:
            return
        most_s = STILL_S if self._taken else AWAY_S
        if time.monotonic() - self._away_since > most_s:
            what = "it took a connection, but said nothing" if self._taken else "it took no connection"
            self._fail(errors.DirectoryLostError(address=self.address, why=f"{what} for {most_s:.0f} s"))

    def _connected(self) -> None:
        """A new connection begins with `OpenDirectory`. Whether the directory heard on an older one what it has not
        answered, or its answer was lost, nobody knows."""
        hello = wire.OpenDirectory(self._process, known=self._known)
        with self._guard:
            self._away_since = self._lost = None
            self._outbox = collections.deque([encode(hello), *(call.data for call in self._calls.values())])

    def _read(self) -> None:
        for _, reply, _ in received(self._socket, wire.decode_reply, "a client of the directory"):
            self._known = True
            try:
                self._take(reply)
            except Exception as error:
                _log.exception("the directory's answer could not be taken: %r", reply)
                if isinstance(reply, wire.Found | wire.Failed):
                    self._settle(reply.number, InternalError(what=f"{type(reply).__name__}: {error!r}"))

    def _take(self, reply: wire.Reply) -> None:
        match reply:
            case wire.Found():
                self._settle(reply.number, reply.entries)
            case wire.Failed():
                self._settle(reply.number, error_of(reply))
            case wire.Gone():
                self._tell(reply.entry)
            case wire.Unknown():
                self._lapse(reply.why)

    def _lapse(self, why: str) -> None:
        """The directory had given this process up: register anew what is its own."""
        _log.warning("the directory at %s had given this process up: %s", self.address, why)
        with self._guard:
            own, self._own = list(self._own.values()), {}
        for entry, asked in own:
            lost = msgspec.structs.replace(entry, state=EntryState.LOST, why=why)
            self._tell(lost)
            again = self._ask(msgspec.structs.replace(asked, number=next(self._numbers)))
            again.add_done_callback(functools.partial(self._registered_anew, lost))

    def _registered_anew(self, lost: DirectoryEntry, future: Answer) -> None:
        if future.exception() is None:
            self._tell(future.result()[0])
        else:
            self._tell(lost)

    def _settle(self, number: int, outcome: tuple[DirectoryEntry, ...] | Exception) -> None:
        with self._guard:
            call = self._calls.pop(number, None)
            if call is None:
                return
            if not isinstance(outcome, Exception):
                self._keep(call.request, outcome)
        if not call.future.set_running_or_notify_cancel():
            self._undo(call.request, outcome)
            return
        if isinstance(outcome, Exception):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome)

    def _undo(self, request: wire.Request, outcome: tuple[DirectoryEntry, ...] | Exception) -> None:
        """Nobody waits for it any more: a name that it took is free again."""
        if isinstance(request, wire.RegisterProcess) and not isinstance(outcome, Exception):
            for entry in outcome:
                self.ask_end(entry.kind, entry.name, entry.incarnation, why="nobody waits for its registration")

    def _keep(self, request: wire.Request, entries: tuple[DirectoryEntry, ...]) -> None:
        """Remember what is this process's own."""
        for entry in entries:
            if isinstance(request, wire.RegisterProcess) and request.owned:
                self._own[entry.kind, entry.name] = (entry, request)
            elif isinstance(request, wire.End):
                self._disown(entry)

    def _disown(self, entry: DirectoryEntry) -> None:
        own = self._own.get((entry.kind, entry.name))
        if own is not None and own[0].incarnation == entry.incarnation:
            del self._own[entry.kind, entry.name]

    def _tell(self, entry: DirectoryEntry) -> None:
        with self._guard:
            if not entry.live:
                self._disown(entry)
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(entry)
            except Exception:
                _log.exception("a listener to the directory failed at the end of %s %s", entry.kind, entry.name)

    def _fail(self, error: errors.DirectoryLostError) -> None:
        """What waits, and whoever asks from now on, gets `error`."""
        with self._guard:
            self._lost = error
            numbers = list(self._calls)
            self._outbox.clear()
        for number in numbers:
            self._settle(number, error)
