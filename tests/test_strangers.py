"""What a peer that does not know the token can make a service hold, and what it can learn from clients."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes

from dataplane import ServiceUnavailableError, connect, serve
from dataplane.controller import grpc_public, grpc_server
from dataplane.controller.controller import Controller
from dataplane.core.addresses import split_address
from dataplane.protocol import zap, zmq_frames
from dataplane.protocol.greeting import ENCRYPTED, greeting
from dataplane.storage.arena_record import discard
from dataplane.storage.transport.request_chunks import MAX_FRAME_BYTES
from tests.logs import logged
from tests.restarts import CONFIG, RestartableService, wait_until
from tests.test_security import endpoint_of_unit

pytestmark = pytest.mark.integration

WAIT_S = 60.0
SILENT_S = 1.0
"""Who says nothing for so long says nothing. A slow machine makes such a test see less, never fail."""
TOKEN = "open-sesame-7f3a"
MIB = 1 << 20
CONNECTIONS = 32
SENT_BYTES = 8 * MIB
"""What each of them sends; in all 256 MiB."""
HELD_BYTES = 128 * MIB


# --- memory


@dataclass
class Service:
    """A service with a token, in processes of its own."""

    address: str
    grpc_address: str
    process: psutil.Process

    def peak_bytes(self, *, anew: bool = False) -> int:
        """The most that each of its processes has held since it was asked `anew`, together."""
        pids = [self.process.pid, *(each.pid for each in self.process.children(recursive=True))]
        if anew:
            for pid in pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what is held now
        return sum(map(_peak_bytes, pids))


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not tell how much memory a process has held")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    command = [sys.executable, "-m", "dataplane", "serve", "--capacity", "16m", "--token-file", str(file)]
    command += ["--grpc-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            assert process.stdout is not None
            address, grpc_address = (process.stdout.readline().split()[-1] for _ in range(2))
            yield Service(address, grpc_address, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(WAIT_S)


READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
UNFINISHED = {
    "messages": (b"NULL", READY, [b"\x03" + (200 << 10).to_bytes(8, "big") + bytes(200 << 10)] * 41),
    "a long hello": (b"PLAIN", b"\x06" + (250 * MIB).to_bytes(8, "big"), [bytes(MIB)] * 8),
    "hellos": (b"PLAIN", b"\x06" + (255 << 10).to_bytes(8, "big"), [bytes(254 << 10)]),
    "a long hello of CURVE": (ENCRYPTED, b"\x06" + (250 * MIB).to_bytes(8, "big"), [bytes(MIB)] * 8),
    "hellos of CURVE": (ENCRYPTED, b"\x06" + (255 << 10).to_bytes(8, "big"), [bytes(254 << 10)]),
}


@pytest.mark.parametrize("what", UNFINISHED)
@pytest.mark.parametrize("endpoint", ["controller", "unit"])
def test_what_strangers_never_finish_is_not_kept(service: Service, endpoint: str, what: str) -> None:
    unit = endpoint_of_unit_at(service.address).removeprefix("tcp://")
    address = service.address if endpoint == "controller" else unit
    before = service.peak_bytes(anew=True)
    with contextlib.ExitStack() as ends:
        for _ in range(CONNECTIONS):
            peer = ends.enter_context(socket.create_connection(split_address(address), timeout=WAIT_S))
            send_unfinished(peer, *UNFINISHED[what])
        with connect(service.address, token=TOKEN, force_remote=True) as client:
            put_and_get(client)
    assert service.peak_bytes() - before < HELD_BYTES


def send_unfinished(peer: socket.socket, mechanism: bytes, first: bytes, parts: list[bytes]) -> None:
    """Until all is sent, or the other end has hung up."""
    with contextlib.suppress(ConnectionError):
        peer.sendall(greeting(mechanism))
        got = b""
        while len(got) < 64:
            part = peer.recv(64 - len(got))
            if not part:
                return
            got += part
        peer.sendall(first)
        for each in parts:
            peer.sendall(each)


@pytest.mark.parametrize("endpoint", ["controller", "unit"])
def test_handshakes_that_are_too_many_are_hung_up_on(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Those that succeeded do not count."""
    monkeypatch.setattr(zap, "HANDSHAKE_MS", 3_600_000)
    monkeypatch.setattr(zap, "HELD_BYTES", 4 * MAX_FRAME_BYTES)
    monkeypatch.setattr(zmq_frames, "MAX_REQUEST_FRAME_BYTES", MAX_FRAME_BYTES)  # so that there are four in either
    with serve({"capacity_bytes": 8 * MIB, "token": TOKEN}) as server, contextlib.ExitStack() as ends:
        for _ in range(4):
            put_and_get(ends.enter_context(connect(server.address, token=TOKEN, force_remote=True)))
        unit = endpoint_of_unit(server, token=TOKEN).removeprefix("tcp://")
        address = server.address if endpoint == "controller" else unit
        peers = []
        # Clients that have come and gone may count as one more each.
        for _ in range(64):
            peers.append(ends.enter_context(socket.create_connection(split_address(address), timeout=WAIT_S)))
            peers[-1].sendall(greeting(ENCRYPTED if endpoint == "controller" else b"PLAIN"))
        wait_until(lambda: has_ended(peers[-1]), "the last one to be hung up on")
        assert not any(map(has_ended, peers[:4]))
        # The service may be too busy for a client with the right token, which is not told that its token is wrong.
        with contextlib.suppress(ServiceUnavailableError):
            connect(server.address, token=TOKEN, connect_timeout_s=2.0).close()
        for peer in peers:
            peer.close()
        with connect(server.address, token=TOKEN, force_remote=True) as client:
            put_and_get(client)


