"""Asynchronous requests to a broker: one connection, and one thread that receives the answers."""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dataplane.core.wakeup import poll_ms
from workers.channels import wire
from workers.channels.connection import CONFIRM_S, GRACE_S, UNCONFIRMED, ArrivedItems, Line
from workers.channels.errors import ChannelClosedError, ChannelTimeoutError, disconnected
from workers.channels.items import Parcel
from workers.channels.wire import NOWHERE
from workers.transport import waiting
from workers.transport.poll_thread import PollThread
from workers.transport.stream import StreamLostError, StreamSilentError

log = logging.getLogger(__name__)

LATER_BYTES = 1 << 30
"""Bytes of puts that may wait in this process for space at the broker."""

MOST_STALE = 1000
LARGER_THAN_ANY = 1 << 62

Reply = wire.AnyAnswer | ArrivedItems


@dataclass(slots=True, eq=False)
class _Open:
    """A request without an answer yet. cancelled: its deadline passed and a Cancel was sent to the broker; unwanted:
    its handle was garbage-collected."""

    future: Future[Any]
    what: str
    begun: float
    until: float
    want: int = 0
    cancelled: bool = False
    unwanted: bool = False


@dataclass(slots=True, eq=False)
class _Confirming:
    """Acknowledged items whose acknowledgement the broker has to confirm."""

    future: Future[None]
    until: float


@dataclass(slots=True, eq=False)
class _Later:
    """A put that waits for space, or behind another put that does. asked: the number of its Reserve request."""

    open: _Open
    request: wire.Put
    parcel: Parcel
    queue_key: tuple[str, bytes]
    asked: int = 0


class PumpEndedError(Exception):
    """This pump accepts no more requests. A new pump does if the broker is alive."""


