"""The one service that this process's module-level functions use: found, or started, by `init`."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dataplane.compat.discovery import Meeting, known
from dataplane.compat.transfer_queue.client import TransferQueueClient
from dataplane.compat.transfer_queue.errors import NotInitializedError
from dataplane.compat.transfer_queue.samplers import BaseSampler
from dataplane.compat.transfer_queue.settings import Settings, kept_of, sampler_of
from dataplane.config import ENV_ADDRESS, ENV_TOKEN, DataPlaneConfig
from dataplane.service import serve

log = logging.getLogger(__name__)


@dataclass
class Session:
    """The service in use. meeting: how this process came by it, unless it was named an address; published: the
    variables that its children find it by."""

    client: TransferQueueClient
    meeting: Meeting | None = None
    published: Mapping[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Leave the service; end it if this process started it. Idempotent."""
        atexit.unregister(self.close)
        for name, value in self.published.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        self.client.close()
        if self.meeting is not None and self._pid == os.getpid():
            self.meeting.close()

    @property
    def started(self) -> bool:
        """Whether this process started the service."""
        return self.meeting is not None and self.meeting.started

    def __post_init__(self) -> None:
        self._pid = os.getpid()


class _Current:
    """Holds the session of this process; there is one of these."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.session: Session | None = None


_current = _Current()


def init(conf: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Use a service: the one that `conf` names (`controller.zmq_info`, `dataplane.address`, or `controller.name`), the
    one at TQ_ADDRESS, the one that another process of this Ray job uses, or else one that is started now. In a Ray
    cluster that is launched as actors, elsewhere it lives in this process, at TQ_ADDRESS for the processes that this
    one starts.

    conf: as the original's: `controller.sampler` (an instance, a class or a name), `controller.polling_mode`,
    `metrics.enabled` and `.port`. `strict_reads`: a read by key of what is not there is an error (default: it is left
    out, as the original does). `objects`: "pickle" what no column carries, which gives a service without a token one
    (default "refuse"; "pickle" in a job that TQ_REPLACE switches, unless it attaches to a service that has neither
    token nor TLS). `dataplane` has settings of `DataPlaneConfig`, for the service or how to attach;
    `backend` is not used. `controller.name`: Ray jobs that give the same name share a service, which the first of them
    starts; processes of these jobs that give no name use it, too. Settings that concern all processes are those of the
    process that starts the service, which keeps them. Each process that uses a sampler of its own class passes it here.

    Returns the merged settings where it started a service, with its address in `controller.zmq_info` and what
    `get_metrics_endpoint` says in `metrics.endpoint`, else `conf` as it is. A second call changes nothing. ValueError
    for an unknown sampler or backend, and for a name in a process that is in no Ray cluster; TypeError for settings of
    another type.
    """
    with _current.guard:
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
    """A session of the service that is named or found, or else started. given: whether somebody chose these settings,
    so that a service that has none yet may keep them. `NotInitializedError` where there is none to attach to and
    `start` is False."""
    sampler, name = sampler_of(settings.controller.sampler), settings.shared_name()
    named = settings.address() or (_environment() if name is None else None)
    found = named or (_known(name) if name is None or not start else None)
    settings.objects = settings.objects_with(found)
    if found is not None:
        session = _attached(found, sampler, kept_of(settings) if given else None)
        if named is not None and start:
            session.meeting = _shared(session)
        return session
    if not start:
        raise NotInitializedError(
            "TransferQueue is not initialized, and no service was found: start one first (in a Ray cluster, in this "
            "job), set TQ_ADDRESS, or name its address in `dataplane`"
        )
    return _met(settings, sampler, given) or _started_here(settings, sampler)


def close() -> None:
    """Leave the service, which ends if this process started it. Idempotent."""
    with _current.guard:
        session, _current.session = _current.session, None
    if session is not None:
        session.close()


