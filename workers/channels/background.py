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

from dataplane.core.zmq_io import poll_ms
from workers.channels import wire
from workers.channels.connection import CONFIRM_S, GRACE_S, UNCONFIRMED, ArrivedItems, BrokerConnection
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
"""Timers of completed requests that may stay in the heap."""
LARGER_THAN_ANY = 1 << 62
"""A size in bytes that no item has."""

Reply = wire.AnyAnswer | ArrivedItems

Completions = list[Callable[[], None]]
"""Functions that complete futures, to be called without the pump's lock, because callbacks may call the pump."""


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request without an answer yet. begun, until: start and deadline; preallocate_bytes: see `wire.Put`; cancelled:
    the deadline passed and a Cancel was sent to the broker; unwanted: the caller's handle was garbage-collected."""

    future: Future[Any]
    what: str
    begun: float
    until: float
    preallocate_bytes: int = 0
    cancelled: bool = False
    unwanted: bool = False


@dataclass(slots=True, eq=False)
class _Confirmation:
    """Acknowledged items whose acknowledgement the broker has to confirm."""

    future: Future[None]
    until: float


@dataclass(slots=True, eq=False)
class _DelayedPut:
    """A put whose item waits in this process for space at the broker, or behind another such put of its queue.
    reserve_id: the id of its Reserve request, 0 before that is sent."""

    request: wire.Put
    parcel: Parcel
    queue_key: tuple[str, bytes]
    reserve_id: int = 0


class PumpEndedError(Exception):
    """This pump accepts no more requests. A new pump does if the broker is alive."""


