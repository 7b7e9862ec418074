"""Mutual TLS for the gRPC server: certificates of both ends, and diagnosis of failed handshakes."""

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
"""Timeout of each step of the diagnosis of a failed connection."""
USE_TLS = (
    "the service uses TLS, and this client does not. Set tls_cert_file, tls_key_file and tls_ca_file "
    "(TQ_TLS_CERT_FILE, ...; tq --tls-cert, --tls-key, --tls-ca)"
)
NO_TLS = "the service does not use TLS, and this client does. Remove its tls_* settings, or start the service with them"

NOT_TAKEN = "tls_cert_file must be signed by an authority in the service's tls_ca_file, and be valid by its clock"
EXPIRED = "certificate has expired"


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the SSL context of a client. Raises ValueError with the name of an unusable file."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    context.set_alpn_protocols(["h2"])
    _load_files(context, files)
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the SSL context of the HTTP server. It requires a client certificate of the authority. Raises ValueError
    as `client_context` does."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    _load_files(context, files)
    return context


def _load_files(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Load the authority, and this process's certificate and key. Raises ValueError that names an unusable file."""
    try:
        context.load_verify_locations(files.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"tls_ca_file {files.ca_file!r} is unusable: {_reason(error)}") from error
    try:
        # The password is only requested, and `_no_password` only raises, if the key is encrypted.
        context.load_cert_chain(files.cert_file, files.key_file, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"tls_cert_file {files.cert_file!r} with tls_key_file {files.key_file!r} is unusable: {_reason(error)}"
        ) from error


def _no_password() -> str:
    raise ValueError("the key in tls_key_file is encrypted; use a key without a password")


def server_credentials(files: TlsFiles, connected: Callable[[], None]) -> grpc.ServerCredentials:
    """Return the credentials of the gRPC server. They require a client certificate of the authority. `connected` is
    called, in threads of gRPC, before each handshake. Raises ValueError as `client_context` does."""
    import grpc  # noqa: PLC0415 (clients use this module and never load gRPC)

    client_context(files)  # raises ValueError if a file is unusable
    own = [(_read(files.key_file), _read(files.cert_file))]
    configuration = grpc.ssl_server_certificate_configuration(own, _read(files.ca_file))
    fetch: Any = connected  # gRPC calls it before each handshake; its result None keeps the configuration
    return grpc.dynamic_ssl_server_credentials(configuration, fetch, require_client_authentication=True)


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def connect(address: str, files: TlsFiles, time_left: Callable[[], float]) -> ssl.SSLSocket:
    """Connect to the gRPC server at `address` and complete the TLS handshake as far as possible without reading data
    (in TLS 1.3 the server's rejection of this client's certificate arrives only with the first read).

    Each step may take `time_left()` seconds. Raises `TlsError` if the handshake fails for a permanent reason, OSError
    if the server is unreachable, silent or closes the connection.
    """
    context = client_context(files)
    plain = dial(address, time_left())
    try:
        plain.settimeout(max(time_left(), 0.001))
        return context.wrap_socket(plain, server_hostname=files.server_name or split_address(address)[0])
    except BaseException as error:
        plain.close()
        refused = refusal(address, error, files) if isinstance(error, ssl.SSLError) else None
        if refused is not None:
            raise refused from error
        raise


def refusal(address: str, error: ssl.SSLError, files: TlsFiles | None) -> TlsError | None:
    """Return the error for a TLS failure; None if the failure may be transient. files: None if this client has none."""
    match error.reason or "":
        case "CERTIFICATE_VERIFY_FAILED":
            text = (getattr(error, "verify_message", "") or str(error)).rstrip(".")
            why = (
                f"this client rejects the service's certificate: {text}. It must be signed by an authority in "
                "tls_ca_file and issued for the host in the address, or for tls_server_name"
            )
        case "WRONG_VERSION_NUMBER" | "HTTP_REQUEST" | "RECORD_LAYER_FAILURE" | "PACKET_LENGTH_TOO_LONG":
            why = NO_TLS
        case reason if "ALERT" in reason:  # the service ended the handshake
            why = _rejected(files, EXPIRED if "EXPIRED" in reason else "")
        case _:
            return None
    return TlsError(address=address, why=why)


def _rejected(files: TlsFiles | None, reason: str = "") -> str:
    """Describe a rejected client certificate. reason: the reason that the service gave; without one, this client looks
    for a defect of its certificate (in `files`, if given)."""
    why = reason or (_own_defect(files) if files is not None else "")
    return f"the service rejects this client's certificate{f' ({why})' if why else ''}: {NOT_TAKEN}"


def _own_defect(files: TlsFiles) -> str:
    """Return the reason why a service with the same files and clock would reject this client's certificate; "" if it
    would accept it. Runs both ends of a handshake in memory."""
    presenting = client_context(files)
    presenting.check_hostname, presenting.verify_mode = False, ssl.CERT_NONE  # only the server's end checks
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    client = presenting.wrap_bio(to_client, to_server)
    server = server_context(files).wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (client, server) * 3:  # each end continues with what the other one has written
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    return ""


def diagnose(address: str, files: TlsFiles | None) -> TlsError | None:
    """Return the TLS error that explains a failed gRPC connection to `address`; None if TLS is not the cause. Blocks
    for at most `DIAGNOSE_S` at each step."""
    try:
        if files is None:
            return TlsError(address=address, why=USE_TLS) if _speaks_tls(address) else None
        # A service that rejects a certificate closes the connection after the handshake. The second attempt excludes a
        # service that was just stopping.
        if _closes_at_once(address, files) and _closes_at_once(address, files):
            return TlsError(address=address, why=_rejected(files))
    except TlsError as error:
        return error
    except ssl.SSLError as error:
        return refusal(address, error, files)
    except (OSError, ValueError):
        return None
    return None


def _closes_at_once(address: str, files: TlsFiles) -> bool:
    """Whether the peer closes the connection after the handshake; a gRPC server sends its settings there."""
    with connect(address, files, lambda: DIAGNOSE_S) as peer:
        try:
            return not peer.recv(1)
        except ConnectionError:
            return True


def _speaks_tls(address: str) -> bool:
    """Whether the peer replies to a ClientHello with a handshake record or an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only for its ClientHello: no handshake is completed
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname=split_address(address)[0]).do_handshake()
    with dial(address, DIAGNOSE_S) as plain:
        plain.sendall(hello.read())
        return plain.recv(1) in (b"\x16", b"\x15")  # a handshake record, an alert


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def authority_of(address: str, files: TlsFiles) -> str:
    """Return the authority (host and port) for calls to `address`."""
    host, port = split_address(address)
    return join_address(files.server_name or host, port)
