"""Open or resume a session through the ZMQ server, one port above the service's gRPC address.

This does not use gRPC, because clients live in training processes that fork (for example in data loaders), and gRPC
does not support that: a process with active gRPC threads crashed in 1 to 10 of 100 plain forks (grpcio 1.85, fork
support on), and with fork support off, its children cannot use gRPC at all. ZMQ has no such problem, so parent and
child both use it.

Before that, the client makes one small call to the gRPC server with `http2`: the server proves its identity and
returns the keys of the ZMQ servers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import zmq

from dataplane.config import PUT_TIMEOUT_S, DataPlaneConfig
from dataplane.core.addresses import boot_id, resolve
from dataplane.core.failpoints import failpoint
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    AuthenticationError,
    ClientClosedError,
    DataPlaneError,
    InternalError,
    ProtocolVersionError,
    ServiceRestartedError,
    ServiceUnavailableError,
    TlsError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import Socket, dealer_socket, probe, unconnected_dealer, zmq_address_of
from dataplane.protocol.server_keys import OPEN, SILENT, ConnectionKeys, keys_of

log = logging.getLogger(__name__)

IPC_WAIT_S = 1.0
"""An ipc endpoint that does not respond in this time is unreachable (another network namespace)."""
REPEAT_S = 0.5
"""Interval at which an unanswered request to open a session is resent."""
RESUME_STEP_S = 2.0
"""Timeout of each step of a reconnection attempt."""
LOOK_S = 0.1
"""Interval of the checks whether a pending connection attempt is still wanted."""

_NO_SERVICE = "the server at this address is not a data plane service; check host and port"


class _KeysChangedError(Exception):
    """The ZMQ server rejects the keys that the service has just issued: the service restarted in between. Only within
    this module."""


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """An open session. `endpoint` is the ZMQ endpoint for its commands and `keys` are the keys for it. `nonce`
    identifies the session when it is resumed. `durable`: the service keeps the session across a restart.
    `put_timeout_s`: default time that puts wait for space."""

    session_id: int
    epoch: int
    units: tuple[c.UnitInfo, ...]
    address: str
    endpoint: str
    heartbeat_s: float
    nonce: str
    durable: bool
    keys: ConnectionKeys = OPEN
    put_timeout_s: float = PUT_TIMEOUT_S


def open_session(
    config: DataPlaneConfig, context: zmq.Context[Socket], lock_path: str = ""
) -> tuple[OpenedSession, Socket]:
    """Return a new session and the socket for its heartbeats. Block for at most `config.connect_timeout_s`.

    lock_path: path of the lock that the process holds if it may use shared memory. Raise `ServiceUnavailableError`
    (immediately if the port is closed), `AuthenticationError`, `ProtocolVersionError`, `TlsError` if only one side
    uses TLS or a certificate is rejected, ValueError for a config without an address or with unusable TLS files.
    """
    if not config.address:
        raise ValueError(
            "no address of a data plane service was given: pass an address, or set config.address or TQ_ADDRESS"
        )
    command = msgspec.structs.replace(_open_command(config, secrets.token_hex(16)), lock_path=lock_path)
    failpoint("session.before_open")
    opened = _connect(
        config, context, resolve(config.address), command, config.connect_timeout_s, given_up=lambda: False
    )
    failpoint("session.opened")
    return opened


def resume_session(
    config: DataPlaneConfig, context: zmq.Context[Socket], session: OpenedSession, given_up: Callable[[], bool]
) -> tuple[OpenedSession, Socket]:
    """Resume the session at the service that currently responds at `config.address`. Return it with a socket, as
    `open_session` does. Block for at most a few times `RESUME_STEP_S`; once `given_up()` returns True, no longer than
    the resolution of the address takes.

    Raise `ServiceUnavailableError` if no service responds or another program uses the address,
    `ServiceRestartedError` if the service does not have the session's state, `SessionExpiredError`,
    `ClientClosedError` once `given_up()` returns True.
    """
    assert config.address is not None
    command = _open_command(config, session.nonce, session.session_id, session.epoch)
    address = _resolve_again(config.address)
    try:
        resumed, dealer = _connect(config, context, address, command, RESUME_STEP_S, given_up)
    except ServiceRestartedError as error:
        raise ServiceRestartedError(**{**error.facts, "what": f"the service at {address}"}) from None
    except (AuthenticationError, ProtocolVersionError, TlsError) as error:
        # Not the service of this session: another one uses its address for now.
        raise ServiceUnavailableError(address=address, why=str(error)) from error
    # Epochs of a service only grow: a lower one means that it was started from an older state.
    if resumed.session_id != session.session_id or resumed.epoch < session.epoch:
        dealer.close()
        raise ServiceRestartedError(
            expected_epoch=session.epoch,
            got_epoch=resumed.epoch,
            what=f"the service at {address}",
            lost=f"all work of session {session.session_id}",
        )
    return resumed, dealer


def _open_command(config: DataPlaneConfig, nonce: str, session: int = 0, epoch: int = 0) -> c.OpenSession:
    """Return the command that opens a session, or resumes the session with this id (0: a new session). epoch: that
    of the service at the last connection of the session."""
    name = config.client_name or f"{socket.gethostname()}:{os.getpid()}"
    return c.OpenSession(
        nonce=nonce,
        host=boot_id(),
        name=name,
        protocol_version=PROTOCOL_VERSION,
        session=session,
        epoch=epoch,
    )


def _resolve_again(address: str) -> str:
    """Resolve the address. Raise `ServiceUnavailableError` for every failure, so that the client retries."""
    try:
        return resolve(address)
    except ServiceUnavailableError:
        raise
    except Exception as error:
        raise ServiceUnavailableError(address=address, why=f"the address cannot be resolved: {error!r}") from error


def _connect(
    config: DataPlaneConfig,
    context: zmq.Context[Socket],
    address: str,
    command: c.OpenSession,
    timeout_s: float,
    given_up: Callable[[], bool],
) -> tuple[OpenedSession, Socket]:
    """Send `command` to open or resume a session, for up to `timeout_s`. Start over if the service restarts in
    between. given_up: returns True once the result is no longer wanted."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _connect_once(config, context, address, command, deadline, given_up)
        except _KeysChangedError:
            log.info("Service at %s restarted during a connection attempt; retrying", address)


