"""A log of inputs rebuilds the ledger; its digest sees every difference."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids, handles
from tests.ledger.fingerprint import digest, fingerprint
from tests.ledger.values import canonical


def a_busy_day(driver: Driver, seed: int, steps: int) -> None:
    """Random work by a few clients, some of which die."""
    chance = random.Random(seed)
    clients = [driver.client(f"c{i}", host=f"h{i % 2}", attach=[1] if i % 2 else []) for i in range(4)]
    clients[0].register(tasks=("train", "score"), num_samples=60)
    driver.tick(0.1)

    def put(client: Client, ids: list[str]) -> None:
        lengths = {name: [chance.randrange(200) for _ in ids] for name in chance.sample(["x", "y", "z"], 2)}
        client.put(ids, lengths, tags={"t": [chance.choice([1, "a", 2.5]) for _ in ids]})

    for step in range(steps):
        client = chance.choice(clients)
        ids = [f"s{i}" for i in chance.sample(range(20), chance.randrange(1, 5))]
        match chance.randrange(8):
            case 0 | 1 | 2:
                put(client, ids)
            case 3:
                client.clear(*ids)
            case 4:
                client.post(client.claim(chance.randrange(1, 4), ["x"], task=chance.choice(["train", "score"])))
            case 5:
                client.post(client.claim(2, ["x", "y"], blocking=False, lease_s=1.0))
            case 6:
                client.post(c.Locate(partition="p", samples=by_ids(*ids), fields=("x",)))
                if chance.random() < 0.7:
                    client.do(c.Release(located=client.number))
            case 7:
                driver.tick(driver.now + chance.random())
                if step > steps // 2 and chance.random() < 0.1 and len(clients) > 2:
                    gone = clients.pop()
                    driver.apply(c.SessionGone(unit=1, session=gone.session))


@pytest.mark.parametrize("seed", range(3))
def test_replaying_the_log_gives_the_same_outputs_and_the_same_state(seed: int) -> None:
    driver = Driver(capacity=64 * 1024)
    a_busy_day(driver, seed, 300)
    again = Ledger(7, **driver.settings)
    first = Ledger(7, **driver.settings)
    for item in driver.log:
        assert canonical(first.apply(item)) == canonical(again.apply(item))
    assert fingerprint(first) == fingerprint(again)
    # The one that drove the log answered clients that looked at it in between: looking changes nothing.
    assert fingerprint(driver.ledger) == fingerprint(first)
    first.apply(c.Tick(now=driver.now + 1.0))
    assert fingerprint(driver.ledger) != fingerprint(first)


def test_everything_comes_back_when_all_is_over() -> None:
    driver = Driver(capacity=64 * 1024)
    a_busy_day(driver, 5, 300)
    last = driver.client("last")
    last.call(c.Cleared, c.Clear(partition="p", samples=None))
    for session in [s.session for s in last.stats().sessions if s.session != last.session]:
        driver.apply(c.SessionGone(unit=1, session=session))
    assert last.used() == 0
    assert driver.ledger.free_ranges(1) == [(0, 64 * 1024)]
    assert [s.session for s in last.stats().sessions] == [last.session]


def test_answers_do_not_share_memory_with_the_ledger() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    made = client.put(["a", "b"], {"x": [8, 8]})
    got = [
        made,
        client.locate(handles(made)),
        client.call(c.Listed, c.List(partition="p", samples=handles(made))),
        client.call(c.Claimed, client.claim(2)),
    ]
    before = fingerprint(driver.replay())
    for result in got[1:]:
        result.rows[:] = 77
        result.generations[:] = 77
    client.watermark = client.number + 1
    client.post(c.Units())
    found = client.call(c.Listed, c.List(partition="p"))
    assert found.ids == ("a", "b")
    assert found.rows.tolist() == [0, 1]
    assert before


def test_the_digest_sees_order_types_and_array_contents() -> None:
    shared = [1, 2]
    values = [
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        {"a": 1.0, "b": 2},
        [1, 2],
        ["1", "2"],
        [np.array([1, 2])],
        [np.array([1, 2], np.int32)],
        [np.array([1, 3])],
        {1, 2},
        [shared, shared, 3],
        None,
        b"",
        "",
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest([np.array(["a", None], object)]) == digest([np.array(["a", None], object)])
    with pytest.raises(TypeError):
        digest(object())
