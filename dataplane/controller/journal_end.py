"""Where the log of a journal ends, kept outside the log: SQLite takes damage in its write-ahead log for the end of what
was written, and says nothing."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from dataplane.core.addresses import boot_id

_CONTENT = struct.Struct("<QQ36s")
MOST = 2**63 - 1
"""SQLite numbers no record higher."""


class LogEnd:
    """The numbers of the last record appended and of the last fsynced, in a file, each written after the log
    has the record. After the end of the machine only the second counts: of what nobody forced there, the disk may have
    taken this file and not the log. OSError if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._boot = boot_id().encode().ljust(36, b"\0")[:36]
        content = os.pread(self._fd, _CONTENT.size + 1, 0)
        appended, self._fsynced, boot = _CONTENT.unpack(content) if len(content) == _CONTENT.size else (0, 0, b"")
        self.damaged = max(appended, self._fsynced) > MOST or self._fsynced > appended
        self.least = appended if boot == self._boot else self._fsynced
        """The record that the log must reach, unless the file is `damaged`."""

    def appended(self, number: int) -> None:
        """The log has all up to this record."""
        os.pwrite(self._fd, _CONTENT.pack(number, self._fsynced, self._boot), 0)

    def fsynced(self, number: int) -> None:
        """So has the disk."""
        self._fsynced = number
        self.appended(number)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
