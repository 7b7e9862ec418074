"""The journal of a ledger: a directory from which the next epoch of the service restores its state.

    lock             held by the process that owns the state
    journal.sqlite   `log`: one record per input, in order; `facts`: properties of the state as a whole
    journal.end      the number of the last record, written after the record
    image-N          the ledger as of record N; the log continues from there

Appended records survive a process crash at any moment, because `append` returns after handing them to the kernel. A
machine crash may lose everything, unless the fact `clean` records that the journal was closed properly.

The end of the log is stored outside the log (`LogEnd`), because SQLite silently treats damage in its write-ahead log as
its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sqlite3
import struct
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from dataplane.core.addresses import boot_id
from dataplane.core.failpoints import failpoint
from dataplane.core.file_locks import HeldFile, file_system, is_local
from dataplane.core.private_dir import make_private, private, refuse_link_of_another, sync_path
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import StateDirError

log = logging.getLogger(__name__)

FORMAT = 11
LOG_NAME = "journal.sqlite"
END_NAME = "journal.end"
DROPPED_AT_ONCE = 32
"""Number of records covered by an image that one `append` deletes: small steps avoid a noticeable delay."""
PAGE = 1024  # records that one query reads
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY, record BLOB NOT NULL, crc INTEGER NOT NULL);
"""
_INSERT = "INSERT INTO log VALUES (?, ?, ?)"
_DAMAGED = "The state cannot be restored; start with another directory, and restore a checkpoint if you have one"


class _Database(sqlite3.Connection):
    """A connection that a forked child never closes, because SQLite in the child would release the parent's locks. The
    child therefore leaks a reference to it."""

    __slots__ = ("__weakref__",)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _databases().add(self)


@functools.cache
def _databases() -> weakref.WeakSet[_Database]:
    """Return the set of open connections. The first call registers the hook by which a forked child leaks a reference
    to each of them (see `_Database`)."""
    opened: weakref.WeakSet[_Database] = weakref.WeakSet()

    def keep_in_child() -> None:
        for database in opened:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))

    os.register_at_fork(after_in_child=keep_in_child)
    return opened


