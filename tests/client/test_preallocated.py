from __future__ import annotations

from typing import Any

import pytest

from dataplane.client import preallocated
from dataplane.client.preallocated import (
    LEAST_BYTES,
    MOST_BYTES,
    MOST_REQUESTS,
    PUTS_AHEAD,
    SMALL_BYTES,
    SOON_S,
    PreallocatedBuffer,
    bytes_of,
)
from dataplane.data.columns import encode_fields
from dataplane.ledger.commands import Preallocate

UNIT = 3


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def buffer(clock: Clock) -> PreallocatedBuffer:
    buffer = PreallocatedBuffer(clock)
    buffer.next_request(64, UNIT)
    return buffer


def add(buffer: PreallocatedBuffer, number: int = 7, nbytes: int = 256, offset: int = 1024) -> None:
    buffer.add(number, Preallocate(unit=UNIT, nbytes=nbytes), offset)


def take(buffer: PreallocatedBuffer, nbytes: int) -> Any:
    return buffer.take(nbytes)


def test_the_first_small_put_asks_for_nothing_ahead_and_one_soon_after_does(clock: Clock) -> None:
    buffer = PreallocatedBuffer(clock)
    assert buffer.next_request(64, UNIT) is None
    next_request = buffer.next_request(64, UNIT)
    assert (next_request.unit, next_request.nbytes) == (UNIT, LEAST_BYTES)
    clock.now += SOON_S
    assert buffer.next_request(64, UNIT) is None


def test_space_is_for_several_puts_within_bounds(buffer: PreallocatedBuffer) -> None:
    assert buffer.next_request(64_000, UNIT).nbytes == PUTS_AHEAD * 64_000
    assert buffer.next_request(SMALL_BYTES, UNIT).nbytes == MOST_BYTES


@pytest.mark.parametrize(("nbytes", "unit"), [(SMALL_BYTES + 1, UNIT), (0, UNIT), (64, None)])
def test_nothing_is_asked_for_large_or_empty_puts_or_without_a_mapped_arena(
    buffer: PreallocatedBuffer, nbytes: int, unit: int | None
) -> None:
    assert buffer.next_request(nbytes, unit) is None


def test_a_refusal_stands_for_a_while(buffer: PreallocatedBuffer, clock: Clock) -> None:
    buffer.record_rejection()
    assert buffer.next_request(64, UNIT) is None
    clock.now += SOON_S / 2
    assert buffer.next_request(64, UNIT) is None
    clock.now += SOON_S / 2
    assert buffer.next_request(64, UNIT) is not None


def test_parts_follow_one_another_until_the_space_is_used_up(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    assert [take(buffer, n).offset for n in (64, 128, 64)] == [1024, 1088, 1216]
    assert take(buffer, 64) is None


def test_space_goes_back_once_replaced_and_no_longer_in_use(buffer: PreallocatedBuffer) -> None:
    add(buffer, number=7)
    first, second = take(buffer, 64), take(buffer, 64)
    assert take(buffer, 256) is None
    buffer.next_request(256, UNIT)
    add(buffer, number=8)
    assert list(buffer.returned) == []
    buffer.finish(first, failed=False)
    assert list(buffer.returned) == []
    buffer.finish(second, failed=False)
    assert list(buffer.returned) == [7]
    assert take(buffer, 64).space.number == 8


def test_space_that_several_puts_asked_for_is_used_by_the_next_ones(buffer: PreallocatedBuffer) -> None:
    add(buffer, number=7, nbytes=128)
    add(buffer, number=8, nbytes=128)
    taken = [take(buffer, 64) for _ in range(5)]
    assert [part and part.space.number for part in taken] == [7, 7, 8, 8, None]
    assert list(buffer.returned) == []


def test_of_puts_that_begin_at_once_some_ask_for_preallocated_space(buffer: PreallocatedBuffer) -> None:
    assert [buffer.next_request(64, UNIT) is not None for _ in range(MOST_REQUESTS + 1)] == [True] * MOST_REQUESTS + [
        False
    ]
    buffer.end_request()
    assert buffer.next_request(64, UNIT) is not None
    assert buffer.next_request(64, UNIT) is None


def test_after_a_failure_the_space_is_given_up_once_nobody_writes_to_it(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    failed, other = take(buffer, 64), take(buffer, 64)
    buffer.finish(failed, failed=True)
    assert take(buffer, 64) is None
    assert list(buffer.returned) == []
    buffer.finish(other, failed=False)
    assert list(buffer.returned) == [7]


def test_two_failures_give_space_back_once(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    first, second = take(buffer, 64), take(buffer, 64)
    buffer.finish(first, failed=True)
    buffer.finish(second, failed=True)
    assert list(buffer.returned) == [7]


def test_a_part_may_be_finished_twice(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    part, other = take(buffer, 64), take(buffer, 64)
    buffer.finish(part, failed=False)
    buffer.finish(part, failed=True)
    assert list(buffer.returned) == [], "the other is in use"
    buffer.finish(other, failed=False)
    assert list(buffer.returned) == [7]


def test_space_unused_for_a_heartbeat_goes_back(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    buffer.give_up_idle()
    buffer.finish(take(buffer, 64), failed=False)
    buffer.give_up_idle()
    assert list(buffer.returned) == []
    buffer.give_up_idle()
    assert list(buffer.returned) == [7]
    assert take(buffer, 64) is None


def test_idle_space_that_is_written_to_goes_back_afterwards(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    part = take(buffer, 64)
    buffer.give_up_idle()
    buffer.give_up_idle()
    assert list(buffer.returned) == []
    buffer.finish(part, failed=False)
    assert list(buffer.returned) == [7]


def test_columns_are_placed_each_at_a_granule_of_its_own(buffer: PreallocatedBuffer) -> None:
    columns = encode_fields({"a": ["x" * 100], "b": ["y"], "c": ["z"]}, rows=1, specs={})
    add(buffer, nbytes=4096)
    nbytes = bytes_of(columns)
    placements = take(buffer, nbytes).placements(columns)
    assert [(p.column, p.first, p.last, p.unit, p.offset) for p in placements] == [
        (0, 0, 1, UNIT, 1024),
        (1, 0, 1, UNIT, 1024 + 128),
        (2, 0, 1, UNIT, 1024 + 192),
    ]
    assert take(buffer, 64).offset == 1024 + nbytes == 1024 + 256


def test_the_bounds_make_sense() -> None:
    assert preallocated.SMALL_BYTES <= preallocated.MOST_BYTES
    assert preallocated.LEAST_BYTES <= preallocated.MOST_BYTES


def test_all_space_is_given_up_once_its_parts_are_finished(buffer: PreallocatedBuffer) -> None:
    add(buffer, number=7, nbytes=64)
    add(buffer, number=8)
    part = take(buffer, 64)
    buffer.give_up_all()
    assert list(buffer.returned) == [8]
    assert take(buffer, 64) is None
    buffer.finish(part, failed=False)
    assert list(buffer.returned) == [8, 7]