def _connect_once(
    config: DataPlaneConfig,
    context: zmq.Context[Socket],
    address: str,
    command: c.OpenSession,
    deadline: float,
    given_up: Callable[[], bool],
) -> tuple[OpenedSession, Socket]:
    """Fetch the keys, connect to the ZMQ server and open or resume the session. Raise `_KeysChangedError` if that
    server rejects the keys."""

    def check() -> None:
        if given_up():
            raise ClientClosedError()

    keys = keys_of(address, config.secret(), config.tls, deadline=deadline, check=check)
    zmq_address = zmq_address_of(keys.address)
    probe(address, zmq_address, max(deadline - time.monotonic(), LOOK_S))  # briefly, even at the deadline
    dealer = unconnected_dealer(context, f"tcp://{zmq_address}", keys)
    try:
        with _rejection_monitor(dealer) as monitor:
            dealer.connect(f"tcp://{zmq_address}")
            reply = _request_reply(dealer, monitor, zmq_frames.request(command), address, zmq_address, deadline, check)
        welcome = _welcome(reply.good_body(), address)  # `good_body` raises the error of a rejection
        endpoint, dealer = _choose_endpoint(dealer, welcome, keys, context, zmq_address)
    except BaseException:
        dealer.close()
        raise
    session = OpenedSession(
        session_id=welcome.opened.session,
        epoch=welcome.opened.epoch,
        units=welcome.opened.units,
        address=address,
        endpoint=endpoint,
        heartbeat_s=min(welcome.heartbeat_s, config.heartbeat_s),
        nonce=command.nonce,
        durable=welcome.durable,
        keys=keys,
        put_timeout_s=welcome.put_timeout_s,
    )
    return session, dealer


