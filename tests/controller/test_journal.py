"""The journal of a state directory: what was appended is there for the next run, or an error says what is not."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.controller import journal as module
from dataplane.controller.journal import END_NAME, FORMAT, LOG_NAME, Journal, Log
from dataplane.core import failpoints
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import StateDirError


def fill(journal: Journal) -> None:
    for _ in range(100):
        journal.append(bytes(4096))


def everything(log: Log, after: int = 0) -> list[bytes]:
    return [record for _, record in log.records(after)]


def test_records_come_back_in_order(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "state") as journal:
        for number in range(3000):
            journal.append(b"%d" % number)
    with Journal.open(tmp_path / "state") as journal:
        assert journal.last == 3000
        assert everything(journal) == [b"%d" % number for number in range(3000)]
        assert everything(journal, 2998) == [b"2998", b"2999"]
        assert [number for number, _ in journal.records(1020, 1030)] == list(range(1021, 1031))


def test_the_directory_is_for_its_owner_only(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "a" / "state") as journal:
        assert journal.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.integration
def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from dataplane.controller.journal import Journal\n"
        "journal = Journal.open(sys.argv[1])\n"
        "for number in range(500): journal.append(b'%d' % number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert done.returncode == -9
    with Journal.open(tmp_path) as journal:
        assert everything(journal) == [b"%d" % number for number in range(500)]
        assert not journal.fact("clean")


def test_a_record_is_refused_whole_when_making_space_for_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with Journal.open(tmp_path) as journal:
        journal.append(b"one")
        journal.write_image(1, b"image")
        journal.begin_from(1)
        with monkeypatch.context() as patched:
            patched.setattr(journal, "_drop_some", fail)
            with pytest.raises(StateDirError, match="disk I/O error"):
                journal.append(b"two")
        journal.append(b"three")
        assert everything(journal, 1) == [b"three"]


def test_an_orderly_end_is_told(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    with Log(tmp_path) as log:
        assert log.fact("clean") == 1


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    with Journal.open(tmp_path), pytest.raises(StateDirError, match=r"another process uses it. Stop that process"):
        Journal.open(tmp_path)
    Journal.open(tmp_path).close()


@pytest.mark.integration
def test_a_forked_child_holds_nothing(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.append(b"one")
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    journal.close()
    with Journal.open(tmp_path) as again:
        assert everything(again) == [b"one"]
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_local", lambda path: False)
    monkeypatch.setattr(module, "file_system", lambda path: "nfs4")
    with pytest.raises(StateDirError, match=r"file system of type nfs4, which several machines may share"):
        Journal.open(tmp_path)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateDirError, match=r"it cannot be used: Not a directory"):
        Journal.open(tmp_path / "file" / "state")


def test_an_image_replaces_what_came_before_it(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        for number in range(1000):
            journal.append(b"%d" % number)
        journal.write_image(900, b"the first 900")
        journal.begin_from(900)
        assert journal.image() == (900, b"the first 900")
        for _ in range(900 // module.DROPPED_AT_ONCE + 2):
            journal.append(b"more")
        (first,) = journal._db.execute("SELECT min(number) FROM log").fetchone()
        assert first == 901
        last = journal.last
        journal.write_image(last - 5, b"a later one")
        journal.begin_from(last - 5)
    assert [path.name for path in tmp_path.glob("image-*")] == [f"image-{last - 5}"]
    with Journal.open(tmp_path) as journal:
        assert journal.image() == (last - 5, b"a later one")
        assert everything(journal, last - 5) == [b"more"] * 5
        journal.append(b"and on")
        assert journal.last == last + 1


def test_images_that_were_never_begun_from_are_removed(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.write_image(0, b"first")
        journal.begin_from(0)
        journal.write_image(7, b"never told")
        (tmp_path / "image-9.aside").write_bytes(b"half")
    with Journal.open(tmp_path) as journal:
        assert sorted(path.name for path in tmp_path.glob("image-*")) == ["image-0"]
        assert journal.image() == (0, b"first")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_image_is_named(tmp_path: Path, damage: str) -> None:
    with Journal.open(tmp_path) as journal:
        journal.write_image(0, b"an image of a ledger")
        journal.begin_from(0)
    path = tmp_path / "image-0"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:9])
    with Journal.open(tmp_path) as journal, pytest.raises(StateDirError, match=r"image-0 (is damaged|cannot be read)"):
        journal.image()


@pytest.mark.parametrize("damage", ["UPDATE log SET record = x'00'", "DELETE FROM log"])
def test_a_damaged_record_is_named(tmp_path: Path, damage: str) -> None:
    with Journal.open(tmp_path) as journal:
        for number in range(5):
            journal.append(b"%d" % number)
    database = sqlite3.connect(tmp_path / LOG_NAME)
    database.execute(f"{damage} WHERE number = 3")
    database.commit()
    database.close()
    with (
        Journal.open(tmp_path) as journal,
        pytest.raises(StateDirError, match=r"record 3 of .* is damaged"),
    ):
        everything(journal)


def left_by_a_kill(folder: Path, copy: Path, count: int) -> None:
    """What a run that was killed after `count` records leaves."""
    with Journal.open(folder) as journal:
        for number in range(1, count + 1):
            journal.append(b"%d" % number * 1000)
        shutil.copytree(folder, copy)


def damage_from_the_middle(folder: Path) -> None:
    path = folder / f"{LOG_NAME}-wal"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damage_to_the_write_ahead_log_is_named(tmp_path: Path) -> None:
    left_by_a_kill(tmp_path / "first", tmp_path / "state", 40)
    damage_from_the_middle(tmp_path / "state")
    with pytest.raises(StateDirError, match=r"record \d+, but 40 were appended: .*-wal is damaged") as refused:
        Journal.open(tmp_path / "state")
    assert f"delete {END_NAME}" in str(refused.value)
    (tmp_path / "state" / END_NAME).unlink()
    with Journal.open(tmp_path / "state") as journal:
        assert 0 < journal.last < 40
        assert len(everything(journal)) == journal.last


def test_a_kill_between_a_record_and_the_note_of_it_starts_normally(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "first") as journal:
        journal.append(b"one")
        failpoints.arm("journal.appended", lambda: shutil.copytree(tmp_path / "first", tmp_path / "state") and None)
        journal.append(b"two")
        failpoints.disarm()
    with Journal.open(tmp_path / "state") as journal:
        assert everything(journal) == [b"one", b"two"]


def test_after_the_end_of_the_machine_records_may_be_missing_unless_the_journal_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_kill(tmp_path / "closed", tmp_path / "killed", 40)
    monkeypatch.setattr(module, "boot_id", lambda: "another boot")
    damage_from_the_middle(tmp_path / "killed")
    (tmp_path / "closed" / LOG_NAME).unlink()
    with pytest.raises(StateDirError, match="but 40 were appended"):
        Journal.open(tmp_path / "closed")
    with Journal.open(tmp_path / "killed") as journal:
        assert journal.last < 40


@pytest.mark.parametrize("content", [b"", b"short", bytes(200)])
def test_a_note_that_makes_no_sense_says_nothing(tmp_path: Path, content: bytes) -> None:
    left_by_a_kill(tmp_path / "first", tmp_path / "state", 3)
    (tmp_path / "state" / END_NAME).write_bytes(content)
    with Journal.open(tmp_path / "state") as journal:
        assert journal.last == 3
        journal.append(b"more")


def test_garbage_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_bytes(b"not a database at all" * 100)
    with pytest.raises(StateDirError, match=r"journal.sqlite cannot be opened: file is not a database"):
        Journal.open(tmp_path)
    (tmp_path / LOG_NAME).unlink()
    Journal.open(tmp_path).close()


@pytest.mark.parametrize(("what", "ours"), [("format", FORMAT), ("protocol", PROTOCOL_VERSION)])
def test_another_format_or_protocol_is_refused(tmp_path: Path, what: str, ours: int) -> None:
    with Journal.open(tmp_path) as journal:
        journal.set_facts(**{what: 99})
    with pytest.raises(StateDirError, match=f"{what} version 99, but this version of the service reads {ours}"):
        Journal.open(tmp_path)


@pytest.mark.parametrize("damage", ["DROP TABLE facts", "DELETE FROM facts", "DELETE FROM facts WHERE name = 'format'"])
def test_a_journal_that_lost_its_facts_is_refused(tmp_path: Path, damage: str) -> None:
    with Journal.open(tmp_path) as journal:
        journal.write_image(0, b"image")
        journal.begin_from(0)
        journal.append(b"record")
    with contextlib.closing(sqlite3.connect(tmp_path / LOG_NAME)) as database:
        database.execute(damage)
        database.commit()
    for _ in range(2):
        with pytest.raises(StateDirError, match="its table of facts is incomplete"):
            Journal.open(tmp_path)
    assert (tmp_path / "image-0").exists()


def test_a_start_that_is_refused_removes_no_image(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.write_image(0, b"image")
        journal.begin_from(0)
    (tmp_path / "image-0").rename(tmp_path / "image-1")
    with Journal.open(tmp_path) as journal, pytest.raises(StateDirError, match="image-0 cannot be read"):
        journal.image()
    assert (tmp_path / "image-1").exists()


def test_a_full_disk_appends_nothing(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(b"fits")
        (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
        journal._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(StateDirError, match=r"cannot be written: database or disk is full"):
            fill(journal)
        last = journal.last
        journal._db.execute("PRAGMA max_page_count = 1000000")
        journal.append(b"fits again")
    with Journal.open(tmp_path) as journal:
        assert journal.last == last + 1
        assert everything(journal)[-1] == b"fits again"


def test_it_is_read_while_it_is_written(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(b"one")
        with Log(tmp_path) as reader:
            found = reader.records(0, 2)
            assert next(found) == (1, b"one")
            journal.append(b"two")
            assert [record for _, record in reader.records(0, 2)] == [b"one", b"two"]


def test_a_damaged_note_of_the_end_is_named_as_that(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "state") as journal:
        journal.append(b"one")
    (tmp_path / "state" / END_NAME).write_bytes(b"\xff" * 52)
    with pytest.raises(StateDirError, match=r"journal\.end is damaged, so the end of the log, record 1, cannot"):
        Journal.open(tmp_path / "state")
    (tmp_path / "state" / END_NAME).unlink()
    with Journal.open(tmp_path / "state") as journal:
        assert everything(journal) == [b"one"]


@pytest.mark.parametrize("left", [None, b""])
def test_a_log_that_is_missing_or_empty_is_named_as_that(tmp_path: Path, left: bytes | None) -> None:
    with Journal.open(tmp_path / "state") as journal:
        journal.append(b"one", b"two")
    log = tmp_path / "state" / LOG_NAME
    log.unlink()
    if left is not None:
        log.write_bytes(left)
    with pytest.raises(StateDirError, match=r"journal\.sqlite is missing, empty or damaged, and the last 2 records"):
        Journal.open(tmp_path / "state")
