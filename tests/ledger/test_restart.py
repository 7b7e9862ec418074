"""A ledger that goes on in a new run of its service."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.core.types import PROTOCOL_VERSION
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.ledger.driver import Driver, by_ids, handles


def restarted(driver: Driver, epoch: int = 8) -> None:
    """The driver goes on with a ledger made from the image of the one it had."""
    driver.ledger = Ledger.restored(driver.ledger.image())
    settings = {"reserve_fraction": 0.15, "heartbeat_s": 2.0, "session_timeout_s": 20.0}
    driver.apply(c.Restarted(epoch=epoch, **settings))
    driver.take_orders()


def test_rows_sessions_and_answers_are_there() -> None:
    driver = Driver()
    client = driver.client(attach=[1])
    client.register()
    put = client.put(["a", "b"], {"x": [10, 20]})
    restarted(driver)
    located = client.call(c.Located, c.Locate(partition="p", samples=handles(put), fields=("x",)))
    assert located.fields[0].lengths.tolist() == [10, 20]
    assert driver.ledger.epoch == 8


def test_units_get_no_rows_before_they_offer_themselves_again() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    client.put(["a"], {"x": [10]})
    restarted(driver)
    waiting = client.waits(client.allocate({"x": [10]}))
    assert driver.add_unit(name="unit0").unit == 1
    assert isinstance(client.result(waiting), c.Allocated)


def test_a_parked_claim_goes_on_and_its_repetition_joins_it() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    driver.tick(1.0)
    claim = client.claim(1, ["x"], timeout_s=10.0)
    number = client.waits(claim)
    restarted(driver)
    driver.add_unit(name="unit0")
    client.post(claim, number=number)
    assert client.result(number) is None
    client.put(["a"], {"x": [1]})
    claimed = client.result(number)
    assert isinstance(claimed, c.Claimed)
    assert claimed.ids == ("a",)


def test_leases_begin_again_in_full() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    client.put(["a", "b"], {"x": [1, 1]})
    client.call(c.Claimed, client.claim(1, ["x"], lease_s=10.0))
    driver.tick(6.0)
    client.call(c.Claimed, client.claim(1, ["x"], lease_s=10.0))
    driver.tick(9.0)
    restarted(driver)
    driver.apply(c.Heartbeat(session=client.session))
    driver.tick(18.9)
    assert client.call(c.Claimed, client.claim(2, ["x"], blocking=False)).ids == ()
    driver.tick(19.0)
    assert client.call(c.Claimed, client.claim(2, ["x"], blocking=False)).ids == ("a", "b")


def test_an_extended_lease_begins_again_with_its_extension() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    client.put(["a"], {"x": [1]})
    claimed = client.call(c.Claimed, client.claim(1, ["x"], lease_s=2.0))
    client.extend(claimed, lease_s=15.0)
    driver.tick(1.0)
    restarted(driver)
    driver.tick(15.9)
    assert client.call(c.Claimed, client.claim(1, ["x"], blocking=False)).ids == ()
    driver.tick(16.0)
    assert client.call(c.Claimed, client.claim(1, ["x"], blocking=False)).ids == ("a",)


def test_a_session_nobody_hears_of_again_is_given_up_after_its_full_time() -> None:
    driver = Driver(session_timeout_s=20.0, heartbeat_s=2.0)
    client = driver.client()
    client.register()
    client.put(["a"], {"x": [1]})
    client.call(c.Located, c.Locate(partition="p", samples=by_ids("a"), fields=("x",)))
    driver.tick(19.0)
    restarted(driver)
    other = driver.client("other")
    for now in range(20, 39):
        driver.tick(float(now))
        driver.apply(c.Heartbeat(session=other.session))
    stats = other.call(c.StatsReport, c.Stats())
    assert {session.session: session.state for session in stats.sessions}[client.session] == "silent"
    driver.tick(39.5)
    stats = other.call(c.StatsReport, c.Stats())
    assert {session.session: session.state for session in stats.sessions}[client.session] == "ending"


def test_a_dead_local_session_is_found_out_once_its_unit_is_back() -> None:
    driver = Driver()
    client = driver.client(attach=[1])
    restarted(driver)
    driver.add_unit(name="unit0")
    driver.take_orders()
    driver.tick(10.0)
    assert driver.fences() == [(1, client.session)]


def test_epochs_only_grow() -> None:
    with pytest.raises(ValueError, match="epoch 7 must be greater than the current epoch 7"):
        restarted(Driver(), epoch=7)


def test_generations_of_a_later_state_come_after_those_of_an_earlier_one() -> None:
    """So that a meta of a state that was lost is stale, and never another sample's."""
    generations = []
    for epoch in (1_760_000_000_000_000_000, 1_760_000_001_000_000_000):
        ledger = Ledger(epoch)
        driver = Driver(units=0)
        driver.ledger = ledger
        client = driver.client()
        client.register()
        put = client.put([f"s{i}" for i in range(1000)], tags={"t": list(range(1000))})
        generations.append(put.generations)
    assert int(np.max(generations[0])) < int(np.min(generations[1]))


def test_a_session_opens_once_across_lives() -> None:
    driver = Driver()
    opening = c.OpenSession(nonce="n", host="h", name="c", protocol_version=PROTOCOL_VERSION)
    first = driver.apply(opening)[0]
    restarted(driver)
    second = driver.apply(opening)[0]
    assert isinstance(first, c.Opened)
    assert isinstance(second, c.Opened)
    assert (second.session, second.epoch) == (first.session, 8)
