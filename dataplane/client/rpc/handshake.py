"""How a client gets its session, and how it goes on with it: through the ZMQ server one port above the service's
address.

Not over gRPC, because clients live in training processes, which fork (data loaders do), and gRPC does not bear that: a
process with live gRPC threads crashed in 1 to 10 of 100 plain forks (grpcio 1.85, fork support on), and with fork
support off its children cannot use gRPC at all. ZMQ has no such trouble, so parent and child both use it.

First of all the client asks the gRPC server, in the one small call that `http2` makes, to prove that it is the service,
and for the keys of the ZMQ servers.
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
from google.protobuf.message import DecodeError

from dataplane.config import PUT_TIMEOUT_S, DataPlaneConfig
from dataplane.core.addresses import boot_id, dial, join_address, split_address
from dataplane.core.failpoints import hit
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    AuthenticationError,
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    ProtocolVersionError,
    ServiceRestartedError,
    ServiceUnavailableError,
    TlsError,
)
from dataplane.ledger import commands as c
from dataplane.protocol import codec, zmq_frames
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.resolver import resolve
from dataplane.protocol.server_keys import OPEN, SILENT, ConnectionKeys, keys_of, unreached
from dataplane.protocol.zap import present

log = logging.getLogger(__name__)

IPC_WAIT_S = 1.0
"""An ipc endpoint that does not answer in this time is not reachable from here (another network namespace)."""
REPEAT_S = 0.5
GO_ON_S = 2.0
"""How long each step of finding the service again may take; then it is tried again."""
LOOK_S = 0.1
"""How soon someone who waits for an answer looks whether it is still wanted."""

_NO_SERVICE = "what answers is no data plane service"

Socket = zmq.Socket[bytes]


class _ChangedError(Exception):
    """The zmq_address does not take the keys that the service gave out just now: it has been started anew since."""


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """An open session. `endpoint` is the ZMQ endpoint for its commands, `keys` what that wants; `nonce` finds it again;
    `durable`: the service keeps it over a restart; `put_timeout_s`: how long it has puts wait for space."""

    number: int
    epoch: int
    units: tuple[c.UnitInfo, ...]
    address: str
    endpoint: str
    heartbeat_s: float
    nonce: str
    durable: bool
    keys: ConnectionKeys = OPEN
    put_timeout_s: float = PUT_TIMEOUT_S


def dealer_socket(context: zmq.Context[Socket], endpoint: str, keys: ConnectionKeys = OPEN) -> Socket:
    """A socket that talks to a controller's ZMQ server."""
    dealer = _dealer(context, endpoint, keys)
    dealer.connect(endpoint)
    return dealer


def _dealer(context: zmq.Context[Socket], endpoint: str, keys: ConnectionKeys) -> Socket:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.set(zmq.MAXMSGSIZE, zmq_frames.MAX_FRAME_BYTES)
    present(dealer, keys.ticket, keys.curve_key)
    if "[" in endpoint:
        dealer.set(zmq.IPV6, 1)
    return dealer


def open_session(
    config: DataPlaneConfig, context: zmq.Context[Socket], lock_path: str = ""
) -> tuple[OpenedSession, Socket]:
    """The session, and the socket that its heartbeats are to go through: blocks for `config.connect_timeout_s` at most.

    lock_path: of the lock that the process holds if it may use shared memory.
    Raises `ServiceUnavailableError` (at once where nothing listens), `AuthenticationError`, `ProtocolVersionError`,
    `TlsError` where one end speaks TLS and the other does not or does not like the other's certificate, ValueError for
    a config without an address or with files for TLS that cannot be used.
    """
    if not config.address:
        raise ValueError("no address of a data plane service: pass one, set config.address or TQ_ADDRESS")
    wanted = msgspec.structs.replace(_wanted(config, secrets.token_hex(16)), lock_path=lock_path)
    hit("session.before_open")
    opened = _enter(config, context, resolve(config.address), wanted, config.connect_timeout_s, lambda: False)
    hit("session.opened")
    return opened


def go_on(
    config: DataPlaneConfig, context: zmq.Context[Socket], session: OpenedSession, given_up: Callable[[], bool]
) -> tuple[OpenedSession, Socket]:
    """The same session, of whoever answers at `config.address` now, and a socket as `open_session` gives. Blocks for a
    few times `GO_ON_S` at most, and no longer than the address takes to resolve once `given_up()`.

    Raises `ServiceUnavailableError` while there is no service, also where somebody else has taken its place,
    `ServiceRestartedError` from one that does not have the session's state, `SessionExpiredError`, `ClientClosedError`
    once `given_up()`.
    """
    assert config.address is not None
    wanted = _wanted(config, session.nonce, session.number, session.epoch)
    address = _resolve_again(config.address)
    try:
        found, dealer = _enter(config, context, address, wanted, GO_ON_S, given_up)
    except ServiceRestartedError as error:
        raise ServiceRestartedError(**{**error.facts, "what": f"the service at {address}"}) from None
    except (AuthenticationError, ProtocolVersionError, TlsError) as error:
        raise ServiceUnavailableError(address=address, why=str(error)) from error
    if found.number != session.number or found.epoch < session.epoch:
        dealer.close()
        raise ServiceRestartedError(
            expected_epoch=session.epoch,
            got_epoch=found.epoch,
            what=f"the service at {address}",
            lost=f"what session {session.number} did",
        )
    return found, dealer


def _wanted(config: DataPlaneConfig, nonce: str, session: int = 0, epoch: int = 0) -> c.OpenSession:
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
    try:
        return resolve(address)
    except ServiceUnavailableError:
        raise
    except Exception as error:
        raise ServiceUnavailableError(address=address, why=f"the address cannot be resolved: {error!r}") from error


