"""A field of two columns: a row has a cell in one of them, and both count as the one field."""

from __future__ import annotations

import pytest

from dataplane.core.schema import field_of, variants_of
from dataplane.errors import FieldNotProducedError
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids

X = variants_of("x")


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def client(driver: Driver) -> Client:
    client = driver.client()
    client.register(tasks=("train",))
    client.put(["a", "b", "c"], {"x": [8, 8, 8], "y": [4, 4, 4]})
    return client


def located(client: Client, *ids: str) -> dict[str, list[int]]:
    number = client.post(c.Locate(partition="p", samples=by_ids(*ids), fields=("x",), missing_ok=True))
    found = client.result(number)
    assert isinstance(found, c.Located)
    client.do(c.Release(located=number))
    return {each.name: each.lengths.tolist() for each in found.fields}


def test_names() -> None:
    assert field_of(X) == field_of("x") == "x"
    assert X != "x"


def test_a_row_is_in_the_column_that_was_written_last(client: Client) -> None:
    client.put(["b"], {X: [640]})
    assert located(client, "a", "b") == {"x": [8, -1], X: [-1, 640]}
    assert located(client, "a", "c") == {"x": [8, 8]}
    client.put(["b"], {X: [64]})
    assert located(client, "b") == {"x": [-1], X: [64]}
    client.put(["b"], {"x": [8]})
    assert located(client, "a", "b") == {"x": [8, 8]}
    client.clear("a", "b", "c")
    assert client.used() == 0


def test_both_columns_are_one_field(client: Client) -> None:
    client.put(["b"], {X: [16]})
    listed = client.call(c.Listed, c.List(partition="p"))
    assert listed.fields == ("x", "y")
    [part] = client.stats().partitions
    assert part.produced == {"x": 3, "y": 3}
    described = client.call(c.Described, c.Describe(partition="p"))
    assert set(described.fields) == set(described.undeclared) == {"x", "y"}
    assert client.claimed(3, ["x"]) == ("a", "b", "c")


def test_a_claim_waits_for_either_column(client: Client) -> None:
    client.put(["d"], {"y": [4]})
    waiting = client.waits(client.claim(4, ["x", "y"], timeout_s=60.0))
    client.put(["d"], {X: [16]})
    assert client.claimed_by(waiting) == ("a", "b", "c", "d")


def test_a_column_ends_with_its_last_row(client: Client) -> None:
    client.put(["a", "b", "c"], {X: [16, 16, 16]})
    assert located(client, "a", "b", "c") == {"x": [-1, -1, -1], X: [16, 16, 16]}
    assert client.call(c.Listed, c.List(partition="p")).fields == ("x", "y")
    client.clear("a")
    client.put(["d"], {"x": [8]})
    assert located(client, "b", "d") == {"x": [-1, 8], X: [16, -1]}


def test_a_read_that_names_no_variants_misses_them(client: Client) -> None:
    client.put(["b"], {X: [16]})
    with pytest.raises(FieldNotProducedError, match="'b'"):
        client.raise_(c.Locate(partition="p", samples=by_ids("a", "b"), fields=("x",)))


def test_what_the_ledger_did_is_replayed(driver: Driver, client: Client) -> None:
    client.put(["b"], {X: [16]})
    client.put(["b"], {"x": [8]})
    client.put(["c"], {X: [16]})
    driver.replay()
