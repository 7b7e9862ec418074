"""Commits that build on what was read: what a Locate found must still be so."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequestError, RowsChangedError, SampleNotFoundError, StaleSampleError
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids, commit_columns, handles
from tests.profiles import budget


@pytest.fixture
def client() -> Client:
    client = Driver().client()
    client.register()
    return client


def find(client: Client, *ids: str, fields: tuple[str, ...] = ("x",)) -> tuple[int, c.Located]:
    found = client.call(c.Located, c.Locate(partition="p", samples=by_ids(*ids), fields=fields, missing_ok=True))
    return client.number, found


def put_upon(client: Client, upon: tuple[int, c.Located], ids: tuple[str, ...], lengths: list[int]) -> c.Committed:
    number = client.post(client.allocate({"x": lengths}))
    commit = c.Commit(
        partition="p",
        samples=by_ids(*ids),
        mode=c.Mode.UPSERT,
        reservation=number,
        columns=commit_columns({"x": lengths}),
        located=upon[0],
        expected=upon[1].fields,
    )
    return client.call(c.Committed, commit)


def test_locate_of_what_may_be_missing(client: Client) -> None:
    made = client.put(["a", "b"], {"x": [70, 0]})
    client.put(["c"])
    _, found = find(client, "b", "nobody", "c", "a", fields=("x", "ghost"))
    assert found.rows.tolist() == [made.rows[1], -1, 2, made.rows[0]]
    assert found.generations.tolist() == [made.generations[1], 0, 3, made.generations[0]]
    x, ghost = found.fields
    assert x.lengths.tolist() == [0, -1, -1, 70]
    assert ghost.lengths.tolist() == [-1] * 4
    assert x.offsets[3] == client.locate(by_ids("a")).fields[0].offsets[0]
    stale = c.Samples(rows=made.rows, generations=made.generations + 9)
    with pytest.raises(StaleSampleError):
        client.call(c.Located, c.Locate(partition="p", samples=stale, fields=("x",), missing_ok=True))


def test_of_a_partition_without_samples(client: Client) -> None:
    _, found = find(client, "a")
    assert (found.rows.tolist(), found.fields[0].lengths.tolist()) == ([-1], [-1])


def test_an_unchanged_row_is_replaced(client: Client) -> None:
    client.put(["a"], {"x": [70]})
    upon = find(client, "a", "b")
    put_upon(client, upon, ("a", "b"), [140, 5])
    assert client.locate(by_ids("a", "b")).fields[0].lengths.tolist() == [140, 5]
    with pytest.raises(RowsChangedError):
        put_upon(client, upon, ("a", "b"), [210, 10])
    client.do(c.Release(located=upon[0]))
    with pytest.raises(InvalidRequestError, match="holds no pins"):
        put_upon(client, upon, ("a", "b"), [210, 10])
    client.clear("a", "b")
    assert client.unit().live_bytes == 0


@pytest.mark.parametrize("change", ["same length", "cleared", "born again", "empty", "produced"])
def test_any_change_is_seen_and_changes_nothing(client: Client, change: str) -> None:
    client.put(["a", "z"], {"x": [70, 0]})
    upon = find(client, "a", "b", "z")
    match change:
        case "same length":
            client.put(["a"], {"x": [70]})
        case "cleared":
            client.clear("a")
        case "born again":
            client.clear("a")
            client.put(["a"], {"x": [70]})
        case "empty":
            client.put(["z"], {"x": [3]})
        case _:
            client.put(["b"], {"x": [0]})
    before = client.used()
    with pytest.raises(RowsChangedError) as caught:
        put_upon(client, upon, ("a", "b", "z"), [80, 5, 1])
    assert caught.value.samples == ["b" if change == "produced" else "z" if change == "empty" else "a"]
    assert (caught.value.total, caught.value.field) == (1, "x")
    assert client.used() == before


def test_expectations_must_fit_the_samples(client: Client) -> None:
    client.put(["a"], {"x": [70]})
    number, found = find(client, "a")
    all_wrong = "field 'x': 1 units, 1 offsets, 1 lengths for 2 samples"
    with pytest.raises(InvalidRequestError, match=all_wrong):
        put_upon(client, (number, found), ("a", "b"), [80, 5])
    cells = msgspec.structs.replace(found.fields[0], offsets=np.zeros(3, np.int64))
    found = msgspec.structs.replace(found, fields=(cells,))
    with pytest.raises(InvalidRequestError, match="field 'x': 3 offsets for 1 samples"):
        put_upon(client, (number, found), ("a",), [80])


def test_other_faults_come_as_ever(client: Client) -> None:
    made = client.put(["a"], {"x": [70]})
    upon = find(client, "a")
    client.clear("a")
    commit = c.Commit(partition="p", samples=by_ids("a"), mode=c.Mode.UPDATE, located=upon[0], expected=upon[1].fields)
    with pytest.raises(SampleNotFoundError):
        client.call(c.Committed, commit)
    commit = c.Commit(
        partition="p", samples=handles(made), mode=c.Mode.UPDATE, located=upon[0], expected=upon[1].fields
    )
    with pytest.raises(StaleSampleError):
        client.call(c.Committed, commit)


@budget(60)
@given(
    writes=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))),
    seed=st.integers(0, 99),
)
def test_appends_of_racing_writers_add_up(writes: list[tuple[int, list[int]]], seed: int) -> None:
    """Each writer locates, is overtaken or not, commits, and begins anew where it was: no append is lost or doubled."""
    driver, chance = Driver(), np.random.default_rng(seed)
    clients = [driver.client(f"w{i}") for i in range(3)]
    clients[0].register()
    work = {i: [samples for who, samples in writes if who == i] for i in range(3)}
    found: dict[int, tuple[int, c.Located]] = {}
    appended = dict.fromkeys(range(4), 0)
    while any(work.values()):
        who = int(chance.choice([i for i, left in work.items() if left]))
        client, ids = clients[who], tuple(f"s{n}" for n in work[who][0])
        if who not in found:
            found[who] = find(client, *ids)
            continue
        upon = found.pop(who)
        lengths = [max(int(length), 0) + 1 for length in upon[1].fields[0].lengths]
        current = [appended[n] for n in work[who][0]]
        try:
            put_upon(client, upon, ids, lengths)
        except RowsChangedError:
            assert [length - 1 for length in lengths] != current
        else:
            assert [length - 1 for length in lengths] == current
            for n in work[who].pop(0):
                appended[n] += 1
        client.do(c.Release(located=upon[0]))
    _, end = find(clients[0], *[f"s{n}" for n in range(4)])
    assert [max(int(length), 0) for length in end.fields[0].lengths] == list(appended.values())
