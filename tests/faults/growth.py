"""What must not grow in a service however long it runs and whatever happens to it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.books import StormError

MIB = 1 << 20
CONTROLLER_BYTES = 256 * MIB
UNIT_BYTES = 256 * MIB
STATE_BYTES = 96 * MIB
SERVICE_FDS = 400
"""Far above what a service of a storm needs: beyond, something grows."""


@dataclass(frozen=True)
class Figures:
    """At one moment, all clients at rest. memory (not shared) and fds: by process of the service. image_bytes: of
    the last image of the ledger. own_bytes, own_fds, own_threads: of the process with the bystander, which lives as
    long as the storm."""

    memory: dict[str, int]
    fds: dict[str, int]
    state_bytes: int
    image_bytes: int
    own_bytes: int
    own_fds: int
    own_threads: int

    @classmethod
    def of(cls, service: dict[str, int], state: Path) -> Figures:
        """service: process ids by name."""
        processes = {name: psutil.Process(pid) for name, pid in service.items()}
        own, sizes = psutil.Process(os.getpid()), _sizes(state)
        return cls(
            memory={name: process.memory_full_info().uss for name, process in processes.items()},
            fds={name: process.num_fds() for name, process in processes.items()},
            state_bytes=sum(sizes.values()),
            image_bytes=max((size for name, size in sizes.items() if name.startswith("image-")), default=0),
            own_bytes=own.memory_full_info().uss,
            own_fds=own.num_fds(),
            own_threads=own.num_threads(),
        )

    def __str__(self) -> str:
        memory = ", ".join(
            f"{name} {nbytes / MIB:.0f} MiB {self.fds[name]} fds" for name, nbytes in self.memory.items()
        )
        return (
            f"{memory}; state {self.state_bytes / MIB:.1f} MiB, image {self.image_bytes / 1024:.0f} KiB; "
            f"a client from the beginning {self.own_bytes / MIB:.0f} MiB {self.own_fds} fds {self.own_threads} threads"
        )

    def check(self, first: Figures) -> None:
        """StormError if something grows. first: from the beginning of the storm."""
        limits = {
            **{
                f"memory of {name}": (nbytes, CONTROLLER_BYTES if name == "controller" else UNIT_BYTES)
                for name, nbytes in self.memory.items()
            },
            **{f"descriptors of {name}": (count, SERVICE_FDS) for name, count in self.fds.items()},
            "bytes of the state directory": (self.state_bytes, STATE_BYTES),
            "bytes of the ledger's image": (self.image_bytes, 4 * first.image_bytes + 8 * MIB),
            "memory of a client": (self.own_bytes, first.own_bytes + 128 * MIB),
            "descriptors of a client": (self.own_fds, first.own_fds + 64),
            "threads of a client": (self.own_threads, first.own_threads + 16),
        }
        grown = [f"{what}: {value:,}, at most {limit:,}" for what, (value, limit) in limits.items() if value > limit]
        if grown:
            raise StormError(f"it grows: {'; '.join(grown)} ({self}; at first: {first})")


def _sizes(folder: Path) -> dict[str, int]:
    """Of its files, by name. A controller that makes an image meanwhile renames one and removes others."""
    sizes = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes
