"""The ledger's inputs survive being written down, and garbage is told."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.commands import inputs
from dataplane.ledger.encoding.image import dump
from dataplane.ledger.encoding.journal_records import RecordError, decode, encode
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
@given(data=st.data(), session=INT64, number=INT64, watermark=INT64, confirmed=st.lists(INT64, max_size=3).map(tuple))
def test_calls(
    kind: type[c.Command], data: st.DataObject, session: int, number: int, watermark: int, confirmed: tuple[int, ...]
) -> None:
    command = data.draw(of_type(kind))
    call = c.Call(session=session, number=number, watermark=watermark, confirmed=confirmed, command=command)
    assert plain(decode(encode(call))) == plain(call)


@given(st.binary(max_size=60))
def test_garbage_is_a_record_error(garbage: bytes) -> None:
    with pytest.raises(RecordError, match="not a record of an input"):
        decode(garbage)


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_damaged_records_are_an_error_or_another_input(place: int, damage: bytes) -> None:
    samples = c.Samples(rows=np.arange(5), generations=np.arange(5))
    call = c.Call(session=3, number=7, watermark=2, command=c.Clear(partition="p", samples=samples))
    record = bytearray(encode(call))
    at = place % len(record)
    record[at : at + len(damage)] = damage
    with contextlib.suppress(RecordError):
        assert isinstance(decode(bytes(record)), c.Input)


def test_an_image_of_something_else_is_no_record() -> None:
    with pytest.raises(RecordError):
        decode(b"\x92\xa0\xc4" + bytes([len(dump([5]))]) + dump([5]))


@pytest.mark.parametrize("seed", range(2))
def test_a_log_of_records_rebuilds_the_ledger(seed: int) -> None:
    driver = Driver(capacity=64 * 1024)
    a_busy_day(driver, seed, 200)
    first, again = Ledger(7, **driver.settings), Ledger(7, **driver.settings)
    for item in driver.log:
        assert canonical(first.apply(item)) == canonical(again.apply(decode(encode(item))))
    assert fingerprint(first) == fingerprint(again)
