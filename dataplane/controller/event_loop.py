"""The ledger's shell: the one thread that owns the ledger and the ZMQ server, and hands outputs to whom they are
for."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from dataplane.controller.requests import Facts, Key, Reply, key_of, refused
from dataplane.controller.zmq_server import ZmqServer
from dataplane.core.failpoints import hit
from dataplane.core.wakeup import Waker, poll_ms
from dataplane.errors import DataPlaneError, InternalError, ServiceUnavailableError, StateDirError
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)

TICK_S = 0.005
"""The ledger's clock is at most this old when it handles something."""
FORGET_S = 300.0
"""A caller of the ZMQ server repeats its unanswered calls far more often than this; older ones have nobody waiting."""
TOGETHER = 64
"""How many messages of the server may share one wait for the disk."""
_BEFORE = {"open": "controller.before_opened", "add": "controller.before_added"}
COMPLAIN_S = 10.0
"""How often the log says that the journal cannot be written."""

Orders = Callable[[c.Output], None]


class LedgerLike(Protocol):
    """What the shell needs of a ledger."""

    def apply(self, item: c.Input) -> list[c.Output]: ...
    def next_deadline(self) -> float | None: ...

    @property
    def live_bytes(self) -> int: ...


class LoopObserver(Protocol):
    """Who is told of what the shell does, in the ledger's thread. Nothing of it raises."""

    clock: Callable[[], float]
    busy_s: float

    def answered(self, item: c.Input, output: c.Output, began: float) -> None: ...
    def synced(self, took_s: float) -> None: ...


@dataclass(slots=True)
class _Asked:
    """Who waits for one answer: replies by caller, so that a caller who repeats itself is answered once."""

    item: c.Input
    replies: dict[object, Reply] = field(default_factory=dict)
    orders: Orders | None = None
    last: float = 0.0
    lasting: bool = False
    began: float = 0.0


