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
TOGETHER = 64
"""Maximum number of ZMQ messages of an iteration."""
_FAILPOINTS = {"open": "controller.before_opened", "add": "controller.before_added"}
INSPECT_S = 10.0
"""Timeout in seconds of `LedgerThread.inspect`."""

Orders = Callable[[c.Output], None]


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

    orders: receives the orders to the storage unit that an AddUnit registers. last: when the request arrived last, by
    the ledger's clock. lasting: the caller does not resend. began: when the request arrived, by the observer's clock.
    """

    item: c.Input
    replies: dict[object, Reply] = field(default_factory=dict)
    orders: Orders | None = None
    last: float = 0.0
    lasting: bool = False
    began: float = 0.0


class LedgerThread:
    """Runs `ledger` in a dedicated thread. Inputs come from the ZMQ server and from `submit` (any thread).

    Each iteration handles all submitted inputs, then up to `TOGETHER` messages of the server, until another input is
    submitted. It first applies a `Tick` if the last one is older than `TICK_S` or a deadline is reached. Outputs are
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
        self._paused_s = 0.0  # by which the ledger's clock is behind `clock`
        self._unwritable = LimitedLog(log)  # of a journal that is not writable
        self._last_sweep = clock()  # the last time that abandoned requests were dropped
        self._inbox: deque[Callable[[], None]] = deque()  # jobs of other threads
        self._waker = Waker()
        self._pending: dict[Key, _PendingRequest] = {}  # requests without an answer
        self._units: dict[int, Orders] = {}  # of the registered storage units, by their id
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

    def submit(self, item: c.Input, reply: Reply | None = None, *, orders: Orders | None = None) -> None:
        """Submit `item` to the ledger. `reply` receives the output that answers it. `orders`, for an `AddUnit`,
        receives the ledger's orders to the unit once it is accepted. Both are called in the ledger thread. Does not
        block.
        """
        self._enqueue(lambda: self.handle(item, reply, caller=reply, orders=orders, lasting=True))

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

    def detach(self, unit: int, orders: Orders) -> None:
        """Report that the stream behind `orders` ended. The unit is lost unless another stream has replaced it."""
        self._enqueue(lambda: self._detach(unit, orders))

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
        poller = zmq.Poller()
        for source in (self._waker.fd, self._zmq.socket, self._zmq.monitor):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                deadline = self._ledger.next_deadline()
                timeout_ms = None if deadline is None else poll_ms(deadline - self._now())
                ready = dict(poller.poll(timeout_ms))
                woken = 0.0 if self._observer is None else self._observer.clock()  # for `busy_s`
                self._advance_clock(deadline)
                if self._waker.fd in ready:
                    self._waker.clear()  # before the inbox is read: a job added meanwhile wakes again
                    while self._inbox:
                        _run_guarded("a submitted input", self._inbox.popleft())
                if self._zmq.socket in ready:
                    _run_guarded("a message of the ZMQ server", self._serve_zmq)
                if self._zmq.monitor in ready:
                    _run_guarded("a closed connection", lambda: self._zmq.notice_disconnects(self))
                self._drop_abandoned()
                if self._observer is not None:
                    self._observer.busy_s += self._observer.clock() - woken
        except Exception:
            log.critical("Service stops: the ledger thread failed", exc_info=True)
        finally:
            self._shut_down()

    def _serve_zmq(self) -> None:
        """Handle pending messages: at most `TOGETHER`, and none after the first while a submitted input waits."""
        for _ in range(TOGETHER):
            if not self._zmq.serve(self) or self._inbox:
                return

    def _now(self) -> float:
        """Return the time of the ledger's clock, which excludes pauses of this process."""
        return self._clock() - self._paused_s

    def _advance_clock(self, deadline: float | None) -> None:
        """Apply a `Tick` if it is due (see the class). `deadline` is the ledger's deadline before the wait.

        Pauses of this thread do not count: messages that clients sent meanwhile are still queued, so their leases and
        sessions would expire first."""
        now = self._now()
        has_ticked = self._last_tick > -math.inf
        # The thread was paused if it is late by more than a heartbeat: for its deadline, or, if that had already passed
        # at the last tick, for a tick now.
        if has_ticked and deadline is not None and now - max(deadline, self._last_tick) > self._facts.heartbeat_s:
            log.warning("Controller was paused for %.1f s; leases and timeouts were extended", now - self._last_tick)
            self._paused_s += now - self._last_tick
            now = self._last_tick  # the clock continues where it stopped
        if now - self._last_tick >= TICK_S or (deadline is not None and deadline <= now):
            self._last_tick = now
            self._apply(c.Tick(now=now))

    def handle(
        self,
        item: c.Input,
        reply: Reply | None,
        *,
        caller: object = None,
        orders: Orders | None = None,
        lasting: bool = False,
        record: bytes | None = None,
    ) -> None:
        """Apply `item` now. Only for the ledger thread. `caller` identifies the recipient of `reply`. `orders`: as in
        `submit`. `lasting`: the caller does not resend the request. `record`: the encoded form of `item`, if it arrived
        so."""
        key = key_of(item)
        # Recorded before the item is applied, because the answer may be among its outputs.
        if key is not None and reply is not None:
            pending = self._pending.get(key)
            if pending is None:
                pending = self._pending[key] = _PendingRequest(
                    item, began=0.0 if self._observer is None else self._observer.clock()
                )
            pending.replies[caller] = reply
            pending.last = self._last_tick
            pending.lasting = pending.lasting or lasting
            pending.orders = orders or pending.orders
        self._apply(item, record)

    def _apply(self, item: c.Input, record: bytes | None = None) -> None:
        """Apply `item` and deliver its outputs. If the ledger raises, the output is the rejection of `item`."""
        try:
            if self._journaled is None or record is None:
                outputs = self._ledger.apply(item)
            else:
                outputs = self._journaled.apply(item, record)
        except StateDirError as error:
            line = f"{error}; requests are rejected until the journal is writable"
            self._unwritable.write(logging.ERROR, line)
            answer = rejection_of(item, error)
            outputs = [] if answer is None else [answer]
        except Exception as error:
            log.exception("Ledger failed on %r", item)
            answer = rejection_of(item, InternalError(what=f"{_name_of(item)}: {error!r}"))
            outputs = [] if answer is None else [answer]
        if len(outputs) == 1:
            self._deliver(outputs[0])
        elif outputs:
            self._deliver_all(outputs)

    def _deliver_all(self, outputs: Iterable[c.Output]) -> None:
        """Deliver several outputs; replies to one caller over ZMQ travel in one message."""
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
            orders = self._units.get(output.unit)
            if orders is not None:
                failpoint("controller.before_order")
                _call_back(orders, output)
            return
        pending = self._pending.pop(key, None)
        if pending is None:  # answered already, or withdrawn
            return
        if isinstance(output, c.UnitAdded) and output.error is None and pending.orders is not None:
            self._units[output.unit] = pending.orders  # replaces those of an earlier stream
        failpoint(_FAILPOINTS.get(key[0], "controller.before_reply"))
        for reply in pending.replies.values():
            _call_back(reply, output)
        if self._observer is not None:
            self._observer.answered(pending.item, output, pending.began)

    def _detach(self, unit: int, orders: Orders) -> None:
        """Report the unit as lost, unless another stream than that of `orders` serves it now."""
        if self._units.get(unit) == orders:
            del self._units[unit]
            self._apply(c.UnitLost(unit=unit))

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
        """Drop, once in `FORGET_S`, the pending requests that their callers have not resent for so long."""
        if self._last_tick - self._last_sweep < FORGET_S:
            return
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
            for reply in pending.replies.values():
                _call_back(reply, answer)
        self._zmq.close()  # after the answers, which it still sends
        self.ended.set()


def _run_guarded(what: str, work: Callable[[], None]) -> None:
    """Run `work` and log its errors, so that one failure does not stop the thread. ZMQ errors are raised, because a
    broken socket would be ready again immediately."""
    try:
        work()
    except zmq.ZMQError:
        raise
    except Exception:
        log.exception("Service failed to handle %s and continues", what)


def _call_back(reply: Reply, output: c.Output) -> None:
    """Call `reply`, or a recipient of a unit's orders, with the output. Logs its errors."""
    try:
        reply(output)
    except Exception:
        log.exception("Could not deliver %s", type(output).__name__)


def _name_of(item: c.Input) -> str:
    return type(item.command if isinstance(item, c.Call) else item).__name__
