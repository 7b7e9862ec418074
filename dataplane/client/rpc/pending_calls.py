"""The calls of one session, shared by both channels: ids, frames, deadlines, and the reason why calls fail.

This module uses no sockets: the sync and the async channel send the frames and pass in the replies.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dataplane.client.rpc.call_ids import CallIds
from dataplane.client.rpc.handshake import OpenedSession
from dataplane.config import DataPlaneConfig
from dataplane.core.failpoints import armed, failpoint
from dataplane.errors import (
    CallTimeoutError,
    ClientClosedError,
    DataPlaneError,
    InternalError,
    InvalidRequestError,
    RequestTooLargeError,
    ServiceUnavailableError,
    SessionExpiredError,
    SessionInterruptedError,
    StaleCallError,
    StateDirError,
    from_wire,
    to_wire,
)
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames

log = logging.getLogger(__name__)

RESEND_S = 2.0
"""Time without a response after which a call is resent under its id."""
RESEND_GROWTH = 1.5
RESEND_MAX_S = 10.0
_EXPIRED = SessionExpiredError.__name__
_NOT_EXECUTED = frozenset({StateDirError.__name__})
"""Errors that mean that a posted call was not executed and must be resent (names as in `Reply.outcome`)."""
_NOT_PROCESSED = _NOT_EXECUTED | {
    ServiceUnavailableError.__name__,
    InternalError.__name__,
    InvalidRequestError.__name__,
}
"""Errors after which the ledger may not have seen the call or its confirmed ids."""
_PATIENT = (c.Allocate, c.FindCells, c.Claim)
"""The commands that can wait at the service."""


@dataclass(slots=True)
class OutgoingCall:
    """A pending call. Times are of `time.monotonic`."""

    call_id: int
    command: type[c.Command]
    frames: list[bytes]
    since: float
    """When it was sent first."""
    deadline: float
    wake_at: float
    """When the channel must check it again, with or without a response: at the time of the next
    resend, or at the deadline."""
    resend_s: float
    """The current interval of resends."""
    doubted: bool = False
    """A reply reported the end of the session, which is being checked or was checked."""


class Calls:
    """The calls of one session, and whether calls are possible: the state that a channel and its heartbeat thread
    share. Thread-safe. No method blocks. `session` is the session as of the last connection. `_pid` is the process that
    opened it; a forked child can make no calls. `_lost_at` is the time at which the service was lost
    (`time.monotonic`). `_lock` protects `_call_ids`.

    on_ended_read: called by `end_read`; it must return at once.
    on_doubt: called when a response reports that the service or the session ended; it must check this and return at
    once. It may run in any thread. Until the check is done, such responses are ignored: the service may restart
    with all of its state.
    """

    def __init__(self, session: OpenedSession, config: DataPlaneConfig) -> None:
        self.session = session
        self.on_doubt: Callable[[], None] = lambda: None
        self.on_ended_read: Callable[[], None] = lambda: None
        self._reconnect_s = config.reconnect_s
        self._timeout_s = config.call_timeout_s
        self._call_ids = CallIds(session.session_id)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.ended: DataPlaneError | None = None
        """Why the session ended; None while it is open."""
        self.lost = ""
        """Why the service is considered lost; empty while it responds."""
        self._lost_at = 0.0

    @property
    def ended_read(self) -> int | None:
        """The last read that has ended and that no call has confirmed since; None if there is
        none."""
        return self._call_ids.ended_read

    # --- whether calls can be made

    def check(self) -> None:
        """Raise the reason why calls are impossible now: a fork, the end of the client or the session, or a lost
        service that calls do not wait for."""
        self.check_open()
        why = self.lost
        if why and not self._within_reconnect():
            if self.session.durable:
                why += f"; it did not return within reconnect_s={self._reconnect_s:g} s"
            raise ServiceUnavailableError(address=self.session.address, why=why)

    def check_open(self) -> None:
        """Raise the reason why calls are permanently impossible."""
        if self._pid != os.getpid():
            raise ClientClosedError(why="it was created before fork(); create one in the child process")
        if self.ended is not None:  # the client was closed, or the session ended
            # A new exception each time: raised exceptions accumulate tracebacks.
            raise from_wire(*to_wire(self.ended))

    @property
    def over(self) -> bool:
        """Whether the session can never make calls again."""
        return self.ended is not None or self._pid != os.getpid()

    @property
    def unreachable(self) -> bool:
        """Whether a message sent now would get no response."""
        return self.over or bool(self.lost)

    @property
    def owes_bye(self) -> bool:
        """Whether the service responds and may still keep the session, which this process has not closed."""
        is_open = self.ended is None or isinstance(self.ended, SessionInterruptedError)
        return is_open and not self.lost and self._pid == os.getpid()

    @property
    def waiting(self) -> bool:
        """Whether the service is lost and calls wait for its restart."""
        return bool(self.lost) and self._within_reconnect()

    def _within_reconnect(self) -> bool:
        """Whether the service is durable and was lost less than `reconnect_s` ago."""
        return self.session.durable and time.monotonic() - self._lost_at < self._reconnect_s

    def end(self, error: DataPlaneError) -> None:
        """End the session: `check` raises this error from now on. After an interrupt, no answer is
        confirmed: one that has arrived may not have reached its caller."""
        if isinstance(error, SessionInterruptedError):
            with self._lock:
                self._call_ids.confirms = False
        # The first reason stays, unless the client itself was closed.
        was_interrupted = isinstance(self.ended, SessionInterruptedError)
        is_closed = isinstance(error, ClientClosedError) and not was_interrupted
        if self.ended is None or is_closed:
            self.ended = error

    def record_loss(self, why: str) -> None:
        """Record that the service does not respond. Until it does, `check` raises `ServiceUnavailableError`:
        immediately, or for a durable service after `reconnect_s`."""
        if not self.lost:
            self._lost_at = time.monotonic()
        self.lost = why

    def resume(self, session: OpenedSession) -> None:
        """Continue with the reconnected session, possibly at another endpoint and in another epoch of the service."""
        self.session = session
        self.lost = ""

    # --- calls

    def begin(self, command: c.Command, timeout_s: float | None = None) -> OutgoingCall:
        """Return the call that sends a command.

        The deadline of a command that can wait at the service is its own timeout plus that of
        ordinary commands (`timeout_s`, default: `config.call_timeout_s`), so that the service's
        response arrives first."""
        now = time.monotonic()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        at_once = isinstance(command, c.Claim) and not command.blocking
        if isinstance(command, _PATIENT) and not at_once:
            limit_s += command.timeout_s
        with self._lock:
            call = self._call_ids.issue(command, now=now)
        return self._outgoing(call, now, now + limit_s)

    def begin_post(self, command: c.Command) -> OutgoingCall:
        """Return a call to send without waiting for it; `due` returns it again until it is answered."""
        now = time.monotonic()
        with self._lock:
            call = self._call_ids.issue(command, now=now, posted=True)
        return self._outgoing(call, now, now + self._timeout_s)

    def prepare_resend(self, outgoing: OutgoingCall) -> list[bytes]:
        """Return the frames for resending an unanswered call, and set the time of the resend after that. Raise
        `CallTimeoutError` after its deadline, and the errors of `check`."""
        now = time.monotonic()
        if now >= outgoing.deadline:
            raise CallTimeoutError(
                what=f"call {outgoing.command.__name__}",
                waited_s=now - outgoing.since,
                peer=f"the controller at {self.session.address}",
            )
        self.check()
        outgoing.resend_s = min(outgoing.resend_s * RESEND_GROWTH, RESEND_MAX_S)
        outgoing.wake_at = min(now + outgoing.resend_s, outgoing.deadline)
        with self._lock:
            if not self._call_ids.is_open(outgoing.call_id):
                return outgoing.frames  # settled already: `_call_ids` has forgotten its command
            call = self._call_ids.repeat(outgoing.call_id, now=now)
        return zmq_frames.request(call)

    def ends_call(self, outgoing: OutgoingCall, reply: zmq_frames.Reply) -> bool:
        """Return whether this reply ends the call. Otherwise the call continues to wait: the reply only reported that
        a durable service shuts down, or it was the first one to report the end of the session, which `on_doubt`
        checks first."""
        if self._is_shutdown_notice(reply):
            return False
        if reply.outcome == _EXPIRED and not outgoing.doubted:
            outgoing.doubted = True
            self.on_doubt()
            return False
        return True

    def process_reply(self, reply: zmq_frames.Reply) -> None:
        """Process a reply that no caller waits for: to a posted, abandoned or resent call, or to a heartbeat."""
        if self._is_shutdown_notice(reply):
            return
        self.lost = ""  # the service responds
        if reply.outcome == _EXPIRED:
            self.on_doubt()
        elif reply.outcome not in _NOT_EXECUTED:  # otherwise the call stays open, and is resent
            self._record_answer(reply)

    def settle(self, outgoing: OutgoingCall, reply: zmq_frames.Reply) -> c.Result:
        """Return the result of the call, or raise its error; after an interrupt, always raise.
        Record that the call is answered."""
        if isinstance(self.ended, SessionInterruptedError):
            self.check_open()
        self.lost = ""  # the service responds
        error = None if reply.outcome == zmq_frames.OK else reply.error
        if error is not None:
            if isinstance(error, SessionExpiredError):
                self.end(error)
            # After these two errors the command may have been executed: its reply was too large to send, or was not
            # kept. The call stays open, so that `abandon` can undo it. Every other error settles the call.
            if not isinstance(error, RequestTooLargeError | StaleCallError):
                self._record_answer(reply)
            raise error
        result: c.Result = messages.decode_result(outgoing.command, reply.body)
        with self._lock:
            self._call_ids.record_answer(outgoing.call_id)
        return result

    def end_read(self, call_id: int) -> None:
        """Record that the rows of a brief read (see `Locate`) are not read any longer. The next call confirms it,
        which ends its pins; `on_ended_read` sees to it that there is one soon."""
        with self._lock:
            self._call_ids.settle(call_id)
        self.on_ended_read()

    def _is_shutdown_notice(self, reply: zmq_frames.Reply) -> bool:
        """Return whether the reply only reports that a durable service is shutting down. If so, record the loss of the
        service and have it checked."""
        if reply.outcome != ServiceUnavailableError.__name__ or not self.session.durable:
            return False
        self.record_loss(str(getattr(reply.error, "why", reply.error)))
        self.on_doubt()
        return True

    def _record_answer(self, reply: zmq_frames.Reply) -> None:
        if reply.call_id:  # 0: the reply to a heartbeat, or to a message that the service could not parse
            with self._lock:
                self._call_ids.record_answer(reply.call_id, processed=reply.outcome not in _NOT_PROCESSED)

    def abandon(self, call_id: int) -> OutgoingCall | None:
        """Abandon a call. Return the posted call that undoes it, or None."""
        now = time.monotonic()
        with self._lock:
            undo = self._call_ids.abandon(call_id, now=now)
        if self.ended_read is not None:
            self.on_ended_read()
        return None if undo is None else self._outgoing(undo, now, now + self._timeout_s)

    def due(self, *, all_of_them: bool = False) -> list[OutgoingCall]:
        """Return the posted calls to resend: those unanswered for `RESEND_S`, or all of them."""
        now = time.monotonic()
        with self._lock:
            # A time in the future includes every posted call.
            call_ids = self._call_ids.due(now + 1.0 if all_of_them else now - RESEND_S)
            calls = [self._call_ids.repeat(call_id, now=now) for call_id in call_ids]
        return [self._outgoing(call, now, now + self._timeout_s) for call in calls]

    def _outgoing(self, call: c.Call, now: float, deadline: float) -> OutgoingCall:
        """Encode a call. If that fails, settle its id and raise the error."""
        try:
            frames = zmq_frames.request(call)
        except BaseException:
            with self._lock:
                self._call_ids.settle(call.call_id)
            raise
        kind = type(call.command)
        wake_at = min(now + RESEND_S, deadline)
        return OutgoingCall(call.call_id, kind, frames, now, deadline, wake_at, RESEND_S)


class OpenChannel:
    """Common parts of both channels. The properties are as of the last connection. `leftovers`
    returns commands to post with every heartbeat and before the session closes. `unit_config` are
    the settings, with the token that storage units require. `on_units` is called, in any thread,
    with the storage units after every reconnection."""

    def __init__(self, session: OpenedSession, config: DataPlaneConfig) -> None:
        self._calls = Calls(session, config)
        self.unit_config = replace(config, token=session.token, token_file=None)
        self.leftovers: Callable[[], Iterable[c.Command]] = list  # none, until the connection sets it
        self.on_units: Callable[[Iterable[c.UnitInfo]], None] = lambda units: None

    @property
    def session(self) -> int:
        """The session's id."""
        return self._calls.session.session_id

    @property
    def epoch(self) -> int:
        """The service's epoch."""
        return self._calls.session.epoch

    @property
    def durable(self) -> bool:
        """Whether the service keeps its state across a restart."""
        return self._calls.session.durable

    @property
    def put_timeout_s(self) -> float:
        """How long puts wait for space unless the client sets its own timeout."""
        return self._calls.session.put_timeout_s

    @property
    def units(self) -> tuple[c.UnitInfo, ...]:
        """The storage units as of the last connection; a `Units` call returns later ones."""
        return self._calls.session.units

    @property
    def address(self) -> str:
        """Address of the service, "host:port"."""
        return self._calls.session.address

    @property
    def endpoint(self) -> str:
        """The ZMQ endpoint for commands."""
        return self._calls.session.endpoint

    def post(self, command: c.Command) -> None:
        """Send a command without waiting for its response. It is resent until it is answered, even after a period
        without a reachable service. Does not block."""
        self._calls.check_open()
        if armed:
            failpoint(f"call.{type(command).__name__}.before")
        self._send_once(self._calls.begin_post(command))
        if armed:
            failpoint(f"call.{type(command).__name__}.after")

    def _post_leftovers(self) -> None:
        """Post the commands of `leftovers`. While the service is unreachable, they are not taken; a
        later heartbeat posts them."""
        if not self._calls.unreachable:
            for command in self.leftovers():
                self.post(command)

    def end_read(self, call_id: int) -> None:
        """See `Calls.end_read`."""
        self._calls.end_read(call_id)

    def _confirm_reads(self) -> None:
        """Make a call if reads have ended that none has confirmed since."""
        read = self._calls.ended_read
        if read is not None and not self._calls.unreachable:
            self.post(c.Release(located=read))

    def _abandon(self, outgoing: OutgoingCall) -> None:
        """Abandon a call and post the command that releases the resources that it may have acquired."""
        undo = self._calls.abandon(outgoing.call_id)
        if undo is not None and not self._calls.over:
            self._send_once(undo)

    def _send_once(self, outgoing: OutgoingCall) -> None:
        """Send a posted call. If no socket can be opened for lack of file descriptors, the call is
        resent later like a lost one."""
        try:
            self._send(outgoing.frames)
        except ServiceUnavailableError as error:
            log.warning("%s will be sent later: %s", outgoing.command.__name__, error)

    def _send(self, frames: list[bytes]) -> None:
        """Send a request. Raise as `CallSocket.open`."""
        raise NotImplementedError
