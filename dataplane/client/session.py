"""One session of a sync client, and a thread-safe, fork-safe holder that creates it on first use."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from dataplane.client.operations.steps import Operation, Post, Send, Sent, Step, T, Wait, Work
from dataplane.client.rpc.call_numbers import undo_of
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.client.session_state import SessionState, check_pickles
from dataplane.config import DataPlaneConfig
from dataplane.core.in_flight import InFlight
from dataplane.errors import CallTimeoutError, ClientClosedError, DataPlaneError
from dataplane.ledger.commands import Allocate, Claim, Command, FindCells, Locate, Preallocate, Save
from dataplane.storage.session_lock import SessionLock

log = logging.getLogger(__name__)

_RESOURCE_COMMANDS = frozenset({Allocate, Preallocate, Claim, Locate, Save, FindCells})
"""Commands whose response hands resources to an operation, which it must release."""


class Closable(Protocol):
    """An object that `ForkLocal` can hold. `close` returns whether it is complete; otherwise, or after an
    interrupt or an error, it can be repeated."""

    def close(self) -> bool: ...


C = TypeVar("C", bound=Closable)


class ForkLocal(Generic[C]):
    """Create one `C` per process on first use. A forked child creates its own and never touches its parent's.

    `_instance` is the object of process `_pid`, `_inherited` are those of its parents. `_closing` is held by the call
    of `close` that closes the object.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._instance: C | None = None
        self._inherited: list[C] = []
        self._pid = os.getpid()
        self._guard = threading.RLock()
        self._closing = threading.Lock()
        self._closed = False

    def get(self) -> C:
        """Return this process's `C`, which the first call creates. Raise `ClientClosedError` after `close()`."""
        instance = self._instance  # the usual case needs no lock
        if instance is not None and self._pid == os.getpid() and not self._closed:
            return instance
        if self._pid != os.getpid():
            self._reset_in_child()
        with self._guard:
            while not self._closed:
                if self._instance is not None:
                    return self._instance
                made = self._make()
                if self._closed or self._instance is not None:  # by a signal handler of this thread
                    made.close()
                else:
                    self._instance = made
        raise ClientClosedError()

    def _reset_in_child(self) -> None:
        """In a forked child, start without an object. Keep a reference to the parent's object: dropping it in the
        child would run clean-up that belongs to the parent."""
        self._guard, self._closing = threading.RLock(), threading.Lock()  # another thread may have held the old ones
        self._pid = os.getpid()
        if self._instance is not None:
            self._inherited.append(self._instance)
            self._instance = None

    def close(self) -> None:
        """Close this process's `C`, if any, unless another call does so now. Later `get()` calls fail."""
        if self._pid != os.getpid():
            self._reset_in_child()
        with (closing := threading.Lock()):
            with self._guard:
                self._closed = True
                instance = self._instance
                if instance is None or self._closing.locked():
                    return
                self._closing = closing
            if instance.close():
                self._instance = None


def begin_copy(copies: InFlight, call: threading.Lock) -> None:
    """Register a call, before each of its copies. call: a lock that represents the call and is held until its end (see
    `InFlight`). From the first copy on, closing waits until the call releases the lock, so that the clean-up of the
    call is still accepted. Raise `ClientClosedError` if this is the first copy and the client is closing."""
    if not copies.enter(call):
        raise ClientClosedError()


@functools.cache
def session_states() -> weakref.WeakSet[SessionState]:
    """Return the set of the session states of this process, to which each new session is added. A forked child
    releases their locks (see `SessionState.forked`). The first call registers that hook."""
    opened: weakref.WeakSet[SessionState] = weakref.WeakSet()

    def in_child() -> None:
        for session_state in opened:
            session_state.forked()
        opened.clear()

    os.register_at_fork(after_in_child=in_child)
    return opened


def end_copies(copies: InFlight, config: DataPlaneConfig) -> None:
    """Reject new copies and wait for those in progress: for as long as one copy may take without progress, plus the
    time to stop its put. Raise `CallTimeoutError` after that."""
    copies.shut()
    limit_s = config.call_timeout_s + config.connect_timeout_s
    in_progress = copies.wait(limit_s)
    if in_progress:
        what = f"close(), which waits for {in_progress} copies of rows by other threads of this process"
        raise CallTimeoutError(what=what, waited_s=limit_s, peer="these threads")


def session_lock(config: DataPlaneConfig) -> SessionLock | None:
    """Return a held file lock that proves to units on this host that this process runs. Return None, for remote
    connections only, if `force_remote` is set or the lock cannot be created."""
    if config.force_remote:
        return None
    try:
        return SessionLock.create()
    except OSError as error:
        log.warning("Lock file for shared memory cannot be created (%s); using sockets instead", error)
        return None


