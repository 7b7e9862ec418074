"""Mutual TLS on the gRPC server: the ends' certificates, and why two ends do not come together."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane.config import TlsFiles
from dataplane.core.addresses import dial, join_address, split_address
from dataplane.errors import TlsError

if TYPE_CHECKING:
    import grpc

DIAGNOSE_S = 2.0
"""How long it may take to find out why gRPC could not connect."""
USE_TLS = (
    "it speaks TLS, and this side does not. Give tls_cert_file, tls_key_file and tls_ca_file (TQ_TLS_CERT_FILE, ...; "
    "tq --tls-cert, --tls-key, --tls-ca)"
)
NO_TLS = "it does not speak TLS, and this side does. Leave the tls_* settings out here, or start the service with them"

NOT_TAKEN = (
    "tls_cert_file must be signed by the authority that the service has as tls_ca_file, and be valid by the clock there"
)
EXPIRED = "certificate has expired"


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """What a client needs to connect. ValueError naming the file that cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    context.set_alpn_protocols(["h2"])
    _load(context, files)
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """What HTTP is served with: clients show a certificate of the authority. ValueError as `client_context`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_verify_locations(files.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"tls_ca_file {files.ca_file!r} cannot be used: {_reason(error)}") from error
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"tls_cert_file {files.cert_file!r} with tls_key_file {files.key_file!r} cannot be used: {_reason(error)}"
        ) from error


def _no_password() -> str:
    raise ValueError("the key in tls_key_file is encrypted; a service cannot be asked for its password")


def server_credentials(files: TlsFiles, connected: Callable[[], None]) -> grpc.ServerCredentials:
    """What the gRPC server listens with: clients show a certificate of the authority. `connected` is called, in threads
    of gRPC, before each handshake. ValueError as `client_context`."""
    import grpc  # noqa: PLC0415 (clients use this module and never load gRPC)

    client_context(files)
    own = [(_read(files.key_file), _read(files.cert_file))]
    configuration = grpc.ssl_server_certificate_configuration(own, _read(files.ca_file))
    fetch: Any = connected  # asked for another configuration before each handshake; None: there is none
    return grpc.dynamic_ssl_server_credentials(configuration, fetch, require_client_authentication=True)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """What a storage unit's link connects with. ValueError as `client_context`."""
    import grpc  # noqa: PLC0415

    client_context(files)
    return grpc.ssl_channel_credentials(_read(files.ca_file), _read(files.key_file), _read(files.cert_file))


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def connect(address: str, files: TlsFiles, rest: Callable[[], float]) -> ssl.SSLSocket:
    """A connection to the gRPC server at `address`, both ends known to each other as far as TLS tells before anything
    is read. Each step may take `rest()` seconds. Raises `TlsError` where the ends do not fit, OSError where there is
    nothing to connect to, or it is silent or gone."""
    context = client_context(files)
    plain = dial(address, rest())
    try:
        plain.settimeout(max(rest(), 0.001))
        return context.wrap_socket(plain, server_hostname=files.server_name or split_address(address)[0])
    except BaseException as error:
        plain.close()
        if isinstance(error, ssl.SSLError):
            raise refusal(address, error, files) or error from error
        raise


def refusal(address: str, error: ssl.SSLError, files: TlsFiles | None) -> TlsError | None:
    """What a failure of TLS means, if it is one that will not go away by itself."""
    match error.reason or "":
        case "CERTIFICATE_VERIFY_FAILED":
            text = (getattr(error, "verify_message", "") or str(error)).rstrip(".")
            why = (
                f"this side does not take its certificate: {text}. It must be signed by the authority in tls_ca_file, "
                "and be for the host in the address, or for tls_server_name"
            )
        case "WRONG_VERSION_NUMBER" | "HTTP_REQUEST" | "RECORD_LAYER_FAILURE" | "PACKET_LENGTH_TOO_LONG":
            why = NO_TLS
        case reason if "ALERT" in reason:
            why = _not_taken(files, EXPIRED if "EXPIRED" in reason else "")
        case _:
            return None
    return TlsError(address=address, why=why)


def _not_taken(files: TlsFiles | None, told: str = "") -> str:
    """told: by the other side."""
    why = told or (_own_fault(files) if files is not None else "")
    return f"it does not take this side's certificate{f' ({why})' if why else ''}: {NOT_TAKEN}"


def _own_fault(files: TlsFiles) -> str:
    """What a service with the same files and clock would have against this side's certificate; "": nothing. Both ends
    of a handshake in memory."""
    showing = client_context(files)
    showing.check_hostname, showing.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = showing.wrap_bio(to_client, to_server)
    server = server_context(files).wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (client, server) * 3:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    return ""


def diagnose(address: str, files: TlsFiles | None) -> TlsError | None:
    """Why gRPC could not connect to `address`, or was hung up on, if TLS is why. Blocks for `DIAGNOSE_S` a step at
    most."""
    try:
        if files is None:
            return TlsError(address=address, why=USE_TLS) if _speaks_tls(address) else None
        # Who does not take a certificate hangs up after the handshake, as one that ends just then does, but again.
        if _hangs_up(address, files) and _hangs_up(address, files):
            return TlsError(address=address, why=_not_taken(files))
    except TlsError as error:
        return error
    except ssl.SSLError as error:
        return refusal(address, error, files)
    except (OSError, ValueError):
        return None
    return None


def _hangs_up(address: str, files: TlsFiles) -> bool:
    """Whether it says nothing after the handshake, where a gRPC server begins to speak."""
    with connect(address, files, lambda: DIAGNOSE_S) as peer:
        try:
            return not peer.recv(1)
        except ConnectionError:
            return True


def _speaks_tls(address: str) -> bool:
    """Whether it answers the beginning of a handshake with a record of one, or of an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname=split_address(address)[0]).do_handshake()
    with dial(address, DIAGNOSE_S) as plain:
        plain.sendall(hello.read())
        return plain.recv(1) in (b"\x16", b"\x15")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def authority_of(address: str, files: TlsFiles) -> str:
    """What a call to `address` names as its host."""
    host, port = split_address(address)
    return join_address(files.server_name or host, port)
