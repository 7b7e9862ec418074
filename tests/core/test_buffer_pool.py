"""Memory is used again when, and only when, nobody can see it any more."""

from __future__ import annotations

import errno
import gc
import os
import threading

import numpy as np
import pytest
import torch

from dataplane.core.buffer_pool import FROM_BYTES, BufferPool
from dataplane.data.columns import from_pool

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