class Connection:
    """An open session and its session state. It executes operations in the calling thread. Thread-safe.

    `_channel` sends the commands. `_running` are the active calls, `_copies` are those that have begun a copy, for
    which `close` waits.
    """

    def __init__(self, config: DataPlaneConfig) -> None:
        check_pickles(config)
        lock = session_lock(config)  # held while the session may use shared memory; None if it uses none
        channel: ControllerChannel | None = None
        try:
            channel = ControllerChannel.open(config, "" if lock is None else str(lock.path))
            self._use(config, channel, lock)
        except BaseException:
            if channel is not None:
                channel.close()
            if lock is not None:
                lock.close()
            raise

    def _use(self, config: DataPlaneConfig, channel: ControllerChannel, lock: SessionLock | None) -> None:
        """Set up the session of this channel. lock: see `SessionState`."""
        self._channel = channel
        self._running = InFlight()
        self._copies = InFlight()
        self._config = config
        self.session_state = SessionState(
            self._channel.unit_config,
            session=self._channel.session,
            lock=lock,
            durable=self._channel.durable,
            put_timeout_s=self._channel.put_timeout_s,
        )
        # The callback first: a reconnection between these two lines may list other units.
        self._channel.on_units = self.session_state.connections.learn
        self.session_state.connections.learn(self._channel.units)
        session_states().add(self.session_state)
        self._channel.leftovers = self.session_state.idle_leftovers  # posted with every heartbeat
        # Closes the session after the last reference to this object was dropped, unless `close` was called.
        end = functools.partial(_close_session, self.session_state, self._channel)
        self._finalizer = weakref.finalize(self, self._channel.end_in_background, end)
        self._finalizer.atexit = False

    def run(self, operation: Operation[T]) -> T:
        """Execute the operation's steps until it returns. Errors, including a KeyboardInterrupt at any point, are
        passed through the operation's clean-up; resources that the operation never received are released."""
        acquired: list[tuple[int, Command]] = []  # see `_resume`
        with (call := threading.Lock()):  # represents the call: see `InFlight`
            self._running.enter(call)
            try:
                self._post_leftovers()
                return self._resume(operation, call, acquired)
            except BaseException as error:
                self._clean_up(operation, call, acquired, error)
                raise
            finally:
                self._copies.leave(call)
                self._running.leave(call)

    def _resume(
        self,
        operation: Operation[T],
        call: threading.Lock,
        acquired: list[tuple[int, Command]],
        thrown: BaseException | None = None,
    ) -> T:
        """Execute the remaining steps of the operation, after throwing `thrown` into it, and return its result.

        call: see `begin_copy`. acquired: the numbers and commands of the calls by which the operation may have
        acquired resources; each is appended before it is sent.
        """
        try:
            step = next(operation) if thrown is None else operation.throw(thrown)
            while True:
                try:
                    outcome = self._perform(step, call, acquired)
                except BaseException as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:  # the operation has returned
            return stop.value  # type: ignore[no-any-return]

    def _clean_up(
        self,
        operation: Operation[Any],
        call: threading.Lock,
        acquired: list[tuple[int, Command]],
        error: BaseException,
    ) -> None:
        """Release the operation's resources unless it has done so itself. The operation sees every error except one
        that a signal raises between two of its steps; an interrupt may also have prevented it from receiving a
        resource."""
        has_ended = inspect.getgeneratorstate(operation) == inspect.GEN_CLOSED
        if has_ended and isinstance(error, Exception):
            return  # an ordinary error: it was thrown into the operation, which has cleaned up
        try:
            if not has_ended:
                self._resume(operation, call, acquired, error)
        finally:
            with contextlib.suppress(DataPlaneError):  # the session has ended and holds nothing
                for number, command in acquired:  # no effect on resources that the operation has released
                    if isinstance(command, Preallocate):  # the buffer may have received the space, and released it
                        self.session_state.preallocated.give_up(number)
                    elif (undo := undo_of(number, command)) is not None:
                        self._channel.post(undo)
                self._post_leftovers()

    def _perform(self, step: Step, call: threading.Lock, acquired: list[tuple[int, Command]]) -> Any:
        """Execute one step in the calling thread and return its outcome."""
        match step:
            case Send():
                return self._send(step, call, acquired)
            case Post(command):
                self._channel.post(command)
            case Work(run):
                begin_copy(self._copies, call)
                if acquired:
                    # From now on only the operation can determine when all writes into its space have ended, and thus
                    # when an `Allocate` may be undone.
                    acquired[:] = [each for each in acquired if not isinstance(each[1], Allocate)]
                return run()
            case Wait(future):
                future.result()
        return None

    def _send(self, step: Send, call: threading.Lock, acquired: list[tuple[int, Command]]) -> Sent:
        """Send a command and wait for its response. Record it in `acquired` if the response hands over resources."""
        command, meanwhile = step.command, step.meanwhile
        record = acquired if type(command) in _RESOURCE_COMMANDS else None
        if meanwhile is None:
            return Sent(*self._channel.call(command, acquired=record))
        begin_copy(self._copies, call)
        values: list[Any] = []  # the value that `meanwhile` returned; empty if it was not executed
        number, result = self._channel.call(command, meanwhile=lambda: values.append(meanwhile()), acquired=record)
        return Sent(number, result, *values)

    def _post_leftovers(self) -> None:
        for command in self.session_state.leftovers():
            self._channel.post(command)

    def close(self) -> bool:
        """See `DataPlaneClient.close`. Return whether everything is free. In a signal handler that interrupts a call of
        its thread, wait for no call, because it may wait for the interrupted one, and keep what the calls use: the
        session lock, as long as it is held, keeps the service from reusing the space of their copies."""
        if self._running.in_this_thread():
            self._copies.shut()
            self._channel.end()
            return False
        end_copies(self._copies, self._config)  # first: the clean-up of these calls still needs the session
        done = _close_session(self.session_state, self._channel)
        self._finalizer.detach()
        return done


def _close_session(session_state: SessionState, channel: ControllerChannel) -> bool:
    session_state.close()
    return channel.close()
