"""Checkpoints on disk: whole at their path or not at all, and refused by name when they are not what was written."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane import (
    CheckpointError,
    CheckpointWriteError,
    DataPlaneClient,
    DataPlaneError,
    Shared,
    UnsupportedValueError,
    connect,
    serve,
)
from dataplane.client.checkpoint import manifest, save
from dataplane.core import failpoints
from tests.profiles import budget
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
FEW = budget(150)


@pytest.fixture(scope="module")
def client() -> Iterator[DataPlaneClient]:
    with serve({"capacity_bytes": 32 * MIB}) as server, connect(server.address) as opened:
        opened.register_partition("p", ["x"], 3, ["train", "score"])
        fields = {"x": torch.zeros(3, MIB, dtype=torch.uint8), "y": [torch.arange(n) for n in (2, 0, 5)]}
        opened.put_samples(["a", "b", "c"], "p", fields, [{"n": 1}, {"n": 2}, {}])
        opened.put_samples(["a"], "p", {"z": [{"an": "object"}]})
        yield opened


@pytest.fixture
def saved(client: DataPlaneClient, tmp_path: Path) -> Path:
    client.checkpoint(tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture
def bare() -> Iterator[DataPlaneClient]:
    """A client of a service that must stay empty; the space that the client keeps ahead goes with it."""
    with serve({"capacity_bytes": 32 * MIB}) as server, connect(server.address) as looking:
        with connect(server.address) as opened:
            yield opened
            wait_until(lambda: not looking.stats().partitions, "no partition, staged or other")
        wait_until(lambda: empty(looking), "no byte")


def empty(client: DataPlaneClient) -> bool:
    (unit,) = client.stats().units
    return not unit.live_bytes + unit.reserved_bytes + unit.retired_bytes


def data_file(path: Path) -> Path:
    (found,) = path.glob("data-*.safetensors")
    return found


def released(client: DataPlaneClient) -> bool:
    return not any(unit.pinned_bytes for unit in client.stats().units)


# --- damage -------------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda file: os.truncate(file, file.stat().st_size - 1), "truncated"),
    "emptied": (lambda file: os.truncate(file, 0), "truncated"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "too long|not the manifest"),
    "flipped": (flip, "checksum|not the manifest"),
    "missing": (lambda file: file.unlink(), "missing"),
    "a directory": (lambda file: (file.unlink(), file.mkdir()), "directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("which", ["manifest", "data"])
def test_a_damaged_file_is_named_before_anything_is_written(
    saved: Path, bare: DataPlaneClient, which: str, damage: str
) -> None:
    file = saved / manifest.NAME if which == "manifest" else data_file(saved)
    harm, why = DAMAGE[damage]
    harm(file)
    failpoints.arm("restore.verified", lambda: pytest.fail("it was taken for whole"))
    with pytest.raises(CheckpointError, match=why) as refused:
        bare.restore(saved)
    assert refused.value.file == str(file)


def test_each_of_several_files_is_compared_with_its_checksum(
    client: DataPlaneClient, bare: DataPlaneClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "FILE_BYTES", MIB)
    client.checkpoint(tmp_path / "c")
    found = sorted((tmp_path / "c").glob("data-*.safetensors"))
    assert len(found) > 2
    failpoints.arm("restore.verified", lambda: pytest.fail("it was taken for whole"))
    for file in found:
        whole = file.read_bytes()
        flip(file)
        with pytest.raises(CheckpointError, match="checksum") as refused:
            bare.restore(tmp_path / "c")
        assert refused.value.file == str(file)
        file.write_bytes(whole)


def test_a_manifest_of_another_version(saved: Path, bare: DataPlaneClient) -> None:
    outer = json.loads((saved / manifest.NAME).read_bytes())
    for number in (1, 3):
        (saved / manifest.NAME).write_text(json.dumps({**outer, "format": number, "more": 1}))
        with pytest.raises(
            CheckpointError, match=rf"manifest\.json: it has format {number}, but this version .* reads format 2"
        ):
            bare.restore(saved)


def test_files_of_another_checkpoint(saved: Path, client: DataPlaneClient, bare: DataPlaneClient) -> None:
    client.set_version("p", 0)
    client.checkpoint(saved.parent / "d", ["p"])
    content = data_file(saved).read_bytes()
    changed = content.replace(b'"an"', b'"no"').replace(b"an", b"no")
    assert len(changed) == len(content)
    data_file(saved).write_bytes(changed)
    with pytest.raises(CheckpointError, match="checksum"):
        bare.restore(saved)


def signed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest changed, under a checksum that fits."""
    outer = json.loads((path / manifest.NAME).read_bytes())
    change(outer["checkpoint"])
    inner = json.dumps(outer["checkpoint"])
    text = f'{{"format":2,"sha256":"{hashlib.sha256(inner.encode()).hexdigest()}","checkpoint":{inner}}}'
    (path / manifest.NAME).write_text(text)


