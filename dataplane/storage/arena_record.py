"""What a storage unit leaves in a state directory, so that its next epoch goes on with the same memory.

`unit-NAME.json` names the arena and the number that the controller knows the unit by. The arena itself stays where it
is, in shared memory or in a file, as long as this record does.
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
from dataplane.core.failpoints import hit
from dataplane.core.fsync import sync_path
from dataplane.core.private_dir import leave, own_path, private, refuse_link_of_another
from dataplane.errors import StateDirError
from dataplane.storage.arena import Arena, ArenaFormatError, sweep_recorded

log = logging.getLogger(__name__)

HELD_S = 20.0
"""A storage unit that is told to end takes up to so long."""
PAUSE_S = 0.05


class ArenaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """arena: its path; cookie: what identifies it. unit: the unit's number. arena_dir: the directory that it was made
    with, and directory: which one that was. service: the name of the one that it belongs to, which was at the address
    controller. locks: which directory had the session locks of its clients. fsynced: what
    was written there is on the disk, and outlives the machine."""

    arena: str
    unit: int
    boot: str
    arena_dir: str
    directory: str
    locks: str
    service: str = ""
    controller: str = ""
    cookie: str = ""
    fsynced: bool = False


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """An arena that goes on. unit: its number before; 0: none. recheck: the machine was started anew since. lost: the
    cookie of one that should have gone on and cannot, so that `arena` is new; "": none that is known. anew: there was
    one, known or not."""

    arena: Arena
    unit: int = 0
    recheck: bool = False
    lost: str = ""
    anew: bool = False


class UnitRecord:
    """The record of the unit `name` in `state_dir`. lock_directory: where its clients' session locks are, besides
    `arena_dir`. controller: the address of the service that it is for. fsynced: the unit's arenas are to outlive the
    machine."""

    def __init__(
        self,
        state_dir: str | Path,
        name: str,
        arena_dir: str | Path,
        lock_directory: str | Path,
        *,
        controller: str = "",
        fsynced: bool = False,
    ) -> None:
        self.path = Path(state_dir).absolute() / f"unit-{quote(name, safe='')}.json"
        self._name = name
        self._arena_dir = str(Path(arena_dir).absolute())
        self._directory = identity(arena_dir)
        self._locks = identity(lock_directory)
        self._boot = boot_id()
        self._controller = controller
        self._service = ""
        self._record: ArenaRecord | None = None
        self._fsynced = fsynced

    def open(self, create: Callable[[Path], Arena], *, epoch: int) -> Adopted:
        """The arena of the epoch before; where there is none to go on with, which the log explains, what `create` makes
        for the path of this record; then earlier ones made for it are removed, unless a process holds them. Waits up to
        `HELD_S` for the epoch before to end; StateDirError if it does not, or if the arena of the epoch before is, or
        may be, in another directory than `arena_dir`. PermissionError where the state directory is a link of another
        user."""
        refuse_link_of_another(self.path.parent)
        was = self.path.exists()
        record = self._record = self._read()
        arena = None if record is None else self._adopt(record, epoch)
        if record is not None and arena is not None:
            return Adopted(arena=arena, unit=record.unit, recheck=record.boot != self._boot)
        self._record = None
        arena = self.begin(create)
        sweep_recorded(arena.path.parent, superseded=self.path)
        return Adopted(arena=arena, lost="" if record is None else record.cookie, anew=was)

    def found(self, service: str) -> None:
        """The service at this unit's controller address is `service`. StateDirError if the arena that goes on belongs
        to another one elsewhere. One at the same address began anew, without what it held."""
        record, self._service = self._record, service
        if record is None or service == record.service:
            return
        if self._controller != record.controller:
            raise self._refusal(
                record,
                f"belongs to another service, {record.service}, which was at {record.controller}, and this start "
                f"is for {service} at {self._controller}",
                "Start it for that service, with its address, or use another --state-dir for this one",
            )
        log.warning(
            "the service at %s is not the one that storage unit %s belongs to, %s, but a new one, %s: that had no "
            "state directory, or lost what was in it, and the rows of this unit with it",
            self._controller,
            self._name,
            record.service,
            service,
        )

    def begin(self, create: Callable[[Path], Arena]) -> Arena:
        """What `create` makes for the path of this record, which exists by then."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(self.path, "xb", opener=private):
            pass
        hit("unit.reserved")
        return create(self.path)

    def _read(self) -> ArenaRecord | None:
        try:
            content = self.path.read_bytes()
            return msgspec.json.decode(content, type=ArenaRecord) if content else None
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("%s cannot be read (%s): beginning with an empty arena", self.path, error)
            return None

    def _adopt(self, record: ArenaRecord, epoch: int) -> Arena | None:
        booted = record.boot != self._boot
        if booted and not record.fsynced:
            log.warning("%s was left on another boot: beginning with an empty arena", record.arena)
            return None
        moved = record.directory != self._directory and record.arena_dir != self._arena_dir
        elsewhere = not booted and record.locks != self._locks
        # There a lock file that is gone does not prove that its process is.
        if elsewhere and not (moved and os.path.exists(record.arena)):
            log.warning("%s was left in another container: beginning with an empty arena", record.arena)
            return None
        if moved:
            raise self._refusal(
                record,
                f"was made with --arena-dir {record.arena_dir}, and this start has --arena-dir {self._arena_dir}",
                f"Start it with --arena-dir {record.arena_dir}",
            )
        if record.directory != self._directory and not (booted and os.path.exists(record.arena)):
            raise self._refusal(
                record,
                f"was made in another directory than the one that {self._arena_dir} is now: that was replaced, or its "
                "disk is not mounted",
                f"Bring back the directory that {self._arena_dir} was (a copy is another one)",
            )
        end = time.monotonic() + HELD_S
        while True:
            try:
                arena = Arena.adopt(record.arena, epoch=epoch, fsynced=self._fsynced)
                hit("unit.adopted")
                return arena
            except BlockingIOError:
                if time.monotonic() > end:
                    raise self._held(record.arena) from None
                time.sleep(PAUSE_S)
            except ArenaFormatError as error:
                raise self._refusal(record, str(error), "Use the version it is of") from None
            except (OSError, ValueError) as error:
                log.warning("cannot go on with the arena of the epoch before (%s): beginning with an empty one", error)
                return None

    def _refusal(self, record: ArenaRecord, why: str, hint: str) -> StateDirError:
        return StateDirError(
            directory=str(self.path.parent),
            why=f"the arena of storage unit {self._name!r}, {record.arena}, {why}",
            hint=f"{hint}. To lose its rows and begin with an empty arena, remove {record.arena} and empty {self.path} "
            f"(`: > {quote_for_shell(str(self.path))}`)",
        )

    def _held(self, arena: str) -> StateDirError:
        return StateDirError(
            directory=str(self.path.parent),
            why=f"another process runs the storage unit of {self.path.name}, and holds its arena {arena}",
            hint="Stop that one first, or give this one another name",
        )

    def remove(self) -> None:
        """Delete the record: the unit will not restart."""
        self.path.unlink(missing_ok=True)

    def write(self, arena: Arena, unit: int) -> None:
        """From now on the next epoch goes on with this arena. Written whole or not at all."""
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
            fsynced=arena.fsynced,
        )
        aside = self.path.with_name(f"{self.path.name}.aside")
        with open(aside, "wb", opener=private) as file:
            file.write(msgspec.json.encode(record))
        sync_path(aside)
        hit("unit.record.before_rename")
        aside.replace(self.path)
        sync_path(self.path.parent)
        self._record = record


def identity(directory: str | Path) -> str:
    """Tells a directory from another one that has its name in another container, or later."""
    found = os.stat(directory)
    return f"{found.st_dev}:{found.st_ino}"


def discard(state_dir: str | Path, arena_directories: Iterable[str | Path]) -> list[Path]:
    """Remove the records of all units in `state_dir`, and the arenas that they kept, unless a process holds them. What
    was removed of the latter. arena_directories: what the units had as `arena_dir`."""
    for path in Path(state_dir).glob("unit-*.json"):
        path.unlink(missing_ok=True)
    folders = [folder for directory in set(arena_directories) for folder in (Path(directory), own_path(directory))]
    removed = [path for folder in folders if folder.is_dir() for path in sweep_recorded(folder)]
    for directory in set(arena_directories):
        leave(directory)
    return removed
