"""A storage unit that copies within its arena, as it is ordered."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.bulk import compaction
from dataplane.config import MIB
from dataplane.ledger import commands as c
from tests.bulk_unit import UNIT, Unit, noise

pytestmark = pytest.mark.integration


@pytest.fixture
def unit() -> Iterator[Unit]:
    with Unit(capacity=4 * MIB, backed=2 * MIB) as running:
        yield running


def order(number: int, *ranges: tuple[int, int, int]) -> c.CompactArena:
    sources, targets, sizes = (np.array(part, np.int64) for part in zip(*ranges, strict=True))
    return c.CompactArena(unit=UNIT, number=number, sources=sources, targets=targets, sizes=sizes)


def report(unit: Unit) -> tuple[int, int, str | None]:
    said = unit.expect(c.Compacted)
    return said.unit, said.number, said.error


def test_ranges_are_copied_step_by_step(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "STEP_BYTES", 100)
    unit.arena.data[: 64 * 100] = noise(64 * 100)
    before = unit.arena.data[: 64 * 100].copy()
    ranges = [(64 * i, MIB + 6400 - 64 * i, 60) for i in range(100)]
    unit.server.order(order(1, *ranges))
    assert report(unit) == (UNIT, 1, None)
    for source, target, size in ranges:
        assert (unit.arena.data[target : target + size] == before[source : source + size]).all()
    assert (unit.arena.data[: 64 * 100] == before).all()


def test_an_order_that_comes_again_is_reported_again_and_copies_nothing(unit: Unit) -> None:
    unit.arena.data[:64] = 1
    unit.server.order(order(3, (0, MIB, 64)))
    assert report(unit) == (UNIT, 3, None)
    unit.arena.data[:64] = 2
    unit.server.order(order(3, (0, MIB, 64)))
    assert report(unit) == (UNIT, 3, None)
    assert (unit.arena.data[MIB : MIB + 64] == 1).all()
    unit.server.order(order(2, (0, MIB, 64)))
    assert "order 3" in (report(unit)[2] or "")
    assert (unit.arena.data[MIB : MIB + 64] == 1).all()


@pytest.mark.parametrize("wrong", [(2 * MIB, 0, 64), (0, 2 * MIB, 64), (-64, 0, 64), (0, 64, -1)])
def test_ranges_that_are_not_backed_are_not_touched(unit: Unit, wrong: tuple[int, int, int]) -> None:
    unit.arena.data[:64] = 1
    unit.server.order(order(1, (0, MIB, 64), wrong))
    first = report(unit)
    assert "backed" in (first[2] or "")
    assert not unit.arena.data[MIB : MIB + 64].any()
    unit.server.order(order(1, (0, MIB, 64), wrong))
    assert report(unit) == first
    unit.server.order(order(2, (0, MIB, 64)))
    assert report(unit) == (UNIT, 2, None)