def of_cells(place: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["partitions"][0]["cells"][place].update(changes)


def of_partition(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["partitions"][0]["saved"].update(changes)


X, Y, Z = 0, 1, 2
SENSELESS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a path that leads away": lambda content: content["files"][0].update(name="../../etc/passwd"),
    "a negative size": lambda content: content["files"][0].update(nbytes=-1),
    "no such file": of_cells(X, file=1),
    "no such tensor": of_cells(X, prefix="00009/p/x"),
    "other bytes": of_cells(X, nbytes=5),
    "samples that are not there": of_cells(Z, first=3),
    "samples before the first": of_cells(Z, first=-1),
    "samples without a list": of_cells(Z, first=None),
    "values of no bytes": of_cells(Y, spec={"kind": "dense", "dtype": "int64", "inner": [0]}),
    "an index that is not there": of_cells(Z, shared=True),
    "an open kind": of_cells(Z, spec={}),
    "an unknown dtype": of_cells(Z, spec={"kind": "dense", "dtype": "int128"}),
    "another dtype": of_cells(Y, spec={"kind": "jagged", "dtype": "int32", "inner": []}),
    "a shape beyond all bounds": of_cells(Y, spec={"kind": "jagged", "dtype": "int64", "inner": [1 << 40]}),
    "a negative shape": of_cells(Y, spec={"kind": "jagged", "dtype": "int64", "inner": [-1]}),
    "fewer samples": of_partition(live=2),
    "fewer claims": of_partition(tasks=[{"name": "train", "claimed": ""}]),
    "a task twice": of_partition(tasks=[{"name": "train", "claimed": "AA=="}] * 2),
    "a name too long": of_partition(partition="x" * 2000),
    "fewer born": of_partition(born=1),
    "a field declared otherwise": of_partition(fields=[{"name": "x", "declared": {"kind": "object"}}]),
    "something new": lambda content: content["partitions"][0].update(colour="red"),
    "the partition twice": lambda content: content["partitions"].append(content["partitions"][0]),
}


@pytest.mark.parametrize("what", SENSELESS)
def test_a_manifest_that_makes_no_sense_is_a_named_error_and_leaves_nothing(
    saved: Path, bare: DataPlaneClient, what: str
) -> None:
    signed(saved, SENSELESS[what])
    with pytest.raises(DataPlaneError) as refused:
        bare.restore(saved)
    assert isinstance(refused.value, ValueError), refused.value


@FEW
@given(st.binary(max_size=200))
def test_any_bytes_as_a_manifest(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"x/manifest\.json"):
        manifest.decode(Path("x/manifest.json"), content)


def test_any_change_of_a_manifest_is_found(saved: Path) -> None:
    content = (saved / manifest.NAME).read_bytes()

    @FEW
    @given(st.integers(0, len(content) - 1), st.integers(1, 255))
    def check(place: int, change: int) -> None:
        changed = bytearray(content)
        changed[place] ^= change
        try:
            found = manifest.decode(Path("m"), bytes(changed))
        except CheckpointError:
            return
        original = manifest.decode(Path("m"), content)
        assert manifest.encode(found) == manifest.encode(original), "letters of its frame may differ, nothing else"

    check()


def test_any_change_of_the_data_under_a_checksum_that_fits(tmp_path: Path, bare: DataPlaneClient) -> None:
    """Restored as what it says now, or refused with a named error and nothing left; the service goes on."""
    bare.register_partition("q", ["x"], 2, ["train"])
    fields = {"x": [torch.arange(3), torch.arange(2)], "o": [{"a": 1}, "b"], "s": Shared(torch.ones(1), [0, 0])}
    bare.put_samples(["a", "b"], "q", fields, [{"n": 1 << 60, "t": "x"}, {"n": 2}])
    bare.checkpoint(tmp_path / "c")
    bare.clear_samples(None, "q")
    file = data_file(tmp_path / "c")
    content = file.read_bytes()
    refused = []

    @budget(60)
    @given(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(1, 255)), min_size=1, max_size=3))
    def check(changes: list[tuple[int, int]]) -> None:
        changed = bytearray(content)
        for place, change in changes:
            changed[place] ^= change
        file.write_bytes(changed)
        digest = hashlib.sha256(changed).hexdigest()
        signed(tmp_path / "c", lambda found: found["files"][0].update(sha256=digest))
        try:
            bare.restore(tmp_path / "c")
        except DataPlaneError as error:
            refused.append(error)
        bare.clear_samples(None, "q")
        assert not bare.stats().partitions

    check()
    assert refused
    assert all(isinstance(error, ValueError) for error in refused)


