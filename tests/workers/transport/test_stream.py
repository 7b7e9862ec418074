"""Streams of messages: how they are cut, and parts that come and go slowly."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.buffer_pool import BufferPool
from tests.late import Late
from tests.logs import logged
from workers.transport import pickling, waiting
from workers.transport import stream as stream_module
from workers.transport.framing import Message, Splitter, framed, send_some
from workers.transport.pickling import ALIGN_BYTES, Layout, Segment
from workers.transport.poll_thread import PollThread
from workers.transport.stream import Endpoint, Stream

PIECE = 1000
PIECES = 3
BODIES = [b"", b"a", b"body" * 10]


@given(st.lists(st.sampled_from(BODIES), max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_messages_come_out_of_a_stream_however_it_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(framed(body) for body in bodies)
    splitter, found, at = Splitter(), [], 0
    for turn in range(len(stream) + 1):
        size = cuts[turn % len(cuts)]
        splitter.feed(stream[at : at + size])
        at += size
        while (message := splitter.next()) is not None:
            found.append(message.body)
    assert found == bodies


def test_a_payload_is_taken_between_messages() -> None:
    splitter, target = Splitter(), bytearray(7)
    splitter.feed(framed(b"first", 5) + b"12345" + framed(b"second"))
    assert splitter.next() == Message(b"first", 5)
    assert not splitter.rest(memoryview(target)[:5])
    assert splitter.next() == Message(b"second", 0)
    splitter.feed(b"67")
    assert len(splitter.rest(memoryview(target)[5:])) == 0
    assert target == b"1234567"


def test_the_rest_of_a_payload_that_has_not_come_is_left() -> None:
    splitter, target = Splitter(), bytearray(5)
    splitter.feed(b"123")
    left = splitter.rest(memoryview(target))
    left[:] = b"45"
    assert target == b"12345"


def test_a_stream_that_is_none_is_refused() -> None:
    splitter = Splitter()
    splitter.feed(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="exceeds the limit"):
        splitter.next()


def test_endpoints_are_strings_and_back() -> None:
    endpoint = Endpoint(host="boot", name="name", address="127.0.0.1:1", token="t")
    assert Endpoint.parse(str(endpoint)) == endpoint
    with pytest.raises(ValueError, match="not the endpoint"):
        Endpoint.parse("127.0.0.1:1")


@pytest.mark.integration
def test_more_buffers_are_sent_than_the_kernel_takes_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pending = deque(memoryview(b"%04d" % number) for number in range(3000))
        while pending:
            send_some(ours, pending)
        assert theirs.recv(12_000, socket.MSG_WAITALL) == b"".join(b"%04d" % number for number in range(3000))


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


@pytest.mark.integration
def test_what_comes_slowly_is_waited_for_while_it_comes(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    _piece_by_piece(*ends, monkeypatch)
    ends[0].receive_into(memoryview(bytearray(PIECES * PIECE)), -math.inf)


@pytest.mark.integration
def test_what_is_dropped_may_come_slowly_too(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, theirs = ends
    _piece_by_piece(stream, theirs, monkeypatch)
    stream.skip(PIECES * PIECE, -math.inf)
    theirs.sendall(b"next")
    assert stream.sock.recv(PIECE) == b"next"


@pytest.mark.integration
def test_what_goes_slowly_is_sent_while_it_goes(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, theirs = ends
    came = 0
    real = stream._wait_for

    def wait(event: int, until: float) -> None:
        nonlocal came
        assert until > time.monotonic(), "it is sent no longer"
        with contextlib.suppress(BlockingIOError):
            while True:
                came += len(theirs.recv(1 << 20, socket.MSG_DONTWAIT))
        real(event, until)

    monkeypatch.setattr(stream, "_wait_for", wait)
    stream.send([bytes(10 << 20)], -math.inf)
    assert came


# --- What becomes of objects on their way between workers, without the way.


WARM = BufferPool(0)
TYPES = sorted(name for name in pickling._DTYPES if "q" not in name and "bits" not in name)


def there_and_back(value: Any, *, own: bool = False) -> Any:
    """As bytes by both ways, which are the same."""
    packed = pickling.pack(value)
    memory = np.zeros(packed.nbytes, np.uint8)
    packed.write(memory)
    assert b"".join(packed.runs()) == memory.tobytes()
    got = pickling.unpack(packed.layout, memory, WARM, own=own)
    if not own:
        memory.fill(255)
    return got.load()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@given(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3), st.randoms(), st.booleans())
def test_tensors_of_every_type_and_shape(name: str, shape: list[int], random: Any, own: bool) -> None:
    dtype = pickling._DTYPES[name]
    nbytes = int(np.prod([1, *shape])) * dtype.itemsize
    raw = torch.tensor([random.randrange(2) for _ in range(nbytes)], dtype=torch.uint8)
    value = raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)
    for sent in (value, [value]):
        got = there_and_back(sent, own=own)
        found = got if isinstance(got, torch.Tensor) else got[0]
        assert found.shape == value.shape
        assert found.dtype == dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_tensors_that_do_not_lie_in_a_row() -> None:
    base = torch.arange(48, dtype=torch.float64).reshape(6, 8)
    views = [
        base.t(),
        base[::2, 1::3],
        base[0].expand(5, 8),
        base.to(torch.complex64).t().conj(),
        base[:, :0],
        base[:1, 0],
    ]
    for got, sent in zip(there_and_back(views), views, strict=True):
        assert torch.equal(got, sent.resolve_conj())


def test_bytes_of_tensors_and_large_arrays_are_not_pickled() -> None:
    value = {"tensor": torch.zeros(5000), "array": np.zeros(5000), "parameter": torch.nn.Parameter(torch.zeros(5000))}
    packed = pickling.pack(value)
    assert sorted(segment.nbytes for segment in packed.layout.segments) == [20_000, 20_000, 40_000]
    assert len(packed.skeleton) < 2000
    assert pickling.pack(torch.zeros(3)).skeleton == b""
    assert pickling.pack([np.zeros(3)]).layout.segments == ()


def test_what_lies_in_a_row_is_not_copied_before_it_is_written() -> None:
    value = torch.zeros(5000)
    for sent in (value, [value]):
        packed = pickling.pack(sent)
        value.fill_(1)
        assert b"".join(packed.runs()) == value.numpy().tobytes() + packed.skeleton
        value.fill_(0)


def test_a_tensor_that_occurs_twice_is_one() -> None:
    value = torch.zeros(5000)
    first, second = there_and_back([value, value])
    assert first is second


def test_a_tensor_comes_without_its_history_and_a_parameter_is_one() -> None:
    parameter = torch.nn.Parameter(torch.randn(3000))
    got, leaf, inner = there_and_back([parameter, torch.ones(3, requires_grad=True), parameter * 2])
    assert isinstance(got, torch.nn.Parameter)
    assert got.requires_grad
    assert torch.equal(got, parameter)
    assert not leaf.requires_grad
    assert torch.equal(inner, parameter.detach() * 2)


def test_other_kinds_of_tensors_come_as_what_they_are() -> None:
    sparse = torch.eye(40).to_sparse()
    got = there_and_back(sparse)
    assert got.is_sparse
    assert torch.equal(got.to_dense(), torch.eye(40))


@pytest.mark.parametrize("own", [False, True])
def test_what_came_may_be_written(own: bool) -> None:
    for sent in (torch.zeros(3), torch.zeros(300_000), np.zeros(3), np.zeros(300_000)):
        got = there_and_back(sent, own=own)
        got += 1
        assert (got == 1).all()


@given(st.lists(st.integers(0, 300), max_size=6))
def test_runs_lie_one_after_another_each_aligned(sizes: list[int]) -> None:
    packed = pickling.pack([torch.zeros(size, dtype=torch.uint8) for size in sizes])
    segments = packed.layout.segments
    assert [segment.nbytes for segment in segments] == sizes
    ends = [segment.start + segment.nbytes for segment in segments]
    assert all(segment.start % ALIGN_BYTES == 0 for segment in segments)
    assert all(end <= after.start for end, after in zip(ends, segments[1:], strict=False))
    assert packed.layout.skeleton_from == max(ends, default=0)
    assert packed.nbytes == packed.layout.skeleton_from + len(packed.skeleton)


@pytest.mark.parametrize(("segments", "skeleton_from"), [([(0, 9)], 8), ([(-1, 2)], 8), ([(3, -1)], 8), ([], 9)])
def test_a_layout_that_names_other_bytes_is_refused(segments: list[tuple[int, int]], skeleton_from: int) -> None:
    layout = Layout(tuple(Segment(*each) for each in segments), skeleton_from, 8)
    with pytest.raises(ValueError, match="exceeds an object of 8"):
        layout.check()


# --- Threads that serve sockets, and waits for futures.


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
