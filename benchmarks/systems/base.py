"""The interface of every system under measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from benchmarks.payload import Batch


class Span(NamedTuple):
    """A range of bytes that represents rows, for systems that store only bytes."""

    first: int
    last: int
    rows: int

    @classmethod
    def of(cls, batch: Batch) -> Span:
        return cls(0, batch.nbytes, len(batch.ids))

    def part(self, first: int, last: int) -> Span:
        """Return the range of these rows, as if all rows had the same length."""
        each = (self.last - self.first) / self.rows
        return Span(self.first + int(first * each), self.first + int(last * each), last - first)


class System(Protocol):
    """A store of batches, driven from one process. The handle of a stored batch, or of a part of it, is
    system-specific.

    When `put` returns, another process can read the batch.
    """

    def open(self) -> None:
        """Start the system and connect to it."""

    def put(self, batch: Batch, held: Any = None) -> Any:
        """Store the batch. With `held`, add its columns to the samples that are stored there."""

    def part(self, held: Any, first: int, last: int) -> Any:
        """Return the handle of the rows `first` to `last` of a stored batch."""

    def read(self, held: Any, names: list[str]) -> Mapping[str, Any]:
        """Return these columns of the rows, in the system's natural form."""

    def read_padded(self, held: Any, names: list[str]) -> Mapping[str, Any]:
        """Return these columns of the rows, jagged columns padded with zeros to the longest row."""

    def drop(self, held: Any) -> None:
        """Remove the rows."""

    def close(self) -> None:
        """End everything that `open` started."""
