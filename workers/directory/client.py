"""`DirectoryClient`, a process's connection to the job's directory."""

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
from dataplane.core.zmq_io import poll_ms
from dataplane.errors import InternalError
from dataplane.protocol.fd_limits import OF_A_CONTEXT
from workers import errors
from workers.directory import wire
from workers.directory.address import WorkerAddress
from workers.directory.server import HEARTBEAT_MS, SILENCE_MS, this_process
from workers.directory.wire import DirectoryEntry, EntryState, Facts, Kind
from workers.transport.encoding import encode, error_of
from workers.transport.poll_thread import PollThread
from workers.transport.waiting import done_within
from workers.transport.zmq_sockets import Socket, connect, end_silent, events, open_socket, poller, received

DIRECTORY_VARIABLE = "TQ_DIRECTORY"
"""The environment variable with the directory's address, set for worker processes and inherited by their children."""
ANSWER_S = 15.0
"""How long the directory may take to respond, in addition to the requested wait."""
AWAY_S = 5.0
"""A directory that accepts no connection for this long is considered lost until it accepts one."""
STILL_S = 30.0
"""The same for a directory that accepts connections but sends nothing, because its process or host is paused."""
_CLOSE_S = 2.0
"""How long `close` waits until the directory has ended the entries."""
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED

_log = logging.getLogger(__name__)

Listener = Callable[[DirectoryEntry], None]
Answer = Future[tuple[DirectoryEntry, ...]]


@dataclass(frozen=True)
class _Call:
    """A pending request, which is sent again on every new connection."""

    request: wire.Question
    data: bytes
    future: Answer = field(default_factory=Future)


