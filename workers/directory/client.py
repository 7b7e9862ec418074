"""A process's side of the directory."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dataplane.control.sockets import readable
from dataplane.control.waker import Waker
from dataplane.host import bracketed, split_address
from workers import errors
from workers.address import WorkerAddress
from workers.directory import wire
from workers.directory.process import this_process
from workers.directory.server import HEARTBEAT_MS, SILENCE_MS
from workers.directory.wire import Entry, Facts, Kind

DIRECTORY_VARIABLE = "TQ_DIRECTORY"
"""Where a worker's process, and the children it starts, find the directory's address."""
ANSWER_S = 15.0
"""How long a directory may take to answer what needs no waiting, or beyond the wait asked for."""
AWAY_S = 5.0
"""A directory that does not take connections for so long is lost."""
LOG_EVERY_S = 30.0
_JOIN_S = 10.0
_BYE_S = 2.0

_log = logging.getLogger(__name__)

Listener = Callable[[Entry], None]


class DirectoryClient:
    """One per process, or more; thread-safe, also from async code by `ask_*`. Ends with `close`, or with its process.

    address: "host:port" of a `Directory`. Opening does not wait for it; every call raises `DirectoryLostError` when
    nothing answers there for `ANSWER_S`. Listeners are called with each entry that this client had found or registered
    by waiting for it and that is gone, on this client's own thread: they must not block.
    """

    def __init__(self, address: str) -> None:
        host, port = split_address(address)
        self.address = address
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._guard = threading.Lock()
        self._calls: dict[int, Future[tuple[Entry, ...]]] = {}
        self._outbox: collections.deque[wire.Request] = collections.deque([wire.Hello(this_process())])
        self._listeners: list[Listener] = []
        self._lost: errors.DirectoryLostError | None = None
        self._closing = False
        self._away_since: float | None = time.monotonic()
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._connect(host, port)
        self._thread = threading.Thread(target=self._run, name="tq-directory-client", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls) -> DirectoryClient:
        """The directory of the job that this process belongs to. LookupError outside of one."""
        address = os.environ.get(DIRECTORY_VARIABLE)
        if not address:
            raise LookupError(f"{DIRECTORY_VARIABLE} is not set: this process belongs to no cluster of workers")
        return cls(address)

    # --- what is registered ---------------------------------------------------------------------------------------

    def register_group(self, name: str, facts: Facts) -> Entry:
        """Take a group's name: its workers may register, and what is known of workers of an ended group of that name is
        forgotten. Stays until `end`, whatever becomes of this process. `NameInUseError` while another has it."""
        return self._one(self._ask_register(Kind.GROUP, name, (), facts, owned=False), f"registering group {name!r}")

    def register_worker(self, address: WorkerAddress, endpoint: str, facts: Facts | None = None) -> Entry:
        """Say that this process is the worker of that address. It is until `end`, `close` or this process's death.
        `NameInUseError` while another process is."""
        asked = self._ask_register(Kind.WORKER, address.get_name(), (endpoint,), facts or {}, owned=True)
        return self._one(asked, f"registering worker {address}")

    def register_channel(
        self, name: str, endpoints: tuple[str, ...], facts: Facts, *, owned: bool = True, returns: bool = False
    ) -> Entry:
        """Take a channel's name. owned: it is lost when this process dies; returns: another process registers it again
        then, and who looks it up meanwhile waits. `NameInUseError` while another has it."""
        asked = self._ask_register(Kind.CHANNEL, name, endpoints, facts, owned=owned, returns=returns)
        return self._one(asked, f"registering channel {name!r}")

    # --- what is found --------------------------------------------------------------------------------------------

    def lookup_group(self, name: str, wait_s: float = 0.0) -> Entry:
        """The live entry of that name, once there is one: waits at the directory for up to `wait_s`.

        `NameNotFoundError` if nobody registered it in time; `WorkerLostError`, at once, if it was there and is gone."""
        return self._one(self.ask(Kind.GROUP, name, wait_s), f"group {name!r} to be registered", wait_s)

    def lookup_worker(self, address: WorkerAddress, wait_s: float = 0.0) -> Entry:
        """The same for a worker. `WorkerLostError` also if its group has ended, or ends meanwhile."""
        name = address.get_name()
        return self._one(self.ask(Kind.WORKER, name, wait_s), f"worker {name} to be registered", wait_s)

    def lookup_channel(self, name: str, wait_s: float = 0.0) -> Entry:
        """The same for a channel."""
        return self._one(self.ask(Kind.CHANNEL, name, wait_s), f"channel {name!r} to be registered", wait_s)

    def ask(self, kind: Kind, name: str, wait_s: float) -> Future[tuple[Entry, ...]]:
        """The same without blocking: a future of one entry, done within `wait_s` unless the directory is lost."""
        return self._ask(wire.Lookup(number=next(self._numbers), kind=kind, name=name, wait_s=wait_s))

    def listing(self, kind: Kind) -> list[Entry]:
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

    def lost(self) -> Future[tuple[Entry, ...]]:
        """A future that fails with `DirectoryLostError` once every call does: the directory is gone, it has given this
        process up, or `close` was called."""
        return self._enter(next(self._numbers), None)

    # --- ends -----------------------------------------------------------------------------------------------------

    def end(self, kind: Kind, name: str, incarnation: int | None = None, why: str = "it ended") -> Entry | None:
        """End a live entry (of that incarnation only, if one is given), and a group's workers with it; all who found it
        are told. None if it lives no more."""
        number = next(self._numbers)
        asked = self._ask(wire.End(number=number, kind=kind, name=name, incarnation=incarnation, why=why))
        entries = self._wait(asked, f"ending {kind} {name!r}")
        return entries[0] if entries else None

    def close(self) -> None:
        """Say Bye: what this process had registered as its own ends. Blocks for that, seconds at most. Idempotent."""
        if self._pid != os.getpid():
            return
        with contextlib.suppress(errors.DirectoryLostError, FutureTimeout):
            self._ask(wire.Bye(number=next(self._numbers))).result(_BYE_S)
        self._closing = True
        self._waker.wake()
        self._thread.join(_JOIN_S)
        self._waker.close()

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
    ) -> Future[tuple[Entry, ...]]:
        request = wire.Register(
            number=next(self._numbers),
            kind=kind,
            name=name,
            endpoints=endpoints,
            facts=facts,
            owned=owned,
            returns=returns,
        )
        return self._ask(request)

    def _ask(self, request: Any) -> Future[tuple[Entry, ...]]:
        if self._pid != os.getpid():
            raise RuntimeError("a forked process needs a DirectoryClient of its own")
        future = self._enter(request.number, request)
        self._waker.wake()
        return future

    def _enter(self, number: int, request: wire.Request | None) -> Future[tuple[Entry, ...]]:
        future: Future[tuple[Entry, ...]] = Future()
        with self._guard:
            if self._lost is not None:
                future.set_exception(self._lost)
                return future
            self._calls[number] = future
            if request is not None:
                self._outbox.append(request)
        return future

    def _one(self, future: Future[tuple[Entry, ...]], what: str, wait_s: float = 0.0) -> Entry:
        return self._wait(future, what, wait_s)[0]

    def _wait(self, future: Future[tuple[Entry, ...]], what: str, wait_s: float = 0.0) -> tuple[Entry, ...]:
        begun, limit_s = time.monotonic(), wait_s + ANSWER_S
        while True:
            left_s = begun + limit_s - time.monotonic()
            with contextlib.suppress(FutureTimeout):
                future.exception(min(left_s, LOG_EVERY_S))
            if future.done():
                return future.result()
            if left_s <= LOG_EVERY_S:
                raise errors.DirectoryLostError(address=self.address, why=f"waited {limit_s:.1f} s for {what}")
            _log.warning("waiting for %s: %.0f s so far", what, time.monotonic() - begun)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _connect(self, host: str, port: int) -> None:
        self._socket.set(zmq.ROUTING_ID, b"c" + secrets.token_bytes(15))
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        if ":" in host:
            self._socket.set(zmq.IPV6, 1)
        self._socket.connect(f"tcp://{bracketed(host)}:{port}")

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._waker.fd):
            poller.register(source, zmq.POLLIN)
        why = errors.DirectoryLostError(address=self.address, why="this client was closed")
        try:
            while not self._closing:
                poller.poll(None if self._away_since is None else int(AWAY_S * 250))
                self._waker.clear()
                self._look()
                self._read()
                while self._outbox:
                    self._socket.send(wire.encode(self._outbox.popleft()))
        except errors.DirectoryLostError as error:
            why = error
        except Exception as error:
            _log.exception("the thread that speaks to the directory failed")
            why = errors.DirectoryLostError(address=self.address, why=f"this client's thread failed: {error!r}")
        finally:
            self._context.destroy(linger=0)
            self._fail(why)

    def _look(self) -> None:
        """At the connection: a new one begins with Hello, and one that does not come back is an end."""
        while readable(self._monitor):
            event: dict[str, Any] = dict(recv_monitor_message(self._monitor))
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._away_since = time.monotonic()
            else:
                self._away_since = None
                self._socket.send(wire.encode(wire.Hello(this_process())))
        if self._away_since is not None and time.monotonic() - self._away_since > AWAY_S:
            raise errors.DirectoryLostError(address=self.address, why=f"it took no connection for {AWAY_S:.0f} s")

    def _read(self) -> None:
        while True:
            try:
                reply = wire.decode_reply(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match reply:
                case wire.Found():
                    self._settle(reply.number, reply.entries)
                case wire.Failed():
                    self._settle(reply.number, wire.error_of(reply))
                case wire.Gone():
                    self._tell(reply.entry)
                case wire.Unknown():
                    raise errors.DirectoryLostError(address=self.address, why=reply.why)

    def _settle(self, number: int, outcome: tuple[Entry, ...] | Exception) -> None:
        with self._guard:
            future = self._calls.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _tell(self, entry: Entry) -> None:
        with self._guard:
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
        for number in numbers:
            self._settle(number, error)
