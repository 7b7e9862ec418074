"""How processes that were not told an address find the service that one of them started.

A rendezvous is a place that they share, such as a Ray cluster. `workers` registers one for Ray when it is imported; a
process that has imported ray without it gets it by the entry point group `dataplane.rendezvous`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Protocol

from dataplane.config import DataPlaneConfig

GROUP = "dataplane.rendezvous"


class Service(Protocol):
    """A service that this process started."""

    def close(self) -> None: ...


class Rendezvous(Protocol):
    """A place where one process leaves the address of a service and others find it."""

    def find(self) -> DataPlaneConfig | None:
        """How to attach to the service that is there; waits for one that is starting. None: there is none, or this
        process has no part in the place."""

    def start(
        self, config: DataPlaneConfig, prepare: Callable[[DataPlaneConfig, str], None]
    ) -> tuple[DataPlaneConfig, Service] | None:
        """Start one, `prepare` it (told how to attach, and the "host:port" where it answers HTTP, or ""), then let
        others find it: how to attach to it, and how to end it. None: somebody was faster, or this process has no part
        in the place."""


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
