"""How processes of one Ray job find the service that one of them started, and several jobs one that has a name: a named
actor knows it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from dataplane.compat.discovery import Meeting, Prepare
from dataplane.config import DataPlaneConfig
from workers.service import LaunchedService, ServiceStartError, launch_service

NAME = "rl-dataplane-rendezvous"
NAMESPACE = "rl-dataplane"
CONTROLLER = "rl-dataplane-controller"
CALLS = 1000
START_TIMEOUT_S = 240.0
"""Longer than a service may take to start."""


class Whereabouts:
    """The actor: keeps how to attach to the service, for as long as the process that made it lives."""

    def __init__(self) -> None:
        self._known = asyncio.Event()
        self._config: DataPlaneConfig | None = None

    async def tell(self, config: DataPlaneConfig) -> None:
        self._config = config
        self._known.set()

    async def ask(self) -> DataPlaneConfig:
        """Waits until it was told."""
        await self._known.wait()
        assert self._config is not None
        return self._config


class RayRendezvous:
    """A `dataplane.compat.discovery.Rendezvous` of the Ray job that this process belongs to."""

    def find(self, name: str | None = None) -> DataPlaneConfig | None:
        """See `Rendezvous.find`. `ServiceStartError` where the one that is starting is not ready in time."""
        return _asked(actor_name(name)) if ray.is_initialized() else None

    def meet(self, config: DataPlaneConfig, prepare: Prepare, *, name: str | None = None) -> Meeting | None:
        """See `Rendezvous.meet`. Raises as `find` and `launch_service`."""
        if not ray.is_initialized():
            return None
        found = _found_or_claimed(actor_name(name))
        started = isinstance(found, ActorHandle)
        with ExitStack() as leaving:
            if isinstance(found, ActorHandle):
                service = _launched(config, prepare, found)
                leaving.callback(service.shutdown)
                leaving.callback(_end, found)
                found = service.config
            if name is not None and (forget := self.share(found)) is not None:
                leaving.callback(forget)
            return Meeting(config=found, started=started, close=leaving.pop_all().close)

    def share(self, config: DataPlaneConfig) -> Callable[[], None] | None:
        """See `Rendezvous.share`."""
        if not ray.is_initialized() or (there := _claimed(actor_name(None))) is None:
            return None
        try:
            ray.get(there.tell.remote(config), timeout=START_TIMEOUT_S)
        except BaseException:
            _end(there)
            raise
        return lambda: _end(there)


def actor_name(name: str | None) -> str:
    """Of the actor that knows the service of this name, or without one that of this process's job."""
    return f"{NAME}-job-{ray.get_runtime_context().get_job_id()}" if name is None else f"{NAME}-named-{name}"


def _asked(place: str) -> DataPlaneConfig | None:
    try:
        there = ray.get_actor(place, namespace=NAMESPACE)
        config: DataPlaneConfig = ray.get(there.ask.remote(), timeout=START_TIMEOUT_S)
    except (ValueError, RayActorError):
        return None
    except RayError as error:
        raise ServiceStartError(f"the service that another process starts is not ready: {error}") from error
    return config


def _found_or_claimed(place: str) -> DataPlaneConfig | ActorHandle:
    """The service that is known there; or the actor that is to know it, which this process has just made."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:  # an actor that has ended may have its name for a moment
        found = _asked(place) or _claimed(place)
        if found is not None:
            return found
    raise ServiceStartError(f"the actor {place!r} has its name, but does not answer")


def _claimed(place: str) -> ActorHandle | None:
    """The actor that is to know the service, made now; None where there is one."""
    remote: Any = ray.remote(Whereabouts)
    options = remote.options(name=place, namespace=NAMESPACE, num_cpus=0, max_concurrency=CALLS)
    try:
        there: ActorHandle = options.remote()
    except ValueError:
        return None
    return there


def _launched(config: DataPlaneConfig, prepare: Prepare, there: ActorHandle) -> LaunchedService:
    """A service that others find by `there`. Nothing is left of both if it fails."""
    service: LaunchedService | None = None
    try:
        service = launch_service(config, name=f"{CONTROLLER}-{secrets.token_hex(4)}")
        prepare(service.config, urlsplit(service.http_url).netloc)
        ray.get(there.tell.remote(service.config), timeout=START_TIMEOUT_S)
    except BaseException:
        if service is not None:
            service.shutdown()
        ray.kill(there)
        raise
    return service


def _end(there: ActorHandle) -> None:
    if ray.is_initialized():
        ray.kill(there)
