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
"""Maximum number of concurrent calls of a `ConfigHolder`, such as processes that wait for the configuration."""
START_TIMEOUT_S = 240.0
"""Longer than the start timeout of a service."""


class ConfigHolder:
    """The actor that stores the configuration of the service. It ends with the process that created it."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._config: DataPlaneConfig | None = None

    async def set_config(self, config: DataPlaneConfig) -> None:
        self._config = config
        self._ready.set()

    async def get_config(self) -> DataPlaneConfig:
        """Return the configuration, after waiting for `set_config`."""
        await self._ready.wait()
        assert self._config is not None
        return self._config


class RayRendezvous:
    """The `dataplane.compat.discovery.Rendezvous` of this process's Ray job."""

    def find(self, name: str | None = None) -> DataPlaneConfig | None:
        """See `Rendezvous.find`. `ServiceStartError` if a starting service is not ready in time."""
        return _stored_config(actor_name(name)) if ray.is_initialized() else None

    def meet(self, config: DataPlaneConfig, prepare: Prepare, *, name: str | None = None) -> Meeting | None:
        """See `Rendezvous.meet`. None without Ray. `close` of the meeting undoes what this call started. Raises the
        errors of `find` and `launch_service`."""
        if not ray.is_initialized():
            return None
        found = _find_or_create(actor_name(name))
        with ExitStack() as undo:
            if isinstance(found, ActorHandle):
                # There was no service: launch one, and keep its configuration in the new actor.
                service = _launch(config, prepare, found)
                undo.callback(service.shutdown)
                undo.callback(_kill_actor, found)
                service_config = service.config
            else:
                service_config = found
            # Let the other processes of this job find a named service without its name. `forget` undoes that.
            forget = None if name is None else self.share(service_config)
            if forget is not None:
                undo.callback(forget)
            started = isinstance(found, ActorHandle)
            # After `pop_all` the end of the block undoes nothing.
            return Meeting(config=service_config, started=started, close=undo.pop_all().close)

    def share(self, config: DataPlaneConfig) -> Callable[[], None] | None:
        """See `Rendezvous.share`."""
        if not ray.is_initialized():
            return None
        actor = _create_actor(actor_name(name=None))  # the one of this job
        if actor is None:  # this job has a service already
            return None
        try:
            ray.get(actor.set_config.remote(config), timeout=START_TIMEOUT_S)
        except BaseException:
            _kill_actor(actor)
            raise
        return lambda: _kill_actor(actor)


def actor_name(name: str | None) -> str:
    """Return the name of the actor that stores the service of this name, or by default of this process's job."""
    return f"{NAME}-job-{ray.get_runtime_context().get_job_id()}" if name is None else f"{NAME}-named-{name}"


def _stored_config(holder_name: str) -> DataPlaneConfig | None:
    """Return the configuration that the actor stores, waiting for a starting service. None if there is no such actor,
    or if it ends. `ServiceStartError` after `START_TIMEOUT_S`."""
    try:
        actor = ray.get_actor(holder_name, namespace=NAMESPACE)
        config: DataPlaneConfig = ray.get(actor.get_config.remote(), timeout=START_TIMEOUT_S)
    except (ValueError, RayActorError):
        return None
    except RayError as error:
        raise ServiceStartError(f"the service that another process is starting is not ready: {error}") from error
    return config


def _find_or_create(holder_name: str) -> DataPlaneConfig | ActorHandle:
    """Return the configuration of the stored service, or else the actor for it, which this process just created.
    `ServiceStartError` if neither succeeds within `START_TIMEOUT_S`."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:  # Ray can keep the name of an ended actor for a moment
        found = _stored_config(holder_name) or _create_actor(holder_name)
        if found is not None:
            return found
    raise ServiceStartError(f"the actor {holder_name!r} exists, but does not respond; end the process that created it")


def _create_actor(holder_name: str) -> ActorHandle | None:
    """Create the actor that stores the service. Return None if it exists already."""
    remote: Any = ray.remote(ConfigHolder)
    options = remote.options(name=holder_name, namespace=NAMESPACE, num_cpus=0, max_concurrency=CALLS)
    try:
        actor: ActorHandle = options.remote()
    except ValueError:
        return None
    return actor


def _launch(config: DataPlaneConfig, prepare: Prepare, actor: ActorHandle) -> LaunchedService:
    """Launch a service, call `prepare` for it, and store its configuration in `actor`. On a failure, end both."""
    service: LaunchedService | None = None
    try:
        service = launch_service(config, name=f"{CONTROLLER}-{secrets.token_hex(4)}")
        prepare(service.config, urlsplit(service.http_url).netloc)
        ray.get(actor.set_config.remote(service.config), timeout=START_TIMEOUT_S)
    except BaseException:
        if service is not None:
            service.shutdown()
        ray.kill(actor)
        raise
    return service


def _kill_actor(actor: ActorHandle) -> None:
    if ray.is_initialized():
        ray.kill(actor)
