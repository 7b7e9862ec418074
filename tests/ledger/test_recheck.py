"""After a crash of its machine a storage unit's rows are compared with their checksums, page by page."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import SampleNotFoundError
from dataplane.ledger import commands as c
from dataplane.ledger.samples import scrub as module
from tests.ledger.driver import Client, Driver, by_ids
from tests.ledger.test_integrity import put, sums


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(module, "PAGE_ROWS", 3)
    return Driver(units=2)


@pytest.fixture
def client(driver: Driver) -> Client:
    made = driver.client(host="far")
    made.register()
    return made


def crash(driver: Driver, unit: int, epoch: int = 2) -> list[c.CheckRows]:
    """The machine of a unit crashed and is back; what the unit is ordered to check."""
    driver.apply(c.UnitLost(unit=unit))
    driver.take_orders()
    driver.add_unit(name=f"unit{unit - 1}", unit=unit, host="anew", epoch=epoch, recheck=True)
    return pages(driver)


def pages(driver: Driver) -> list[c.CheckRows]:
    return [order for order in driver.take_orders() if isinstance(order, c.CheckRows)]


def check(driver: Driver, page: c.CheckRows, *wrong: int) -> list[c.CheckRows]:
    """The unit reports which places of a page are damaged; what it is ordered next."""
    places = np.array(wrong, np.int64)
    driver.apply(
        c.RowsChecked(
            unit=page.unit,
            partition=page.partition,
            field=page.field,
            last=int(page.rows[-1]),
            rows=page.rows[places],
            generations=page.generations[places],
            offsets=page.offsets[places],
        )
    )
    return pages(driver)


def fill(client: Client, count: int) -> list[str]:
    """Samples whose checksums are 1, 2, ..."""
    names = [f"s{number}" for number in range(count)]
    put(client, names, sums(*range(1, count + 1)))
    return names


def test_every_row_of_the_unit_is_checked_once_where_it_is(driver: Driver, client: Client) -> None:
    names = fill(client, 8)
    put(client, ["without"], None)
    put(client, ["shared", "too"], sums(50), index=[0, 0])
    found = client.locate(by_ids(*names, "shared", "too")).fields[0]
    expected = set(zip(found.units.tolist(), found.offsets.tolist(), [*range(1, 9), 50, 50], strict=True))
    seen = []
    for unit in (1, 2):
        orders = crash(driver, unit)
        while orders:
            (page,) = orders
            assert len(page.rows) <= 3
            assert (page.unit, page.partition, page.field, set(page.sizes.tolist())) == (unit, "p", "x", {8})
            seen += [(unit, *place) for place in zip(page.offsets.tolist(), page.checksums.tolist(), strict=True)]
            orders = check(driver, page)
    assert set(seen) == expected
    assert len(seen) == 10


def test_damaged_samples_go_and_are_named(driver: Driver, client: Client) -> None:
    names = fill(client, 5)
    unit = int(client.locate(by_ids(*names)).fields[0].units[0])
    (page,) = crash(driver, unit)
    driver.take_orders()
    check(driver, page, 1)
    with pytest.raises(SampleNotFoundError, match="lost to damage in storage unit"):
        client.locate(by_ids(names[1]))
    client.locate(by_ids(*names[:1], *names[2:]))


def test_what_goes_is_named_in_the_log(driver: Driver, client: Client) -> None:
    names = fill(client, 3)
    (page,) = crash(driver, int(client.locate(by_ids(*names)).fields[0].units[0]))
    driver.apply(
        c.RowsChecked(
            unit=page.unit,
            partition="p",
            field="x",
            last=int(page.rows[-1]),
            rows=page.rows[:2],
            generations=page.generations[:2],
            offsets=page.offsets[:2],
        )
    )
    (notice,) = [order for order in driver.take_orders() if isinstance(order, c.Notice)]
    assert "samples of partition 'p' are lost (2 in total): " in notice.text
    assert "'s0', 's1'" in notice.text


def test_what_was_written_again_or_is_another_by_now_stays(driver: Driver, client: Client) -> None:
    names = fill(client, 3)
    (page,) = crash(driver, int(client.locate(by_ids(*names)).fields[0].units[0]))
    put(client, names[:1], sums(9))
    client.clear(names[1])
    fresh = c.Samples(ids=("fresh",))
    client.put(fresh, {"x": [8]})
    check(driver, page, 0, 1)
    client.locate(by_ids(names[0], names[2], "fresh"))


def test_a_check_that_was_broken_off_begins_again_and_a_finished_one_does_not(driver: Driver, client: Client) -> None:
    names = fill(client, 4)
    unit = int(client.locate(by_ids(*names)).fields[0].units[0])
    (first,) = crash(driver, unit)
    (again,) = crash(driver, unit)
    assert again.rows.tolist() == first.rows.tolist()
    orders = [again]
    while orders:
        orders = check(driver, orders[0])
    assert crash(driver, unit) == []
    assert crash(driver, unit, epoch=3)


def test_the_end_of_what_is_being_checked_ends_nothing_else(driver: Driver, client: Client) -> None:
    names = fill(client, 4)
    unit = int(client.locate(by_ids(*names)).fields[0].units[0])
    (page,) = crash(driver, unit)
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    assert check(driver, page, 0) == []
    driver.apply(c.DropUnit(unit=unit, force=True))
    assert check(driver, page, 0) == []
