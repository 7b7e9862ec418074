"""A log of inputs rebuilds the ledger; its digest sees every difference."""

from __future__ import annotations

import enum
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import SampleNotFoundError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.encoding.image import FORMAT, ImageError, dump, load
from dataplane.ledger.state.arrays import as_slice, every, some, top
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
                    client.do(c.Release(located=client.last_call_id))
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
    client.watermark = client.last_call_id + 1
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


# --- A ledger written down and made again goes on as if nothing had happened.


def again(*roots: Any) -> list[Any]:
    return load(dump(list(roots)))


@pytest.mark.parametrize("seed", range(4))
def test_a_ledger_made_again_at_any_moment_answers_alike(seed: int) -> None:
    driver = Driver(capacity=64 * 1024)
    a_busy_day(driver, seed, 200)
    ledger = Ledger(7, **driver.settings)
    for number, item in enumerate(driver.log):
        if number % 37 == seed:
            made = Ledger.restored(ledger.image())
            assert fingerprint(made) == fingerprint(ledger)
            assert made.next_deadline() == ledger.next_deadline()
            for later in driver.log[number : number + 40]:
                made.apply(later)
            ledger_then = Ledger.restored(ledger.image())
            for later in driver.log[number : number + 40]:
                ledger_then.apply(later)
            assert fingerprint(made) == fingerprint(ledger_then)
        ledger.apply(item)
    made = Ledger.restored(ledger.image())
    assert fingerprint(made) == fingerprint(driver.ledger)


@pytest.mark.parametrize("seed", range(3))
def test_the_outputs_after_it_are_the_same(seed: int) -> None:
    driver = Driver(capacity=64 * 1024)
    a_busy_day(driver, seed, 120)
    middle = len(driver.log) // 2
    ledger = Ledger(7, **driver.settings)
    for item in driver.log[:middle]:
        ledger.apply(item)
    made = Ledger.restored(ledger.image())
    for item in driver.log[middle:]:
        assert [canonical(o) for o in made.apply(item)] == [canonical(o) for o in ledger.apply(item)]
    assert fingerprint(made) == fingerprint(ledger)


def test_thousands_of_parked_calls_are_not_too_deep() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    for _ in range(3000):
        client.waits(client.claim(1, ["x"], timeout_s=1000.0))
    made = Ledger.restored(driver.ledger.image())
    assert fingerprint(made) == fingerprint(driver.ledger)


def test_preallocated_space_and_pins_are_kept() -> None:
    driver = Driver()
    client = driver.client(attach=[1])
    client.register()
    client.put(["a", "b"], {"x": [10, 200]})
    client.locate(by_ids("a"))
    client.call(c.Preallocated, c.Preallocate(unit=1, nbytes=1000))
    made = Ledger.restored(driver.ledger.image())
    assert made.held_ranges() == driver.ledger.held_ranges()
    assert made.free_ranges(1) == driver.ledger.free_ranges(1)


def test_what_was_one_is_one_again() -> None:
    shared: list[Any] = [1, "a"]
    array = np.arange(3)
    loop: dict[Any, Any] = {"self": None, 3: shared, (1, "k"): array}
    loop["self"] = loop
    first, second, third = again(loop, shared, array)
    assert first["self"] is first
    assert first[3] is second
    assert first[1, "k"] is third
    assert third.tolist() == [0, 1, 2]
    third[0] = 9


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(1 << 62),
        1 << 70,
        0.1,
        "text",
        b"bytes",
        (1, (2.0, "x"), ()),
        frozenset({3, 1}),
        {5, 4},
        [1 << 80, None],
        FieldKind.JAGGED,
        FieldSpec(FieldKind.DENSE, "float32", (2, 3)),
        c.Mode.UPDATE,
        {"a": {"b": [1, {2: 3}]}},
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    (back,) = again(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "bool", "float64"])
def test_arrays_come_back_as_they_were(dtype: str) -> None:
    (back,) = again(np.array([1, 0, 1], dtype))
    assert back.dtype == dtype
    assert back.tolist() == np.array([1, 0, 1], dtype).tolist()
    assert back.flags.writeable


def test_object_arrays_errors_and_commands_come_back() -> None:
    error = SampleNotFoundError(partition="p", samples=["a"], total=1, positions=[0])
    objects = np.array([None, "x", 1 << 70, 2.5, True], object)
    command = c.Allocate(partition="p", columns=(c.ColumnSizes(name="x", sizes=np.array([1, 2])),), update=True)
    made, array, call = again(error, objects, command)
    assert (type(made), made.facts) == (type(error), error.facts)
    assert array.tolist() == objects.tolist()
    assert canonical(call) == canonical(command)


class Foreign:
    """Not of the ledger."""


class ForeignKind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize("value", [Foreign(), ForeignKind.ONE, [Foreign()], object()])
def test_nothing_but_the_ledgers_own_is_written(value: Any) -> None:
    with pytest.raises(TypeError):
        dump([value])


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([FORMAT + 1, [], []]),
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([FORMAT, [["e", "os:system", 1]], []]),
        msgspec.msgpack.encode([FORMAT, [[0]], [["o", "subprocess:Popen", [], []]]]),
        msgspec.msgpack.encode([FORMAT, [[0]], [["o", "os", [], []]]]),
        msgspec.msgpack.encode([FORMAT, [["e", "dataplane.core.types:FieldKind", "flat"]], []]),
        msgspec.msgpack.encode([FORMAT, [[3]], []]),
        msgspec.msgpack.encode([FORMAT, [["?"]], []]),
        msgspec.msgpack.encode([FORMAT, [], [["?"]]]),
    ],
)
def test_other_bytes_are_refused(image: bytes) -> None:
    with pytest.raises(ImageError):
        load(image)


def test_an_image_of_something_else_is_no_ledger() -> None:
    with pytest.raises(ImageError, match="roots"):
        Ledger.restored(dump([1, 2]))
    whole = Driver().ledger.image()
    with pytest.raises(ImageError):
        Ledger.restored(whole[: len(whole) // 2])


# --- Small sums over columns of numbers, against the plain way.


INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(st.integers(0, 8), unique=True, max_size=8))
def test_a_slice_selects_what_the_numbers_select(numbers: list[int]) -> None:
    index = as_slice(np.array(numbers, np.int64))
    assert np.arange(9)[index].tolist() == numbers
    consecutive = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False
    assert isinstance(index, slice) == consecutive


@given(st.lists(INTEGERS, max_size=6))
def test_the_top_is_the_largest_and_beyond_all_with_a_negative_one(values: list[int]) -> None:
    found = top(np.array(values, np.int64))
    assert found >= 1 << 63 if min(values, default=0) < 0 else found == max(values, default=0)


@given(st.lists(st.integers(0, 2), max_size=6))
def test_some_and_every_are_any_and_all(values: list[int]) -> None:
    array = np.array(values, np.int64)
    assert (some(array), every(array)) == (any(values), all(values))
