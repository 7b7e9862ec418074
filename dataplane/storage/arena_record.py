"""The arena record of a storage unit in a state directory, by which its next epoch (run) adopts the same memory.

`unit-NAME.json` names the arena and the unit's id at the controller. The arena itself stays in place, in shared
memory or in a file, as long as this record exists.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote as quote_for_shell
from urllib.parse import quote

import msgspec

from dataplane.core.addresses import boot_id
from dataplane.core.failpoints import failpoint
from dataplane.core.private_dir import leave, own_path, private, refuse_link_of_another, sync_path
from dataplane.errors import StateDirError
from dataplane.storage.arena import Arena, ArenaFormatError, sweep_recorded

log = logging.getLogger(__name__)

HELD_S = 20.0
"""Maximum time that a stopping storage unit may hold its arena."""
PAUSE_S = 0.05
"""Time between attempts to adopt an arena that is held."""


class ArenaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """arena: the arena's path; cookie: its identity. unit: the unit's id. boot: the boot id of the machine.
    arena_dir: the configured directory; directory: the identity of that directory. service: the name of the service
    that the arena belongs to; controller: that service's address. locks: the identity of the directory of the session
    locks."""

    arena: str
    unit: int
    boot: str
    arena_dir: str
    directory: str
    locks: str
    service: str = ""
    controller: str = ""
    cookie: str = ""


_decode_record = msgspec.json.Decoder(ArenaRecord).decode


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """An arena that was adopted or created. unit: the unit's previous id; 0: none. lost: the
    cookie of a recorded arena that could not be adopted, so that `arena` is new; "": none is known.
    anew: a record existed, readable or not, but `arena` is new."""

    arena: Arena
    unit: int = 0
    lost: str = ""
    anew: bool = False


class UnitRecord:
    """The record of the unit `name` in `state_dir`. lock_directory: the directory of session locks,
    besides `arena_dir`. controller: the address of the unit's service. `_record`: the record as
    read by `open` or written last; None: the arena is new. `_service`: the name of the service for
    the next `write`. `_directory`, `_locks`: the identities of the two directories."""

    def __init__(
        self,
        state_dir: str | Path,
        name: str,
        arena_dir: str | Path,
        lock_directory: str | Path,
        *,
        controller: str = "",
    ) -> None:
        self.path = _record_path(state_dir, name)
        self._name = name
        self._arena_dir = str(Path(arena_dir).absolute())
        self._directory = identity(arena_dir)
        self._locks = identity(lock_directory)
        self._boot = boot_id()
        self._controller = controller
        self._service = ""
        self._record: ArenaRecord | None = None

    def open(self, create: Callable[[Path], Arena], *, epoch: int) -> Adopted:
        """Adopt the arena of the previous epoch. If that is impossible, log the reason, call `create` with the path of
        this record, and remove earlier arenas of this record that no process holds. Blocks for up to `HELD_S` until the
        previous epoch ends. Raises StateDirError if it does not end, or if its arena is, or may be, in another
        directory than `arena_dir`; PermissionError if the state directory is a symbolic link of another user."""
        refuse_link_of_another(self.path.parent)
        existed = self.path.exists()  # `create_arena` creates the file
        record = self._record = self._read()
        arena = None if record is None else self._adopt(record, epoch)
        if record is not None and arena is not None:
            return Adopted(arena=arena, unit=record.unit)
        self._record = None
        arena = self.create_arena(create)
        sweep_recorded(arena.path.parent, superseded=self.path)
        return Adopted(arena=arena, lost="" if record is None else record.cookie, anew=existed)

    def set_service(self, service: str) -> None:
        """Set the name of the service at this unit's controller address, for the next `write`, and compare it with the
        record. Raises StateDirError if the adopted arena belongs to another service at another address. Logs a warning
        if the service at the same address lost its state."""
        record = self._record
        self._service = service
        if record is None or service == record.service:
            return
        if self._controller != record.controller:
            raise self._refusal_error(
                record,
                f"belongs to another service, {record.service} at {record.controller}; this unit was started for "
                f"{service} at {self._controller}",
                "Start the unit with the address of its service, or use another --state-dir",
            )
        log.warning(
            "Service at %s has lost its state and the rows of storage unit %s: expected service %s, found %s. It "
            "had no state directory, or the directory was emptied",
            self._controller,
            self._name,
            record.service,
            service,
        )

    def create_arena(self, create: Callable[[Path], Arena]) -> Arena:
        """Reserve the path of this record with an empty file, unless a file exists, then create an arena for it. The
        arena needs the file as its keeper before `write` is called."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(self.path, "xb", opener=private):
            pass
        failpoint("unit.reserved")
        return create(self.path)

    def _read(self) -> ArenaRecord | None:
        """Return the stored record; None if it does not exist, is empty or, with a warning, cannot be read."""
        try:
            content = self.path.read_bytes()
            return _decode_record(content) if content else None
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("Arena record %s is unreadable (%s); starting with an empty arena", self.path, error)
            return None

    def _adopt(self, record: ArenaRecord, epoch: int) -> Arena | None:
        """Adopt the recorded arena; wait up to `HELD_S` if a process holds it. Log the reason and return None if its
        memory is lost. Raises StateDirError if its rows may still exist, but this start cannot adopt them."""
        if record.boot != self._boot:
            log.warning("Arena %s is lost: the machine was restarted; starting with an empty arena", record.arena)
            return None
        # The same directory under another path is not moved; another one under the same path is handled below.
        moved = record.directory != self._directory and record.arena_dir != self._arena_dir
        in_other_container = record.locks != self._locks  # another directory of session locks
        # In another container, a missing lock file does not prove that its process has ended, so the arena is not
        # adopted. A moved arena that exists is an error instead.
        if in_other_container and not (moved and os.path.exists(record.arena)):
            log.warning("Arena %s belongs to another container; starting with an empty arena", record.arena)
            return None
        if moved:
            raise self._refusal_error(
                record,
                f"was created with --arena-dir {record.arena_dir}, but this start uses --arena-dir {self._arena_dir}",
                f"Start the unit with --arena-dir {record.arena_dir}",
            )
        if record.directory != self._directory:
            raise self._refusal_error(
                record,
                f"was created in another directory than the present {self._arena_dir}: the directory was replaced, or "
                "its disk is not mounted",
                f"Restore the original directory {self._arena_dir} (a copy does not count)",
            )
        end = time.monotonic() + HELD_S
        while True:
            try:
                arena = Arena.adopt(record.arena, epoch=epoch)
                failpoint("unit.adopted")
                return arena
            except BlockingIOError:  # the previous epoch has not ended yet
                if time.monotonic() > end:
                    raise self._held_error(record.arena) from None
                time.sleep(PAUSE_S)
            except ArenaFormatError as error:
                raise self._refusal_error(record, str(error), "Use the version that wrote it") from None
            except (OSError, ValueError) as error:
                log.warning("Cannot adopt the previous arena (%s); starting with an empty arena", error)
                return None

    def _refusal_error(self, record: ArenaRecord, why: str, hint: str) -> StateDirError:
        """Return the error of a start that must not adopt the recorded arena, and must not drop its rows either."""
        return StateDirError(
            directory=str(self.path.parent),
            why=f"the arena of storage unit {self._name!r}, {record.arena}, {why}",
            hint=f"{hint}. To drop its rows and start with an empty arena, remove {record.arena} and empty {self.path} "
            f"(`: > {quote_for_shell(str(self.path))}`)",
        )

    def _held_error(self, arena: str) -> StateDirError:
        """Return the error of a start while another process holds the arena."""
        return StateDirError(
            directory=str(self.path.parent),
            why=f"another process runs the storage unit of {self.path.name} and holds its arena {arena}",
            hint="Stop that process first, or start this unit with another name",
        )

    def remove(self) -> None:
        """Delete the record: the unit will not restart."""
        self.path.unlink(missing_ok=True)

    def write(self, arena: Arena, unit: int) -> None:
        """Write the record, atomically, so that the next epoch adopts this arena."""
        record = ArenaRecord(
            arena=str(arena.path),
            unit=unit,
            boot=self._boot,
            arena_dir=self._arena_dir,
            directory=self._directory,
            locks=self._locks,
            service=self._service,
            controller=self._controller,
            cookie=arena.cookie.hex(),
        )
        temporary = self.path.with_name(f"{self.path.name}.aside")
        with open(temporary, "wb", opener=private) as file:
            file.write(msgspec.json.encode(record))
        sync_path(temporary)
        failpoint("unit.record.before_rename")
        temporary.replace(self.path)
        sync_path(self.path.parent)
        self._record = record


