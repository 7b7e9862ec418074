"""The journal of a state directory: what was appended is there for the next run, or an error says what is not."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, DataPlaneConfig, StateDirError, connect, serve
from dataplane.config import MIB
from dataplane.controller import journal as module
from dataplane.controller.journal import END_NAME, FORMAT, LOG_NAME, Journal, Log
from dataplane.core import failpoints
from dataplane.core.memory_limits import AvailableMemory
from dataplane.core.private_dir import own_directory
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import ArenaSpaceError, CapacityTimeoutError, StateDirError
from dataplane.storage.arena_record import discard
from dataplane.storage.unit import StorageUnit
from tests.ports import free_ports


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


# --- What a service and its storage units keep in a state directory is not lost to a wrong flag of
# the next start.


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Directories for the state and for arenas."""
    for name in ("arenas", "others"):
        (tmp_path / name).mkdir()
    yield tmp_path
    discard(tmp_path / "state", [tmp_path / "arenas", tmp_path / "others"])


@pytest.mark.integration
def test_rows_outlive_a_start_with_another_arena_directory(folder: Path) -> None:
    right = {"capacity_bytes": MIB, "state_dir": str(folder / "state"), "arena_dir": str(folder / "arenas")}
    with serve(right) as server, connect(server.address) as client:
        client.register_partition("p", ["x"], None, ["train"])
        client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    for wrong in (right | {"arena_dir": str(folder / "others")}, right | {"arena_dir": "/dev/shm"}):
        with pytest.raises(StateDirError, match=f"Start the unit with --arena-dir {folder / 'arenas'}"):
            serve(wrong)
    with serve(right) as server, connect(server.address) as client:
        assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [0, 1]


def unit_of(address: str, folder: Path) -> StorageUnit:
    config = DataPlaneConfig(capacity_bytes=MIB, state_dir=str(folder / "state"), arena_dir=str(folder / "arenas"))
    return StorageUnit(config, address, name="e")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "state").glob("unit-*")}


@pytest.mark.integration
@pytest.mark.parametrize("durable", [True, False])
def test_rows_outlive_a_start_of_their_unit_for_another_service(folder: Path, *, durable: bool) -> None:
    with serve({"units": 0} | ({"state_dir": str(folder / "service")} if durable else {})) as own:
        with unit_of(own.address, folder), connect(own.address) as client:
            client.register_partition("p", ["x"], None, ["train"])
            client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        written = contents(folder)
        with serve({"units": 0}) as other:
            why = f" at {own.address}; this unit was started for .+ at {other.address}. Start the unit with the address"
            with pytest.raises(StateDirError, match=why):
                unit_of(other.address, folder).start()
        assert contents(folder) == written
        with unit_of(own.address, folder), connect(own.address) as client:
            assert [unit.name for unit in client.stats().units] == ["e"]
            assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [0, 1]


@pytest.mark.integration
def test_a_service_that_moved_is_the_same(folder: Path) -> None:
    first = free_ports(4)
    for port in (first, first + 2):
        settings = {"units": 0, "port": port, "state_dir": str(folder / "service")}
        with serve(settings) as server, unit_of(server.address, folder) as unit:
            assert unit.unit_id == 1


