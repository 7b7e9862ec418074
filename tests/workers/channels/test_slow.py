# ruff: noqa: F401
"""Items that take long on their way between hosts, or find no memory at their end."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lives import Proxy, wait_until
from tests.workers.channels.channels import broker
from tests.workers.channels.far_channels import near_and_far, proxy
from workers.channels import Channel, background, connection
from workers.channels import stream as stream_module
from workers.channels.connection import ArrivedItems
from workers.channels.stream import Stream

pytestmark = pytest.mark.integration

PIECE = 1000
PIECES = 3


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, socket.socket]]:
    """A stream, and the other end of its connection."""
    monkeypatch.setattr(stream_module, "SILENT_S", 600.0)
    ours, theirs = socket.socketpair()
    with theirs:
        stream = Stream(ours)
        yield stream, theirs
        stream.close()


def _piece_by_piece(stream: Stream, theirs: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another piece comes whenever one is waited for in time."""
    real = stream.wait

    def wait(until: float) -> None:
        assert until > time.monotonic(), "it is waited for no longer"
        theirs.sendall(bytes(PIECE))
        real(until)

    theirs.sendall(bytes(PIECE))
    monkeypatch.setattr(stream, "wait", wait)


def test_what_comes_slowly_is_waited_for_while_it_comes(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    _piece_by_piece(*ends, monkeypatch)
    ends[0].receive_into(memoryview(bytearray(PIECES * PIECE)), -math.inf)


def test_what_is_dropped_may_come_slowly_too(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, theirs = ends
    _piece_by_piece(stream, theirs, monkeypatch)
    stream.skip(PIECES * PIECE, -math.inf)
    theirs.sendall(b"next")
    assert stream.sock.recv(PIECE) == b"next"


def test_what_goes_slowly_is_sent_while_it_goes(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, theirs = ends
    came = 0
    real = stream._wait

    def wait(event: int, until: float) -> None:
        nonlocal came
        assert until > time.monotonic(), "it is sent no longer"
        with contextlib.suppress(BlockingIOError):
            while True:
                came += len(theirs.recv(1 << 20, socket.MSG_DONTWAIT))
        real(event, until)

    monkeypatch.setattr(stream, "_wait", wait)
    stream.send([bytes(10 << 20)], -math.inf)
    assert came


def test_a_confirmation_that_comes_behind_other_items_is_waited_for(
    near_and_far: tuple[Channel, Channel], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CONFIRM_S", 0.1)
    near, far = near_and_far
    copied, real = threading.Event(), ArrivedItems._values

    def pause(arrived: ArrivedItems) -> Any:
        found = real(arrived)
        proxy.pause()
        of_far: Any = far._links[0]._pump  # type: ignore[union-attr]
        of_far._heard = time.monotonic() + 600.0
        copied.set()
        return found

    monkeypatch.setattr(ArrivedItems, "_values", pause)
    near.put("a")
    work = far.get(async_op=True)
    healing = threading.Timer(1.0, proxy.heal)
    healing.start()
    assert work.wait(60) == "a"
    healing.join()


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There is none for the next item that comes from another host; emptied then."""
    left, real = ["none left"], connection.pickling.fresh

    def fresh(*args: Any) -> Any:
        if left:
            raise MemoryError(left.pop())
        return real(*args)

    monkeypatch.setattr(connection.pickling, "fresh", fresh)
    return left


def test_an_item_without_memory_goes_back_and_others_are_got(
    near_and_far: tuple[Channel, Channel], no_memory: list[str]
) -> None:
    near, far = near_and_far
    first, other = far.get(async_op=True), far.get(key="other", async_op=True)
    near.put(torch.arange(50_000))
    with pytest.raises(MemoryError, match="none left"):
        first.wait(60)
    assert torch.equal(near.get(timeout_s=60), torch.arange(50_000))
    near.put(torch.arange(60_000), key="other")
    assert torch.equal(other.wait(60), torch.arange(60_000))
    assert not no_memory


def test_a_get_without_memory_leaves_the_item(near_and_far: tuple[Channel, Channel], no_memory: list[str]) -> None:
    near, far = near_and_far
    near.put(torch.arange(50_000))
    with pytest.raises(MemoryError, match="none left"):
        far.get()
    assert torch.equal(far.get(timeout_s=60), torch.arange(50_000))
    assert not no_memory
