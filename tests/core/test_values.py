# ruff: noqa: F401, F811
"""Small parts that hold values: buffers, checksums, copies of rows, durations, numbers, specs of fields."""

from __future__ import annotations

import errno
import gc
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import typer
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane import DataPlaneClient, DataPlaneConfig, KVBatchMeta, StreamingDataLoader
from dataplane.cli.output import duration, time_limit
from dataplane.cli.top import _interval
from dataplane.client.operations import claim, drain_unit
from dataplane.compat.nemo_rl.client import as_timeout as of_nemo_rl
from dataplane.core import cuda_copy, cuda_memory
from dataplane.core.buffer_pool import FROM_BYTES, BufferPool
from dataplane.core.checksums import checksums_of, damaged
from dataplane.core.cuda_memory import RegisteredMemory
from dataplane.core.durations import (
    LONGEST_S,
    as_timeout,
    seconds,
    seconds_if_any,
)
from dataplane.core.inner_slice import InnerSlice
from dataplane.core.number_set import NumberSet
from dataplane.core.plain_numbers import DIGITS, LARGEST, RANGES, fits, joined_dtype, number_fits, numbers_dtype
from dataplane.core.row_copy import LONG_BYTES, WORD_TYPES, Run, copy_runs, gather, gather_padded, merge_runs
from dataplane.core.schema import TOKEN_ALIGNED_FIELDS, round_up
from dataplane.core.types import DTYPE_BYTES, FieldKind, FieldSpec, field_spec
from dataplane.data.columns import declared_specs, from_pool
from dataplane.data.tensor_memory import TORCH_DTYPES, tensor_of_numbers
from dataplane.errors import InvalidRequestError
from dataplane.training.replay_buffer import ReplayBuffer
from dataplane.training.staleness import Windowed
from tests.fake_gpu import CPU as GPU
from tests.fake_gpu import FakeGpu, _copying, fake_gpu
from tests.profiles import budget
from workers.messages.async_work import AsyncWork
from workers.training.replica_group import Deadline

# --- Memory is used again when, and only when, nobody can see it any more.


MIB = 1 << 20


def place(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("size", [100, 2 * MIB + 100, 3 * MIB])
def test_what_was_dropped_is_used_again(size: int) -> None:
    memory = BufferPool(64 * MIB)
    first = memory.take(size)
    where = place(first)
    del first
    assert place(memory.take(size - 5)) == where


@pytest.mark.parametrize("keep", ["array", "view", "tensor", "tensor view", "numpy of tensor"])
def test_what_is_held_in_any_way_is_not(keep: str) -> None:
    memory = BufferPool(64 * MIB)
    array = memory.take(MIB)
    array[:] = 7
    tensor = torch.from_numpy(array)
    held = {
        "array": array,
        "view": array[5:10],
        "tensor": tensor,
        "tensor view": tensor.view(torch.int64)[1:3],
        "numpy of tensor": tensor.view(torch.int16)[9:].numpy(),
    }[keep]
    del array, tensor
    gc.collect()
    other = memory.take(MIB)
    other[:] = 9
    assert bool((np.asarray(held).view(np.uint8) == 7).all())
    del held
    gc.collect()
    assert memory.idle_bytes > 0


def test_regions_much_too_large_stay_for_others() -> None:
    memory = BufferPool(64 * MIB)
    memory.take(32 * MIB)
    idle = memory.idle_bytes
    assert idle == 32 * MIB
    small = memory.take(3 * MIB)
    assert memory.idle_bytes == idle
    assert small.nbytes == 3 * MIB


def test_of_equal_regions_the_one_used_last_is_next_and_a_smaller_one_before_a_larger() -> None:
    memory = BufferPool(64 * MIB)
    large, first, last = memory.take(6 * MIB), memory.take(4 * MIB), memory.take(4 * MIB)
    places = [place(last), place(first), place(large)]
    del large, first
    assert memory.idle_bytes == 10 * MIB
    del last
    taken = [memory.take(4 * MIB) for _ in range(3)]
    assert [place(array) for array in taken] == places


def test_idle_memory_is_bounded_and_can_be_dropped() -> None:
    memory = BufferPool(10 * MIB)
    held = [memory.take(4 * MIB) for _ in range(5)]
    held.clear()
    assert 0 < memory.idle_bytes <= 10 * MIB
    memory.drop()
    assert memory.idle_bytes == 0
    memory.take(4 * MIB)
    assert memory.idle_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64])