def get_client() -> TransferQueueClient:
    """The client of the low-level interface. `NotInitializedError` (an AssertionError) before `init()`."""
    if _current.session is None:
        raise NotInitializedError("TransferQueue is not initialized: call init() first")
    return _current.session.client


def current_client() -> TransferQueueClient:
    """The client, which attaches to a service that is found. `NotInitializedError` where none is."""
    session = _current.session
    if session is not None:
        return session.client
    with _current.guard:
        if _current.session is None:
            found = _environment() or _known()
            if found is None:
                raise NotInitializedError(
                    "TransferQueue is not initialized, and no service was found: call init() first; one of another Ray "
                    "job is found by its `controller.name`"
                )
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


def _environment() -> DataPlaneConfig | None:
    """The service that the environment names."""
    named = DataPlaneConfig().with_environment()
    return None if named.address is None else named


def _known(name: str | None = None) -> DataPlaneConfig | None:
    """The service of this name, or of this process's job, that a rendezvous knows."""
    return next((found for place in known() if (found := place.find(name)) is not None), None)


def _shared(session: Session) -> Meeting | None:
    """Publish the service of a session that was given its address, so that processes of this job without an address
    attach to it. Returns None if the job already has a service, or if there is no rendezvous."""
    config = session.client.config
    try:
        forget = next((forget for place in known() if (forget := place.share(config)) is not None), None)
    except BaseException:
        session.close()
        raise
    return None if forget is None else Meeting(config=config, started=False, close=forget)


def _attached(
    config: DataPlaneConfig,
    sampler: BaseSampler | None,
    wished: Mapping[str, Any] | None,
    meeting: Meeting | None = None,
) -> Session:
    client = TransferQueueClient(f"TransferQueueClient_{os.getpid()}", config)
    try:
        client._performer.client.connect()
        kept = client._performer.do(client.settled, wished)
        client._own_sampler = sampler
    except BaseException:
        client.close()
        raise
    if kept is None or kept.get("objects", "refuse") == config.objects:
        if config.pickles:
            log.info("objects that no column carries are pickled, and unpickled here (objects='pickle')")
        return Session(client, meeting)
    client.close()
    return _attached(replace(client.config, objects=kept["objects"]), sampler, None, meeting)


def _met(settings: Settings, sampler: BaseSampler, given: bool) -> Session | None:
    """A service that a rendezvous knows, or starts; None where this process has no part in any."""
    wanted, wished, name = settings.service(), kept_of(settings), settings.shared_name()

    def prepare(config: DataPlaneConfig, http_address: str) -> None:
        _attached(config, sampler, {**wished, "metrics": http_address or None}).close()

    for place in known():
        meeting = place.meet(wanted, prepare, name=name)
        if meeting is not None:
            try:
                return _attached(meeting.config, sampler, wished if given else None, meeting)
            except BaseException:
                meeting.close()
                raise
    if name is not None:
        raise ValueError(
            f"controller.name={name!r} is a name in a Ray cluster, and this process is in none: call ray.init() and "
            "import ray first, or give the service's address"
        )
    return None


def _started_here(settings: Settings, sampler: BaseSampler) -> Session:
    """A service in this process, which those that it starts find."""
    wanted = settings.service()
    told: dict[str, str] = {}
    if wanted.pickles and wanted.secret() is None:
        told[ENV_TOKEN] = os.environ.get(ENV_TOKEN) or secrets.token_urlsafe(32)
        wanted = replace(wanted, token=told[ENV_TOKEN])
    server = serve(wanted)
    try:
        wished = {**kept_of(settings), "metrics": server.http_address or None}
        config = replace(wanted, address=server.address)
        session = _attached(config, sampler, wished, Meeting(config=config, started=True, close=server.close))
    except BaseException:
        server.close()
        raise
    os.environ.update(told | {ENV_ADDRESS: server.address})
    session.published = {**told, ENV_ADDRESS: server.address}
    atexit.register(session.close)
    return session
