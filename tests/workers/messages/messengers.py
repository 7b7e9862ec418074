"""Workers for tests of messages: several in this process, each with a directory client of its own, or in others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.children import START_S
from workers.directory import DIRECTORY_VARIABLE, Directory, DirectoryClient
from workers.directory.address import WorkerAddress
from workers.messages import Messenger, outgoing
from workers.messages.collectives import Road
from workers.messages.transfers import Groups
from workers.messages.wire import WantMessage

WAIT_S = 60.0
_spawn = multiprocessing.get_context("spawn")


def until_it_fails(operation: Callable[[], Any]) -> None:
    """Call it again and again: it succeeds until something becomes known."""
    while True:
        operation()


@contextlib.contextmanager
def settling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meanwhile a send at first contact waits for its receive, however late that begins."""
    with monkeypatch.context() as patient:
        patient.setattr(outgoing, "SETTLE_S", WAIT_S)
        yield


def address(rank: int, group: str = "g") -> WorkerAddress:
    return WorkerAddress(group, rank)


def want_of(source: str, **facts: Any) -> WantMessage:
    """A request to one that passes on what `source` sent."""
    usual = {"stream": b"s", "number": 1, "serial": 1, "incarnation": 1, "asker": 1, "receiver": 1, "nbytes": 1}
    return WantMessage(source=source, start=0, **(usual | facts))


def no_groups() -> Groups:
    """Of a worker whose messages all travel through host memory."""
    return Groups("127.0.0.1", Road("never", "g:1"), WAIT_S, schedule=lambda *_: None, call=lambda work: work())


class Here:
    """Workers of this process, and threads to use them from. collectives: whether tensors travel by collectives."""

    def __init__(self, shared_memory: bool, *, collectives: bool = False) -> None:
        self.shared_memory = shared_memory
        self.collectives = collectives
        self._stack = contextlib.ExitStack()
        self.directory = self._stack.enter_context(Directory.serve())
        self._pool = self._stack.enter_context(ThreadPoolExecutor(16))

    def client(self) -> DirectoryClient:
        return self._stack.enter_context(DirectoryClient(self.directory.address))

    def worker(self, name: WorkerAddress, **options: Any) -> Messenger:
        usual = {"timeout_s": WAIT_S, "shared_memory": self.shared_memory, "collectives": _mode(self.collectives)}
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

    def __init__(
        self, directory: Directory, name: WorkerAddress, work: Callable[..., None], host: str, collectives: bool
    ) -> None:
        self.pipe, theirs = _spawn.Pipe()
        arguments = (directory.address, name.get_name(), theirs, work, host, _mode(collectives))
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


def _mode(collectives: bool) -> str:
    return "always" if collectives else "auto"


def _be(directory: str, name: str, pipe: Any, work: Callable[..., None], host: str, collectives: str) -> None:
    os.environ[DIRECTORY_VARIABLE] = directory
    with (
        DirectoryClient.from_environment() as client,
        Messenger(
            WorkerAddress.from_name(name), client, timeout_s=WAIT_S, host=host, collectives=collectives
        ) as messenger,
    ):
        pipe.send("registered")
        work(messenger, pipe)


@contextlib.contextmanager
def elsewhere(
    directory: Directory,
    name: WorkerAddress,
    work: Callable[..., None],
    host: str = "127.0.0.1",
    *,
    collectives: bool = False,
) -> Iterator[Elsewhere]:
    process = Elsewhere(directory, name, work, host, collectives)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(params=["memory", "frames", "collectives"])
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    workers = Here(request.param != "frames", collectives=request.param == "collectives")
    yield workers
    workers.close()


@pytest.fixture
def one_connection() -> Iterator[Here]:
    workers = Here(True)
    yield workers
    workers.close()