class DirectoryClient:
    """A connection to the directory; a process may have several. Thread-safe. `ask*` methods do not block. Ends with
    `close` or with its process.

    address: "host:port" of a `Directory`. The constructor does not wait for it and raises only `OpenFilesError`.
    Every call raises `DirectoryLostError` if the directory does not respond within `ANSWER_S`, or at once while the
    directory has accepted no connection for `AWAY_S` (`STILL_S` if the kernel accepted one for a paused process).
    Calls work again as soon as the directory responds. Arguments that cannot be sent are a TypeError or ValueError
    from the call.

    A listener is called with each ended entry that this client had looked up. It runs on the client's thread and
    must not block. If a process is silent for so long that the directory drops its session, the client learns this
    when it reconnects. It passes each owned entry to the listeners as LOST, registers it again, and passes them the
    new entry with its new incarnation (or the LOST entry a second time if the registration failed, for example because
    another process has taken the name). Entries that it had found are not watched after that.

    `_calls`: the pending requests by id; `_outbox`: requests to send; `_owned`: the entries that this process owns,
    with the requests that registered them; `_had_reply`: the directory has replied before; `_accepted`: the kernel has
    accepted the present connection, but the directory has sent nothing; `_away_since`: since when there is no working
    connection, None while there is one; `_lost_error`: the error of all calls while the directory is considered lost;
    `_pid`: the process that made this client, to detect a forked child. `_guard` protects `_calls`, `_owned`,
    `_listeners` and `_lost_error`. Only the client's thread uses `_had_reply`, `_accepted` and `_away_since`.
    """

    def __init__(self, address: str) -> None:
        split_address(address)
        self.address = address
        self._pid = os.getpid()
        self._request_ids = itertools.count(1)
        self._guard = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._outbox: collections.deque[bytes] = collections.deque()
        self._owned: dict[tuple[Kind, str], tuple[DirectoryEntry, wire.RegisterProcess]] = {}
        self._had_reply = False
        self._accepted = False
        self._listeners: list[Listener] = []
        self._lost_error: errors.DirectoryLostError | None = None
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
                    "tq-directory-client", sources, self._on_events, self._on_thread_end, timeout_ms=self._timeout_ms
                )
            except BaseException:
                self._context.destroy(linger=0)
                raise
        self._thread.start()

    @classmethod
    def from_environment(cls) -> DirectoryClient:
        """Return a client of the directory of this process's job. LookupError outside of a job."""
        address = os.environ.get(DIRECTORY_VARIABLE)
        if not address:
            raise LookupError(
                f"the environment variable {DIRECTORY_VARIABLE} is not set, so this process cannot find the job's "
                "directory, which knows the addresses of all workers; create a Cluster in this process first, "
                "or set the variable to the directory's address"
            )
        return cls(address)

    # --- registration ---------------------------------------------------------------------------------------------

    def register_worker_group(self, name: str, facts: Facts) -> DirectoryEntry:
        """Register a group's name, so that its workers can register. Records of workers of an ended group with that
        name are deleted. The entry stays until `end`, even if this process ends. `NameInUseError` while another
        group has the name; ValueError or TypeError for a name that no worker address can have."""
        WorkerAddress(name)  # raises for an invalid name
        return self._single_entry(
            self._ask_register(Kind.WORKER_GROUP, name, endpoints=(), facts=facts, owned=False),
            f"registering group {name!r}",
        )

    def register_worker(self, address: WorkerAddress, endpoint: str, facts: Facts | None = None) -> DirectoryEntry:
        """Register this process as the worker of that address, until `end`, `close` or the end of this process.
        `NameInUseError` while another process is registered as that worker."""
        request = self._ask_register(Kind.WORKER, address.get_name(), (endpoint,), facts or {}, owned=True)
        return self._single_entry(request, f"registering worker {address}")

    def register_channel(
        self, name: str, endpoints: tuple[str, ...], facts: Facts, *, owned: bool = True, returns: bool = False
    ) -> DirectoryEntry:
        """Register a channel's name. owned: the entry is lost when this process ends. returns: another process will
        then register the name again, and lookups wait for it meanwhile. `NameInUseError` while another channel has
        the name."""
        request = self._ask_register(Kind.CHANNEL, name, endpoints, facts, owned=owned, returns=returns)
        return self._single_entry(request, f"registering channel {name!r}")

    # --- lookup ---------------------------------------------------------------------------------------------------

    def lookup_worker_group(self, name: str, wait_s: float = 0.0) -> DirectoryEntry:
        """Return the live entry of that name. Wait up to `wait_s` for its registration.

        `NameNotFoundError` if it was not registered in time; `WorkerLostError`, at once, if it was registered and
        has ended.
        """
        return self._single_entry(self.ask(Kind.WORKER_GROUP, name, wait_s), f"group {name!r} to be registered", wait_s)

    def lookup_worker(self, address: WorkerAddress, wait_s: float = 0.0) -> DirectoryEntry:
        """`lookup_worker_group` for a worker. `WorkerLostError` also if its group has ended, or ends in the wait."""
        name = address.get_name()
        return self._single_entry(self.ask(Kind.WORKER, name, wait_s), f"worker {name} to be registered", wait_s)

    def lookup_channel(self, name: str, wait_s: float = 0.0) -> DirectoryEntry:
        """`lookup_worker_group` for a channel."""
        return self._single_entry(self.ask(Kind.CHANNEL, name, wait_s), f"channel {name!r} to be registered", wait_s)

    def ask(self, kind: Kind, name: str, wait_s: float) -> Answer:
        """Look up without blocking. Return a future of one entry, done within `wait_s` unless the directory is lost."""
        wait_s = seconds("wait_s", wait_s)
        return self._ask(wire.Lookup(request_id=next(self._request_ids), kind=kind, name=name, wait_s=wait_s))

    def listing(self, kind: Kind) -> list[DirectoryEntry]:
        """Return the live entries of a kind, oldest first."""
        return list(
            self._wait(self._ask(wire.Listing(request_id=next(self._request_ids), kind=kind)), f"a list of {kind}s")
        )

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with entries that this client had found and that have ended. Return a function that
        unsubscribes it. Entries that are registered again: see the class."""
        with self._guard:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._guard, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    # --- end ------------------------------------------------------------------------------------------------------

    def end(
        self, kind: Kind, name: str, incarnation: int | None = None, why: str = "it ended"
    ) -> DirectoryEntry | None:
        """End a live entry (of that incarnation only, if given). The end of a group also ends its workers. All
        clients that had found the entry are notified. Return the ended entry, or None if there was no live entry."""
        entries = self._wait(self.ask_end(kind, name, incarnation, why), f"ending {kind} {name!r}")
        return entries[0] if entries else None

    def ask_end(self, kind: Kind, name: str, incarnation: int | None, why: str) -> Answer:
        """`end` without blocking. Return a future of the ended entry, or of an empty tuple. incarnation None: any."""
        request_id = next(self._request_ids)
        return self._ask(wire.End(request_id=request_id, kind=kind, name=name, incarnation=incarnation, why=why))

    def close(self) -> None:
        """End all entries that this process owns, and close the connection. Blocks for up to a few seconds.
        Idempotent."""
        if self._pid != os.getpid():  # in a forked child, the connection is the parent's
            return
        with contextlib.suppress(errors.DirectoryLostError, FutureTimeout):
            self._ask(wire.LeaveJob(request_id=next(self._request_ids))).result(_CLOSE_S)
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
        """Send a registration without blocking. Return the future of the new entry."""
        request = wire.RegisterProcess(
            request_id=next(self._request_ids),
            kind=kind,
            name=name,
            endpoints=endpoints,
            facts=facts,
            owned=owned,
            returns=returns,
        )
        return self._ask(request)

    def _ask(self, request: wire.Question) -> Answer:
        """Queue a request and return the future of its reply, which has failed already if the directory is lost."""
        if self._pid != os.getpid():
            raise RuntimeError(
                "this DirectoryClient was created before fork(); create another one in the child process"
            )
        call = _Call(request, encode(request))
        wire.decode_request(call.data)  # raises for arguments that the directory could not decode
        with self._guard:
            if self._lost_error is not None:
                call.future.set_exception(self._lost_error)
                return call.future
            self._calls[request.request_id] = call
            self._outbox.append(call.data)
        self._thread.wake()
        return call.future

    def _single_entry(self, future: Answer, what: str, wait_s: float = 0.0) -> DirectoryEntry:
        return self._wait(future, what, wait_s)[0]

    def _wait(self, future: Answer, what: str, wait_s: float = 0.0) -> tuple[DirectoryEntry, ...]:
        """Return the reply. `DirectoryLostError` if it does not come within `ANSWER_S` after the requested wait."""
        limit_s = wait_s + ANSWER_S
        if done_within(future, what, limit_s):
            return future.result()
        future.cancel()  # if the reply to a registration still comes, `_complete` ends the entry
        raise errors.DirectoryLostError(address=self.address, why=f"this process waited {limit_s:.1f} s for {what}")

    # --- the thread -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Configure the socket and begin to connect. ZMQ reconnects by itself."""
        self._socket.set(zmq.ROUTING_ID, b"c" + secrets.token_bytes(15))  # names the session at the directory
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        end_silent(self._socket, HEARTBEAT_MS, SILENCE_MS)
        connect(self._socket, self.address)

    def _on_events(self, _: object) -> None:
        """Track the connection, handle replies, and send queued requests while connected."""
        self._track_connection()
        self._handle_replies()
        while self._away_since is None and self._outbox:
            self._socket.send(self._outbox.popleft())

    def _on_thread_end(self, defect: BaseException | None) -> None:
        """Close the connection and fail all calls. defect: the error that ended the thread, or None."""
        why = "this client was closed"
        if defect is not None:
            _log.error("Directory client thread failed", exc_info=defect)
            why = f"this client's thread failed: {defect!r}"
        self._context.destroy(linger=0)
        self._fail_all(errors.DirectoryLostError(address=self.address, why=why))

    def _timeout_ms(self) -> int | None:
        """Return the time until `_track_connection` has to run again without an event. None while the connection works,
        or if the directory is already considered lost."""
        return None if self._away_since is None or self._lost_error is not None else poll_ms(AWAY_S / 4)

    def _track_connection(self) -> None:
        """Update `_away_since` and `_accepted` by the connection's events. Fail all calls if it is away too long."""
        for event, _ in events(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_connected()
                continue
            # CONNECTED: the kernel has accepted a connection. The others: it has ended or could not be made.
            self._accepted = event == zmq.EVENT_CONNECTED
            if self._away_since is None:
                self._away_since = time.monotonic()
        if self._away_since is None or self._lost_error is not None:  # it works, or its calls have failed already
            return
        limit_s = STILL_S if self._accepted else AWAY_S
        if time.monotonic() - self._away_since > limit_s:
            what = "it accepted a connection but sent nothing" if self._accepted else "it accepted no connection"
            self._fail_all(errors.DirectoryLostError(address=self.address, why=f"{what} for {limit_s:.0f} s"))

    def _on_connected(self) -> None:
        """Start a new connection with `OpenDirectory`, followed by all unanswered requests. The directory may have
        received them before, on an older connection."""
        hello = wire.OpenDirectory(self._process, known=self._had_reply)
        # The requests in the old `_outbox` are among `_calls`, too.
        with self._guard:
            self._away_since = self._lost_error = None
            self._outbox = collections.deque([encode(hello), *(call.data for call in self._calls.values())])

    def _handle_replies(self) -> None:
        """Handle all received replies. An exception at one of them fails its request."""
        for _, reply, _ in received(self._socket, wire.decode_reply, "the directory client"):
            self._had_reply = True
            try:
                self._handle_reply(reply)
            except Exception as error:
                _log.exception("Directory client failed on reply %r", reply)
                if isinstance(reply, wire.Found | wire.Failed):
                    self._complete(reply.request_id, InternalError(what=f"{type(reply).__name__}: {error!r}"))

    def _handle_reply(self, reply: wire.Reply) -> None:
        """Handle one message of the directory."""
        match reply:
            case wire.Found():
                self._complete(reply.request_id, reply.entries)
            case wire.Failed():
                self._complete(reply.request_id, error_of(reply))
            case wire.Gone():
                self._notify(reply.entry)
            case wire.Unknown():
                self._restore_session(reply.why)

    def _restore_session(self, why: str) -> None:
        """Register owned entries again after the directory has dropped this client's session: listeners get each as
        LOST, and later the new entry. why: the directory's reason."""
        _log.warning("Directory at %s dropped the session of this process: %s", self.address, why)
        with self._guard:
            owned, self._owned = list(self._owned.values()), {}  # each successful registration adds its entry again
        for entry, request in owned:
            lost = msgspec.structs.replace(entry, state=EntryState.LOST, why=why)
            self._notify(lost)
            registration = self._ask(msgspec.structs.replace(request, request_id=next(self._request_ids)))
            registration.add_done_callback(functools.partial(self._on_registered_again, lost))

    def _on_registered_again(self, lost: DirectoryEntry, future: Answer) -> None:
        """Pass the new entry to the listeners, or the entry `lost` a second time if the registration failed."""
        if future.exception() is None:
            self._notify(future.result()[0])
        else:
            self._notify(lost)

    def _complete(self, request_id: int, outcome: tuple[DirectoryEntry, ...] | Exception) -> None:
        """Complete the future of a request with its entries or error. A no-op for an unknown id."""
        with self._guard:
            call = self._calls.pop(request_id, None)
            if call is None:
                return
            if not isinstance(outcome, Exception):
                self._record_owned(call.request, outcome)
        # False: `_wait` has cancelled the future.
        if not call.future.set_running_or_notify_cancel():
            self._undo_registration(call.request, outcome)
            return
        if isinstance(outcome, Exception):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome)

    def _undo_registration(self, request: wire.Request, outcome: tuple[DirectoryEntry, ...] | Exception) -> None:
        """End a registration whose caller has stopped waiting, so that the name is free."""
        if isinstance(request, wire.RegisterProcess) and not isinstance(outcome, Exception):
            for entry in outcome:
                self.ask_end(entry.kind, entry.name, entry.incarnation, why="its registration timed out")

    def _record_owned(self, request: wire.Request, entries: tuple[DirectoryEntry, ...]) -> None:
        """Update `_owned` after the reply `entries`: add what `request` registered, remove what it ended. Under
        `_guard`."""
        for entry in entries:
            if isinstance(request, wire.RegisterProcess) and request.owned:
                self._owned[entry.kind, entry.name] = (entry, request)
            elif isinstance(request, wire.End):
                self._disown(entry)

    def _disown(self, entry: DirectoryEntry) -> None:
        """Remove an entry from the owned ones, unless a later incarnation has replaced it. Under `_guard`."""
        owned = self._owned.get((entry.kind, entry.name))
        if owned is not None and owned[0].incarnation == entry.incarnation:
            del self._owned[entry.kind, entry.name]

    def _notify(self, entry: DirectoryEntry) -> None:
        """Pass an entry to all listeners, whose errors are logged. If it is not live, first remove it from `_owned`."""
        with self._guard:
            if not entry.live:
                self._disown(entry)
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(entry)
            except Exception:
                _log.exception("Directory listener failed on the end of %s %s", entry.kind, entry.name)

    def _fail_all(self, error: errors.DirectoryLostError) -> None:
        """Fail all pending calls with `error`, and, through `_lost_error`, later ones until a connection is made."""
        with self._guard:
            self._lost_error = error
            request_ids = list(self._calls)
            self._outbox.clear()
        for request_id in request_ids:
            self._complete(request_id, error)