class Pump:
    """Sends the asynchronous requests of one handle to one broker, and receives the answers in its own thread.
    Thread-safe. Puts of one thread arrive in the order in which they began. what: names a request in errors and in the
    log; until: its deadline; request_id: on this connection.

    The pump's thread completes the futures: with an answer, with `ArrivedItems`, whose items the caller takes or
    drops, or with an error. Their callbacks must not block. lost_error: makes the error of all pending futures if the
    broker dies. `begin` and `begin_put` raise `PumpEndedError` if the thread has ended.

    `_open`: the requests without an answer, by id; `_puts`: the ids of those that are puts. `_timers`: a heap
    of (time, request id): when to look at a request or confirmation again; timers of completed
    ones stay in it for a while.
    `_delayed`: the delayed puts of each queue, in order; `_reserving`: those with a Reserve request, by its id;
    `_delayed_bytes`: the bytes of all delayed puts. `_arrived`: the gets whose items were neither acknowledged nor
    returned; `_unwanted`: the gets to cancel, because their handles were garbage-collected; `_confirming`: the gets
    whose acknowledgement is to be confirmed. `_next_timer`: the timer for which the thread wakes by itself;
    `_last_payload_at`: when the last payload was complete; `_retiring`: end once nothing is pending. ended: why the
    pump has ended or is about to, None while it accepts requests.

    `_run_once`, `_timeout_ms`, `_settle` and `_thread_ended` take `_guard`; other private methods that use this state
    are called under it.
    """

    def __init__(
        self, connection: BrokerConnection, channel: str, lost_error: Callable[[str, BaseException], Exception]
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._lost_error = lost_error
        self._guard = threading.Lock()
        self._open: dict[int, _OpenRequest] = {}
        self._timers: list[tuple[float, int]] = []
        self._next_timer = float("inf")
        self._delayed: dict[tuple[str, bytes], deque[_DelayedPut]] = {}
        self._reserving: dict[int, _DelayedPut] = {}
        self._delayed_bytes = 0
        self._puts: set[int] = set()
        self._arrived: set[int] = set()
        self._confirming: dict[int, _Confirmation] = {}
        self._last_payload_at = -math.inf
        self._unwanted: deque[int] = deque()
        self._retiring = False
        self.ended: BaseException | None = None
        self._thread = PollThread(
            "tq-channel",
            connection.stream.poller(),
            self._run_once,
            self._thread_ended,
            timeout_ms=self._timeout_ms,
        )
        self._thread.start()

    # --- called from any thread

    @property
    def putting(self) -> bool:
        """Whether puts are pending, which later puts must not overtake."""
        return bool(self._puts)

    def begin(self, make: Callable[[int], wire.AnyRequest], what: str, until: float) -> tuple[int, Future[Any]]:
        """Assign an id, and send the request that `make` returns for it. Return the id and the future of the
        answer, or of the error if it cannot be sent. Blocks for at most `GRACE_S` while the broker does not read."""
        with self._guard:
            self._check_running()
            request_id = self._connection.next_request_id()
            entry = self._register(request_id, what, until)
            self._try_write(lambda: self._send(wire.encode(make(request_id))))
        return request_id, entry.future

    def begin_put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> tuple[int, Future[Any]]:
        """Put `parcel` as it is now. Set the id of `request`; return it and the future of the answer.

        The bytes are copied into the broker's memory, or, if it has no space for them yet, into this process's memory.
        `MemoryError` if the waiting puts would exceed `LATER_BYTES`. With `nowait` a put behind a delayed one
        gets Full at once.
        """
        queue_key = (request.channel, request.key)
        with self._guard:
            self._check_running()
            request.request_id = self._connection.next_request_id()
            must_wait = queue_key in self._delayed
            # Puts of one queue stay in order: behind a delayed put, this one cannot be stored now.
            if must_wait and request.nowait:
                full: Future[Any] = Future()
                full.set_result(wire.Full(request.request_id))
                return request.request_id, full
            space = NOWHERE  # a carried item, whose bytes are in the message, needs none
            if not must_wait and not parcel.carried:
                space = self._take_preallocated(parcel.nbytes)
                must_wait = space == NOWHERE
            if must_wait and self._delayed_bytes + parcel.nbytes > LATER_BYTES:
                waiting_bytes = self._delayed_bytes
                raise MemoryError(
                    f"{what}: {waiting_bytes:,} bytes of earlier puts already wait for space; wait for some of them "
                    "first"
                )
            entry = self._register(request.request_id, what, until)
            entry.preallocate_bytes = request.preallocate_bytes
            self._puts.add(request.request_id)
            request.item = parcel.item(space)
            if must_wait:
                kept = parcel.with_private_copy(self._connection.buffer_pool)
                self._delay_put(_DelayedPut(request, kept, queue_key))
            else:
                self._try_write(lambda: self._connection.put(request, parcel, time.monotonic() + GRACE_S))
        return request.request_id, entry.future

    def drop(self, request_id: int) -> None:
        """Cancel a get whose handle was garbage-collected. Only enqueues, so a finalizer may call this."""
        self._unwanted.append(request_id)
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
        self._connection.close()
        self._thread.forget()

    def _check_running(self) -> None:
        """Raise `PumpEndedError` if the pump has ended."""
        if self.ended is not None:
            raise PumpEndedError from self.ended

    def _register(self, request_id: int, what: str, until: float) -> _OpenRequest:
        """Add the request to the open requests, with a timer. Return its record."""
        now = time.monotonic()
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # from now on its holder cannot cancel it
        entry = self._open[request_id] = _OpenRequest(future, what, now, until)
        self._set_timer(request_id, min(until, now + waiting.LOG_EVERY_S))
        return entry

    def _set_timer(self, request_id: int, at: float) -> None:
        """Look at the request or confirmation `request_id` again at the time `at`."""
        heapq.heappush(self._timers, (at, request_id))
        if at < self._next_timer:  # the thread would wake too late by itself
            self._thread.wake()

    def _try_write(self, write: Callable[[], None]) -> None:
        """Write to the connection, unless an earlier write failed. Does not raise if the write fails: the pump then
        ends, and its thread sets the error in the futures of all pending requests."""
        if self.ended is not None:
            return
        try:
            write()
        except (StreamLostError, StreamSilentError) as error:
            self.ended = error
            self._thread.wake()

    def _take_preallocated(self, nbytes: int) -> int:
        """`BrokerConnection.take_preallocated`, which may write; `NOWHERE` if that fails."""
        space = NOWHERE

        def take() -> None:
            nonlocal space
            space = self._connection.take_preallocated(nbytes)

        self._try_write(take)
        return space

    def _send(self, data: bytes) -> None:
        self._connection.stream.send([data], time.monotonic() + GRACE_S)

    # --- puts that wait for space

    def _delay_put(self, delayed: _DelayedPut) -> None:
        """Append a put to the delayed puts of its queue. If it is the first of them, request space for it."""
        self._delayed_bytes += delayed.parcel.nbytes
        queue = self._delayed.setdefault(delayed.queue_key, deque())
        queue.append(delayed)
        if len(queue) == 1:
            self._try_write(lambda: self._reserve_space(delayed))

    def _reserve_space(self, delayed: _DelayedPut) -> None:
        """Send a Reserve request for a delayed put."""
        delayed.reserve_id = self._connection.next_request_id()
        self._reserving[delayed.reserve_id] = delayed
        nbytes = delayed.parcel.nbytes
        nowait = delayed.request.nowait
        self._send(wire.encode(wire.Reserve(delayed.reserve_id, *delayed.queue_key, nbytes, nowait)))

    def _handle_space_answer(self, delayed: _DelayedPut, answer: Reply, completions: Completions) -> None:
        """Handle the answer to a Reserve request: send the delayed put into the reserved space, or complete it with
        the answer, such as Full or Closed. Then continue with its queue."""
        del self._reserving[delayed.reserve_id]
        if isinstance(answer, wire.ItemSpace):
            if delayed.request.request_id in self._open:
                delayed.request.item.space = answer.space
                self._connection.put(delayed.request, delayed.parcel, time.monotonic() + GRACE_S)
            else:  # the put was cancelled while the broker reserved the space
                self._send(wire.encode(wire.ReleaseSpace(self._connection.next_request_id(), answer.space)))
        else:
            self._complete(delayed.request.request_id, answer, completions)
        self._continue_queue(delayed)

    def _continue_queue(self, delayed: _DelayedPut) -> None:
        """Remove the first delayed put of a queue, which was sent or has failed. Send the puts behind it, up to the
        first one for which space must be requested."""
        queue = self._delayed[delayed.queue_key]
        self._delayed_bytes -= queue.popleft().parcel.nbytes
        while queue:
            following = queue[0]
            is_open = following.request.request_id in self._open  # otherwise it was cancelled while it waited
            if is_open and not following.parcel.carried:
                self._reserve_space(following)
                return
            if is_open:
                self._connection.put(following.request, following.parcel, time.monotonic() + GRACE_S)
            self._delayed_bytes -= queue.popleft().parcel.nbytes
        del self._delayed[delayed.queue_key]

    # --- the thread

    def _run_once(self, _: object) -> None:
        """Call `_handle_arrived`, then complete the futures of its answers. Stop the thread if the pump has ended."""
        completions: Completions = []
        try:
            with self._guard:
                error = self._handle_arrived(completions)
        finally:  # also after a defect: the requests of these futures are no longer in `_open`
            for complete in completions:
                complete()
        if error is not None:
            self.ended = error
            self._thread.stop()

    def _timeout_ms(self) -> int | None:
        """Return the time until the next timer; 0 if there is work now, None without timers."""
        with self._guard:
            # Completed requests leave their timers in the heap: drop those at its top, and all once they are many.
            while self._timers and not self._is_pending(self._timers[0][1]):
                heapq.heappop(self._timers)
            if len(self._timers) > MOST_STALE + 2 * len(self._open):
                self._timers = [timer for timer in self._timers if self._is_pending(timer[1])]
                heapq.heapify(self._timers)
            self._next_timer = self._timers[0][0] if self._timers else float("inf")
            if self._unwanted or self.ended is not None or self._can_end():
                return 0
            if not self._timers:
                return None
            return poll_ms(self._next_timer - time.monotonic())

    def _is_pending(self, request_id: int) -> bool:
        """Return whether `request_id` is an open request or an acknowledgement to be confirmed."""
        return request_id in self._open or request_id in self._confirming

    def _can_end(self) -> bool:
        """Return whether the pump was retired and nothing is pending."""
        return self._retiring and not (self._open or self._arrived or self._confirming)

    def _handle_arrived(self, completions: Completions) -> BaseException | None:
        """Handle arrived answers, dropped gets and due timers. Append to `completions` functions that complete futures.
        Return the reason to end, None to continue."""
        try:
            while (message := self._connection.stream.arrived()) is not None:
                answer = self._connection.receive_answer(message, time.monotonic() + GRACE_S, self._settle)
                if message.payload_bytes:
                    # No other answer could arrive while this payload was received: see `_check_silence`.
                    self._last_payload_at = time.monotonic()
                delayed = self._reserving.get(answer.request_id)
                if delayed is not None:
                    self._handle_space_answer(delayed, answer, completions)
                else:
                    self._complete(answer.request_id, answer, completions)
            self._drop_unwanted()
            self._check_timers(time.monotonic(), completions)
        except (StreamLostError, StreamSilentError) as error:
            return error
        if self.ended is None and self._can_end():
            self.ended = disconnected(self._channel)
        return self.ended

    def _settle(self, request: wire.AckItems | wire.NackItems) -> Future[None] | None:
        """Send the acknowledgement of items, or return them to the queue; callable from any thread. Return the future
        of the confirmation, None if the broker sends none. Raises if the pump has ended: the next getter receives the
        items, and the bytes that were read may already have belonged to another item."""
        request_id = request.request_id
        confirming: _Confirmation | None = None
        with self._guard:
            self._arrived.discard(request_id)
            if self.ended is None:
                if isinstance(request, wire.AckItems) and request.confirm:
                    confirming = self._confirming[request_id] = _Confirmation(Future(), time.monotonic() + CONFIRM_S)
                    self._set_timer(request_id, confirming.until)
                self._try_write(lambda: self._send(wire.encode(request)))
            ended = self.ended
        if self._retiring:
            # These may have been the last items before the thread's end.
            self._thread.wake()
        if confirming is not None:
            return confirming.future  # has an error if the pump ends first, see `_thread_ended`
        if ended is not None:
            raise self._unacknowledged_error(ended)
        return None

    def _unacknowledged_error(self, ended: BaseException) -> Exception:
        """Return the error for items that cannot be acknowledged because the pump has ended."""
        return self._lost_error(f"taking an item of channel {self._channel!r}", ended)

    def _complete(self, request_id: int, answer: Reply, completions: Completions) -> None:
        """Append to `completions` a function that completes request `request_id` with `answer`. If the request was
        answered before, `answer` confirms the acknowledgement of its items: complete that confirmation."""
        confirmed = self._confirming.pop(request_id, None)
        if confirmed is not None:
            completions.append(lambda: confirmed.future.set_result(None))
            return
        entry = self._open.pop(request_id, None)
        self._puts.discard(request_id)
        if entry is None:  # a delayed put that was cancelled before
            return
        if isinstance(answer, wire.BrokerDone) and answer.space != NOWHERE:
            # The connection keeps one preallocated space: release the previous one.
            self._take_preallocated(LARGER_THAN_ANY)
            self._connection.preallocated = (answer.space, entry.preallocate_bytes)
        if isinstance(answer, ArrivedItems) and entry.unwanted:
            # The broker sent the items before it received the Cancel: return them, as if it had cancelled the get.
            self._try_write(lambda: self._send(wire.encode(wire.NackItems(request_id))))
            answer = wire.Cancelled(request_id)
        if isinstance(answer, wire.Cancelled):
            error = ChannelTimeoutError(what=entry.what, waited_s=time.monotonic() - entry.begun)
            completions.append(lambda: entry.future.set_exception(error))
            return
        if isinstance(answer, ArrivedItems):
            self._arrived.add(request_id)
        completions.append(lambda: entry.future.set_result(answer))

    def _drop_unwanted(self) -> None:
        """Cancel the gets whose handles were garbage-collected. Items that have arrived return to their queue."""
        while self._unwanted:
            request_id = self._unwanted.popleft()
            entry = self._open.get(request_id)
            if entry is not None:
                entry.unwanted = True
                self._send(wire.encode(wire.Cancel(request_id)))
            elif request_id in self._arrived:
                self._arrived.discard(request_id)
                self._send(wire.encode(wire.NackItems(request_id)))

    def _check_timers(self, now: float, completions: Completions) -> None:
        """Handle due timers: log a waiting request, and cancel it at its deadline (a delayed put here, others at the
        broker). Raises if the broker does not confirm an acknowledgement or a cancellation in time."""
        while self._timers and self._timers[0][0] <= now:
            _, request_id = heapq.heappop(self._timers)
            entry = self._open.get(request_id)
            confirming = self._confirming.get(request_id)
            if confirming is not None:
                self._check_silence(
                    request_id, until=confirming.until, silent_s=CONFIRM_S, now=now, error=StreamLostError(UNCONFIRMED)
                )
            if entry is None:  # it was answered
                continue
            if now < entry.until:
                left = waiting.remaining(entry.until - now)
                log.warning("%s: waiting for %.0f s, %s", entry.what, now - entry.begun, left)
                self._set_timer(request_id, min(entry.until, now + waiting.LOG_EVERY_S))
            elif entry.cancelled:  # the broker has not answered the Cancel
                self._check_silence(request_id, until=now, silent_s=GRACE_S, now=now, error=StreamSilentError())
            elif not self._cancel_delayed_put(request_id, completions):
                entry.cancelled = True
                self._send(wire.encode(wire.Cancel(request_id)))
                self._set_timer(request_id, now + GRACE_S)

    def _check_silence(self, request_id: int, until: float, silent_s: float, now: float, error: Exception) -> None:
        """Raise `error` if `until` has passed and no payload, which delays other answers, was received in the last
        `silent_s` seconds before `now`. Otherwise set a timer for the next check."""
        until = max(until, self._last_payload_at + silent_s)
        if now >= until:
            raise error
        self._set_timer(request_id, until)

    def _cancel_delayed_put(self, request_id: int, completions: Completions) -> bool:
        """Cancel put `request_id` if it is a delayed one. Return whether it was. It stays in its queue until
        `_continue_queue` comes to it."""
        for queue in self._delayed.values():
            for delayed in queue:
                if delayed.request.request_id == request_id:
                    if delayed.reserve_id:
                        self._send(wire.encode(wire.Cancel(delayed.reserve_id)))
                    self._complete(request_id, wire.Cancelled(request_id), completions)
                    return True
        return False

    def _thread_ended(self, defect: BaseException | None) -> None:
        """Close the connection and fail all pending requests and confirmations; the thread's last call. defect: the
        exception that ended the thread, None if the pump ended as intended or its broker was lost."""
        if defect is not None:
            log.error("Channel %r: its background thread failed", self._channel, exc_info=defect)
        with self._guard:
            self.ended = error = defect or self.ended or disconnected(self._channel)
            open_requests = list(self._open.values())
            self._open = {}
            confirming = list(self._confirming.values())
            self._confirming = {}
            self._puts.clear()
            self._delayed.clear()
            self._connection.close()
        for unconfirmed in confirming:
            # Unless this process closed the pump, it is unknown whether the broker received the acknowledgement.
            why = error if isinstance(error, ChannelClosedError) else StreamLostError(UNCONFIRMED)
            unconfirmed.future.set_exception(self._unacknowledged_error(why))
        for entry in open_requests:
            entry.future.set_exception(self._lost_error(entry.what, error))
