"""Arenas that outlive their storage unit."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dataplane.config import MIB
from dataplane.errors import StateDirError
from dataplane.storage import arena as arena_module
from dataplane.storage import arena_record
from dataplane.storage.arena import Arena, sweep, sweep_recorded
from dataplane.storage.arena_record import Adopted, UnitRecord, discard
from dataplane.storage.mapped_arena import MappedArena


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory for arenas, of no name that another process looks for, as it goes at the end."""
    with tempfile.TemporaryDirectory(prefix="test-kept-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def record(tmp_path: Path, memory: Path) -> UnitRecord:
    return UnitRecord(tmp_path / "state", "unit/0", memory, tmp_path)


class BeginsAnew(Exception):
    pass


def going_on(record: UnitRecord, *, epoch: int) -> Adopted | None:
    """What the next run goes on with; None if it begins anew."""

    def create(keeper: Path) -> Arena:
        raise BeginsAnew

    try:
        return record.open(create, epoch=epoch)
    except BeginsAnew:
        return None


def left_by(record: UnitRecord, memory: Path) -> Path:
    """An arena with a word in it, as a unit leaves it that was killed."""
    arena = record.create_arena(lambda keeper: Arena.create(memory, MIB, epoch=1, keeper=keeper))
    arena.grow(8192)
    arena.data[100:105] = list(b"hello")
    record.write(arena, 3)
    arena.close(unlink=False)
    return arena.path


def test_the_next_run_finds_everything(record: UnitRecord, memory: Path) -> None:
    path = left_by(record, memory)
    found = going_on(record, epoch=2)
    assert found is not None
    with found.arena as arena:
        assert (arena.path, found.unit, arena.epoch) == (path, 3, 2)
        assert (arena.backed_bytes, arena.capacity_bytes) == (8192, MIB)
        assert arena.data[100:105].tobytes() == b"hello"
        assert arena.grow(16384) == 16384
    assert not path.exists()


def test_clients_mapped_before_see_what_is_written_after(record: UnitRecord, memory: Path) -> None:
    path = left_by(record, memory)
    with MappedArena.open(path) as mapped:
        found = going_on(record, epoch=2)
        assert found is not None
        with found.arena as arena:
            arena.data[:3] = list(b"new")
            assert mapped.readonly(0, 3).tobytes() == b"new"


def test_no_sweep_removes_it_while_its_record_is_there(record: UnitRecord, memory: Path) -> None:
    path = left_by(record, memory)
    assert sweep(memory) == sweep_recorded(memory) == []
    record.path.unlink()
    assert sweep(memory) == []
    assert sweep_recorded(memory) == [path]


def test_what_cannot_be_looked_at_is_taken_for_kept(
    record: UnitRecord, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fails for a while must not cost the rows in memory."""
    path = left_by(record, memory)
    real = os.stat

    def fail(of: Any, *arguments: Any, **settings: Any) -> os.stat_result:
        if os.fspath(of) == os.fsencode(record.path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(of, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        assert sweep_recorded(memory) == []
    assert "it is not removed" in caplog.text
    assert path.exists()
    record.path.unlink()
    assert sweep_recorded(memory) == [path]


def test_what_another_container_left_stays(record: UnitRecord, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may share memory and see other files."""
    path = left_by(record, memory)
    record.path.unlink()
    with monkeypatch.context() as there:
        there.setattr(arena_module, "_mounts", lambda: 1)
        assert sweep_recorded(memory) == []
    assert sweep_recorded(memory) == [path]


def test_a_held_one_stays_whatever_its_record(record: UnitRecord, memory: Path) -> None:
    left_by(record, memory)
    found = going_on(record, epoch=2)
    assert found is not None
    with found.arena:
        record.path.unlink()
        assert sweep_recorded(memory) == []


def test_discarding_a_state_directory_gives_its_memory_back(record: UnitRecord, memory: Path) -> None:
    path = left_by(record, memory)
    assert discard(record.path.parent, [memory]) == [path]
    assert going_on(record, epoch=2) is None


def test_two_runs_at_once_are_an_error(record: UnitRecord, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_record, "HELD_S", 0.0)
    left_by(record, memory)
    found = going_on(record, epoch=2)
    assert found is not None
    with found.arena, pytest.raises(StateDirError, match=r"runs the storage unit of unit-unit%2F0\.json"):
        going_on(record, epoch=3)


def test_the_next_run_waits_for_the_one_before_to_end(
    record: UnitRecord, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_record, "HELD_S", 300.0)
    left_by(record, memory)
    found = going_on(record, epoch=2)
    assert found is not None
    tried, adopt = threading.Event(), Arena.adopt

    def trying(*arguments: Any, **settings: Any) -> Arena:
        try:
            return adopt(*arguments, **settings)
        except BlockingIOError:
            tried.set()
            raise

    monkeypatch.setattr(Arena, "adopt", trying)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(going_on, record, epoch=3)
        assert tried.wait(60.0)
        found.arena.close(unlink=False)
        again = waiting.result(60.0)
    assert again is not None
    with again.arena as arena:
        assert arena.data[100:105].tobytes() == b"hello"


def test_a_record_may_be_there_before_its_arena(record: UnitRecord, caplog: pytest.LogCaptureFixture) -> None:
    assert going_on(record, epoch=2) is None
    assert record.path.read_bytes() == b""
    assert going_on(record, epoch=2) is None
    assert not [each for each in caplog.records if each.name == arena_record.__name__]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b"short"), "not an arena"),
        (lambda path: os.truncate(path, 20_000), "truncated"),
        (lambda path: path.write_bytes(b"x" * 70_000), "not an arena"),
    ],
)
def test_what_is_damaged_is_not_gone_on_with(
    record: UnitRecord, memory: Path, caplog: pytest.LogCaptureFixture, damage: object, why: str
) -> None:
    assert callable(damage)
    damage(left_by(record, memory))
    assert going_on(record, epoch=2) is None
    assert why in caplog.text
    assert "starting with an empty arena" in caplog.text


