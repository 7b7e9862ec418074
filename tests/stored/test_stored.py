"""A service and a checkpoint that an earlier commit stored are read by this one, bit for bit."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from dataplane import CheckpointError, DataPlaneClient, StateDirError, connect, serve
from dataplane.client.checkpoint import manifest
from dataplane.controller import journal
from dataplane.controller.journal import LOG_NAME
from dataplane.core.addresses import boot_id
from dataplane.core.private_dir import own_directory
from dataplane.ledger.encoding import image
from dataplane.storage import arena
from dataplane.storage.arena_record import identity
from dataplane.storage.session_lock import DEFAULT_LOCK_DIRECTORY
from tests.ports import free_ports
from tests.stored.build import ARCHIVE, FORMATS, SETTINGS, build
from tests.stored.contents import (
    PARTITIONS,
    Held,
    check,
    check_claims,
    check_restored_claims,
    claimable,
    current_formats,
)

pytestmark = pytest.mark.integration

REBUILD = "run `python -m tests.stored.build` and commit what it writes together with the change"


def require_formats(stored: dict[str, int]) -> None:
    """Fails with the formats that are not those of `stored`."""
    now = current_formats()
    changed = [name for name in now if stored[name] != now[name]]
    words = "; ".join(f"{name}: {stored[name]} is stored, {now[name]} is written" for name in changed)
    assert not changed, f"the formats of tests/stored changed ({words}): {REBUILD}"


@contextmanager
def same_formats() -> Iterator[None]:
    """Around what reads the stored files, whose version numbers are today's."""
    require_formats(json.loads(FORMATS.read_text()))
    try:
        yield
    except BaseException as error:
        error.add_note(f"If what is stored has another meaning now, raise the FORMAT that it is of, and {REBUILD}.")
        raise


def unpack(archive: Path, folder: Path) -> Path:
    """The archive's files in `folder`, where a service finds them as if the stored one had run there, since the last
    boot of this machine."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (record,) = (folder / "state").glob("unit-*.json")
    (arena,) = (folder / "arenas").iterdir()
    arena = arena.rename(own_directory(folder / "arenas") / arena.name)
    here = {
        "arena": str(arena),
        "arena_dir": str(folder / "arenas"),
        "directory": identity(folder / "arenas"),
        "boot": boot_id(),
        "locks": identity(DEFAULT_LOCK_DIRECTORY),
    }
    record.write_text(json.dumps({**json.loads(record.read_bytes()), **here}))
    with contextlib.closing(sqlite3.connect(folder / "state" / LOG_NAME)) as log, log:
        log.execute("UPDATE facts SET value = ? WHERE name = 'boot'", (boot_id(),))
    return folder


@contextmanager
def service_of(folder: Path) -> Iterator[DataPlaneClient]:
    """A client of a service that goes on with the unpacked state."""
    places = {"state_dir": str(folder / "state"), "arena_dir": str(folder / "arenas"), "port": free_ports(2)}
    with serve({**SETTINGS, **places}) as server, connect(server.address) as client:
        yield client


def held_of(folder: Path) -> dict[str, list[Held]]:
    """What is on lease, by partition."""
    found = msgspec.json.decode((folder / "held.json").read_bytes(), type=list[Held])
    return {name: [held for held in found if held.partition == name] for name in PARTITIONS}


def check_all(folder: Path) -> None:
    held = held_of(folder)
    with service_of(folder) as client:
        waiting = {each.partition: each.waiting_claims for each in client.stats().partitions}
        assert waiting == {**dict.fromkeys(PARTITIONS, 0), PARTITIONS[0]: 1}
        for partition in PARTITIONS:
            check(client, partition)
            check_claims(client, partition, held[partition])
    with service_of(folder) as client:
        for partition in PARTITIONS:
            check(client, partition)
            assert claimable(client, partition, "critic") == []
    with serve({**SETTINGS}) as server, connect(server.address) as client:
        client.restore(folder / "checkpoint")
        for partition in PARTITIONS:
            check(client, partition)
            check_restored_claims(client, partition)


def test_what_an_earlier_commit_stored_is_read_bit_for_bit(tmp_path: Path) -> None:
    with same_formats():
        check_all(unpack(ARCHIVE, tmp_path))


@pytest.mark.slow
def test_the_script_makes_the_same_again(tmp_path: Path) -> None:
    build(tmp_path / "again.tar.xz", tmp_path / "formats.json")
    for name in ("stored", "again"):
        (tmp_path / name).mkdir()
    stored, again = unpack(ARCHIVE, tmp_path / "stored"), unpack(tmp_path / "again.tar.xz", tmp_path / "again")
    with same_formats():
        assert FORMATS.read_text() == (tmp_path / "formats.json").read_text()
        held, others = ([one for some in held_of(each).values() for one in some] for each in (stored, again))
        assert held == [
            msgspec.structs.replace(one, generations=was.generations) for one, was in zip(others, held, strict=True)
        ]
        assert [file.sha256 for file in manifest.read(stored / "checkpoint").files] == [
            file.sha256 for file in manifest.read(again / "checkpoint").files
        ]
        check_all(again)


@pytest.mark.parametrize("name", current_formats())
def test_a_format_that_changed_is_named(name: str) -> None:
    with pytest.raises(AssertionError, match=rf"{name}.+run `python -m tests\.stored\.build`"):
        require_formats({**current_formats(), name: 0})


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("module", [journal, image])
def test_a_state_of_another_format_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: int
) -> None:
    folder, number = unpack(ARCHIVE, tmp_path), module.FORMAT
    monkeypatch.setattr(module, "FORMAT", number + step)
    why = {
        journal: rf"its journal has format version {number}, but .* reads {number + step}\. Use the version of the",
        image: rf"image of the state has format {number}, expected {number + step}\. Use the version that wrote",
    }[module]
    with pytest.raises(StateDirError, match=why), service_of(folder):
        pass
    monkeypatch.undo()
    with service_of(folder) as client:
        check(client, PARTITIONS[-1])


@pytest.mark.parametrize("step", [-1, 1])
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    folder, number = unpack(ARCHIVE, tmp_path), manifest.FORMAT
    monkeypatch.setattr(manifest, "FORMAT", number + step)
    with serve(SETTINGS) as server, connect(server.address) as client:
        with pytest.raises(
            CheckpointError, match=rf"has format {number}, but this version .+ reads format {number + step}"
        ):
            client.restore(folder / "checkpoint")
        assert not client.stats().partitions


@pytest.mark.parametrize("step", [-1, 1])
def test_an_arena_of_another_format_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    folder, number = unpack(ARCHIVE, tmp_path), arena.FORMAT
    monkeypatch.setattr(arena, "FORMAT", number + step)
    formats = rf"has format {number}, but this version of rl-dataplane reads format {number + step}"
    why = rf"{formats}\. Use the version that wrote"
    with pytest.raises(StateDirError, match=why), service_of(folder):
        pass
    monkeypatch.undo()
    with service_of(folder) as client:
        check(client, PARTITIONS[-1])
