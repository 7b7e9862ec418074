# ruff: noqa: F401
"""An error at any part of a message's way is that message's, at both of its ends: none is only logged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.errors import InternalError
from tests.restarts import wait_until
from tests.workers.messages.messengers import WAIT_S, Here, address, fails_at_both_ends, switched
from tests.workers.messages.test_limits import _once
from workers.errors import DeviceTransferError
from workers.messages import transfers
from workers.messages.collectives import CollectiveGroup, _Job
from workers.messages.incoming import Incoming
from workers.messages.io_thread import IoThread
from workers.messages.outgoing import OutgoingMessages
from workers.messages.transfers import TransferReceiver, TransferSource

pytestmark = pytest.mark.integration

A, B, C = address(0), address(1), address(2)
NAMES = [A, B, C]
BIG = 3 << 20


@pytest.fixture
def far() -> Iterator[Here]:
    """Workers as if each was on a host of its own."""
    workers = Here(False)
    yield workers
    workers.close()


@pytest.mark.parametrize(
    ("workers", "owner", "name"),
    [
        ("far", IoThread, "_send_chunk"),
        ("far", Incoming, "receive_chunk"),
        ("switched", TransferSource, "handle_ready"),
        ("switched", TransferReceiver, "begin"),
    ],
)
def test_an_error_at_a_chunk_or_a_transfer(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, workers: str, owner: type, name: str
) -> None:
    a, b = request.getfixturevalue(workers).workers(2)
    monkeypatch.setattr(owner, name, _once(getattr(owner, name)))
    fails_at_both_ends(a, b, InternalError, "a defect")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(TransferSource, "_send_host"), (Incoming, "use_host_values")],
)
def test_an_error_on_the_way_to_host_memory(
    switched: Here, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    a, b = switched.worker(A), switched.worker(B, collectives="never")
    monkeypatch.setattr(owner, name, _once(getattr(owner, name)))
    fails_at_both_ends(a, b, InternalError, "a defect")


def test_no_host_memory_for_the_values(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = switched.worker(A), switched.worker(B, collectives="never")

    def no_memory(nbytes: int) -> Any:
        raise MemoryError(f"none for {nbytes}")

    with monkeypatch.context() as without:
        without.setattr(a._slabs, "take", no_memory)
        fails_at_both_ends(a, b, DeviceTransferError, "the copy of 25,165,824 bytes to host memory failed: MemoryError")


def test_a_slab_whose_copy_fails_is_given_back(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = switched.worker(A), switched.worker(B, collectives="never")
    monkeypatch.setattr(transfers.DeviceValues, "copy_to", _once(transfers.DeviceValues.copy_to))
    fails_at_both_ends(a, b, DeviceTransferError, "a defect")
    assert len(a._slabs._idle) == a._slabs._open_count == 1


def test_a_peer_to_which_nothing_can_be_sent(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are dropped, and other peers get theirs."""
    a, b, c = switched.worker(A), switched.worker(B, collectives="never"), switched.worker(C)
    sent = a.send(torch.arange(BIG), B, async_op=True)
    assert sent is not None
    sent.wait()
    monkeypatch.setattr(a._io_thread._links, "send", _once(a._io_thread._links.send))
    waiting = b.recv(A, async_op=True)
    wait_until(lambda: not a._backlog.waiting_bytes, "the message is dropped")
    a.send("fine", C, async_op=True)
    assert c.recv(A) == "fine"
    assert not waiting.done()


def _no_thread(*_: Any, **__: Any) -> Any:
    raise RuntimeError("can't start new thread")


