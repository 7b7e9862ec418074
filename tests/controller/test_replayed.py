"""What a client sent once, sent again by somebody who only saw it pass."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any, Self

import grpc
import pytest

from dataplane import DataPlaneClient, connect, serve
from dataplane.core.addresses import join_address, split_address
from dataplane.protocol.controller_socket import zmq_address_of
from dataplane.protocol.pb import control_pb2 as pb
from tests.restarts import wait_until
from tests.secure import tls
from tests.test_security import asked, heard, hello, opening_message, own_keys

pytestmark = pytest.mark.integration

WAIT_S = 60.0
FIRST_BYTES = {"grpc": 0, "zmq": 64}
"""What the other end is to have answered before more is sent: ZMTP's greeting, of the same length, or nothing."""


class Recorder:
    """Carries one connection to `target` and keeps what its client sends."""

    def __init__(self, target: str) -> None:
        self.sent = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self.address = join_address(*self._listener.getsockname())
        self._target = split_address(target)
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(self._target) as far:
            back = threading.Thread(target=self._pump, args=(far, near, bytearray()), daemon=True)
            back.start()
            self._pump(near, far, self.sent)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        """Until either end hangs up."""
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                kept += content
                sink.sendall(content)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_S)
        self._listener.close()


def channel(address: str, *, secure: bool) -> grpc.Channel:
    if not secure:
        return grpc.insecure_channel(address)
    files = {name: Path(path).read_bytes() for name, path in tls().items()}
    credentials = grpc.ssl_channel_credentials(files["tls_ca_file"], files["tls_key_file"], files["tls_cert_file"])
    return grpc.secure_channel(address, credentials)


def sessions_opened(client: DataPlaneClient) -> list[int]:
    """Those of `hello` and `opening_message`."""
    return [session.session for session in client.stats().sessions if session.name == "n"]


@pytest.mark.parametrize("kind", ["plain", "tls"])
@pytest.mark.parametrize("endpoint", ["grpc", "zmq"])
def test_what_was_recorded_of_a_client_opens_nothing_under_tls(endpoint: str, kind: str) -> None:
    """Without it, it does: a session, here, once the first one has ended."""
    settings: dict[str, Any] = tls() if kind == "tls" else {}
    with (
        serve({"units": 0, "session_timeout_s": 600.0, **settings}) as server,
        connect(server.address, **settings) as client,
    ):
        target = server.address if endpoint == "grpc" else zmq_address_of(server.address)
        with Recorder(target) as recorder:
            if endpoint == "grpc":
                with channel(recorder.address, secure=kind == "tls") as first:
                    asked(first, "OpenSession", opening_message())
            else:
                own = own_keys(server.address, **settings)
                assert heard(f"tcp://{recorder.address}", hello(), own.ticket, own.curve_key)
        (session,) = sessions_opened(client)
        with channel(server.address, secure=kind == "tls") as direct:
            asked(direct, "Bye", pb.ByeRequest(header=pb.Header(session=session, call_id=1)))
        wait_until(lambda: not sessions_opened(client), "the session to have ended")
        with socket.create_connection(split_address(target), timeout=WAIT_S) as peer:
            first = FIRST_BYTES[endpoint]
            peer.sendall(recorder.sent[:first])
            answered = 0
            while answered < first:
                answered += len(peer.recv(first - answered)) or pytest.fail("it hung up")
            with contextlib.suppress(ConnectionError):
                peer.sendall(recorder.sent[first:])
                if kind == "plain":
                    wait_until(lambda: bool(sessions_opened(client)), "the session that the recording opens")
                    return
                while peer.recv(1 << 16):
                    pass
        assert not sessions_opened(client)
