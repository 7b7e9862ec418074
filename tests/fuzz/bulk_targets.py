"""Frames of the bulk connection: whole messages to a real server, and a server's replies to a real client's socket."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack

import zmq

from dataplane.core.addresses import boot_id
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import DataPlaneError, SessionExpiredError, from_wire, to_wire
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.connection import Wire, WireLostError
from tests.fuzz.target import Feed, FindingError, Standing, Target, piece
from tests.storage.unit_under_test import EPOCH, WAIT_S, Peer, Unit

BACKED_BYTES = 1 << 20
LAST_CALL = 1 << 40


def _begin(ends: ExitStack) -> tuple[Unit, Peer]:
    unit = ends.enter_context(Unit(capacity=BACKED_BYTES, backed=BACKED_BYTES))
    return unit, ends.enter_context(Peer(unit))


_server = Standing(_begin)


def bulk_requests(data: bytes) -> None:
    """A message of any frames. Whatever it is, the next request is served."""
    unit, peer = _server()
    feed = Feed(data)
    frames = [feed.piece()]
    while feed:
        frames.append(feed.piece())
    peer.socket.send_multipart(frames)
    peer.send(call=LAST_CALL, session=LAST_CALL, read=pb.ReadRanges(offsets=[0], sizes=[8]))
    while peer.socket.poll(int(WAIT_S * 1000)):
        head, *_ = peer.socket.recv_multipart()
        reply = pb.BulkReply.FromString(head)
        if reply.WhichOneof("outcome") == "error":
            str(from_wire(reply.error.name, reply.error.facts))
        if reply.call == LAST_CALL:
            return
    raise FindingError("the server does not answer" if unit.server.alive else "the server's thread is dead")


def request_seeds() -> list[bytes]:
    verbs = [
        {"attach": pb.Attach(lock_path="/dev/shm/tq-session-" + "0" * 32 + ".lock", boot_id=boot_id())},
        {"attach": pb.Attach()},
        {"proof": pb.AttachProof(seen=b"x" * 32)},
        {"read": pb.ReadRanges(offsets=[0, 100, 64], sizes=[10, 5, 0])},
        {"read": pb.ReadRanges(offsets=list(range(0, 800, 8)), sizes=[8] * 100)},
        {"stop": pb.StopPut(reservation=5)},
        {},
    ]
    writes = [
        _request(b"abcdef", b"x", write=pb.WriteRanges(offsets=[0, 9], sizes=[6, 1], frame_ranges=[1, 1])),
        _request(b"abcdef", write=pb.WriteRanges(offsets=[0, 9], sizes=[4, 2], frame_ranges=[2], reservation=3)),
    ]
    return [*(_request(**verb) for verb in verbs), *writes, piece(b"")]


def _request(*payload: bytes, **verb: object) -> bytes:
    header = pb.BulkRequest(protocol_version=PROTOCOL_VERSION, session=1, epoch=EPOCH, call=1, **verb)
    return b"".join(map(piece, [header.SerializeToString(), *payload]))


# --- replies ------------------------------------------------------------------------------------------------------


class _FalseServer:
    """A unit that answers with whatever a test has."""

    def __init__(self, ends: ExitStack) -> None:
        self.context = ends.enter_context(zmq.Context())
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        self.endpoint = f"ipc://{folder}/unit"
        self.router = ends.enter_context(self.context.socket(zmq.ROUTER))
        self.router.linger = 0
        self.router.bind(self.endpoint)
        self.wake = os.eventfd(0)
        ends.callback(os.close, self.wake)


_false_server = Standing(_FalseServer)


def bulk_replies(data: bytes) -> None:
    """A reply of any frames, to a client that asked for as many bytes as it says."""
    server, feed = _false_server(), Feed(data)
    asked = feed.number(256)
    wire = Wire(server.context, server.endpoint, wake=server.wake)
    try:
        header = wire.request(session=1, epoch=1)
        wire.send(header, held=[])
        peer, *_ = server.router.recv_multipart()
        frames = [feed.piece()]
        while feed:
            frames.append(feed.piece())
        server.router.send_multipart([peer, *frames])
        wire.receive(header.call, time.monotonic() + WAIT_S)
        if len(wire.payload(asked)) != asked:
            raise FindingError("a payload of another size was taken")
    finally:
        wire.close()


def reply_seeds() -> list[bytes]:
    name, facts = to_wire(SessionExpiredError(session=3, why="it is over"))
    replies = [
        pb.BulkReply(call=1, bytes=pb.ReadBytes(size=5)),
        pb.BulkReply(call=1, error=pb.BulkError(name=name, facts=facts)),
        pb.BulkReply(call=1, challenge=pb.Challenge(local=True, arena_path="/x", offset=1, length=2)),
    ]
    return [b"\5" + piece(reply.SerializeToString()) + piece(b"hello") for reply in replies]


TARGETS = [
    Target(name="bulk-requests", run=bulk_requests, seeds=request_seeds, examples=300),
    # What does not leave its package: `UnitConnection` tells it as `StorageUnitError` and `CallTimeoutError`.
    Target(name="bulk-replies", run=bulk_replies, seeds=reply_seeds, allowed=(DataPlaneError, WireLostError)),
]
