"""Verification of rows against the checksums of their writer, at their final location in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dataplane.core.checksums import damaged
from dataplane.core.row_copy import UInt8s
from dataplane.data.columns.row_source import RowSource
from dataplane.errors import ChecksumError
from dataplane.ledger.commands import FieldLocations, Int64s


@dataclasses.dataclass(frozen=True)
class FieldCheck:
    """Compares the rows of one field with the checksums in `located`. A `Check` of `columns.decode`. samples: sample
    ids in row order, for error messages."""

    partition: str
    samples: Sequence[str]
    located: FieldLocations

    def __call__(self, memory: UInt8s, offsets: Int64s, rows: Int64s | slice) -> None:
        """Verify `rows` (indices, or a slice of all), which are at `offsets` of `memory`. `ChecksumError` names the
        first row that differs."""
        located = self.located
        assert located.checksums is not None
        sizes = located.lengths[rows] * located.spec.unit_bytes
        expected = located.checksums[rows]
        wrong, got = damaged(memory, offsets, sizes, expected)  # wrong: positions in `rows`
        if not len(wrong):
            return
        row = int(np.arange(len(located.lengths))[rows][wrong[0]])  # works for both forms of `rows`
        raise ChecksumError(
            partition=self.partition,
            sample=self.samples[row],
            field=located.name,
            unit=int(located.units[row]),
            expected=int(expected[wrong[0]]),
            got=int(got[0]),
            total=len(wrong),
        )


def checked(
    sources: Mapping[str, RowSource], located: Sequence[FieldLocations], partition: str, samples: Sequence[str]
) -> dict[str, RowSource]:
    """Return `sources` with a check for every field that has checksums; its rows are verified when they are read."""
    checks = {field.name: FieldCheck(partition, samples, field) for field in located if field.checksums is not None}
    return {
        name: dataclasses.replace(source, check=checks[name]) if name in checks else source
        for name, source in sources.items()
    }
