"""Storage units: joining, coming back, being lost and dropped."""

from __future__ import annotations

import pytest

from dataplane.errors import InvalidRequestError, StorageUnitError
from dataplane.ledger import commands as c
from tests.ledger.driver import MIB, Driver, by_ids, commit_columns


@pytest.fixture
def driver() -> Driver:
    return Driver(units=2)


def test_a_live_cookie_twice_is_refused(driver: Driver) -> None:
    assert isinstance(driver.add_unit(name="unit0", capacity=MIB).error, InvalidRequestError)
    driver.apply(c.UnitLost(unit=1))
    again = driver.add_unit(name="unit0", capacity=MIB)
    assert (again.unit, again.error) == (1, None)
    driver.apply(c.UnitLost(unit=1))
    assert isinstance(driver.add_unit(name="unit0", capacity=MIB, epoch=0).error, InvalidRequestError)
    assert isinstance(driver.add_unit(name="unit0", capacity=2 * MIB).error, InvalidRequestError)


def test_units_are_listed_with_their_present_epoch(driver: Driver) -> None:
    driver.add_unit(name="unit1", capacity=MIB, epoch=5)
    client = driver.client()
    units = client.call(c.UnitList, c.Units()).units
    assert [(unit.unit, unit.epoch, unit.name) for unit in units] == [(1, 1, "unit0"), (2, 5, "unit1")]


def test_a_new_epoch_frees_nothing_that_a_living_session_holds(driver: Driver) -> None:
    """Its client may have learned of the new epoch before it uses what the old one's answers told it."""
    remote, local = driver.client("remote", host="far"), driver.client("local", attach=[1])
    remote.register()
    for client in (remote, local):
        client.put([f"{client.session}"], {"x": [64]})
        client.raw(client.allocate({"x": [64]}, unit_wish=1))
        client.locate(by_ids(f"{client.session}"))
    held = {client: client.number for client in (remote, local)}
    assert remote.used(1) + remote.used(2) == 4 * 64
    driver.add_unit(name="unit0", capacity=MIB, epoch=2)
    driver.add_unit(name="unit1", capacity=MIB, epoch=2)
    stats = remote.stats()
    assert sum(unit.reserved_bytes for unit in stats.units) == 128
    assert sum(unit.live_bytes for unit in stats.units) == 128
    assert sum(unit.pinned_bytes for unit in stats.units) == 128
    for client, located in held.items():
        client.do(c.Release(located=located))
        client.do(c.Abort(reservation=located - 1))
    stats = remote.stats()
    assert sum(unit.reserved_bytes + unit.pinned_bytes for unit in stats.units) == 0


def test_a_unit_with_live_rows_is_dropped_under_force_only(driver: Driver) -> None:
    client = driver.client("holder", attach=[1, 2])
    client.register()
    for i, unit in enumerate((1, 2)):
        number = client.post(client.allocate({"x": [64]}, unit_wish=unit))
        client.call(
            c.Committed,
            c.Commit(
                partition="p",
                samples=by_ids(f"s{i}"),
                mode=c.Mode.CREATE,
                reservation=number,
                columns=commit_columns({"x": [64]}),
            ),
        )
    client.locate(by_ids("s0", "s1"))
    located = client.number
    doomed = client.post(client.allocate({"x": [64]}, unit_wish=1))
    (refused,) = driver.apply(c.DropUnit(unit=1))
    assert isinstance(refused, c.UnitDropped)
    assert isinstance(refused.error, InvalidRequestError)
    (dropped,) = driver.apply(c.DropUnit(unit=1, force=True))
    assert isinstance(dropped, c.UnitDropped)
    assert dropped.error is None
    assert client.call(c.Listed, c.List(partition="p")).ids == ("s1",)
    command = c.Commit(
        partition="p",
        samples=by_ids("s9"),
        mode=c.Mode.CREATE,
        reservation=doomed,
        columns=commit_columns({"x": [64]}),
    )
    with pytest.raises(StorageUnitError):
        client.raise_(command)
    client.clear("s1")
    client.do(c.Release(located=located))
    assert client.used(2) == 0
    assert isinstance(driver.apply(c.DropUnit(unit=1))[0], c.UnitDropped)
    assert driver.add_unit(name="unit0", capacity=MIB).unit == 3


def test_dropping_a_unit_ends_the_wait_for_its_proof(driver: Driver) -> None:
    client, other = driver.client("holder", attach=[1]), driver.client()
    client.register()
    client.raw(client.allocate({"x": [64]}))
    client.do(c.Bye())
    assert len(other.stats().sessions) == 2
    driver.apply(c.DropUnit(unit=1))
    assert [s.session for s in other.stats().sessions] == [other.session]


@pytest.mark.parametrize("cookie", ["", "never heard of"])
def test_a_unit_that_lost_its_record_takes_the_place_of_what_its_name_had(driver: Driver, cookie: str) -> None:
    client = driver.client()
    client.register()
    for unit in (1, 2):
        client.put([f"s{unit}"], {"x": [64]}, unit_wish=unit)
    for unit in (1, 2):
        driver.apply(c.UnitLost(unit=unit))
    driver.add_unit(name="more", capacity=MIB)
    again = {"cookie": "another", "instead_of": cookie}
    assert driver.offer("unit0", **again).unit == 4
    assert client.call(c.Listed, c.List(partition="p")).ids == ("s1", "s2"), "it did not say so"
    driver.apply(c.UnitLost(unit=4))
    assert driver.offer("unit0", anew=True, **{**again, "cookie": "the third"}).unit == 5
    assert [unit.unit for unit in client.call(c.UnitList, c.Units()).units] == [2, 3, 5]
    assert client.call(c.Listed, c.List(partition="p")).ids == ("s2",)
    assert driver.offer("unit0", anew=True, cookie="the fourth").unit == 6
    assert 5 in [unit.unit for unit in client.stats().units], "a unit that is there is never taken for lost"


def test_of_units_of_one_name_the_one_of_its_host_is_lost(driver: Driver) -> None:
    client = driver.client()
    driver.offer("unit0", cookie="far", host="there")
    for unit in (1, 3):
        driver.apply(c.UnitLost(unit=unit))
    driver.offer("unit0", cookie="new", host="there", anew=True)
    assert [unit.unit for unit in client.call(c.UnitList, c.Units()).units] == [1, 2, 4]


def test_what_a_lost_arena_held_goes_when_its_unit_begins_anew(driver: Driver) -> None:
    client = driver.client()
    client.register()
    for unit in (1, 2):
        client.put([f"s{unit}"], {"x": [64]}, unit_wish=unit)
    refused = driver.add_unit(name="anew", instead_of="cookie-unit0")
    assert isinstance(refused.error, InvalidRequestError)
    assert "unit 1" in str(refused.error)
    driver.apply(c.UnitLost(unit=1))
    added = driver.add_unit(name="anew", instead_of="cookie-unit0")
    assert (added.unit, added.error) == (3, None)
    assert [unit.unit for unit in client.call(c.UnitList, c.Units()).units] == [2, 3]
    assert client.call(c.Listed, c.List(partition="p")).ids == ("s2",)
    assert driver.add_unit(name="another", instead_of="never heard of").error is None
