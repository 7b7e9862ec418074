"""Draining, as steps of an operation: what is done where there is no space."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.client.operations.drain_unit import _handle_lack_of_space, _Progress
from dataplane.client.operations.steps import Send
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import CapacityTimeoutError
from dataplane.ledger import commands as c

NO_SPACE = CapacityTimeoutError(wanted_bytes=64, free_bytes=0, waited_s=0.0, holders=[])


def page(*lengths: int) -> c.FoundCells:
    numbers = np.arange(len(lengths), dtype=np.int64)
    return c.FoundCells(
        partition="p",
        field="x",
        spec=FieldSpec(FieldKind.JAGGED, "uint8", ()),
        rows=numbers,
        generations=numbers + 1,
        index=numbers,
        offsets=numbers * 64,
        lengths=np.array(lengths, np.int64),
        live={},
    )


@pytest.mark.parametrize("lengths", [(0, 0), (1, 0), (5, 7, 9), (64 << 20, 64 << 20)])
def test_pages_get_smaller_until_space_is_waited_for(lengths: tuple[int, ...]) -> None:
    """Also where they cannot: values of no bytes take space of an open unit, too."""
    progress = _Progress(1, timeout_s=60.0)
    progress.page = page(*lengths)
    steps = (next(_handle_lack_of_space(progress, NO_SPACE), None) for _ in range(40))
    asked = next(step for step in steps if step is not None)
    assert isinstance(asked, Send)
    assert isinstance(asked.command, c.Allocate)
    assert asked.command.on_full is c.OnFull.WAIT
    assert asked.command.moving
