"""The journal of a ledger: a directory from which another epoch of the service goes on.

    lock             held by the one process whose state this is
    journal.sqlite   `log`: a record for every input, in order; `facts`: what is known of the state as a whole
    journal.end      the number of the last record, written after it
    image-N          the ledger as it was after record N; the log goes on from there

What was appended survives the death of the process at any moment: it is with the kernel before `append` returns. The
death of the machine may take all that was not fsynced: in an fsynced journal nothing from before the last
`sync`, in another one all of it, unless the fact `clean` tells that it was closed in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sqlite3
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from dataplane.controller.journal_end import LogEnd
from dataplane.core.failpoints import hit
from dataplane.core.file_locks import HeldFile, file_system, is_local
from dataplane.core.fsync import sync_path
from dataplane.core.private_dir import make_private, private, refuse_link_of_another
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import StateDirError

log = logging.getLogger(__name__)

FORMAT = 6
LOG_NAME = "journal.sqlite"
END_NAME = "journal.end"
DROPPED_AT_ONCE = 32
"""Records that an image covers go in so small steps that nobody waits for it."""
PAGE = 1024
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY, record BLOB NOT NULL, crc INTEGER NOT NULL);
"""
_INSERT = "INSERT INTO log VALUES (?, ?, ?)"
_DAMAGED = "It cannot be gone on from; begin anew with another directory, or restore a checkpoint"


class _Database(sqlite3.Connection):
    """A child of a fork must not even close it: SQLite would take its parent's locks for its own. So there it lives for
    ever."""

    __slots__ = ("__weakref__",)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _databases().add(self)


@functools.cache
def _databases() -> weakref.WeakSet[_Database]:
    opened: weakref.WeakSet[_Database] = weakref.WeakSet()

    def in_child() -> None:
        for database in opened:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))

    os.register_at_fork(after_in_child=in_child)
    return opened


