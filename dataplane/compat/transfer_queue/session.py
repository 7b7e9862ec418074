"""The one service that this process's module-level functions use: found, or started, by `init`."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dataplane.compat.rendezvous import Service, known
from dataplane.compat.transfer_queue.client import TransferQueueClient
from dataplane.compat.transfer_queue.errors import NotInitializedError
from dataplane.compat.transfer_queue.samplers import BaseSampler
from dataplane.compat.transfer_queue.settings import Settings, kept_of, sampler_of
from dataplane.config import ENV_ADDRESS, DataPlaneConfig
from dataplane.server import serve

log = logging.getLogger(__name__)


@dataclass
class Session:
    """The service in use. started: it, where this process started it; published: the address that its children find."""

    client: TransferQueueClient
    started: Service | None = None
    published: str | None = None

    def close(self) -> None:
        """Leave the service; end it if this process started it. Idempotent."""
        atexit.unregister(self.close)
        if self.published is not None and os.environ.get(ENV_ADDRESS) == self.published:
            del os.environ[ENV_ADDRESS]
        self.client.close()
        if self.started is not None and self._pid == os.getpid():
            self.started.close()

    def __post_init__(self) -> None:
        self._pid = os.getpid()


class _Current:
    """Holds the session of this process; there is one of these."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.session: Session | None = None


_current = _Current()


def init(conf: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Use a service: the one that `conf` names (`controller.zmq_info`, or `dataplane.address`), the one at TQ_ADDRESS,
    the one that another process of this Ray cluster has started, or else one that is started now. In a Ray cluster that
    is launched as actors, elsewhere it lives in this process, at TQ_ADDRESS for the processes that this one starts.

    conf: as the original's: `controller.sampler` (an instance, a class or a name), `controller.polling_mode`,
    `metrics.enabled` and `.port`. `dataplane` has settings of `DataPlaneConfig`, for the service or how to attach;
    `backend` is not used. What concerns all processes is taken from whoever starts the service and kept there. Every
    process that uses a sampler of its own class passes it here.

    Returns the merged settings where it started a service, with its address in `controller.zmq_info`, else `conf` as it
    is. A second call changes nothing. ValueError for an unknown sampler or backend.
    """
    with _current.guard:
        if _current.session is not None:
            return conf
        settings = Settings.of(conf)
        _current.session = open_session(settings, given=conf is not None)
        if _current.session.started is None:
            return conf
        settings.controller.zmq_info = _current.session.client.config
        return settings


def open_session(settings: Settings, *, given: bool = True, start: bool = True) -> Session:
    """A session of the service that is named or found, or else started. given: whether somebody chose these settings,
    so that a service that has none yet may keep them. `NotInitializedError` where there is none to attach to and
    `start` is False."""
    sampler = sampler_of(settings.controller.sampler)
    while True:
        found = settings.address() or _found()
        if found is not None:
            return _attached(found, sampler, kept_of(settings) if given else None)
        if not start:
            raise NotInitializedError(
                "no service was found: start one first, set TQ_ADDRESS, or name its address in `dataplane`"
            )
        session = _started(settings, sampler)
        if session is not None:
            return session


def close() -> None:
    """Leave the service, which ends if this process started it. Idempotent."""
    with _current.guard:
        session, _current.session = _current.session, None
    if session is not None:
        session.close()


def get_client() -> TransferQueueClient:
    """The client of the low-level interface. `NotInitializedError` (an AssertionError) before `init()`."""
    if _current.session is None:
        raise NotInitializedError("there is no service yet: call init() first")
    return _current.session.client


def current_client() -> TransferQueueClient:
    """The client, which attaches to a service that is found. `NotInitializedError` where none is."""
    session = _current.session
    if session is not None:
        return session.client
    with _current.guard:
        if _current.session is None:
            found = _found()
            if found is None:
                raise NotInitializedError("no service was found: call init() first")
            _current.session = _attached(found, None, None)
        return _current.session.client


def get_metrics_endpoint() -> str | None:
    """ "host:port" where the service answers Prometheus at /metrics; None where it was started without
    `metrics.enabled`, and where there is none."""
    try:
        client = current_client()
    except NotInitializedError:
        return None
    kept = client._performer.do(client.settled, None)
    return None if kept is None else kept.get("metrics")


def _found() -> DataPlaneConfig | None:
    """The service that the environment names, or a rendezvous knows."""
    named = DataPlaneConfig().with_environment()
    if named.address is not None:
        return named
    return next((found for place in known() if (found := place.find()) is not None), None)


def _attached(
    config: DataPlaneConfig,
    sampler: BaseSampler | None,
    wished: Mapping[str, Any] | None,
    service: Service | None = None,
) -> Session:
    client = TransferQueueClient(f"TransferQueueClient_{os.getpid()}", config)
    try:
        client._performer.client.connect()
        client._performer.do(client.settled, wished)
        client._own_sampler = sampler
        return Session(client, service)
    except BaseException:
        client.close()
        raise


def _started(settings: Settings, sampler: BaseSampler) -> Session | None:
    """A service that this process starts; None where another process was faster."""
    wanted, wished = settings.service(), kept_of(settings)

    def prepare(config: DataPlaneConfig, http_address: str) -> None:
        _attached(config, sampler, {**wished, "metrics": http_address or None}).close()

    places = known()
    for place in places:
        launched = place.start(wanted, prepare)
        if launched is not None:
            return _attached(launched[0], sampler, wished, launched[1])
        if place.find() is not None:
            return None
    server = serve(wanted)
    try:
        told = {**wished, "metrics": server.http_address or None}
        session = _attached(replace(wanted, address=server.address), sampler, told, server)
    except BaseException:
        server.close()
        raise
    session.published = os.environ[ENV_ADDRESS] = server.address
    atexit.register(session.close)
    return session
