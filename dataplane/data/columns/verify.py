"""Verification of rows against the checksums of their writer, at their final location in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dataplane.core.checksums import damaged
from dataplane.core.row_copy import UInt8s
from dataplane.data.columns.decode import RowSource
from dataplane.errors import ChecksumError
from dataplane.ledger.commands import FieldLocations, Int64s


@dataclasses.dataclass(frozen=True)
class FieldCheck:
    """Expected checksums of the rows of one field. samples: sample ids in row order, for error messages."""

    partition: str
    samples: Sequence[str]
    located: FieldLocations

    def __call__(self, memory: UInt8s, offsets: Int64s, rows: Int64s | slice) -> None:
        """Verify `rows`, which are at `offsets` of `memory`. `ChecksumError` names the first row that differs."""
        found = self.located
        assert found.checksums is not None
        sizes = found.lengths[rows] * found.spec.unit_bytes
        expected = found.checksums[rows]
        wrong, got = damaged(memory, offsets, sizes, expected)
        if not len(wrong):
            return
        place = int(np.arange(len(found.lengths))[rows][wrong[0]])
        raise ChecksumError(
            partition=self.partition,
            sample=self.samples[place],
            field=found.name,
            unit=int(found.units[place]),
            expected=int(expected[wrong[0]]),
            got=int(got[0]),
            total=len(wrong),
        )


def checked(
    sources: Mapping[str, RowSource], located: Sequence[FieldLocations], partition: str, samples: Sequence[str]
) -> dict[str, RowSource]:
    """Return `sources` with a check for every field that has checksums; its rows are verified when they are read."""
    checks = {found.name: FieldCheck(partition, samples, found) for found in located if found.checksums is not None}
    return {
        name: dataclasses.replace(source, check=checks[name]) if name in checks else source
        for name, source in sources.items()
    }
