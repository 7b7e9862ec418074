"""Operations that begin anew while a storage unit that they need is coming back."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from dataplane.client.operations.steps import Operation, Send, Work
from dataplane.client.session_state import SessionState
from dataplane.core.backoff import Backoff
from dataplane.errors import ServiceRestartedError, StorageUnitError
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)

PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


def with_retry(
    operation: Callable[Concatenate[SessionState, P], Operation[T]],
) -> Callable[Concatenate[SessionState, P], Operation[T]]:
    """The operation, which leaves nothing behind when it fails, begun again for `config.reconnect_s` while it fails
    because a unit is gone, of a service whose units come back with what they held."""

    @functools.wraps(operation)
    def begun_again(session_state: SessionState, /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        backoff, end = Backoff(PAUSE_S, LONGEST_PAUSE_S), float("inf")
        while True:
            try:
                return (yield from operation(session_state, *args, **kwargs))
            except (StorageUnitError, ServiceRestartedError) as error:
                end = min(end, time.monotonic() + session_state.config.reconnect_s)
                if not session_state.durable or error.facts.get("lost") or time.monotonic() + backoff.next_s >= end:
                    raise
                log.info("%s; %s begins anew", error, operation.__name__)
            yield Work(functools.partial(time.sleep, backoff.take()))

    return begun_again


def ensure_known(session_state: SessionState, units: set[int]) -> Operation[None]:
    """Learn where these units are, unless it is known."""
    if session_state.connections.unknown(units):
        listed = yield Send(c.Units())
        session_state.connections.learn(listed.result.units)
