import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.bulk import frames
from dataplane.bulk.frames import plan_read, plan_write
from dataplane.errors import InvalidRequestError

ARENA_BYTES = 4096


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Frames of their own from 48 bytes on, five ranges a request, so that little data meets every limit."""
    monkeypatch.setattr(frames, "SMALL_BYTES", 48)
    monkeypatch.setattr(frames, "CHUNK_RANGES", 5)


def carry_out(chunks, arena):
    """What the unit does with write requests."""
    for chunk in chunks:
        at = 0
        for frame, count in zip(chunk.frames, chunk.frame_ranges, strict=True):
            data = bytes(frame)
            for offset, size in zip(chunk.offsets[at : at + count], chunk.sizes[at : at + count], strict=True):
                arena[offset : offset + size] = np.frombuffer(data[:size], np.uint8)
                data = data[size:]
            assert data == b"", "a frame is as long as its ranges"
            at += count
        assert at == len(chunk.offsets)


pieces = st.lists(st.integers(0, 150), max_size=4)


@given(st.lists(pieces, max_size=8), st.integers(50, 300), st.randoms(use_true_random=False))
def test_writes_land_where_they_should(sizes, chunk_bytes, random):
    gaps = [random.randrange(0, 3) for _ in sizes]
    offsets, buffers, expected, at = [], [], np.zeros(8192, np.uint8), 0
    for lengths, gap in zip(sizes, gaps, strict=True):
        parts = [np.frombuffer(random.randbytes(length), np.uint8) for length in lengths]
        offsets.append(at)
        buffers.append(parts if len(parts) != 1 else parts[0])
        for part in parts:
            expected[at : at + len(part)] = part
            at += len(part)
        at += gap
    order = random.sample(range(len(offsets)), len(offsets))
    chunks = list(plan_write([offsets[k] for k in order], [buffers[k] for k in order], chunk_bytes=chunk_bytes))
    arena = np.zeros(8192, np.uint8)
    carry_out(chunks, arena)
    assert arena.tobytes() == expected.tobytes()
    assert all(0 < chunk.nbytes <= chunk_bytes for chunk in chunks)
    assert all(chunk.nbytes == sum(chunk.sizes) and len(chunk.offsets) <= 5 for chunk in chunks)


def test_large_buffers_are_not_copied_and_small_ones_travel_together():
    big, small = np.arange(100, dtype=np.uint8), np.arange(3, dtype=np.uint8)
    (chunk,) = plan_write([0, 200, 203, 300, 400], [big, small, small, small, big])
    assert [len(frame) for frame in chunk.frames] == [100, 9, 100]
    assert (chunk.offsets, chunk.sizes, chunk.frame_ranges) == ([0, 200, 300, 400], [100, 6, 3, 100], [1, 2, 1])
    big[0] = 77
    assert chunk.frames[0][0] == 77


def test_buffers_of_any_shape_and_type_but_contiguous():
    grid = np.arange(60, dtype=np.int32).reshape(6, 10)
    arena = np.zeros(1024, np.uint8)
    carry_out(plan_write([0, 240, 250], [grid, b"ab", np.zeros((0, 3))]), arena)
    assert arena[:242].tobytes() == grid.tobytes() + b"ab"
    with pytest.raises(TypeError, match="contiguous"):
        list(plan_write([0], [grid[:, ::2]]))
    with pytest.raises(InvalidRequestError, match="2 offsets for 1 buffers"):
        list(plan_write([0, 1], [b""]))


ranges = st.tuples(st.integers(0, ARENA_BYTES - 1), st.integers(0, 700)).map(
    lambda pair: (pair[0], min(pair[1], ARENA_BYTES - pair[0]))
)


@given(st.lists(ranges, max_size=30), st.sampled_from([64, 128, 320, 4096]), st.integers(0, 2))
def test_reads_hold_every_range_whole(asked, chunk_bytes, repeats):
    asked = asked + asked[:3] * repeats
    arena = np.random.default_rng(0).integers(0, 256, ARENA_BYTES, dtype=np.uint8)
    offsets = np.array([each[0] for each in asked], np.int64)
    sizes = np.array([each[1] for each in asked], np.int64)
    plan = plan_read(offsets, sizes, chunk_bytes=chunk_bytes)
    for buffer in plan.buffers:
        assert buffer.nbytes == buffer.sizes.sum() > 0
        assert (buffer.offsets + buffer.sizes <= ARENA_BYTES).all()
        assert buffer.nbytes <= chunk_bytes or len(buffer.offsets) == 1
        assert len(buffer.offsets) <= 5
    received = [
        np.concatenate([arena[o : o + s] for o, s in zip(each.offsets, each.sizes, strict=True)])
        for each in plan.buffers
    ]
    for number, (offset, size) in enumerate(asked):
        if size:
            at = plan.offsets[number]
            found = received[plan.which[number]][at : at + size]
            assert found.tobytes() == arena[offset : offset + size].tobytes()
            assert at % 64 == offset % 64, "as aligned as in the arena"


def test_neighbours_merge_and_repeats_travel_once():
    offsets = np.array([1000, 0, 100, 1000, 50, 1010], np.int64)
    sizes = np.array([20, 50, 100, 20, 50, 5], np.int64)
    (buffer,) = plan_read(offsets, sizes).buffers
    assert (buffer.offsets.tolist(), buffer.sizes.tolist()) == ([0, 960], [256, 64])


def test_a_long_range_is_one_buffer_with_all_that_lies_in_it():
    offsets, sizes = np.array([0, 0, 100, 2000], np.int64), np.array([1500, 1500, 10, 10], np.int64)
    plan = plan_read(offsets, sizes, chunk_bytes=256)
    assert [each.nbytes for each in plan.buffers] == [1536, 64]
    assert plan.which.tolist() == [0, 0, 0, 1]


def test_nothing_asked_is_nothing_sent():
    empty = np.zeros(0, np.int64)
    assert plan_read(empty, empty).buffers == []
    plan = plan_read(np.array([5], np.int64), np.array([0], np.int64))
    assert (plan.buffers, plan.which.tolist(), plan.offsets.tolist()) == ([], [0], [0])
    with pytest.raises(InvalidRequestError, match="sizes of shape"):
        plan_read(np.zeros(2, np.int64), empty)
