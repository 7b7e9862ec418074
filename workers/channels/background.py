"""Requests under way while nobody waits for them: one connection, and one thread that takes in the answers."""

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
from workers.channels.errors import ChannelClosedError, ChannelTimeoutError
from workers.channels.items import Parcel
from workers.channels.wire import NOWHERE
from workers.transport import waiting
from workers.transport.poll_thread import PollThread
from workers.transport.stream import StreamLostError, StreamSilentError

log = logging.getLogger(__name__)

LATER_BYTES = 1 << 30
"""Bytes of puts that may wait here for space at the broker."""

MOST_STALE = 1000
LARGER_THAN_ANY = 1 << 62

Reply = wire.AnyAnswer | ArrivedItems


@dataclass(slots=True, eq=False)
class _Open:
    """A request that was not answered. cancelled: its deadline passed, and the broker was told; unwanted: nobody has
    its handle any more."""

    future: Future[Any]
    what: str
    begun: float
    until: float
    want: int = 0
    cancelled: bool = False
    unwanted: bool = False


@dataclass(slots=True, eq=False)
class _Confirming:
    """Items that were acknowledged, as the broker has to confirm."""

    future: Future[None]
    until: float


@dataclass(slots=True, eq=False)
class _Later:
    """A put that waits for space, or behind one that does. asked: the number under which space was asked for."""

    open: _Open
    request: wire.Put
    parcel: Parcel
    line: tuple[str, bytes]
    asked: int = 0


class PumpEndedError(Exception):
    """It takes no more requests; a new one will, if the broker lives."""


