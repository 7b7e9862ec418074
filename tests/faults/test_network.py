from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.network import HOST, Network

pytestmark = pytest.mark.integration

WAIT_S = 60.0


class Echo:
    """Sends everybody's bytes back."""

    def __init__(self) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(peer,), daemon=True).start()

    @staticmethod
    def _echo(peer: socket.socket) -> None:
        with peer:
            try:
                while data := peer.recv(1 << 16):
                    if data == b"die":
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
                    peer.sendall(data)
            except OSError:
                return


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    echo, network = Echo(), Network()
    (tmp_path / "port").write_text(str(echo.port))
    network.link("a", tmp_path / "port")
    network.start()
    yield network
    network.close()
    echo.listener.shutdown(socket.SHUT_RDWR)
    echo.listener.close()


def caller(network: Network) -> socket.socket:
    return socket.create_connection((HOST, network.ports["a"]), timeout=WAIT_S)


def said_back(peer: socket.socket, data: bytes) -> bytes:
    peer.sendall(data)
    back = b""
    while len(back) < len(data) and (piece := peer.recv(1 << 16)):
        back += piece
    return back


def broken(peer: socket.socket) -> bool:
    """Whether the connection ends, either way."""
    try:
        return not peer.recv(1)
    except ConnectionResetError:
        return True


def test_it_passes_everything_on(network: Network) -> None:
    with caller(network) as peer:
        assert said_back(peer, bytes(300_000)) == bytes(300_000)


def test_a_cut_breaks_what_there_is_and_new_connections_are_made(network: Network) -> None:
    with caller(network) as peer:
        assert said_back(peer, b"one") == b"one"
        network.disturb("a", "cut")
        assert broken(peer)
    with caller(network) as peer:
        assert said_back(peer, b"two") == b"two"


def test_whoever_talks_to_the_dead_is_told(network: Network) -> None:
    with caller(network) as peer:
        peer.sendall(b"die")
        assert broken(peer)


def test_a_closed_link_lets_nobody_through_until_it_is_mended(network: Network) -> None:
    network.disturb("a", "close")
    with caller(network) as peer:
        assert broken(peer)
    network.disturb("a", "mend")
    with caller(network) as peer:
        assert said_back(peer, b"two") == b"two"


def test_a_frozen_link_keeps_what_is_sent(network: Network) -> None:
    with caller(network) as peer:
        assert said_back(peer, b"one") == b"one"
        network.disturb("a", "freeze")
        peer.sendall(b"two")
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        peer.settimeout(WAIT_S)
        network.disturb("a", "mend")
        assert peer.recv(3) == b"two"


def test_a_half_closed_link_still_takes_what_clients_send(network: Network) -> None:
    with caller(network) as peer:
        assert said_back(peer, b"one") == b"one"
        network.disturb("a", "half")
        assert peer.recv(1) == b""
        peer.sendall(b"two")


@pytest.mark.parametrize("how", ["delay", "slow"])
def test_a_slow_link_loses_nothing(network: Network, how: str) -> None:
    network.disturb("a", how)
    with caller(network) as peer:
        assert said_back(peer, bytes(range(100))) == bytes(range(100))
