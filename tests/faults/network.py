"""TCP proxies between the processes of a test. Each is a link, which forwards the connections to its port to another
port, and can be made to fail in several ways.

All of them run in one process of their own, so a test may kill or stop the processes at both ends. `Network` starts
that process and controls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dataplane.core.addresses import lasting_port
from tests.faults.forks import forks

HOST = "127.0.0.1"
WAIT_S = 60.0
CHUNK = 64 << 10
TRIES = 100


@dataclass(eq=False)
class Link:
    """Forwards connections. `target` returns the port to forward to, and is called for each new connection. No data
    passes unless `thawed` is set. Each chunk is held back for `delay_s`, and for its size divided by `bytes_per_s` (0:
    no limit)."""

    target: Callable[[], int]
    listeners: list[socket.socket]
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    closed: bool = False
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = field(default_factory=set)

    async def serve(self) -> None:
        self.thawed.set()
        for number, listener in enumerate(self.listeners):
            await asyncio.start_server(
                lambda reader, writer, number=number: self.connect(number, reader, writer), sock=listener
            )

    async def connect(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a new connection at listener `number` to the port `number` above the target."""
        try:
            if self.closed:
                raise ConnectionRefusedError
            onward, back = await asyncio.open_connection(HOST, self.target() + number)
        except (OSError, ValueError):
            writer.transport.abort()
            return
        pair = writer, back
        self.pairs.add(pair)
        await asyncio.gather(self.pass_on(reader, back), self.pass_on(onward, writer))
        self.pairs.discard(pair)
        for each in pair:
            each.transport.abort()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                await asyncio.sleep(self.delay_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0))
                await self.thawed.wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except (OSError, RuntimeError):  # one side was reset or half closed: abort, so that the other notices
            writer.transport.abort()

    def disturb(self, how: str) -> None:
        """Enter the state `how`, see `Network.disturb`."""
        self.delay_s, self.bytes_per_s, self.closed = 0.0, 0.0, how == "close"
        self.thawed.set()
        match how:
            case "cut" | "close":
                for pair in list(self.pairs):
                    for each in pair:
                        each.transport.abort()
            case "half":
                for towards_client, _ in list(self.pairs):
                    with contextlib.suppress(OSError):
                        towards_client.write_eof()
            case "freeze":
                self.thawed.clear()
            case "delay":
                self.delay_s = 0.1
            case "slow":
                self.bytes_per_s = 100_000.0
            case _:
                assert how == "mend"


DISTURBANCES = ("cut", "close", "half", "freeze", "delay", "slow")


class Network:
    """Links by name. All are added with `link` before `start`; their ports never change."""

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}
        self._links: dict[str, tuple[list[socket.socket], str]] = {}
        self._process: Any = None
        self._pipe: Connection | None = None

    def link(self, name: str, target: Path, *, ports: int = 1) -> int:
        """Add a link and return its port, which forwards to the port whose number is in the file `target`. The file is
        read for each connection, and may be written later. With more `ports` the link also has the ports above its
        own, which forward to those above the target."""
        port, listeners = _neighbors(ports)
        self._links[name] = listeners, str(target)
        self.ports[name] = port
        return port

    def start(self) -> None:
        """Start the process of the links."""
        self._pipe, theirs = forks.Pipe()
        self._process = forks.Process(target=_run, args=(theirs, self._links), daemon=True, name="network")
        self._process.start()
        theirs.close()
        for listeners, _ in self._links.values():
            for listener in listeners:
                listener.close()
        self._answered()

    def disturb(self, name: str, how: str) -> None:
        """Put the link in a state, instead of the one that it is in. It is in that state when this returns.

        cut: its connections are aborted, new ones work. close: its connections are aborted, and so are new ones. half:
        clients get an end of file on the connections that there are. freeze: no data passes. delay: each chunk comes
        0.1 s late. slow: 100 kB/s. mend: it works."""
        assert self._pipe is not None
        self._pipe.send((name, how))
        self._answered()

    def _answered(self) -> None:
        assert self._pipe is not None
        assert self._pipe.poll(WAIT_S), "the network does not answer"
        self._pipe.recv()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(WAIT_S)


def _neighbors(count: int) -> tuple[int, list[socket.socket]]:
    for _ in range(TRIES):
        first = lasting_port()
        bound: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                bound.append(socket.socket())
                bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound[-1].bind((HOST, port))
                bound[-1].listen()  # before this, another socket with SO_REUSEADDR could bind the port
        except OSError:
            for each in bound:
                each.close()
        else:
            return first, bound
    raise OSError(f"found no {count} neighboring free ports")


def _run(pipe: Connection, links: dict[str, tuple[list[socket.socket], str]]) -> None:
    asyncio.run(_pass_on_for_ever(pipe, links))


async def _pass_on_for_ever(pipe: Connection, named: dict[str, tuple[list[socket.socket], str]]) -> None:
    links = {
        name: Link(lambda path=path: int(Path(path).read_text()), listeners)  # type: ignore[misc]
        for name, (listeners, path) in named.items()
    }
    for link in links.values():
        await link.serve()
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    pipe.send("ready")
    while True:
        await told.wait()
        told.clear()
        while pipe.poll():
            name, how = pipe.recv()
            links[name].disturb(how)
            pipe.send("done")
