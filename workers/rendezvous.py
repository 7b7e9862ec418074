"""How processes of one Ray cluster find the service that one of them started: a named actor knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from dataplane.config import DataPlaneConfig
from workers.service import LaunchedService, ServiceStartError, launch_service

NAME = "rl-dataplane-rendezvous"
NAMESPACE = "rl-dataplane"
CONTROLLER = "rl-dataplane-controller"
CALLS = 1000
START_TIMEOUT_S = 240.0
"""Longer than a service may take to start."""


class Whereabouts:
    """The actor: keeps how to attach to the service, for as long as the driver that started it lives."""

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
    """A `dataplane.compat.rendezvous.Rendezvous` of the cluster that this process is connected to."""

    def find(self) -> DataPlaneConfig | None:
        """See `Rendezvous.find`. `ServiceStartError` where the one that is starting is not ready in time."""
        if not ray.is_initialized():
            return None
        try:
            there = ray.get_actor(NAME, namespace=NAMESPACE)
            config: DataPlaneConfig = ray.get(there.ask.remote(), timeout=START_TIMEOUT_S)
        except (ValueError, RayActorError):
            return None
        except RayError as error:
            raise ServiceStartError(f"the service that another process starts is not ready: {error}") from error
        return config

    def start(
        self, config: DataPlaneConfig, prepare: Callable[[DataPlaneConfig, str], None]
    ) -> tuple[DataPlaneConfig, Launched] | None:
        """See `Rendezvous.start`."""
        if not ray.is_initialized():
            return None
        remote: Any = ray.remote(Whereabouts)
        try:
            there = remote.options(name=NAME, namespace=NAMESPACE, num_cpus=0, max_concurrency=CALLS).remote()
        except ValueError:
            return None
        service: LaunchedService | None = None
        try:
            service = launch_service(config, name=CONTROLLER)
            prepare(service.config, urlsplit(service.http_url).netloc)
            ray.get(there.tell.remote(service.config), timeout=START_TIMEOUT_S)
        except BaseException:
            if service is not None:
                service.shutdown()
            ray.kill(there)
            raise
        return service.config, Launched(service, there)


class Launched:
    """The service that this driver started."""

    def __init__(self, service: LaunchedService, there: ActorHandle) -> None:
        self._service = service
        self._there: ActorHandle | None = there

    def close(self) -> None:
        """Nobody finds it any more, and it ends. Idempotent."""
        there, self._there = self._there, None
        if there is not None and ray.is_initialized():
            ray.kill(there)
            self._service.shutdown()
