"""The end of a journal's log, stored outside the log: SQLite silently treats damage in its write-ahead log as its
end."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from dataplane.core.addresses import boot_id

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
        appended, self._fsynced, boot = 0, 0, b""
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
