"""The calls of one session, as both drivers keep them: numbers, frames, deadlines, and why no more can be made.

Knows no socket: the sync and the async channel send the frames and bring back the replies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from dataplane.client.rpc.call_numbers import CallNumbers
from dataplane.client.rpc.handshake import OpenedSession
from dataplane.config import DataPlaneConfig
from dataplane.errors import (
    CallTimeoutError,
    ClientClosedError,
    DataPlaneError,
    InternalError,
    RequestTooLargeError,
    ServiceUnavailableError,
    SessionExpiredError,
    StaleCallError,
    StateDirError,
    from_wire,
    to_wire,
)
from dataplane.ledger import commands as c
from dataplane.protocol import codec, zmq_frames

RESEND_S = 2.0
"""Silence after which a call is repeated under its number."""
RESEND_GROWTH = 1.5
RESEND_MAX_S = 10.0
_EXPIRED = SessionExpiredError.__name__
_NOT_DONE = frozenset({StateDirError.__name__})
"""Errors with which a posted call was not executed, and is to be sent again."""
_UNHEARD = _NOT_DONE | {ServiceUnavailableError.__name__, InternalError.__name__}
"""Errors after which the ledger may not have seen the call, nor what it named."""


@dataclass(slots=True)
class OutgoingCalls:
    """A call on its way: what to send now, when to send again, when to give up (`time.monotonic`)."""

    number: int
    method: str
    frames: list[bytes]
    since: float
    deadline: float
    resend_at: float
    resend_s: float = RESEND_S
    doubted: bool = field(default=False, init=False)

    @property
    def wake_at(self) -> float:
        """When its driver must look at it again, answer or not."""
        return min(self.deadline, self.resend_at)


class Calls:
    """Thread-safe. Every method returns at once. `session` is as it was found last.

    doubt: called (from any thread, must return at once) when an answer tells that the service or the session ended:
    find out. Until then no such answer counts: the service may live again with all it had.
    """

    def __init__(self, session: OpenedSession, config: DataPlaneConfig) -> None:
        self.session = session
        self.doubt: Callable[[], None] = lambda: None
        self._reconnect_s = config.reconnect_s
        self._timeout_s = config.call_timeout_s
        self._numbering = CallNumbers(session.number)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._over: DataPlaneError | None = None
        self._lost = ""
        self._lost_at = 0.0

    # --- whether calls can be made

    def check(self) -> None:
        """Raises what makes calls impossible: a fork, the end of the client or of the session, a lost service whose
        return is not waited for."""
        self.check_open()
        why = self._lost
        if why and not self._patient():
            if self.session.durable:
                why += f"; it has not come back within {self._reconnect_s:g} s"
            raise ServiceUnavailableError(address=self.session.address, why=why)

    def check_open(self) -> None:
        """Raises what makes calls impossible for ever."""
        if self._pid != os.getpid():
            raise ClientClosedError(why="it belongs to the parent of this forked process; open one here")
        if self._over is not None:
            # A fresh one each time: raised objects gather tracebacks.
            raise from_wire(*to_wire(self._over))

    @property
    def over(self) -> bool:
        """Whether the session can make no more calls, ever."""
        return self._over is not None or self._pid != os.getpid()

    @property
    def pointless(self) -> bool:
        """Whether nothing sent now would be answered."""
        return self.over or bool(self._lost)

    @property
    def waiting(self) -> bool:
        """Whether the service is lost and calls wait for its return."""
        return bool(self._lost) and self._patient()

    def _patient(self) -> bool:
        return self.session.durable and time.monotonic() - self._lost_at < self._reconnect_s

    def end(self, error: DataPlaneError) -> None:
        """No more calls: `check` raises this from now on."""
        if self._over is None or isinstance(error, ClientClosedError):
            self._over = error

    def lose(self, why: str) -> None:
        """The service does not answer: `check` raises `ServiceUnavailableError` until it does, at once, or from
        `reconnect_s` on where the service keeps its state."""
        if not self._lost:
            self._lost_at = time.monotonic()
        self._lost = why

    def adopt(self, session: OpenedSession) -> None:
        """The session was found again, maybe elsewhere and in another epoch of the service."""
        self.session = session
        self._lost = ""

    # --- calls

    def begin(self, command: c.Command, timeout_s: float | None = None) -> OutgoingCalls:
        """A call to send. Its deadline: a command that can wait gets its own timeout and then the time of any other,
        so that the ledger's answer comes first; `timeout_s` replaces the latter."""
        now = time.monotonic()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if isinstance(command, c.Allocate | c.Shrink | c.FindCells) or (
            isinstance(command, c.Claim) and command.blocking
        ):
            limit_s += command.timeout_s
        with self._lock:
            call = self._numbering.issue(command, now=now)
        return self._outgoing(call, now, now + limit_s)

    def begin_post(self, command: c.Command) -> OutgoingCalls:
        """A call to send and not to wait for; `due` brings it back until it is answered."""
        now = time.monotonic()
        with self._lock:
            call = self._numbering.issue(command, now=now, posted=True)
        return self._outgoing(call, now, now + self._timeout_s)

    def again(self, outgoing: OutgoingCalls) -> list[bytes]:
        """The frames of a call that got no answer yet, to send once more. Raises `CallTimeoutError` at its deadline
        and what `check` raises."""
        now = time.monotonic()
        if now >= outgoing.deadline:
            raise CallTimeoutError(
                what=outgoing.method, waited_s=now - outgoing.since, peer=f"the controller at {self.session.address}"
            )
        self.check()
        outgoing.resend_s = min(outgoing.resend_s * RESEND_GROWTH, RESEND_MAX_S)
        outgoing.resend_at = now + outgoing.resend_s
        with self._lock:
            if not self._numbering.is_open(outgoing.number):
                return outgoing.frames
            call = self._numbering.repeat(outgoing.number, now=now)
        return zmq_frames.request(call)

    def answers(self, outgoing: OutgoingCalls, reply: zmq_frames.Reply) -> bool:
        """Whether this reply is the call's answer, or else the call goes on waiting for one."""
        if self._goes(reply):
            return False
        if reply.outcome == _EXPIRED and not outgoing.doubted:
            outgoing.doubted = True
            self.doubt()
            return False
        return True

    def heard(self, reply: zmq_frames.Reply) -> None:
        """A reply came that nobody waits for."""
        if self._goes(reply):
            return
        self._lost = ""
        if reply.outcome == _EXPIRED:
            self.doubt()
        elif reply.outcome not in _NOT_DONE:
            self._answered(reply)

    def settle(self, outgoing: OutgoingCalls, reply: zmq_frames.Reply) -> c.Result:
        """What the call got. Raises the error it got."""
        self._lost = ""
        error = reply.error
        if isinstance(error, SessionExpiredError):
            self.end(error)
        if error is not None:
            # An answer too large to be sent or to be kept for a repetition is no refusal: what it gave must be undone,
            # so the call stays open.
            if not isinstance(error, RequestTooLargeError | StaleCallError):
                self._answered(reply)
            raise error
        result = codec.decode_result(outgoing.method, reply.body)
        self._answered(reply)
        return result

    def _goes(self, reply: zmq_frames.Reply) -> bool:
        """Whether the reply says no more than that a service that will live again ends."""
        if reply.outcome != ServiceUnavailableError.__name__ or not self.session.durable:
            return False
        self.lose(str(getattr(reply.error, "why", reply.error)))
        self.doubt()
        return True

    def _answered(self, reply: zmq_frames.Reply) -> None:
        if reply.number:
            with self._lock:
                self._numbering.answered(reply.number, heard=reply.outcome not in _UNHEARD)

    def abandon(self, number: int) -> OutgoingCalls | None:
        """Nobody will use that call's answer. What to send to undo it, if anything; not waited for."""
        now = time.monotonic()
        with self._lock:
            undo = self._numbering.abandon(number, now=now)
        return None if undo is None else self._outgoing(undo, now, now + self._timeout_s)

    def due(self, *, all_of_them: bool = False) -> list[OutgoingCalls]:
        """All posted calls that have been unanswered for long, or at all, to send again."""
        now = time.monotonic()
        with self._lock:
            numbers = self._numbering.due(now + 1.0 if all_of_them else now - RESEND_S)
            calls = [self._numbering.repeat(number, now=now) for number in numbers]
        return [self._outgoing(call, now, now + self._timeout_s) for call in calls]

    def _outgoing(self, call: c.Call, now: float, deadline: float) -> OutgoingCalls:
        try:
            frames = zmq_frames.request(call)
        except BaseException:
            with self._lock:
                self._numbering.answered(call.number, heard=False)
            raise
        name = type(call.command).__name__
        return OutgoingCalls(call.number, name, frames, now, deadline, now + RESEND_S)


