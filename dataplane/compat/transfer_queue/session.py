"""The service that the module-level functions of this process use. `init` finds or starts it."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dataplane.compat.discovery import Meeting, is_isolated, known
from dataplane.compat.transfer_queue.client import TransferQueueClient
from dataplane.compat.transfer_queue.errors import NotInitializedError
from dataplane.compat.transfer_queue.sampler import BaseSampler
from dataplane.compat.transfer_queue.settings import Settings, sampler_of, settings_to_store
from dataplane.config import ENV_ADDRESS, ENV_TOKEN, DataPlaneConfig
from dataplane.service import serve

log = logging.getLogger(__name__)

_ISOLATED = "this process is in a Ray cluster, but cannot import the package `workers`, through which it finds services"


@dataclass
class Session:
    """The service in use.

    meeting: for a service from `Rendezvous.meet` or started in this process, that service; for a configured address,
    its publication for other processes; otherwise None. published: environment variables by which child processes find
    the service. _pid: the process that opened the session; a forked child inherits the object.
    """

    client: TransferQueueClient
    meeting: Meeting | None = None
    published: Mapping[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Leave the service, and stop it if this process started it. Idempotent."""
        atexit.unregister(self.close)
        for name, value in self.published.items():
            if os.environ.get(name) == value:  # unless the program has changed it since
                del os.environ[name]
        self.client.close()
        # A forked child must not stop the service of its parent.
        if self.meeting is not None and self._pid == os.getpid():
            self.meeting.close()

    @property
    def started(self) -> bool:
        """Whether this process started the service."""
        return self.meeting is not None and self.meeting.started

    def __post_init__(self) -> None:
        self._pid = os.getpid()


class _Current:
    """The holder of this process's session; the module has one instance. lock: held while the session is set."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.session: Session | None = None


_current = _Current()


def init(conf: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Attach to the service that `conf` names (`controller.zmq_info`, `dataplane.address`, or `controller.name`), to
    the one at TQ_ADDRESS, or to the one that another process of this Ray job uses. If none is found, start a service.
    In a Ray cluster it runs as actors; elsewhere it runs in this process, which sets TQ_ADDRESS for child processes.

    conf: as in the original: `controller.sampler` (an instance, a class or a name), `controller.polling_mode`,
    `metrics.enabled` and `.port`. `strict_reads`: make a read of a missing key or field an error (default: omit it, as
    the original does). `objects`: "pickle" objects that no column can store, which adds a token to a service without
    one (default "refuse"; "pickle" in a job that TQ_REPLACE switches, unless it attaches to a service with neither
    token nor TLS). `dataplane` has settings of `DataPlaneConfig`, for starting the service or attaching to it.
    `backend` is ignored; each unknown section logs one warning.

    `controller.name`: Ray jobs that give the same name share a service, which the first of them
    starts; processes of these jobs that give no name use it, too. The process that starts the service determines the
    settings for all processes; the service stores them. Each process that uses a custom sampler class passes it here.

    Return the merged settings if a service was started, with its address in `controller.zmq_info` and the result of
    `get_metrics_endpoint` in `metrics.endpoint`; otherwise return `conf`. Further calls have no effect. ValueError for
    an unknown sampler or backend, and for a name outside a Ray cluster; TypeError for settings of another type.
    """
    with _current.lock:
        if _current.session is not None:
            return conf
        settings = Settings.of(conf)
        _current.session = open_session(settings, given=conf is not None)
        if not _current.session.started:
            return conf
        settings.controller.zmq_info = _current.session.client.config
        settings.metrics.endpoint = get_metrics_endpoint()
        return settings


def open_session(settings: Settings, *, given: bool = True, start: bool = True) -> Session:
    """Open a session of the service that is named or found, or else start one. given: whether the caller passed these
    settings, so that a service without settings stores them. If `start` is False, no service is started or published:
    `NotInitializedError` if none is found."""
    sampler = sampler_of(settings.controller.sampler)
    name = settings.shared_name()
    # A service name takes precedence over TQ_ADDRESS, but not over an address in the settings.
    configured = settings.address() or (_environment() if name is None else None)
    service = configured  # or, below, one that is found
    if service is None and (name is None or not start):
        # With a name and `start`, `_find_or_start` looks for the service below: it finds or starts it in one step.
        service = _find_published(name)
    settings.objects = settings.objects_with(service)  # the default depends on the service; stored and used below
    if service is not None:
        session = _attach(service, sampler, settings_to_store(settings) if given else None)
        if configured is not None and start:
            session.meeting = _publish(session)
        return session
    if not start:
        raise NotInitializedError(
            "TransferQueue is not initialized, and no service was found: start one first (on Ray, in the same job), or "
            "set its address (TQ_ADDRESS, or `dataplane.address` in the configuration)"
        )
    return _find_or_start(settings, sampler, given) or _start_here(settings, sampler)


def close() -> None:
    """Leave the service, and stop it if this process started it. Idempotent."""
    with _current.lock:
        session = _current.session
        _current.session = None
    if session is not None:
        session.close()


def get_client() -> TransferQueueClient:
    """Return the client of the low-level interface. `NotInitializedError` (an AssertionError) before `init()`."""
    if _current.session is None:
        raise NotInitializedError("TransferQueue is not initialized: call init() first")
    return _current.session.client


