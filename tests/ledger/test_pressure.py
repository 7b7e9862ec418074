"""Watermarks of units and budgets: word of it once on the way up and once on the way down, and the peaks."""

from __future__ import annotations

import pytest

from dataplane.config import DataPlaneConfig
from dataplane.ledger import commands as c
from dataplane.ledger.allocation.budgets import Pressure
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.units import Unit
from tests.ledger.driver import Client, Driver

KIB = 1024


def half(**settings: object) -> tuple[Driver, Client]:
    """An arena of 100 KiB whose watermarks are 20 and 50 percent; nothing in reserve."""
    settings = {"reserve_fraction": 0.0, "low_watermark": 0.2, "high_watermark": 0.5, **settings}
    driver = Driver(capacity=100 * KIB, **settings)  # type: ignore[arg-type]
    client = driver.client()
    client.register()
    return driver, client


def told(driver: Driver) -> list[tuple[bool, str]]:
    return [(o.warning, o.text) for o in driver.take_orders() if isinstance(o, c.Notice)]


def test_a_unit_that_fills_up_is_told_of_once_until_it_is_down_again() -> None:
    driver, client = half()
    client.put(["a"], {"x": [30 * KIB]})
    assert not told(driver)
    client.put(["b"], {"x": [20 * KIB]})
    text = "storage unit 1 (unit0) is 50% full: 51,200 of the 102,400 bytes for new rows are used"
    assert told(driver) == [(True, text)]
    assert client.unit().pressed
    client.put(["c"], {"x": [10 * KIB]})
    client.clear("a")
    client.put(["d"], {"x": [30 * KIB]})
    assert not told(driver)
    assert client.unit().pressed
    client.clear("b", "d")
    assert [warning for warning, _ in told(driver)] == [False]
    stats = client.unit()
    assert (stats.pressed, stats.used_bytes, stats.peak_used_bytes) == (False, 10 * KIB, 60 * KIB)
    report = client.stats()
    assert (report.low_watermark, report.high_watermark) == (0.2, 0.5)


def test_updates_that_take_of_the_reserve_make_it_no_more_than_full() -> None:
    driver, client = half(reserve_fraction=0.2, high_watermark=1.0)
    client.put(["a"], {"x": [70 * KIB]})
    assert not told(driver)
    client.put(["a"], {"y": [20 * KIB]}, update=True)
    text = "storage unit 1 (unit0) is 100% full: all 81,920 bytes for new rows are used, and 10,240 more"
    assert told(driver) == [(True, text)]


def test_budgets_have_watermarks_of_their_own() -> None:
    driver, client = half(reserve_fraction=0.2)
    client.register("q", budget_bytes=10 * KIB)
    client.put(["a"], {"x": [4 * KIB]}, partition="q")
    assert [text for _, text in told(driver)] == [
        "partition 'q' is 50% full: 4,096 of the 8,192 bytes of its budget for new rows are used"
    ]
    client.register("q", budget_bytes=100 * KIB)
    assert [warning for warning, _ in told(driver)] == [False]
    client.register("q", budget_bytes=5 * KIB)
    assert [warning for warning, _ in told(driver)] == [True]
    client.register("q")
    assert not client.stats().partitions[1].pressed
    client.clear("a", partition="q")
    assert not told(driver)


def test_a_dropped_partition_is_watched_no_more() -> None:
    driver, client = half()
    client.register("q", budget_bytes=10 * KIB)
    client.call(c.Cleared, c.Clear(partition="q", samples=None))
    client.put(["a"], {"x": [4 * KIB]})
    assert not driver.ledger._state.budgeted


def test_what_was_said_is_not_said_again_after_a_restart() -> None:
    driver, client = half()
    client.put(["a"], {"x": [60 * KIB]})
    driver.take_orders()
    driver.ledger = driver.ledger.restored(driver.ledger.image())
    client.put(["b"], {"x": [KIB]})
    assert not told(driver)


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.4), (-0.1, 0.4), (0.5, 1.1), (0.0, 0.0)])
def test_impossible_watermarks_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 <= low <= high <= 1"):
        DataPlaneConfig(low_watermark=low, high_watermark=high)


def test_only_budgets_that_are_used_otherwise_now_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, client = half()
    for i in range(20):
        client.register(f"p{i}", budget_bytes=10 * KIB)
        client.put(["a"], {"x": [KIB]}, partition=f"p{i}")
    driver.judged = 0
    looked_at: list[str] = []
    judge = Pressure._update_gauge

    def look(pressure: Pressure, who: Unit | Partition, used: int, limit: int) -> None:
        looked_at.extend([who.name] if isinstance(who, Partition) else [])
        judge(pressure, who, used, limit)

    monkeypatch.setattr(Pressure, "_update_gauge", look)
    client.put(["b"], {"x": [64]})
    client.put(["b"], {"x": [64]}, partition="p3")
    client.clear("b")
    assert set(looked_at) == {"p3"}
