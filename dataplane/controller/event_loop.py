"""The ledger thread: it alone owns the ledger and the ZMQ server, applies inputs and delivers outputs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from dataplane.controller.durable_ledger import DurableLedger
from dataplane.controller.requests import Facts, Key, Reply, key_of, rejection_of
from dataplane.controller.zmq_server import ZmqServer
from dataplane.core.failpoints import failpoint
from dataplane.core.limited_log import LimitedLog
from dataplane.core.zmq_io import Waker, poll_ms
from dataplane.errors import (
    CallTimeoutError,
    DataPlaneError,
    InternalError,
    ServiceUnavailableError,
    StateDirError,
)
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)

TICK_S = 0.005
"""Maximum age of the ledger's clock in seconds when it handles an input."""
FORGET_S = 300.0
"""ZMQ clients resend pending calls far more often than this, so calls not resent for this long are abandoned."""
_TICK_MS = poll_ms(TICK_S)
_POLLIN = int(zmq.POLLIN)
_FAILPOINTS = {"open": "controller.before_opened", "add": "controller.before_added"}
INSPECT_S = 10.0
"""Timeout in seconds of `LedgerThread.inspect`."""


class LedgerLike(Protocol):
    """The interface of a ledger that `LedgerThread` uses."""

    def apply(self, item: c.Input) -> list[c.Output]: ...
    def inspect(self, command: c.Command) -> c.Result: ...
    def next_deadline(self) -> float | None: ...

    @property
    def min_heartbeat_s(self) -> float: ...

    @property
    def live_bytes(self) -> int: ...


class LoopObserver(Protocol):
    """Observer of `LedgerThread`. Its methods run in the ledger thread and must not raise."""

    clock: Callable[[], float]
    busy_s: float

    def answered(self, item: c.Input, output: c.Output, began: float) -> None: ...


@dataclass(slots=True)
class _PendingRequest:
    """A pending request. `replies` is keyed by caller, so that a caller that resends a request gets one answer.

    last: when the request arrived last, by the ledger's clock. lasting: the caller does not resend. began: when the
    request arrived, by the observer's clock.
    """

    item: c.Input
    replies: dict[object, Reply] = field(default_factory=dict)
    last: float = 0.0
    lasting: bool = False
    began: float = 0.0


