"""Several threads copy; the caller is never ahead of them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dataplane.core.row_copy import Run, copy_runs
from dataplane.data.columns import parallel_copy
from dataplane.data.columns.parallel_copy import FROM_BYTES, Copier, default_threads

MIB = 1 << 20
WAIT_S = 60.0


def helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tq-copy"}


class Piece:
    """A target that calls `act` where its bytes would be written."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.nbytes = FROM_BYTES

    def __getitem__(self, part: slice) -> Piece:
        return self

    def __setitem__(self, part: Any, source: Any) -> None:
        self.act()


def acting(*acts: Callable[[], None]) -> list[Any]:
    return [(Piece(act), np.empty(0, np.uint8)) for act in acts]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_byte_of_every_run_is_copied(threads: int) -> None:
    sizes = [0, 1, 100, MIB // 2 + 3, 3 * MIB + 1, 300_000, 5, 7 * MIB]
    sources = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    copier = Copier(threads)
    for _ in range(3):
        copier.copy(list(zip(targets, sources, strict=True)))
        for target, source in zip(targets, sources, strict=True):
            assert np.array_equal(target, source)
            target[:] = 0
    copier.close()
    copier.copy([(targets[-1], sources[-1])])
    assert np.array_equal(targets[-1], sources[-1])


def test_threads_copy_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=WAIT_S)
    copier = Copier(2)
    copier.copy(acting(meeting.wait))
    copier.close()
    assert meeting.n_waiting == 0


def test_small_copies_start_no_thread() -> None:
    before = helpers()
    copier = Copier(4)
    many = [(np.zeros(1000, np.uint8), np.ones(1000, np.uint8)) for _ in range(4000)]
    copier.copy([*many, (np.zeros(MIB, np.uint8), np.ones(MIB, np.uint8))])
    assert all(target.all() for target, _ in many)
    assert helpers() <= before


@pytest.mark.parametrize("end", [Copier.close, lambda copier: None], ids=["closed", "dropped"])
def test_threads_end_with_the_copier(end: Callable[[Copier], None]) -> None:
    before = helpers()
    copier = Copier(3)
    copier.copy([(np.zeros(8 * MIB, np.uint8), np.ones(8 * MIB, np.uint8))])
    started = helpers() - before
    assert len(started) == 2
    end(copier)
    del copier
    gc.collect()
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_nothing_copied_is_held_afterwards() -> None:
    copier = Copier(3)
    for _ in range(20):
        target, source = np.zeros(8 * MIB, np.uint8), np.ones(8 * MIB, np.uint8)
        alive = [weakref.ref(target), weakref.ref(source)]
        copier.copy([(target, source)])
        del target, source
        assert [ref() for ref in alive] == [None, None]
    copier.close()


def test_an_error_in_any_thread_is_the_callers() -> None:
    def fail() -> None:
        raise MemoryError("no space")

    caller = threading.current_thread()
    met = threading.Barrier(2, timeout=WAIT_S)

    def fail_elsewhere() -> None:
        met.wait()
        if threading.current_thread() is not caller:
            fail()

    copier = Copier(2)
    for act in (fail, fail_elsewhere):
        with pytest.raises(MemoryError, match="no space"):
            copier.copy(acting(act))
    copier.close()


def test_an_interrupted_caller_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in its own copy and again while it waits: whoever gives space back after it must not be early."""
    caller = threading.main_thread()
    assert threading.current_thread() is caller
    both = threading.Barrier(2, timeout=WAIT_S)
    waits, left = threading.Event(), threading.Event()
    early: list[bool] = []

    class Watched(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    def act() -> None:
        both.wait()
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        waits.wait(WAIT_S)
        assert caller.ident is not None
        for _ in range(20):  # one that comes just before the caller falls asleep does not wake it
            signal.pthread_kill(caller.ident, signal.SIGINT)
            early.append(left.wait(0.01))

    def make(self: parallel_copy._Job, pieces: Any) -> None:
        plain(self, pieces)
        self.changed = Watched()

    plain = parallel_copy._Job.__init__
    monkeypatch.setattr(parallel_copy._Job, "__init__", make)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    copier = Copier(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            copier.copy(acting(act))
        left.set()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert early == [False] * 20
    copier.close()


@pytest.mark.integration
def test_a_forked_child_copies_alone() -> None:
    copier = Copier(3)
    runs: list[Run] = [(np.zeros(8 * MIB, np.uint8), np.ones(8 * MIB, np.uint8))]
    copier.copy(runs)
    runs[0][0][:] = 0
    child = os.fork()
    if child == 0:
        copier.copy(runs)
        os._exit(0 if runs[0][0].all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not runs[0][0].any()
    copier.close()


def test_one_thread_for_each_core_up_to_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (3, 3), (64, parallel_copy.MAX_DEFAULT_THREADS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert default_threads() == threads


def test_the_plain_copy() -> None:
    target = np.zeros(3, np.uint8)
    copy_runs([(target[:1], np.array([7], np.uint8)), (target[1:], np.array([8, 9], np.uint8))])
    assert target.tolist() == [7, 8, 9]
