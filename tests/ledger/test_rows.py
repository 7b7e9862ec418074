"""Samples: putting, naming, clearing, using ids again."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.schema import field_of, variants_of
from dataplane.core.types import Scalar
from dataplane.errors import (
    FieldNotProducedError,
    InvalidRequestError,
    PartitionNotFoundError,
    RowsChangedError,
    SampleNotFoundError,
    StaleSampleError,
    from_wire,
    to_wire,
)
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.tags import MIN_SHARED, Tags, packed
from dataplane.ledger.state.tombstones import REMEMBERED
from tests.ledger.driver import Client, Driver, by_ids, commit_columns, handles
from tests.ledger.fingerprint import fingerprint
from tests.profiles import budget


@pytest.fixture
def client() -> Client:
    client = Driver().client()
    client.register()
    return client


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


def test_list_keeps_age_order_over_slot_reuse_and_compaction(client: Client) -> None:
    for i in range(3000):
        client.put([f"s{i}"])
        if i >= 4:
            client.clear(f"s{i - 4}")
    listed = client.call(c.Listed, c.List(partition="p"))
    assert listed.ids == ("s2996", "s2997", "s2998", "s2999")
    assert listed.generations.tolist() == sorted(listed.generations.tolist())
    assert max(listed.rows.tolist()) < 8


def test_lists_and_limits_agree_on_age_over_random_histories() -> None:
    client = Driver().client()
    client.register()
    chance = random.Random(3)
    alive: dict[str, None] = {}
    for _ in range(400):
        name = f"s{chance.randrange(40)}"
        if name in alive and chance.random() < 0.6:
            client.clear(name)
            del alive[name]
        else:
            client.put([name])
            alive.setdefault(name)
        limit = chance.choice([None, 0, 1, 5])
        listed = client.call(c.Listed, c.List(partition="p", limit=limit))
        assert listed.ids == tuple(alive)[:limit]
        by_handle = client.call(c.Listed, c.List(partition="p", samples=handles(listed)))
        assert by_handle.ids == listed.ids


def test_samples_named_both_ways_or_neither_are_refused(client: Client) -> None:
    made = client.put(["a"])
    with pytest.raises(InvalidRequestError):
        client.put(c.Samples(ids=("a",), rows=made.rows, generations=made.generations))
    with pytest.raises(InvalidRequestError):
        client.put(c.Samples(rows=made.rows))


# --- Tags: what goes in comes out, types included.

VALUES: list[list[Scalar]] = [
    [1],
    [1, 2],
    [True],
    [1, True, 1.0],
    [0.0],
    [0.0, -0.0],
    [float("nan")],
    ["a"],
    ["a", "b", None],
    [None],
    ["a", 1],
    [f"text {number}" for number in range(70)],
    [f"text {number}" for number in range(300)],
]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("count", [1, MIN_SHARED, 400])
def test_columns_with_an_index_have_the_same_values(values: list[Scalar], count: int) -> None:
    chance = random.Random(count)
    tags = Tags(count)
    rows = np.arange(count)
    each = tuple(chance.choice(values) for _ in rows)
    tags.merge(rows, (c.TagColumn(name="t", values=each),))
    (column,) = tags.of(rows, shared=True)
    (plain,) = tags.of(rows)
    assert plain.values == plain.each
    assert list(map(repr, column.each)) == list(map(repr, plain.values)) == list(map(repr, each))
    assert column.index is None or len(column.values) == len(set(map(repr, each)))
    different = len(set(map(repr, each)))
    if count < MIN_SHARED or different > count // 4:
        assert column.index is None
    elif different == 1 or (different <= 3 and set(map(type, each)) <= {str, type(None)}):
        assert column.index is not None


def test_a_command_with_an_index_is_refused(client: Client) -> None:
    client.put(["a", "b"])
    tag = c.TagColumn(name="t", values=(1, 2), index=np.array([1, 0], np.uint8))
    with pytest.raises(InvalidRequestError, match="tag 't' has an index, which only answers have"):
        client.call(c.Done, c.SetTags(partition="p", samples=by_ids("a", "b"), tags=(tag,)))
    for malformed in ({"values": (1,)}, {"values": (1, 2), "positions": np.array([0, 1])}):
        with pytest.raises(InvalidRequestError, match="its index names value 1 of"):
            msgspec.structs.replace(tag, **malformed)


def tags_of(client: Client) -> dict[str, dict[str, Scalar]]:
    """Tags by sample."""
    listed = client.call(c.Listed, c.List(partition="p"))
    found: dict[str, dict[str, Scalar]] = {name: {} for name in listed.ids}
    for column in listed.tags:
        places = range(len(listed.ids)) if column.positions is None else column.positions.tolist()
        for place, value in zip(places, column.each, strict=True):
            found[listed.ids[place]][column.name] = value
    return found


@pytest.mark.parametrize(
    "values",
    [
        (1, 2, -3),
        (1.0, float("inf"), -0.0),
        (True, False, True),
        ("a", "", "\u00e9"),
        (1, 1.0, True),
        (None, None, "x"),
        ((1 << 63) - 1, 2, -(1 << 63)),
        (None, 1, False),
    ],
)
def test_values_come_back_with_their_types(client: Client, values: tuple[Scalar, ...]) -> None:
    client.put(["a", "b", "c"], tags={"t": values})
    got = [tags["t"] for tags in tags_of(client).values()]
    assert [(type(v), v) for v in got] == [(type(v), v) for v in values]


def test_tags_merge_and_a_column_may_change_kind(client: Client) -> None:
    client.put(["a", "b"], tags={"t": [1, 2], "u": [True, False]})
    client.put(["b"], {"x": [1]})
    client.do(c.SetTags(partition="p", samples=by_ids("b"), tags=(c.TagColumn(name="t", values=("two",)),)))
    client.put(["c"])
    assert tags_of(client) == {"a": {"t": 1, "u": True}, "b": {"t": "two", "u": False}, "c": {}}


def test_positions_tag_some_of_the_samples(client: Client) -> None:
    column = c.TagColumn(name="t", values=(5, 6), positions=np.array([2, 0]))
    client.call(
        c.Committed,
        c.Commit(partition="p", samples=by_ids("a", "b", "c"), mode=c.Mode.CREATE, tags=(column,)),
    )
    assert tags_of(client) == {"a": {"t": 6}, "b": {}, "c": {"t": 5}}


def test_a_used_again_slot_has_no_tags_of_the_dead(client: Client) -> None:
    client.put(["a"], tags={"t": ["secret"], "n": [1]})
    client.clear("a")
    client.put(["b"])
    assert tags_of(client) == {"b": {}}


def test_set_tags_needs_living_samples(client: Client) -> None:
    with pytest.raises(SampleNotFoundError):
        client.do(c.SetTags(partition="p", samples=by_ids("a"), tags=()))


def test_enumerated_tags(client: Client) -> None:
    client.register(enums={"status": ("ok", "cut")})
    client.put(["a"], tags={"status": ["ok"]})
    with pytest.raises(InvalidRequestError, match="'bad' is not one of the values declared with enums: ok, cut"):
        client.put(["a"], tags={"status": ["bad"]})


PYTHON = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@pytest.mark.parametrize("op", sorted(PYTHON))
@pytest.mark.parametrize("column", [(1, 2, 3), (1.0, 2.5, float("nan")), (False, True), ("a", "b"), (1, "a", None)])
@pytest.mark.parametrize("value", [1, 2.5, True, "a", None, (1 << 60) + 1, float("nan")])
def test_predicates_mean_what_python_means(op: str, column: tuple[Scalar, ...], value: Scalar) -> None:
    tags, rows = Tags(8), np.arange(len(column))
    tags.merge(rows, (c.TagColumn(name="t", values=column),))

    def python(item: Scalar) -> bool:
        try:
            return bool(PYTHON[op](item, value))
        except TypeError:
            return False

    got = tags.matches((c.Predicate(tag="t", op=op, value=value),), rows)
    assert got.tolist() == [python(item) for item in column]


def test_large_numbers_compare_exactly() -> None:
    tags, rows = Tags(2), np.arange(2)
    tags.merge(rows, (c.TagColumn(name="t", values=((1 << 60), (1 << 60) + 1)),))
    got = tags.matches((c.Predicate(tag="t", op="==", value=(1 << 60) + 1),), rows)
    assert got.tolist() == [False, True]
    assert packed((1, 2)).dtype == np.int64


# --- A field of two columns: a row has a cell in one of them, and both count as the one field.


X = variants_of("x")


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def varied(driver: Driver) -> Client:
    varied = driver.client()
    varied.register(tasks=("train",))
    varied.put(["a", "b", "c"], {"x": [8, 8, 8], "y": [4, 4, 4]})
    return varied


def located(varied: Client, *ids: str) -> dict[str, list[int]]:
    call_id = varied.post(c.Locate(partition="p", samples=by_ids(*ids), fields=("x",), missing_ok=True))
    found = varied.result(call_id)
    assert isinstance(found, c.Located)
    varied.do(c.Release(located=call_id))
    return {each.name: each.lengths.tolist() for each in found.fields}


def test_names() -> None:
    assert field_of(X) == field_of("x") == "x"
    assert X != "x"


def test_a_row_is_in_the_column_that_was_written_last(varied: Client) -> None:
    varied.put(["b"], {X: [640]})
    assert located(varied, "a", "b") == {"x": [8, -1], X: [-1, 640]}
    assert located(varied, "a", "c") == {"x": [8, 8]}
    varied.put(["b"], {X: [64]})
    assert located(varied, "b") == {"x": [-1], X: [64]}
    varied.put(["b"], {"x": [8]})
    assert located(varied, "a", "b") == {"x": [8, 8]}
    varied.clear("a", "b", "c")
    assert varied.used() == 0


def test_both_columns_are_one_field(varied: Client) -> None:
    varied.put(["b"], {X: [16]})
    listed = varied.call(c.Listed, c.List(partition="p"))
    assert listed.fields == ("x", "y")
    [part] = varied.stats().partitions
    assert part.produced == {"x": 3, "y": 3}
    described = varied.call(c.Described, c.Describe(partition="p"))
    assert set(described.fields) == set(described.undeclared) == {"x", "y"}
    assert varied.claimed(3, ["x"]) == ("a", "b", "c")


def test_a_claim_waits_for_either_column(varied: Client) -> None:
    varied.put(["d"], {"y": [4]})
    waiting = varied.waits(varied.claim(4, ["x", "y"], timeout_s=60.0))
    varied.put(["d"], {X: [16]})
    assert varied.claimed_by(waiting) == ("a", "b", "c", "d")


def test_a_column_ends_with_its_last_row(varied: Client) -> None:
    varied.put(["a", "b", "c"], {X: [16, 16, 16]})
    assert located(varied, "a", "b", "c") == {"x": [-1, -1, -1], X: [16, 16, 16]}
    assert varied.call(c.Listed, c.List(partition="p")).fields == ("x", "y")
    varied.clear("a")
    varied.put(["d"], {"x": [8]})
    assert located(varied, "b", "d") == {"x": [-1, 8], X: [16, -1]}


def test_a_read_that_names_no_variants_misses_them(varied: Client) -> None:
    varied.put(["b"], {X: [16]})
    with pytest.raises(FieldNotProducedError, match="'b'"):
        varied.raise_(c.Locate(partition="p", samples=by_ids("a", "b"), fields=("x",)))


def test_what_the_ledger_did_is_replayed(driver: Driver, varied: Client) -> None:
    varied.put(["b"], {X: [16]})
    varied.put(["b"], {"x": [8]})
    varied.put(["c"], {X: [16]})
    driver.replay()


# --- Samples that are lost with a storage unit: whoever asks for one is told with which.


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


# --- Commits that build on what was read: what a Locate found must still be so.


def find(client: Client, *ids: str, fields: tuple[str, ...] = ("x",)) -> tuple[int, c.Located]:
    found = client.call(c.Located, c.Locate(partition="p", samples=by_ids(*ids), fields=fields, missing_ok=True))
    return client.last_call_id, found


def put_upon(client: Client, upon: tuple[int, c.Located], ids: tuple[str, ...], lengths: list[int]) -> c.Committed:
    call_id = client.post(client.allocate({"x": lengths}))
    commit = c.Commit(
        partition="p",
        samples=by_ids(*ids),
        mode=c.Mode.UPSERT,
        reservation=call_id,
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
    call_id, found = find(client, "a")
    all_wrong = "field 'x': 1 units, 1 offsets, 1 lengths for 2 samples"
    with pytest.raises(InvalidRequestError, match=all_wrong):
        put_upon(client, (call_id, found), ("a", "b"), [80, 5])
    cells = msgspec.structs.replace(found.fields[0], offsets=np.zeros(3, np.int64))
    found = msgspec.structs.replace(found, fields=(cells,))
    with pytest.raises(InvalidRequestError, match="field 'x': 3 offsets for 1 samples"):
        put_upon(client, (call_id, found), ("a",), [80])


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