def has_ended(peer: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while select.select([peer], [], [], 0)[0]:
            if not peer.recv(1 << 16):
                return True
        return False
    return True


def endpoint_of_unit_at(address: str) -> str:
    @dataclass
    class Server:
        address: str

    return endpoint_of_unit(Server(address), token=TOKEN)  # type: ignore[arg-type]


def put_and_get(client: Any) -> None:
    client.register_partition("p", ["x"], num_samples=2, consumer_tasks=["t"])
    client.put_samples(["a", "b"], "p", {"x": [torch.arange(5), torch.arange(300_000)]})
    assert torch.equal(client.get_samples(["b"], "p", ["x"])["x"][0], torch.arange(300_000))
    client.clear_samples(None, "p")


METHODS = ["/grpc.health.v1.Health/Check", "/tq.v1.Control/PutTags"]


@pytest.mark.parametrize("method", METHODS)
def test_the_body_of_a_call_without_the_token_is_not_read(service: Service, method: str) -> None:
    before = service.peak_bytes(anew=True)
    with socket.create_connection(split_address(service.grpc_address), timeout=SILENT_S) as peer:
        send_endless_calls(peer, service.grpc_address, method, calls=4, each_bytes=60 * MIB)
        assert service.peak_bytes() - before < HELD_BYTES
    with connect(service.address, token=TOKEN) as client:
        put_and_get(client)


def send_endless_calls(peer: socket.socket, address: str, method: str, *, calls: int, each_bytes: int) -> None:
    """Calls whose message is announced as of 250 MiB and never ends: until all of it is sent, each call is answered, or
    no more is taken."""
    connection = H2Connection(H2Configuration(client_side=True, validate_inbound_headers=False))
    connection.initiate_connection()
    rest: dict[int, int] = {}
    for _ in range(calls):
        stream = connection.get_next_available_stream_id()
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": address}
        connection.send_headers(stream, [*headers.items(), ("te", "trailers"), ("content-type", "application/grpc")])
        connection.send_data(stream, b"\0" + (250 * MIB).to_bytes(4, "big"))
        rest[stream] = each_bytes
    with contextlib.suppress(TimeoutError, ConnectionError):
        while rest:
            for stream in rest:
                while rest[stream] and (space := connection.local_flow_control_window(stream)):
                    size = min(space, connection.max_outbound_frame_size, rest[stream])
                    connection.send_data(stream, bytes(size))
                    rest[stream] -= size
            peer.sendall(connection.data_to_send())
            rest = {stream: left for stream, left in rest.items() if left}
            if not rest:
                return
            for event in connection.receive_data(peer.recv(1 << 16)):
                if isinstance(event, StreamEnded | StreamReset):
                    rest.pop(event.stream_id or 0, None)


# --- places


def test_calls_whose_answers_nobody_takes_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_public, "CALLS_PER_PEER", 4)
    config = replace(CONFIG, token=TOKEN, grpc_port=0)
    with Controller(config) as controller, grpc.insecure_channel(controller.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def is_busy() -> bool:
            """Says why it is, if it is."""
            try:
                stub.Check(health_pb2.HealthCheckRequest())
            except grpc.RpcError as error:
                return "concurrent calls without a token from ipv4:127.0.0.1: 5, and the limit" in str(error.details())
            return False

        with socket.create_connection(split_address(controller.grpc_address), timeout=WAIT_S) as peer:
            call_and_take_nothing(peer, controller.grpc_address, "/grpc.health.v1.Health/Check", calls=4)
            assert is_busy()
        wait_until(lambda: not is_busy(), "the calls to have ended")


def call_and_take_nothing(peer: socket.socket, address: str, method: str, *, calls: int) -> None:
    """Calls whose answers the other end may not send: the caller has no space for them. Returns when all are under way:
    the headers of an answer need no space."""
    connection = H2Connection(H2Configuration(client_side=True, validate_inbound_headers=False))
    connection.initiate_connection()
    connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    for _ in range(calls):
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": address}
        stream = connection.get_next_available_stream_id()
        connection.send_headers(stream, [*headers.items(), ("te", "trailers"), ("content-type", "application/grpc")])
    peer.sendall(connection.data_to_send())
    while calls:
        received = peer.recv(1 << 16)
        assert received, "the service closed the connection"
        calls -= sum(isinstance(event, ResponseReceived) for event in connection.receive_data(received))
        peer.sendall(connection.data_to_send())


def test_a_grpc_port_with_as_many_connections_as_it_takes_closes_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CONNECTIONS", 4)
    monkeypatch.setattr(grpc_server, "IDLE_S", 3600)
    config = replace(CONFIG, token=TOKEN, grpc_port=0)
    with Controller(config) as controller, contextlib.ExitStack() as ends:
        address = split_address(controller.grpc_address)
        for _ in range(4):
            peer = ends.enter_context(socket.create_connection(address, timeout=WAIT_S))
            connection = H2Connection(H2Configuration(client_side=True))
            connection.initiate_connection()
            peer.sendall(connection.data_to_send())
            assert peer.recv(1)
        with socket.create_connection(address, timeout=WAIT_S) as late:
            assert not late.recv(1)
        connect(controller.address, token=TOKEN).close()


@pytest.mark.parametrize(
    ("token", "mechanism", "why"),
    [
        (TOKEN, b"NULL", "it has no token"),
        (None, ENCRYPTED, "it has a token, and this service has none"),
        (TOKEN, ENCRYPTED, "it did not send the handshake of ZMQ"),
    ],
)
def test_a_peer_without_the_handshake_is_named_in_the_log(token: str | None, mechanism: bytes, why: str) -> None:
    with (
        Controller(replace(CONFIG, token=token)) as controller,
        logged(why),
        socket.create_connection(split_address(controller.address), timeout=WAIT_S) as peer,
        contextlib.suppress(ConnectionError),
    ):
        peer.sendall(greeting(mechanism) + b"\x04\x02\x01x")
        while peer.recv(1024):
            pass


# --- what an impostor learns


class Impostor:
    """A process that has taken the free port and the ipc name of a service, greets everybody as a service with a token
    does, and notes all that it is told."""

    def __init__(self, address: str, ipc: str) -> None:
        self.told: list[bytes] = []
        self._ending = threading.Event()
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind("\0" + ipc.removeprefix("ipc://@"))
        abstract.listen()
        self._listeners = [socket.create_server(split_address(address)), abstract]
        self._threads = [threading.Thread(target=self._listen, args=(each,)) for each in self._listeners]
        for thread in self._threads:
            thread.start()

    def _listen(self, listener: socket.socket) -> None:
        listener.settimeout(0.05)
        while not self._ending.is_set():
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(0.2)
                    peer.sendall(greeting(ENCRYPTED)[:32] + b"\x01" + bytes(31))  # 1: as a server
                    while told := peer.recv(1 << 16):
                        self.told.append(told)

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()


HELLO = b"\x05HELLO"
HELLO_BYTES = 202
GREETING_BYTES = 64


def test_who_takes_the_place_of_a_service_learns_nothing(tmp_path: Path) -> None:
    restartable = RestartableService(tmp_path / "state", replace(CONFIG, token=TOKEN))
    restartable.start()
    restartable.unit(state_dir=str(tmp_path / "state"))
    try:
        with connect(restartable.address, token=TOKEN, heartbeat_s=0.1) as client, ThreadPoolExecutor(1) as pool:
            put_and_get(client)
            endpoint = client._connections.get()._channel.endpoint
            assert endpoint.startswith("ipc://")
            client.register_partition("q", ["x"], None, ["t"])
            waiting = pool.submit(client.claim_meta, "q", "t", ["x"], 1)
            restartable.stop()
            impostor = Impostor(restartable.address, endpoint)
            wait_until(lambda: sum(HELLO in told for told in impostor.told) > 2, "clients and units to connect again")
            impostor.close()
            restartable.start()
            client.put_samples(["a"], "q", {"x": torch.ones(1, 4)})
            assert waiting.result(WAIT_S).sample_ids == ["a"]
            # Nothing but greetings and the first command of the handshake, which is encrypted for the service.
            for told in impostor.told:
                assert len(told) <= GREETING_BYTES + HELLO_BYTES
                assert told.startswith((b"\xff", b"\x03", b"CURVE", b"\x04")) or HELLO in told
                assert TOKEN.encode() not in told
    finally:
        restartable.close()
        discard(tmp_path / "state", ["/dev/shm"])


def test_a_service_with_another_token_ends_neither_sessions_nor_storage_units(tmp_path: Path) -> None:
    restartable = RestartableService(tmp_path / "state", replace(CONFIG, token=TOKEN))
    restartable.start()
    unit = restartable.unit(state_dir=str(tmp_path / "state"))
    port = split_address(restartable.address)[1]
    try:
        with connect(restartable.address, token=TOKEN, heartbeat_s=0.1) as client:
            put_and_get(client)
            restartable.stop()
            other = replace(CONFIG, token=TOKEN + "x", port=port, state_dir=None)
            with Controller(other), logged("wrong token"):
                pass
            restartable.start()
            put_and_get(client)
            assert not unit.lost.is_set()
    finally:
        restartable.close()
        discard(tmp_path / "state", ["/dev/shm"])