def current_client() -> TransferQueueClient:
    """Return this process's client. Before `init()`, attach to a service; `NotInitializedError` without one."""
    session = _current.session
    if session is not None:  # the common case, without the lock
        return session.client
    with _current.lock:
        if _current.session is None:
            service = _environment() or _find_published()
            if service is None:
                raise NotInitializedError(
                    "TransferQueue is not initialized, and no service was found: call init() first; pass "
                    "`controller.name` to find the service of another Ray job"
                )
            _current.session = _attach(service, sampler=None, to_store=None)
        return _current.session.client


def get_metrics_endpoint() -> str | None:
    """Return the "host:port" at which the service exposes Prometheus metrics under /metrics. Return None if it was
    started without `metrics.enabled`, or if no service is found."""
    try:
        client = current_client()
    except NotInitializedError:
        return None
    stored = client._performer.do(client.exchange_settings, None)
    return None if stored is None else stored.get("metrics")


def _environment() -> DataPlaneConfig | None:
    """Return the configuration of the service at TQ_ADDRESS, or None."""
    config = DataPlaneConfig().with_environment()
    return None if config.address is None else config


def _find_published(name: str | None = None) -> DataPlaneConfig | None:
    """Return the service of this name, or of this process's job, from the first rendezvous that has it, or None."""
    for rendezvous in known():
        config = rendezvous.find(name)
        if config is not None:
            return config
    return None


def _publish(session: Session) -> Meeting | None:
    """Publish the service of a session with a configured address, so that processes of this job without an address
    attach to it. Return None if the job already has a service, or without a rendezvous. An error closes the session."""
    config = session.client.config
    try:
        for rendezvous in known():
            withdraw = rendezvous.share(config)
            if withdraw is not None:
                return Meeting(config=config, started=False, close=withdraw)
    except BaseException:
        session.close()
        raise
    return None


def _attach(
    config: DataPlaneConfig,
    sampler: BaseSampler | None,
    to_store: Mapping[str, Any] | None,
    meeting: Meeting | None = None,
) -> Session:
    """Connect, and exchange settings with the service: store `to_store` (None: nothing) if it has none, and use its
    `objects` mode. sampler: that of this process (None: none). meeting: becomes that of the session."""
    client = TransferQueueClient(f"TransferQueueClient_{os.getpid()}", config)
    try:
        client._performer.client.connect()
        stored = client._performer.do(client.exchange_settings, to_store)
        client._local_sampler = sampler
    except BaseException:
        client.close()
        raise
    if stored is None or stored.get("objects", "refuse") == config.objects:
        if config.pickles:
            log.info("objects that no column can store are pickled, and unpickled in this process (objects='pickle')")
        return Session(client, meeting)
    # Another process chose the other `objects` mode. A client's mode is fixed, so connect again with that one.
    client.close()
    return _attach(replace(client.config, objects=stored["objects"]), sampler, to_store=None, meeting=meeting)


def _find_or_start(settings: Settings, sampler: BaseSampler, given: bool) -> Session | None:
    """Find or start a service through a rendezvous. Return None if this process belongs to no rendezvous; ValueError
    then if the settings have a service name. given: see `open_session`."""
    config = settings.service()
    to_store = settings_to_store(settings)
    name = settings.shared_name()

    def prepare(started_config: DataPlaneConfig, http_address: str) -> None:
        """Store the settings in a service that the rendezvous has started, before other processes find it."""
        _attach(started_config, sampler, {**to_store, "metrics": http_address or None}).close()

    for rendezvous in known():
        meeting = rendezvous.meet(config, prepare, name=name)
        if meeting is not None:
            try:
                return _attach(meeting.config, sampler, to_store if given else None, meeting)
            except BaseException:
                meeting.close()
                raise
    if name is not None and is_isolated():
        raise ValueError(f"controller.name={name!r}: {_ISOLATED}: install rl-dataplane, or add it to PYTHONPATH")
    if name is not None:
        raise ValueError(
            f"controller.name={name!r} requires a Ray cluster, and this process is in none: import ray and call "
            "ray.init() first, or pass the service's address"
        )
    return None


def _start_here(settings: Settings, sampler: BaseSampler) -> Session:
    """Start a service in this process, and set the environment variables by which child processes find it."""
    config = settings.service()
    variables: dict[str, str] = {}
    if config.pickles and config.secret() is None:
        # Unpickling runs code, so only processes with a token may connect. Children get it from the environment.
        token = os.environ.get(ENV_TOKEN)
        if not token:
            token = variables[ENV_TOKEN] = secrets.token_urlsafe(32)
        config = replace(config, token=token)
    server = serve(config)
    if is_isolated():
        log.warning(
            "Started a service of its own at %s: %s. Other processes of the job do not use this service. Install "
            "rl-dataplane, or add it to PYTHONPATH, for all processes; or start one service and set %s to its address "
            "in all of them",
            server.address,
            _ISOLATED,
            ENV_ADDRESS,
        )
    try:
        to_store = {**settings_to_store(settings), "metrics": server.http_address or None}
        config = replace(config, address=server.address)
        session = _attach(config, sampler, to_store, Meeting(config=config, started=True, close=server.close))
    except BaseException:
        server.close()
        raise
    variables[ENV_ADDRESS] = server.address
    os.environ.update(variables)
    session.published = variables
    atexit.register(session.close)
    return session
