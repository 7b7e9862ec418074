"""How processes that were not told an address find the service that one of them started.

A rendezvous is a place that they share, such as a Ray job. `workers` registers one for Ray when it is imported; a
process that has imported ray without it gets it by the entry point group `dataplane.rendezvous`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dataplane.config import DataPlaneConfig

GROUP = "dataplane.rendezvous"


Prepare = Callable[[DataPlaneConfig, str], None]
"""Is told how to attach to a service, and the "host:port" where it answers HTTP, or ""."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A service that was found or started. config: how to attach to it. close: leave it; one that was `started` here
    ends. Idempotent."""

    config: DataPlaneConfig
    started: bool
    close: Callable[[], None]


class Rendezvous(Protocol):
    """A place where one process leaves the address of a service and others find it: those of the same job, or of any
    job that gives the same name."""

    def find(self, name: str | None = None) -> DataPlaneConfig | None:
        """How to attach to the service of this name, or of this process's job; waits for one that is starting. None:
        there is none, or this process has no part in the place."""

    def meet(self, config: DataPlaneConfig, prepare: Prepare, *, name: str | None = None) -> Meeting | None:
        """Find it as `find` does; where there is none, start one, `prepare` it, then let others find it. With a name,
        it is found by the other processes of this job without one, too, until this process leaves it. None: this
        process has no part in the place."""

    def share(self, config: DataPlaneConfig) -> Callable[[], None] | None:
        """Let the other processes of this job find the service that `config` attaches to, until what is returned is
        called or this process ends. None: they find one already, or this process has no part in the place."""


_made: dict[str, Callable[[], Rendezvous]] = {}


def register_rendezvous(name: str, make: Callable[[], Rendezvous]) -> None:
    """From now on `known` has what `make()` makes, once per name."""
    _made[name] = make


def known() -> list[Rendezvous]:
    """All that are registered; in a process that has imported a package which an entry point is named after, also the
    one of that entry point."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name in sys.modules and entry.name not in _made:
            _made[entry.name] = entry.load()
    return [make() for make in _made.values()]