class Log:
    """Read access to a journal, also while its owner writes to it. An image is a file of its own, which a process other
    than the owner may write, too."""

    def __init__(self, directory: Path) -> None:
        """Open the log. Raises StateDirError if the directory has none, or one of another version."""
        self.directory = directory
        with self._state_error("cannot be opened"):
            self._db = sqlite3.connect(
                directory / LOG_NAME, factory=_Database, isolation_level=None, check_same_thread=False, timeout=10.0
            )
        try:
            with self._state_error("cannot be opened"):
                self._prepare()
            if self.fact("format") is None:
                raise self.facts_missing()
            for name, ours in (("format", FORMAT), ("protocol", PROTOCOL_VERSION)):
                stored = self.fact(name)
                if stored != ours:
                    why = f"its journal has {name} version {stored}, but this version of the service reads {ours}"
                    raise self.error(why, "Use the version of the service that wrote it")
        except BaseException:
            self._db.close()
            raise

    def facts_missing(self) -> StateDirError:
        """Return the error of a journal that lacks facts."""
        return self.error(f"{LOG_NAME} is damaged: its table of facts is incomplete", _DAMAGED)

    def _prepare(self) -> None:
        """Hook for subclasses. Runs before the journal is read."""

    def fact(self, name: str) -> int | str | None:
        """Return the last value stored under `name`, or None."""
        with self._state_error("cannot be read"):
            row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def number(self, name: str) -> int | None:
        """Return the fact `name`, a number, or None. Raises StateDirError for another type."""
        value = self.fact(name)
        if value is None or type(value) is int:
            return value
        raise self.error(f"{LOG_NAME} is damaged: its {name} is {value!r}", _DAMAGED)

    def text(self, name: str) -> str | None:
        """Return the fact `name`, a text, or None. Raises StateDirError for another type."""
        value = self.fact(name)
        if value is None or type(value) is str:
            return value
        raise self.error(f"{LOG_NAME} is damaged: its {name} is not a text", _DAMAGED)

    def image(self) -> tuple[int, bytes] | None:
        """Return (number of the last record in the last image, image), or None if there is no image yet."""
        number = self.number("image")
        if number is None:
            return None
        path = self.image_path(number)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise self.error(f"{path.name} cannot be read ({error.strerror})", _DAMAGED) from error
        # Four bytes of checksum, then the image.
        if len(content) < 4 or zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
            raise self.error(f"{path.name} is damaged (its checksum differs)", _DAMAGED)
        return number, content[4:]

    @property
    def covered(self) -> int:
        """Number of the last record in the last image; 0 if there is no image."""
        return self.number("image") or 0

    def image_path(self, number: int) -> Path:
        return self.directory / f"image-{number}"

    @property
    def nbytes(self) -> int:
        """Size of log and images on disk in bytes."""
        nbytes = 0
        for path in [*self.directory.glob(f"{LOG_NAME}*"), *self.directory.glob("image-*")]:
            with contextlib.suppress(FileNotFoundError):  # a newer image may have replaced it
                nbytes += path.stat().st_size
        return nbytes

    def records(self, after: int, upto: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (number, record) for the records after `after`, up to and including `upto` (None: to the last). Ends
        without an error if the log ends before `upto`."""
        expected = after + 1
        while upto is None or expected <= upto:
            with self._state_error("cannot be read"):
                rows = self._db.execute(
                    "SELECT number, record, crc FROM log WHERE number >= ? ORDER BY number LIMIT ?", (expected, PAGE)
                ).fetchall()
            count = len(rows) if upto is None else upto - expected + 1  # of the rows, those up to `upto`
            for number, record, crc in rows[:count]:
                if number != expected or type(record) is not bytes or zlib.crc32(record) != crc:
                    raise self.error(f"record {expected} of {LOG_NAME} is damaged or missing", _DAMAGED)
                yield number, record
                expected += 1
            if len(rows) < PAGE:  # the log ends here
                return

    def write_image(self, number: int, image: bytes) -> None:
        """Write the ledger as of record `number` next to the journal, atomically; see `image` for the format."""
        path = self.image_path(number)
        aside = path.with_name(f"{path.name}.aside")
        with self._state_error("cannot be written", path.name):
            with open(aside, "wb", opener=private) as file:
                file.write(zlib.crc32(image).to_bytes(4, "little"))  # the checksum that `image` verifies
                file.write(image)
            failpoint("image.before_rename")
            os.replace(aside, path)

    def error(self, why: str, hint: str = "") -> StateDirError:
        return StateDirError(directory=str(self.directory), why=why, hint=hint)

    @contextlib.contextmanager
    def _state_error(self, what: str, file: str = "") -> Iterator[None]:
        """Turn errors of the body into StateDirError, "SUBJECT WHAT: ERROR". The subject is `file` if that is given,
        otherwise the log for errors of SQLite (also text that is not UTF-8), and "it", the directory, for those of the
        system."""
        try:
            yield
        except StateDirError:
            raise
        except (sqlite3.Error, OSError, UnicodeError) as error:
            subject = file or ("it" if isinstance(error, OSError) else LOG_NAME)
            raise self.error(f"{subject} {what}: {error}") from error

    def close(self) -> None:
        """Close the database. Idempotent."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Journal(Log):
    """Write access to the journal, for the service process. Not thread-safe.

    `_last`: number of the last record. `_droppable`: records up to this number are covered by the image, and `append`
    deletes them; 0: none are left. `_end`: the file `journal.end`.
    """

    def __init__(self, directory: Path, lock: HeldFile) -> None:
        """Internal constructor; use `open`."""
        # Set first, because the constructor of `Log` calls `_prepare`, which uses them.
        self._lock = lock
        self._last = 0
        self._droppable = 0
        super().__init__(directory)
        try:
            self._end = LogEnd(directory / END_NAME)
            self._check_end()
        except BaseException:
            self._db.close()
            raise

    @classmethod
    def open(cls, directory: str | Path) -> Journal:
        """Open the journal in `directory`, which is created (mode 0700) if it does not exist.

        Raises StateDirError if another process uses it, if it is on a network file system (where locks and the last
        writes of a crashed process are unreliable), or if it is damaged or cannot be read and written.
        """
        folder = Path(directory).absolute()
        lock = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_link_of_another(folder)
            if not is_local(folder):
                raise StateDirError(
                    directory=str(folder),
                    why=f"it is on a file system of type {file_system(folder) or 'unknown'}, which several machines "
                    "may share",
                    hint="Use a directory on a local disk",
                )
            lock = HeldFile.take(folder / "lock")
            if lock is None:
                raise StateDirError(
                    directory=str(folder), why="another process uses it", hint="Stop that process first"
                )
            return cls(folder, lock)
        except OSError as error:
            if lock is not None:
                lock.close()
            if isinstance(error, StateDirError):  # which is an OSError, too
                raise
            raise StateDirError(directory=str(folder), why=f"it cannot be used: {error.strerror or error}") from error

    def _prepare(self) -> None:
        """Create the tables if they do not exist, and give a new journal its facts."""
        make_private(self.directory / LOG_NAME)  # SQLite creates its other files with the same mode
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(_SCHEMA)
        self._db.execute("PRAGMA synchronous = OFF")
        if self._is_new():
            self.set_facts(format=FORMAT, protocol=PROTOCOL_VERSION)

    def _is_new(self) -> bool:
        """Whether the directory has no facts, no records and no image."""
        (facts,) = self._db.execute("SELECT count(*) FROM facts").fetchone()
        return not facts and not self._has_records() and not any(self.directory.glob("image-*"))

    def _has_records(self) -> bool:
        return self._db.execute("SELECT 1 FROM log LIMIT 1").fetchone() is not None

    def _check_end(self) -> None:
        """Find the end of the log and check it against `journal.end`. Delete images of interrupted epochs."""
        with self._state_error("cannot be read"):
            (last,) = self._db.execute("SELECT max(number) FROM log").fetchone()
        self._droppable = self.covered
        self._last = max(last or 0, self._droppable)  # the records that the image covers may all be deleted
        if self._end.damaged:
            raise self.error(
                f"{END_NAME} is damaged, so the end of the log, record {self._last}, cannot be verified",
                f"Restore a copy of the directory; to continue with the log as it is, delete {END_NAME}",
            )
        if self._last < self._end.least:
            damaged = f"{LOG_NAME}-wal is damaged" if self._last else f"{LOG_NAME} is missing, empty or damaged"
            raise self.error(
                f"its log ends with record {self._last}, but {self._end.least} were appended: {damaged}, and the last "
                f"{self._end.least - self._last} records are lost",
                f"Restore a copy of the directory or a checkpoint; to continue without them, delete {END_NAME}",
            )
        # Images other than the last one are left over from an interrupted epoch. If it is missing, they are kept.
        image = self.image_path(self._droppable)
        if image.exists():
            for path in set(self.directory.glob("image-*")) - {image}:
                path.unlink(missing_ok=True)

    @property
    def last(self) -> int:
        """Number of the last record; 0 before the first."""
        return self._last

    def append(self, *records: bytes) -> None:
        """Append `records` atomically. Raises StateDirError and appends nothing if they cannot be written, e.g. on a
        full disk."""
        rows = [(number, record, zlib.crc32(record)) for number, record in enumerate(records, self._last + 1)]
        with self._state_error("cannot be written"):
            failpoint("journal.before_append")
            if self._droppable:  # the log has records that the image covers
                self._drop_some()
            if len(rows) == 1:  # a statement is atomic without a transaction
                self._db.execute(_INSERT, rows[0])
            else:
                with self._transaction():
                    self._db.executemany(_INSERT, rows)
        self._last += len(rows)
        failpoint("journal.appended")
        self._note_end()

    def _note_end(self) -> None:
        """Write the end of the log to `journal.end`. Logs errors instead of raising: the records are already appended,
        and a stale note only weakens damage detection."""
        try:
            self._end.appended(self._last)
        except OSError as error:
            log.warning("State directory %s: %s cannot be written: %s", self.directory, END_NAME, error)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit the statements of the body together; after an exception, none of them."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite rolls back by itself on a full disk
                self._db.execute("ROLLBACK")
            raise

    def _drop_some(self) -> None:
        """Delete up to `DROPPED_AT_ONCE` of the records that the image covers, those up to `_droppable`."""
        (first,) = self._db.execute("SELECT min(number) FROM log").fetchone()
        if first is None or first > self._droppable:
            self._droppable = 0  # all of them are deleted
            return
        upto = min(first + DROPPED_AT_ONCE - 1, self._droppable)
        self._db.execute("DELETE FROM log WHERE number <= ?", (upto,))

    def begin_from(self, number: int) -> None:
        """Let the next epoch start from the image of record `number`, which must exist. Delete the previous image; the
        next calls of `append` delete the records that the image covers."""
        failpoint("image.before_begin")
        previous = self.number("image")
        self._set_facts(image=number)
        self._droppable = number
        failpoint("image.begun")
        if previous is not None and previous != number:
            with self._state_error("cannot be written"):
                self.image_path(previous).unlink(missing_ok=True)

    def set_facts(self, **facts: int | str) -> None:
        """Store `facts` atomically. They are on disk on return."""
        with self._state_error("cannot be written"):
            self._db.execute("PRAGMA synchronous = FULL")  # the commit fsyncs
            try:
                self._set_facts(**facts)
            finally:
                self._db.execute("PRAGMA synchronous = OFF")

    def _set_facts(self, **facts: int | str) -> None:
        """Store `facts` atomically. The present `PRAGMA synchronous` determines when they are on disk."""
        with self._state_error("cannot be written"), self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    def set_aside(self, folder: Path) -> Journal:
        """Close this journal, move it to `folder` and return a new one in its place. The lock stays held."""
        self._release()
        with self._state_error("cannot be set aside"):
            folder.mkdir(mode=0o700)
            for path in list(self.directory.iterdir()):  # a copy, because the loop moves the files away
                if path.name.startswith((LOG_NAME, END_NAME, "image-")):
                    path.rename(folder / path.name)
        return Journal(self.directory, self._lock)

    def close(self) -> None:
        """Fsync everything and release the directory. Idempotent. No-op in a forked child, which lost the lock at the
        fork (see `HeldFile`)."""
        if self._lock.fd < 0:
            return
        try:
            with self._state_error("cannot be closed"):
                self._checkpoint()
                self._end.fsynced(self._last)
            self.set_facts(clean=1)  # only once everything else is on disk
        except StateDirError as error:
            log.warning("%s; the next start treats this as a crash of the service", error)
        self._release()
        self._lock.close()

    def _checkpoint(self) -> None:
        """Fsync the image and the directory, and write the write-ahead log to the database. Leaves `PRAGMA synchronous`
        at FULL."""
        sync_path(self.image_path(self.covered))
        sync_path(self.directory)
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _release(self) -> None:
        """Close all files except the lock."""
        super().close()
        self._end.close()


_CONTENT = struct.Struct("<QQ36s")
MOST = 2**63 - 1
"""Highest record number that SQLite supports."""


class LogEnd:
    """File with the numbers of the last appended and the last fsynced record, each written after the record itself.

    After a machine crash only the second number is reliable: without an fsync, this file may have reached the disk
    before the log. Raises OSError if the file cannot be opened or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._boot = boot_id().encode().ljust(36, b"\0")[:36]
        content = os.pread(self._fd, _CONTENT.size + 1, 0)  # one byte more, to notice a longer file
        appended = 0
        self._fsynced = 0
        boot = b""
        if len(content) == _CONTENT.size:  # a file of another size counts as empty
            appended, self._fsynced, boot = _CONTENT.unpack(content)
        self.damaged = max(appended, self._fsynced) > MOST or self._fsynced > appended
        self.least = appended if boot == self._boot else self._fsynced  # another boot: the machine may have crashed
        """Number of the last record that the log must contain, unless the file is `damaged`."""

    def appended(self, number: int) -> None:
        """Note that the log contains all records up to `number`."""
        os.pwrite(self._fd, _CONTENT.pack(number, self._fsynced, self._boot), 0)

    def fsynced(self, number: int) -> None:
        """Note that the disk contains all records up to `number`."""
        self._fsynced = number
        self.appended(number)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
