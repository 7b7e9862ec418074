# ruff: noqa: F401, F811
"""Registrations of memory with CUDA, with recorded calls in the place of CUDA."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dataplane.core import cuda_copy, cuda_memory
from dataplane.core.cuda_memory import RegisteredMemory
from tests.fake_gpu import CPU as GPU
from tests.fake_gpu import FakeGpu, _copying, fake_gpu

PAGE = 4096


@pytest.fixture
def ended(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    starts: list[int] = []
    monkeypatch.setattr(cuda_memory, "_unregister", starts.append)
    return starts


def _memory(backed: int = 64 * PAGE) -> RegisteredMemory:
    return RegisteredMemory(np.zeros(64 * PAGE, np.uint8), lambda: backed)


def test_a_release_waits_for_a_registration_of_another_thread(
    fake_gpu: FakeGpu, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(start: int, nbytes: int) -> bool:
        begun.set()
        return go_on.wait(60)

    monkeypatch.setattr(cuda_memory, "_register", slow)
    memory = _memory()

    def cover() -> None:
        with cuda_memory.lock:
            memory.cover(PAGE)

    threads = [threading.Thread(target=cover), threading.Thread(target=memory.release)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    assert not ended
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 1


def test_an_interrupted_registration_is_ended(
    fake_gpu: FakeGpu, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(start: int, nbytes: int) -> bool:
        raise KeyboardInterrupt

    memory = _memory()
    with monkeypatch.context() as patch:
        patch.setattr(cuda_memory, "_register", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.cover(PAGE)
    assert len(ended) == 1
    assert memory.cover(PAGE), "it is tried again"


def test_an_interrupted_end_is_not_taken_for_a_registration(
    fake_gpu: FakeGpu, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(start: int) -> None:
        raise KeyboardInterrupt

    memory = _memory()
    assert memory.cover(PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_memory, "_unregister", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.release()
    assert memory.cover(PAGE)
    assert len(fake_gpu.registered) == 2


def test_a_size_that_is_refused_leaves_what_there_was(
    fake_gpu: FakeGpu, ended: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_memory, "_STEP_BYTES", PAGE)
    sizes: list[int] = []

    def register(start: int, nbytes: int) -> bool:
        sizes.append(nbytes)
        return nbytes <= 20 * PAGE

    monkeypatch.setattr(cuda_memory, "_register", register)
    memory = _memory()
    assert memory.cover(12 * PAGE)
    assert memory.cover(13 * PAGE), "twice as much is refused, as much as needed is not"
    assert sizes == [12 * PAGE, 24 * PAGE, 13 * PAGE]
    assert not memory.cover(21 * PAGE)
    assert "ulimit -l" in caplog.text
    assert memory.cover(13 * PAGE)
    before = len(sizes)
    assert not memory.cover(22 * PAGE)
    assert len(sizes) == before
    assert memory.cover(14 * PAGE)


def test_a_signal_handler_may_release_memory_that_its_thread_copies(fake_gpu: FakeGpu, ended: list[int]) -> None:
    memory = _memory()
    with _copying(GPU):
        assert memory.cover(PAGE)
        memory.release()
        assert not ended
    assert len(ended) == 1
    memory.release()
    assert len(ended) == 1


def test_ranges_without_bytes_do_not_narrow_the_words() -> None:
    sources, targets, sizes = (np.array(each) for each in ([1024, 2049, 4096], [0, 3, 64], [64, 0, 8]))
    ((word_bytes, table),) = cuda_copy.plan([(sources, targets, sizes)]).items()
    assert word_bytes == 8
    assert table.tolist() == [[1024, 4096], [0, 64], [8, 1], [1, 2]]
    assert cuda_copy.plan([(sources[1:2], targets[1:2], sizes[1:2])]) == {}
    assert cuda_copy.plan([]) == {}