def test_epochs_only_grow_also_when_the_clock_is_set_back(record: UnitRecord, memory: Path) -> None:
    left_by(record, memory)
    for wished, expected in ((1, 2), (0, 3), (9, 10), (9, 11)):
        found = going_on(record, epoch=wished + (wished == 9 and expected == 10))
        assert found is not None
        assert found.arena.epoch == expected
        found.arena.close(unlink=False)


def test_another_container_begins_anew(
    record: UnitRecord, memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock file that is not there proves nothing where another /dev/shm is."""
    path = left_by(record, memory)
    assert going_on(UnitRecord(tmp_path / "state", "unit/0", memory, "/"), epoch=2) is None
    path.unlink()  # what another container has in its own memory cannot be seen
    assert going_on(UnitRecord(tmp_path / "state", "unit/0", tmp_path, "/"), epoch=2) is None
    assert caplog.text.count(f"Arena {path} belongs to another container; starting with an empty arena") == 2


def test_another_boot_begins_anew(
    record: UnitRecord, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = left_by(record, memory)
    monkeypatch.setattr(arena_record, "boot_id", lambda: "the boot after")
    assert going_on(UnitRecord(record.path.parent, "unit/0", memory, "/"), epoch=2) is None
    assert f"Arena {path} is lost: the machine was restarted; starting with an empty arena" in caplog.text


@pytest.fixture(params=["the same container", "another container"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., UnitRecord]:
    """The next start of a unit, of which the arena is there all the same."""

    def started(arena_dir: Path) -> UnitRecord:
        locks = "/" if request.param == "another container" else tmp_path
        return UnitRecord(tmp_path / "state", "unit/0", arena_dir, locks)

    return started


def test_a_start_with_another_arena_directory_is_refused_and_leaves_all_as_it_is(
    start: Callable[..., UnitRecord], memory: Path, tmp_path: Path
) -> None:
    path = left_by(UnitRecord(tmp_path / "state", "unit/0", memory, tmp_path), memory)
    other = tmp_path / "other"
    other.mkdir()
    again = start(other)
    written = again.path.read_bytes()
    with pytest.raises(StateDirError) as refused:
        going_on(again, epoch=2)
    why = f"'unit/0', {path}, was created with --arena-dir {memory}, but this start uses --arena-dir {other}"
    assert f"{why}. Start the unit with --arena-dir {memory}. To drop its rows" in str(refused.value)
    assert (again.path.read_bytes(), path.exists()) == (written, True)


def test_the_same_directory_under_another_name_is_the_same(record: UnitRecord, memory: Path, tmp_path: Path) -> None:
    left_by(record, memory)
    (tmp_path / "link").symlink_to(memory)
    found = going_on(UnitRecord(tmp_path / "state", "unit/0", tmp_path / "link", tmp_path), epoch=2)
    assert found is not None
    found.arena.close()


@pytest.mark.parametrize("back", [True, False])
def test_an_arena_directory_that_was_replaced_is_refused(memory: Path, tmp_path: Path, *, back: bool) -> None:
    """Who mapped the arena there was writes to that, not to its copy. An empty one may be where a disk was mounted."""
    arenas = memory / "arenas"
    arenas.mkdir()
    path = left_by(UnitRecord(tmp_path / "state", "unit/0", arenas, tmp_path), arenas)
    arenas.rename(memory / "before")
    arenas.mkdir()
    if back:
        path.write_bytes((memory / "before" / path.name).read_bytes())
    again = UnitRecord(tmp_path / "state", "unit/0", arenas, tmp_path)
    written = again.path.read_bytes()
    with pytest.raises(StateDirError, match=f"Restore the original directory {arenas}") as refused:
        going_on(again, epoch=2)
    assert f"remove {path} and empty {again.path} " in str(refused.value)
    assert again.path.read_bytes() == written
    path.unlink(missing_ok=True)
    again.path.write_bytes(b"")
    opened = again.open(lambda keeper: Arena.create(arenas, MIB, epoch=2, keeper=keeper), epoch=2)
    with opened.arena:
        assert opened.anew


def test_who_begins_anew_says_which_arena_is_lost(record: UnitRecord, memory: Path) -> None:
    path = left_by(record, memory)
    with MappedArena.open(path) as lost:
        cookie = lost.header(16, 16).hex()
    path.unlink()
    with record.open(lambda keeper: Arena.create(memory, MIB, epoch=2, keeper=keeper), epoch=2).arena as arena:
        record.write(arena, 4)
        assert arena.cookie.hex() != cookie
    again = record.open(lambda keeper: Arena.create(memory, MIB, epoch=3, keeper=keeper), epoch=3)
    with again.arena:
        assert again.lost == arena.cookie.hex()


@pytest.mark.parametrize("left", [b"", b"{}", b'{"arena": "/dev/shm', b"\xff" * 40])
def test_a_damaged_record_begins_anew_and_its_arena_goes(record: UnitRecord, memory: Path, left: bytes) -> None:
    path = left_by(record, memory)
    record.path.write_bytes(left)
    opened = record.open(lambda keeper: Arena.create(memory, MIB, epoch=2, keeper=keeper), epoch=2)
    with opened.arena as arena:
        assert (opened.anew, opened.lost, opened.unit) == (True, "", 0)
        assert list(memory.iterdir()) == [arena.path] != [path]


def test_the_first_run_is_not_anew(record: UnitRecord, memory: Path) -> None:
    opened = record.open(lambda keeper: Arena.create(memory, MIB, epoch=2, keeper=keeper), epoch=2)
    with opened.arena:
        assert not opened.anew


def test_garbage_is_no_record(record: UnitRecord, caplog: pytest.LogCaptureFixture) -> None:
    record.path.parent.mkdir()
    record.path.write_text("{}")
    assert going_on(record, epoch=2) is None
    assert "is unreadable" in caplog.text


def test_an_arena_whose_keeper_is_no_path_stays(record: UnitRecord, memory: Path) -> None:
    path = left_by(record, memory)
    with open(path, "r+b") as file:
        file.seek(1024 + 8)  # behind the number of the mounts
        file.write(b"\x03\0/\0x")
    assert sweep_recorded(memory) == []
    assert path.exists()


def test_an_arena_whose_creation_ended_before_its_keeper_was_written_goes(record: UnitRecord, memory: Path) -> None:
    path = left_by(record, memory)
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(bytes(4096 - 1024))
    assert sweep_recorded(memory) == [path]
    assert not path.exists()
