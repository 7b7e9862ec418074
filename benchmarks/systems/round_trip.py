"""The lower bound of a command: one message to another Python process and its answer, over ZMQ."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

import zmq

from benchmarks.measure import seconds, steady
from benchmarks.payload import Batch
from benchmarks.systems.base import Span

REFERENCE_S = 66e-6
"""The round trip of the otherwise idle machine that produced the README's results."""
READY_S = 60.0
DEADLINE_MS = 30_000
MESSAGE = bytes(64)


def at_reference(values: list[float], round_trips: list[float]) -> list[float]:
    """Scale latencies of rounds, in any unit, to a machine whose round trip takes `REFERENCE_S`: multiply each with
    that over the round trip of the same round, in seconds."""
    return [value * REFERENCE_S / trip for value, trip in zip(values, round_trips, strict=True)]


class RoundTrip:
    """`put` and `read` are one round trip each, independent of the batch. A context manager that opens and
    closes."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)

    def open(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._peer = spawn.Process(target=_echo, args=(theirs,), daemon=True)
        self._peer.start()
        if not ours.poll(READY_S):
            raise TimeoutError(f"the ZMQ peer did not start within {READY_S:.0f} s")
        self._socket.set(zmq.RCVTIMEO, DEADLINE_MS)
        self._socket.connect(ours.recv())

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seconds(self) -> float:
        """Return the seconds of one round trip, the median of a turn."""
        return steady(lambda: seconds(self._once))

    def put(self, batch: Batch, held: Span | None = None) -> Span:
        self._once()
        return Span.of(batch)

    def part(self, held: Span, first: int, last: int) -> Span:
        return held.part(first, last)

    def read(self, held: Span, names: list[str]) -> Mapping[str, Any]:
        self._once()
        return {}

    def read_padded(self, held: Span, names: list[str]) -> Mapping[str, Any]:
        return self.read(held, names)

    def drop(self, held: Span) -> None:
        """Do nothing: no batch is stored."""

    def close(self) -> None:
        self._socket.send(b"end")
        self._peer.join(READY_S)
        self._context.destroy(linger=0)

    def _once(self) -> None:
        self._socket.send(MESSAGE)
        self._socket.recv()


def _echo(pipe: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(f"tcp://127.0.0.1:{port}")
        socket.set(zmq.RCVTIMEO, DEADLINE_MS)
        parent = multiprocessing.parent_process()
        while parent is not None and parent.is_alive():
            with contextlib.suppress(zmq.Again):
                while (message := socket.recv()) != b"end":
                    socket.send(message)
                return
