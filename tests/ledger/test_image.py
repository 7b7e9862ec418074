"""A ledger written down and made again goes on as if nothing had happened."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import SampleNotFoundError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.encoding.image import FORMAT, ImageError, dump, load
from tests.ledger.driver import Driver, by_ids
from tests.ledger.fingerprint import fingerprint
from tests.ledger.test_replay import a_busy_day
from tests.ledger.values import canonical


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
