"""This user's own directory in a shared one: made for it alone, and refused if somebody else may have had a hand in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dataplane import connect, serve
from dataplane.client.checkpoint.atomic_dir import Place
from dataplane.config import MIB
from dataplane.controller.durable_ledger import DurableLedger, LedgerSettings
from dataplane.core.private_dir import in_own_directory, leave, own_directory, own_path, refuse_link_of_another
from dataplane.errors import CheckpointWriteError, StateDirError
from dataplane.storage.arena import Arena
from dataplane.storage.arena_record import UnitRecord, discard
from dataplane.storage.session_lock import lock_directories

SETTINGS = LedgerSettings(reserve_fraction=0.15, heartbeat_s=2.0, session_timeout_s=20.0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_it_is_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = own_directory(tmp_path)
    finally:
        os.umask(before)
    assert made == own_path(tmp_path) == tmp_path / f"tq-{os.geteuid()}"
    assert mode(made) == 0o700
    assert own_directory(tmp_path) == made


def test_it_may_inherit_the_bit_of_a_volume_with_a_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)
    assert mode(own_directory(tmp_path)) == 0o2700
    assert own_directory(tmp_path) == own_path(tmp_path)
    leave(tmp_path)
    assert not own_path(tmp_path).exists()


@pytest.mark.integration
def test_arenas_and_locks_lie_in_it_and_are_for_this_user(tmp_path: Path) -> None:
    with serve({"capacity_bytes": MIB, "arena_dir": str(tmp_path)}) as server, connect(server.address) as client:
        client.stats()
        (arena,) = own_path(tmp_path).iterdir()
        lock = client._connections.get().session_state._lock
        assert lock is not None
        assert lock.path.parent == own_path("/dev/shm")
        assert mode(arena) == mode(lock.path) == 0o600
        assert mode(own_path(tmp_path)) == mode(own_path("/dev/shm")) == 0o700


@pytest.mark.integration
def test_the_state_of_a_service_is_for_this_user_even_in_a_directory_that_others_may_look_into(tmp_path: Path) -> None:
    before = os.umask(0)
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    try:
        with serve({"capacity_bytes": MIB, "state_dir": str(state)}) as server, connect(server.address) as client:
            client.stats()
            found = {path.name: mode(path) for path in state.iterdir()}
    finally:
        os.umask(before)
        discard(state, ["/dev/shm"])
    assert {"lock", "journal.sqlite", "journal.sqlite-wal", "unit-unit-0.json"} <= set(found)
    assert any(name.startswith("image-") for name in found)
    assert set(found.values()) == {0o600}


def link_of_another_user(link: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`link` leads to `target`, and is not this user's."""
    link.symlink_to(target)
    if os.geteuid():
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    else:
        os.lchown(link, 65534, 65534)


def test_a_state_directory_or_checkpoint_that_another_user_leads_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.mkdir()
    refuse_link_of_another(mine)
    refuse_link_of_another(tmp_path / "missing")
    link_of_another_user(link, mine, monkeypatch)
    with pytest.raises(StateDirError, match=rf"{link} is a symbolic link of another user \([0-9]+\): remove it"):
        DurableLedger.open(link, SETTINGS)
    with pytest.raises(PermissionError, match="is a symbolic link of another user"):
        UnitRecord(link, "unit", tmp_path, tmp_path).open(refuse_to_make, epoch=1)
    with pytest.raises(CheckpointWriteError, match="is a symbolic link of another user"):
        Place(link).prepare()
    assert not list(mine.iterdir())


def refuse_to_make(path: Path) -> Arena:
    raise AssertionError(path)


def test_a_link_in_a_state_directory_that_others_write_to_is_not_followed(tmp_path: Path) -> None:
    mine, state = tmp_path / "mine", tmp_path / "state"
    mine.write_text("of value")
    mine.chmod(0o644)
    state.mkdir()
    (state / "journal.sqlite").symlink_to(mine)
    with pytest.raises(StateDirError, match=r"journal\.sqlite is a symbolic link instead of a regular file: remove it"):
        DurableLedger.open(state, SETTINGS)
    assert (mine.read_text(), mode(mine)) == ("of value", 0o644)


@pytest.mark.integration
def test_who_leaves_last_removes_it(tmp_path: Path) -> None:
    with serve({"capacity_bytes": MIB, "arena_dir": str(tmp_path)}) as server:
        with connect(server.address) as client:
            client.stats()
        assert own_path(tmp_path).exists()
    assert not own_path(tmp_path).exists()


def test_it_is_made_again_when_another_process_removes_it_meanwhile(tmp_path: Path) -> None:
    removals = iter(range(3))

    def make(folder: Path) -> Path:
        for _ in removals:
            leave(tmp_path)
            break
        (folder / "file").write_bytes(b"")
        return folder

    assert (in_own_directory(tmp_path, make) / "file").exists()
    leave(tmp_path)
    assert own_path(tmp_path).exists(), "there is something in it"


def test_it_is_looked_at_again_when_it_is_removed_just_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, removals = os.mkdir, iter(range(3))

    def vanishing(path: Path, mode: int) -> None:
        mkdir(path, mode)
        for _ in removals:
            leave(tmp_path)
            break

    monkeypatch.setattr(os, "mkdir", vanishing)
    assert own_directory(tmp_path).exists()


def test_what_cannot_be_made_there_at_all_is_an_error(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        raise FileNotFoundError("something else")

    with pytest.raises(FileNotFoundError, match="something else"):
        in_own_directory(tmp_path, make)


@pytest.mark.integration
@pytest.mark.parametrize("wrong", ["link", "file", "mode", "owner"])
def test_one_that_another_may_have_prepared_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    path = own_path(tmp_path)
    why = {
        "link": "is a symbolic link",
        "file": "is a file",
        "mode": "has mode 0755.*chmod 700",
        "owner": f"belongs to user {os.geteuid()}",
    }
    match wrong:
        case "link":
            elsewhere = tmp_path / "elsewhere"
            elsewhere.mkdir(mode=0o700)
            path.symlink_to(elsewhere)
        case "file":
            path.write_bytes(b"")
        case "mode":
            path.mkdir()
            path.chmod(0o755)
        case "owner":
            path.mkdir(mode=0o700)
            monkeypatch.setattr(os, "geteuid", lambda: 4711)
            path = path.rename(own_path(tmp_path))
    with pytest.raises(PermissionError, match=f"{path} {why[wrong]}"):
        own_directory(tmp_path)
    with pytest.raises(PermissionError, match=str(path)):
        serve({"capacity_bytes": MIB, "arena_dir": str(tmp_path)})
    monkeypatch.setattr("dataplane.storage.session_lock.DEFAULT_LOCK_DIRECTORY", str(tmp_path))
    assert lock_directories(Path("/somewhere")) == {Path("/somewhere")}
    assert str(path) in caplog.text
