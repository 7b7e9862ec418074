"""What the ZMQ servers of a service want of a client, and how a client comes to know it.

One small call to the gRPC server, before anything else is sent: the service proves that it knows the secret. The call
is made without gRPC (see `client.rpc.handshake`), and carries no body: what the service takes from strangers fits in
its headers.
"""

from __future__ import annotations

import hmac
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from dataplane.config import TlsFiles
from dataplane.core.addresses import dial, dialed, split_address
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    AuthenticationError,
    DataPlaneError,
    ProtocolVersionError,
    ServiceUnavailableError,
    from_wire,
)
from dataplane.protocol import http2, tls
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.proof import NONCE_BYTES, Ticket, proof_of

METHOD = "/tq.v1.Control/GetKeys"
SILENT = "see that its process is not stopped, nor its machine too busy"
"""What to do about a service that does not answer."""
BUSY_S = 0.2
"""When a service that was too busy to answer is asked again."""
HANGS_UP = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, http2.HungUpError)
"""Errors of a connection that the other end closes before it says anything."""
HANDSHAKE_S = 10.0
"""A service hangs up on a client that has not begun its call so long after it connected."""
NONCE_KEY = "tq-nonce"
VERSION_KEY = "tq-protocol-version"
"""Metadata of that call: what the proof is to be for, in hex, and the client's version of the protocol."""


@dataclass(frozen=True, kw_only=True)
class ConnectionKeys:
    """curve_key: the controller's public one; "": its endpoints do not encrypt. ticket: for this instance of the
    controller. secret: what tickets are derived from, storage units' too; "": the service has none. address: of the
    service in numbers: of several addresses that its host's name has, the one that it answers at. service: a name of
    its state, which it keeps with that."""

    curve_key: str = field(default="", repr=False)
    ticket: Ticket | None = None
    secret: str = field(default="", repr=False)
    address: str = ""
    service: str = ""


OPEN = ConnectionKeys()
"""Of a service without token and TLS."""


def keys_of(
    address: str,
    token: str | None,
    files: TlsFiles | None,
    *,
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> ConnectionKeys:
    """Of the service at `address`, once it has proved that it knows the token, until `deadline` (of `time.monotonic`)
    at the latest. `check` is called now and then and may raise. Raises `ServiceUnavailableError` (at once where
    nothing listens), `TlsError`, `AuthenticationError`, `ProtocolVersionError`, ValueError for files that cannot be
    used."""

    def rest() -> float:
        check()
        return deadline - time.monotonic()

    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        body, reached = _ask_until(address, files, nonce, rest)
        answer = pb.Keys.FromString(body)
    except DataPlaneError:
        raise
    except TimeoutError as error:
        if error.errno is not None:
            raise unreached(address, "it", error) from error
        raise _unavailable(address, f"something listens, but {error}") from error
    except ssl.SSLError as error:
        raise tls.refusal(address, error, files) or _unavailable(address, f"the connection broke: {error}") from error
    except OSError as error:
        raise unreached(address, "it", error) from error
    except http2.Http2Error as error:
        raise tls.diagnose(address, files) or _unavailable(address, str(error)) from error
    except DecodeError as error:
        raise _unavailable(address, "what answers is no data plane service") from error
    if answer.HasField("error"):
        told = from_wire(answer.error.name, answer.error.facts)
        # Nothing is proved yet: of errors only that one is believed.
        raise told if isinstance(told, ProtocolVersionError) else _unavailable(address, f"it gives no keys: {told}")
    secret = _proven(answer, token, files is not None, address, nonce)
    ticket = Ticket.of(secret, answer.instance)
    return ConnectionKeys(
        curve_key=answer.curve_key, ticket=ticket, secret=secret, address=reached, service=answer.service
    )


def _proven(answer: pb.Keys, token: str | None, secure: bool, address: str, nonce: bytes) -> str:
    """The secret of the service, which has proved that it knows it. `AuthenticationError` if it has not."""
    # A secret that comes without TLS comes from no service.
    secret = token or (answer.secret if secure else "")
    if not secret and not answer.proof:
        return ""
    peer = f"the controller at {address}"
    if not secret:
        raise AuthenticationError(peer=peer, why="no token was given")
    if not answer.proof:
        raise AuthenticationError(peer=peer, why="this side has a token and what answers there knows none")
    expected = proof_of(secret, nonce, answer.instance, split_address(address)[1])
    if not hmac.compare_digest(expected, answer.proof):
        why = "the token is wrong, or what answers there is not the service: it does not prove that it knows this token"
        raise AuthenticationError(peer=peer, why=why)
    return secret


def _ask_until(address: str, files: TlsFiles | None, nonce: bytes, rest: Callable[[], float]) -> tuple[bytes, str]:
    """`_ask`, again after a while where the service is too busy to answer, or has as many connections as it takes: it
    is slow, not gone. TimeoutError if that does not change, with what it said last."""
    why, is_diagnosed = f"it does not answer in time; {SILENT}", False
    cause: Exception
    while True:
        try:
            return _ask(address, files, nonce, rest)
        except http2.BusyError as error:
            why, cause = str(error), error
        except HANGS_UP as error:
            diagnosis = None if is_diagnosed else tls.diagnose(address, files)
            if diagnosis is not None:
                raise diagnosis from error
            is_diagnosed = True
            why = "it hangs up at once: it may have reached its limit of connections, or be no data plane service"
            cause = error
        except TimeoutError as error:
            if error.errno is not None:
                raise
            raise TimeoutError(why) from error
        if rest() <= BUSY_S:
            raise TimeoutError(why) from cause
        time.sleep(BUSY_S)


def _ask(address: str, files: TlsFiles | None, nonce: bytes, rest: Callable[[], float]) -> tuple[bytes, str]:
    """The answer, and where it came from (see `ConnectionKeys`)."""
    request = pb.GetKeysRequest().SerializeToString()
    metadata = {NONCE_KEY: nonce.hex(), VERSION_KEY: str(PROTOCOL_VERSION)}
    authority = address if files is None else tls.authority_of(address, files)
    began = time.monotonic()
    try:
        with dial(address, rest()) if files is None else tls.connect(address, files, rest) as peer:
            return http2.call(peer, METHOD, request, authority=authority, metadata=metadata, rest=rest), dialed(peer)
    except (ConnectionResetError, BrokenPipeError, ssl.SSLError, http2.Http2Error) as error:
        took_s = time.monotonic() - began
        if took_s < HANDSHAKE_S:
            raise
        raise http2.BusyError(f"the connection broke after {took_s:.0f} s: {error}") from error


def unreached(address: str, what: str, error: OSError) -> ServiceUnavailableError:
    """The service at `address`, where connecting to this part of it failed."""
    why = f"connecting to {what}: {error.strerror or error}"
    if isinstance(error, ConnectionRefusedError):
        why += "; start one with `tq serve` or dataplane.serve()"
    elif isinstance(error, TimeoutError):
        why += "; see that its host is up, and that no firewall is between"
    return _unavailable(address, why)


def _unavailable(address: str, why: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(address=address, why=why)