def _enter(
    config: DataPlaneConfig,
    context: zmq.Context[Socket],
    address: str,
    wanted: c.OpenSession,
    timeout_s: float,
    given_up: Callable[[], bool],
) -> tuple[OpenedSession, Socket]:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _enter_once(config, context, address, wanted, deadline, given_up)
        except _ChangedError:
            log.info("the service at %s was started anew while a client connected", address)


def _enter_once(
    config: DataPlaneConfig,
    context: zmq.Context[Socket],
    address: str,
    wanted: c.OpenSession,
    deadline: float,
    given_up: Callable[[], bool],
) -> tuple[OpenedSession, Socket]:
    def check() -> None:
        if given_up():
            raise ClientClosedError()

    keys = keys_of(address, config.secret(), config.tls, deadline=deadline, check=check)
    zmq_address = zmq_address_of(keys.address)
    probe(address, zmq_address, max(deadline - time.monotonic(), LOOK_S))
    dealer = _dealer(context, f"tcp://{zmq_address}", keys)
    try:
        with _refusals(dealer) as refused:
            dealer.connect(f"tcp://{zmq_address}")
            reply = _ask(dealer, refused, zmq_frames.request(wanted), address, zmq_address, deadline, check)
        opened, value = _opened(reply.good_body(), address)
        endpoint, dealer = _nearest(dealer, opened, keys, context, zmq_address)
    except BaseException:
        dealer.close()
        raise
    session = OpenedSession(
        number=value.session,
        epoch=value.epoch,
        units=value.units,
        address=address,
        endpoint=endpoint,
        heartbeat_s=min(opened.heartbeat_s or config.heartbeat_s, config.heartbeat_s),
        nonce=wanted.nonce,
        durable=opened.durable,
        keys=keys,
        put_timeout_s=opened.put_timeout_s,
    )
    return session, dealer


def _opened(body: bytes, address: str) -> tuple[pb.Opened, c.Opened]:
    try:
        opened = pb.Opened.FromString(body)
        return opened, codec.from_pb(c.Opened, opened)
    except (DecodeError, InvalidRequestError) as error:
        raise ServiceUnavailableError(address=address, why=_NO_SERVICE) from error


def is_slow(error: ServiceUnavailableError) -> bool:
    """Whether there may be a service that only did not answer in time: nobody said that there is none."""
    return isinstance(error.__cause__, TimeoutError)


def zmq_address_of(address: str) -> str:
    """Where the ZMQ server of the service at `address` is: one port above."""
    host, port = split_address(address)
    return join_address(host, port + 1)


def probe(address: str, zmq_address: str, timeout_s: float) -> None:
    """`ServiceUnavailableError` unless something listens at `zmq_address`, the ZMQ server of the service at
    `address`."""
    try:
        dial(zmq_address, timeout_s).close()
    except OSError as error:
        raise unreached(address, f"its ZMQ server {zmq_address}", error) from error


@contextlib.contextmanager
def _refusals(dealer: Socket) -> Iterator[Socket]:
    """A socket that becomes readable when what `dealer` will connect to does not take its keys."""
    event = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    monitor = dealer.get_monitor_socket(event, f"inproc://tq-refused-{secrets.token_hex(8)}")
    try:
        yield monitor
    finally:
        dealer.disable_monitor()
        monitor.close(linger=0)


def _ask(
    dealer: Socket,
    refused: Socket,
    frames: list[bytes],
    address: str,
    zmq_address: str,
    deadline: float,
    check: Callable[[], None],
) -> zmq_frames.Reply:
    """What answers, asked again after each `REPEAT_S` while something listens."""
    began = time.monotonic()
    repeat_at = began
    while (now := time.monotonic()) < deadline:
        check()
        if now >= repeat_at:
            if now > began:
                probe(address, zmq_address, deadline - now)
            # What refuses this client's keys may have hung up by now, and then nothing takes the message.
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(frames, zmq.NOBLOCK)
            repeat_at = now + REPEAT_S
        timeout_ms = int(min(deadline - now, repeat_at - now, LOOK_S) * 1000) + 1
        ready = dict(zmq.zmq_poll([(dealer, zmq.POLLIN), (refused, zmq.POLLIN)], timeout_ms))
        if dealer in ready:
            return _reply(dealer, address)
        if refused in ready:
            raise _ChangedError
    why = f"something listens, but it does not answer in time; {SILENT}"
    raise ServiceUnavailableError(address=address, why=why) from TimeoutError(why)


def _reply(dealer: Socket, address: str) -> zmq_frames.Reply:
    try:
        return zmq_frames.Reply.parse(dealer.recv_multipart())
    except DataPlaneError as error:
        raise ServiceUnavailableError(address=address, why=_NO_SERVICE) from error


def _nearest(
    dealer: Socket, opened: pb.Opened, keys: ConnectionKeys, context: zmq.Context[Socket], zmq_address: str
) -> tuple[str, Socket]:
    """The best zmq_address that works from here, and a socket to it on which the session's heartbeat was answered."""
    beat = zmq_frames.request(c.Heartbeat(session=opened.session))
    if opened.host == boot_id():
        for endpoint in (each for each in opened.endpoints if each.startswith("ipc://")):
            near = dealer_socket(context, endpoint, keys)
            _beat_once(near, beat)
            if near.poll(int(IPC_WAIT_S * 1000)):
                near.recv_multipart()
                dealer.close()
                return endpoint, near
            near.close()
    _beat_once(dealer, beat)
    return f"tcp://{zmq_address}", dealer


def _beat_once(dealer: Socket, beat: list[bytes]) -> None:
    """Nothing is sent where the connection was refused; the next heartbeats find that out."""
    with contextlib.suppress(zmq.Again):
        dealer.send_multipart(beat, zmq.NOBLOCK)
