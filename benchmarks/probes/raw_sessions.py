"""Simulated clients: many sessions of a controller in one thread, which speak its protocol over TCP and move no values.

A session runs a script: a generator that yields a command and receives its result, or yields seconds to wait.
"""

from __future__ import annotations

import functools
import heapq
import random
import secrets
import select
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
import zmq

from dataplane.client.rpc.call_ids import CallIds
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.data.columns import EncodedColumn, encode_fields
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import dealer_socket
from dataplane.protocol.fd_limits import allow_more

Socket = zmq.Socket[bytes]
Script = Generator[Any, Any, None]

OPENING = 64
"""Sessions of one process that are opened at the same time."""


@dataclass(eq=False, slots=True)
class RawSession:
    """One simulated client. As a real one it has a connection for heartbeats, and one for commands from its first
    command. `session_id`: 0 until the service has answered."""

    session_id: int = 0
    heartbeat_s: float = 0.0
    min_heartbeat_s: float = 0.0
    beats: Socket | None = None
    commands: Socket | None = None
    calls: CallIds | None = None
    scripts: dict[int, tuple[Script, c.Command]] = field(default_factory=dict)  # by the number of the pending call


class RawSessions:
    """Sessions of one service, which live while `run_until` runs. number: of the process. `errors`: the texts of all
    errors. `beats`, `commands`: the answered ones."""

    def __init__(self, address: str, sessions: int, *, number: int = 0) -> None:
        allow_more()
        self.errors: list[str] = []
        self.beats = self.commands = 0
        self.sessions: list[RawSession] = []
        # An address of its own, whose closed connections leave the ports of other programs free.
        self._endpoint = f"tcp://127.0.0.{2 + number}:0;{address}"
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * sessions + 8)
        self._epoll = select.epoll()
        self._handlers: dict[int, tuple[Socket, Callable[[list[bytes]], None]]] = {}  # by descriptor
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._random = random.Random(sessions)

    def open(self, number: int) -> None:
        """Open `number` more sessions. Block until the service has answered all of them."""
        opened = len(self.sessions)
        self.sessions += [RawSession() for _ in range(number)]
        for index in range(opened, min(opened + OPENING, len(self.sessions))):
            self._open(index)
        self.run_until(lambda: all(session.session_id for session in self.sessions))

    def start(self, session: RawSession, script: Script, *, after_s: float = 0.0) -> None:
        """Run the script in `run_until`, after this time."""
        self._after(after_s, lambda: self._advance(session, script, None))

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            pause_s = min(self._timers[0][0] - time.monotonic(), 0.05) if self._timers else 0.05
            for descriptor, _ in self._epoll.poll(max(pause_s, 0.0)):
                self._drain(descriptor)

    def run_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.run_until(lambda: time.monotonic() >= end)

    def run_beside(self, work: Callable[[], object]) -> None:
        """Run until `work`, in a thread of its own, has returned."""
        thread = threading.Thread(target=work)
        thread.start()
        self.run_until(lambda: not thread.is_alive())

    def close(self) -> None:
        for socket, _ in self._handlers.values():
            socket.close(linger=0)
        self._context.term()
        self._epoll.close()

    # --- sessions

    def _open(self, index: int) -> None:
        session = self.sessions[index]

        def opened(frames: list[bytes]) -> None:
            if session.session_id:
                self._beaten(session, frames)
                return
            body = zmq_frames.Reply.parse(frames)[0].good_body()
            welcome = messages.decode_with(zmq_frames.WELCOME, body)
            session.session_id = welcome.opened.session
            session.heartbeat_s = welcome.heartbeat_s
            session.calls = CallIds(session.session_id)
            self._beat(session)  # a client sends one at once: its connection then represents it
            following = index + OPENING
            if following < len(self.sessions):
                self._open(following)

        session.beats = self._connect(opened)
        command = c.OpenSession(
            nonce=secrets.token_hex(16), host="elsewhere", name=f"raw:{index}", protocol_version=PROTOCOL_VERSION
        )
        self._send(session.beats, zmq_frames.request(command))

    def _beat(self, session: RawSession) -> None:
        assert session.beats is not None
        self._send(session.beats, zmq_frames.request(c.Heartbeat(session=session.session_id)))
        self._after(max(session.heartbeat_s, session.min_heartbeat_s), lambda: self._beat(session))

    def _beaten(self, session: RawSession, frames: list[bytes]) -> None:
        (reply,) = zmq_frames.Reply.parse(frames)
        beat = messages.decode_with(zmq_frames.HEARTBEAT_REPLY, reply.good_body())
        session.min_heartbeat_s = beat.min_heartbeat_s
        self.beats += 1

    def _advance(self, session: RawSession, script: Script, result: Any) -> None:
        """Give the script its result and do what it yields."""
        try:
            step = script.send(result)
        except StopIteration:
            return
        if isinstance(step, float):
            self._after(step, lambda: self._advance(session, script, None))
            return
        assert session.calls is not None
        if session.commands is None:
            session.commands = self._connect(lambda frames: self._take_answers(session, frames))
        call = session.calls.issue(step, now=0.0)
        session.scripts[call.call_id] = script, step
        self._send(session.commands, zmq_frames.request(call))

    def _take_answers(self, session: RawSession, frames: list[bytes]) -> None:
        for reply in zmq_frames.Reply.parse(frames):
            self._answered(session, reply)

    def _answered(self, session: RawSession, reply: zmq_frames.Reply) -> None:
        assert session.calls is not None
        script, command = session.scripts.pop(reply.call_id)
        session.calls.record_answer(reply.call_id)
        self.commands += 1
        if reply.error is not None:
            self.errors.append(f"{type(command).__name__}: {reply.error}")
            return
        self._advance(session, script, (reply.call_id, messages.decode_result(type(command), reply.body)))

    # --- sockets and times

    def _connect(self, handle: Callable[[list[bytes]], None]) -> Socket:
        socket = dealer_socket(self._context, self._endpoint)
        descriptor = int(socket.get(zmq.FD))
        self._handlers[descriptor] = socket, handle
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        return socket

    def _send(self, socket: Socket, frames: list[bytes]) -> None:
        socket.send_multipart(frames)
        self._after(0.0, lambda: self._drain(int(socket.get(zmq.FD))))  # sending may take the edge of an arrival

    def _drain(self, descriptor: int) -> None:
        socket, handle = self._handlers[descriptor]
        while socket.get(zmq.EVENTS) & zmq.POLLIN:
            handle(socket.recv_multipart(zmq.NOBLOCK))

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), work))


