"""What a storage unit leaves in a state directory, so that its next life goes on with the same memory.

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
from urllib.parse import quote

import msgspec

from dataplane.arena import Arena, sweep_kept
from dataplane.errors import StateDirError
from dataplane.failpoints import hit
from dataplane.folder import leave, own_path, private, refuse_link_of_another
from dataplane.forced import sync_path
from dataplane.host import boot_id

log = logging.getLogger(__name__)

HELD_S = 20.0
"""A storage unit that is told to end takes up to so long."""
PAUSE_S = 0.05


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """arena: its path; cookie: what identifies it. unit: the unit's number. place: where its clients' session locks
    were, see `place_of`. forced: what was written there is on the disk, and outlives the machine."""

    arena: str
    unit: int
    place: str
    cookie: str = ""
    forced: bool = False


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


def place_of(directories: Iterable[str | Path]) -> str:
    """Tells whether these are the same directories as before, on the same boot of the same machine: only there does a
    lock file that is gone prove that its process is."""
    found = [os.stat(directory) for directory in sorted(map(str, directories))]
    return " ".join([boot_id(), *(f"{stat.st_dev}:{stat.st_ino}" for stat in found)])


class UnitRecord:
    """The record of the unit `name` in `state_dir`. lock_directories: see `BulkServer`. forced: the unit's arenas are
    to outlive the machine."""

    def __init__(
        self, state_dir: str | Path, name: str, lock_directories: Iterable[str | Path], *, forced: bool = False
    ) -> None:
        self.path = Path(state_dir).absolute() / f"unit-{quote(name, safe='')}.json"
        self._place = place_of(lock_directories)
        self._forced = forced

    def open(self, create: Callable[[Path], Arena], *, epoch: int) -> Adopted:
        """The arena of the life before; where there is none to go on with, which the log explains, what `create` makes
        for the path of this record; then earlier ones made for it are removed, unless a process holds them. Waits up to
        `HELD_S` for the life before to end; StateDirError if it does not. PermissionError where the state directory is
        a link of another user."""
        refuse_link_of_another(self.path.parent)
        was = self.path.exists()
        kept = self._read()
        arena = None if kept is None else self._adopt(kept, epoch)
        if kept is not None and arena is not None:
            return Adopted(arena=arena, unit=kept.unit, recheck=self._is_of_another_boot(kept))
        arena = self.begin(create)
        sweep_kept(arena.path.parent, superseded=self.path)
        return Adopted(arena=arena, lost="" if kept is None else kept.cookie, anew=was)

    def begin(self, create: Callable[[Path], Arena]) -> Arena:
        """What `create` makes for the path of this record, which exists by then."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(self.path, "xb", opener=private):
            pass
        hit("unit.reserved")
        return create(self.path)

    def _read(self) -> Kept | None:
        try:
            content = self.path.read_bytes()
            return msgspec.json.decode(content, type=Kept) if content else None
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("%s cannot be read (%s): beginning with an empty arena", self.path, error)
            return None

    def _is_of_another_boot(self, kept: Kept) -> bool:
        return kept.place.split(" ")[0] != self._place.split(" ")[0]

    def _adopt(self, kept: Kept, epoch: int) -> Arena | None:
        if kept.place != self._place and not (kept.forced and self._is_of_another_boot(kept)):
            log.warning(
                "%s was left on another boot, or in another container: beginning with an empty arena", kept.arena
            )
            return None
        end = time.monotonic() + HELD_S
        while True:
            try:
                arena = Arena.adopt(kept.arena, epoch=epoch, forced=self._forced)
                hit("unit.adopted")
                return arena
            except BlockingIOError:
                if time.monotonic() > end:
                    raise self._held(kept.arena) from None
                time.sleep(PAUSE_S)
            except (OSError, ValueError) as error:
                log.warning("cannot go on with the arena of the life before (%s): beginning with an empty one", error)
                return None

    def _held(self, arena: str) -> StateDirError:
        return StateDirError(
            directory=str(self.path.parent),
            why=f"another process runs the storage unit of {self.path.name}, and holds its arena {arena}",
            hint="Stop that one first, or give this one another name",
        )

    def remove(self) -> None:
        """There is no next life."""
        self.path.unlink(missing_ok=True)

    def write(self, arena: Arena, unit: int) -> None:
        """From now on the next life goes on with this arena. Written whole or not at all."""
        kept = Kept(arena=str(arena.path), unit=unit, place=self._place, cookie=arena.cookie.hex(), forced=arena.forced)
        aside = self.path.with_name(f"{self.path.name}.aside")
        with open(aside, "wb", opener=private) as file:
            file.write(msgspec.json.encode(kept))
        sync_path(aside)
        hit("unit.record.before_rename")
        aside.replace(self.path)
        sync_path(self.path.parent)


def discard(state_dir: str | Path, arena_directories: Iterable[str | Path]) -> list[Path]:
    """Remove the records of all units in `state_dir`, and the arenas that they kept, unless a process holds them. What
    was removed of the latter. arena_directories: what the units had as `arena_dir`."""
    for path in Path(state_dir).glob("unit-*.json"):
        path.unlink(missing_ok=True)
    folders = [folder for directory in set(arena_directories) for folder in (Path(directory), own_path(directory))]
    removed = [path for folder in folders if folder.is_dir() for path in sweep_kept(folder)]
    for directory in set(arena_directories):
        leave(directory)
    return removed
