"""Threads that serve sockets, and waits for futures."""

from __future__ import annotations

import os
import select
import threading
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from tests.late import Late
from tests.logs import logged
from workers.transport import waiting
from workers.transport.poll_thread import PollThread

WAIT_S = 60.0


class Served:
    """A thread that hands out what it found at each turn, and how it ended."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails
        self._found: list[Any] = []
        self._turned = threading.Semaphore(0)
        self.over: Future[BaseException | None] = Future()
        self.poll = select.poll()
        self.thread = PollThread("tq-test", self.poll, self._turn, self.over.set_result)

    def _turn(self, found: Any) -> None:
        self._found.append(found)
        self._turned.release()
        if self._fails:
            raise ZeroDivisionError("a defect")

    def turn(self) -> Any:
        assert self._turned.acquire(timeout=WAIT_S)
        return self._found.pop(0)


def test_it_turns_for_its_sources_and_for_other_threads() -> None:
    served = Served()
    source = os.eventfd(0)
    served.poll.register(source, select.POLLIN)
    served.thread.start()
    served.thread.wake()
    assert source not in dict(served.turn())
    os.eventfd_write(source, 1)
    while source not in dict(served.turn()):
        pass
    served.thread.close()
    assert served.over.result(WAIT_S) is None
    assert not served.thread.alive
    os.close(source)


def test_an_error_ends_it_and_is_told() -> None:
    served = Served(fails=True)
    served.thread.start()
    served.thread.wake()
    assert isinstance(served.over.result(WAIT_S), ZeroDivisionError)
    served.thread.close()


def test_its_descriptor_goes_with_it_and_is_never_written_to_again() -> None:
    before = psutil.Process().num_fds()
    started, never = Served(), Served()
    started.thread.start()
    for each in (started, never):
        each.thread.stop()
    started.thread.join(WAIT_S)
    never.thread.forget()
    assert psutil.Process().num_fds() == before
    for each in (started, never):
        each.thread.wake()


def test_a_wait_tells_of_itself_and_whether_it_was_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not waiting.done_within(Future(), "it", 0.0)
    assert waiting.done_within(Late("done"), "it", 0.01), "what is done as the wait runs out is not lost"
    monkeypatch.setattr(waiting, "LOG_EVERY_S", 0.001)
    slow: Future[None] = Future()
    with logged("it: waiting for"):
        waiter = threading.Thread(target=waiting.done_within, args=(slow, "it", None))
        waiter.start()
    slow.set_result(None)
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
