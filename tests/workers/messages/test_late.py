"""A receive that gives up while the bytes of its message come: the message is for the next one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.restarts import wait_until
from tests.workers.messages.messengers import Here, address, until_it_fails
from workers.errors import MessageMismatchError, MessageTimeoutError
from workers.messages import Messenger
from workers.messages.io_thread import IoThread

pytestmark = pytest.mark.integration

A, B = address(0), address(1)
BIG = 3 << 20
"""float32 values that take several chunks."""


@pytest.fixture
def far() -> Iterator[Here]:
    """Workers as if each was on a host of its own."""
    workers = Here(False)
    yield workers
    workers.close()


class Dam:
    """Holds back what a worker is asked for, until `open`."""

    def __init__(self, messenger: Messenger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()
        self._io_thread = messenger._io_thread
        self._held: list[tuple[Any, ...]] | None = []
        self._real: Callable[..., None] = IoThread._send_chunk.__get__(self._io_thread)
        monkeypatch.setattr(self._io_thread, "_send_chunk", self._serve)

    def _serve(self, *args: Any) -> None:
        if self._held is None:
            self._real(*args)
        else:
            self._held.append(args)
        self.asked.set()

    def open(self) -> None:
        def let_go() -> None:
            held, self._held = self._held or [], None
            for args in held:
                self._real(*args)

        self._io_thread.call(let_go)


def _pair(far: Here) -> tuple[Messenger, Messenger]:
    """Two that know each other: a receive meets at once what is queued."""
    a, b = far.workers(2)
    for sender, receiver in ((a, b), (b, a)):
        sender.send("first contact", receiver.address, async_op=True)
        assert receiver.recv(sender.address) == "first contact"
    return a, b


def _send(sender: Messenger, value: Any) -> None:
    """Returns when it is queued there."""
    sender.send(value, B)


def _give_up(receiver: Messenger, dam: Dam) -> None:
    """Its time is over once its message was asked for, whenever that is."""
    waiting = receiver.recv(A, async_op=True, timeout_s=600.0)
    assert dam.asked.wait(60)
    receiver._io_thread.call(lambda: receiver._io_thread.incoming.expire(time.monotonic() + 601.0))
    with pytest.raises(MessageTimeoutError):
        waiting.wait()


def test_the_next_receive_gets_it(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _pair(far)
    dam = Dam(a, monkeypatch)
    _send(a, torch.arange(BIG))
    _send(a, "second")
    _give_up(b, dam)
    assert not a._io_thread.outgoing.settled, "it is still needed here"
    waiting = b.recv(A, async_op=True)
    dam.open()
    assert torch.equal(waiting.wait(), torch.arange(BIG))
    assert b.recv(A) == "second"


def test_its_bytes_come_while_nobody_waits(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _pair(far)
    dam = Dam(a, monkeypatch)
    _send(a, torch.arange(BIG))
    _give_up(b, dam)
    dam.open()
    a._io_thread.settled().result(60)
    a.close()
    assert torch.equal(b.recv(A), torch.arange(BIG))


def test_receives_that_give_up_together_leave_the_order(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _pair(far)
    dam = Dam(a, monkeypatch)
    for number in range(3):
        _send(a, torch.full((BIG,), number))
    waiting = [b.recv(A, async_op=True, timeout_s=0.5) for _ in range(3)]
    for work in waiting:
        with pytest.raises(MessageTimeoutError):
            work.wait()
    dam.open()
    assert [int(b.recv(A)[0]) for _ in range(3)] == [0, 1, 2]


def test_who_gave_up_first_leaves_it_to_who_waits(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _pair(far)
    dam = Dam(a, monkeypatch)
    _send(a, torch.arange(BIG))
    hurried = b.recv(A, async_op=True, timeout_s=0.5)
    patient = b.recv(A, async_op=True)
    with pytest.raises(MessageTimeoutError):
        hurried.wait()
    dam.open()
    assert torch.equal(patient.wait(), torch.arange(BIG))


def test_one_of_another_form_refuses_it(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _pair(far)
    dam = Dam(a, monkeypatch)
    _send(a, torch.arange(BIG))
    _give_up(b, dam)
    with pytest.raises(MessageMismatchError):
        b.recv_tensor(torch.zeros(3), A)
    dam.open()
    wait_until(lambda: not b._io_thread.incoming._fetches, "the pull has ended")
    with pytest.raises(MessageMismatchError):
        until_it_fails(lambda: a.send("fine", B))
    a.send("fine", B)
    assert b.recv(A) == "fine"


def test_no_memory_for_its_bytes_leaves_it_for_the_next(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _pair(far)
    _send(a, torch.arange(BIG))

    def none(*_: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr("workers.messages.fetches.fresh", none)
        with pytest.raises(MemoryError, match="none left"):
            b.recv(A)
    assert torch.equal(b.recv(A), torch.arange(BIG))