def _welcome(body: msgspec.Raw, address: str) -> zmq_frames.Welcome:
    """Return the reply to an OpenSession. Raise `ServiceUnavailableError` if it is something else."""
    try:
        welcome: zmq_frames.Welcome = messages.decode_with(zmq_frames.WELCOME, body)
    except InternalError as error:
        raise ServiceUnavailableError(address=address, why=_NO_SERVICE) from error
    return welcome


def is_slow(error: ServiceUnavailableError) -> bool:
    """Return whether a service may exist that did not respond in time, i.e. the connection was not refused."""
    return isinstance(error.__cause__, TimeoutError)


@contextlib.contextmanager
def _rejection_monitor(dealer: Socket) -> Iterator[Socket]:
    """Yield a socket that becomes readable when the server of `dealer` rejects its keys."""
    event = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    monitor = dealer.get_monitor_socket(event, f"inproc://tq-refused-{secrets.token_hex(8)}")
    try:
        yield monitor
    finally:
        dealer.disable_monitor()
        monitor.close(linger=0)


def _request_reply(
    dealer: Socket,
    monitor: Socket,
    frames: list[bytes],
    address: str,
    zmq_address: str,
    deadline: float,
    check: Callable[[], None],
) -> zmq_frames.Reply:
    """Send the request and return the reply; resend it every `REPEAT_S` while a server listens. monitor: see
    `_rejection_monitor`; if it becomes readable, raise `_KeysChangedError`. check: called often; may raise an error to
    end the wait."""
    began = time.monotonic()
    repeat_at = began
    while (now := time.monotonic()) < deadline:
        check()
        if now >= repeat_at:
            if now > began:  # before the first request, the caller has probed
                probe(address, zmq_address, deadline - now)
            # A server that rejects the keys may have disconnected already; then the message cannot be sent.
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(frames, zmq.NOBLOCK)
            repeat_at = now + REPEAT_S
        timeout_ms = int(min(deadline - now, repeat_at - now, LOOK_S) * 1000) + 1
        ready = dict(zmq.zmq_poll([(dealer, zmq.POLLIN), (monitor, zmq.POLLIN)], timeout_ms))
        if dealer in ready:
            return _receive_reply(dealer, address)
        if monitor in ready:
            raise _KeysChangedError
    why = f"a server listens, but it does not answer in time; {SILENT}"
    raise ServiceUnavailableError(address=address, why=why) from TimeoutError(why)  # the cause: see `is_slow`


def _receive_reply(dealer: Socket, address: str) -> zmq_frames.Reply:
    try:
        return zmq_frames.Reply.parse(dealer.recv_multipart())[0]  # others answer resends
    except DataPlaneError as error:
        raise ServiceUnavailableError(address=address, why=_NO_SERVICE) from error


def _choose_endpoint(
    dealer: Socket, welcome: zmq_frames.Welcome, keys: ConnectionKeys, context: zmq.Context[Socket], zmq_address: str
) -> tuple[str, Socket]:
    """Return the best endpoint that works from this process, and a socket to it on which a heartbeat of the session was
    sent. An ipc endpoint is used only if it answers the heartbeat; `dealer`, the TCP socket, is then closed."""
    heartbeat = zmq_frames.request(c.Heartbeat(session=welcome.opened.session))
    if welcome.host == boot_id():  # the service runs on this host
        for endpoint in (each for each in welcome.endpoints if each.startswith("ipc://")):
            ipc_dealer = dealer_socket(context, endpoint, keys)
            _send_heartbeat(ipc_dealer, heartbeat)
            if ipc_dealer.poll(int(IPC_WAIT_S * 1000)):
                ipc_dealer.recv_multipart()
                dealer.close()
                return endpoint, ipc_dealer
            ipc_dealer.close()
    _send_heartbeat(dealer, heartbeat)
    return f"tcp://{zmq_address}", dealer


def _send_heartbeat(dealer: Socket, heartbeat: list[bytes]) -> None:
    """Send one heartbeat. If the connection was rejected, nothing is sent; later heartbeats detect that."""
    with contextlib.suppress(zmq.Again):
        dealer.send_multipart(heartbeat, zmq.NOBLOCK)