def recorded_arena(state_dir: str | Path, name: str) -> Path | None:
    """Return the path of the arena that the next epoch of the unit `name` adopts; None if there is no readable record
    of it in `state_dir`, or no such file."""
    try:
        record = _decode_record(_record_path(state_dir, name).read_bytes())
    except (OSError, msgspec.MsgspecError, ValueError):  # `UnitRecord.open` logs the reason
        return None
    return Path(record.arena) if os.path.exists(record.arena) else None


def _record_path(state_dir: str | Path, name: str) -> Path:
    return Path(state_dir).absolute() / f"unit-{quote(name, safe='')}.json"


def identity(directory: str | Path) -> str:
    """Return an identity that distinguishes a directory from another one of the same path, in another container or
    created later."""
    info = os.stat(directory)
    return f"{info.st_dev}:{info.st_ino}"


def discard(state_dir: str | Path, arena_directories: Iterable[str | Path]) -> list[Path]:
    """Remove the records of all units in `state_dir`, and then their arenas; an arena that a process holds stays.
    Return the removed arenas. arena_directories: the units' values of `arena_dir`."""
    for path in Path(state_dir).glob("unit-*.json"):
        path.unlink(missing_ok=True)  # its arena is then no longer needed
    removed: list[Path] = []
    for directory in set(arena_directories):
        for folder in (Path(directory), own_path(directory)):  # an arena may be in either
            if folder.is_dir():
                removed += sweep_recorded(folder)
        leave(directory)  # removes the user's own directory if it is empty
    return removed
