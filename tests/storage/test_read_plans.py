"""Reads of parts of elements: the requests bring exactly these bytes, and the unit serves nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.inner_slice import InnerSlice
from dataplane.errors import InvalidRequestError, StorageUnitError
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.arena import Arena
from dataplane.storage.server import ArenaAccess
from dataplane.storage.transport import read_plans
from dataplane.storage.transport.read_plans import inner_to_pb, plan_slices
from tests.core.test_values import slices_of

ARENA_BYTES = 4096


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_plans, "READ_BYTES", 24)
        patch.setattr(read_plans, "CHUNK_RANGES", 3)
        yield


@pytest.fixture(scope="module")
def access() -> Iterator[ArenaAccess]:
    arena = Arena.create("/dev/shm", 1 << 20, epoch=1)
    arena.grow(ARENA_BYTES)
    arena.data[:ARENA_BYTES] = np.random.default_rng(0).integers(0, 256, ARENA_BYTES, dtype=np.uint8)
    yield ArenaAccess(arena, lambda why: StorageUnitError(unit=1, endpoint="here", why=why))
    arena.close()


def read(access: ArenaAccess, request: read_plans.ReadRequest) -> np.ndarray[Any, Any]:
    """What the unit does with a request."""
    assert request.inner is not None
    wire = pb.ReadRanges(offsets=request.offsets, sizes=request.sizes, inner=inner_to_pb(request.inner))
    target = np.zeros(request.nbytes, np.uint8)
    access.read(access.ranges(wire), target)
    return target


@given(st.data(), st.lists(st.integers(1, 4), max_size=3), st.lists(st.integers(0, 5), max_size=6))
def test_the_requests_of_a_plan_bring_the_part_of_every_element(
    access: ArenaAccess, data: st.DataObject, shape: list[int], elements: list[int]
) -> None:
    slices = data.draw(slices_of(shape))
    inner = InnerSlice.of(shape, 4, slices)
    most = ARENA_BYTES - 5 * inner.unit_bytes
    offsets = [data.draw(st.integers(0, most)) for _ in elements]
    plan = plan_slices(np.array(offsets, np.int64), np.array(elements, np.int64), inner, within=ARENA_BYTES)
    (nbytes,) = plan.buffers
    buffer, filled = np.zeros(nbytes, np.uint8), 0
    for request in plan.requests:
        assert 0 < request.nbytes <= 24
        assert len(request.offsets) <= 3
        assert request.targets == [(0, filled, filled + request.nbytes)]
        buffer[filled : filled + request.nbytes] = read(access, request)
        filled += request.nbytes
    assert filled == nbytes
    arena = access._arena.data
    for offset, count, start in zip(offsets, elements, plan.offsets.tolist(), strict=True):
        row = np.frombuffer(arena[offset : offset + count * inner.unit_bytes].tobytes(), np.uint8)
        row = row.reshape(count, *shape, 4)[(slice(None), *slices)]
        assert buffer[start : start + row.nbytes].tobytes() == row.tobytes()


def test_ranges_outside_the_arena_are_refused_before_anything_is_sent() -> None:
    inner = InnerSlice.of((4,), 4, [slice(1)])
    for offset, count in ((-1, 1), (ARENA_BYTES, 1), (0, 1 << 60)):
        with pytest.raises(InvalidRequestError, match="outside the 4,096 bytes"):
            plan_slices(np.array([offset]), np.array([count]), inner, within=ARENA_BYTES)


@pytest.mark.parametrize(
    ("inner", "offset", "size", "why"),
    [
        (pb.InnerSlice(unit_bytes=16, run=4), ARENA_BYTES - 19, 8, "outside the 4096 backed bytes"),
        (pb.InnerSlice(unit_bytes=64, counts=[2], strides=[32], run=4), ARENA_BYTES - 35, 8, "outside the 4096 backed"),
        (pb.InnerSlice(unit_bytes=16, run=4), 0, 6, "not a multiple of the 4 selected bytes"),
        (pb.InnerSlice(unit_bytes=16), 0, 4, "malformed slice"),
        (pb.InnerSlice(unit_bytes=16, counts=[2], run=4), 0, 8, "malformed slice"),
        (pb.InnerSlice(unit_bytes=1 << 63, run=4), 0, 8, "malformed slice"),
        (pb.InnerSlice(unit_bytes=16, counts=[1] * 33, strides=[1] * 33, run=4), 0, 4, "malformed slice"),
        (pb.InnerSlice(unit_bytes=16, counts=[1 << 40, 1 << 40], strides=[1, 1], run=4), 0, 4, "malformed slice"),
    ],
)
def test_the_unit_refuses_other_slices(
    access: ArenaAccess, inner: pb.InnerSlice, offset: int, size: int, why: str
) -> None:
    with pytest.raises(StorageUnitError, match=why):
        access.ranges(pb.ReadRanges(offsets=[offset], sizes=[size], inner=inner))


def test_the_last_backed_byte_can_be_read(access: ArenaAccess) -> None:
    inner = pb.InnerSlice(unit_bytes=64, counts=[2], strides=[32], run=4)
    assert access.ranges(pb.ReadRanges(offsets=[ARENA_BYTES - 36], sizes=[8], inner=inner)).sizes == [8]
