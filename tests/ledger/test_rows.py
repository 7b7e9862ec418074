"""Samples: putting, naming, clearing, using ids again."""

from __future__ import annotations

import pytest

from dataplane.errors import (
    InvalidRequestError,
    PartitionNotFoundError,
    SampleExistsError,
    SampleNotFoundError,
    StaleSampleError,
)
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids, handles


@pytest.fixture
def client() -> Client:
    client = Driver().client()
    client.register()
    return client


def test_put_then_locate(client: Client) -> None:
    made = client.put(["a", "b", "c"], {"x": [10, 0, 30], "y": [1, 2, 3]})
    found = client.locate(by_ids("c", "a", "b"), ["y", "x"])
    assert [f.name for f in found.fields] == ["y", "x"]
    assert found.fields[1].lengths.tolist() == [30, 10, 0]
    assert found.rows.tolist() == [made.rows[2], made.rows[0], made.rows[1]]
    x = found.fields[1].offsets
    assert (x[0] - x[1]) == 10
    assert client.used() == 128


def test_three_steps_of_the_same_ids_refuse_every_late_write_back(client: Client) -> None:
    metas = []
    for step in range(3):
        made = client.put(["a", "b"], {"x": [8, 8]}, mode=c.Mode.CREATE, tags={"step": [step, step]})
        for late in metas:
            with pytest.raises(StaleSampleError) as caught:
                client.put(handles(late), {"logprob": [4, 4]}, mode=c.Mode.UPDATE)
            assert caught.value.positions == [0, 1]
        client.put(handles(made), {"logprob": [4, 4]}, mode=c.Mode.UPDATE)
        listed = client.call(c.Listed, c.List(partition="p"))
        assert listed.tags[0].values == (step, step)
        assert set(listed.fields) == {"x", "logprob"}
        metas.append(made)
        client.clear("a", "b")
    assert client.used() == 0


@pytest.mark.parametrize(
    ("limit", "found"), [(0, ()), (1, ("b",)), (2, ("b", "c")), (9, ("b", "c", "d")), (None, ("b", "c", "d"))]
)
def test_a_list_has_the_oldest_up_to_its_limit(client: Client, limit: int | None, found: tuple[str, ...]) -> None:
    client.put(["a", "b", "c", "d"], {"x": [8] * 4}, tags={"n": [0, 1, 2, 3]})
    client.put(["b"], {"y": [8]})
    client.clear("a")
    listed = client.call(c.Listed, c.List(partition="p", limit=limit))
    assert listed.ids == found
    assert len(listed.rows) == len(listed.generations) == len(found)
    assert listed.fields == {0: (), 1: ("x", "y")}.get(len(found), ("x",))
    assert [value for column in listed.tags for value in column.values] == [1, 2, 3][: len(found)]


@pytest.mark.parametrize(("limit", "samples"), [(-1, None), (1, by_ids("a"))])
def test_a_limit_that_makes_no_sense_is_refused(client: Client, limit: int, samples: c.Samples | None) -> None:
    client.put(["a"], {"x": [8]})
    with pytest.raises(InvalidRequestError, match=f"limit={limit}"):
        client.call(c.Listed, c.List(partition="p", limit=limit, samples=samples))


def test_generations_outlive_the_partition(client: Client) -> None:
    made = client.put(["a"], {"x": [8]})
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    client.register()
    client.put(["a"], {"x": [8]})
    with pytest.raises(StaleSampleError):
        client.locate(handles(made))


def test_modes(client: Client) -> None:
    with pytest.raises(SampleNotFoundError) as missing:
        client.put(["a"], {"x": [8]}, mode=c.Mode.UPDATE)
    assert missing.value.samples == ["a"]
    client.put(["a"], {"x": [8]}, mode=c.Mode.CREATE)
    with pytest.raises(SampleExistsError):
        client.put(["b", "a"], {"x": [8, 8]}, mode=c.Mode.CREATE)
    made = client.put(["b", "a"], {"x": [8, 8]})
    assert len(set(made.rows.tolist())) == 2
    client.put(["a"], {"x": [8]}, mode=c.Mode.UPDATE)
    assert client.used() == 2 * 64


def test_duplicates_in_one_put_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="'a' is named twice"):
        client.put(["a", "b", "a"], {"x": [1, 1, 1]})
    made = client.put(["a"], {"x": [1]})
    twice = c.Samples(rows=made.rows.repeat(2), generations=made.generations.repeat(2))
    with pytest.raises(InvalidRequestError, match=r"positions 0 and 1 .* are the same sample"):
        client.put(twice, {"x": [1, 1]})
    assert client.used() == 64


def test_clear_ignores_what_is_not_there(client: Client) -> None:
    made = client.put(["a", "b"], {"x": [1, 1]})
    assert client.clear("a", "nobody", "a") == 1
    assert client.call(c.Cleared, c.Clear(partition="p", samples=handles(made))).count == 1
    assert client.call(c.Cleared, c.Clear(partition="none", samples=None)).count == 0
    with pytest.raises(PartitionNotFoundError):
        client.clear("a", partition="none")


def test_rewritten_cell_is_a_new_version_and_the_old_bytes_wait_for_their_reader(client: Client) -> None:
    client.put(["a"], {"x": [100]})
    old = client.locate(by_ids("a"))
    located = client.number
    client.put(["a"], {"x": [50]})
    new = client.locate(by_ids("a"))
    client.do(c.Release(located=client.number))
    assert old.fields[0].offsets[0] != new.fields[0].offsets[0]
    assert new.fields[0].lengths.tolist() == [50]
    assert client.unit().retired_bytes == 128
    client.do(c.Release(located=located))
    assert client.used() == 64


def test_list_keeps_age_order_over_slot_reuse_and_compaction(client: Client) -> None:
    for i in range(3000):
        client.put([f"s{i}"])
        if i >= 4:
            client.clear(f"s{i - 4}")
    listed = client.call(c.Listed, c.List(partition="p"))
    assert listed.ids == ("s2996", "s2997", "s2998", "s2999")
    assert listed.generations.tolist() == sorted(listed.generations.tolist())
    assert max(listed.rows.tolist()) < 8


def test_samples_named_both_ways_or_neither_are_refused(client: Client) -> None:
    made = client.put(["a"])
    with pytest.raises(InvalidRequestError):
        client.put(c.Samples(ids=("a",), rows=made.rows, generations=made.generations))
    with pytest.raises(InvalidRequestError):
        client.put(c.Samples(rows=made.rows))
