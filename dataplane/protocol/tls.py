"""TLS of the HTTP server and the gRPC gateway, and of their clients in this package."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.config import DataPlaneConfig, TlsFiles

if TYPE_CHECKING:
    import grpc


def client_context(config: DataPlaneConfig) -> ssl.SSLContext | None:
    """Return the SSL context of a client of the HTTP server, which trusts `tls_ca_file` (by default the system's
    authorities) and presents its own certificate, if it has one. None: the config has no TLS files. Raises ValueError
    with the name of an unusable file."""
    if not (config.tls_ca_file or config.tls_cert_file):
        return None
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    _load_authority(context, config.tls_ca_file)
    _load_certificate(context, config.tls_cert_file, config.tls_key_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the SSL context of the HTTP server. With an authority it requires a client certificate. Raises ValueError
    as `client_context` does."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if files.ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    _load_authority(context, files.ca_file)
    _load_certificate(context, files.cert_file, files.key_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return the credentials of the gRPC gateway. With an authority they require a client certificate. Raises
    ValueError as `client_context` does."""
    import grpc  # noqa: PLC0415 (clients use this module and never load gRPC)

    server_context(files)  # raises ValueError if a file is unusable
    own = [(Path(files.key_file).read_bytes(), Path(files.cert_file).read_bytes())]
    authority = None if files.ca_file is None else Path(files.ca_file).read_bytes()
    return grpc.ssl_server_credentials(own, authority, require_client_auth=authority is not None)


def _load_authority(context: ssl.SSLContext, ca_file: str | None) -> None:
    try:
        if ca_file is not None:
            context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"tls_ca_file {ca_file!r} is unusable: {_reason(error)}") from error


def _load_certificate(context: ssl.SSLContext, cert_file: str | None, key_file: str | None) -> None:
    try:
        if cert_file is not None:
            # The password is only requested, and `_no_password` only raises, if the key is encrypted.
            context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"tls_cert_file {cert_file!r} with tls_key_file {key_file!r} is unusable: {_reason(error)}"
        ) from error


def _no_password() -> str:
    raise ValueError("the key in tls_key_file is encrypted; use a key without a password")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
