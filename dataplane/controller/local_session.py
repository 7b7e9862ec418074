"""A session within the service process, for inspection commands. It uses neither a server nor a socket."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from dataplane.core.addresses import boot_id
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import CallTimeoutError, DataPlaneError, ServiceUnavailableError, SessionExpiredError
from dataplane.ledger import commands as c

if TYPE_CHECKING:
    from dataplane.controller.event_loop import LedgerThread

ASK_S = 10.0  # timeout of a command, with the wait for earlier ones


class LocalSession:
    """Opens a session with the first command, and a new one after the service expired it. Thread-safe."""

    def __init__(self, ledger_thread: LedgerThread, *, name: str, address: str) -> None:
        self._ledger_thread = ledger_thread
        self._name = name
        self._address = address
        self._turn = threading.Lock()  # held by the running call
        self._session = 0  # 0: no session is open
        self._number = 0  # of the last call

    def ask(self, command: c.Command) -> c.Result:
        """Execute `command` and return the ledger's result, or raise the error that it answers. Statistics omit this
        session, because it does not belong to a client. Concurrent calls run one at a time. Raises `CallTimeoutError`
        after `ASK_S` seconds, which include the wait for earlier calls, `ServiceUnavailableError` once the service is
        stopping."""
        deadline = time.monotonic() + ASK_S
        if not self._turn.acquire(timeout=ASK_S):
            raise self._timeout_error(command)
        try:
            try:
                return self._ask_once(command, deadline)
            except SessionExpiredError:  # the service expired this session
                self._session = 0  # so that `_ask_once` opens another one
                return self._ask_once(command, deadline)
        except queue.Empty:
            raise self._timeout_error(command) from None
        finally:
            self._turn.release()

    def beat(self) -> None:
        """Send the session's heartbeat, if one is open. Callable while another thread runs `ask`."""
        session = self._session
        if session:
            with contextlib.suppress(ServiceUnavailableError):
                self._ledger_thread.submit(c.Heartbeat(session=session))

    def close(self) -> None:
        """End the session, while no `ask` runs, without waiting for an answer. A later `ask` opens another one."""
        session, self._session = self._session, 0
        if session:
            self._number += 1
            with contextlib.suppress(ServiceUnavailableError):
                self._ledger_thread.submit(self._call(session, c.Bye()))

    def _ask_once(self, command: c.Command, deadline: float) -> c.Result:
        """Execute the command in the session, which is opened if there is none. The caller holds `_turn`."""
        if not self._session:
            self._open(deadline)
        self._number += 1
        answer = self._submit(self._call(self._session, command), deadline)
        assert isinstance(answer, c.Answer)
        if isinstance(answer.result, DataPlaneError):
            raise answer.result
        return self._without_own_session(answer.result)

    def _without_own_session(self, result: c.Result) -> c.Result:
        """Return the result. Statistics are returned without this session."""
        if not isinstance(result, c.StatsReport):
            return result
        return msgspec.structs.replace(
            result, sessions=tuple(session for session in result.sessions if session.session != self._session)
        )

    def _call(self, session: int, command: c.Command) -> c.Call:
        """Build a numbered call. Its watermark discards the answers to all earlier calls."""
        return c.Call(session=session, number=self._number, watermark=self._number, command=command)

    def _open(self, deadline: float) -> None:
        """Open a session, whose calls are numbered from 1."""
        request = c.OpenSession(
            nonce=secrets.token_hex(16), host=boot_id(), name=self._name, protocol_version=PROTOCOL_VERSION
        )
        opened = self._submit(request, deadline)
        assert isinstance(opened, c.Opened)
        if opened.error is not None:
            raise opened.error
        self._session, self._number = opened.session, 0

    def _submit(self, item: c.Input, deadline: float) -> c.Output:
        """Submit `item` and wait for its answer. Raises `queue.Empty` after `deadline`."""
        answers: queue.SimpleQueue[c.Output] = queue.SimpleQueue()
        reply: Callable[[c.Output], None] = answers.put
        self._ledger_thread.submit(item, reply)
        try:
            return answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            with contextlib.suppress(ServiceUnavailableError):
                self._ledger_thread.withdraw(item, reply)
            raise

    def _timeout_error(self, command: c.Command) -> CallTimeoutError:
        what, peer = type(command).__name__, f"the service at {self._address}"
        return CallTimeoutError(what=what, waited_s=ASK_S, peer=peer)
