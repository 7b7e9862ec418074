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

from dataplane.client.operations.steps import Operation, Post, Send, Sent, Step, T, Work
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
    """An object that `ForkLocal` can hold."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class ForkLocal(Generic[C]):
    """Create one `C` per process on first use. A forked child creates its own and never touches its parent's."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._made: C | None = None
        self._inherited: list[C] = []
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._closed = False

    def get(self) -> C:
        """Return this process's `C`. Raise `ClientClosedError` after `close()`."""
        made = self._made
        if made is not None and self._pid == os.getpid() and not self._closed:
            return made
        if self._pid != os.getpid():
            self._forked()
        with self._guard:
            if self._closed:
                raise ClientClosedError()
            if self._made is None:
                self._made = self._make()
            return self._made

    def _forked(self) -> None:
        """Keep a reference to the parent's object: dropping it in the child would run clean-up that belongs to the
        parent."""
        self._guard = threading.Lock()
        self._pid = os.getpid()
        if self._made is not None:
            self._inherited.append(self._made)
            self._made = None

    def close(self) -> None:
        """Close this process's `C`, if any. Later `get()` calls fail."""
        if self._pid != os.getpid():
            self._forked()
        with self._guard:
            self._closed = True
            made, self._made = self._made, None
        if made is not None:
            made.close()


def begin_copy(copies: InFlight, call: threading.Lock) -> None:
    """Register a call before each of its copies. From its first copy on, closing waits until the call releases its
    lock, so that the clean-up of the call is still accepted. Raise `ClientClosedError` if this is the first copy
    and the client is closing."""
    if not copies.enter(call):
        raise ClientClosedError()


@functools.cache
def session_states() -> weakref.WeakSet[SessionState]:
    """Return the session states of the open sessions of this process. A forked child releases their locks (see
    `SessionState.forked`)."""
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
    left = copies.wait(limit_s)
    if left:
        what = f"close() (copies in progress: {left})"
        raise CallTimeoutError(what=what, waited_s=limit_s, peer="this process")


def session_lock(config: DataPlaneConfig) -> SessionLock | None:
    """Return a held file lock that proves to units on this host that this process runs. Return None if all
    connections are remote."""
    if config.force_remote:
        return None
    try:
        return SessionLock.create()
    except OSError as error:
        log.warning("Lock file for shared memory cannot be created (%s); using sockets instead", error)
        return None


class Connection:
    """An open session and its session state. It executes operations in the calling thread. Thread-safe."""

    def __init__(self, config: DataPlaneConfig) -> None:
        check_pickles(config)
        lock = session_lock(config)
        try:
            self._channel = ControllerChannel.open(config, "" if lock is None else str(lock.path))
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        self._copies = InFlight()
        self._config = config
        self.session_state = SessionState(
            self._channel.unit_config,
            session=self._channel.session,
            lock=lock,
            durable=self._channel.durable,
            put_timeout_s=self._channel.put_timeout_s,
        )
        self._channel.on_units = self.session_state.connections.learn
        self.session_state.connections.learn(self._channel.units)
        session_states().add(self.session_state)
        self._channel.leftovers = self.session_state.idle_leftovers
        end = functools.partial(_close_session, self.session_state, self._channel)
        self._dropped = weakref.finalize(self, self._channel.end_in_background, end)
        self._dropped.atexit = False

    def run(self, operation: Operation[T]) -> T:
        """Execute the operation's steps until it returns. Errors, including a KeyboardInterrupt at any point, are
        passed through the operation's clean-up; resources that the operation never received are released."""
        self._post_leftovers()
        given: list[tuple[int, Command]] = []
        with (call := threading.Lock()):
            try:
                return self._resume(operation, call, given)
            except BaseException as error:
                self._clean_up(operation, call, given, error)
                raise
            finally:
                self._copies.leave(call)

    def _resume(
        self,
        operation: Operation[T],
        call: threading.Lock,
        given: list[tuple[int, Command]],
        thrown: BaseException | None = None,
    ) -> T:
        """Execute the remaining steps of the operation, after throwing `thrown` into it."""
        try:
            step = next(operation) if thrown is None else operation.throw(thrown)
            while True:
                try:
                    outcome = self._perform(step, call, given)
                except BaseException as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _clean_up(
        self,
        operation: Operation[Any],
        call: threading.Lock,
        given: list[tuple[int, Command]],
        error: BaseException,
    ) -> None:
        """Release the operation's resources unless it has done so itself. The operation sees every error except one
        that a signal raises between two of its steps; an interrupt may also have prevented it from receiving a
        resource."""
        over = inspect.getgeneratorstate(operation) == inspect.GEN_CLOSED
        if over and isinstance(error, Exception):
            return
        try:
            if not over:
                self._resume(operation, call, given, error)
        finally:
            with contextlib.suppress(DataPlaneError):  # the session has ended and holds nothing
                for number, command in given:
                    if isinstance(command, Preallocate):
                        self.session_state.preallocated.give_up(number)
                    elif (undo := undo_of(number, command)) is not None:
                        self._channel.post(undo)
                self._post_leftovers()

    def _perform(self, step: Step, call: threading.Lock, given: list[tuple[int, Command]]) -> Any:
        """Execute one step in the calling thread and return its outcome."""
        match step:
            case Send():
                return self._send(step, call, given)
            case Post(command):
                self._channel.post(command)
            case Work(work):
                begin_copy(self._copies, call)
                if given:
                    # From now on only the operation can determine when all writes into its space have ended.
                    given[:] = [each for each in given if not isinstance(each[1], Allocate)]
                return work()
        return None

    def _send(self, step: Send, call: threading.Lock, given: list[tuple[int, Command]]) -> Sent:
        """Send a command; record it in `given` if its response hands over resources."""
        command, meanwhile = step.command, step.meanwhile
        record = given if type(command) in _RESOURCE_COMMANDS else None
        if meanwhile is None:
            return Sent(*self._channel.call(command, given=record))
        begin_copy(self._copies, call)
        done: list[Any] = []
        number, result = self._channel.call(command, meanwhile=lambda: done.append(meanwhile()), given=record)
        return Sent(number, result, *done)

    def _post_leftovers(self) -> None:
        for command in self.session_state.leftovers():
            self._channel.post(command)

    def close(self) -> None:
        """See `DataPlaneClient.close`."""
        self._dropped.detach()
        end_copies(self._copies, self._config)
        with contextlib.suppress(DataPlaneError):  # the session has ended and holds nothing
            self._post_leftovers()
        _close_session(self.session_state, self._channel)


def _close_session(session_state: SessionState, channel: ControllerChannel) -> None:
    session_state.close()
    channel.close()