class OpenChannel:
    """What both channels tell of their session, as it was found last. `leftovers` is asked with every heartbeat for
    commands to post; `shown` are the settings, with the token that storage units want; `learned` is called, in any
    thread, with the storage units whenever the session is found again."""

    def __init__(self, session: OpenedSession, config: DataPlaneConfig) -> None:
        self._calls = Calls(session, config)
        self.shown = replace(config, token=session.keys.secret or None, token_file=None)
        self.leftovers: Callable[[], Iterable[c.Command]] = list
        self.learned: Callable[[Iterable[c.UnitInfo]], None] = lambda units: None

    @property
    def session(self) -> int:
        """The session's number."""
        return self._calls.session.number

    @property
    def epoch(self) -> int:
        """The service's epoch."""
        return self._calls.session.epoch

    @property
    def durable(self) -> bool:
        """Whether the service keeps its state over a restart."""
        return self._calls.session.durable

    @property
    def put_timeout_s(self) -> float:
        """How long puts wait for space unless the client says."""
        return self._calls.session.put_timeout_s

    @property
    def units(self) -> tuple[c.UnitInfo, ...]:
        """The storage units there were when the session was found; a `Units` call tells of later ones."""
        return self._calls.session.units

    @property
    def address(self) -> str:
        """Where the service is, "host:port"."""
        return self._calls.session.address

    @property
    def endpoint(self) -> str:
        """The ZMQ endpoint that commands go to."""
        return self._calls.session.endpoint
