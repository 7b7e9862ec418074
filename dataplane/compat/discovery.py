"""Find the service that another process started, without a configured address.

A rendezvous is a place that several processes share, such as a Ray job. Processes that have imported ray have the one
for Ray, which `workers` implements.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dataplane.config import DataPlaneConfig

_PLUG_INS = {"ray": "workers.service.discovery:RayRendezvous"}
"""Module and class of the rendezvous for processes that have imported a package. `dataplane` imports neither, so they
are loaded by name. They need no metadata of an installed distribution: the project may be on PYTHONPATH only."""

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


def known() -> list[Rendezvous]:
    """Return every rendezvous of this process: the one for Ray if it has imported ray and the package `workers` is on
    its path."""
    for package, plug_in in _PLUG_INS.items():
        if package in sys.modules and package not in _constructors:
            make = _load(plug_in)
            if make is not None:
                _constructors[package] = make
    return [construct() for construct in _constructors.values()]


def is_isolated() -> bool:
    """Whether this process belongs to a Ray cluster, but `known` lacks its rendezvous: other processes of the cluster
    then do not find a service that this process starts."""
    ray = sys.modules.get("ray")
    return ray is not None and "ray" not in _constructors and bool(ray.is_initialized())


def _load(plug_in: str) -> Callable[[], Rendezvous] | None:
    """Return the class "MODULE:CLASS"; None if there is no such module. Raises the errors of its import."""
    module, _, name = plug_in.partition(":")
    try:
        make: Callable[[], Rendezvous] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module == missing or module.startswith(f"{missing}."):
            return None
        raise  # a package that the module needs
    return make
