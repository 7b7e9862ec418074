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


class Here:
    """Workers of this process, and threads to use them from."""

    def __init__(self, shared_memory: bool) -> None:
        self.shared_memory = shared_memory
        self._stack = contextlib.ExitStack()
        self.directory = self._stack.enter_context(Directory.serve())
        self._pool = self._stack.enter_context(ThreadPoolExecutor(16))

    def client(self) -> DirectoryClient:
        return self._stack.enter_context(DirectoryClient(self.directory.address))

    def worker(self, name: WorkerAddress, **options: Any) -> Messenger:
        options = {"timeout_s": WAIT_S, "shared_memory": self.shared_memory, **options}
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
    with (
        DirectoryClient.from_environment() as client,
        Messenger(WorkerAddress.from_name(name), client, timeout_s=WAIT_S, host=host) as messenger,
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


@pytest.fixture(params=[True, False], ids=["memory", "frames"])
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    workers = Here(request.param)
    yield workers
    workers.close()


@pytest.fixture
def one_connection() -> Iterator[Here]:
    workers = Here(True)
    yield workers
    workers.close()
