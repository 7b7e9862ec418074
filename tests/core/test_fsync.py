"""What is fsynced, and what is left alone."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import numpy as np
import pytest

from dataplane.core import fsync
from dataplane.core.fsync import force_ranges, is_on_disk

PAGES = 8 << 20


@pytest.fixture
def data(tmp_path: Path) -> np.ndarray:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGES))
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), PAGES), dtype=np.uint8)


def calls(monkeypatch: pytest.MonkeyPatch, data: np.ndarray) -> list[tuple[int, int]]:
    """(first byte, one past the last) of what the kernel is asked for from now on."""
    found: list[tuple[int, int]] = []
    real = fsync._msync()

    def record(address: int, nbytes: int, flags: int) -> int:
        start = address - data.ctypes.data
        found.append((start, start + nbytes))
        return real(address, nbytes, flags)

    monkeypatch.setattr(fsync, "_msync", lambda: record)
    return found


def test_every_byte_is_covered_by_few_calls(monkeypatch: pytest.MonkeyPatch, data: np.ndarray) -> None:
    asked = calls(monkeypatch, data)
    chance = random.Random(1)
    for _ in range(50):
        asked.clear()
        offsets = [chance.randrange(PAGES - 1000) for _ in range(chance.randrange(1, 20))]
        sizes = [chance.randrange(1000) for _ in offsets]
        force_ranges(data, offsets, sizes)
        for offset, size in zip(offsets, sizes, strict=True):
            assert not size or any(start <= offset and offset + size <= end for start, end in asked)
        assert all(start % mmap.PAGESIZE == 0 for start, _ in asked)
        assert len(asked) <= PAGES // fsync.TOGETHER_BYTES


def test_far_apart_is_not_forced_together(monkeypatch: pytest.MonkeyPatch, data: np.ndarray) -> None:
    asked = calls(monkeypatch, data)
    force_ranges(data, [7 << 20, 100, 5000, 0], [10, 10, 10, 0])
    assert asked == [(0, 5010), (7 << 20, (7 << 20) + 10)]


def test_a_disk_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, data: np.ndarray) -> None:
    monkeypatch.setattr(fsync, "_msync", lambda: lambda address, nbytes, flags: -1)
    with pytest.raises(OSError, match="cannot sync 10 bytes to the disk"):
        force_ranges(data, [0], [10])


def test_memory_is_no_disk() -> None:
    assert not is_on_disk("tmpfs")
    assert is_on_disk("ext4")
