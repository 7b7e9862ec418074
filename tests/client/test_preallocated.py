from __future__ import annotations

import pytest

from dataplane.client import preallocated
from dataplane.client.preallocated import (
    ASKS,
    LEAST_BYTES,
    MOST_BYTES,
    PUTS_AHEAD,
    SMALL_BYTES,
    SOON_S,
    PreallocatedBuffer,
    PreallocatedPart,
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
def rooms(clock: Clock) -> PreallocatedBuffer:
    rooms = PreallocatedBuffer(clock)
    rooms.wish(64, UNIT)
    return rooms


def add(rooms: PreallocatedBuffer, number: int = 7, nbytes: int = 256, offset: int = 1024) -> None:
    rooms.add(number, Preallocate(unit=UNIT, nbytes=nbytes), offset)


def take(rooms: PreallocatedBuffer, nbytes: int) -> PreallocatedPart | None:
    taken: list[PreallocatedPart] = []
    assert rooms.take(nbytes, taken) is bool(taken)
    return taken[0] if taken else None


def test_the_first_small_put_asks_for_nothing_ahead_and_one_soon_after_does(clock: Clock) -> None:
    rooms = PreallocatedBuffer(clock)
    assert rooms.wish(64, UNIT) is None
    wish = rooms.wish(64, UNIT)
    assert (wish.unit, wish.nbytes) == (UNIT, LEAST_BYTES)
    clock.now += SOON_S
    assert rooms.wish(64, UNIT) is None


def test_room_is_for_several_puts_within_bounds(rooms: PreallocatedBuffer) -> None:
    assert rooms.wish(64_000, UNIT).nbytes == PUTS_AHEAD * 64_000
    assert rooms.wish(SMALL_BYTES, UNIT).nbytes == MOST_BYTES


@pytest.mark.parametrize(("nbytes", "unit"), [(SMALL_BYTES + 1, UNIT), (0, UNIT), (64, None)])
def test_nothing_is_asked_for_large_or_empty_puts_or_without_a_mapped_arena(
    rooms: PreallocatedBuffer, nbytes: int, unit: int | None
) -> None:
    assert rooms.wish(nbytes, unit) is None


def test_a_refusal_stands_for_a_while(rooms: PreallocatedBuffer, clock: Clock) -> None:
    rooms.refused()
    assert rooms.wish(64, UNIT) is None
    clock.now += SOON_S / 2
    assert rooms.wish(64, UNIT) is None
    clock.now += SOON_S / 2
    assert rooms.wish(64, UNIT) is not None


def test_parts_follow_one_another_until_the_room_is_used_up(rooms: PreallocatedBuffer) -> None:
    add(rooms)
    assert [take(rooms, n).offset for n in (64, 128, 64)] == [1024, 1088, 1216]
    assert take(rooms, 64) is None


def test_a_room_goes_back_once_replaced_and_no_longer_in_use(rooms: PreallocatedBuffer) -> None:
    add(rooms, number=7)
    first, second = take(rooms, 64), take(rooms, 64)
    assert take(rooms, 256) is None
    rooms.wish(256, UNIT)
    add(rooms, number=8)
    assert list(rooms.returned) == []
    rooms.finish(first, failed=False)
    assert list(rooms.returned) == []
    rooms.finish(second, failed=False)
    assert list(rooms.returned) == [7]
    assert take(rooms, 64).room.number == 8


def test_room_that_several_puts_asked_for_is_used_by_the_next_ones(rooms: PreallocatedBuffer) -> None:
    add(rooms, number=7, nbytes=128)
    add(rooms, number=8, nbytes=128)
    taken = [take(rooms, 64) for _ in range(5)]
    assert [part and part.room.number for part in taken] == [7, 7, 8, 8, None]
    assert list(rooms.returned) == []


def test_of_puts_that_begin_at_once_some_ask_for_preallocated_space(rooms: PreallocatedBuffer) -> None:
    assert [rooms.wish(64, UNIT) is not None for _ in range(ASKS + 1)] == [True] * ASKS + [False]
    rooms.answered()
    assert rooms.wish(64, UNIT) is not None
    assert rooms.wish(64, UNIT) is None
    rooms.idle()
    assert rooms.wish(64, UNIT) is not None, "as many as there were before an interrupt lost count"


def test_after_a_failure_the_room_is_given_up_once_nobody_writes_to_it(rooms: PreallocatedBuffer) -> None:
    add(rooms)
    failed, other = take(rooms, 64), take(rooms, 64)
    rooms.finish(failed, failed=True)
    assert take(rooms, 64) is None
    assert list(rooms.returned) == []
    rooms.finish(other, failed=False)
    assert list(rooms.returned) == [7]


def test_two_failures_give_a_room_back_once(rooms: PreallocatedBuffer) -> None:
    add(rooms)
    first, second = take(rooms, 64), take(rooms, 64)
    rooms.finish(first, failed=True)
    rooms.finish(second, failed=True)
    assert list(rooms.returned) == [7]


def test_a_part_may_be_finished_twice(rooms: PreallocatedBuffer) -> None:
    add(rooms)
    part, other = take(rooms, 64), take(rooms, 64)
    rooms.finish(part, failed=False)
    rooms.finish(part, failed=True)
    assert list(rooms.returned) == [], "the other is in use"
    rooms.finish(other, failed=False)
    assert list(rooms.returned) == [7]


def test_room_that_was_never_added_goes_back_at_once_and_other_when_nobody_writes_to_it(
    rooms: PreallocatedBuffer,
) -> None:
    rooms.forsake(6)
    assert list(rooms.returned) == [6]
    add(rooms, number=7)
    part = take(rooms, 64)
    rooms.forsake(7)
    assert take(rooms, 64) is None
    assert list(rooms.returned) == [6]
    rooms.finish(part, failed=False)
    assert list(rooms.returned) == [6, 7]


def test_room_unused_for_a_heartbeat_goes_back(rooms: PreallocatedBuffer) -> None:
    add(rooms)
    rooms.idle()
    rooms.finish(take(rooms, 64), failed=False)
    rooms.idle()
    assert list(rooms.returned) == []
    rooms.idle()
    assert list(rooms.returned) == [7]
    assert take(rooms, 64) is None


def test_idle_room_that_is_written_to_goes_back_afterwards(rooms: PreallocatedBuffer) -> None:
    add(rooms)
    part = take(rooms, 64)
    rooms.idle()
    rooms.idle()
    assert list(rooms.returned) == []
    rooms.finish(part, failed=False)
    assert list(rooms.returned) == [7]


def test_columns_are_placed_each_at_a_granule_of_its_own(rooms: PreallocatedBuffer) -> None:
    columns = encode_fields({"a": ["x" * 100], "b": ["y"], "c": ["z"]}, rows=1, specs={})
    add(rooms, nbytes=4096)
    nbytes = bytes_of(columns)
    placements = take(rooms, nbytes).placements(columns)
    assert [(p.column, p.first, p.last, p.unit, p.offset) for p in placements] == [
        (0, 0, 1, UNIT, 1024),
        (1, 0, 1, UNIT, 1024 + 128),
        (2, 0, 1, UNIT, 1024 + 192),
    ]
    assert take(rooms, 64).offset == 1024 + nbytes == 1024 + 256


def test_the_bounds_make_sense() -> None:
    assert preallocated.SMALL_BYTES <= preallocated.MOST_BYTES
    assert preallocated.LEAST_BYTES <= preallocated.MOST_BYTES
