"""Serials: what tells whether a cell has been where it is all the time."""

from __future__ import annotations

import numpy as np

from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.ledger.driver import MIB, Client, Driver, by_ids, commit_columns


def made(**settings: object) -> tuple[Driver, Client]:
    driver = Driver(reserve_fraction=0.0, **settings)
    client = driver.client()
    client.register()
    return driver, client


def place(client: Client, name: str) -> tuple[int, int]:
    """Offset and serial."""
    locate = c.Locate(partition="p", samples=by_ids(name), fields=("x",), serials=True, unpinned=True)
    (found,) = client.call(c.Located, locate).fields
    assert found.serials is not None
    return int(found.offsets[0]), int(found.serials[0])


def test_a_cell_keeps_its_serial_until_it_is_written_anew() -> None:
    _, client = made()
    client.put(["a", "b"], {"x": [100, 100]})
    before = place(client, "a"), place(client, "b")
    client.put(["c"], {"x": [100]})
    client.clear("c")
    client.put(["b"], {"y": [100]})
    assert (place(client, "a"), place(client, "b")) == before
    client.put(["a"], {"x": [100]})
    assert place(client, "a") != before[0]
    assert place(client, "b") == before[1]


def test_bytes_at_the_same_place_have_another_serial() -> None:
    _, client = made()
    client.put(["a"], {"x": [100]})
    seen = {place(client, "a")}
    offsets = set()
    for _ in range(6):
        client.put(["a"], {"x": [100]})
        seen.add(place(client, "a"))
        offsets.add(place(client, "a")[0])
    assert len(seen) == 7
    assert len(offsets) == 2, "space is used again"


def test_parts_of_preallocated_space_have_serials_of_their_own() -> None:
    driver, client = made(capacity=64 * MIB)
    driver.apply(c.SessionAttached(unit=1, session=client.session))
    space = client.post(c.Preallocate(unit=1, nbytes=1024))
    granted = client.result(space)
    assert isinstance(granted, c.Preallocated)
    for number, name in enumerate(("a", "b")):
        client.call(
            c.Committed,
            c.Commit(
                partition="p",
                samples=by_ids(name),
                mode=c.Mode.UPSERT,
                reservation=space,
                offset=granted.offset + 128 * number,
                columns=commit_columns({"x": [100]}),
            ),
        )
    assert place(client, "a")[1] != place(client, "b")[1]


def test_looking_without_a_pin_holds_nothing() -> None:
    _, client = made()
    client.put(["a"], {"x": [100]})
    place(client, "a")
    assert client.unit().pinned_bytes == 0
    client.clear("a")
    assert client.used() == 0


def test_serials_are_not_told_unless_asked_for() -> None:
    _, client = made()
    client.put(["a"], {"x": [100]})
    assert client.locate(by_ids("a")).fields[0].serials is None


def test_a_ledger_of_before_serials_goes_on() -> None:
    """Its extents have none; those that come after it do."""
    driver, client = made()
    client.put(["a", "b"], {"x": [100, 100]})
    del driver.ledger._state.extents.serials, driver.ledger._state.extents.made
    driver.ledger = Ledger.restored(driver.ledger.image())
    assert place(client, "a")[1] == 0
    for _ in range(100):
        client.put(["a"], {"x": [100]})
    assert place(client, "a")[1] > 0
    assert place(client, "b")[1] == 0
    assert np.array_equal(driver.ledger._state.extents.serials_of(np.array([0])), [0])
