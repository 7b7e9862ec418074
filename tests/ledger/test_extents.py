"""Stored bytes: sharing, versions, trimming, pins; nothing in use is ever free."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.core.types import FieldKind, FieldSpec
from dataplane.ledger import commands as c
from dataplane.ledger.state.extents import Extents, Several
from dataplane.ledger.state.fields import Field
from tests.ledger.driver import BYTES, Client, Driver, by_ids, commit_columns, handles


@pytest.fixture
def client() -> Client:
    client = Driver().client()
    client.register()
    return client


def test_an_extent_gives_its_dead_granules_back_when_less_than_half_is_live(client: Client) -> None:
    ids = [f"s{i}" for i in range(8)]
    client.put(ids, {"x": [100] * 8})
    assert client.used() == 832
    client.clear("s0", "s1", "s2", "s3")
    assert client.used() == 832
    client.clear("s4")
    # Left: [500, 800), which touches the granules [448, 832).
    assert client.used() == 384
    client.clear("s6")
    assert client.used() == 384
    client.clear("s7")
    # Left: [500, 600), granules [448, 640).
    assert client.used() == 192
    assert client.locate(by_ids("s5")).fields[0].offsets.tolist() == [500]
    client.do(c.Release(located=client.number))
    client.clear("s5")
    assert client.used() == 0
    assert client.driver.ledger.free_ranges(1) == [(0, 1 << 20)]


def test_a_pinned_extent_is_trimmed_when_its_reader_has_gone(client: Client) -> None:
    client.put(["a", "b", "c"], {"x": [64, 64, 64]})
    client.locate(by_ids("b"))
    located = client.number
    client.clear("a", "b")
    assert client.used() == 192
    client.do(c.Release(located=located))
    assert client.used() == 64
    client.do(c.Release(located=located))
    assert client.used() == 64


def test_a_pinned_extent_is_retired_and_then_freed(client: Client) -> None:
    client.put(["a", "b"], {"x": [64, 64], "y": [64, 64]})
    client.locate(by_ids("a", "b"))
    first = client.number
    client.locate(by_ids("a"))
    second = client.number
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    stats = client.unit()
    assert (stats.live_bytes, stats.retired_bytes, stats.pinned_bytes) == (0, 128 + 128 - 128, 128)
    client.do(c.Release(located=first))
    assert client.used() == 128
    client.do(c.Release(located=second))
    assert client.used() == 0


def test_shared_values_live_as_long_as_any_row_points_at_them(client: Client) -> None:
    client.put(["a", "b", "c", "d"], {"x": [64, 128]}, index=[0, 0, 1, 1])
    assert client.used() == 192
    found = client.locate(by_ids("a", "b", "c", "d")).fields[0]
    assert found.offsets.tolist() == [0, 0, 64, 64]
    assert found.lengths.tolist() == [64, 64, 128, 128]
    client.do(c.Release(located=client.number))
    client.clear("c")
    assert client.used() == 192
    client.clear("d")
    # Two of six granules' worth of cells are left: the second value goes.
    assert client.used() == 64
    client.clear("a")
    assert client.used() == 64
    client.clear("b")
    assert client.used() == 0


def test_one_shared_value(client: Client) -> None:
    client.put(["a", "b"], {"x": [100]}, index=[0, 0])
    client.clear("a")
    assert client.used() == 128
    client.clear("b")
    assert client.used() == 0


def test_values_nobody_points_at_are_freed_with_their_extent(client: Client) -> None:
    client.put(["a"], {"x": [64, 64]}, index=[1])
    assert client.locate(by_ids("a")).fields[0].offsets.tolist() == [64]
    client.do(c.Release(located=client.number))
    client.clear("a")
    assert client.used() == 0


def test_empty_values_take_no_space(client: Client) -> None:
    client.put(["a", "b"], {"x": [0, 0], "y": [0, 5]})
    assert client.used() == 64
    found = client.locate(by_ids("a", "b"), ["x", "y"])
    assert found.fields[0].lengths.tolist() == [0, 0]
    client.do(c.Release(located=client.number))
    client.clear("a")
    client.locate(by_ids("b"), ["x"])
    client.clear("b")
    assert client.used() == 0


def test_an_empty_put_is_legal(client: Client) -> None:
    made = client.put([], {"x": []})
    assert len(made.rows) == 0
    assert client.used() == 0


def test_columns_of_one_put_lie_together_each_on_its_own_granules(client: Client) -> None:
    number = client.post(client.allocate({"x": [10, 20], "y": [100], "z": [1]}))
    got = client.result(number)
    assert isinstance(got, c.Allocated)
    assert [(p.column, p.first, p.last, p.offset) for p in got.placements] == [
        (0, 0, 2, 0),
        (1, 0, 1, 64),
        (2, 0, 1, 192),
    ]
    client.do(c.Abort(reservation=number))
    assert client.used() == 0


def test_rewriting_half_of_a_put_trims_it(client: Client) -> None:
    made = client.put(["a", "b", "c"], {"x": [64, 64, 64]})
    client.put(["a", "b"], {"x": [64, 64]})
    assert client.used() == 64 + 128
    found = client.locate(handles(made)).fields[0].offsets.tolist()
    assert found[2] == 128
    assert sorted(found[:2]) == found[:2]


def test_partition_and_unit_agree_on_live_bytes(client: Client) -> None:
    client.put([f"s{i}" for i in range(16)], {"x": list(range(16)), "y": [100] * 16})
    client.clear(*[f"s{i}" for i in range(11)])
    client.put(["s12", "s13"], {"y": [7, 7]})
    stats = client.stats()
    assert stats.partitions[0].live_bytes == stats.units[0].live_bytes
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    assert client.used() == 0


def test_neighbours_of_many_puts_come_back_as_one_range(client: Client) -> None:
    for i in range(50):
        client.put([f"s{i}"], {"x": [64], "y": [1]})
    client.clear(*[f"s{i}" for i in range(0, 50, 2)])
    assert client.used() == 25 * 128
    client.clear(*[f"s{i}" for i in range(50)])
    assert client.driver.ledger.free_ranges(1) == [(0, 1 << 20)]
    assert client.driver.ledger.held_ranges() == []


def test_split_columns_count_every_piece() -> None:
    driver = Driver(capacity=1024, reserve_fraction=0.0)
    client = driver.client()
    client.register()
    for i in range(8):
        client.put([f"s{i}"], {"x": [128]})
    client.clear("s1", "s3", "s5", "s6")
    spec = FieldSpec(FieldKind.JAGGED, "int64", ())
    number = client.post(client.allocate({"w": [64, 64, 128, 128, 128]}))
    got = client.result(number)
    assert isinstance(got, c.Allocated)
    assert [(p.first, p.last) for p in got.placements] == [(0, 3), (3, 4), (4, 5)]
    client.call(
        c.Committed,
        c.Commit(
            partition="p",
            samples=by_ids("a", "b", "c", "d", "e"),
            mode=c.Mode.CREATE,
            reservation=number,
            columns=commit_columns({"w": [8, 8, 16, 16, 16]}, spec=spec),
        ),
    )
    found = client.locate(by_ids("a", "b", "c", "d", "e"), ["w"]).fields[0]
    assert len(set(found.offsets.tolist())) == 5
    client.do(c.Release(located=client.number))
    client.clear("b", "d")
    # The first piece keeps two of its three values; the one that held only "d" is free.
    assert client.used() == 512 + 64 * 4 + 128
    client.clear("a", "c", "e", "s0", "s2", "s4", "s7")
    assert client.used() == 0


def test_freeing_twice_is_a_defect_that_is_noticed() -> None:
    driver = Driver()
    extents: Extents = driver.ledger._state.extents
    offset = extents.all_units[1].space.take(64)
    assert offset is not None
    numbers = np.array([extents.reserve(1, offset, 64)], np.int32)
    extents.free(numbers)
    extents.sizes[numbers] = 64
    with pytest.raises(AssertionError):
        extents.free(numbers)


def test_trimming_keeps_granules_that_two_rows_share() -> None:
    driver = Driver()
    extents: Extents = driver.ledger._state.extents
    field = Field(BYTES, 8)
    field.settle(BYTES)
    rows = np.arange(3)
    offset = extents.all_units[1].space.take(192)
    assert offset == 0
    number = extents.reserve(1, 0, 192)
    lengths = np.array([96, 10, 80])
    field.write(rows, np.full(3, number, np.int32), np.array([0, 96, 106]), lengths, None)
    account = extents.open_account()
    account.live_bytes = 192
    extents.make_live(number, 3, Several(field, rows, 186, account))
    extents.release_cells(*field.erase(np.array([0])), account)
    assert extents.ranges() == [(1, 64, 128)]
    extents.release_cells(*field.erase(np.array([2])), account)
    assert extents.ranges() == [(1, 64, 64)]
    assert account.live_bytes == 64
