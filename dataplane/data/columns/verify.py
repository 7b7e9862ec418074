"""Rows compared with the checksums of their writer, where they lie when they are done with."""

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
    """What the rows of one field are to be, and how to name one that is not. samples: their ids, in order."""

    partition: str
    samples: Sequence[str]
    located: FieldLocations

    def __call__(self, memory: UInt8s, offsets: Int64s, rows: Int64s | slice) -> None:
        """Compare these rows, which lie at `offsets` of `memory`. `ChecksumError` names the first that differs."""
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
    """The same rows, of which those that have checksums are compared when they are read."""
    checks = {found.name: FieldCheck(partition, samples, found) for found in located if found.checksums is not None}
    return {
        name: dataclasses.replace(source, check=checks[name]) if name in checks else source
        for name, source in sources.items()
    }