def test_tensors_of_every_kind(dtype: torch.dtype) -> None:
    empty = from_pool(BufferPool(64 * MIB))
    for shape in ((3, 0), (7,), (5, FROM_BYTES, 2)):
        tensor, memory = empty(shape, dtype)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
        assert memory.nbytes == tensor.nbytes
        tensor.zero_()
        assert not memory.any()


@pytest.mark.integration
def test_a_forked_child_keeps_what_it_inherited() -> None:
    memory = BufferPool(64 * MIB)
    array = memory.take(MIB)
    array[:] = 7
    go_r, go_w = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go_r, 1)
        os._exit(0 if bool((array == 7).all()) else 1)
    where = place(array)
    del array
    again = memory.take(MIB)
    assert place(again) == where
    again[:] = 9
    os.write(go_w, b"!")
    assert os.waitpid(child, 0)[1] == 0
    for fd in (go_r, go_w):
        os.close(fd)


def test_threads_never_share() -> None:
    memory = BufferPool(64 * MIB)
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(50):
            mine = memory.take(MIB // 2)
            mine[:] = value
            if not bool((mine == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_the_machine_has_not_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    memory = BufferPool(64 * MIB)
    with monkeypatch.context() as patched:
        patched.setattr("dataplane.core.buffer_pool.mmap.mmap", none)
        with pytest.raises(MemoryError, match="cannot allocate 2,097,152 bytes of memory"):
            memory.take(MIB)
    assert memory.take(MIB).size == MIB


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core.buffer_pool.mmap.MADV_HUGEPAGE", 10_000)
    assert BufferPool(64 * MIB).take(MIB).size == MIB


# --- row copy


def test_rows_that_follow_one_another_are_merged() -> None:
    which = np.array([0, 0, 1, 1, 0], dtype=np.int32)
    offsets, sizes = np.array([0, 4, 8, 99, 8]), np.array([4, 4, 2, 0, 3])
    assert merge_runs(which, offsets, sizes) == ([0, 1, 0], [0, 8, 8], [8, 10, 11])
    assert merge_runs(None, offsets, sizes) == ([0, 0], [0, 8], [10, 11])
    assert merge_runs(None, offsets[:0], sizes[:0]) == ([], [], [])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_gather_is_concatenation(data: st.DataObject) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    unit = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    count = data.draw(st.sampled_from([0, 1, 7, 120]))
    shift = data.draw(st.integers(0, 3))
    buffers = [generator.integers(0, 256, 4096, dtype=np.uint8)[shift:] for _ in range(2)]
    which = generator.integers(0, 2, count).astype(np.int32)
    sizes = generator.integers(0, 12, count) * unit
    offsets = generator.integers(0, (4000 - 12 * 16) // unit, count) * unit
    rows = [buffers[b][o : o + n] for b, o, n in zip(which, offsets, sizes, strict=True)]
    out = np.zeros(int(sizes.sum()) + 8, dtype=np.uint8)
    gather(buffers, which, offsets, sizes, out[3:-5])
    assert out[3:-5].tobytes() == b"".join(row.tobytes() for row in rows)
    assert not out[:3].any()
    assert not out[-5:].any()

    pad = np.frombuffer(bytes(range(1, unit + 1)), dtype=WORD_TYPES[unit]).reshape(())
    padded = np.empty((count, 12 * unit), dtype=np.uint8)
    gather_padded(buffers, which, offsets, sizes, padded, pad)
    for row, got in zip(rows, padded, strict=True):
        assert got.tobytes() == row.tobytes() + pad.tobytes() * ((12 * unit - len(row)) // unit)


def test_long_copies_are_left_to_the_caller() -> None:
    """Rows of 1 byte, of a long run, and of a bit less: two buffers, padded or not."""
    generator = np.random.default_rng(0)
    buffers = [generator.integers(0, 256, 4 * LONG_BYTES, dtype=np.uint8) for _ in range(2)]
    which, sizes = np.array([0, 1, 0, 1], np.int32), np.array([1, LONG_BYTES, LONG_BYTES - 1, 3 * LONG_BYTES])
    offsets = np.array([7, 5, LONG_BYTES, LONG_BYTES])
    rows = [buffers[b][o : o + n] for b, o, n in zip(which, offsets, sizes, strict=True)]
    later: list[Run] = []
    out = np.zeros(int(sizes.sum()), np.uint8)
    gather(buffers, which, offsets, sizes, out, later=later)
    assert [target.nbytes for target, _ in later] == [LONG_BYTES, 3 * LONG_BYTES]
    copy_runs(later)
    assert np.array_equal(out, np.concatenate(rows))

    later.clear()
    padded = np.zeros((4, 3 * LONG_BYTES), np.uint8)
    gather_padded(buffers, which, offsets, sizes, padded, np.array(9, np.uint8), later=later)
    assert [target.nbytes for target, _ in later] == [LONG_BYTES, 3 * LONG_BYTES]
    copy_runs(later)
    for row, got in zip(rows, padded, strict=True):
        assert np.array_equal(got[: len(row)], row)
        assert (got[len(row) :] == 9).all()


def test_rows_outside_a_buffer_are_caught_before_anything_is_copied() -> None:
    buffer, out = np.zeros(8, dtype=np.uint8), np.ones(1, dtype=np.uint8)
    for offset in (8, 100, -1):
        with pytest.raises(AssertionError, match="outside its buffer"):
            gather([buffer], None, np.array([offset]), np.array([1]), out)
    assert out[0] == 1


# --- Checksums of rows, beside the library that defines them.


def expected(row: bytes) -> int:
    return (xxhash.xxh3_64_intdigest(row) & 0xFFFFFFFF) or 1


def laid_out(rows: list[bytes], gap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows in one memory, `gap` bytes before each."""
    memory = np.frombuffer(b"".join(b"\xa5" * gap + row for row in rows), np.uint8)
    sizes = np.array([len(row) for row in rows], np.int64)
    return memory, np.cumsum(sizes + gap) - sizes, sizes


short_rows = st.binary(min_size=4, max_size=8)


@given(st.lists(st.one_of(short_rows, short_rows, st.binary(max_size=300)), max_size=60), st.integers(0, 3))
def test_each_row_has_the_low_half_of_its_digest(rows: list[bytes], gap: int) -> None:
    found = checksums_of(*laid_out(rows, gap))
    assert found.dtype == np.uint32
    assert found.tolist() == [expected(row) for row in rows]


@given(st.integers(16, 50), st.integers(4, 8), st.randoms(use_true_random=False))
def test_many_short_rows_of_one_size(count: int, size: int, random) -> None:
    rows = [random.randbytes(size) for _ in range(count)]
    assert checksums_of(*laid_out(rows, 0)).tolist() == [expected(row) for row in rows]


def test_no_checksum_is_none_whatever_the_bytes(monkeypatch) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda row: 7 << 32)
    assert checksums_of(*laid_out([b"abc"], 0)).tolist() == [1]


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=40), st.data())
def test_a_flipped_bit_is_found_in_its_row_and_no_other(rows: list[bytes], data: st.DataObject) -> None:
    memory, offsets, sizes = laid_out(rows, 1)
    sums = checksums_of(memory, offsets, sizes)
    assert not len(damaged(memory, offsets, sizes, sums)[0])
    row = data.draw(st.integers(0, len(rows) - 1))
    hurt = memory.copy()
    hurt[offsets[row] + data.draw(st.integers(0, len(rows[row]) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    wrong, found = damaged(hurt, offsets, sizes, sums)
    assert wrong.tolist() == [row]
    assert found.tolist() == checksums_of(hurt, offsets, sizes)[row : row + 1].tolist()
    sums[row] = 0
    assert not len(damaged(hurt, offsets, sizes, sums)[0]), "a row without a checksum is not compared"


# --- The selected part of each element is what numpy's slices select.


shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def slices_of(draw: st.DrawFn, shape: list[int]) -> tuple[slice, ...]:
    bound = st.one_of(st.none(), st.integers(-5, 5))
    count = draw(st.integers(0, len(shape)))
    return tuple(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, 3]))) for _ in range(count))


@given(st.data(), shapes, st.sampled_from([1, 4]), st.integers(0, 3), st.integers(0, 5))
def test_as_numpy_slices(data: st.DataObject, shape: list[int], item_bytes: int, elements: int, before: int) -> None:
    slices = data.draw(slices_of(shape))
    dtype = np.dtype(f"u{item_bytes}")
    row = np.arange(elements * int(np.prod(shape, dtype=int))).astype(dtype).reshape(elements, *shape)
    expected = row[(slice(None), *slices)]
    inner = InnerSlice.of(shape, item_bytes, slices)
    assert inner.unit_bytes == item_bytes * int(np.prod(shape, dtype=int))
    assert elements * inner.nbytes == expected.nbytes
    buffer = np.concatenate([np.zeros(before, np.uint8), np.frombuffer(row.tobytes(), np.uint8)])
    target = np.zeros(expected.nbytes, np.uint8)
    inner.copy(buffer, before, elements, target)
    assert target.tobytes() == expected.tobytes()
    if inner.nbytes and elements:
        chosen = np.zeros(row.shape, bool)
        chosen[(slice(None), *slices)] = True
        places = np.flatnonzero(chosen[0])
        assert inner.first == places[0] * item_bytes
        assert inner.extent == (places[-1] - places[0] + 1) * item_bytes


def test_runs_are_as_long_as_possible() -> None:
    assert InnerSlice.of((47, 4), 2, [slice(12, 24)]) == InnerSlice(376, 96, (), (), 96)
    assert InnerSlice.of((6, 5, 4), 1, [slice(2, 4), slice(1, 3)]) == InnerSlice(120, 44, (2,), (20,), 8)
    assert InnerSlice.of((6,), 8, [slice(None, None, 2)]) == InnerSlice(48, 0, (3,), (16,), 8)
    assert InnerSlice.of((6, 5), 4, []) == InnerSlice(120, 0, (), (), 120)


# --- Registrations of memory with CUDA, with recorded calls in the place of CUDA.


PAGE = 4096


@pytest.fixture
def ended(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    starts: list[int] = []
    monkeypatch.setattr(cuda_memory, "_unregister", starts.append)
    return starts


def _memory(backed: int = 64 * PAGE) -> RegisteredMemory:
    return RegisteredMemory(np.zeros(64 * PAGE, np.uint8), lambda: backed)


def test_a_release_waits_for_a_registration_of_another_thread(
    fake_gpu: FakeGpu, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(start: int, nbytes: int) -> bool:
        begun.set()
        return go_on.wait(60)

    monkeypatch.setattr(cuda_memory, "_register", slow)
    memory = _memory()

    def cover() -> None:
        with cuda_memory.lock:
            memory.cover(PAGE)

    threads = [threading.Thread(target=cover), threading.Thread(target=memory.release)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    assert not ended
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 1


def test_an_interrupted_registration_is_ended(
    fake_gpu: FakeGpu, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(start: int, nbytes: int) -> bool:
        raise KeyboardInterrupt

    memory = _memory()
    with monkeypatch.context() as patch:
        patch.setattr(cuda_memory, "_register", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.cover(PAGE)
    assert len(ended) == 1
    assert memory.cover(PAGE), "it is tried again"


def test_an_interrupted_end_is_not_taken_for_a_registration(
    fake_gpu: FakeGpu, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(start: int) -> None:
        raise KeyboardInterrupt

    memory = _memory()
    assert memory.cover(PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_memory, "_unregister", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.release()
    assert memory.cover(PAGE)
    assert len(fake_gpu.registered) == 2


def test_a_size_that_is_refused_leaves_what_there_was(
    fake_gpu: FakeGpu, ended: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_memory, "_STEP_BYTES", PAGE)
    sizes: list[int] = []

    def register(start: int, nbytes: int) -> bool:
        sizes.append(nbytes)
        return nbytes <= 20 * PAGE

    monkeypatch.setattr(cuda_memory, "_register", register)
    memory = _memory()
    assert memory.cover(12 * PAGE)
    assert memory.cover(13 * PAGE), "twice as much is refused, as much as needed is not"
    assert sizes == [12 * PAGE, 24 * PAGE, 13 * PAGE]
    assert not memory.cover(21 * PAGE)
    assert "ulimit -l" in caplog.text
    assert memory.cover(13 * PAGE)
    before = len(sizes)
    assert not memory.cover(22 * PAGE)
    assert len(sizes) == before
    assert memory.cover(14 * PAGE)


def test_a_signal_handler_may_release_memory_that_its_thread_copies(fake_gpu: FakeGpu, ended: list[int]) -> None:
    memory = _memory()
    with _copying(GPU):
        assert memory.cover(PAGE)
        memory.release()
        assert not ended
    assert len(ended) == 1
    memory.release()
    assert len(ended) == 1


def test_ranges_without_bytes_do_not_narrow_the_words() -> None:
    sources, targets, sizes = (np.array(each) for each in ([1024, 2049, 4096], [0, 3, 64], [64, 0, 8]))
    ((word_bytes, table),) = cuda_copy.plan([(sources, targets, sizes)]).items()
    assert word_bytes == 8
    assert table.tolist() == [[1024, 4096], [0, 64], [8, 1], [1, 2]]
    assert cuda_copy.plan([(sources[1:2], targets[1:2], sizes[1:2])]) == {}
    assert cuda_copy.plan([]) == {}


# --- Waits, leases and intervals: what is none is refused by name where it enters, on every call that
# takes one.


NO_TIMES = [math.inf, -math.inf, math.nan, -1.0, 10**400, -(10**400)]
NO_TIMEOUTS = [-math.inf, math.nan, -1.0, -(10**400)]
UNLIMITED = [None, math.inf, 10**400, 1e18]
NO_NUMBERS = [True, "5", [5], 1j, np.bool_(True)]
STATE: Any = None
CLIENT = DataPlaneClient(DataPlaneConfig(address="127.0.0.1:1"))
BUFFER = ReplayBuffer(CLIENT, "p", Windowed(batch_size=4, window=1))
CLAIMED = KVBatchMeta("p", "train", ["a"])


def stream(**options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(CLIENT, "p", "train", ["x"], batch_size=2, **options)


DURATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "claim, partial": ("partial_after_s", lambda value: CLIENT.claim_meta("p", "t", [], 1, partial_after_s=value)),
    "claim, lease": ("lease_s", lambda value: CLIENT.claim_meta("p", "train", ["x"], 1, lease_s=value)),
    "extend": ("lease_s", lambda value: next(claim.extend(STATE, CLAIMED, value))),
    "stream, lease": ("lease_s", lambda value: stream(lease_s=value)),
    "stream, partial": ("partial_after_s", lambda value: stream(partial_after_s=value)),
}
WAITS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "claim": ("timeout_s", lambda value: CLIENT.claim_meta("p", "train", [], 1, timeout_s=value)),
    "drain": ("timeout_s", lambda value: next(drain_unit.drain(STATE, 1, value))),
    "stream": ("timeout_s", lambda value: stream(timeout_s=value)),
    "reserve": ("timeout_s", lambda value: BUFFER.reserve(4, value)),
    "take": ("timeout_s", lambda value: BUFFER.take(value)),
    "work": ("timeout", lambda value: AsyncWork(Future(), "a message").wait(value)),
    "fetch": ("timeout_s", Deadline),
}


@pytest.mark.parametrize("call", DURATIONS)
@pytest.mark.parametrize("value", NO_TIMES, ids=lambda value: repr(value)[:6])
def test_a_duration_without_an_end_is_refused_by_name(call: str, value: float) -> None:
    name, wait = DURATIONS[call]
    with pytest.raises(InvalidRequestError, match=rf"^{name}=.*: expected seconds, .* and finite$"):
        wait(value)


@pytest.mark.parametrize("call", WAITS)
@pytest.mark.parametrize("value", NO_TIMEOUTS, ids=lambda value: repr(value)[:6])
def test_a_negative_timeout_is_refused_by_name(call: str, value: float) -> None:
    name, wait = WAITS[call]
    expected = "expected seconds, 0 or more, or None or infinity for no timeout"
    with pytest.raises(InvalidRequestError, match=rf"^{name}=.*: {expected}$"):
        wait(value)


@pytest.mark.parametrize("value", UNLIMITED, ids=lambda value: repr(value)[:6])
def test_no_timeout_is_a_very_long_one(value: float | None) -> None:
    assert as_timeout("timeout_s", value) == LONGEST_S
    command = claim.claim_command("p", "train", ["x"], 1, timeout_s=value)
    assert command.timeout_s == LONGEST_S
    next(drain_unit.drain(STATE, 1, value))
    stream(timeout_s=value, prefetch=0).close()
    assert Deadline(value).left_s > LONGEST_S / 2
    done: Future[int] = Future()
    done.set_result(3)
    assert AsyncWork(done, "a message").wait(value) == 3


def test_a_timeout_is_a_time() -> None:
    values = (0, 2, 0.5, Fraction(1, 4))
    assert [as_timeout("t", value) for value in values] == [0.0, 2.0, 0.5, 0.25]
    assert of_nemo_rl is as_timeout


@pytest.mark.parametrize("call", [*WAITS, *DURATIONS])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused_by_name(call: str, value: object) -> None:
    name, wait = (WAITS | DURATIONS)[call]
    with pytest.raises(TypeError, match=rf"^{name}=.*: expected seconds as a number, got "):
        wait(value)


@pytest.mark.parametrize("call", ["claim, lease", "extend", "stream, lease"])
def test_a_lease_takes_some_time(call: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"lease_s=0\.0: expected seconds, more than 0 and finite"):
        DURATIONS[call][1](0)


def test_numbers_are_seconds_and_what_is_too_long_is_very_long() -> None:
    assert [seconds("t", value) for value in (0, 2, 0.5, np.float32(0.5), np.int64(3), Fraction(1, 4))] == [
        *(0.0, 2.0, 0.5, 0.5, 3.0, 0.25)
    ]
    assert seconds("t", 1e18) == seconds("t", 1e308) == LONGEST_S
    assert seconds_if_any("t", None) is None
    assert seconds_if_any("t", 1) == 1.0


@pytest.mark.parametrize("value", NO_TIMES, ids=lambda value: repr(value)[:6])
@pytest.mark.parametrize(
    "name",
    ["reconnect_s", "heartbeat_s", "call_timeout_s", "connect_timeout_s"],
)
def test_settings_are_times(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        DataPlaneConfig(**{name: value})
    with pytest.raises(TypeError, match=f"^{name}=True: expected"):
        DataPlaneConfig(**{name: True})


@pytest.mark.parametrize("value", [*NO_TIMEOUTS, 0, 0.0], ids=lambda value: repr(value)[:6])
def test_the_time_of_puts_is_one_or_none(value: float) -> None:
    with pytest.raises(ValueError, match=r"^put_timeout_s=.*: must be positive, infinity for no "):
        DataPlaneConfig(put_timeout_s=value)
    with pytest.raises(TypeError, match=r"^put_timeout_s=True: expected"):
        DataPlaneConfig(put_timeout_s=True)
    assert DataPlaneConfig(put_timeout_s=math.inf).put_timeout_s == math.inf


def test_a_time_limit_may_be_none() -> None:
    limits = [time_limit(text) for text in ("inf", "1e400", "0.5", "0")]
    assert limits == [LONGEST_S, LONGEST_S, 0.5, 0.0]
    for text in ("-inf", "nan", "-1", "soon", ""):
        with pytest.raises(typer.BadParameter, match=r'is not a time limit; .* "inf" for no limit'):
            time_limit(text)


@pytest.mark.parametrize("parser", [duration, _interval])
@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e400", "-1", "soon", ""])
def test_flags_are_times(parser: Callable[[str], float], text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a duration; write a number of seconds"):
        parser(text)
    assert parser("0.5") == 0.5


# --- Plain numbers: their dtype holds each of them, and what it fits into does, too.


numbers = st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.integers(-300, 300)


@given(st.lists(numbers, min_size=1), st.lists(numbers, min_size=1), st.sampled_from(sorted(DTYPE_BYTES)))
def test_what_fits_a_dtype_converts_to_it(first: list[Any], second: list[Any], dtype: str) -> None:
    joined = joined_dtype(numbers_dtype(first), numbers_dtype(second))
    if joined is None or not fits(joined, dtype):
        return
    torch_dtype = TORCH_DTYPES[dtype]
    both = first + second
    assert all(number_fits(number, dtype) for number in both)
    converted = tensor_of_numbers(both, torch_dtype)
    assert converted.dtype is torch_dtype
    for number, stored in zip(both, converted.to(torch.complex128).real.tolist(), strict=True):
        assert math.isfinite(stored) == math.isfinite(number)
        assert isinstance(number, float) or stored == float(number), "integers are exact"


@pytest.mark.parametrize("values", [[], ["a"], [1, None], [1 << 64], [-1, 1 << 63], [0.5, 1 << 60], [1 + 2j], [[1]]])
def test_other_values_have_no_dtype(values: list[Any]) -> None:
    assert numbers_dtype(values) is None


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([True, False], "bool"),
        ([0, 255], "uint8"),
        ([-1, 255], "int16"),
        ([0.5, 2], "float16"),
        ([float("nan"), 1e300], "float64"),
        ([1, 1e5], "float32"),
        ([1 << 30, 0.5], "float64"),
    ],
)
def test_the_smallest_dtype(values: list[Any], dtype: str) -> None:
    assert numbers_dtype(values) == dtype


@pytest.mark.parametrize(
    ("numbers", "dtype", "expected"),
    [
        ("bool", "bool", True),
        ("bool", "int8", True),
        ("bool", "float8_e4m3fn", True),
        ("uint8", "bool", False),
        ("uint8", "int8", False),
        ("uint8", "int16", True),
        ("float16", "int64", False),
        ("float16", "bfloat16", True),
        ("float32", "float16", False),
        ("uint16", "float16", False),
        ("int64", "float32", False),
        ("int16", "float32", True),
        ("uint8", "bfloat16", True),
    ],
)
def test_what_a_dtype_holds(numbers: str, dtype: str, expected: bool) -> None:
    assert fits(numbers, dtype) is expected


def test_the_largest_numbers_are_those_of_torch() -> None:
    for name, largest in LARGEST.items():
        dtype = TORCH_DTYPES[name]
        real = torch.finfo(dtype.to_real() if dtype.is_complex else dtype)
        assert real.max == largest
        assert real.eps == 2.0 ** (1 - DIGITS[name])
    for name, (low, high) in RANGES.items():
        if name != "bool":
            limits = torch.iinfo(TORCH_DTYPES[name])
            assert (limits.min, limits.max) == (low, high)


# --- Field specs normalise, refuse and compare.


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_sizes_are_those_of_torch(name: str) -> None:
    assert torch.empty((), dtype=getattr(torch, name)).element_size() == DTYPE_BYTES[name]


def test_parts_are_normalised() -> None:
    spec = FieldSpec("jagged", torch.bfloat16, [3, 2])  # type: ignore[arg-type]
    assert (spec.kind, spec.dtype, spec.inner) == (FieldKind.JAGGED, "bfloat16", (3, 2))
    assert spec.unit_bytes == 12
    assert spec.settled


@pytest.mark.parametrize(
    ("spec", "settled"),
    [
        (FieldSpec(), False),
        (FieldSpec("dense"), False),
        (FieldSpec("dense", "int64"), False),
        (FieldSpec("ragged", "int64"), True),
        (FieldSpec("object"), True),
    ],
)
def test_settled(spec: FieldSpec, settled: bool) -> None:
    assert spec.settled is settled


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="quantum"):
        FieldSpec("quantum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int7"):
        FieldSpec("dense", "int7")
    with pytest.raises(TypeError):
        field_spec(7)


def test_an_open_spec_accepts_what_it_leaves_open() -> None:
    settled = FieldSpec("dense", "int64", (2,))
    assert FieldSpec().accepts(settled)
    assert FieldSpec("dense").accepts(settled)
    assert not FieldSpec("jagged").accepts(settled)
    assert not FieldSpec(None, "int32").accepts(settled)
    assert not FieldSpec(None, None, (3,)).accepts(settled)
    assert field_spec({"kind": "dense"}).accepts(settled)


@pytest.mark.parametrize("inner", [(1 << 62,), (0, 1 << 41), (1 << 21, 1 << 21), (1,) * 33])
def test_a_shape_no_row_can_have_is_refused(inner: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at most 32 dimensions"):
        FieldSpec("dense", "int64", inner)


# --- schema


def test_declared_specs() -> None:
    assert declared_specs(["input_ids", "reward"]) == {"input_ids": FieldSpec(), "reward": FieldSpec()}
    declared = declared_specs(
        {
            "advantages": FieldSpec(FieldKind.DENSE),
            "values": FieldSpec(dtype="bfloat16"),
            "returns": None,
            "image": {"kind": "ragged", "dtype": "uint8"},
        }
    )
    assert declared == {
        "advantages": FieldSpec(FieldKind.DENSE),
        "values": FieldSpec(dtype="bfloat16"),
        "returns": FieldSpec(),
        "image": FieldSpec(FieldKind.RAGGED, "uint8"),
    }
    assert declared_specs(None) == declared_specs([]) == {}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("input_ids", "not one string"),
        (["a", "a"], "twice"),
        ([1], "non-empty strings"),
        ([""], "non-empty strings"),
        ({"a": 3}, "field 'a'"),
        ({"a": {"dtype": "float99"}}, "unknown dtype"),
        ({"a": {"knid": "dense"}}, "field 'a'"),
    ],
)
def test_bad_declarations(fields: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        declared_specs(fields)  # type: ignore[arg-type]


def test_columns_of_the_document_are_token_aligned() -> None:
    assert {"input_ids", "token_mask", "generation_logprobs", "prev_logprobs", "advantages"} <= TOKEN_ALIGNED_FIELDS
    assert "input_lengths" not in TOKEN_ALIGNED_FIELDS


def test_round_up() -> None:
    assert [round_up(length, 8) for length in (0, 1, 8, 9)] == [0, 8, 8, 16]
    with pytest.raises(ValueError, match="multiple=0: must be at least 1"):
        round_up(3, 0)


# --- number set


@budget(300)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=12), st.integers(-1, 40))
def test_it_is_a_set(added: list[tuple[int, int]], lowest: int) -> None:
    found, numbers = NumberSet(), set[int]()

    def check() -> None:
        assert [number for number in range(-2, 40) if number in found] == sorted(numbers)
        assert found.ranges == sum(number - 1 not in numbers for number in numbers)

    for first, more in added:
        found.add(first, first + more)
        numbers |= set(range(first, first + more + 1))
        check()
    found.drop_below(lowest)
    numbers = {number for number in numbers if number >= lowest}
    check()
