"""Operations that begin anew while a storage unit that they need is coming back."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from dataplane.chance import jittered
from dataplane.desk import Desk
from dataplane.errors import ServiceRestartedError, StorageUnitError
from dataplane.ledger import commands as c
from dataplane.steps import Operation, Send, Work

log = logging.getLogger(__name__)

PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


def patient(operation: Callable[Concatenate[Desk, P], Operation[T]]) -> Callable[Concatenate[Desk, P], Operation[T]]:
    """The operation, which leaves nothing behind when it fails, begun again for `config.reconnect_s` while it fails
    because a unit is gone, of a service whose units come back with what they held."""

    @functools.wraps(operation)
    def begun_again(desk: Desk, /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        pause_s, end = PAUSE_S, float("inf")
        while True:
            try:
                return (yield from operation(desk, *args, **kwargs))
            except (StorageUnitError, ServiceRestartedError) as error:
                end = min(end, time.monotonic() + desk.config.reconnect_s)
                if not desk.durable or error.facts.get("lost") or time.monotonic() + pause_s >= end:
                    raise
                log.info("%s; %s begins anew", error, operation.__name__)
            waits_s = jittered(pause_s)
            yield Work(functools.partial(time.sleep, waits_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    return begun_again


def know(desk: Desk, units: set[int]) -> Operation[None]:
    """Learn where these units are, unless it is known."""
    if desk.roads.unknown(units):
        listed = yield Send(c.Units())
        desk.roads.learn(listed.result.units)
