"""A real storage unit without a controller, for tests of the bulk connection: reports are kept in a queue."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from dataplane.config import MIB
from dataplane.core.addresses import boot_id
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import from_wire
from dataplane.ledger.commands import Input, UnitInfo
from dataplane.protocol.auth import Ticket
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.protocol.zap import present
from dataplane.storage.arena import Arena
from dataplane.storage.client import UnitConnection
from dataplane.storage.server import BulkServer
from dataplane.storage.transport.interface import UnitPayloads

WAIT_S = 60.0
TOKEN = "sesame"
EPOCH = 3
UNIT = 7

Report = TypeVar("Report", bound=Input)


class Unit:
    """`backed` of `capacity` bytes, numbered 7 in epoch 3, on ipc and loopback tcp."""

    def __init__(
        self,
        capacity: int = 32 * MIB,
        backed: int = 16 * MIB,
        *,
        directory: str = "/dev/shm",
        unit_id: int = UNIT,
        engine: UnitPayloads | None = None,
    ) -> None:
        self.reports: queue.Queue[Input] = queue.Queue()
        self.arena = Arena.create(directory, capacity, epoch=EPOCH)
        self.arena.grow(backed)
        self.server = BulkServer(
            self.arena, epoch=EPOCH, token=TOKEN, report=self.reports.put, tcp_host="127.0.0.1", engine=engine
        )
        self.server.start()
        if unit_id:
            self.server.unit = unit_id

    @property
    def info(self) -> UnitInfo:
        return UnitInfo(
            unit=UNIT,
            name="unit",
            host=boot_id(),
            epoch=EPOCH,
            endpoints=self.server.endpoints,
            arena_path=str(self.arena.path),
            capacity_bytes=self.arena.capacity_bytes,
        )

    def by(self, connection_kind: str) -> UnitInfo:
        """The unit as one reachable by `ipc` or `tcp` only."""
        return changed(
            self.info, endpoints=tuple(each for each in self.info.endpoints if each.startswith(connection_kind))
        )

    def connect(self, connection_kind: str = "ipc", *, session: int = 1, **more: Any) -> UnitConnection:
        return UnitConnection(self.by(connection_kind), session=session, token=TOKEN, **({"timeout_s": WAIT_S} | more))

    def expect(self, kind: type[Report]) -> Report:
        """The next report, which must be a `kind`."""
        report = self.reports.get(timeout=WAIT_S)
        assert isinstance(report, kind), report
        return report

    def close(self) -> None:
        self.server.stop()
        self.arena.close()

    def __enter__(self) -> Unit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def changed(info: UnitInfo, **facts: Any) -> UnitInfo:
    return msgspec.structs.replace(info, **facts)


class Peer:
    """A client that says whatever it is told to: raw frames to a unit and back."""

    def __init__(self, unit: Unit, token: str | None = TOKEN) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        present(self.socket, Ticket.of(token, str(unit.arena.path), str(EPOCH)))
        self.socket.connect(unit.server.endpoints[0])

    def ask(self, *payload: bytes, **header: Any) -> tuple[pb.BulkReply, list[bytes]]:
        """Send one request and wait for its reply."""
        self.send(*payload, **header)
        return self.reply()

    def send(self, *payload: bytes, **header: Any) -> None:
        facts = {"protocol_version": PROTOCOL_VERSION, "session": 1, "epoch": EPOCH, "call": 1}
        self.socket.send_multipart([pb.BulkRequest(**(facts | header)).SerializeToString(), *payload])

    def reply(self) -> tuple[pb.BulkReply, list[bytes]]:
        assert self.socket.poll(WAIT_S * 1000), "no reply"
        head, *rest = self.socket.recv_multipart()
        return pb.BulkReply.FromString(head), rest

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Process:
    """Python code in a process of its own, whose every printed line is waited for with `line`."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def interrupt_when(now):
    if now:
        raise KeyboardInterrupt


def write(*ranges, frames=None):
    """A request to write `ranges` of (offset, bytes); frames: how many ranges each frame of the payload fills."""
    offsets, sizes = zip(*ranges, strict=True) if ranges else ((), ())
    frame_ranges = [1] * len(ranges) if frames is None else frames
    return pb.WriteRanges(offsets=offsets, sizes=sizes, frame_ranges=frame_ranges)


def read(*ranges):
    """A request to read `ranges` of (offset, bytes)."""
    offsets, sizes = zip(*ranges, strict=True)
    return pb.ReadRanges(offsets=offsets, sizes=sizes)


def refused(answer):
    """The error with which a request was answered."""
    reply, payload = answer
    assert reply.WhichOneof("outcome") == "error", reply
    assert payload == []
    return from_wire(reply.error.name, reply.error.facts)