class Log:
    """A journal to read, also while its owner writes to it."""

    def __init__(self, directory: Path) -> None:
        """StateDirError if there is none, or one of another version."""
        self.directory = directory
        with self._named("cannot be opened"):
            self._db = sqlite3.connect(
                directory / LOG_NAME, factory=_Database, isolation_level=None, check_same_thread=False, timeout=10.0
            )
        try:
            with self._named("cannot be opened"):
                self._prepare()
            if self.fact("format") is None:
                raise self.facts_missing()
            for what, ours in (("format", FORMAT), ("protocol", PROTOCOL_VERSION)):
                if (found := self.fact(what)) != ours:
                    why = f"its journal has {what} {found}, this version reads {ours}"
                    raise self.error(why, "Use the version it is of")
        except BaseException:
            self._db.close()
            raise

    def facts_missing(self) -> StateDirError:
        return self.error(f"{LOG_NAME} is damaged: its table of facts is incomplete", _DAMAGED)

    def _prepare(self) -> None:
        """Before the journal is looked at."""

    def fact(self, name: str) -> int | str | None:
        """What was set under `name` last; None if nothing was."""
        with self._named("cannot be read"):
            row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def number(self, name: str) -> int | None:
        """The same of what is a number. StateDirError if it is none."""
        found = self.fact(name)
        if found is None or type(found) is int:
            return found
        raise self.error(f"{LOG_NAME} is damaged: its {name} is {found!r}", _DAMAGED)

    def text(self, name: str) -> str | None:
        """The same of what is a text."""
        found = self.fact(name)
        if found is None or type(found) is str:
            return found
        raise self.error(f"{LOG_NAME} is damaged: its {name} is no text", _DAMAGED)

    def image(self) -> tuple[int, bytes] | None:
        """The last image and the number of the last record in it; None if there is none yet."""
        number = self.number("image")
        if number is None:
            return None
        path = self.image_path(number)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise self.error(f"{path.name} cannot be read ({error.strerror})", _DAMAGED) from error
        if len(content) < 4 or zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
            raise self.error(f"{path.name} is damaged (its checksum differs)", _DAMAGED)
        return number, content[4:]

    @property
    def fsynced(self) -> bool:
        """Whether what is in it may be fsynced, and is to survive the death of the machine."""
        return bool(self.fact("fsynced"))

    @property
    def covered(self) -> int:
        """The number of the last record in the last image; 0 if there is none."""
        return self.number("image") or 0

    def image_path(self, number: int) -> Path:
        return self.directory / f"image-{number}"

    @property
    def nbytes(self) -> int:
        """What log and images take of the disk."""
        found = 0
        for path in [*self.directory.glob(f"{LOG_NAME}*"), *self.directory.glob("image-*")]:
            with contextlib.suppress(FileNotFoundError):  # an image that another one replaced
                found += path.stat().st_size
        return found

    def records(self, after: int, upto: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(number, record) of everything appended after record `after`, and up to `upto`."""
        expected = after + 1
        while upto is None or expected <= upto:
            with self._named("cannot be read"):
                rows = self._db.execute(
                    "SELECT number, record, crc FROM log WHERE number >= ? ORDER BY number LIMIT ?", (expected, PAGE)
                ).fetchall()
            for number, record, crc in rows[: None if upto is None else upto - expected + 1]:
                if number != expected or type(record) is not bytes or zlib.crc32(record) != crc:
                    raise self.error(f"record {expected} of {LOG_NAME} is damaged or missing", _DAMAGED)
                yield number, record
                expected += 1
            if len(rows) < PAGE:
                return

    def write_image(self, number: int, image: bytes) -> None:
        """Put an image beside the journal, whole or not at all; on the disk when this returns if the journal is forced
        there."""
        path = self.image_path(number)
        aside = path.with_name(f"{path.name}.aside")
        with self._named(f"{path.name} cannot be written"):
            with open(aside, "wb", opener=private) as file:
                file.write(zlib.crc32(image).to_bytes(4, "little"))
                file.write(image)
                if self.fsynced:
                    file.flush()
                    os.fsync(file.fileno())
            hit("image.before_rename")
            os.replace(aside, path)
            if self.fsynced:
                sync_path(self.directory)

    def error(self, why: str, hint: str = "") -> StateDirError:
        return StateDirError(directory=str(self.directory), why=why, hint=hint)

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except StateDirError:
            raise
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise self.error(f"{'it' if isinstance(error, OSError) else LOG_NAME} {what}: {error}") from error

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Journal(Log):
    """The journal of this process's service. One thread at a time."""

    def __init__(self, directory: Path, lock: HeldFile) -> None:
        """Use `open`."""
        self._lock = lock
        self._last = 0
        self._droppable = 0
        self._fsynced = False
        self._log_fd = -1
        super().__init__(directory)
        try:
            self._end = LogEnd(directory / END_NAME)
            self._tidy()
        except BaseException:
            self._db.close()
            raise

    @classmethod
    def open(cls, directory: str | Path) -> Journal:
        """The journal in `directory`, which is made (mode 0700) if it is not there.

        StateDirError if another process uses it, if it is on a file system of the network (where locks and what a
        dying process wrote cannot be relied on), or if it cannot be read and written.
        """
        folder = Path(directory).absolute()
        lock = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_link_of_another(folder)
            if not is_local(folder):
                raise StateDirError(
                    directory=str(folder),
                    why=f"it is on a file system of type {file_system(folder) or 'unknown'}, which may be shared",
                    hint="Name a directory on a local disk",
                )
            lock = HeldFile.take(folder / "lock")
            if lock is None:
                raise StateDirError(directory=str(folder), why="another process uses it", hint="Stop that one first")
            return cls(folder, lock)
        except OSError as error:
            if lock is not None:
                lock.close()
            if isinstance(error, StateDirError):
                raise
            raise StateDirError(directory=str(folder), why=f"it cannot be used: {error.strerror or error}") from error

    def _prepare(self) -> None:
        make_private(self.directory / LOG_NAME)  # SQLite's other files are made as this one is
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(_SCHEMA)
        self._db.execute("PRAGMA synchronous = OFF")
        if self._is_new():
            self.set_facts(format=FORMAT, protocol=PROTOCOL_VERSION)

    def _is_new(self) -> bool:
        (facts,) = self._db.execute("SELECT count(*) FROM facts").fetchone()
        return not facts and not self._has_records() and not any(self.directory.glob("image-*"))

    def _has_records(self) -> bool:
        return self._db.execute("SELECT 1 FROM log LIMIT 1").fetchone() is not None

    def force(self) -> None:
        """From now on `sync` forces what was appended to the disk. What is there already is forced now."""
        with self._named("cannot be written"):
            self._fsynced = True
            self._checkpoint()
            self._end.fsynced(self._last)
            # SQLite orders its own writes so that the log is whole after the machine's end; `sync` does the rest.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._log_fd = os.open(self.directory / f"{LOG_NAME}-wal", os.O_RDONLY | os.O_CLOEXEC)
        self.set_facts(fsynced=1)

    def sync(self) -> None:
        """All that was appended is on the disk when this returns. Blocks for as long as the disk takes, a millisecond
        on a fast one. StateDirError if it is not there, and maybe never will be: do not go on with this journal."""
        with self._named("cannot be fsynced"):
            os.fdatasync(self._log_fd)
            self._end.fsynced(self._last)

    def _tidy(self) -> None:
        """Find where the log ends; remove what an interrupted epoch left aside."""
        with self._named("cannot be read"):
            (last,) = self._db.execute("SELECT max(number) FROM log").fetchone()
        self._droppable = self.covered
        self._last = max(last or 0, self._droppable)
        if self._end.damaged:
            raise self.error(
                f"{END_NAME} is damaged: it does not tell where the log ends, which is record {self._last}",
                f"Put back a copy of the directory; to go on with the log as it is, delete {END_NAME}",
            )
        if self._last < self._end.least:
            damaged = f"{LOG_NAME}-wal is damaged" if self._last else f"{LOG_NAME} is missing, empty or damaged"
            raise self.error(
                f"its log ends with record {self._last}, but {self._end.least} were appended: {damaged}, and the last "
                f"{self._end.least - self._last} are lost",
                f"Put back a copy of the directory or restore a checkpoint; to go on without them, delete {END_NAME}",
            )
        image = self.image_path(self._droppable)
        if image.exists():
            for path in set(self.directory.glob("image-*")) - {image}:
                path.unlink(missing_ok=True)

    @property
    def last(self) -> int:
        """The number of the last record; 0 before the first."""
        return self._last

    def append(self, *records: bytes) -> None:
        """The next records, all or none. StateDirError, and nothing is appended, where they cannot be written (a full
        disk)."""
        rows = [(number, record, zlib.crc32(record)) for number, record in enumerate(records, self._last + 1)]
        with self._named("cannot be written"):
            hit("journal.before_append")
            if self._droppable:
                self._drop_some()
            if len(rows) == 1:
                self._db.execute(_INSERT, rows[0])
            else:
                with self._transaction():
                    self._db.executemany(_INSERT, rows)
        self._last += len(rows)
        hit("journal.appended")
        self._note_end()

    def _note_end(self) -> None:
        """Raises nothing: the record is there, and without the note only less would be noticed."""
        try:
            self._end.appended(self._last)
        except OSError as error:
            log.warning("%s: %s cannot be written: %s", self.directory, END_NAME, error)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk may have ended it
                self._db.execute("ROLLBACK")
            raise

    def _drop_some(self) -> None:
        (first,) = self._db.execute("SELECT min(number) FROM log").fetchone()
        if first is None or first > self._droppable:
            self._droppable = 0
            return
        upto = min(first + DROPPED_AT_ONCE - 1, self._droppable)
        self._db.execute("DELETE FROM log WHERE number <= ?", (upto,))

    def begin_from(self, number: int) -> None:
        """From now on the image of record `number`, which is there, is where the next epoch begins."""
        hit("image.before_begin")
        before = self.number("image")
        self._set_facts(image=number)
        if self._fsynced:
            self.sync()
        self._droppable = number
        hit("image.begun")
        if before is not None and before != number:
            with self._named("cannot be written"):
                self.image_path(before).unlink(missing_ok=True)

    def set_facts(self, **facts: int | str) -> None:
        """Set these, all or none, and on disk when this returns."""
        with self._named("cannot be written"):
            self._db.execute("PRAGMA synchronous = FULL")
            try:
                self._set_facts(**facts)
            finally:
                self._db.execute(f"PRAGMA synchronous = {'NORMAL' if self._fsynced else 'OFF'}")

    def _set_facts(self, **facts: int | str) -> None:
        with self._named("cannot be written"), self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    def set_aside(self, folder: Path) -> Journal:
        """A new journal in this one's place, which is closed and moved to `folder`. The lock stays held."""
        self._let_go()
        with self._named("cannot be set aside"):
            folder.mkdir(mode=0o700)
            for path in list(self.directory.iterdir()):
                if path.name.startswith((LOG_NAME, END_NAME, "image-")):
                    path.rename(folder / path.name)
        return Journal(self.directory, self._lock)

    def close(self) -> None:
        """Force everything to the disk and let go of it. Idempotent; a forked child only lets go."""
        if self._lock.fd < 0:
            return
        try:
            with self._named("cannot be closed"):
                self._checkpoint()
                self._end.fsynced(self._last)
            self.set_facts(clean=1)
        except StateDirError as error:
            log.warning("%s; the next epoch takes it for that of a process that was killed", error)
        self._let_go()
        self._lock.close()

    def _checkpoint(self) -> None:
        """Write everything to the disk, again if need be."""
        sync_path(self.image_path(self.covered))
        sync_path(self.directory)
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _let_go(self) -> None:
        super().close()
        self._end.close()
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1
