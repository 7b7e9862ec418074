"""Sessions: what sync and async ones share, that of a sync client, and a holder that creates it on first use."""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import logging
import os
import signal
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import CodeType
from typing import Any, Generic, Protocol, TypeVar

from dataplane.client.operations.steps import EndRead, Operation, Post, Send, Sent, Step, T, Wait, Work
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.client.rpc.pending_calls import OpenChannel
from dataplane.client.session_state import SessionState, check_pickles
from dataplane.config import DataPlaneConfig
from dataplane.core.in_flight import InFlight
from dataplane.errors import (
    CallTimeoutError,
    ClientClosedError,
    DataPlaneError,
    ReentrantCallError,
    SessionInterruptedError,
)
from dataplane.storage.session_lock import SessionLock

log = logging.getLogger(__name__)

COPIES_S = 60.0
"""Time after which a closing session logs that it waits for copies."""


class Held(Protocol):
    """An object that `ForkLocal` can hold. usable: whether calls may use it. `close` may be repeated."""

    @property
    def usable(self) -> bool: ...
    def close(self) -> None: ...


C = TypeVar("C", bound=Held)


class ForkLocal(Generic[C]):
    """Create one `C` per process on first use, and another one when it is no longer usable. A forked child creates its
    own and never touches its parent's."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._pid = os.getpid()
        # The object of process `_pid`, and those of its parents.
        self._instance: C | None = None
        self._inherited: list[C] = []
        # Held while `make` or the object's `close` runs.
        self._guard = threading.RLock()
        # Held while `make` runs: only a call that interrupts it finds it held by its own thread.
        self._making = threading.Lock()
        self._closed = False

    def get(self) -> C:
        """Return this process's `C`, which the first call creates. Raise `ClientClosedError` after `close()`, and
        `ReentrantCallError` in a signal handler or finalizer that interrupts the creation."""
        instance = self._instance  # the usual case needs no lock
        if instance is not None and instance.usable and self._pid == os.getpid() and not self._closed:
            return instance
        if self._pid != os.getpid():
            self._reset_in_child()
        with self._guard:
            if self._closed:
                raise ClientClosedError()
            if self._instance is None or not self._instance.usable:
                if self._making.locked():
                    raise ReentrantCallError()
                with (making := threading.Lock()):
                    self._making = making
                    self._instance = self._make()
            return self._instance

    def _reset_in_child(self) -> None:
        """In a forked child, start without an object. Keep a reference to the parent's object: dropping it in the
        child would run clean-up that belongs to the parent."""
        self._guard = threading.RLock()  # another thread of the parent may have held the old one
        self._making = threading.Lock()
        self._pid = os.getpid()
        if self._instance is not None:
            self._inherited.append(self._instance)
            self._instance = None

    def close(self) -> None:
        """Close this process's `C`, if any. Later `get()` calls fail. Raise `ReentrantCallError` in a signal handler or
        finalizer that interrupts a call of the object, or its creation."""
        if self._pid != os.getpid():
            self._reset_in_child()
        with self._guard:
            if self._making.locked():
                raise ReentrantCallError()
            self._closed = True
            try:
                if self._instance is not None:
                    self._instance.close()
                    self._instance = None
            except ReentrantCallError:  # nothing was closed
                self._closed = False
                raise


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
        calls = "1 call" if in_progress == 1 else f"{in_progress} calls"
        raise CallTimeoutError(
            what="close() of a client",
            waited_s=limit_s,
            peer=f"{calls} of other threads that copy rows",
            hint="Wait until they have returned, then call close() again.",
        )


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


class Phase(enum.Enum):
    """State of a session of this process."""

    OPEN = "open"
    INTERRUPTED = "interrupted"
    """An interrupt ended it. A thread closes it after the copies of all threads."""
    CLOSED = "closed"


_NEXT = {
    Phase.OPEN: {Phase.INTERRUPTED, Phase.CLOSED},
    Phase.INTERRUPTED: {Phase.CLOSED},
    Phase.CLOSED: set[Phase](),
}


def is_interrupt(error: BaseException) -> bool:
    """Return whether the error is not one of the interrupted call: a KeyboardInterrupt or SystemExit, or any exception
    that a signal handler of Python raised."""
    if not isinstance(error, Exception):
        return not isinstance(error, asyncio.CancelledError | GeneratorExit)
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a signal handler, None if it is not a function or method of Python."""
    return getattr(inspect.unwrap(handler) if callable(handler) else handler, "__code__", None)


def leave_blocks(operation: Operation[Any], error: BaseException) -> None:
    """Let an operation whose session has ended leave its `try` and `with` blocks: every step that it yields fails."""
    try:
        while inspect.getgeneratorstate(operation) != inspect.GEN_CLOSED:
            operation.throw(error)
    except BaseException as last:
        log.debug("An operation of an interrupted session ended with %r", last)