class Pump:
    """Any thread may begin requests; puts of one thread arrive in the order they were begun.

    Futures are completed in the pump's thread: with an answer, with `ArrivedItems`, whose items are to be taken or
    dropped, or with an error; what it calls must not wait for others. lost: makes the error that all of them get should
    the broker die. `PumpEndedError` from `begin` and `begin_put` where the thread has ended.
    """

    def __init__(self, line: Line, channel: str, lost: Callable[[str, BaseException], Exception]) -> None:
        self._line = line
        self._channel = channel
        self._lost = lost
        self._guard = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._looks: list[tuple[float, int]] = []
        self._next_look = float("inf")
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
            "tq-channel", line.stream.poller(), self._turn, self._over, timeout_ms=self._timeout_ms, completes=True
        )
        self._thread.start()

    # --- from any thread

    @property
    def putting(self) -> bool:
        """Whether puts are under way, which later ones must not overtake."""
        return bool(self._puts)

    def begin(self, make: Callable[[int], wire.AnyRequest], what: str, until: float) -> tuple[int, Future[Any]]:
        """Send what `make` makes of a number: that, and the future of its answer. Blocks only while the broker does
        not read, for `GRACE_S` at most."""
        with self._guard:
            self._check()
            number = self._line.number()
            entry = self._enter(number, what, until)
            self._write(lambda: self._send(wire.encode(make(number))))
        return number, entry.future

    def begin_put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> tuple[int, Future[Any]]:
        """Put `parcel`, as it is now; the number of `request` is set here. Its bytes are copied: into the broker's
        memory, or, where there is no space for them yet, into this process's. `MemoryError` where too much waits so."""
        line = (request.channel, request.key)
        with self._guard:
            self._check()
            request.number = self._line.number()
            must_wait = line in self._later
            if must_wait and request.nowait:
                full: Future[Any] = Future()
                full.set_result(wire.Full(request.number))
                return request.number, full
            space = NOWHERE
            if not must_wait and not parcel.carried:
                space = self._line.take_preallocated(parcel.nbytes)
                must_wait = space == NOWHERE
            if must_wait and self._later_bytes + parcel.nbytes > LATER_BYTES:
                raise MemoryError(f"{what}: {self._later_bytes:,} bytes of puts wait for space already; wait for some")
            entry = self._enter(request.number, what, until)
            entry.want = request.want
            self._puts.add(request.number)
            request.item = parcel.item(space)
            if must_wait:
                self._put_later(_Later(entry, request, parcel.kept(self._line.memory), line))
            else:
                self._write(lambda: self._line.put(request, parcel, time.monotonic() + GRACE_S))
        return request.number, entry.future

    def drop(self, number: int) -> None:
        """Nobody wants the answer to a get any more. Only enqueues: also for finalizers."""
        self._unwanted.append(number)
        self._thread.wake()

    def retire(self) -> None:
        """End by itself once nothing is under way."""
        self._retiring = True
        self._thread.wake()

    def close(self) -> None:
        """End now: whatever is under way fails with `ChannelClosedError`. Blocks until the thread has ended."""
        self._thread.close()

    def forget(self) -> None:
        """In a forked child, where there is no such thread: close this copy of its connection."""
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
        self._look(number, min(until, now + waiting.LOG_EVERY_S))
        return entry

    def _look(self, number: int, at: float) -> None:
        heapq.heappush(self._looks, (at, number))
        if at < self._next_look:
            self._thread.wake()

    def _write(self, write: Callable[[], None]) -> None:
        """What goes wrong here is what the thread finds too, and says to all."""
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
        queue = self._later.setdefault(later.line, deque())
        queue.append(later)
        if len(queue) == 1:
            self._write(lambda: self._ask_space(later))

    def _ask_space(self, later: _Later) -> None:
        later.asked = self._line.number()
        self._asked[later.asked] = later
        self._send(wire.encode(wire.Reserve(later.asked, *later.line, later.parcel.nbytes, later.request.nowait)))

    def _space_answered(self, later: _Later, answer: Reply, done: list[Callable[[], None]]) -> None:
        del self._asked[later.asked]
        if isinstance(answer, wire.ItemSpace):
            if later.request.number in self._open:
                later.request.item.space = answer.space
                self._line.put(later.request, later.parcel, time.monotonic() + GRACE_S)
            else:
                self._send(wire.encode(wire.ReleaseSpace(self._line.number(), answer.space)))
        else:
            self._answered(later.request.number, answer, done)
        self._go_on(later)

    def _go_on(self, later: _Later) -> None:
        """The first of its line is sent, or was given up: now the next ones."""
        queue = self._later[later.line]
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
        del self._later[later.line]

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
            while self._looks and not self._awaits(self._looks[0][1]):
                heapq.heappop(self._looks)
            if len(self._looks) > MOST_STALE + 2 * len(self._open):
                self._looks = [look for look in self._looks if self._awaits(look[1])]
                heapq.heapify(self._looks)
            self._next_look = self._looks[0][0] if self._looks else float("inf")
            if self._unwanted or self.ended is not None or self._done():
                return 0
            if not self._looks:
                return None
            return poll_ms(self._next_look - time.monotonic())

    def _awaits(self, number: int) -> bool:
        return number in self._open or number in self._confirming

    def _done(self) -> bool:
        return self._retiring and not (self._open or self._arrived or self._confirming)

    def _take_in(self) -> tuple[BaseException | None, list[Callable[[], None]]]:
        """Take in what has come, and see to what is due. Why to end, or None; and the futures to complete."""
        done: list[Callable[[], None]] = []
        try:
            while (message := self._line.stream.arrived()) is not None:
                answer = self._line.answer(message, time.monotonic() + GRACE_S, self._settle)
                if message.payload_bytes:
                    # However long it took, other answers could not come meanwhile.
                    self._heard = time.monotonic()
                later = self._asked.get(answer.number)
                if later is not None:
                    self._space_answered(later, answer, done)
                else:
                    self._answered(answer.number, answer, done)
            self._drop_unwanted()
            self._look_after(time.monotonic(), done)
        except (StreamLostError, StreamSilentError) as error:
            return error, done
        if self.ended is None and self._done():
            self.ended = self._let_go()
        return self.ended, done

    def _settle(self, request: wire.AckItems | wire.NackItems) -> Future[None] | None:
        """Acknowledge items, or give them back; the future of what has to be confirmed. From any thread. What cannot be
        acknowledged is not ours: it goes to the next getter, and its bytes may have been another's when they were
        read."""
        number = request.number
        confirming: _Confirming | None = None
        with self._guard:
            self._arrived.discard(number)
            if self.ended is None:
                if isinstance(request, wire.AckItems) and request.confirm:
                    confirming = self._confirming[number] = _Confirming(Future(), time.monotonic() + CONFIRM_S)
                    self._look(number, confirming.until)
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

    def _look_after(self, now: float, done: list[Callable[[], None]]) -> None:
        """Of requests whose moment has come: a line in the log, or that time is up."""
        while self._looks and self._looks[0][0] <= now:
            _, number = heapq.heappop(self._looks)
            entry, confirming = self._open.get(number), self._confirming.get(number)
            if confirming is not None:
                self._look_again(number, confirming.until, CONFIRM_S, now, StreamLostError(UNCONFIRMED))
            if entry is None:
                continue
            if now < entry.until:
                waited_s, left_s = now - entry.begun, entry.until - now
                log.warning("%s: waiting since %.0f s, another %.0f s at most", entry.what, waited_s, left_s)
                self._look(number, min(entry.until, now + waiting.LOG_EVERY_S))
            elif entry.cancelled:
                self._look_again(number, now, GRACE_S, now, StreamSilentError())
            elif not self._give_up_later(number, entry, done):
                entry.cancelled = True
                self._send(wire.encode(wire.Cancel(number)))
                self._look(number, now + GRACE_S)

    def _look_again(self, number: int, until: float, silent_s: float, now: float, error: Exception) -> None:
        """The broker's word is due at the moment `until`, or `silent_s` after what came last before it, if that is
        later."""
        until = max(until, self._heard + silent_s)
        if now >= until:
            raise error
        self._look(number, until)

    def _give_up_later(self, number: int, entry: _Open, done: list[Callable[[], None]]) -> bool:
        """Give up a put that was not sent; whether it was such a one."""
        for queue in self._later.values():
            for later in queue:
                if later.request.number == number:
                    if later.asked:
                        self._send(wire.encode(wire.Cancel(later.asked)))
                    self._answered(number, wire.Cancelled(number), done)
                    return True
        return False

    def _let_go(self) -> ChannelClosedError:
        return ChannelClosedError(channel=self._channel, why="this handle let it go")

    def _over(self, defect: BaseException | None) -> None:
        if defect is not None:
            log.error("the thread of channel %r failed", self._channel, exc_info=defect)
        with self._guard:
            self.ended = error = defect or self.ended or self._let_go()
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
