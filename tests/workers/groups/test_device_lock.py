"""Locks of accelerators, between workers of one node."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import Child
from tests.restarts import wait_until
from workers.errors import DeviceLockTimeoutError
from workers.groups.device_lock import DeviceLock
from workers.transport import waiting

pytestmark = pytest.mark.integration

WAIT_S = 60.0
HOLD = """
import sys
from workers.groups.device_lock import DeviceLock
DeviceLock("w:9", ["0"], "job", sys.argv[1]).acquire()
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """The folder of the files; none is left in it."""
    yield tmp_path
    assert not [path for folder in tmp_path.iterdir() for path in folder.iterdir()]


def lock(folder: Path, rank: int, *devices: str, job: str = "job") -> DeviceLock:
    return DeviceLock(f"w:{rank}", devices, job, folder)


def held(one: DeviceLock) -> bool:
    """Whether another worker holds it."""
    try:
        one.acquire(timeout_s=0.0)
    except DeviceLockTimeoutError:
        return True
    one.release()
    return False


def test_one_worker_at_a_time_has_an_accelerator(files: Path) -> None:
    first, second = lock(files, 0, "0", "1"), lock(files, 1, "1", "2")
    with first:
        assert held(second)
        assert held(lock(files, 2, "0"))
        assert not held(lock(files, 2, "2"))
        assert not held(lock(files, 2))
        assert not held(lock(files, 2, "0", job="another"))
    assert not held(second)
    with second:
        assert held(first)


def test_who_waits_has_it_once_it_is_released(files: Path) -> None:
    first, got = lock(files, 0, "0"), threading.Event()
    first.acquire()

    def wait(rank: int) -> None:
        with lock(files, rank, "0"):
            got.set()

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    assert not got.is_set()
    first.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert got.is_set()


def test_threads_of_a_worker_have_it_together(files: Path) -> None:
    mine, other = lock(files, 0, "0"), lock(files, 1, "0")
    with mine:
        thread = threading.Thread(target=mine.acquire)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert held(other)
    mine.release()
    assert not held(other)
    with pytest.raises(RuntimeError, match="worker w:0: the worker does not hold it"):
        mine.release()


def test_a_wait_names_who_holds_it(
    files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "LOG_EVERY_S", 0.01)
    first, second = lock(files, 0, "1"), lock(files, 1, "0", "1")
    with first:
        thread = threading.Thread(target=second.acquire)
        thread.start()
        wait_until(lambda: "w:1: accelerator 1, held by w:0: waiting for" in caplog.text, "the log names it")
    thread.join(WAIT_S)
    assert held(first)
    second.release()


def test_a_wait_that_times_out_leaves_nothing(files: Path) -> None:
    first, second = lock(files, 0, "1"), lock(files, 1, "0", "1")
    with first:
        with pytest.raises(DeviceLockTimeoutError, match=r"w:1 waited .* accelerator 1, which w:0 holds"):
            second.acquire(timeout_s=0.2)
        assert not held(lock(files, 2, "0"))
    with second:
        assert held(first)


def test_it_goes_with_its_process(files: Path) -> None:
    with Child([sys.executable, "-c", HOLD, str(files)]) as child:
        assert child.line() == "holds"
        mine = lock(files, 0, "0")
        assert held(mine)
        thread = threading.Thread(target=mine.acquire, args=(WAIT_S,))
        thread.start()
        os.kill(child.pid, signal.SIGKILL)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        mine.release()


def test_a_forked_child_does_not_keep_it(files: Path) -> None:
    mine, other = lock(files, 0, "0"), lock(files, 1, "0")
    mine.acquire()
    ready, go_on = os.pipe()
    child = os.fork()
    if not child:
        os.close(go_on)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    mine.release()
    try:
        assert not held(other)
    finally:
        os.close(go_on)
        os.waitpid(child, 0)
