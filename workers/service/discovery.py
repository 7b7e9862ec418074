"""The rendezvous of a Ray job: processes of one job find the service that one of them started, and several jobs find a
named service. A named actor stores the configuration."""

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
"""Longer than the start timeout of a service."""


class Whereabouts:
    """The actor that stores the configuration of the service. It ends with the process that created it."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._config: DataPlaneConfig | None = None

    async def tell(self, config: DataPlaneConfig) -> None:
        self._config = config
        self._ready.set()

    async def ask(self) -> DataPlaneConfig:
        """Return the configuration, after waiting for `tell`."""
        await self._ready.wait()
        assert self._config is not None
        return self._config


class RayRendezvous:
    """The `dataplane.compat.discovery.Rendezvous` of this process's Ray job."""

    def find(self, name: str | None = None) -> DataPlaneConfig | None:
        """See `Rendezvous.find`. `ServiceStartError` if a starting service is not ready in time."""
        return _stored_config(actor_name(name)) if ray.is_initialized() else None

    def meet(self, config: DataPlaneConfig, prepare: Prepare, *, name: str | None = None) -> Meeting | None:
        """See `Rendezvous.meet`. Raises the errors of `find` and `launch_service`."""
        if not ray.is_initialized():
            return None
        found = _find_or_create(actor_name(name))
        started = isinstance(found, ActorHandle)
        with ExitStack() as leaving:
            if isinstance(found, ActorHandle):
                service = _launch(config, prepare, found)
                leaving.callback(service.shutdown)
                leaving.callback(_end, found)
                found = service.config
            if name is not None and (forget := self.share(found)) is not None:
                leaving.callback(forget)
            return Meeting(config=found, started=started, close=leaving.pop_all().close)

    def share(self, config: DataPlaneConfig) -> Callable[[], None] | None:
        """See `Rendezvous.share`."""
        if not ray.is_initialized() or (actor := _create_actor(actor_name(None))) is None:
            return None
        try:
            ray.get(actor.tell.remote(config), timeout=START_TIMEOUT_S)
        except BaseException:
            _end(actor)
            raise
        return lambda: _end(actor)


def actor_name(name: str | None) -> str:
    """Return the name of the actor that stores the service of this name, or by default of this process's job."""
    return f"{NAME}-job-{ray.get_runtime_context().get_job_id()}" if name is None else f"{NAME}-named-{name}"


def _stored_config(place: str) -> DataPlaneConfig | None:
    """Return the configuration that the actor stores, waiting for a starting service. None without the actor."""
    try:
        actor = ray.get_actor(place, namespace=NAMESPACE)
        config: DataPlaneConfig = ray.get(actor.ask.remote(), timeout=START_TIMEOUT_S)
    except (ValueError, RayActorError):
        return None
    except RayError as error:
        raise ServiceStartError(f"the service that another process is starting is not ready: {error}") from error
    return config


def _find_or_create(place: str) -> DataPlaneConfig | ActorHandle:
    """Return the configuration of the stored service, or else the actor for it, which this process just created."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:  # Ray can keep the name of an ended actor for a moment
        found = _stored_config(place) or _create_actor(place)
        if found is not None:
            return found
    raise ServiceStartError(f"the actor {place!r} exists, but does not respond; end the process that created it")


def _create_actor(place: str) -> ActorHandle | None:
    """Create the actor that stores the service. Return None if it exists already."""
    remote: Any = ray.remote(Whereabouts)
    options = remote.options(name=place, namespace=NAMESPACE, num_cpus=0, max_concurrency=CALLS)
    try:
        actor: ActorHandle = options.remote()
    except ValueError:
        return None
    return actor


def _launch(config: DataPlaneConfig, prepare: Prepare, actor: ActorHandle) -> LaunchedService:
    """Launch a service and store its configuration in `actor`. On a failure, end both."""
    service: LaunchedService | None = None
    try:
        service = launch_service(config, name=f"{CONTROLLER}-{secrets.token_hex(4)}")
        prepare(service.config, urlsplit(service.http_url).netloc)
        ray.get(actor.tell.remote(service.config), timeout=START_TIMEOUT_S)
    except BaseException:
        if service is not None:
            service.shutdown()
        ray.kill(actor)
        raise
    return service


def _end(actor: ActorHandle) -> None:
    if ray.is_initialized():
        ray.kill(actor)
