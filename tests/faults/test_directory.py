"""A job's directory, or a worker, that stands still or dies while messages are in use."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.restarts import wait_until
from tests.workers.messages.messengers import address, elsewhere
from workers.directory import Directory, DirectoryClient
from workers.errors import DirectoryLostError, WorkerLostError
from workers.messages import Messenger

pytestmark = pytest.mark.slow

A, B, C, NOBODY = address(0), address(1), address(2), address(9)
STILL_S = 14.0
"""Longer than a connection is silent before it is given up, and its end waited for."""


def _serve(pipe: Connection) -> None:
    with Directory.serve() as directory:
        pipe.send(directory.address)
        pipe.poll(600)


class Served:
    """A directory in a process of its own."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(60)
        self.address: str = self._pipe.recv()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()


@pytest.fixture
def served() -> Iterator[Any]:
    with contextlib.closing(Served()) as directory:
        yield directory


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Traffic:
    """Numbers that go to B and come back greater by one, for as long as it lasts."""

    def __init__(self, messenger: Messenger) -> None:
        self.rounds = 0
        self.error: Exception | None = None
        self._messenger = messenger
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._messenger.send(self.rounds, B)
                assert self._messenger.recv(B) == self.rounds + 1
                self.rounds += 1
                time.sleep(0.01)
        except Exception as error:
            self.error = error

    def goes_on(self) -> None:
        before = self.rounds
        wait_until(lambda: self.rounds > before + 3 or self.error, "messages go on")
        assert self.error is None

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def _echo(messenger: Messenger, pipe: Any) -> None:
    waiting = messenger.recv(NOBODY, async_op=True)
    while True:
        try:
            messenger.send(messenger.recv(A) + 1, A)
        except WorkerLostError as error:
            pipe.send(str(error))
            with pytest.raises(WorkerLostError, match="gave it up"):
                waiting.wait()


def test_messages_go_on_while_the_directory_stands_still_and_after_its_death(served: Any) -> None:
    with (
        DirectoryClient(served.address) as client,
        Messenger(A, client) as a,
        ThreadPoolExecutor(4) as pool,
        elsewhere(served, B, _echo),
    ):
        traffic = Traffic(a)
        traffic.goes_on()
        early = a.recv(C, async_op=True)
        with _stopped(served.pid):
            traffic.goes_on()
            late = a.send("to one who comes later", C, async_op=True)
            time.sleep(STILL_S)
            traffic.goes_on()
            coming = pool.submit(lambda: DirectoryClient(served.address))
        with coming.result(60) as other, Messenger(C, other) as c:
            c.send("from one who came later", A)
            assert early.wait(60) == "from one who came later"
            assert c.recv(A) == "to one who comes later"
            assert late is not None
            late.wait(60)
            traffic.goes_on()
            waiting = a.recv(NOBODY, async_op=True)
            served.process.kill()
            with pytest.raises(DirectoryLostError):
                waiting.wait(60)
            with pytest.raises(DirectoryLostError):
                a.send("first contact", NOBODY)
            traffic.goes_on()
        traffic.end()


def test_a_worker_that_stood_still_is_gone_until_it_goes_on_and_learns_it(served: Any) -> None:
    with (
        DirectoryClient(served.address) as client,
        Messenger(A, client) as a,
        elsewhere(served, B, _echo) as peer,
    ):
        a.send(1, B)
        assert a.recv(B) == 2
        waiting = a.recv(B, async_op=True)
        with _stopped(peer.pid), pytest.raises(WorkerLostError, match="g:1 is gone"):
            waiting.wait(60)
        assert "g:1 is gone: the job's directory gave it up" in peer.hear()

        def is_back() -> bool:
            try:
                return client.lookup_worker(B).live
            except WorkerLostError:
                return False

        wait_until(is_back, "it is registered anew")
        a.send(5, B)
        assert a.recv(B) == 6
