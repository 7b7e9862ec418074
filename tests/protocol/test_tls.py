"""Which error a failed TLS handshake raises."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from dataplane.config import DataPlaneConfig
from dataplane.protocol.tls import connect
from tests.secure import tls

pytestmark = pytest.mark.integration

WAIT_S = 60.0


def hang_up(server: socket.socket) -> None:
    """Read the client's first message, then close without an answer."""
    peer, _ = server.accept()
    with peer:
        peer.recv(1 << 16)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 16):
            pass


def test_a_handshake_that_breaks_raises_its_error_without_a_cause() -> None:
    """An error that is its own cause would print its traceback in a circle."""
    files = DataPlaneConfig(**tls()).tls
    assert files is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=hang_up, args=(server,))
        thread.start()
        with pytest.raises(ssl.SSLError) as caught:
            connect(f"127.0.0.1:{server.getsockname()[1]}", files, lambda: WAIT_S)
        thread.join(WAIT_S)
    assert caught.value.__cause__ is None
