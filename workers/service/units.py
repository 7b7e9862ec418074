"""The supervisor's records of its storage units, and of nodes on which units fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ray.actor import ActorHandle

from workers.service.nodes import RayNode
from workers.service.plan import ServiceStartError, State


@dataclass(eq=False, kw_only=True)
class Unit:
    """A storage unit and its actor. started: done when the unit serves or failed to start. number: its number at the
    controller, 0 until it serves; serving_since: monotonic time, 0 until it serves; monitor_task: waits for its end."""

    name: str
    node: RayNode
    actor: ActorHandle
    started: asyncio.Future[None]
    state: State = "starting"
    number: int = 0
    serving_since: float = 0.0
    monitor_task: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"storage unit {self.name} on node {self.node.host}"


@dataclass(kw_only=True)
class NodeBackoff:
    """The backoff of a node: the number of consecutive failures of its units, and the time of the next attempt."""

    failures: int = 0
    until: float = 0.0


def start_error(unit: Unit) -> ServiceStartError:
    """Return the error for a unit whose `started` has failed."""
    error = unit.started.exception()
    cause = getattr(error, "cause", None) or error
    return ServiceStartError(f"{unit} did not start: {type(cause).__name__}: {cause}")
