"""Find the service that another process started, without a configured address.

A rendezvous is a place that several processes share, such as a Ray job. Importing `workers` registers the rendezvous
for Ray. A process that imports only ray gets it from the entry point group `dataplane.rendezvous`.
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
"""Called with the configuration that attaches to a service, and its HTTP "host:port" ("" without HTTP)."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A service that was found or started.

    config: attaches to the service. started: whether this process started it. close: leaves the service, and stops
    it if it was `started` here; idempotent."""

    config: DataPlaneConfig
    started: bool
    close: Callable[[], None]


class Rendezvous(Protocol):
    """A place where one process publishes the address of a service. Other processes of the same job find it there, or
    processes of any job that uses the same name."""

    def find(self, name: str | None = None) -> DataPlaneConfig | None:
        """Return the configuration of the service of this name, or by default of this process's job. Wait for a service
        that is starting. Return None without a service, or if this process does not belong to the rendezvous."""

    def meet(self, config: DataPlaneConfig, prepare: Prepare, *, name: str | None = None) -> Meeting | None:
        """Find a service as `find` does. Without one, start a service, call `prepare` for it and publish it. A named
        service is also the service of this job for processes that give no name, until this process leaves it. Return
        None if this process does not belong to the rendezvous."""

    def share(self, config: DataPlaneConfig) -> Callable[[], None] | None:
        """Publish the service that `config` attaches to, for the other processes of this job. Return a function that
        withdraws it; the end of this process does so too. Return None if the job already has a service, or if this
        process does not belong to the rendezvous."""


_constructors: dict[str, Callable[[], Rendezvous]] = {}


def register_rendezvous(name: str, make: Callable[[], Rendezvous]) -> None:
    """Register a rendezvous: `known` returns the result of `make()`. A later call for the same name replaces it."""
    _constructors[name] = make


def known() -> list[Rendezvous]:
    """Return every registered rendezvous. An entry point is registered here if this process has imported the package
    that the entry point is named after."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name in sys.modules and entry.name not in _constructors:
            _constructors[entry.name] = entry.load()
    return [construct() for construct in _constructors.values()]
