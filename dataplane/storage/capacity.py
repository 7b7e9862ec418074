"""The memory of a host that new arenas may take, beside the arenas of the storage units that run there."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from dataplane.config import DataPlaneConfig
from dataplane.core.file_locks import ARENA_NAME, RECORDED_ARENA_NAME, is_held, sweep
from dataplane.core.memory_limits import available_memory
from dataplane.core.private_dir import leave, own_directory
from dataplane.errors import ArenaSpaceError
from dataplane.storage.arena import HEADER, check_header, default_capacity, sweep_recorded
from dataplane.storage.arena_record import recorded_arena
from dataplane.storage.session_lock import DEFAULT_LOCK_DIRECTORY, lock_directories

_USER_DIRECTORY = re.compile(r"tq-\d+")
"""Names of the directories that `private_dir.own_path` returns, of all users."""


def unit_name(index: int) -> str:
    """Return the name of storage unit `index` (from 0) of a service that starts its own units."""
    return f"unit-{index}"


def unit_configs(config: DataPlaneConfig, count: int) -> list[DataPlaneConfig]:
    """Return the configs of the `count` storage units that a service starts, `unit-0` first.

    Units that adopt the arena of an earlier run keep `config.capacity_bytes`; the others get the
    capacity of a new arena (see `arena_capacity`), so that all of them fit together. Raises
    `ArenaSpaceError` if they do not fit, OSError if the directory of the arenas is not usable.
    """
    configs = [config.of_unit(index) for index in range(count)]
    adopted: dict[int, Path] = {}
    if config.state_dir is not None:
        for index in range(count):
            path = recorded_arena(config.state_dir, unit_name(index))
            if path is not None:
                adopted[index] = path
    new = [index for index in range(count) if index not in adopted]
    if new:
        sweep_directories(config)  # the memory of arenas without a process is free
        wanted = config.capacity_bytes
        capacity = arena_capacity(config.arena_dir, wanted, units=len(new), adopted=adopted.values())
        for index in new:
            configs[index] = replace(configs[index], capacity_bytes=capacity)
    return configs


def arena_capacity(
    directory: str | Path,
    capacity_bytes: int | None,
    *,
    units: int = 1,
    adopted: Collection[Path] = (),
) -> int:
    """Return the capacity in bytes of each of `units` new arenas in `directory`: `capacity_bytes`,
    or by default a share of the memory that is available for all of them.

    Raises `ArenaSpaceError` if the new arenas do not fit into the available memory beside
    `growing_arenas(directory, adopted)`.
    """
    memory = available_memory(directory)
    growing = growing_arenas(directory, adopted)
    growing_bytes = sum(growing.values())
    capacity = capacity_bytes
    if capacity is None:
        capacity = default_capacity(directory, units=units, promised_bytes=growing_bytes)
    if units * capacity + growing_bytes > memory.free_bytes:
        raise ArenaSpaceError(
            directory=str(directory),
            found_bytes=memory.free_bytes,
            wanted_bytes=units * capacity,
            limit=memory.limit,
            units=units,
            growing_bytes=growing_bytes,
            growing=sorted(growing, key=lambda path: -growing[path]),
        )
    return capacity


def growing_arenas(directory: str | Path, adopted: Collection[Path] = ()) -> dict[str, int]:
    """Return how many bytes the arenas in `directory` may still grow, by path, without full ones.

    Arenas count that a running process holds, or that are `adopted` soon. Arenas of other users
    count if their headers are readable.
    """
    growing = {}
    for path in _arenas(directory):
        with contextlib.suppress(OSError, ValueError):  # removed meanwhile, not readable, not intact
            growing_bytes = _growing_bytes(path, is_adopted=path in adopted)
            if growing_bytes > 0:
                growing[str(path)] = growing_bytes
    return growing


def _arenas(directory: str | Path) -> Iterator[Path]:
    """Yield the paths of the arenas in the directories of all users that can be listed."""
    for user in os.listdir(directory):
        if _USER_DIRECTORY.fullmatch(user):
            folder = Path(directory).absolute() / user
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    if ARENA_NAME.fullmatch(name) or RECORDED_ARENA_NAME.fullmatch(name):
                        yield folder / name


def _growing_bytes(path: Path, *, is_adopted: bool) -> int:
    """Return how many bytes the arena may still grow; 0 if it has no process and is not adopted.
    Raises OSError if the file cannot be opened, ValueError if it is not an intact arena."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not is_adopted and not is_held(fd):
            return 0
        raw = os.pread(fd, HEADER.size, 0)
    finally:
        os.close(fd)
    capacity = check_header(raw, path, cookie=None)
    *_, backed = HEADER.unpack(raw)
    return capacity - int(backed)


def sweep_directories(config: DataPlaneConfig) -> None:
    """Remove arenas and session locks that are no longer needed. Raises OSError if the directories
    are not accessible."""
    folder = own_directory(config.arena_dir)
    for directory in lock_directories(folder):  # that of the arenas, and the default one of session locks
        with contextlib.suppress(FileNotFoundError):  # the last process that used the directory has removed it
            sweep(directory)
            sweep_recorded(directory)


def sweep_leftovers(config: DataPlaneConfig) -> None:
    """Remove the files that killed units left behind, and this user's directories if they are empty.
    Raises OSError if the directories are not accessible."""
    sweep_directories(config)
    for shared in (config.arena_dir, DEFAULT_LOCK_DIRECTORY):
        leave(shared)
