"""Inputs and results survive encoding; what is malformed is rejected by name."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import InternalError, InvalidRequestError, ProtocolVersionError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.commands import inputs
from dataplane.ledger.encoding.messages import call_id_of, decode, decode_request, decode_with, decoder, encode
from tests.ledger.driver import Driver
from tests.ledger.fingerprint import fingerprint
from tests.ledger.test_replay import a_busy_day
from tests.ledger.values import canonical
from tests.profiles import budget
from tests.protocol.values import of_type, plain

INT64 = st.integers(0, (1 << 63) - 1)


def kinds(module: Any, base: type) -> list[type]:
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
    return sorted((kind for kind in found if kind not in (base, c.Call)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", kinds(inputs, c.Input), ids=lambda kind: str(kind.__name__))
@budget(30)
@given(data=st.data())
def test_reports(kind: type[c.Input], data: st.DataObject) -> None:
    item = data.draw(of_type(kind))
    assert plain(decode(encode(item))) == plain(item)


@pytest.mark.parametrize("kind", c.Answered.__subclasses__(), ids=lambda kind: str(kind.__name__))
@budget(30)
@given(data=st.data(), session=INT64, call_id=INT64, watermark=INT64, confirmed=st.lists(INT64, max_size=3).map(tuple))
def test_calls(
    kind: type[c.Command], data: st.DataObject, session: int, call_id: int, watermark: int, confirmed: tuple[int, ...]
) -> None:
    command = data.draw(of_type(kind))
    call = c.Call(session=session, call_id=call_id, watermark=watermark, confirmed=confirmed, command=command)
    assert plain(decode(encode(call))) == plain(call)


@pytest.mark.parametrize("kind", kinds(c, c.Result), ids=lambda kind: str(kind.__name__))
@budget(30)
@given(data=st.data())
def test_results(kind: type[c.Result], data: st.DataObject) -> None:
    result = data.draw(of_type(kind))
    assert plain(decode_with(decoder(kind), encode(result))) == plain(result)


@given(st.binary(max_size=60))
def test_garbage_is_no_input(garbage: bytes) -> None:
    for read in (decode, decode_request):
        with pytest.raises(InvalidRequestError, match=r"malformed request: .*install that of the service"):
            read(garbage)
    assert call_id_of(garbage) == 0


@pytest.mark.parametrize("before", [b"", encode(c.Heartbeat(session=1))[:-1], b"\x96\xa4Call\x01\x05\x01"])
def test_values_that_are_nested_too_deeply_are_rejected(before: bytes) -> None:
    deep = before + b"\x91" * 200_000
    with pytest.raises(InvalidRequestError, match="malformed request"):
        decode_request(deep)
    assert call_id_of(deep) == 0
    with pytest.raises(InternalError, match="malformed reply"):
        decode_with(decoder(c.Committed), deep)


@given(st.binary(max_size=60))
def test_garbage_is_no_result(garbage: bytes) -> None:
    with pytest.raises(InternalError, match="malformed reply: not a Committed"):
        decode_with(decoder(c.Committed), garbage)


SOME = c.Samples(ids=("a",))
ODD = np.zeros(7, np.uint8)


def call(command: Any, **numbers: Any) -> c.Call:
    return c.Call(**{"session": 1, "call_id": 5, "watermark": 1, "command": command} | numbers)


MALFORMED: dict[str, tuple[Any, str]] = {
    "text": (c.Seal(partition=5), "Seal: partition=5: expected `str`, got `int`$"),  # type: ignore[arg-type]
    "no command": (c.Done(), "malformed request: .* missing required field `type`"),
    "odd array": (
        c.Ack(partition="p", task="t", samples=SOME, claims=ODD),  # type: ignore[arg-type]
        "Ack: claims=b.*: buffer size must be a multiple of element size",
    ),
    "list for an array": (
        c.Ack(partition="p", task="t", samples=SOME, claims=[1]),  # type: ignore[arg-type]
        r"Ack: claims=\[1\]: expected the bytes of an array, got list",
    ),
    "enum": (
        c.Commit(partition="p", samples=SOME, mode="replace"),  # type: ignore[arg-type]
        "Commit: mode='replace': invalid enum value 'replace'",
    ),
    "tag": (
        c.SetTags(partition="p", samples=SOME, tags=(c.TagColumn(name="x", values=(b"y",)),)),  # type: ignore[arg-type]
        r"SetTags: tags\[0\].values\[0\]=b'y': expected .*, got `bytes`",
    ),
    "large tag": (
        c.SetTags(partition="p", samples=SOME, tags=(c.TagColumn(name="x", values=(1 << 63,)),)),
        r"tags\[0\].values\[0\]=9223372036854775808: expected `int` <= 9223372036854775807",
    ),
    "large": (
        c.SetVersion(partition="p", version=1 << 63),
        "SetVersion: version=9223372036854775808: expected `int` <= 9223372036854775807",
    ),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_calls_are_rejected_under_their_number(case: tuple[Any, str]) -> None:
    command, why = case
    message = encode(call(command))
    with pytest.raises(InvalidRequestError, match=why):
        decode_request(message)
    assert call_id_of(message) == 5


def test_malformed_parts_are_rejected() -> None:
    for value, why in (
        ({"type": "Clear", "partition": "p", "samples": {}}, "name samples by ids, or by rows"),
        (
            {"type": "Clear", "partition": "p", "samples": {"rows": b"", "generations": bytes(8)}},
            "name samples by ids, or by rows",
        ),
        ({"type": "Frobnicate"}, "malformed request: Invalid value 'Frobnicate'"),
        (
            {
                "type": "SetTags",
                "partition": "p",
                "samples": {"ids": []},
                "tags": [{"name": "x", "values": [1], "positions": b""}],
            },
            "1 values for 0 positions",
        ),
        (
            {"type": "Register", "partition": "p", "fields": {"f": {"inner": [-1]}}, "num_samples": None, "tasks": []},
            "negative size",
        ),
        (
            {"type": "Register", "partition": "p", "fields": {"f": {"dtype": "x"}}, "num_samples": None, "tasks": []},
            "unknown dtype 'x'",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            decode_request(msgspec.msgpack.encode(["Call", 1, 5, 1, value, []]))


@pytest.mark.parametrize("numbers", [{"session": -1}, {"call_id": -1}, {"watermark": -1}, {"confirmed": (-1, 2)}])
def test_numbers_of_calls_are_not_negative(numbers: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"Call: .*=-1: expected `int` >= 0"):
        decode_request(encode(call(c.Units(), **numbers)))


@pytest.mark.parametrize("item", [c.Tick(now=1.0), c.UnitLost(unit=1)], ids=lambda item: type(item).__name__)
def test_clients_may_not_send_the_reports_of_others(item: c.Input) -> None:
    with pytest.raises(InvalidRequestError, match=f"Invalid value '{type(item).__name__}'"):
        decode_request(encode(item))


NO_VALUE: Any = object()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (c.Seal(partition="lone surrogate \ud800"), "partition: the string .* unpaired surrogate"),
        (c.Release(located=1 << 80), "Release: located=.*: expected an integer of at most 64 bits"),
        (c.Seal(partition=NO_VALUE), "Seal: partition=<object .*>: expected `str`, got `object`"),
        (c.SetVersion(partition="p", version=NO_VALUE), "version=<object .*: expected `int`, got"),
        (c.Stats(partitions=("p", NO_VALUE)), "Stats: partitions=.*: expected `str`, got `object`"),
    ],
)
def test_values_without_an_encoded_form_are_refused_at_the_sender(command: c.Command, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        encode(call(command))


class Text(str):
    """A string with a class of its own."""


def test_scalars_of_numpy_and_subclasses_are_plain() -> None:
    values = (np.str_("a"), np.int64(3), np.float32(0.5), np.True_, Text("b"))
    command = c.SetTags(partition=Text("p"), samples=SOME, tags=(c.TagColumn(name="x", values=values),))  # type: ignore[arg-type]
    back = decode(encode(call(command)))
    assert isinstance(back, c.Call)
    assert isinstance(back.command, c.SetTags)
    assert [type(value) for value in back.command.tags[0].values] == [str, int, float, bool, str]
    assert back.command.tags[0].values == ("a", 3, 0.5, True, "b")


def test_nan_and_negative_zero_keep_their_bits() -> None:
    tag = c.TagColumn(name="x", values=(float("nan"), -0.0, float("inf")))
    back = decode(encode(call(c.SetTags(partition="p", samples=SOME, tags=(tag,)))))
    assert isinstance(back, c.Call)
    assert isinstance(back.command, c.SetTags)
    assert np.array(back.command.tags[0].values).tobytes() == np.array(tag.values).tobytes()


def test_arrays_need_not_be_contiguous_and_come_back_read_only() -> None:
    rows = np.arange(10, dtype=np.int64)[::-2]
    back = decode(encode(call(c.Clear(partition="p", samples=c.Samples(rows=rows, generations=rows)))))
    assert isinstance(back, c.Call)
    assert isinstance(back.command, c.Clear)
    assert back.command.samples is not None
    assert back.command.samples.rows is not None
    assert back.command.samples.rows.tolist() == rows.tolist()
    assert not back.command.samples.rows.flags.writeable


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_damaged_records_are_an_error_or_another_input(place: int, damage: bytes) -> None:
    samples = c.Samples(rows=np.arange(5), generations=np.arange(5))
    call = c.Call(session=3, call_id=7, watermark=2, command=c.Clear(partition="p", samples=samples))
    record = bytearray(encode(call))
    at = place % len(record)
    record[at : at + len(damage)] = damage
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(decode(bytes(record)), c.Input)


@pytest.mark.parametrize("seed", range(2))
def test_a_log_of_records_rebuilds_the_ledger(seed: int) -> None:
    driver = Driver(capacity=64 * 1024)
    a_busy_day(driver, seed, 200)
    first, again = Ledger(7, **driver.settings), Ledger(7, **driver.settings)
    for item in driver.log:
        assert canonical(first.apply(item)) == canonical(again.apply(decode(encode(item))))
    assert fingerprint(first) == fingerprint(again)


@pytest.mark.parametrize(
    ("message", "theirs"),
    [
        (["OpenSession", "nonce", "host", "name", PROTOCOL_VERSION + 1, 0, 0, "", "later"], PROTOCOL_VERSION + 1),
        (["OpenSession", "nonce", "host", 7, PROTOCOL_VERSION - 1], PROTOCOL_VERSION - 1),
        (["Identify", PROTOCOL_VERSION + 1, "later"], PROTOCOL_VERSION + 1),
    ],
    ids=str,
)
def test_the_first_message_of_another_version_is_refused_by_its_version(message: list[Any], theirs: int) -> None:
    """Whatever other fields it has."""
    with pytest.raises(ProtocolVersionError) as caught:
        decode_request(msgspec.msgpack.encode(message))
    assert (caught.value.client_version, caught.value.service_version) == (theirs, PROTOCOL_VERSION)