class LedgerThread:
    """Runs `ledger` in a thread of its own: inputs come from the ZMQ server and from `submit` (any thread).

    Every wake handles what `submit` brought and one message of the server, each in order of arrival, after a `Tick` if
    the last is older than `TICK_S`; outputs leave in the ledger's order. An exception in the ledger is logged with its
    input and answered with `InternalError`; an input that its journal cannot take is refused and changes nothing.

    With `sync`, outputs leave once it has returned, for all that one wake brought, up to `TOGETHER` messages of the
    server. When it fails, nobody learns what came of his call, and the shell ends. `ended` is set when it has.
    `watch` is told of every answer once it has left, and how long the thread was busy.
    """

    def __init__(
        self,
        ledger: LedgerLike,
        zmq_server: ZmqServer,
        facts: Facts,
        *,
        clock: Callable[[], float] = time.monotonic,
        sync: Callable[[], None] | None = None,
        watch: LoopObserver | None = None,
    ) -> None:
        self._ledger = ledger
        self._watch = watch
        self._sync = sync
        self._outgoing: list[c.Output] = []
        self._zmq = zmq_server
        self._facts = facts
        self._clock = clock
        self._ticked = -math.inf
        self._stood_s = 0.0
        self._complained = -math.inf
        self._swept = clock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._asked: dict[Key, _Asked] = {}
        self._units: dict[int, Orders] = {}
        self._stopping = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tq-ledger", daemon=True)

    # --- any thread

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, item: c.Input, reply: Reply | None = None, *, orders: Orders | None = None) -> None:
        """Have `item` applied. `reply` gets the output that answers it; `orders`, with an `AddUnit`, gets what the
        ledger orders of the unit once it is accepted. Both are called in the ledger's thread. Does not block.
        """
        self._enqueue(lambda: self.handle(item, reply, caller=reply, orders=orders, lasting=True))

    def withdraw(self, item: c.Input, reply: Reply) -> None:
        """Nobody waits for `reply` any more. The item itself stands."""
        self._enqueue(lambda: self._forget(item, reply))

    def run(self, job: Callable[[], None]) -> None:
        """Have `job`, which is quick, called in the ledger's thread. Does not block."""
        self._enqueue(job)

    def detach(self, unit: int, orders: Orders) -> None:
        """The link that `orders` led to is gone: the unit is lost, unless it has another link by now."""
        self._enqueue(lambda: self._detach(unit, orders))

    def stop(self, timeout_s: float) -> None:
        """End the thread and its server. Calls still parked are answered with `ServiceUnavailableError`. Idempotent."""
        self._stopping.set()
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.error("the ledger's thread did not end within %.1f s", timeout_s)
                return
        else:
            self._zmq.close()
        self._waker.close()

    def _enqueue(self, job: Callable[[], None]) -> None:
        if self._stopping.is_set():
            raise self._unavailable()
        self._inbox.append(job)
        self._waker.wake()

    def _unavailable(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(address=self._facts.address, why="the service is stopping")

    # --- the ledger's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._waker.fd, self._zmq.socket, self._zmq.monitor):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                deadline = self._ledger.next_deadline()
                ready = dict(poller.poll(self._timeout_ms(deadline)))
                woken = 0.0 if self._watch is None else self._watch.clock()
                self._tick(deadline)
                if self._waker.fd in ready:
                    self._waker.clear()
                    while self._inbox:
                        _guarded("what was submitted", self._inbox.popleft())
                if self._zmq.socket in ready:
                    _guarded("a message of the ZMQ server", self._serve_zmq)
                if self._zmq.monitor in ready:
                    _guarded("the end of a connection", lambda: self._zmq.notice_disconnects(self))
                self._zmq.hang_up()
                self._sweep()
                self._send()
                if self._watch is not None:
                    self._watch.busy_s += self._watch.clock() - woken
        except StateDirError as error:
            log.critical("the service ends, as nobody may be told what it did last: %s", error)
        except Exception:
            log.critical("the service ends: its thread failed", exc_info=True)
        finally:
            self._end()

    def _serve_zmq(self) -> None:
        """One message, or as many as are there to share a wait for the disk."""
        for _ in range(1 if self._sync is None else TOGETHER):
            if not self._zmq.serve(self):
                return

    def _send(self) -> None:
        """Let the outputs leave that wait for the disk."""
        if self._sync is not None and self._outgoing:
            self._force(self._sync)
            outgoing, self._outgoing = self._outgoing, []
            for output in outgoing:
                self._deliver(output)

    def _force(self, sync: Callable[[], None]) -> None:
        if self._watch is None:
            sync()
            return
        began = self._watch.clock()
        sync()
        self._watch.synced(self._watch.clock() - began)

    def _timeout_ms(self, deadline: float | None) -> int | None:
        return self._zmq.pause_ms(None if deadline is None else poll_ms(deadline - self._now()))

    def _now(self) -> float:
        """The ledger's clock."""
        return self._clock() - self._stood_s

    def _tick(self, deadline: float | None) -> None:
        """`deadline`: the ledger's, from before the wait. Time in which this thread could not look does not count: what
        clients said meanwhile, which is still on its way in, would come too late for their leases and sessions."""
        now, ticked = self._now(), self._ticked > -math.inf
        if ticked and deadline is not None and now - max(deadline, self._ticked) > self._facts.heartbeat_s:
            log.warning("the service stood still for %.1f s; to it no time has passed", now - self._ticked)
            self._stood_s += now - self._ticked
            now = self._ticked
        if now - self._ticked >= TICK_S or (deadline is not None and deadline <= now):
            self._ticked = now
            self._apply(c.Tick(now=now))

    def handle(
        self,
        item: c.Input,
        reply: Reply | None,
        *,
        caller: object = None,
        orders: Orders | None = None,
        lasting: bool = False,
    ) -> None:
        """Apply `item` now (the ledger's thread only). `caller` is who `reply` leads to; `lasting`: the caller does not
        repeat itself."""
        key = key_of(item)
        if key is not None and reply is not None:
            asked = self._asked.get(key)
            if asked is None:
                asked = self._asked[key] = _Asked(item, began=0.0 if self._watch is None else self._watch.clock())
            asked.replies[caller] = reply
            asked.last = self._ticked
            asked.lasting = asked.lasting or lasting
            asked.orders = orders or asked.orders
        self._apply(item)

    def _apply(self, item: c.Input) -> None:
        try:
            outputs = self._ledger.apply(item)
        except StateDirError as error:
            self._complain(error)
            answer = refused(item, error)
            outputs = [] if answer is None else [answer]
        except Exception as error:
            log.exception("the ledger failed on %r", item)
            answer = refused(item, InternalError(what=f"{_name(item)}: {error!r}"))
            outputs = [] if answer is None else [answer]
        if self._sync is not None:
            self._outgoing += outputs
            return
        for output in outputs:
            self._deliver(output)

    def _complain(self, error: StateDirError) -> None:
        """Say, now and then, that the service stands still."""
        if self._clock() - self._complained >= COMPLAIN_S:
            self._complained = self._clock()
            log.error("%s; until it can be written, nothing is done", error)

    def _deliver(self, output: c.Output) -> None:
        if isinstance(output, c.Notice):
            log.log(logging.WARNING if output.warning else logging.INFO, "%s", output.text)
            return
        key = key_of(output)
        if key is None:
            assert isinstance(output, c.UnitOrder)
            orders = self._units.get(output.unit)
            if orders is not None:
                hit("controller.before_order")
                _hand_over(orders, output)
            return
        asked = self._asked.pop(key, None)
        if asked is None:
            return
        if isinstance(output, c.UnitAdded) and output.error is None and asked.orders is not None:
            self._units[output.unit] = asked.orders
        hit(_BEFORE.get(key[0], "controller.before_reply"))
        for reply in asked.replies.values():
            _hand_over(reply, output)
        if self._watch is not None:
            self._watch.answered(asked.item, output, asked.began)

    def _detach(self, unit: int, orders: Orders) -> None:
        if self._units.get(unit) == orders:
            del self._units[unit]
            self._apply(c.UnitLost(unit=unit))

    def _forget(self, item: c.Input, reply: Reply) -> None:
        key = key_of(item)
        asked = None if key is None else self._asked.get(key)
        if key is not None and asked is not None:
            asked.replies.pop(reply, None)
            if not asked.replies:
                del self._asked[key]

    def _sweep(self) -> None:
        if self._ticked - self._swept < FORGET_S:
            return
        self._swept = self._ticked
        old = [k for k, asked in self._asked.items() if not asked.lasting and self._ticked - asked.last > FORGET_S]
        for key in old:
            del self._asked[key]

    def _end(self) -> None:
        self._stopping.set()
        error: DataPlaneError = self._unavailable()
        for kind, first, second in list(self._asked):
            asked = self._asked.pop((kind, first, second))
            answer: c.Output
            if kind == "call":
                answer = c.Answer(session=int(first), number=second, result=error)
            elif kind == "open":
                answer = c.Opened(nonce=str(first), error=error)
            elif kind == "add":
                answer = c.UnitAdded(cookie=str(first), error=error)
            else:
                answer = c.UnitDropped(unit=int(first), error=error)
            for reply in asked.replies.values():
                _hand_over(reply, answer)
        self._zmq.close()
        self.ended.set()


def _guarded(what: str, work: Callable[[], None]) -> None:
    """A fault in one thing is that thing's. Only a broken socket is the end: it would be ready again at once."""
    try:
        work()
    except zmq.ZMQError:
        raise
    except Exception:
        log.exception("the service failed on %s, and goes on", what)


def _hand_over(reply: Reply, output: c.Output) -> None:
    try:
        reply(output)
    except Exception:
        log.exception("could not hand over %s", type(output).__name__)


def _name(item: c.Input) -> str:
    return type(item.command if isinstance(item, c.Call) else item).__name__
