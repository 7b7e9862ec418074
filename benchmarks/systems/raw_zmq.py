"""The limit of the remote connection: the same bytes between two processes over ZMQ on loopback TCP, without any
other work."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from benchmarks.payload import Batch
from benchmarks.systems.base import Span

CHUNK_BYTES = 4 << 20
READY_S = 60.0
DEADLINE_MS = 30_000


class RawZmq:
    """`put` sends the batch's bytes in frames without copying and waits for one acknowledgement. `read` requests
    the bytes and receives them into a warm buffer."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._buffer = np.empty(0, np.uint8)

    def open(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._peer = spawn.Process(target=_peer, args=(theirs,), daemon=True)
        self._peer.start()
        if not ours.poll(READY_S):
            raise TimeoutError(f"the ZMQ peer did not start within {READY_S:.0f} s")
        self._socket.set(zmq.RCVTIMEO, DEADLINE_MS)
        self._socket.set(zmq.SNDTIMEO, DEADLINE_MS)
        self._socket.connect(ours.recv())

    def put(self, batch: Batch, held: Span | None = None) -> Span:
        if len(self._buffer) != batch.nbytes:
            self._buffer = np.full(batch.nbytes, 1, np.uint8)
        self._socket.send(f"put 0 {batch.nbytes} {batch.nbytes}".encode())
        _send(self._socket, self._buffer)
        self._socket.recv()
        return Span.of(batch)

    def part(self, held: Span, first: int, last: int) -> Span:
        return held.part(first, last)

    def read(self, held: Span, names: list[str]) -> Mapping[str, Any]:
        self._socket.send(f"read {held.first} {held.last} {len(self._buffer)}".encode())
        _receive(self._socket, self._buffer[held.first : held.last])
        return {}

    def read_padded(self, held: Span, names: list[str]) -> Mapping[str, Any]:
        return self.read(held, names)

    def drop(self, held: Span) -> None:
        """Do nothing: no batch is stored."""

    def close(self) -> None:
        self._socket.send(b"end 0 0 0")
        self._peer.join(READY_S)
        self._context.destroy(linger=0)


def _send(socket: zmq.Socket[bytes], buffer: Any) -> None:
    for first in range(0, len(buffer), CHUNK_BYTES):
        socket.send(buffer[first : first + CHUNK_BYTES], copy=False)


def _receive(socket: zmq.Socket[bytes], buffer: Any) -> None:
    for first in range(0, len(buffer), CHUNK_BYTES):
        socket.recv_into(buffer[first : first + CHUNK_BYTES])


def _peer(pipe: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(f"tcp://127.0.0.1:{port}")
        buffer = np.empty(0, np.uint8)
        while True:
            verb, first, last, size = socket.recv().split()
            if verb == b"end":
                return
            if len(buffer) != int(size):
                buffer = np.full(int(size), 3, np.uint8)
            if verb == b"put":
                _receive(socket, buffer)
                socket.send(b"done")
            else:
                _send(socket, buffer[int(first) : int(last)])
