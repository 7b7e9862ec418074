"""A storage unit that copies within its arena, as it is ordered."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from dataplane.config import MIB
from dataplane.ledger import commands as c
from dataplane.storage import compaction
from tests.storage.unit_under_test import UNIT, WAIT_S, Peer, Unit, noise, read

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


def test_long_ranges_are_copied_and_forced_in_parts(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "STEP_BYTES", 1000)
    monkeypatch.setattr(compaction, "STEP_RANGES", 3)
    before = noise(MIB)
    unit.arena.data[:MIB] = before
    ranges = [(0, MIB, 2500), (64_000, MIB + 64_000, 700)]
    ranges += [(128_000 + 64 * i, MIB + 128_000 + 64 * i, 60) for i in range(5)]
    fsynced: list[list[tuple[int, int]]] = []

    def force(offsets: Iterable[int], sizes: Iterable[int]) -> None:
        parts = list(zip(offsets, sizes, strict=True))
        assert unit.reports.empty(), "reported before all is on the disk"
        for offset, size in parts:
            assert (unit.arena.data[offset : offset + size] == before[offset - MIB : offset - MIB + size]).all()
        fsynced.append(parts)

    monkeypatch.setattr(unit.arena, "fsynced", True)
    monkeypatch.setattr(unit.arena, "force", force)
    unit.server.order(order(1, *ranges))
    assert report(unit) == (UNIT, 1, None)
    assert all(sum(size for _, size in parts) <= 1000 and len(parts) <= 3 for parts in fsynced)
    covered = {byte for parts in fsynced for offset, size in parts for byte in range(offset, offset + size)}
    assert covered == {byte for _, target, size in ranges for byte in range(target, target + size)}


def test_requests_are_served_while_a_long_range_is_copied(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step ends when a request is there; the second does when it has been answered."""
    monkeypatch.setattr(compaction, "STEP_BYTES", MIB // 2)
    copying, answered = threading.Event(), threading.Event()
    steps: list[bool] = []

    def force(offsets: Iterable[int], sizes: Iterable[int]) -> None:
        copying.set()
        steps.append(bool(unit.server._router.poll(WAIT_S * 1000)) if not steps else answered.wait(WAIT_S))

    monkeypatch.setattr(unit.arena, "fsynced", True)
    monkeypatch.setattr(unit.arena, "force", force)
    with Peer(unit) as peer:
        unit.server.order(order(1, (0, MIB, MIB)))
        assert copying.wait(WAIT_S)
        peer.send(read=read((0, 64)))
        payload = peer.reply()[1]
        answered.set()
    assert b"".join(payload) == bytes(64)
    assert report(unit) == (UNIT, 1, None)
    assert steps == [True, True]


def test_a_disk_that_fails_is_reported_and_ends_the_copying(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "STEP_BYTES", 1000)

    def force(offsets: Iterable[int], sizes: Iterable[int]) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(unit.arena, "fsynced", True)
    monkeypatch.setattr(unit.arena, "force", force)
    unit.server.order(order(1, (0, MIB, 2500)))
    assert "Input/output" in (report(unit)[2] or "")


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