def test_no_thread_for_the_copy_to_host_memory(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = switched.worker(A), switched.worker(B, collectives="never")
    with monkeypatch.context() as without:
        without.setattr(transfers, "threading", SimpleNamespace(Thread=_no_thread))
        fails_at_both_ends(a, b, InternalError, "can't start new thread")


@pytest.mark.parametrize("failing", [A, B], ids=["sender", "receiver"])
def test_no_thread_for_a_process_group(switched: Here, monkeypatch: pytest.MonkeyPatch, failing: Any) -> None:
    a, b = switched.workers(2)
    real: Callable[..., Any] = CollectiveGroup._start

    def start(self: CollectiveGroup, *args: Any) -> Any:
        is_sender = self.membership.rank == 0
        return _no_thread() if is_sender == (failing == A) else real(self, *args)

    monkeypatch.setattr(CollectiveGroup, "_start", start)
    error = DeviceTransferError if failing == A else InternalError
    fails_at_both_ends(a, b, error, "can't start new thread")


def test_no_thread_for_the_process_group_of_a_broadcast(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = switched.workers(3)
    monkeypatch.setattr(CollectiveGroup, "_start", _no_thread)
    works = [each.broadcast(torch.arange(BIG), NAMES, async_op=True) for each in workers[1:]]
    workers[0].broadcast(torch.arange(BIG), NAMES, async_op=True)
    for work in works:
        with pytest.raises(DeviceTransferError, match="can't start new thread"):
            work.wait()


def test_a_group_closes_without_a_thread_to_abort_it(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = switched.workers(2)
    a.send(torch.arange(3), B)
    assert torch.equal(b.recv(A), torch.arange(3))
    monkeypatch.setattr(CollectiveGroup, "_start", _no_thread)
    (group,) = a._io_thread._collectives._collectives.values()
    outcomes: list[Any] = []
    group._pending.add(_Job(0, outcomes.append))
    group.close("a test")
    assert [type(each) for each in outcomes] == [ConnectionError]


def test_python_does_not_exit_while_a_group_is_aborted(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = switched.workers(2)
    a.send(torch.arange(3), B)
    assert torch.equal(b.recv(A), torch.arange(3))
    go_on = threading.Event()
    monkeypatch.setattr(CollectiveGroup, "_abort", lambda self, group: go_on.wait(WAIT_S))
    (group,) = a._io_thread._collectives._collectives.values()
    group.close("a test")
    group.join(0.2)
    assert [thread.is_alive() for thread in group._threads] == [True, True]
    go_on.set()
    group.join(WAIT_S)
    assert not any(thread.is_alive() for thread in group._threads)


def test_a_request_that_cannot_be_sent_leaves_no_fetch(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receive fails, and the next one gets the message."""
    a, b = switched.workers(2)
    a.send(torch.arange(BIG), B, async_op=True)
    fetches = b._io_thread.incoming._fetches
    monkeypatch.setattr(fetches, "_request_transfer", _once(fetches._request_transfer))
    with pytest.raises(ZeroDivisionError, match="a defect"):
        b.recv(A)
    assert torch.equal(b.recv(A), torch.arange(BIG))


def test_a_failed_message_without_a_receive_fails_the_next_one(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values were requested by a receive that has given up."""
    a, b = far.workers(2)
    a.send("first contact", B, async_op=True)
    assert b.recv(A) == "first contact"
    asked, given_up = threading.Event(), threading.Event()

    def fail(*_: Any) -> None:
        asked.set()
        assert given_up.wait(WAIT_S)
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(a._io_thread, "_send_chunk", fail)
    sent = a.send(torch.arange(BIG), B, async_op=True)
    assert sent is not None
    sent.wait()
    work = b.recv(A, async_op=True)
    assert asked.wait(WAIT_S)
    del work
    b._io_thread.call(given_up.set)  # after the receive was withdrawn
    a.send("next", B, async_op=True)
    with pytest.raises(InternalError, match="a defect"):
        b.recv(A)
    assert b.recv(A) == "next"
    with pytest.raises(InternalError, match="a defect"):
        a.send(1, B)


def test_an_answer_that_cannot_be_handled_fails_its_message(far: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = far.workers(2)
    monkeypatch.setattr(OutgoingMessages, "handle_answer", _once(OutgoingMessages.handle_answer))
    with pytest.raises(InternalError, match="a defect"):
        a.send(1, B)
    a.send("fine", B, async_op=True)
    assert b.recv(A) in (1, "fine")
