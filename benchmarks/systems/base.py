"""What every system under measurement can be asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from benchmarks.payload import Batch


class Span(NamedTuple):
    """A stretch of bytes that stands for rows, in systems that know only bytes."""

    first: int
    last: int
    rows: int

    @classmethod
    def of(cls, batch: Batch) -> Span:
        return cls(0, batch.nbytes, len(batch.ids))

    def part(self, first: int, last: int) -> Span:
        """The stretch of these rows, as if all were as long."""
        each = (self.last - self.first) / self.rows
        return Span(self.first + int(first * each), self.first + int(last * each), last - first)


class System(Protocol):
    """A store of batches, driven from one process. What names a stored batch, or a part of it, is the system's own.

    When `put` returns, another process could read the batch.
    """

    def open(self) -> None:
        """Start what the system needs and connect to it."""

    def put(self, batch: Batch, held: Any = None) -> Any:
        """Store the batch; with `held`, add its columns to the samples that are stored there."""

    def part(self, held: Any, first: int, last: int) -> Any:
        """The rows `first` to `last` of what is stored."""

    def read(self, held: Any, names: list[str]) -> Mapping[str, Any]:
        """These columns of the rows, in the system's natural form."""

    def read_padded(self, held: Any, names: list[str]) -> Mapping[str, Any]:
        """These columns of the rows, jagged ones padded with zeros to the longest row."""

    def drop(self, held: Any) -> None:
        """Forget the rows."""

    def close(self) -> None:
        """End everything that `open` started."""