class Session(ABC):
    """What sync and async sessions share: their phase, their session state, and the calls that copy, for which closing
    waits.

    An interrupt (see `is_interrupt`) of a call ends the session: calls of all threads fail with
    `SessionInterruptedError`, the client opens another session with its next call, and a thread closes this one as soon
    as no thread copies."""

    def __init__(self, config: DataPlaneConfig, channel: OpenChannel, lock: SessionLock | None) -> None:
        self._config = config
        self._phase = Phase.OPEN
        self.usable = True
        """Whether calls may use the session: its phase is OPEN."""
        # The calls that have begun a copy.
        self._copies = InFlight()
        self.session_state = SessionState(
            channel.unit_config,
            session=channel.session,
            lock=lock,
            durable=channel.durable,
            put_timeout_s=channel.put_timeout_s,
        )
        # The callback first: a reconnection between these two lines may list other units.
        channel.on_units = self.session_state.connections.learn
        self.session_state.connections.learn(channel.units)
        session_states().add(self.session_state)
        channel.leftovers = self.session_state.idle_leftovers  # posted with every heartbeat

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.session_state.session}, {self._phase.value})"

    def _become(self, phase: Phase) -> None:
        assert phase in _NEXT[self._phase], (self._phase, phase)
        self.usable = phase is Phase.OPEN
        self._phase = phase

    def _begin_copy(self, call: threading.Lock) -> None:
        """Register a call, before each of its copies. call: a lock that represents the call and is held until its end
        (see `InFlight`). From the first copy on, closing waits until the call releases the lock, so that the clean-up
        of the call is still accepted. Raise `SessionInterruptedError` or `ClientClosedError` if this is the first copy
        and the session ends."""
        if not self._copies.enter(call):
            raise ClientClosedError() if self.usable else SessionInterruptedError()

    def _interrupt(self, operation: Operation[Any] | None = None) -> None:
        """End the session after an interrupt of this call, or of its `operation`."""
        if self._phase is Phase.OPEN:
            self._become(Phase.INTERRUPTED)
            self._fail_calls(SessionInterruptedError())
            threading.Thread(target=self._close_interrupted, name="tq-close", daemon=True).start()
        if operation is not None:
            leave_blocks(operation, SessionInterruptedError())

    def _close_interrupted(self) -> None:
        """Close the session after the copies of all threads."""
        self._copies.shut()
        while self._interrupted_copies.wait(COPIES_S):
            log.warning("%r waits for copies of other threads since %.0f s", self, COPIES_S)
        self._free()
        self._become(Phase.CLOSED)

    @property
    def _interrupted_copies(self) -> InFlight:
        """What uses the session's memory still after an interrupt."""
        return self._copies

    @abstractmethod
    def _fail_calls(self, error: DataPlaneError) -> None:
        """Let all calls fail with this error, from now on and in all threads."""

    @abstractmethod
    def _free(self) -> None:
        """Close the session, whose calls have failed and which no copy uses, from a thread of its own."""


class Connection(Session):
    """An open session. It executes operations in the calling thread. Thread-safe."""

    def __init__(self, config: DataPlaneConfig) -> None:
        check_pickles(config)
        lock = session_lock(config)  # held while the session may use shared memory; None if it uses none
        channel: ControllerChannel | None = None
        try:
            channel = ControllerChannel.open(config, "" if lock is None else str(lock.path))
            super().__init__(config, channel, lock)
            self._channel = channel
            # By thread: a lock that is held while a call of the thread runs.
            self._callers: dict[int, threading.Lock] = {}
            # Closes the session after the last reference to this object was dropped, unless `close` was called.
            end = functools.partial(_close_session, self.session_state, channel)
            self._finalizer = weakref.finalize(self, channel.end_in_background, end)
            self._finalizer.atexit = False
        except BaseException:
            if channel is not None:
                channel.close()
            if lock is not None:
                lock.close()
            raise

    def run(self, operation: Operation[T]) -> T:
        """Execute the operation's steps until it returns. An error is thrown into the operation, which cleans up; an
        interrupt ends the session. Raise `ReentrantCallError` in a signal handler or finalizer that interrupts a call
        of this thread."""
        try:
            with (call := threading.Lock()):  # held as long as the call runs
                self._enter(call)
                try:
                    if any(self.session_state.releasable):
                        self._post_leftovers()
                    result = self._resume(operation, call)
                finally:
                    self._copies.leave(call)
            return result
        except BaseException as error:
            if is_interrupt(error):
                self._interrupt(operation)
            raise

    def _enter(self, call: threading.Lock) -> None:
        """Register the call of this thread, which holds this lock."""
        thread = threading.get_ident()
        interrupted = self._callers.get(thread)
        if interrupted is not None and interrupted.locked():
            raise ReentrantCallError()
        self._callers[thread] = call

    def _resume(self, operation: Operation[T], call: threading.Lock) -> T:
        """Execute the steps of the operation and return its result. call: see `_begin_copy`."""
        try:
            step = next(operation)
            while True:
                try:
                    if type(step) is Send:
                        outcome: Any = Sent(*self._channel.call(step.command))
                    else:
                        outcome = self._perform(step, call)
                except BaseException as error:
                    if is_interrupt(error):
                        raise
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:  # the operation has returned
            return stop.value  # type: ignore[no-any-return]

    def _perform(self, step: Step, call: threading.Lock) -> Any:
        """Execute one step other than `Send` in the calling thread and return its outcome."""
        match step:
            case Post(command):
                self._channel.post(command)
            case EndRead(call_id):
                self._channel.end_read(call_id)
            case Work(run):
                self._begin_copy(call)
                return run()
            case Wait(future):
                future.result()
        return None

    def _post_leftovers(self) -> None:
        for command in self.session_state.leftovers():
            self._channel.post(command)

    def close(self) -> None:
        """See `DataPlaneClient.close`. An interrupt lets a thread close the session."""
        try:
            with (call := threading.Lock()):
                self._enter(call)
                if self.usable:
                    end_copies(self._copies, self._config)  # first: the clean-up of these calls needs the session
                    self._free()
                    self._finalizer.detach()
                    self._become(Phase.CLOSED)
        except BaseException as error:
            if is_interrupt(error):
                self._interrupt()
            raise

    def _fail_calls(self, error: DataPlaneError) -> None:
        self._finalizer.detach()
        self._channel.end(error)

    def _free(self) -> None:
        _close_session(self.session_state, self._channel)


def _close_session(session_state: SessionState, channel: ControllerChannel) -> None:
    session_state.close()
    channel.close()
