"""Samples that are lost with a storage unit: whoever asks for one is told with which."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import SampleNotFoundError, StaleSampleError, from_wire, to_wire
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.tombstones import REMEMBERED
from tests.ledger.driver import Client, Driver, by_ids, handles
from tests.ledger.fingerprint import fingerprint


def two_units(**settings: object) -> tuple[Driver, Client]:
    driver = Driver(units=2, **settings)
    client = driver.client()
    client.register()
    return driver, client


def told(client: Client, samples: c.Samples, kind: type[Exception] = SampleNotFoundError) -> str:
    with pytest.raises(kind) as caught:
        client.locate(samples)
    (error,) = [caught.value]
    assert str(from_wire(*to_wire(error))) == str(error)
    return str(error)


def test_who_asks_for_a_lost_sample_is_told_which_unit_had_it() -> None:
    driver, client = two_units()
    here = client.put(["a", "b"], {"x": [8, 8]}, unit_wish=1)
    client.put(["c"], {"x": [8]}, unit_wish=2)
    client.clear("b")
    client.do(c.Forget(unit=1, force=True))
    assert "(1 of them were lost with storage unit 1 (unit0))" in told(client, by_ids("a", "b", "never"))
    assert "(1 of them were lost with storage unit 1 (unit0))" in told(client, handles(here), StaleSampleError)
    assert "lost" not in told(client, by_ids("b", "never"))
    driver.apply(c.DropUnit(unit=2, force=True))
    both = told(client, by_ids("a", "c"))
    assert "(2 of them were lost with storage unit 1 (unit0), with storage unit 2 (unit1))" in both


def test_it_is_remembered_by_a_ledger_that_lives_again_and_by_one_that_replays() -> None:
    driver, client = two_units()
    client.put(["a"], {"x": [8]}, unit_wish=1)
    client.do(c.Forget(unit=1, force=True))
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)
    driver.ledger = Ledger.restored(driver.ledger.image())
    assert "lost with storage unit 1 (unit0)" in told(client, by_ids("a"))


def test_an_id_that_lives_again_is_not_lost_any_more() -> None:
    _, client = two_units()
    before = client.put(["a", "b"], {"x": [8, 8]}, unit_wish=1)
    client.do(c.Forget(unit=1, force=True))
    client.put(["a"], {"x": [8]})
    client.clear("a")
    assert "lost" not in told(client, by_ids("a"))
    assert "(1 of them were lost" in told(client, handles(before), StaleSampleError)


def test_a_place_that_is_taken_by_the_same_arena_anew_is_told_too() -> None:
    driver, client = two_units()
    client.put(["a"], {"x": [8]}, unit_wish=1)
    driver.apply(c.UnitLost(unit=1))
    driver.add_unit(name="unit9", instead_of="cookie-unit0")
    assert "lost with storage unit 1 (unit0)" in told(client, by_ids("a"))


def test_the_last_so_many_are_remembered() -> None:
    driver, client = two_units(capacity=64 << 20)
    count = REMEMBERED + 10
    client.put([f"s{number}" for number in range(count)], {"x": [8] * count}, unit_wish=1)
    client.do(c.Forget(unit=1, force=True))
    assert "lost" not in told(client, by_ids("s0", "s9"))
    assert "(2 of them were lost" in told(client, by_ids("s9", "s10", f"s{count - 1}"))
    client.put(["one", "more"], {"x": [8, 8]}, unit_wish=2)
    client.do(c.Forget(unit=2, force=True))
    lost = partition(driver).lost
    assert lost is not None
    assert len(lost.generations) == len(lost.causes) == REMEMBERED
    assert "lost" not in told(client, by_ids("s10", "s11"))
    assert "(2 of them were lost" in told(client, by_ids("s12", "more"))


def test_nothing_is_remembered_of_a_unit_that_was_empty() -> None:
    driver, client = two_units()
    client.put(["a"], {"x": [8]}, unit_wish=2)
    client.do(c.Forget(unit=1))
    assert partition(driver).lost is None
    client.clear("a")
    assert "lost" not in told(client, by_ids("a"))


def partition(driver: Driver) -> Partition:
    return driver.ledger._state.partition("p")


def test_generations_that_were_never_lost_are_not_among_them() -> None:
    driver, client = two_units()
    put = client.put(["a"], {"x": [8]}, unit_wish=1)
    client.do(c.Forget(unit=1, force=True))
    lost = partition(driver).lost
    assert lost is not None
    assert lost.among_generations(np.array([int(put.generations[0]) + 1, 0])) == []
    assert lost.causes_of(lost.among_generations(put.generations)) == ("with storage unit 1 (unit0)",)
