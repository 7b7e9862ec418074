"""Open or resume a session through the controller's ZMQ server.

No client imports gRPC, because clients live in training processes that fork (for example in data loaders), and gRPC
does not support that: a process with active gRPC threads crashed in 1 to 10 of 100 plain forks (grpcio 1.85, fork
support on), and with fork support off, its children cannot use gRPC at all. ZMQ has no such problem, so parent and
child both use it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
)
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import (
    FAILED,
    REJECTIONS,
    Socket,
    dealer_socket,
    is_rejected,
    unconnected_dealer,
    wrong_token,
)
from dataplane.protocol.greeting import NO_SERVICE, SILENT, keeps_connections, reach

log = logging.getLogger(__name__)

IPC_WAIT_S = 1.0
"""An ipc endpoint that does not respond in this time is unreachable (another network namespace)."""
REPEAT_S = 0.5
"""Interval at which an unanswered request to open a session is resent."""
RESUME_STEP_S = 2.0
"""Timeout of each step of a reconnection attempt."""
LOOK_S = 0.1
"""Interval of the checks whether a pending connection attempt is still wanted."""


class _HandshakeFailedError(Exception):
    """The ZMQ server ended the handshake after `took_s` seconds. Only within this module."""

    def __init__(self, took_s: float) -> None:
        super().__init__()
        self.took_s = took_s


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """An open session. `endpoint` is the ZMQ endpoint for its commands, and `token` that of the service. `nonce`
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
    token: str | None = field(default=None, repr=False)
    put_timeout_s: float = PUT_TIMEOUT_S


def open_session(
    config: DataPlaneConfig, context: zmq.Context[Socket], lock_path: str = ""
) -> tuple[OpenedSession, Socket]:
    """Return a new session and the socket for its heartbeats. Block for at most `config.connect_timeout_s`.

    lock_path: path of the lock that the process holds if it may use shared memory. Raise `ServiceUnavailableError`
    (immediately if the port is closed), `AuthenticationError`, `ProtocolVersionError`, ValueError for a config without
    an address.
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
    except (AuthenticationError, ProtocolVersionError) as error:
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
    """Send `command` to open or resume a session, for up to `timeout_s`. given_up: returns True once the result is no
    longer wanted. Raise `AuthenticationError` if the service rejects the token twice: once may be due to a restart."""
    deadline = time.monotonic() + timeout_s
    rejected = 0
    while True:
        try:
            return _connect_once(config, context, address, command, deadline, given_up)
        except _HandshakeFailedError as error:
            rejected += is_rejected(error.took_s) and keeps_connections(address, lambda: None)
            if rejected == REJECTIONS:
                raise wrong_token(address) from None
            log.info("Service at %s ended a handshake; connecting again", address)


def _connect_once(
    config: DataPlaneConfig,
    context: zmq.Context[Socket],
    address: str,
    command: c.OpenSession,
    deadline: float,
    given_up: Callable[[], bool],
) -> tuple[OpenedSession, Socket]:
    """Connect to the ZMQ server and open or resume the session. Raise `_HandshakeFailedError` if that server ends the
    handshake."""

    def check() -> None:
        if given_up():
            raise ClientClosedError()

    token = config.secret()
    endpoint = f"tcp://{reach(address, token, deadline, check)}"
    dealer = unconnected_dealer(context, endpoint, token)
    try:
        with _failure_monitor(dealer) as monitor:
            dealer.connect(endpoint)
            reply = _request_reply(dealer, monitor, zmq_frames.request(command), address, deadline, check)
        welcome = _welcome(reply.good_body(), address)  # `good_body` raises the error of a rejection
        endpoint, dealer = _choose_endpoint(dealer, welcome, token, context, endpoint)
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
        token=token,
        put_timeout_s=welcome.put_timeout_s,
    )
    return session, dealer


def _welcome(body: msgspec.Raw, address: str) -> zmq_frames.Welcome:
    """Return the reply to an OpenSession. Raise `ServiceUnavailableError` if it is something else."""
    try:
        welcome: zmq_frames.Welcome = messages.decode_with(zmq_frames.WELCOME, body)
    except InternalError as error:
        raise ServiceUnavailableError(address=address, why=NO_SERVICE) from error
    return welcome


def is_slow(error: ServiceUnavailableError) -> bool:
    """Return whether a service may exist that did not respond in time, i.e. the connection was not refused."""
    return isinstance(error.__cause__, TimeoutError)


@contextlib.contextmanager
def _failure_monitor(dealer: Socket) -> Iterator[Socket]:
    """Yield a socket that becomes readable when the handshake of `dealer` fails."""
    monitor = dealer.get_monitor_socket(FAILED, f"inproc://tq-failed-{secrets.token_hex(8)}")
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
    deadline: float,
    check: Callable[[], None],
) -> zmq_frames.Reply:
    """Send the request and return the reply; resend it every `REPEAT_S`. monitor: see `_failure_monitor`; if it becomes
    readable, raise `_HandshakeFailedError`. check: called often; may raise an error to end the wait."""
    began = time.monotonic()
    repeat_at = began
    while (now := time.monotonic()) < deadline:
        check()
        if now >= repeat_at:
            # A server that ended the handshake may have disconnected already; then the message cannot be sent.
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(frames, zmq.NOBLOCK)
            repeat_at = now + REPEAT_S
        timeout_ms = int(min(deadline - now, repeat_at - now, LOOK_S) * 1000) + 1
        ready = dict(zmq.zmq_poll([(dealer, zmq.POLLIN), (monitor, zmq.POLLIN)], timeout_ms))
        if dealer in ready:
            return _receive_reply(dealer, address)
        if monitor in ready:
            raise _HandshakeFailedError(time.monotonic() - began)
    why = f"a server listens, but it does not answer in time; {SILENT}"
    raise ServiceUnavailableError(address=address, why=why) from TimeoutError(why)  # the cause: see `is_slow`


def _receive_reply(dealer: Socket, address: str) -> zmq_frames.Reply:
    try:
        return zmq_frames.Reply.parse(dealer.recv_multipart())[0]  # others answer resends
    except DataPlaneError as error:
        raise ServiceUnavailableError(address=address, why=NO_SERVICE) from error


def _choose_endpoint(
    dealer: Socket, welcome: zmq_frames.Welcome, token: str | None, context: zmq.Context[Socket], tcp_endpoint: str
) -> tuple[str, Socket]:
    """Return the best endpoint that works from this process, and a socket to it on which a heartbeat of the session was
    sent. An ipc endpoint is used only if it answers the heartbeat; `dealer`, the TCP socket, is then closed."""
    heartbeat = zmq_frames.request(c.Heartbeat(session=welcome.opened.session))
    if welcome.host == boot_id():  # the service runs on this host
        for endpoint in (each for each in welcome.endpoints if each.startswith("ipc://")):
            ipc_dealer = dealer_socket(context, endpoint, token)
            _send_heartbeat(ipc_dealer, heartbeat)
            if ipc_dealer.poll(int(IPC_WAIT_S * 1000)):
                ipc_dealer.recv_multipart()
                dealer.close()
                return endpoint, ipc_dealer
            ipc_dealer.close()
    _send_heartbeat(dealer, heartbeat)
    return tcp_endpoint, dealer


def _send_heartbeat(dealer: Socket, heartbeat: list[bytes]) -> None:
    """Send one heartbeat. If the connection was rejected, nothing is sent; later heartbeats detect that."""
    with contextlib.suppress(zmq.Again):
        dealer.send_multipart(heartbeat, zmq.NOBLOCK)
