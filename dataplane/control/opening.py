"""How a client gets its session: through the ZMQ door one port above the service's address.

Not over gRPC, because clients live in training processes, which fork (data loaders do), and gRPC does not bear that: a
process with live gRPC threads crashed in 1 to 10 of 100 plain forks (grpcio 1.85, fork support on), and with fork
support off its children cannot use gRPC at all. ZMQ has no such trouble, so parent and child use one road.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass

import zmq

from dataplane.config import DataPlaneConfig
from dataplane.control import codec, wire
from dataplane.control.resolve import resolve
from dataplane.errors import DataPlaneError, ServiceUnavailableError
from dataplane.host import boot_id, join_address, split_address
from dataplane.ledger import commands as c
from dataplane.pb import control_pb2 as pb
from dataplane.types import PROTOCOL_VERSION

IPC_WAIT_S = 1.0
"""An ipc door that does not answer in this time is not reachable from here (another network namespace)."""
REPEAT_S = 1.0

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, kw_only=True)
class Session:
    """An open session. `door` is the ZMQ endpoint for its commands."""

    number: int
    epoch: int
    units: tuple[c.UnitInfo, ...]
    address: str
    door: str
    heartbeat_s: float


def door_socket(context: zmq.Context[Socket], endpoint: str) -> Socket:
    """A socket that talks to a controller's ZMQ door."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.set(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    if "[" in endpoint:
        dealer.set(zmq.IPV6, 1)
    dealer.connect(endpoint)
    return dealer


def open_session(config: DataPlaneConfig, context: zmq.Context[Socket]) -> tuple[Session, Socket]:
    """The session, and the socket that its heartbeats are to go through: blocks for `config.connect_timeout_s` at most.

    Raises `ServiceUnavailableError` (at once where nothing listens), `AuthenticationError`, `ProtocolVersionError`,
    ValueError for a config without an address.
    """
    if not config.address:
        raise ValueError("no address of a data plane service: pass one, set config.address or TQ_ADDRESS")
    deadline = time.monotonic() + config.connect_timeout_s
    address = resolve(config.address)
    door = door_address(address)
    probe(address, config.connect_timeout_s)
    dealer = door_socket(context, f"tcp://{door}")
    try:
        opened = _ask(dealer, config, address, deadline)
        endpoint, dealer = _nearest(dealer, opened, config, context, door)
    except BaseException:
        dealer.close()
        raise
    value: c.Opened = codec.from_pb(c.Opened, opened)
    heartbeat_s = min(opened.heartbeat_s or config.heartbeat_s, config.heartbeat_s)
    session = Session(
        number=value.session,
        epoch=value.epoch,
        units=value.units,
        address=address,
        door=endpoint,
        heartbeat_s=heartbeat_s,
    )
    return session, dealer


def door_address(address: str) -> str:
    """Where the ZMQ door of the service at `address` is: one port above."""
    host, port = split_address(address)
    return join_address(host, port + 1)


def probe(address: str, timeout_s: float) -> None:
    """`ServiceUnavailableError` unless something listens at the door of `address`."""
    door = door_address(address)
    try:
        socket.create_connection(split_address(door), timeout=timeout_s).close()
    except OSError as error:
        why = f"connecting to its ZMQ door {door}: {error.strerror or error}"
        raise ServiceUnavailableError(address=address, why=why) from error


def ask_epoch(address: str, session: int, token: str | None, context: zmq.Context[Socket], timeout_s: float) -> int:
    """The epoch of the service that answers at `address` now. `ServiceUnavailableError` if none does."""
    probe(address, timeout_s)
    dealer = door_socket(context, f"tcp://{door_address(address)}")
    try:
        dealer.send_multipart(wire.request(c.Heartbeat(session=session), (token or "").encode()))
        if not dealer.poll(int(timeout_s * 1000)):
            raise ServiceUnavailableError(address=address, why=f"it did not answer within {timeout_s:.1f} s")
        return pb.HeartbeatReply.FromString(_reply(dealer, address).good_body()).epoch
    finally:
        dealer.close()


def _ask(dealer: Socket, config: DataPlaneConfig, address: str, deadline: float) -> pb.Opened:
    name = config.client_name or f"{socket.gethostname()}:{os.getpid()}"
    wanted = c.OpenSession(nonce=secrets.token_hex(16), host=boot_id(), name=name, protocol_version=PROTOCOL_VERSION)
    frames = wire.request(wanted, (config.secret() or "").encode())
    while (left_s := deadline - time.monotonic()) > 0:
        dealer.send_multipart(frames)
        if dealer.poll(int(min(left_s, REPEAT_S) * 1000) + 1):
            return pb.Opened.FromString(_reply(dealer, address).good_body())
    why = f"something listens, but nothing answered within {config.connect_timeout_s:.1f} s"
    raise ServiceUnavailableError(address=address, why=why)


def _reply(dealer: Socket, address: str) -> wire.Reply:
    try:
        return wire.Reply.parse(dealer.recv_multipart())
    except DataPlaneError as error:
        raise ServiceUnavailableError(address=address, why="what answers is no data plane service") from error


def _nearest(
    dealer: Socket, opened: pb.Opened, config: DataPlaneConfig, context: zmq.Context[Socket], door: str
) -> tuple[str, Socket]:
    """The best door that works from here, and a socket to it on which the session's heartbeat was answered."""
    beat = wire.request(c.Heartbeat(session=opened.session), (config.secret() or "").encode())
    if opened.host == boot_id():
        for endpoint in (each for each in opened.doors if each.startswith("ipc://")):
            near = door_socket(context, endpoint)
            near.send_multipart(beat)
            if near.poll(int(IPC_WAIT_S * 1000)):
                near.recv_multipart()
                dealer.close()
                return endpoint, near
            near.close()
    dealer.send_multipart(beat)
    return f"tcp://{door}", dealer
