"""What a peer that does not know the token can make a service hold, and what it can learn from clients."""

from __future__ import annotations

import contextlib
import functools
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
import zmq
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes

from dataplane import AuthenticationError, connect, serve
from dataplane.controller import grpc_public, grpc_server
from dataplane.controller.controller import Controller
from dataplane.core.addresses import split_address
from dataplane.errors import SessionExpiredError, to_wire
from dataplane.protocol import http2, server_keys, zap, zmq_frames
from dataplane.protocol.controller_socket import zmq_address_of
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.proof import NONCE_BYTES, proof_of
from dataplane.protocol.server_keys import keys_of
from dataplane.protocol.zap import ENDPOINT
from dataplane.storage.arena_record import discard
from dataplane.storage.transport.request_chunks import MAX_FRAME_BYTES
from tests.logs import logged
from tests.restarts import CONFIG, RestartableService, wait_until
from tests.test_security import endpoint_of_unit, heard, hello

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
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            yield Service(address, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(WAIT_S)


def greeting(mechanism: bytes) -> bytes:
    """The beginning of ZMTP 3.0, as a client's."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
UNFINISHED = {
    "messages": (b"NULL", READY, [b"\x03" + (200 << 10).to_bytes(8, "big") + bytes(200 << 10)] * 41),
    "a long hello": (b"PLAIN", b"\x06" + (250 * MIB).to_bytes(8, "big"), [bytes(MIB)] * 8),
    "hellos": (b"PLAIN", b"\x06" + (255 << 10).to_bytes(8, "big"), [bytes(254 << 10)]),
}


@pytest.mark.parametrize("what", UNFINISHED)
@pytest.mark.parametrize("endpoint", ["controller", "unit"])
def test_what_strangers_never_finish_is_not_kept(service: Service, endpoint: str, what: str) -> None:
    unit = endpoint_of_unit_at(service.address).removeprefix("tcp://")
    address = zmq_address_of(service.address) if endpoint == "controller" else unit
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
        address = zmq_address_of(server.address) if endpoint == "controller" else unit
        peers = []
        # Clients that have come and gone may count as one more each.
        for _ in range(64):
            peers.append(ends.enter_context(socket.create_connection(split_address(address), timeout=WAIT_S)))
            peers[-1].sendall(greeting(b"PLAIN"))
        wait_until(lambda: has_ended(peers[-1]), "the last one to be hung up on")
        assert not any(map(has_ended, peers[:4]))
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


METHODS = ["/grpc.health.v1.Health/Check", server_keys.METHOD, "/tq.v1.Control/PutTags"]


@pytest.mark.parametrize("method", METHODS)
def test_the_body_of_a_call_without_the_token_is_not_read(service: Service, method: str) -> None:
    before = service.peak_bytes(anew=True)
    with socket.create_connection(split_address(service.address), timeout=SILENT_S) as peer:
        send_endless_calls(peer, service.address, method, calls=4, each_bytes=60 * MIB)
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


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", server_keys.METHOD])
def test_calls_whose_answers_nobody_takes_have_a_budget(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(grpc_public, "CALLS_PER_PEER", 4)
    with Controller(replace(CONFIG, token=TOKEN)) as controller, grpc.insecure_channel(controller.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def is_busy() -> bool:
            """Says why it is, if it is."""
            try:
                stub.Check(health_pb2.HealthCheckRequest())
            except grpc.RpcError as error:
                return "concurrent calls without a token from ipv4:127.0.0.1: 5, and the limit" in str(error.details())
            return False

        with socket.create_connection(split_address(controller.address), timeout=WAIT_S) as peer:
            call_and_take_nothing(peer, controller.address, method, calls=4)
            assert is_busy()
            why = "replied with gRPC status 8: concurrent calls without a token from ipv4:127.0.0.1: 5, and the limit"
            with pytest.raises(http2.BusyError, match=why):
                server_keys._request_keys(controller.address, None, bytes(NONCE_BYTES), lambda: WAIT_S)
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(connect, controller.address, token=TOKEN, connect_timeout_s=WAIT_S)
                assert wait([asked], SILENT_S).not_done
                peer.shutdown(socket.SHUT_RDWR)
                asked.result(WAIT_S).close()
        wait_until(lambda: not is_busy(), "the calls to have ended")


def call_and_take_nothing(peer: socket.socket, address: str, method: str, *, calls: int) -> None:
    """Calls whose answers the other end may not send: the caller has no space for them. Returns when all are under way:
    the headers of an answer need no space."""
    connection = H2Connection(H2Configuration(client_side=True, validate_inbound_headers=False))
    connection.initiate_connection()
    connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    for _ in range(calls):
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": address}
        asks = ("content-type", "application/grpc"), (server_keys.NONCE_KEY, "00" * NONCE_BYTES)
        stream = connection.get_next_available_stream_id()
        connection.send_headers(stream, [*headers.items(), ("te", "trailers"), *asks])
    peer.sendall(connection.data_to_send())
    while calls:
        received = peer.recv(1 << 16)
        assert received, "the service closed the connection"
        calls -= sum(isinstance(event, ResponseReceived) for event in connection.receive_data(received))
        peer.sendall(connection.data_to_send())


def test_a_port_with_as_many_connections_as_it_takes_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CONNECTIONS", 4)
    monkeypatch.setattr(grpc_server, "IDLE_S", 3600)
    with Controller(replace(CONFIG, token=TOKEN)) as controller, contextlib.ExitStack() as ends:
        for _ in range(4):
            peer = ends.enter_context(socket.create_connection(split_address(controller.address), timeout=WAIT_S))
            connection = H2Connection(H2Configuration(client_side=True))
            connection.initiate_connection()
            peer.sendall(connection.data_to_send())
            assert peer.recv(1)
        with socket.create_connection(split_address(controller.address), timeout=WAIT_S) as late:
            assert not late.recv(1)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(connect, controller.address, token=TOKEN, connect_timeout_s=WAIT_S)
            assert wait([asked], SILENT_S).not_done
            peer.close()
            asked.result(WAIT_S).close()


def test_an_older_client_is_named_in_the_log() -> None:
    with (
        Controller(replace(CONFIG, token=TOKEN)) as controller,
        logged("did not send this protocol's handshake"),
        socket.create_connection(split_address(zmq_address_of(controller.address)), timeout=WAIT_S) as peer,
    ):
        peer.sendall(greeting(b"NULL"))
        with contextlib.suppress(ConnectionError):
            while peer.recv(1024):
                pass


# --- what an impostor learns


class Impostor:
    """A process that has taken the free ports and the ipc name of a service, lets everybody in, and notes all it is
    told."""

    def __init__(self, address: str, ipc: str) -> None:
        self.told: list[bytes] = []
        self.passwords: list[bytes] = []
        self._ending = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.plain_server = 1
        self._router.zap_domain = b"x"
        self._router.bind(f"tcp://{zmq_address_of(address)}")
        self._router.bind(ipc)
        self._listener = socket.create_server(split_address(address))
        self._listener.settimeout(0.05)
        self._threads = [threading.Thread(target=each) for each in (self._let_in, self._listen)]
        for thread in self._threads:
            thread.start()

    def _let_in(self) -> None:
        while not self._ending.is_set():
            for ready, _ in zmq.zmq_poll([(self._zap, zmq.POLLIN), (self._router, zmq.POLLIN)], 50):
                frames = ready.recv_multipart()
                self.told += frames
                if ready is self._zap:
                    self.passwords.append(frames[-1])
                    self._zap.send_multipart([b"1.0", frames[1], b"200", b"", b"", b""])

    def _listen(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(OSError):
                peer, _ = self._listener.accept()
                with peer:
                    peer.settimeout(0.2)
                    self.told.append(peer.recv(1 << 16))

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._context.destroy(linger=0)


def test_who_takes_the_place_of_a_service_learns_no_token_and_no_ticket_of_another_instance(tmp_path: Path) -> None:
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
            wait_until(lambda: len(impostor.told) > 2, "what clients say to whoever listens")
            wait_until(lambda: impostor.passwords, "what libzmq shows when it connects again")
            impostor.close()
            restartable.start()
            client.put_samples(["a"], "q", {"x": torch.ones(1, 4)})
            assert waiting.result(WAIT_S).sample_ids == ["a"]
            living = keys_of(restartable.address, TOKEN, None, deadline=time.monotonic() + WAIT_S).ticket
            assert living is not None
            for shown in impostor.told:
                assert TOKEN.encode() not in shown
                assert living.code.encode() not in shown
            for password in impostor.passwords:
                endpoint = f"tcp://{zmq_address_of(restartable.address)}"
                assert not heard(endpoint, hello(), replace(living, code=password.decode()))
            assert heard(f"tcp://{zmq_address_of(restartable.address)}", hello(), living)
    finally:
        restartable.close()
        discard(tmp_path / "state", ["/dev/shm"])


def lie(how: str, address: str, files: object, nonce: bytes, rest: object) -> tuple[bytes, str]:
    """What an impostor answers to GetKeys."""
    token = TOKEN + "x" if how == "another token" else TOKEN
    port = split_address(address)[1] + (how == "another port")
    asked = secrets.token_bytes(NONCE_BYTES) if how == "another nonce" else nonce
    return pb.Keys(instance="i", proof=proof_of(token, asked, "i", port)).SerializeToString(), address


@pytest.mark.parametrize("how", ["another token", "another port", "another nonce"])
def test_who_cannot_prove_that_it_knows_the_token_is_no_service(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(server_keys, "_request_keys", functools.partial(lie, how))
    with pytest.raises(AuthenticationError, match="no valid proof for this token"):
        keys_of("127.0.0.1:7", TOKEN, None, deadline=time.monotonic() + WAIT_S)


@pytest.mark.parametrize("how", ["proof", "error"])
def test_an_impostor_ends_neither_sessions_nor_storage_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    restartable = RestartableService(tmp_path / "state", replace(CONFIG, token=TOKEN))
    restartable.start()
    unit = restartable.unit(state_dir=str(tmp_path / "state"))
    asked: set[str] = set()

    def answer(address: str, files: object, nonce: bytes, rest: object) -> tuple[bytes, str]:
        asked.add(threading.current_thread().name)
        if how == "proof":
            return lie("another token", address, files, nonce, rest)
        name, facts = to_wire(SessionExpiredError(session=1, why="so an impostor says"))
        return pb.Keys(error=pb.Error(name=name, facts=facts)).SerializeToString(), address

    try:
        with connect(restartable.address, token=TOKEN, heartbeat_s=0.1) as client:
            put_and_get(client)
            with monkeypatch.context() as patched:
                patched.setattr(server_keys, "_request_keys", answer)
                restartable.restart()
                wait_until(lambda: asked >= {"tq-heartbeat", "tq-unit-link"}, "both to look for the service")
            put_and_get(client)
            assert not unit.lost.is_set()
    finally:
        restartable.close()
        discard(tmp_path / "state", ["/dev/shm"])
