"""Whether the service serves: one answer for the gRPC health service and `/healthz`."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.errors import DataPlaneError, ServiceUnavailableError, SessionExpiredError
from dataplane.ledger import commands as c

if TYPE_CHECKING:
    from dataplane.controller.event_loop import LedgerThread

HEALTHY_S = 2.0
"""A service that is well answers within this time."""
FRESH_S = 0.5
"""An answer holds for so long: many who ask cost the ledger no more than one."""
NO_SESSION = 0
"""No session has this number."""


class ServiceHealth:
    """Has the ledger answer a command, as a client does: that takes its thread, its journal and the disk under that.
    The command names no session, so the ledger refuses it, which is an answer too. Thread-safe."""

    def __init__(self, shell: LedgerThread) -> None:
        self._shell = shell
        self._turn = threading.Lock()
        self._number = 0
        self._why = ""
        self._until = -math.inf

    def why_not(self) -> str:
        """Why the service does not serve, "" if it does. Blocks for about `HEALTHY_S` at most."""
        with self._turn:
            if time.monotonic() >= self._until:
                self._why = self._look()
                self._until = time.monotonic() + FRESH_S
            return self._why

    def _look(self) -> str:
        self._number += 1
        call = c.Call(session=NO_SESSION, number=self._number, watermark=self._number, command=c.Units())
        answers: queue.SimpleQueue[c.Output] = queue.SimpleQueue()
        reply: Callable[[c.Output], None] = answers.put
        try:
            self._shell.submit(call, reply)
            answer = answers.get(timeout=HEALTHY_S)
        except ServiceUnavailableError as error:
            return str(error)
        except queue.Empty:
            with contextlib.suppress(ServiceUnavailableError):
                self._shell.withdraw(call, reply)
            return f"its ledger gives no answer within {HEALTHY_S:g} s"
        assert isinstance(answer, c.Answer)
        failed = isinstance(answer.result, DataPlaneError) and not isinstance(answer.result, SessionExpiredError)
        return str(answer.result) if failed else ""
