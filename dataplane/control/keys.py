"""What the ZMQ doors of a service want of a client, and how a client comes to know it."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from dataplane.config import DataPlaneConfig, TlsFiles
from dataplane.control import http2, tls
from dataplane.errors import DataPlaneError, ServiceUnavailableError, from_wire
from dataplane.pb import control_pb2 as pb
from dataplane.types import PROTOCOL_VERSION

METHOD = "/tq.v1.Control/GetKeys"


@dataclass(frozen=True, kw_only=True)
class DoorKeys:
    """curve_key: the controller's public one; "": its doors do not encrypt. ticket: what every message carries as
    token, to the controller and to storage units."""

    curve_key: str = field(default="", repr=False)
    ticket: str = field(default="", repr=False)


OPEN = DoorKeys()
"""Of a service without token and TLS."""


def keys_of(config: DataPlaneConfig, address: str, deadline: float) -> DoorKeys:
    """Of the service at `address`: from `config` where that has no TLS, else asked of the gRPC door, until `deadline`
    (of `time.monotonic`) at the latest. Raises `ServiceUnavailableError` (at once where nothing listens), `TlsError`,
    `AuthenticationError`, `ProtocolVersionError`, ValueError for files that cannot be used."""
    token = config.secret() or ""
    if config.tls is None:
        return DoorKeys(ticket=token)

    def rest() -> float:
        return deadline - time.monotonic()

    try:
        answer = pb.Keys.FromString(_ask(address, config.tls, token, rest))
    except DataPlaneError:
        raise
    except TimeoutError as error:
        raise _unavailable(address, "something listens, but it does not answer in time") from error
    except ssl.SSLError as error:
        raise tls.refusal(address, error) or _unavailable(address, f"the connection broke: {error}") from error
    except ConnectionResetError as error:
        raise tls.diagnose(address, config.tls) or _unavailable(address, "it hung up") from error
    except OSError as error:
        raise _unavailable(address, f"connecting to it: {error.strerror or error}") from error
    except http2.Http2Error as error:
        raise tls.diagnose(address, config.tls) or _unavailable(address, str(error)) from error
    except DecodeError as error:
        raise _unavailable(address, "what answers is no data plane service") from error
    if answer.HasField("error"):
        raise from_wire(answer.error.name, answer.error.facts)
    return DoorKeys(curve_key=answer.curve_key, ticket=answer.ticket)


def _ask(address: str, files: TlsFiles, token: str, rest: Callable[[], float]) -> bytes:
    request = pb.GetKeysRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()
    metadata = {"authorization": f"Bearer {token}"} if token else {}
    with tls.connect(address, files, rest) as peer:
        authority = tls.authority_of(address, files)
        return http2.call(peer, METHOD, request, authority=authority, metadata=metadata, rest=rest)


def _unavailable(address: str, why: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(address=address, why=why)