@functools.cache
def sample_columns() -> Mapping[str, EncodedColumn]:
    """Return the columns of one sample: 1,848 tokens with a mask and log-probabilities, and a reward."""
    tokens = torch.arange(1848)
    fields = {"input_ids": [tokens], "token_mask": [tokens], "generation_logprobs": [tokens.float()]}
    columns = encode_fields({**fields, "reward": torch.zeros(1)}, rows=1, specs={}, partition="")
    return {column.name: column for column in columns}


def put_values(
    partition: str, samples: c.Samples, columns: Mapping[str, EncodedColumn], mode: c.Mode = c.Mode.UPSERT
) -> Script:
    """Allocate and commit the columns of the samples, without their values."""
    sizes = tuple(c.ColumnSizes(name=name, sizes=column.sizes) for name, column in columns.items())
    update = mode is c.Mode.UPDATE
    call_id, allocated = yield c.Allocate(partition=partition, columns=sizes, samples=samples, update=update)
    committed = tuple(
        c.CommitColumn(
            name=name,
            spec=column.spec,
            lengths=column.lengths,
            index=column.index,
            checksums=np.zeros(len(column.lengths), np.uint32) if allocated.checksums else None,
        )
        for name, column in columns.items()
    )
    yield c.Commit(partition=partition, samples=samples, mode=mode, reservation=call_id, columns=committed)
