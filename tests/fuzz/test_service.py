"""A real service takes thousands of damaged messages on every port, and goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import msgspec
import psutil
import pytest
import torch
import zmq

import dataplane
from dataplane.core.addresses import split_address
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.protocol.pb import control_pb2
from tests.fuzz.control_targets import day
from tests.fuzz.mutation import damage
from tests.protocol.values import grpc_request

pytestmark = pytest.mark.integration

MIB = 1 << 20
SERVER_MESSAGES = 2000
GRPC_CALLS = 400
BULK_MESSAGES = 1500
RAW_CONNECTIONS = 60
GROWTH_BYTES = 96 * MIB
"""What a process of the service may keep of all that. Messages have some hundred bytes."""
WAIT_MS = 60_000
TCP_BEGINNINGS = (
    b"",
    b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48),
    b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + bytes(47),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
)


class Service:
    """`tq serve` and what it says. `processes`: its controller's and its unit's."""

    def __init__(self, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "dataplane", "serve", "--capacity", "64m", "--grpc-port", "0"]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self._process.stdout is not None
        self.address, self.grpc_address = (self._process.stdout.readline().split()[-1] for _ in range(2))
        controller = psutil.Process(self._process.pid)
        self.processes = [controller, *controller.children()]

    def sizes(self) -> list[tuple[int, int]]:
        """(threads, bytes) of each process; shared memory is not counted."""
        return [(_threads(each.pid), each.memory_info().rss - each.memory_info().shared) for each in self.processes]

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)


def _threads(process: int) -> int:
    """But for those of gRPC's pool, which it has more of while it is late with its work."""
    found = 0
    for name in Path(f"/proc/{process}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += name.read_text() != "event_engine\n"
    return found


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(tmp_path / "log")
    yield running
    running.end()


@pytest.mark.slow
def test_a_service_outlives_thousands_of_damaged_messages(service: Service) -> None:
    works(service)
    before = service.sizes()
    with session(service) as opened:
        attack_headers(service, opened.session)
        attack_door(service, opened.session)
        attack_grpc(service, opened.session)
        attack_units(opened)
        attack_sockets(service, opened)
    works(service)
    for (threads, nbytes), (threads_before, nbytes_before) in zip(service.sizes(), before, strict=True):
        assert threads >= threads_before
        assert nbytes - nbytes_before < GROWTH_BYTES
    said = service.log.read_text()
    failures = said[said.find("Traceback") :] if "Traceback" in said else ""
    assert not failures, failures[:4000]


def works(service: Service) -> None:
    """An ordinary client gets what it put."""
    with dataplane.connect(service.address) as client:
        client.register_partition("mine", ["x"], 2, ["train"])
        client.put_samples(["a", "b"], "mine", {"x": [torch.arange(5), torch.arange(3)]})
        meta = client.claim_meta("mine", "train", ["x"], 2, timeout_s=30)
        assert [row.tolist() for row in client.get_data(meta)["x"].unbind()] == [[0, 1, 2, 3, 4], [0, 1, 2]]
        client.clear_samples(None, "mine")


@contextlib.contextmanager
def session(service: Service) -> Iterator[c.Opened]:
    """A session that is opened by hand."""
    wanted = c.OpenSession(nonce="attacker", host="elsewhere", name="attacker", protocol_version=PROTOCOL_VERSION)
    with dealer(endpoint(service)) as peer:
        peer.send_multipart(zmq_frames.request(wanted))
        assert peer.poll(WAIT_MS)
        (reply,) = zmq_frames.Reply.parse(peer.recv_multipart())
        opened: c.Opened = messages.decode_with(zmq_frames.WELCOME, reply.good_body()).opened
        yield opened
        bye = c.Call(session=opened.session, call_id=1 << 40, watermark=1 << 40, command=c.Bye())
        peer.send_multipart(zmq_frames.request(bye))
        assert peer.poll(WAIT_MS)


def endpoint(service: Service) -> str:
    return f"tcp://{service.address}"


@contextlib.contextmanager
def dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.sndtimeo = WAIT_MS
        socket.connect(endpoint)
        yield socket


def encoded(item: c.Input) -> bytes:
    """The request on gRPC."""
    request: bytes = grpc_request(item).SerializeToString()
    return request


def requests(session: int, count: int, encode: Callable[[c.Input], bytes]) -> Iterator[tuple[str, bytes]]:
    """Damaged requests of a session, one in eight of them good, and the names of their commands."""
    log = [item for item in day().log if isinstance(item, c.Call | c.OpenSession)]
    chance = random.Random(7)
    for call_id in range(1, count + 1):
        item, other = chance.choice(log), chance.choice(log)
        if isinstance(item, c.Call):
            item = msgspec.structs.replace(item, session=session, call_id=call_id, watermark=max(1, call_id - 100))
        name = type(item.command if isinstance(item, c.Call) else item).__name__
        yield name, damage(encode(item), encode(other), call_id if call_id % 8 else 0)


def attack_door(service: Service, session: int) -> None:
    chance = random.Random(3)
    with dealer(endpoint(service)) as peer:
        for _, body in requests(session, SERVER_MESSAGES, messages.encode):
            frames = [zmq_frames.JOINED, body]
            if chance.random() < 0.2:
                frames = [damage(frame, body, chance.randrange(1 << 30)) for frame in frames]
            if chance.random() < 0.1:
                frames = frames[: chance.randrange(1, 4)] + frames[: chance.randrange(3)]
            if frames:
                peer.send_multipart(frames)
            while peer.poll(0):
                peer.recv_multipart()
        # It answers what comes after.
        with dealer(endpoint(service)) as other:
            other.send_multipart(zmq_frames.request(c.Heartbeat(session=session)))
            assert other.poll(WAIT_MS)


def attack_headers(service: Service, session: int) -> None:
    """Commands in places that cannot be are answered all the same, on both ports."""
    with dealer(endpoint(service)) as peer, grpc.insecure_channel(service.grpc_address) as channel:
        stats = channel.unary_unary("/tq.v1.Control/Stats", bytes, bytes)
        least = -(1 << 63)
        for place in ((session, -1, 1), (-1, 1, 1), (session, 1, -1), (least, least, least), (1 << 62, 1, 1)):
            request = control_pb2.StatsRequest()
            request.header.session, request.header.call_id, request.header.watermark = place
            body = request.SerializeToString()
            call = c.Call(session=place[0], call_id=place[1], watermark=place[2], command=c.Stats())
            peer.send_multipart(zmq_frames.request(call))
            assert peer.poll(WAIT_MS), place
            (reply,) = zmq_frames.Reply.parse(peer.recv_multipart())
            assert reply.outcome in ("InvalidRequestError", "SessionExpiredError")
            with pytest.raises(grpc.RpcError):
                stats(body, timeout=WAIT_MS / 1000)


def attack_grpc(service: Service, session: int) -> None:
    def identity(body: bytes) -> bytes:
        return body

    names = [method.name for method in control_pb2.DESCRIPTOR.services_by_name["Control"].methods]
    chance = random.Random(5)
    with grpc.insecure_channel(service.grpc_address) as channel:
        for method, body in requests(session, GRPC_CALLS, encoded):
            name = method if chance.random() < 0.8 else chance.choice(names)
            call = channel.unary_unary(f"/tq.v1.Control/{name}", identity, identity)
            with contextlib.suppress(grpc.RpcError):
                call(body, timeout=0.2)


def attack_units(opened: c.Opened) -> None:
    """Read, write and stop with damages, to the unit's own socket."""
    chance = random.Random(11)
    for unit in opened.units:
        good = pb.BulkRequest(protocol_version=PROTOCOL_VERSION, session=opened.session, epoch=unit.epoch, call=1)
        with dealer(next(each for each in unit.endpoints if each.startswith("tcp"))) as peer:
            for number in range(BULK_MESSAGES):
                good.call = number + 1
                match number % 3:
                    case 0:
                        good.read.CopyFrom(pb.ReadRanges(offsets=[0, 64], sizes=[64, chance.randrange(4096)]))
                    case 1:
                        good.write.CopyFrom(pb.WriteRanges(offsets=[0], sizes=[64], frame_ranges=[1], reservation=1))
                    case 2:
                        good.stop.CopyFrom(pb.StopPut(reservation=number))
                header = good.SerializeToString()
                frames = [damage(header, header, chance.randrange(1 << 30)), chance.randbytes(64)]
                peer.send_multipart(frames[: chance.randrange(1, 3)])
                while peer.poll(0):
                    peer.recv_multipart()


def attack_sockets(service: Service, opened: c.Opened) -> None:
    """Bytes of no protocol, and what begins like one of theirs."""
    addresses = [service.address, service.grpc_address]
    units = [each.removeprefix("tcp://") for unit in opened.units for each in unit.endpoints if each.startswith("tcp")]
    chance = random.Random(13)
    for address in map(split_address, [*addresses, *units]):
        for number in range(RAW_CONNECTIONS):
            with socket.create_connection(address, timeout=WAIT_MS / 1000) as peer, contextlib.suppress(OSError):
                peer.sendall(TCP_BEGINNINGS[number % len(TCP_BEGINNINGS)] + chance.randbytes(200))
