"""Retry operations while a required storage unit restarts."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from dataplane.client.operations.steps import Operation, Send, Work
from dataplane.client.session_state import SessionState
from dataplane.core.durations import Backoff
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
    """Decorate an operation: retry it for up to `config.reconnect_s` after its first failure, while it fails because a
    storage unit is unreachable or was restarted. This applies only to services whose units keep their rows across
    restarts. The operation must leave nothing behind when it fails."""

    @functools.wraps(operation)
    def retried(session_state: SessionState, /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        backoff = Backoff(PAUSE_S, LONGEST_PAUSE_S)
        end = float("inf")
        while True:
            try:
                return (yield from operation(session_state, *args, **kwargs))
            except (StorageUnitError, ServiceRestartedError) as error:
                end = min(end, time.monotonic() + session_state.config.reconnect_s)  # set by the first failure
                # With `lost`, the process restarted without the state that the operation needs.
                is_permanent = not session_state.durable or error.facts.get("lost")
                if is_permanent or time.monotonic() + backoff.next_s >= end:
                    raise
                log.info("%s; retrying %s", error, operation.__name__)
            yield Work(functools.partial(time.sleep, backoff.take()))  # a step, so that no event loop is blocked

    return retried


def ensure_known(session_state: SessionState, units: set[int]) -> Operation[None]:
    """Fetch the addresses of these units if any of them is unknown."""
    if session_state.connections.unknown(units):
        listed = yield Send(c.Units())
        session_state.connections.learn(listed.result.units)