class LedgerThread:
    """Runs `ledger` in a dedicated thread. Inputs come from the ZMQ server and from `submit` (any thread).

    Each iteration handles all submitted inputs, then one message of the server. It first applies a
    `Tick` if the last one is older than `TICK_S` or a deadline is reached. Deadlines are looked up
    once no input has arrived for `TICK_S`; while inputs arrive, ticks find them. Outputs are
    delivered in the ledger's order. An exception in the ledger is logged with its input and answered with
    `InternalError`. An input that the journal cannot record is rejected and changes nothing.

    `ended` is set when the thread has stopped. `watch` observes every delivered answer and the busy time of the thread.
    """

    def __init__(
        self,
        ledger: LedgerLike,
        zmq_server: ZmqServer,
        facts: Facts,
        *,
        clock: Callable[[], float] = time.monotonic,
        watch: LoopObserver | None = None,
    ) -> None:
        self._ledger = ledger
        self._journaled = ledger if isinstance(ledger, DurableLedger) else None  # takes the encoded form, too
        self._observer = watch
        self._zmq = zmq_server
        self._facts = facts
        self._clock = clock
        self._last_tick = -math.inf  # the time of the last tick, by the ledger's clock
        self._deadline = math.inf  # the ledger's next deadline, as far as it is known
        self._paused_s = 0.0  # by which the ledger's clock is behind `clock`
        self._unwritable = LimitedLog(log)  # of a journal that is not writable
        self._last_sweep = clock()  # the last time that abandoned requests were dropped
        self._inbox: deque[Callable[[], None]] = deque()  # jobs of other threads
        self._waker = Waker()
        self._pending: dict[Key, _PendingRequest] = {}  # requests without an answer
        self._stopping = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tq-ledger", daemon=True)

    # --- any thread

    @property
    def min_heartbeat_s(self) -> float:
        """`Ledger.min_heartbeat_s`, which replies to heartbeats contain."""
        return self._ledger.min_heartbeat_s

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, item: c.Input, reply: Reply | None = None) -> None:
        """Submit `item` to the ledger. `reply` receives the output that answers it, in the ledger thread. Does not
        block."""
        self._enqueue(lambda: self.handle(item, reply, caller=reply, lasting=True))

    def withdraw(self, item: c.Input, reply: Reply) -> None:
        """Let the ledger thread remove `reply`, which is not called after that. The item itself is not cancelled."""
        self._enqueue(lambda: self._forget(item, reply))

    def inspect(self, command: c.Command) -> c.Result:
        """Return the result of a command that changes nothing, or raise its error. It needs no
        session and leaves no record in the journal. Raises `CallTimeoutError` after `INSPECT_S`
        seconds, `ServiceUnavailableError` once the service is stopping."""
        outcome: Future[c.Result] = Future()

        def execute() -> None:
            if not outcome.set_running_or_notify_cancel():  # it timed out
                return
            try:
                outcome.set_result(self._ledger.inspect(command))
            except Exception as error:
                outcome.set_exception(error)

        self._enqueue(execute)
        wait([outcome], INSPECT_S)
        if not outcome.done():
            outcome.cancel()
            peer = f"the service at {self._facts.address}"
            raise CallTimeoutError(what=type(command).__name__, waited_s=INSPECT_S, peer=peer)
        return outcome.result()

    def run(self, job: Callable[[], None]) -> None:
        """Schedule `job`, which must be short, in the ledger thread. Does not block."""
        self._enqueue(job)

    def stop(self, timeout_s: float) -> None:
        """Stop the thread and the ZMQ server. Pending calls fail with `ServiceUnavailableError`. Blocks for up to
        `timeout_s`, then logs an error. Idempotent."""
        self._stopping.set()
        self._waker.wake()
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.error("Ledger thread did not stop within %.1f s", timeout_s)
                return
        else:  # no thread closes it
            self._zmq.close()
        self._waker.close()

    def _enqueue(self, job: Callable[[], None]) -> None:
        """Let the ledger thread call `job`. Raises ServiceUnavailableError after `stop`."""
        if self._stopping.is_set():
            raise self._unavailable()
        self._inbox.append(job)
        self._waker.wake()

    def _unavailable(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(address=self._facts.address, why="the service is stopping")

    # --- the ledger's thread

    def _run(self) -> None:
        """Handle submitted inputs, messages and disconnects until `stop` or a fatal error."""
        inputs = (self._waker.fd, self._zmq.socket, self._zmq.monitor)
        sources = [(source, _POLLIN) for source in inputs]
        observer = self._observer
        wait_ms = 0
        try:
            self._tick(self._clock())
            while not self._stopping.is_set():
                ready = zmq.zmq_poll(sources, wait_ms)
                woken = 0.0 if observer is None else observer.clock()  # for `busy_s`
                now = self._clock() - self._paused_s  # time of the ledger's clock
                if now >= self._deadline or (ready and now - self._last_tick >= TICK_S):
                    self._tick(now)
                if ready:
                    self._handle_ready(dict(ready))
                    # The inputs may have set an earlier deadline, or opened the first session: the
                    # ledger expects a tick at least once per heartbeat while a session is open.
                    next_heartbeat = self._last_tick + self._facts.heartbeat_s
                    self._deadline = min(self._deadline, next_heartbeat)
                    wait_ms = _TICK_MS
                else:
                    deadline = self._ledger.next_deadline()
                    self._deadline = math.inf if deadline is None else deadline
                    wait_ms = poll_ms(self._deadline + self._paused_s - self._clock())
                if observer is not None:
                    observer.busy_s += observer.clock() - woken
        except Exception:
            log.critical("Service stops: the ledger thread failed", exc_info=True)
        finally:
            self._shut_down()

    def _handle_ready(self, ready: dict[object, int]) -> None:
        """Handle the inputs at these sources. Errors are logged, so that one failure does not stop
        the thread. ZMQ errors are raised, because a broken socket would be ready again at once."""
        if self._waker.fd in ready:
            self._waker.clear()  # before the inbox is read: a job added meanwhile wakes again
            self._run_jobs()
        try:
            if self._zmq.socket in ready:
                self._zmq.serve(self)
            if self._zmq.monitor in ready:
                self._zmq.notice_disconnects(self)
        except zmq.ZMQError:
            raise
        except Exception:
            log.exception("Service failed to handle a message or a disconnect and continues")

    def _run_jobs(self) -> None:
        """Run all submitted jobs. An error of a job is logged."""
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception:
                log.exception("Service failed to handle a submitted input and continues")

    def _tick(self, now: float) -> None:
        """Apply a `Tick`, and drop abandoned requests once in `FORGET_S`.

        Pauses of this thread do not count: messages that clients sent meanwhile are still queued, so their leases and
        sessions would expire first."""
        # The thread was paused if it is late by more than a heartbeat: for the deadline, or, if
        # that had already passed at the last tick, for a tick now.
        if now - max(self._last_tick, self._deadline) > self._facts.heartbeat_s:
            log.warning("Controller was paused for %.1f s; leases and timeouts were extended", now - self._last_tick)
            self._paused_s += now - self._last_tick
            now = self._last_tick  # the clock continues where it stopped
        self._last_tick = now
        self._deadline = math.inf  # until it is looked up again
        outputs = self._apply(c.Tick(now=now))
        if outputs:
            self._deliver_all(outputs)
        if now - self._last_sweep >= FORGET_S:
            self._drop_abandoned()

    def handle(
        self,
        item: c.Input,
        reply: Reply | None,
        *,
        caller: object = None,
        lasting: bool = False,
        record: bytes | None = None,
    ) -> None:
        """Apply `item` now. Only for the ledger thread. `caller` identifies the recipient of `reply`. `lasting`:
        the caller does not resend the request. `record`: the encoded form of `item`, if it arrived so."""
        began = 0.0 if self._observer is None else self._observer.clock()
        outputs = self._apply(item, record)
        key = None if reply is None else key_of(item)
        if key is not None and reply is not None:
            is_only_caller = key not in self._pending
            if is_only_caller and len(outputs) == 1 and key_of(outputs[0]) == key:
                self._answer(key, item, (reply,), outputs[0], began)
                return
            # Before the delivery, because the answer may be among several outputs.
            pending = self._pending.get(key)
            if pending is None:
                pending = self._pending[key] = _PendingRequest(item, began=began)
            pending.replies[caller] = reply
            pending.last = self._last_tick
            pending.lasting = pending.lasting or lasting
        self._deliver_all(outputs)

    def _apply(self, item: c.Input, record: bytes | None = None) -> list[c.Output]:
        """Apply `item` and return its outputs. If the ledger raises: the rejection of `item`."""
        try:
            if self._journaled is None or record is None:
                return self._ledger.apply(item)
            return self._journaled.apply(item, record)
        except StateDirError as error:
            line = f"{error}; requests are rejected until the journal is writable"
            self._unwritable.write(logging.ERROR, line)
            answer = rejection_of(item, error)
        except Exception as error:
            log.exception("Ledger failed on %r", item)
            answer = rejection_of(item, InternalError(what=f"{_name_of(item)}: {error!r}"))
        return [] if answer is None else [answer]

    def _deliver_all(self, outputs: list[c.Output]) -> None:
        """Deliver outputs in their order; replies to one caller over ZMQ travel in one message."""
        if len(outputs) == 1:
            self._deliver(outputs[0])
        elif outputs:
            with self._zmq.replies_together():
                for output in outputs:
                    self._deliver(output)

    def _deliver(self, output: c.Output) -> None:
        """Deliver one output: to the log, to a storage unit, or to all callers of the request that it answers."""
        if isinstance(output, c.Notice):
            log.log(logging.WARNING if output.warning else logging.INFO, "%s", output.text)
            return
        key = key_of(output)
        if key is None:  # it answers no request
            assert isinstance(output, c.UnitOrder)
            failpoint("controller.before_order")
            self._zmq.order(output)
            return
        pending = self._pending.pop(key, None)
        if pending is None:  # answered already, or withdrawn
            return
        self._answer(key, pending.item, pending.replies.values(), output, pending.began)

    def _answer(
        self,
        key: Key,
        item: c.Input,
        replies: Iterable[Reply],
        output: c.Output,
        began: float,
    ) -> None:
        """Deliver the output that answers `item`, whose key is `key`, to its callers."""
        failpoint(_FAILPOINTS.get(key[0], "controller.before_reply"))
        for reply in replies:
            try:
                reply(output)
            except Exception:
                log.exception("Could not deliver %s", type(output).__name__)
        if self._observer is not None:
            self._observer.answered(item, output, began)

    def _forget(self, item: c.Input, reply: Reply) -> None:
        """Remove the reply to a request. After the last one, the request is no longer pending and its answer is
        dropped."""
        key = key_of(item)
        pending = None if key is None else self._pending.get(key)
        if key is not None and pending is not None:
            pending.replies.pop(reply, None)
            if not pending.replies:
                del self._pending[key]

    def _drop_abandoned(self) -> None:
        """Drop the pending requests that their callers have not resent for `FORGET_S`."""
        self._last_sweep = self._last_tick
        for key, pending in list(self._pending.items()):
            if not pending.lasting and self._last_tick - pending.last > FORGET_S:
                del self._pending[key]

    def _shut_down(self) -> None:
        """Answer all pending requests with `ServiceUnavailableError` and close the ZMQ server."""
        self._stopping.set()
        error: DataPlaneError = self._unavailable()
        for key in list(self._pending):
            pending = self._pending.pop(key)
            answer = rejection_of(pending.item, error)
            assert answer is not None  # requests with a key have one
            self._answer(key, pending.item, pending.replies.values(), answer, pending.began)
        self._zmq.close()  # after the answers, which it still sends
        self.ended.set()


def _name_of(item: c.Input) -> str:
    return type(item.command if isinstance(item, c.Call) else item).__name__
