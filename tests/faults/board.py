"""Numbers that a player and its scene share, in a file: the player counts, the scene gives orders."""

from __future__ import annotations

import mmap
from pathlib import Path

REST, ORDER, READY, BYTES, ITEMS = 2, 3, 4, 5, 6
"""Places beside those that `acting.Actor` counts in: whether to begin nothing new, an order, in how many runs it got
ready, and what a broker has."""
LANES = 8
"""From here on, one for each thing that the player does again and again: how often it was done."""
_COUNT = 64

END, TELL, STOP_IN_RECV, STOP_IN_SEND = 1, 2, 3, 4
"""Orders: to end; to tell what it has; to stop, by SIGSTOP, in the middle of the next large receive, or send."""


def board(folder: str | Path, name: str) -> memoryview:
    """Of player `name`, made at the first call. All zero then."""
    path = Path(folder) / f"{name}.board"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(8 * _COUNT)
        return memoryview(mmap.mmap(file.fileno(), 8 * _COUNT)).cast("q")
