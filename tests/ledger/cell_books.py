"""What the table of extents must say about the cells that refer to it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dataplane.ledger import Ledger
from dataplane.ledger.state.extents import FREE, LIVE
from tests.ledger.values import granules


def check_cells(ledger: Ledger) -> None:
    """Check that extents have the counts, bytes and accounts of their cells, hold all bytes of
    these, and nothing else if all cells are of one row and nobody reads them."""
    extents = ledger._state.extents
    cells: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by extent: (row, offset, bytes)
    for partition in ledger._state.partitions.values():
        of_partition: set[int] = set()
        for field in partition.fields.values():
            rows = np.flatnonzero(field.extents)
            assert field.live == len(rows)
            of_partition.update(field.extents[rows].tolist())
            places = zip(rows.tolist(), field.offsets[rows].tolist(), field.bytes_of(rows).tolist(), strict=True)
            for extent_id, place in zip(field.extents[rows].tolist(), places, strict=True):
                cells[extent_id].append(place)
        assert partition.account.live_bytes == extents.bytes_of(np.array(sorted(of_partition), np.int32))
        owners = set(extents.owners[sorted(of_partition)].tolist())
        assert owners <= {partition.account.account_id}
    held: dict[int, set[int]] = defaultdict(set)
    for extent_id in range(1, extents.high):
        state = extents.states[extent_id]
        assert (state == LIVE) == (extent_id in cells)
        assert extents.live[extent_id] == len(cells.get(extent_id, ()))
        assert bool(extents.sizes[extent_id]) <= (state != FREE)
        for start, size in extents._pieces_of(extent_id):
            held[extent_id].update(granules(start, size))
        assert 64 * len(held[extent_id]) == extents.sizes[extent_id]
    for extent_id, places in cells.items():
        touched = {granule for _, offset, nbytes in places if nbytes for granule in granules(offset, nbytes)}
        assert touched <= held[extent_id]
        several = extents.several.get(extent_id)
        if several is not None:
            assert several.live_bytes == sum(nbytes for _, _, nbytes in places)
            assert {row for row, _, _ in places} <= set(several.rows.tolist())
        elif not extents.pins[extent_id]:
            assert len({row for row, _, _ in places}) == 1
            assert touched == held[extent_id]
    for records in (extents.several, extents.pieces, extents.pinned_parts):
        assert all(extents.states[extent_id] != FREE for extent_id in records)
    assert all(extents.pins[extent_id] for extent_id in extents.pinned_parts)
