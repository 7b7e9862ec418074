"""The keys and tickets for a service's ZMQ servers, and the call by which a client obtains them.

A client or storage unit makes one small call to the gRPC server before it sends any other data. The service replies
with a proof that it has the secret. The call is made without gRPC (see `client.rpc.handshake`) and has no body:
everything that the service accepts from an unauthenticated client fits into the headers.
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
SILENT = "check that its process is not stopped and its machine is not overloaded"
"""The remedy for a service that does not answer."""
BUSY_S = 0.2
"""Delay before a call to a busy service is retried."""
HANGS_UP = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, http2.HungUpError)
"""Errors of a connection that the peer closes before it sends data."""
HANDSHAKE_S = 10.0
"""Time after which a service closes a connection whose TLS and HTTP/2 handshakes are not complete."""
NONCE_KEY = "tq-nonce"
VERSION_KEY = "tq-protocol-version"
"""Metadata of that call: the nonce for the proof, in hex, and the client's protocol version."""


@dataclass(frozen=True, kw_only=True)
class ConnectionKeys:
    """curve_key: the controller's public key; "": no encryption. ticket: the ticket for this instance of the
    controller. secret: the secret from which tickets are derived, also those of storage units; "": the service has
    none. address: the numeric address at which the service answered, if its host name has several. service: the
    identity of the service's state, which is stored with the state."""

    curve_key: str = field(default="", repr=False)
    ticket: Ticket | None = None
    secret: str = field(default="", repr=False)
    address: str = ""
    service: str = ""


OPEN = ConnectionKeys()
"""The keys of a service without token and TLS."""


def keys_of(
    address: str,
    token: str | None,
    files: TlsFiles | None,
    *,
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> ConnectionKeys:
    """Return the keys of the service at `address`, after the service has proved that it has the token. files: None: no
    TLS. Blocks until `deadline` (of `time.monotonic`) at most. `check` is called repeatedly and may raise. Raises
    `ServiceUnavailableError` (at once if nothing listens), `TlsError`, `AuthenticationError`, `ProtocolVersionError`,
    ValueError for unusable files."""

    def time_left() -> float:
        check()
        return deadline - time.monotonic()

    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        body, reached = _request_keys_with_retry(address, files, nonce, time_left)
        answer = pb.Keys.FromString(body)
    except DataPlaneError:  # some are also a TimeoutError or another OSError
        raise
    except TimeoutError as error:
        if error.errno is not None:  # the system's timeout of the connection attempt
            raise unreached(address, "it", error) from error
        raise _unavailable(address, f"a server is listening, but {error}") from error
    except ssl.SSLError as error:
        raise tls.refusal(address, error, files) or _unavailable(address, f"the connection broke: {error}") from error
    except OSError as error:
        raise unreached(address, "it", error) from error
    except http2.Http2Error as error:
        raise tls.diagnose(address, files) or _unavailable(address, str(error)) from error
    except DecodeError as error:
        raise _unavailable(address, "the server there is not a data plane service; check the address") from error
    if answer.HasField("error"):
        cause = from_wire(answer.error.name, answer.error.facts)
        # The service has not proved its identity yet, so only this error is passed on as it is.
        raise (
            cause
            if isinstance(cause, ProtocolVersionError)
            else _unavailable(address, f"it rejected the first request of this client: {cause}")
        )
    secret = _verified_secret(answer, token, files is not None, address, nonce)
    ticket = Ticket.of(secret, answer.instance)
    return ConnectionKeys(
        curve_key=answer.curve_key, ticket=ticket, secret=secret, address=reached, service=answer.service
    )


def _verified_secret(answer: pb.Keys, token: str | None, secure: bool, address: str, nonce: bytes) -> str:
    """Verify the service's proof and return its secret (the `token`, or the one in the answer), "" if it has none.
    secure: the answer came over TLS. nonce: the random bytes of the request. Raises `AuthenticationError` if the proof
    or the token is missing, or the proof is wrong."""
    # A service sends a secret only over TLS.
    secret = token or (answer.secret if secure else "")
    if not secret and not answer.proof:
        return ""
    peer = f"the controller at {address}"
    if not secret:
        raise AuthenticationError(peer=peer, why="no token was given")
    if not answer.proof:
        why = "this client has a token, but the server there has none"
        hint = "Check the address, unset this client's token, or start the service with that token."
        raise AuthenticationError(peer=peer, why=why, hint=hint)
    expected = proof_of(secret, nonce, answer.instance, split_address(address)[1])
    if not hmac.compare_digest(expected, answer.proof):
        why = "the token is wrong, or the server there is not the service: it sent no valid proof for this token"
        raise AuthenticationError(peer=peer, why=why)
    return secret


def _request_keys_with_retry(
    address: str, files: TlsFiles | None, nonce: bytes, time_left: Callable[[], float]
) -> tuple[bytes, str]:
    """Call `_request_keys`, and retry while the service is too busy to answer or has reached its limit of connections.
    Raises TimeoutError, with the reason of the last attempt, when the time is over."""
    why, is_diagnosed = f"it does not answer in time; {SILENT}", False  # TLS is diagnosed only once
    cause: Exception
    while True:
        try:
            return _request_keys(address, files, nonce, time_left)
        except http2.BusyError as error:
            why = str(error)
            cause = error
        except HANGS_UP as error:
            diagnosis = None if is_diagnosed else tls.diagnose(address, files)
            if diagnosis is not None:
                raise diagnosis from error
            is_diagnosed = True
            why = "it closes the connection at once: it may have reached its connection limit, or be another service"
            cause = error
        except TimeoutError as error:
            if error.errno is not None:  # not the deadline, but the system's timeout of the connection attempt
                raise
            raise TimeoutError(why) from error
        if time_left() <= BUSY_S:  # too short for another attempt
            raise TimeoutError(why) from cause
        time.sleep(BUSY_S)


def _request_keys(
    address: str, files: TlsFiles | None, nonce: bytes, time_left: Callable[[], float]
) -> tuple[bytes, str]:
    """Request the keys once. Return the reply, and the numeric address that sent it (see `ConnectionKeys`). Raises
    `BusyError` if the connection broke after `HANDSHAKE_S`, else the errors of the connection and of `http2.call`."""
    request = pb.GetKeysRequest().SerializeToString()
    metadata = {NONCE_KEY: nonce.hex(), VERSION_KEY: str(PROTOCOL_VERSION)}
    authority = address if files is None else tls.authority_of(address, files)
    began = time.monotonic()
    try:
        connection = dial(address, time_left()) if files is None else tls.connect(address, files, time_left)
        with connection as peer:
            reply = http2.call(peer, METHOD, request, authority=authority, metadata=metadata, time_left=time_left)
            return reply, dialed(peer)
    except (ConnectionResetError, BrokenPipeError, ssl.SSLError, http2.Http2Error) as error:
        # The service closes a connection after HANDSHAKE_S if it was too busy to complete the handshakes.
        took_s = time.monotonic() - began
        if took_s < HANDSHAKE_S:
            raise
        raise http2.BusyError(f"the connection broke after {took_s:.0f} s: {error}") from error


def unreached(address: str, what: str, error: OSError) -> ServiceUnavailableError:
    """Return the error, with the remedy, for a failed connection to `what`, a part of the service at `address`."""
    why = f"cannot connect to {what}: {error.strerror or error}"
    if isinstance(error, ConnectionRefusedError):
        why += "; start one with `tq serve` or dataplane.serve()"
    elif isinstance(error, TimeoutError):
        why += "; check that its host is up and that no firewall blocks the port"
    return _unavailable(address, why)


def _unavailable(address: str, why: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(address=address, why=why)
