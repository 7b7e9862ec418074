"""Raw HTTP for tests."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataplane.core.addresses import split_address
from tests.secure import tls

WAIT_S = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(
    address: str,
    path: str,
    method: str = "GET",
    *,
    body: bytes | None = None,
    context: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    """One request. Underscores in names of headers are dashes."""
    host, port = split_address(address)
    if context is None:
        connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=WAIT_S, context=context)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def raw(address: str, sent: bytes) -> bytes:
    """Everything that comes back for these bytes, until the server hangs up."""
    with socket.create_connection(split_address(address), timeout=WAIT_S) as peer:
        found = bytearray()
        try:
            peer.sendall(sent)
            while part := peer.recv(65536):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return bytes(found)


def context(certificate: str | None = "node", authority: str = "ca") -> ssl.SSLContext:
    """What a browser with this certificate connects with."""
    files = tls(certificate or "node", authority)
    made = ssl.create_default_context(cafile=files["tls_ca_file"])
    if certificate is not None:
        made.load_cert_chain(files["tls_cert_file"], files["tls_key_file"])
    return made
