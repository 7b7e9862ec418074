"""How many connections a ZMQ port keeps whose peers have not shown the ticket, and how much those may send."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq

from dataplane import connect, serve
from dataplane.client.rpc.handshake import dealer_socket, zmq_address_of
from dataplane.config import MIB
from dataplane.controller.controller import Controller
from dataplane.core.addresses import split_address
from dataplane.protocol import unauthenticated, zap, zmq_frames
from dataplane.protocol.fd_limits import allow_more
from dataplane.protocol.unauthenticated import PLAIN_BYTES, SHORT_BYTES, Unauthenticated
from dataplane.storage.transport import request_chunks
from tests.restarts import CONFIG, wait_until
from tests.secure import tls
from tests.test_security import endpoint_of_unit
from tests.test_strangers import TOKEN, WAIT_S, greeting, put_and_get, send_unfinished

pytestmark = pytest.mark.integration

FRAME_BYTES = 8 * MIB
"""Of it, four connections that sent much are kept."""
LONG = SHORT_BYTES + 1


class Port:
    """A listening socket of this process, and its connections: the peers' ends by the number of this one's."""

    def __init__(self, frame_bytes: int = FRAME_BYTES) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._accepted: dict[int, socket.socket] = {}
        self._sent: dict[int, int] = {}
        self.peers: dict[int, socket.socket] = {}
        self.watched = Unauthenticated([f"tcp://*:{self._listener.getsockname()[1]}"], frame_bytes, curve=False)

    def connect(self) -> int:
        peer = socket.create_connection(self._listener.getsockname(), timeout=WAIT_S)
        accepted, _ = self._listener.accept()
        number = accepted.fileno()
        self._accepted[number], self.peers[number] = accepted, peer
        return number

    def send(self, number: int, nbytes: int) -> None:
        """The peer sends so many bytes. They have arrived when this returns, and stay unread."""
        accepted = self._accepted[number]
        self._sent[number] = self._sent.get(number, 0) + nbytes
        self.peers[number].sendall(bytes(nbytes))
        wait_until(lambda: len(accepted.recv(1 << 16, socket.MSG_PEEK)) == self._sent[number], "the bytes to come")

    def began(self, nbytes: int = 0) -> int:
        number = self.connect()
        if nbytes:
            self.send(number, nbytes)
        self.watched.began(number)
        return number

    def hang_up(self) -> None:
        self.watched._looked = 0.0  # it may look again
        self.watched.hang_up()

    def answer(self, number: int, nbytes: int) -> None:
        """This side sends so many bytes, and the peer reads them. What it sends next acknowledges them."""
        self._accepted[number].sendall(bytes(nbytes))
        assert len(self.peers[number].recv(nbytes, socket.MSG_WAITALL)) == nbytes

    def ended(self) -> list[int]:
        """The connections that this side has ended."""
        return [number for number, peer in self.peers.items() if select.select([peer], [], [], 0)[0]]

    def must_end(self, numbers: list[int]) -> None:
        wait_until(lambda: self.ended() == numbers, f"{numbers} to be ended, and no others")

    def close(self) -> None:
        for each in (self._listener, *self._accepted.values(), *self.peers.values()):
            each.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def test_the_oldest_of_too_many_are_ended(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port.watched, "_most", 3)
    numbers = [port.began() for _ in range(5)]
    port.hang_up()
    port.must_end(numbers[:2])


def test_few_that_sent_much_are_kept(port: Port) -> None:
    short = port.began(SHORT_BYTES)
    long = [port.began(LONG) for _ in range(6)]
    port.hang_up()
    port.must_end(long[:2])
    port.watched.spoke(long[2])
    port.began(LONG)
    port.hang_up()
    port.must_end(long[:2])
    port.send(short, 1)
    port.hang_up()
    port.must_end([short, *long[:2]])


def test_a_long_message_of_who_has_shown_the_ticket_is_no_fault(port: Port) -> None:
    """Only to who has, more is sent than `PLAIN_BYTES`."""
    shown = [port.began() for _ in range(6)]
    others = [port.began() for _ in range(5)]
    for number in (*shown, *others):
        port.answer(number, PLAIN_BYTES + (number in shown))
        port.send(number, LONG)
    port.hang_up()
    port.must_end(others[:1])


def test_who_is_there_for_longer_than_a_handshake_may_take_has_shown_the_ticket(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    port.began(LONG)
    port.began()
    monkeypatch.setattr(port.watched, "_most", 0)
    monkeypatch.setattr(zap, "HANDSHAKE_MS", -1000 * unauthenticated.LATE_S)
    port.hang_up()
    assert port.ended() == []
    assert port.watched.pause_ms(None) is None


def test_who_has_shown_the_ticket_is_not_counted(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port.watched, "_most", 1)
    spoke = port.began()
    port.watched.spoke(spoke)
    port.began()
    port.hang_up()
    assert port.ended() == []
    port.watched.ended(spoke)
    port.watched.began(spoke)  # another with that number
    port.hang_up()
    wait_until(lambda: len(port.ended()) == 1)


def test_only_connections_of_the_port_are_ended(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port.watched, "_most", 0)
    other = Port()
    pair = socket.socketpair()
    with contextlib.closing(other), pair[0], pair[1], open(os.devnull) as file:
        foreign, many = other.connect(), 200
        before = len(os.listdir("/proc/self/fd"))
        for number in (foreign, pair[0].fileno(), file.fileno(), 10**6) * many:
            port.watched.began(number)
        assert len(os.listdir("/proc/self/fd")) < before + many, "copies are closed"
        replaced = port.began()
        os.dup2(pair[0].fileno(), replaced)  # the number is another file's by now
        port.hang_up()
        assert other.ended() == []
        assert not select.select([pair[1]], [], [], 0)[0]


def test_nothing_is_waited_for_where_there_are_none(port: Port) -> None:
    assert (port.watched.pause_ms(None), port.watched.pause_ms(7000)) == (None, 7000)
    number = port.began()
    soon = port.watched.pause_ms(None)
    assert soon
    assert (port.watched.pause_ms(7000), port.watched.pause_ms(1)) == (soon, 1)
    assert port.watched.ended(number).startswith("127.0.0.1:")
    assert port.watched.pause_ms(None) is None
    assert port.watched.ended(number) == ""


# --- of a service


@contextlib.contextmanager
def controller() -> Iterator[str]:
    """The address of its ZMQ port."""
    with Controller(replace(CONFIG, token=TOKEN)) as made:
        yield zmq_address_of(made.address)


@contextlib.contextmanager
def unit() -> Iterator[str]:
    with serve({"capacity_bytes": 8 * MIB, "token": TOKEN}) as server:
        yield endpoint_of_unit(server, token=TOKEN).removeprefix("tcp://")


def has_ended(peer: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while select.select([peer], [], [], 0)[0]:
            if not peer.recv(1 << 16):
                return True
        return False
    return True


@pytest.mark.parametrize(
    ("of", "frame_bytes"), [(controller, zmq_frames.MAX_REQUEST_FRAME_BYTES), (unit, request_chunks.MAX_FRAME_BYTES)]
)
def test_long_hellos_that_never_end_are_few(
    monkeypatch: pytest.MonkeyPatch, of: Callable[[], contextlib.AbstractContextManager[str]], frame_bytes: int
) -> None:
    allow_more()
    monkeypatch.setattr(zap, "HANDSHAKE_MS", 3_600_000)
    kept = unauthenticated.HELD_BYTES // frame_bytes
    with of() as endpoint, contextlib.ExitStack() as ends:
        peers = []
        for _ in range(kept + 8):
            peer = ends.enter_context(socket.create_connection(split_address(endpoint), timeout=WAIT_S))
            hello = b"\x06" + (frame_bytes - 1024).to_bytes(8, "big")
            send_unfinished(peer, b"PLAIN", hello, [bytes(frame_bytes - 2048)])
            peers.append(peer)
        wait_until(lambda: all(map(has_ended, peers[:8])), "the oldest to be ended")
        assert not any(map(has_ended, peers[8:]))


def test_connections_that_say_nothing_have_an_end_and_clients_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zap, "HANDSHAKE_MS", 3_600_000)
    monkeypatch.setattr(unauthenticated, "MOST", 16)
    with serve({"capacity_bytes": 8 * MIB, "token": TOKEN}) as server, contextlib.ExitStack() as ends:
        endpoints = [zmq_address_of(server.address), endpoint_of_unit(server, token=TOKEN).removeprefix("tcp://")]
        peers = []
        for endpoint in 20 * endpoints:
            peer = ends.enter_context(socket.create_connection(split_address(endpoint), timeout=WAIT_S))
            peer.sendall(greeting(b"PLAIN"))
            peers.append(peer)
        wait_until(lambda: all(map(has_ended, peers[:8])), "the oldest to be ended")
        assert not any(map(has_ended, peers[8:]))
        with connect(server.address, token=TOKEN, force_remote=True) as client:
            put_and_get(client)


@pytest.mark.parametrize("settings", [{"token": TOKEN}, tls()], ids=["plain", "curve"])
def test_a_handshake_that_succeeded_is_seen(settings: dict[str, str]) -> None:
    """Also of a client that sends no message."""
    with (
        Controller(replace(CONFIG, **settings)) as made,
        connect(made.address, **settings, force_remote=True) as client,
    ):
        watched = made._ledger_thread._zmq._unauthenticated  # type: ignore[union-attr]
        began: list[int] = []
        real = watched.began

        def note(descriptor: int) -> None:
            real(descriptor)
            began.extend(watched._unproven)

        watched.began = note  # type: ignore[method-assign]
        keys, endpoint = client._connections.get()._channel._calls.session.keys, f"tcp://{zmq_address_of(made.address)}"
        with zmq.Context() as context, dealer_socket(context, endpoint, keys):
            wait_until(lambda: began, "the connection to be noticed")
            wait_until(lambda: not watched._unproven, "its handshake to be seen")


CONNECT = """
import os, select, socket, sys
os.setuid(65534)
peers = [socket.socket(socket.AF_UNIX) for _ in range(6)]
for peer in peers:
    peer.connect("\\0" + sys.argv[1])
for peer in peers[:2]:
    while peer.recv(1024):
        pass
for peer in peers[2:]:
    peer.setblocking(False)
    try:
        print("open" if peer.recv(1024) else "ended")
    except BlockingIOError:
        print("open")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_other_users_of_the_host_have_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much they have sent over a socket of the host is not known."""
    monkeypatch.setattr(zap, "HANDSHAKE_MS", 3_600_000)
    monkeypatch.setattr(unauthenticated, "HELD_BYTES", 4 * zmq_frames.MAX_REQUEST_FRAME_BYTES)
    with (
        Controller(replace(CONFIG, token=TOKEN)) as made,
        connect(made.address, token=TOKEN) as client,
    ):
        name = client._connections.get()._channel.endpoint.removeprefix("ipc://@")
        command = [sys.executable, "-I", "-c", CONNECT, name]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
        assert told.stdout.split() == 4 * ["open"]
        client.register_partition("p", ["x"], None, ["t"])