class Pump:
    """Thread-safe. Puts of one thread arrive in the order in which they began.

    The pump's thread completes the futures: with an answer, with `ArrivedItems`, whose items the caller takes or
    drops, or with an error. Their callbacks must not block. lost: makes the error of all pending futures if the
    broker dies. `begin` and `begin_put` raise `PumpEndedError` if the thread has ended.
    """

    def __init__(self, line: Line, channel: str, lost: Callable[[str, BaseException], Exception]) -> None:
        self._line = line
        self._channel = channel
        self._lost = lost
        self._guard = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._timers: list[tuple[float, int]] = []
        self._next_timer = float("inf")
        self._later: dict[tuple[str, bytes], deque[_Later]] = {}
        self._asked: dict[int, _Later] = {}
        self._later_bytes = 0
        self._puts: set[int] = set()
        self._arrived: set[int] = set()
        self._confirming: dict[int, _Confirming] = {}
        self._heard = -math.inf
        self._unwanted: deque[int] = deque()
        self._retiring = False
        self.ended: BaseException | None = None
        self._thread = PollThread(
            "tq-channel",
            line.stream.poller(),
            self._turn,
            self._thread_ended,
            timeout_ms=self._timeout_ms,
            completes=True,
        )
        self._thread.start()

    # --- called from any thread

    @property
    def putting(self) -> bool:
        """Whether puts are pending, which later puts must not overtake."""
        return bool(self._puts)

    def begin(self, make: Callable[[int], wire.AnyRequest], what: str, until: float) -> tuple[int, Future[Any]]:
        """Send the request that `make` makes of a number. Return that number and the future of the answer. Blocks for
        at most `GRACE_S` while the broker does not read."""
        with self._guard:
            self._check()
            number = self._line.number()
            entry = self._enter(number, what, until)
            self._write(lambda: self._send(wire.encode(make(number))))
        return number, entry.future

    def begin_put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> tuple[int, Future[Any]]:
        """Put `parcel` as it is now. Set the number of `request`; return it and the future of the answer.

        The bytes are copied into the broker's memory, or, if it has no space for them yet, into this process's memory.
        `MemoryError` if the waiting puts would exceed `LATER_BYTES`.
        """
        queue_key = (request.channel, request.key)
        with self._guard:
            self._check()
            request.number = self._line.number()
            must_wait = queue_key in self._later
            # Puts of one queue stay in order: behind a waiting put, this one cannot be stored now.
            if must_wait and request.nowait:
                full: Future[Any] = Future()
                full.set_result(wire.Full(request.number))
                return request.number, full
            space = NOWHERE
            if not must_wait and not parcel.carried:
                space = self._line.take_preallocated(parcel.nbytes)
                must_wait = space == NOWHERE
            if must_wait and self._later_bytes + parcel.nbytes > LATER_BYTES:
                raise MemoryError(f"{what}: {self._later_bytes:,} bytes of puts wait for space; wait for some of them")
            entry = self._enter(request.number, what, until)
            entry.want = request.want
            self._puts.add(request.number)
            request.item = parcel.item(space)
            if must_wait:
                self._put_later(_Later(entry, request, parcel.kept(self._line.memory), queue_key))
            else:
                self._write(lambda: self._line.put(request, parcel, time.monotonic() + GRACE_S))
        return request.number, entry.future

    def drop(self, number: int) -> None:
        """Cancel a get whose handle was garbage-collected. Only enqueues, so a finalizer may call this."""
        self._unwanted.append(number)
        self._thread.wake()

    def retire(self) -> None:
        """End the thread once no request is pending."""
        self._retiring = True
        self._thread.wake()

    def close(self) -> None:
        """End now. Pending requests fail with `ChannelClosedError`. Blocks until the thread has ended, at
        most `poll_thread.JOIN_S`."""
        self._thread.close()

    def forget(self) -> None:
        """Close this copy of the connection in a forked child, which has no copy of the thread."""
        self._line.close()
        self._thread.forget()

    def _check(self) -> None:
        if self.ended is not None:
            raise PumpEndedError from self.ended

    def _enter(self, number: int, what: str, until: float) -> _Open:
        now = time.monotonic()
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        entry = self._open[number] = _Open(future, what, now, until)
        self._set_timer(number, min(until, now + waiting.LOG_EVERY_S))
        return entry

    def _set_timer(self, number: int, at: float) -> None:
        heapq.heappush(self._timers, (at, number))
        if at < self._next_timer:
            self._thread.wake()

    def _write(self, write: Callable[[], None]) -> None:
        """Write to the connection. The thread sees the same error and raises it in all pending calls."""
        try:
            write()
        except (StreamLostError, StreamSilentError) as error:
            self.ended = self.ended or error
            self._thread.wake()

    def _send(self, data: bytes) -> None:
        self._line.stream.send([data], time.monotonic() + GRACE_S)

    # --- puts that wait for space

    def _put_later(self, later: _Later) -> None:
        self._later_bytes += later.parcel.nbytes
        queue = self._later.setdefault(later.queue_key, deque())
        queue.append(later)
        if len(queue) == 1:
            self._write(lambda: self._ask_space(later))

    def _ask_space(self, later: _Later) -> None:
        later.asked = self._line.number()
        self._asked[later.asked] = later
        self._send(wire.encode(wire.Reserve(later.asked, *later.queue_key, later.parcel.nbytes, later.request.nowait)))

    def _space_answered(self, later: _Later, answer: Reply, done: list[Callable[[], None]]) -> None:
        """Send a waiting put into the space that the broker reserved for it, then continue with its queue."""
        del self._asked[later.asked]
        if isinstance(answer, wire.ItemSpace):
            if later.request.number in self._open:
                later.request.item.space = answer.space
                self._line.put(later.request, later.parcel, time.monotonic() + GRACE_S)
            else:
                self._send(wire.encode(wire.ReleaseSpace(self._line.number(), answer.space)))
        else:
            self._answered(later.request.number, answer, done)
        self._continue_queue(later)

    def _continue_queue(self, later: _Later) -> None:
        """Continue with the next puts of a queue after its first one was sent or cancelled."""
        queue = self._later[later.queue_key]
        self._later_bytes -= queue.popleft().parcel.nbytes
        while queue:
            following = queue[0]
            wanted = following.request.number in self._open
            if wanted and not following.parcel.carried:
                self._ask_space(following)
                return
            if wanted:
                self._line.put(following.request, following.parcel, time.monotonic() + GRACE_S)
            self._later_bytes -= queue.popleft().parcel.nbytes
        del self._later[later.queue_key]

    # --- the thread

    def _turn(self, _: object) -> None:
        with self._guard:
            error, done = self._take_in()
        for complete in done:
            complete()
        if error is not None:
            self.ended = error
            self._thread.stop()

    def _timeout_ms(self) -> int | None:
        with self._guard:
            while self._timers and not self._awaits(self._timers[0][1]):
                heapq.heappop(self._timers)
            if len(self._timers) > MOST_STALE + 2 * len(self._open):
                self._timers = [look for look in self._timers if self._awaits(look[1])]
                heapq.heapify(self._timers)
            self._next_timer = self._timers[0][0] if self._timers else float("inf")
            if self._unwanted or self.ended is not None or self._done():
                return 0
            if not self._timers:
                return None
            return poll_ms(self._next_timer - time.monotonic())

    def _awaits(self, number: int) -> bool:
        return number in self._open or number in self._confirming

    def _done(self) -> bool:
        return self._retiring and not (self._open or self._arrived or self._confirming)

    def _take_in(self) -> tuple[BaseException | None, list[Callable[[], None]]]:
        """Handle arrived answers and due deadlines. Return the reason to end, or None, and the futures to
        complete."""
        done: list[Callable[[], None]] = []
        try:
            while (message := self._line.stream.arrived()) is not None:
                answer = self._line.answer(message, time.monotonic() + GRACE_S, self._settle)
                if message.payload_bytes:
                    # No other answer could arrive while this payload was received.
                    self._heard = time.monotonic()
                later = self._asked.get(answer.number)
                if later is not None:
                    self._space_answered(later, answer, done)
                else:
                    self._answered(answer.number, answer, done)
            self._drop_unwanted()
            self._check_timers(time.monotonic(), done)
        except (StreamLostError, StreamSilentError) as error:
            return error, done
        if self.ended is None and self._done():
            self.ended = disconnected(self._channel)
        return self.ended, done

    def _settle(self, request: wire.AckItems | wire.NackItems) -> Future[None] | None:
        """Acknowledge items or give them back; callable from any thread. Return the future of the confirmation, None
        if the broker sends none. Raises if the items cannot be acknowledged: the next getter receives them, and the
        bytes that were read may already have belonged to another item."""
        number = request.number
        confirming: _Confirming | None = None
        with self._guard:
            self._arrived.discard(number)
            if self.ended is None:
                if isinstance(request, wire.AckItems) and request.confirm:
                    confirming = self._confirming[number] = _Confirming(Future(), time.monotonic() + CONFIRM_S)
                    self._set_timer(number, confirming.until)
                self._write(lambda: self._send(wire.encode(request)))
            ended = self.ended
        if self._retiring:
            self._thread.wake()
        if confirming is not None:
            return confirming.future
        if ended is not None:
            raise self._unsettled(ended)
        return None

    def _unsettled(self, ended: BaseException) -> Exception:
        return self._lost(f"taking an item of channel {self._channel!r}", ended)

    def _answered(self, number: int, answer: Reply, done: list[Callable[[], None]]) -> None:
        """Complete the future of a request, or of a confirmation, with its answer."""
        confirmed = self._confirming.pop(number, None)
        if confirmed is not None:
            done.append(lambda: confirmed.future.set_result(None))
            return
        entry = self._open.pop(number, None)
        self._puts.discard(number)
        if entry is None:
            return
        if isinstance(answer, wire.BrokerDone) and answer.space != NOWHERE:
            self._line.take_preallocated(LARGER_THAN_ANY)
            self._line.ahead = (answer.space, entry.want)
        if isinstance(answer, ArrivedItems) and entry.unwanted:
            self._send(wire.encode(wire.NackItems(number)))
            answer = wire.Cancelled(number)
        if isinstance(answer, wire.Cancelled):
            error = ChannelTimeoutError(what=entry.what, waited_s=time.monotonic() - entry.begun)
            done.append(lambda: entry.future.set_exception(error))
            return
        if isinstance(answer, ArrivedItems):
            self._arrived.add(number)
        done.append(lambda: entry.future.set_result(answer))

    def _drop_unwanted(self) -> None:
        while self._unwanted:
            number = self._unwanted.popleft()
            entry = self._open.get(number)
            if entry is not None:
                entry.unwanted = True
                self._send(wire.encode(wire.Cancel(number)))
            elif number in self._arrived:
                self._arrived.discard(number)
                self._send(wire.encode(wire.NackItems(number)))

    def _check_timers(self, now: float, done: list[Callable[[], None]]) -> None:
        """Log or cancel each request whose time to look has come."""
        while self._timers and self._timers[0][0] <= now:
            _, number = heapq.heappop(self._timers)
            entry, confirming = self._open.get(number), self._confirming.get(number)
            if confirming is not None:
                self._check_silence(number, confirming.until, CONFIRM_S, now, StreamLostError(UNCONFIRMED))
            if entry is None:
                continue
            if now < entry.until:
                waited_s, left_s = now - entry.begun, entry.until - now
                log.warning("%s: waiting for %.0f s, at most %.0f s more", entry.what, waited_s, left_s)
                self._set_timer(number, min(entry.until, now + waiting.LOG_EVERY_S))
            elif entry.cancelled:
                self._check_silence(number, now, GRACE_S, now, StreamSilentError())
            elif not self._give_up_later(number, entry, done):
                entry.cancelled = True
                self._send(wire.encode(wire.Cancel(number)))
                self._set_timer(number, now + GRACE_S)

    def _check_silence(self, number: int, until: float, silent_s: float, now: float, error: Exception) -> None:
        """Raise `error` once `until` has passed and no payload arrived for `silent_s`; otherwise look again then."""
        until = max(until, self._heard + silent_s)
        if now >= until:
            raise error
        self._set_timer(number, until)

    def _give_up_later(self, number: int, entry: _Open, done: list[Callable[[], None]]) -> bool:
        """Cancel a put that waits in this process. Return whether `number` was such a put."""
        for queue in self._later.values():
            for later in queue:
                if later.request.number == number:
                    if later.asked:
                        self._send(wire.encode(wire.Cancel(later.asked)))
                    self._answered(number, wire.Cancelled(number), done)
                    return True
        return False

    def _thread_ended(self, defect: BaseException | None) -> None:
        """Fail all pending requests after the thread has ended."""
        if defect is not None:
            log.error("Channel %r: its background thread failed", self._channel, exc_info=defect)
        with self._guard:
            self.ended = error = defect or self.ended or disconnected(self._channel)
            left, self._open = list(self._open.values()), {}
            confirming, self._confirming = list(self._confirming.values()), {}
            self._puts.clear()
            self._later.clear()
            self._line.close()
        for unconfirmed in confirming:
            why = error if isinstance(error, ChannelClosedError) else StreamLostError(UNCONFIRMED)
            unconfirmed.future.set_exception(self._unsettled(why))
        for entry in left:
            entry.future.set_exception(self._lost(entry.what, error))