# --- its place ----------------------------------------------------------------------------------------------------


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_older_checkpoint_is_replaced_and_nothing_is_left_of_it(saved: Path, client: DataPlaneClient) -> None:
    older = data_file(saved)
    client.checkpoint(saved)
    assert data_file(saved) != older
    assert names(saved.parent) == ["c"]
    assert len(names(saved)) == 2


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    "at", ["checkpoint.saved", "checkpoint.file_written", "checkpoint.before_rename", "checkpoint.between_renames"]
)
def test_a_failure_leaves_what_was_there_and_pins_nothing(
    client: DataPlaneClient, tmp_path: Path, at: str, older: bool
) -> None:
    if older:
        client.checkpoint(tmp_path / "c")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail() -> None:
        raise RuntimeError("here")

    failpoints.arm(at, fail)
    with pytest.raises(RuntimeError, match="here"):
        client.checkpoint(tmp_path / "c")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert names(tmp_path) == (["c"] if older else [])
    wait_until(lambda: released(client))


@pytest.mark.parametrize("older", [False, True])
def test_a_full_disk_is_an_error_that_names_the_file(client: DataPlaneClient, tmp_path: Path, older: bool) -> None:
    if older:
        client.checkpoint(tmp_path / "c")
    before = names(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failpoints.arm("checkpoint.saved", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard)))
    try:
        with pytest.raises(CheckpointWriteError, match=r"00000\.safetensors: .*File too large"):
            client.checkpoint(tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == before
    wait_until(lambda: released(client))
    failpoints.disarm()
    client.checkpoint(tmp_path / "c")


def test_a_disk_that_is_full_for_the_manifest(
    client: DataPlaneClient, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}

    def full(content: manifest.Manifest) -> bytes:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(manifest, "encode", full)
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        client.checkpoint(saved)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


def test_a_path_that_cannot_be(client: DataPlaneClient, tmp_path: Path) -> None:
    for call in (client.checkpoint, client.restore):
        for path in (None, 5, ["c"]):
            with pytest.raises(UnsupportedValueError, match=r"argument path: .*Pass the path of"):
                call(path)
        with pytest.raises(CheckpointError, match="NUL"):
            call(tmp_path / "a\0b")
        with pytest.raises(CheckpointError, match="the path is empty"):
            call("")
    with pytest.raises(CheckpointWriteError, match="too long"):
        client.checkpoint(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match="too long"):
        client.restore(tmp_path / ("x" * 300))


def test_a_directory_that_cannot_be_made(client: DataPlaneClient, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match="Not a directory"):
        client.checkpoint(tmp_path / "file" / "c")
    client.checkpoint(tmp_path / "new" / "parents" / "c")


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_it_is_for_this_user_only_whatever_the_umask(client: DataPlaneClient, tmp_path: Path, mask: int) -> None:
    """The first save makes the directory; the second writes into it, and leaves the mode that its owner gave it."""
    before = os.umask(mask)
    try:
        client.checkpoint(tmp_path / "new")
        modes = {path.relative_to(tmp_path).name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
        (tmp_path / "new").chmod(0o750)
        client.checkpoint(tmp_path / "new")
        again = {path.relative_to(tmp_path).name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    assert all(mode == (0o600 if "." in name else 0o700) for name, mode in modes.items()), modes
    assert len(modes) == 3  # the directory, its manifest, a file
    assert again.pop("new") == 0o750
    assert all(mode == (0o600 if "." in name else 0o700) for name, mode in again.items()), again


def test_a_file_of_the_users_in_an_older_checkpoint_stays(saved: Path, client: DataPlaneClient) -> None:
    (saved / "notes.txt").write_text("step 100")
    (saved / "plots").mkdir()
    client.checkpoint(saved)
    assert (saved / "notes.txt").read_text() == "step 100"
    assert (saved / "plots").is_dir()
    assert manifest.read(saved).partitions
    (saved / manifest.NAME).write_text('{"name": "a web page"}')
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        client.checkpoint(saved)


def test_what_is_no_checkpoint_is_left_alone(client: DataPlaneClient, tmp_path: Path, bare: DataPlaneClient) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    for path in (tmp_path / "notes", tmp_path / "notes" / "thesis.txt"):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            client.checkpoint(path)
    assert names(tmp_path / "notes") == ["thesis.txt"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        bare.restore(tmp_path / "notes")
    (tmp_path / "empty").mkdir()
    client.checkpoint(tmp_path / "empty")
    assert manifest.NAME in names(tmp_path / "empty")


def test_what_crashes_left_is_removed_and_what_is_being_written_is_not(client: DataPlaneClient, saved: Path) -> None:
    dead, alive = (saved.with_name(f"c.tmp-{digit * 24}") for digit in "ab")
    others = [saved.with_name("c.tmp-mine"), saved.with_name("cc.tmp-" + "a" * 24)]
    replaced = saved.with_name("c.old-" + "a" * 24)
    for directory in (dead, alive, *others, replaced):
        directory.mkdir()
        (directory / f"data-{'c' * 24}-00000.safetensors").write_text("")
    (replaced / "notes.txt").write_text("step 100")
    descriptor = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing a checkpoint to this path"):
            client.checkpoint(saved)
        assert alive.exists()
    finally:
        os.close(descriptor)
    client.checkpoint(saved)
    assert names(saved.parent) == sorted(["c", *(path.name for path in others)])
    assert len(names(saved)) == 3
    assert (saved / "notes.txt").read_text() == "step 100"


def test_an_older_checkpoint_that_a_save_set_aside_is_restored_and_put_back(
    client: DataPlaneClient, saved: Path, bare: DataPlaneClient
) -> None:
    """As after a death between the two renames."""
    aside = saved.rename(saved.with_name("c.old-" + "a" * 24))
    assert bare.restore(saved).partitions == {"p": 3}
    assert names(saved.parent) == [aside.name]
    failpoints.arm("checkpoint.saved", lambda: pytest.fail("here"))
    with pytest.raises(pytest.fail.Exception):
        client.checkpoint(saved)
    assert names(saved.parent) == ["c"]
    assert manifest.read(saved).partitions
    bare.clear_samples(None, "p")


def test_a_checkpoint_of_another_format_is_replaced(client: DataPlaneClient, tmp_path: Path) -> None:
    """As format 1 lay in its directory."""
    (tmp_path / "c" / f"data-{'c' * 16}").mkdir(parents=True)
    (tmp_path / "c" / f"data-{'c' * 16}" / "00000.safetensors").write_text("")
    (tmp_path / "c" / manifest.NAME).write_text('{"format": 1}')
    client.checkpoint(tmp_path / "c")
    assert manifest.read(tmp_path / "c").partitions
    assert len(names(tmp_path / "c")) == 2
    assert names(tmp_path) == ["c"]


def test_a_mount_point_is_refused(client: DataPlaneClient) -> None:
    with pytest.raises(CheckpointError, match="/dev/shm: the path is a mount point"):
        client.checkpoint("/dev/shm")


def test_a_link_stays_and_its_target_is_replaced(client: DataPlaneClient, saved: Path, bare: DataPlaneClient) -> None:
    link = saved.with_name("link")
    link.symlink_to(saved)
    older = data_file(saved)
    client.checkpoint(link)
    assert link.is_symlink()
    assert not older.exists()
    assert bare.restore(link).path == str(link)
    bare.clear_samples(None, "p")


def test_two_at_once_into_one_path(client: DataPlaneClient, saved: Path) -> None:
    def another() -> None:
        failpoints.disarm()
        with (
            connect(client.config.address) as other,
            pytest.raises(CheckpointError, match="another process is writing"),
        ):
            other.checkpoint(saved)

    failpoints.arm("checkpoint.saved", another)
    client.checkpoint(saved)
    assert manifest.read(saved)


Racing = tuple[save.StagedCheckpoint, ...]


@pytest.fixture
def racing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Racing]:
    """Two saves that began at one instant: each looked before the other had its directory."""
    saves = save.StagedCheckpoint(saved), save.StagedCheckpoint(saved)
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "siblings", lambda *_: [])
        for each in saves:
            each.prepare()
    yield saves
    for each in saves:
        each.abandon()


ANOTHER_SAVE = "/c: another save to this path was running.* save again"


def test_the_last_of_two_that_began_at_one_instant_wins(saved: Path, racing: Racing) -> None:
    content = manifest.read(saved)
    for each in racing:
        each.publish(content)
    assert manifest.encode(manifest.read(saved)) == manifest.encode(content)


def test_a_save_whose_path_another_one_took_says_so(saved: Path, racing: Racing) -> None:
    content = manifest.read(saved)
    loser, winner = racing

    def interfere() -> None:
        failpoints.disarm()
        winner.publish(content)

    failpoints.arm("checkpoint.between_renames", interfere)
    with pytest.raises(CheckpointError, match=ANOTHER_SAVE):
        loser.publish(content)
    assert manifest.encode(manifest.read(saved)) == manifest.encode(content)


def test_a_save_whose_older_checkpoint_another_one_moved_says_so(
    saved: Path, racing: Racing, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = manifest.read(saved)
    loser, winner = racing
    chmod = Path.chmod

    def interfere(path: Path, mode: int) -> None:
        if path == loser.directory:  # the loser saw the older checkpoint, and moves it next
            saved.rename(winner._older)
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", interfere)
    with pytest.raises(CheckpointError, match=ANOTHER_SAVE):
        loser.publish(content)
    winner._older.rename(saved)


@pytest.mark.parametrize("lost", [FileNotFoundError, BlockingIOError])
def test_a_save_whose_directory_another_one_removes_as_left_by_a_crash_says_so(
    saved: Path, monkeypatch: pytest.MonkeyPatch, lost: type[OSError]
) -> None:
    mkdir = Path.mkdir
    others: list[int] = []

    def interfere(path: Path, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if path == loser.directory:
            others.append(os.open(path, os.O_RDONLY))
            fcntl.flock(others[0], fcntl.LOCK_EX)
            if lost is FileNotFoundError:
                path.rmdir()

    loser = save.StagedCheckpoint(saved)
    monkeypatch.setattr(Path, "mkdir", interfere)
    with pytest.raises(CheckpointError, match=ANOTHER_SAVE):
        loser.prepare()
    os.close(others[0])
    loser.abandon()


@pytest.mark.parametrize("at", ["manifest", "verified"])
def test_a_restore_during_a_save_to_its_path_is_a_named_error_and_leaves_nothing(
    client: DataPlaneClient, saved: Path, bare: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    read = manifest.read

    def replace() -> None:
        failpoints.disarm()
        monkeypatch.undo()
        client.checkpoint(saved)

    def replaced(directory: Path) -> manifest.Manifest:
        content = read(directory)
        replace()
        return content

    if at == "manifest":
        monkeypatch.setattr(manifest, "read", replaced)
    else:
        failpoints.arm("restore.verified", replace)
    with pytest.raises(CheckpointError, match="another process has saved a newer one to this path, restore again"):
        bare.restore(saved)
    assert not bare.stats().partitions
    assert bare.restore(saved).partitions == {"p": 3}
    bare.clear_samples(None, "p")


def test_without_locks_nothing_is_removed_that_could_be_written(
    client: DataPlaneClient, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLocks:
        LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

        @staticmethod
        def flock(descriptor: int, how: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    left = [saved.with_name(f"c.{kind}-{'a' * 24}") for kind in ("old", "tmp")]
    for directory in left:
        directory.mkdir()
    monkeypatch.setattr(save, "fcntl", NoLocks)
    client.checkpoint(saved)
    assert names(saved.parent) == ["c", *(path.name for path in left)]


def test_a_path_that_another_process_creates_meanwhile_is_left_alone(client: DataPlaneClient, tmp_path: Path) -> None:
    def another() -> None:
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "thesis.txt").write_text("years of work")

    failpoints.arm("checkpoint.before_rename", another)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        client.checkpoint(tmp_path / "c")
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == ["thesis.txt"]


@pytest.mark.parametrize("name", [manifest.NAME, "*.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(saved: Path, bare: DataPlaneClient, name: str) -> None:
    path = next(saved.glob(name))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file; use another copy"):
        bare.restore(saved)


def test_a_path_that_is_not_utf_8_is_refused_before_anything_is_written(
    client: DataPlaneClient, tmp_path: Path
) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9"
    for call in (client.checkpoint, client.restore):
        with pytest.raises(CheckpointError, match=r"caf.*not valid UTF-8.*rename its directories"):
            call(path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
