"""A service that is to outlive its machine: what is left after everything was killed, on "another boot".

The kernel's memory cannot be taken away from a test. That rows and records were fsynced in time is shown by
what was asked of the kernel before the answer (`tests/controller/test_journal.py`, `tests/core/test_fsync.py`, and
here).
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from dataplane import connect, serve
from dataplane.core.file_locks import file_system
from dataplane.storage.arena import Arena
from dataplane.storage.arena_record import discard
from dataplane.storage.mapped_arena import MappedArena
from tests.cli.service import Service, services
from tests.conftest import litter, our_files
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

__all__ = ["services"]  # a fixture

NAMES = [f"s{number}" for number in range(6)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory for state and arenas, on a disk."""
    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("the directory for temporary files is memory here; set TMPDIR to one on a disk")
    yield tmp_path
    discard(tmp_path, [tmp_path])


def begin(disk: Path) -> Service:
    """`tq serve` with all it needs on the disk."""
    return Service("--durability", "machine", "--state-dir", str(disk), "--arena-dir", str(disk))


def crash(service: Service, disk: Path) -> None:
    """Everything dies at once, and the records are of another boot."""
    controller = psutil.Process(service.process.pid)
    controller.suspend()  # or it would start its unit again
    (unit,) = controller.children()
    for process in (unit, controller):
        process.kill()
    service.process.communicate(timeout=60)
    wait_until(lambda: not unit.is_running() or unit.status() == psutil.STATUS_ZOMBIE, "the unit's end")
    with sqlite3.connect(disk / "journal.sqlite") as journal:
        journal.execute("UPDATE facts SET value = 'the boot before' WHERE name = 'boot'")
    journal.close()
    record = disk / "unit-unit-0.json"
    kept = json.loads(record.read_text())
    kept["boot"] = "the-boot-before"
    record.write_text(json.dumps(kept))


def tokens(number: int) -> torch.Tensor:
    return torch.arange(1000 * number, 1000 * number + 100)


@pytest.mark.slow
def test_rows_outlive_their_machine_and_damaged_ones_are_found(disk: Path, services: list[Service]) -> None:
    files = our_files()
    first = begin(disk)
    services.append(first)
    with connect(first.address) as client:
        client.register_partition("train", ["tokens"], None, ["policy"])
        client.put_samples(NAMES, "train", {"tokens": [tokens(number) for number in range(6)]})
        assert client.claim_meta("train", "policy", ["tokens"], 2).sample_ids == NAMES[:2]
        client.stats()
        crash(first, disk)
    (arena,) = disk.glob("**/tq-kept-*")
    content = arena.read_bytes()
    damaged = content.index(tokens(4).numpy().tobytes())
    with open(arena, "r+b") as file:
        file.seek(damaged + 300)
        file.write(bytes([content[damaged + 300] ^ 1]))
    second = begin(disk)
    services.append(second)
    with connect(second.address) as client:
        wait_until(lambda: len(client.list_samples("train").sample_ids) == 5)
        left = [number for number in range(6) if number != 4]
        rows = client.get_samples([NAMES[number] for number in left], "train", ["tokens"])["tokens"].unbind()
        assert all(torch.equal(row, tokens(number)) for row, number in zip(rows, left, strict=True))
        client.put_samples(["more"], "train", {"tokens": [tokens(7)]})
        assert client.claim_meta("train", "policy", ["tokens"], 4).sample_ids == ["s2", "s3", "s5", "more"]
    assert second.end(signal.SIGTERM) == 0
    assert "samples of partition 'train' are lost (1 in total)" in second.errors
    assert "'s4'" in second.errors
    discard(disk, [disk])
    assert not litter(files)


def test_rows_are_on_the_disk_before_they_are_committed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for kind in (Arena, MappedArena):
        force = kind.force

        def record(self: object, offsets: object, sizes: object, force: object = force, kind: type = kind) -> None:
            assert callable(force)
            force(self, offsets, sizes)
            events.append(kind.__name__)

        monkeypatch.setattr(kind, "force", record)
    fdatasync = os.fdatasync

    def sync(fd: int) -> None:
        fdatasync(fd)
        events.append("journal")

    monkeypatch.setattr(os, "fdatasync", sync)
    settings = {"capacity_bytes": 8 << 20, "state_dir": str(disk), "arena_dir": str(disk), "durability": "machine"}
    with serve(settings) as server:
        for remote, kind in ((False, "MappedArena"), (True, "Arena")):
            with connect(server.address, force_remote=remote) as client:
                client.register_partition("train", ["tokens"], None, ["policy"])
                client.put_samples(["warm"], "train", {"tokens": [tokens(1)]})
                events.clear()
                client.put_samples(["a"], "train", {"tokens": [tokens(2)]})
                found = events[:]
            assert found.index(kind) < len(found) - 1 - found[::-1].index("journal")


def test_memory_is_refused_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is in memory"):
        serve({"state_dir": str(tmp_path), "durability": "machine", "capacity_bytes": 8 << 20})
