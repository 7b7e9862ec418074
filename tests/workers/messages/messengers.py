"""Workers for tests of messages: several in this process, each with a directory client of its own, or in others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.children import START_S
from tests.restarts import wait_until
from workers.directory import DIRECTORY_VARIABLE, Directory, DirectoryClient
from workers.directory.address import WorkerAddress
from workers.messages import AsyncWork, Messenger
from workers.messages.collectives import COLLECTIVES_VARIABLE, Road
from workers.messages.transfers import Collectives
from workers.messages.wire import WantMessage

WAIT_S = 60.0
_spawn = multiprocessing.get_context("spawn")


def until_it_fails(operation: Callable[[], Any]) -> None:
    """Call it again and again: it succeeds until something becomes known."""
    while True:
        operation()


def reported_to_sender(work: AsyncWork[None] | None, sender: Messenger, receiver: WorkerAddress) -> None:
    """Raise the error of a message that was refused: from its work, or from a later operation with its receiver."""
    assert work is not None
    work.wait()
    wait_until(lambda: sender._io_thread.outgoing._late, "the refusal is known")
    sender.send("not sent", receiver)


def fails_at_both_ends(a: Messenger, b: Messenger, error: type[Exception], match: str) -> None:
    """Send a tensor from `a` to `b`, where it is to fail. The next message is received."""
    sent = a.send(torch.arange(3 << 20), b.address, async_op=True)
    with pytest.raises(error, match=match):
        b.recv(a.address)
    with pytest.raises(error, match=match):
        reported_to_sender(sent, a, b.address)
    wait_until(lambda: not a._backlog.waiting_bytes, "the values are dropped")
    a.send("fine", b.address, async_op=True)
    assert b.recv(a.address) == "fine"


def address(rank: int, group: str = "g") -> WorkerAddress:
    return WorkerAddress(group, rank)


def want_of(source: str, **facts: Any) -> WantMessage:
    """A request to one that passes on what `source` sent."""
    usual = {"stream": b"s", "sequence": 1, "serial": 1, "incarnation": 1, "asker": 1, "receiver": 1, "nbytes": 1}
    return WantMessage(source=source, start=0, **(usual | facts))


def no_collectives() -> Collectives:
    """Of a worker whose messages all travel through host memory."""
    return Collectives("127.0.0.1", Road("never", "g:1"), WAIT_S, call=lambda work: work())


class Here:
    """Workers of this process, and threads to use them from."""

    def __init__(self, shared_memory: bool, *, collectives: str = "auto") -> None:
        self.shared_memory = shared_memory
        self.collectives = collectives
        self._stack = contextlib.ExitStack()
        self.directory = self._stack.enter_context(Directory.serve())
        self._pool = self._stack.enter_context(ThreadPoolExecutor(16))

    def client(self) -> DirectoryClient:
        return self._stack.enter_context(DirectoryClient(self.directory.address))

    def worker(self, name: WorkerAddress, **options: Any) -> Messenger:
        usual = {"timeout_s": WAIT_S, "shared_memory": self.shared_memory, "collectives": self.collectives}
        options = {**usual, **options}
        return self._stack.enter_context(Messenger(name, self.client(), **options))

    def workers(self, count: int) -> list[Messenger]:
        return [self.worker(address(rank)) for rank in range(count)]

    def start(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(work, *args, **kwargs)

    def close(self) -> None:
        self._stack.close()


class Elsewhere:
    """A process that is a worker: `work(messenger, pipe)` is called in it, once it is registered."""

    def __init__(self, directory: Directory, name: WorkerAddress, work: Callable[..., None], host: str) -> None:
        self.pipe, theirs = _spawn.Pipe()
        arguments = (directory.address, name.get_name(), theirs, work, host)
        self._process = _spawn.Process(target=_be, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        assert self.hear(START_S) == "registered"

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hear(self, within_s: float = WAIT_S) -> Any:
        if not self.pipe.poll(within_s):
            raise AssertionError(f"process {self._process.pid} said nothing within {within_s} s")
        return self.pipe.recv()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


def _be(directory: str, name: str, pipe: Any, work: Callable[..., None], host: str) -> None:
    os.environ[DIRECTORY_VARIABLE] = directory
    options = {"timeout_s": WAIT_S, "host": host, "collectives": os.environ.get(COLLECTIVES_VARIABLE, "auto")}
    with (
        DirectoryClient.from_environment() as client,
        Messenger(WorkerAddress.from_name(name), client, **options) as messenger,
    ):
        pipe.send("registered")
        work(messenger, pipe)


@contextlib.contextmanager
def elsewhere(
    directory: Directory, name: WorkerAddress, work: Callable[..., None], host: str = "127.0.0.1"
) -> Iterator[Elsewhere]:
    process = Elsewhere(directory, name, work, host)
    try:
        yield process
    finally:
        process.close()


def _here(road: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Workers of this process and of others whose tensors travel on this road."""
    mode = "always" if road == "collectives" else "auto"
    monkeypatch.setenv(COLLECTIVES_VARIABLE, mode)
    workers = Here(road != "frames", collectives=mode)
    yield workers
    workers.close()


@pytest.fixture(params=["memory", "frames", "collectives"])
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    yield from _here(request.param, monkeypatch)


@pytest.fixture(params=["memory", pytest.param("collectives", marks=pytest.mark.slow)])
def one_connection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """As `here`, for tests whose values never travel in frames."""
    yield from _here(request.param, monkeypatch)


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """As `here`, for tests of shared memory itself."""
    yield from _here("memory", monkeypatch)


@pytest.fixture
def switched() -> Iterator[Here]:
    """Workers of one host whose tensors travel by process groups."""
    workers = Here(True, collectives="always")
    yield workers
    workers.close()