@pytest.mark.integration
def test_a_unit_of_a_service_that_began_anew_at_its_address_begins_anew_too(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(2)
    with (
        serve({"units": 0, "port": port}) as server,
        unit_of(server.address, folder),
        connect(server.address) as client,
    ):
        client.register_partition("p", ["x"], None, ["train"])
        client.put_samples(["a"], "p", {"x": torch.arange(1)})
    written = contents(folder)
    with (
        serve({"units": 0, "port": port}) as server,
        unit_of(server.address, folder),
        connect(server.address) as client,
    ):
        assert [unit.live_bytes for unit in client.stats().units] == [0]
    assert "It had no state directory, or the directory was emptied" in caplog.text
    assert contents(folder) != written


@pytest.mark.integration
@pytest.mark.parametrize("name", [None, ""])
def test_a_unit_without_a_name_is_refused_where_its_rows_are_to_outlive_it(tmp_path: Path, name: str | None) -> None:
    config = DataPlaneConfig(capacity_bytes=MIB, state_dir=str(tmp_path / "state"))
    with pytest.raises(ValueError, match=r"needs a name.*tq unit --name"):
        StorageUnit(config, "127.0.0.1:1", name=name)


# --- Arenas whose directory has no space, or takes no writes: puts are told so, and everything else
# goes on.


CAPACITY = 100 * MIB
SERVICE = {"capacity_bytes": CAPACITY}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 MiB of its own."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "none", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this process may not mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)  # somebody may hold a view of an arena there still


def row(nbytes: int, value: int = 1) -> dict[str, torch.Tensor]:
    return {f"x{nbytes}": torch.full((1, nbytes), value, dtype=torch.uint8)}


def works(client: DataPlaneClient, name: str) -> None:
    """What there is space for is stored and read."""
    client.put_samples([name], "p", row(MIB, 7))
    assert client.get_samples([name], "p", [f"x{MIB}"])[f"x{MIB}"].sum() == 7 * MIB
    client.clear_samples([name], "p")


@pytest.mark.integration
def test_a_full_disk_is_named_and_there_is_space_again_when_there_is(small_disk: Path) -> None:
    with serve({**SERVICE, "arena_dir": str(small_disk)}) as server, connect(server.address) as client:
        client.register_partition("p", [], None, ["t"], when_full="reject")
        filler = small_disk / "filler"
        filler.write_bytes(bytes(40 * MIB))
        with pytest.raises(CapacityTimeoutError, match=r"cannot grow: the arena needs .* bytes in") as caught:
            client.put_samples(["large"], "p", row(80 * MIB))
        assert str(small_disk) in str(caught.value)
        works(client, "small")
        assert f"in {small_disk}" in client.stats().units[0].problem
        filler.unlink()
        client.register_partition("p", [], None, ["t"])
        client.put_samples(["large"], "p", row(80 * MIB))
        assert client.stats().units[0].problem == ""


@pytest.mark.integration
def test_a_put_waits_for_space_on_the_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filler goes when the arena has been refused space twice, so that the put is served by a later try."""
    refused: list[int] = []
    filler = small_disk / "filler"
    honest = os.posix_fallocate

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if filler.exists():
            refused.append(nbytes)
            if len(refused) == 2:
                filler.unlink()
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(fd, offset, nbytes)

    with serve({**SERVICE, "arena_dir": str(small_disk)}) as server, connect(server.address) as client:
        client.register_partition("p", [], None, ["t"])
        filler.touch()
        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        client.put_samples(["large"], "p", row(80 * MIB))
        assert len(refused) == 2
        assert not filler.exists()


@pytest.mark.integration
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_whatever_the_disk_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    with serve({**SERVICE, "arena_dir": str(tmp_path)}) as server, connect(server.address) as client:
        client.register_partition("p", [], None, ["t"], when_full="reject")
        with monkeypatch.context() as broken:
            broken.setattr(os, "posix_fallocate", fail)
            with pytest.raises(CapacityTimeoutError) as caught:
                client.put_samples(["large"], "p", row(80 * MIB))
            assert os.strerror(number) in str(caught.value)
            assert str(tmp_path) in str(caught.value)
            works(client, "small")


@pytest.mark.integration
def test_a_memory_limit_that_others_use_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    with serve({**SERVICE, "arena_dir": str(tmp_path)}) as server, connect(server.address) as client:
        client.register_partition("p", [], None, ["t"], when_full="reject")

        def little(directory: Any) -> AvailableMemory:
            return AvailableMemory(free_bytes=5, limit="the cgroup's memory limit of 9 bytes")

        monkeypatch.setattr("dataplane.storage.arena.available_memory", little)
        with pytest.raises(CapacityTimeoutError, match=r"5 free .the cgroup's memory limit of 9 bytes"):
            client.put_samples(["large"], "p", row(80 * MIB))
        works(client, "small")


@pytest.mark.integration
def test_a_disk_that_takes_no_writes_is_named_at_the_start(small_disk: Path) -> None:
    folder = own_directory(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ArenaSpaceError, match=r"Read-only file system") as caught:
        serve({**SERVICE, "arena_dir": str(small_disk)})
    assert caught.value.directory == str(folder)
