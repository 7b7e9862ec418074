"""What outlives a process: records and images of the ledger, its journal, and what storage units leave behind."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from pathlib import Path
from unittest import mock

from dataplane.controller.durable_ledger import DurableLedger, LedgerSettings
from dataplane.controller.journal import LOG_NAME
from dataplane.core.addresses import boot_id
from dataplane.errors import InvalidRequestError, StateDirError
from dataplane.ledger import Ledger
from dataplane.ledger.encoding import messages
from dataplane.ledger.encoding.image import ImageError
from dataplane.storage import arena_record as kept_module
from dataplane.storage.arena import Arena, sweep_recorded
from dataplane.storage.arena_record import UnitRecord
from dataplane.storage.session_lock import DEFAULT_LOCK_DIRECTORY
from tests.fuzz.control_targets import day
from tests.fuzz.target import Feed, FindingError, Target, piece
from tests.ledger.driver import Driver
from tests.ledger.test_replay import a_busy_day
from tests.protocol.values import plain

SETTINGS = LedgerSettings(reserve_fraction=0.15, heartbeat_s=2.0, session_timeout_s=20.0)


# --- the ledger's own bytes ---------------------------------------------------------------------------------------


def ledger_records(data: bytes) -> None:
    """A record of the journal."""
    item = messages.decode(data)
    if repr(plain(messages.decode(messages.encode(item)))) != repr(plain(item)):
        raise FindingError(f"{item!r} changes when it is written again")


def record_seeds() -> list[bytes]:
    by_kind = {repr(item)[:40]: messages.encode(item) for item in day().log}
    return list(by_kind.values())[:60]


def ledger_images(data: bytes) -> None:
    """The image of a ledger. (What makes an image but no ledger is found by its checksum, or fails as a defect.)"""
    Ledger.restored(data)


def image_seeds() -> list[bytes]:
    driver = Driver(capacity=1 << 14)
    a_busy_day(driver, 9, 12)
    return [driver.ledger.image(), Ledger(1).image()]


# --- the journal --------------------------------------------------------------------------------------------------


@functools.cache
def _state() -> dict[str, bytes]:
    """The files of a state directory."""
    with tempfile.TemporaryDirectory() as folder:
        durable = DurableLedger.open(folder, SETTINGS)
        for item in day().log[:30]:
            durable.apply(item)
        durable.close()
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "lock"}


def journals(data: bytes) -> None:
    """A state directory, one of whose files is damaged."""
    feed, files = Feed(data), _state()
    names = sorted(files)
    name = names[feed.number(len(names))]
    with tempfile.TemporaryDirectory() as folder:
        for other, content in files.items():
            (Path(folder) / other).write_bytes(content)
        (Path(folder) / name).write_bytes(_patched(feed, files[name]))
        with mock.patch("dataplane.controller.durable_ledger._may_be_incomplete", return_value=bool(feed.number(2))):
            durable = DurableLedger.open(folder, SETTINGS)
        durable.close()


def _patched(feed: Feed, content: bytes) -> bytes:
    """As often as the input says: so many bytes from there on are others."""
    changed = bytearray(content)
    for _ in range(feed.number(6)):
        at, patch = int.from_bytes(feed.take(3), "little") % (len(changed) + 1), feed.piece()
        changed[at : at + len(patch)] = patch
    if feed.number(8) == 1:
        del changed[int.from_bytes(feed.take(3), "little") % (len(changed) + 1) :]
    return bytes(changed)


def journal_seeds() -> list[bytes]:
    names = sorted(_state())
    log = names.index(LOG_NAME)
    facts = _state()[LOG_NAME].find(b"format")
    patches = [(0, b"SQLite"), (100, b"\xff" * 8), (4096, b"\0" * 16), (facts, b"\xff" * 6), (facts + 6, b"\7")]
    one = [bytes([log, 1]) + at.to_bytes(3, "little") + piece(patch) for at, patch in patches]
    return [bytes([number]) for number in range(len(names))] + one


# --- storage units ------------------------------------------------------------------------------------------------


@functools.cache
def _arena() -> tuple[str, bytes]:
    """The name and the bytes of an arena that a unit kept."""
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(folder, 1 << 12, epoch=3, keeper=Path(folder) / "x")
        arena.grow(1 << 12)
        arena.close(unlink=False)
        return arena.path.name, arena.path.read_bytes()


def kept_units(data: bytes) -> None:
    """The record of a storage unit, and the arena that it names."""
    feed, (name, content) = Feed(data), _arena()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(kept_module, "HELD_S", 0.0):
        record = UnitRecord(folder, "unit", folder, DEFAULT_LOCK_DIRECTORY)
        arena = Path(folder) / name
        arena.write_bytes(_patched(feed, content[: 1 << 12]) + content[1 << 12 :])
        written = feed.rest()
        for word, told in _told(folder, arena).items():
            written = written.replace(word, os.fsencode(told))
        record.path.write_bytes(written)
        with contextlib.suppress(StateDirError):  # it names an arena in another directory
            begun = record.open(lambda keeper: Arena.create(folder, 1 << 12, epoch=1, keeper=keeper), epoch=1 << 40)
            with begun.arena as opened:
                opened.grow(1 << 30)
        sweep_recorded(folder)


def _told(folder: str, arena: Path) -> dict[bytes, str | Path]:
    """What the words in the seeds stand for."""
    directory, locks = kept_module.identity(folder), kept_module.identity(DEFAULT_LOCK_DIRECTORY)
    return {b"ARENA": arena, b"BOOT": boot_id(), b"FOLDER": folder, b"DIRECTORY": directory, b"LOCKS": locks}


def kept_seeds() -> list[bytes]:
    record = b'{"arena":"ARENA","unit":3,"boot":"BOOT","arena_dir":"FOLDER","directory":"DIRECTORY","locks":"LOCKS"}'
    header = bytes([1]) + (8).to_bytes(3, "little") + piece(b"\x01\0\0\0")
    keeper = bytes([1]) + (1024).to_bytes(3, "little") + piece(b"\xff\xff/x")
    return [bytes(2) + record, header + b"\0" + record, keeper + b"\0" + record]


TARGETS = [
    Target(name="records", run=ledger_records, seeds=record_seeds, allowed=(InvalidRequestError,), examples=600),
    Target(name="images", run=ledger_images, seeds=image_seeds, allowed=(ImageError,), examples=400),
    Target(name="journals", run=journals, seeds=journal_seeds, examples=80),
    Target(name="kept-units", run=kept_units, seeds=kept_seeds),
]
