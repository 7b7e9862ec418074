"""What a client sent once, sent again by somebody who only saw it pass."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

import grpc
import pytest

from dataplane import DataPlaneClient, connect, serve
from dataplane.core.addresses import join_address, split_address
from dataplane.protocol.auth import controller_keys
from dataplane.protocol.pb import control_pb2 as pb
from tests.restarts import wait_until
from tests.test_security import asked, heard, hello

pytestmark = pytest.mark.integration

WAIT_S = 60.0
GREETING_BYTES = 64
"""The other end is to have answered with as many before more is sent."""


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


def sessions_opened(client: DataPlaneClient) -> list[int]:
    """Those of `hello`."""
    return [session.session for session in client.stats().sessions if session.name == "n"]


@pytest.mark.parametrize("token", [None, "open-sesame-7f3a"])
def test_what_was_recorded_of_a_client_opens_nothing_where_there_is_a_token(token: str | None) -> None:
    """Without one, it does: a session, here, once the first one has ended."""
    with (
        serve({"units": 0, "session_timeout_s": 600.0, "token": token, "grpc_port": 0}) as server,
        connect(server.address, token=token) as client,
    ):
        with Recorder(server.address) as recorder:
            curve_key = controller_keys(token).public if token else ""
            assert heard(f"tcp://{recorder.address}", hello(), curve_key=curve_key)
        (session,) = sessions_opened(client)
        with grpc.insecure_channel(server.grpc_address) as direct:
            shown = (("authorization", f"Bearer {token}"),)
            asked(direct, "Bye", pb.ByeRequest(header=pb.Header(session=session, call_id=1)), shown)
        wait_until(lambda: not sessions_opened(client), "the session to have ended")
        with socket.create_connection(split_address(server.address), timeout=WAIT_S) as peer:
            peer.sendall(recorder.sent[:GREETING_BYTES])
            answered = 0
            while answered < GREETING_BYTES:
                answered += len(peer.recv(GREETING_BYTES - answered)) or pytest.fail("it hung up")
            with contextlib.suppress(ConnectionError):
                peer.sendall(recorder.sent[GREETING_BYTES:])
                if token is None:
                    wait_until(lambda: bool(sessions_opened(client)), "the session that the recording opens")
                    return
                while peer.recv(1 << 16):
                    pass
        assert not sessions_opened(client)
