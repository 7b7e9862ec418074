"""The processes of storage units: what `stop` does while they start."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from dataplane import DataPlaneConfig
from dataplane.config import MIB
from dataplane.storage import unit_process
from dataplane.storage.unit_process import UnitProcesses

pytestmark = pytest.mark.integration


@pytest.fixture
def config(tmp_path: Path) -> DataPlaneConfig:
    return DataPlaneConfig(capacity_bytes=MIB, arena_dir=str(tmp_path))


class UnfairLock:
    """A lock that another thread than `favourite` gets only after `released` is set. `wanted`: that thread waits."""

    def __init__(self, favourite: threading.Thread) -> None:
        self._lock = threading.Lock()
        self._favourite = favourite
        self.wanted = threading.Event()
        self.released = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is not self._favourite:
            self.wanted.set()
            assert self.released.wait(60)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_no_further_unit_is_started_after_stop(monkeypatch: pytest.MonkeyPatch, config: DataPlaneConfig) -> None:
    units = UnitProcesses("127.0.0.1:1", config, on_end=lambda why: None)
    lock = UnfairLock(threading.current_thread())
    monkeypatch.setattr(units, "_guard", lock)
    stopping = threading.Thread(target=units.stop)
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_one(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        started.append(start(["cat"], **settings))
        if len(started) == 2:
            stopping.start()
            assert lock.wanted.wait(60)
        return started[-1]

    monkeypatch.setattr(unit_process.subprocess, "Popen", start_one)
    try:
        units.start(5)
    finally:
        lock.released.set()
        stopping.join(60)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_stop_is_quiet_if_a_unit_has_ended_before_it_read_its_settings(
    monkeypatch: pytest.MonkeyPatch, config: DataPlaneConfig
) -> None:
    start = subprocess.Popen

    def start_ended(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        process = start(["true"], **settings)
        process.wait(60)
        return process

    monkeypatch.setattr(unit_process.subprocess, "Popen", start_ended)
    units = UnitProcesses("127.0.0.1:1", config, on_end=lambda why: None)
    with pytest.raises(OSError, match="storage unit unit-0 cannot start: its process ended with code 0"):
        units.start(1)
    units.stop()
