"""The reckoning of a storm: what its players wrote down, put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.faults.acting import BAD


class StormError(AssertionError):
    """What must never be was."""


def bad(folder: Path) -> list[str]:
    """What players noted that must never be."""
    lines = [line for path in folder.glob("*.notes") for line in path.read_text().splitlines()]
    return [line for line in lines if line.startswith(BAD)]


class Books:
    """Every sample that was ever named. drained: those consumed by the storm itself."""

    def __init__(self, folder: Path, drained: Iterable[str]) -> None:
        self.put: set[str] = set()
        self.tried: set[str] = set()
        self.acking: set[str] = set()
        self.acked = Counter(drained)
        self.errors: Counter[str] = Counter()
        for path in folder.glob("*.notes"):
            for line in path.read_text().splitlines():
                self._take(*line.split(" "))

    def _take(self, what: str, *words: str) -> None:
        match what:
            case "putting":
                self.tried.update(words)
            case "put":
                self.put.update(words)
            case "acking":
                self.acking.update(words)
            case "acked":
                self.acked.update(words)
            case "error":
                self.errors.update(words)
            case _:
                raise StormError(" ".join(words))

    def reckon(self) -> str:
        """All in a sentence or two. StormError if a sample was lost, consumed twice, or never put."""
        twice = [name for name, count in self.acked.items() if count > 1]
        lost = self.put - set(self.acked) - self.acking
        unknown = (set(self.acked) | self.acking) - self.tried
        if twice or lost or unknown:
            raise StormError(f"consumed twice: {twice[:5]}; lost: {sorted(lost)[:5]}; never put: {sorted(unknown)[:5]}")
        return (
            f"{len(self.put):,} samples put and {len(self.acked):,} consumed once each, none lost; "
            f"{len(self.tried - self.put):,} puts and {len(self.acking - set(self.acked)):,} acknowledgements of "
            f"unknown outcome; errors that clients saw: {dict(self.errors.most_common()) or 'none'}"
        )
