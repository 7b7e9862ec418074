import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequestError
from dataplane.storage.transport import read_plans, request_chunks
from dataplane.storage.transport.read_plans import plan_read
from dataplane.storage.transport.request_chunks import plan_write

ARENA_BYTES = 4096


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Frames of their own from 48 bytes on, five ranges a request, so that little data meets every limit."""
    monkeypatch.setattr(request_chunks, "SMALL_BYTES", 48)
    monkeypatch.setattr(request_chunks, "CHUNK_RANGES", 5)
    monkeypatch.setattr(read_plans, "CHUNK_RANGES", 5)


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


def fetched(plan, arena):
    """The buffers, filled as the requests say."""
    buffers = [np.zeros(nbytes, np.uint8) for nbytes in plan.buffers]
    for request in plan.requests:
        payload = np.concatenate([arena[o : o + s] for o, s in zip(request.offsets, request.sizes, strict=True)])
        assert len(payload) == request.nbytes == sum(last - first for _, first, last in request.targets)
        for number, first, last in request.targets:
            buffers[number][first:last], payload = payload[: last - first], payload[last - first :]
    return buffers


@given(
    st.lists(st.lists(ranges, max_size=12), min_size=1, max_size=4),
    st.sampled_from([64, 100, 320, 4096]),
    st.booleans(),
)
def test_reads_bring_every_range_and_of_a_column_no_byte_twice(columns, chunk_bytes, by_address):
    columns = [sorted(column) if by_address else column + column[:3] for column in columns]
    arena = np.random.default_rng(0).integers(0, 256, ARENA_BYTES, dtype=np.uint8)
    asked = np.array([pair for column in columns for pair in column], np.int64).reshape(-1, 2)
    counts = [len(column) for column in columns]
    plan = plan_read(asked[:, 0], asked[:, 1], columns=counts, chunk_bytes=chunk_bytes)
    assert plan.which.tolist() == [number for number, count in enumerate(counts) for _ in range(count)]
    wanted = [{byte for at, size in column for byte in range(at, at + size)} for column in columns]
    assert plan.buffers == [len(each) for each in wanted]
    for request in plan.requests:
        assert 0 < request.nbytes <= chunk_bytes
        assert len(request.offsets) <= 5
        assert min(request.sizes) > 0
    buffers = fetched(plan, arena)
    for number, (offset, size) in enumerate(asked):
        at = plan.offsets[number]
        found = buffers[plan.which[number]][at : at + size]
        assert found.tobytes() == arena[offset : offset + size].tobytes()


def test_neighbours_merge_and_repeats_travel_once():
    offsets = np.array([1000, 0, 100, 1000, 50, 1010], np.int64)
    sizes = np.array([20, 50, 100, 20, 50, 5], np.int64)
    (request,) = plan_read(offsets, sizes).requests
    assert (request.offsets, request.sizes, request.targets) == ([0, 1000], [200, 20], [(0, 0, 220)])


def test_columns_one_after_another_share_requests_but_no_buffer():
    plan = plan_read(np.array([0, 300, 500, 560], np.int64), np.array([300, 200, 60, 40], np.int64), columns=[2, 0, 2])
    (request,) = plan.requests
    assert (request.offsets, request.sizes) == ([0, 500], [500, 100])
    assert request.targets == [(0, 0, 500), (2, 0, 100)]
    assert plan.offsets.tolist() == [0, 300, 0, 60]


def test_a_long_range_comes_in_pieces_and_lies_in_one_buffer():
    offsets, sizes = np.array([0, 0, 100, 2000], np.int64), np.array([1500, 1500, 10, 10], np.int64)
    plan = plan_read(offsets, sizes, chunk_bytes=256)
    assert [request.nbytes for request in plan.requests] == [256] * 5 + [230]
    assert plan.requests[-1].offsets == [1280, 2000]
    assert plan.offsets.tolist() == [0, 0, 100, 1500]
    assert plan.buffers == [1510]


def test_nothing_asked_is_nothing_sent():
    empty = np.zeros(0, np.int64)
    for columns in (None, [0, 0], []):
        assert plan_read(empty, empty, columns=columns).requests == []
    plan = plan_read(np.array([5], np.int64), np.array([0], np.int64))
    assert (plan.requests, plan.buffers, plan.which.tolist(), plan.offsets.tolist()) == ([], [0], [0], [0])
    with pytest.raises(InvalidRequestError, match="sizes of shape"):
        plan_read(np.zeros(2, np.int64), empty)


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, -1), (90, 11), (2**62, 2**62), (2**63 - 1, 1), (101, 0)])
def test_a_range_beyond_the_arena_is_refused(offset, size):
    with pytest.raises(InvalidRequestError, match="outside the 100 bytes"):
        plan_read(np.array([0, offset]), np.array([1, size]), within=100)
