"""What a storage unit leaves in a state directory, so that its next life goes on with the same memory.

`unit-NAME.json` names the arena and the number that the controller knows the unit by. The arena itself stays where it
is, in shared memory or in a file, as long as this record does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from dataplane.arena import Arena, sweep_kept
from dataplane.errors import StateDirError
from dataplane.failpoints import hit
from dataplane.host import boot_id

log = logging.getLogger(__name__)

HELD_S = 20.0
"""A storage unit that is told to end takes up to so long."""
PAUSE_S = 0.05


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """arena: its path. unit: the unit's number. place: where its clients' session locks were, see `place_of`."""

    arena: str
    unit: int
    place: str


def place_of(directories: Iterable[str | Path]) -> str:
    """Tells whether these are the same directories as before, on the same boot of the same machine: only there does a
    lock file that is gone prove that its process is."""
    found = [os.stat(directory) for directory in sorted(map(str, directories))]
    return " ".join([boot_id(), *(f"{stat.st_dev}:{stat.st_ino}" for stat in found)])


class UnitRecord:
    """The record of the unit `name` in `state_dir`. lock_directories: see `BulkServer`."""

    def __init__(self, state_dir: str | Path, name: str, lock_directories: Iterable[str | Path]) -> None:
        self.path = Path(state_dir).absolute() / f"unit-{quote(name, safe='')}.json"
        self._place = place_of(lock_directories)

    def adopt(self, *, epoch: int) -> tuple[Arena, int] | None:
        """The arena of the life before, and the unit's number; None where there is none to go on with, which the log
        explains. Waits up to `HELD_S` for the life before to end; StateDirError if it does not."""
        try:
            content = self.path.read_bytes()
            if not content:
                return None
            kept = msgspec.json.decode(content, type=Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read (%s): beginning with an empty arena", self.path, error)
            return None
        if kept.place != self._place:
            log.warning(
                "%s was left on another boot, or in another container: beginning with an empty arena", kept.arena
            )
            return None
        end = time.monotonic() + HELD_S
        while True:
            try:
                arena = Arena.adopt(kept.arena, epoch=epoch)
                hit("unit.adopted")
                return arena, kept.unit
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

    def write(self, arena: Arena, unit: int) -> None:
        """From now on the next life goes on with this arena. Written whole or not at all."""
        aside = self.path.with_name(f"{self.path.name}.aside")
        aside.write_bytes(msgspec.json.encode(Kept(arena=str(arena.path), unit=unit, place=self._place)))
        hit("unit.record.before_rename")
        aside.replace(self.path)

    def reserve(self) -> None:
        """Make the record exist, so that an arena may name it before there is a unit to write down."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(self.path, "xb"):
            pass


def discard(state_dir: str | Path, arena_directories: Iterable[str | Path]) -> list[Path]:
    """Remove the records of all units in `state_dir`, and the arenas that they kept, unless a process holds them. What
    was removed of the latter."""
    for path in Path(state_dir).glob("unit-*.json"):
        path.unlink(missing_ok=True)
    return [path for directory in set(arena_directories) for path in sweep_kept(directory)]
