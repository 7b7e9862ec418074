"""One session of a sync client, and the thread-safe, fork-safe holder that makes it when first needed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

from dataplane.bulk.lock import SessionLock
from dataplane.config import DataPlaneConfig
from dataplane.control.channel import Channel
from dataplane.desk import Desk
from dataplane.errors import CallTimeoutError, ClientClosedError, DataPlaneError
from dataplane.steps import Operation, Post, Send, Sent, Step, T, Work

log = logging.getLogger(__name__)


class Closable(Protocol):
    """What `PerProcess` holds."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class PerProcess(Generic[C]):
    """Makes one `C` per process, when first asked. A forked child makes its own and never touches its parent's."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._made: C | None = None
        self._inherited: list[C] = []
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._closed = False

    def get(self) -> C:
        """This process's `C`. Raises `ClientClosedError` after `close()`."""
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
        """Set the parent's aside, alive: dropping it here would run clean-up that is the parent's to run."""
        self._guard = threading.Lock()
        self._pid = os.getpid()
        if self._made is not None:
            self._inherited.append(self._made)
            self._made = None

    def close(self) -> None:
        """Close this process's `C`, if any; later `get()`s fail."""
        if self._pid != os.getpid():
            self._forked()
        with self._guard:
            self._closed = True
            made, self._made = self._made, None
        if made is not None:
            made.close()


class CopiesUnderWay:
    """Counts operations from their first copy to their end (see `Copying`), so that closing can wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._closing = False

    def begin(self) -> None:
        """One more. Raises `ClientClosedError` after `refuse_more`."""
        with self._changed:
            if self._closing:
                raise ClientClosedError()
            self._count += 1

    def end(self) -> None:
        """One less."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def refuse_more(self) -> None:
        """From now on none begins."""
        with self._changed:
            self._closing = True

    def wait(self, timeout_s: float) -> None:
        """Until none is under way. Raises `CallTimeoutError` after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._count == 0, timeout_s):
                what = f"close(): {self._count} operations that are copying"
                raise CallTimeoutError(what=what, waited_s=timeout_s, peer="this process")


class Copying:
    """One operation's place among the copies under way: taken at its first copy, kept until this context ends, so that
    its clean-up is not refused because the client is closing."""

    def __init__(self, copies: CopiesUnderWay) -> None:
        self._copies = copies
        self._counted = False

    def begin(self) -> None:
        """To be called before each copy. Raises `ClientClosedError` if it is the first and the client is closing."""
        if not self._counted:
            self._copies.begin()
            self._counted = True

    def hand_over(self) -> Copying:
        """Another to go on with; this one ends nothing any more."""
        heir = Copying(self._copies)
        heir._counted, self._counted = self._counted, False
        return heir

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._counted:
            self._copies.end()


@functools.cache
def desks() -> weakref.WeakSet[Desk]:
    """The desks of this process's open sessions. A forked child lets go of their locks (see `Desk.forked`)."""
    opened: weakref.WeakSet[Desk] = weakref.WeakSet()

    def in_child() -> None:
        for desk in opened:
            desk.forked()
        opened.clear()

    os.register_at_fork(after_in_child=in_child)
    return opened


def copies_end_s(config: DataPlaneConfig) -> float:
    """How long closing waits for copies: as long as one may be silent, and then the stop of its put."""
    return config.call_timeout_s + config.connect_timeout_s


def session_lock(config: DataPlaneConfig) -> SessionLock | None:
    """A held lock that lets units on this host know this process's life; None where every road is to be remote."""
    if config.force_remote:
        return None
    try:
        return SessionLock.create()
    except OSError as error:
        log.warning("no lock file for shared memory (%s): reading and writing over sockets instead", error)
        return None


class Connection:
    """An open session with its desk; runs operations in the calling thread. Thread-safe."""

    def __init__(self, config: DataPlaneConfig) -> None:
        lock = session_lock(config)
        try:
            self._channel = Channel.open(config, "" if lock is None else str(lock.path))
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        self._copies = CopiesUnderWay()
        self._patience_s = copies_end_s(config)
        self.desk = Desk(
            self._channel.shown,
            session=self._channel.session,
            lock=lock,
            durable=self._channel.durable,
            put_timeout_s=self._channel.put_timeout_s,
        )
        self._channel.learned = self.desk.roads.learn
        self.desk.roads.learn(self._channel.units)
        desks().add(self.desk)
        self._channel.leftovers = self.desk.idle_leftovers
        end = functools.partial(_let_go, self.desk, self._channel)
        self._dropped = weakref.finalize(self, self._channel.have_ended, end)
        self._dropped.atexit = False

    def run(self, operation: Operation[T]) -> T:
        """Perform the operation's steps until it returns. KeyboardInterrupt and errors go through its clean-up."""
        self._post_leftovers()
        with Copying(self._copies) as copying:
            try:
                step = next(operation)
                while True:
                    try:
                        outcome = self._perform(step, copying)
                    except BaseException as error:
                        step = operation.throw(error)
                    else:
                        step = operation.send(outcome)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]

    def _perform(self, step: Step, copying: Copying) -> Any:
        match step:
            case Send():
                return self._send(step, copying)
            case Post(command):
                self._channel.post(command)
            case Work(work):
                copying.begin()
                return work()
        return None

    def _send(self, step: Send, copying: Copying) -> Sent:
        meanwhile = step.meanwhile
        if meanwhile is None:
            return Sent(*self._channel.call(step.command))
        copying.begin()
        done: list[Any] = []
        number, result = self._channel.call(step.command, meanwhile=lambda: done.append(meanwhile()))
        return Sent(number, result, *done)

    def _post_leftovers(self) -> None:
        for command in self.desk.leftovers():
            self._channel.post(command)

    def close(self) -> None:
        """See `DataPlaneClient.close`."""
        self._dropped.detach()
        self._copies.refuse_more()
        self._copies.wait(self._patience_s)
        with contextlib.suppress(DataPlaneError):  # the session is over: nothing is held any more
            self._post_leftovers()
        _let_go(self.desk, self._channel)


def _let_go(desk: Desk, channel: Channel) -> None:
    desk.close()
    channel.close()
