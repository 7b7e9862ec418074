"""What becomes of objects on their way between workers, without the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.buffer_pool import BufferPool
from workers.transport import pickling
from workers.transport.pickling import ALIGN_BYTES, Layout, Segment

WARM = BufferPool(0)
TYPES = sorted(name for name in pickling._DTYPES if "q" not in name and "bits" not in name)


def there_and_back(value: Any, *, own: bool = False) -> Any:
    """As bytes by both ways, which are the same."""
    packed = pickling.pack(value)
    memory = np.zeros(packed.nbytes, np.uint8)
    packed.write(memory)
    assert b"".join(packed.runs()) == memory.tobytes()
    got = pickling.unpack(packed.layout, memory, WARM, own=own)
    if not own:
        memory.fill(255)
    return got.load()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@given(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3), st.randoms(), st.booleans())
def test_tensors_of_every_type_and_shape(name: str, shape: list[int], random: Any, own: bool) -> None:
    dtype = pickling._DTYPES[name]
    nbytes = int(np.prod([1, *shape])) * dtype.itemsize
    raw = torch.tensor([random.randrange(2) for _ in range(nbytes)], dtype=torch.uint8)
    value = raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)
    for sent in (value, [value]):
        got = there_and_back(sent, own=own)
        found = got if isinstance(got, torch.Tensor) else got[0]
        assert found.shape == value.shape
        assert found.dtype == dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_tensors_that_do_not_lie_in_a_row() -> None:
    base = torch.arange(48, dtype=torch.float64).reshape(6, 8)
    views = [
        base.t(),
        base[::2, 1::3],
        base[0].expand(5, 8),
        base.to(torch.complex64).t().conj(),
        base[:, :0],
        base[:1, 0],
    ]
    for got, sent in zip(there_and_back(views), views, strict=True):
        assert torch.equal(got, sent.resolve_conj())


def test_bytes_of_tensors_and_large_arrays_are_not_pickled() -> None:
    value = {"tensor": torch.zeros(5000), "array": np.zeros(5000), "parameter": torch.nn.Parameter(torch.zeros(5000))}
    packed = pickling.pack(value)
    assert sorted(segment.nbytes for segment in packed.layout.segments) == [20_000, 20_000, 40_000]
    assert len(packed.skeleton) < 2000
    assert pickling.pack(torch.zeros(3)).skeleton == b""
    assert pickling.pack([np.zeros(3)]).layout.segments == ()


def test_what_lies_in_a_row_is_not_copied_before_it_is_written() -> None:
    value = torch.zeros(5000)
    for sent in (value, [value]):
        packed = pickling.pack(sent)
        value.fill_(1)
        assert b"".join(packed.runs()) == value.numpy().tobytes() + packed.skeleton
        value.fill_(0)


def test_a_tensor_that_occurs_twice_is_one() -> None:
    value = torch.zeros(5000)
    first, second = there_and_back([value, value])
    assert first is second


def test_a_tensor_comes_without_its_history_and_a_parameter_is_one() -> None:
    parameter = torch.nn.Parameter(torch.randn(3000))
    got, leaf, inner = there_and_back([parameter, torch.ones(3, requires_grad=True), parameter * 2])
    assert isinstance(got, torch.nn.Parameter)
    assert got.requires_grad
    assert torch.equal(got, parameter)
    assert not leaf.requires_grad
    assert torch.equal(inner, parameter.detach() * 2)


def test_other_kinds_of_tensors_come_as_what_they_are() -> None:
    sparse = torch.eye(40).to_sparse()
    got = there_and_back(sparse)
    assert got.is_sparse
    assert torch.equal(got.to_dense(), torch.eye(40))


@pytest.mark.parametrize("own", [False, True])
def test_what_came_may_be_written(own: bool) -> None:
    for sent in (torch.zeros(3), torch.zeros(300_000), np.zeros(3), np.zeros(300_000)):
        got = there_and_back(sent, own=own)
        got += 1
        assert (got == 1).all()


@given(st.lists(st.integers(0, 300), max_size=6))
def test_runs_lie_one_after_another_each_aligned(sizes: list[int]) -> None:
    packed = pickling.pack([torch.zeros(size, dtype=torch.uint8) for size in sizes])
    segments = packed.layout.segments
    assert [segment.nbytes for segment in segments] == sizes
    ends = [segment.start + segment.nbytes for segment in segments]
    assert all(segment.start % ALIGN_BYTES == 0 for segment in segments)
    assert all(end <= after.start for end, after in zip(ends, segments[1:], strict=False))
    assert packed.layout.skeleton_from == max(ends, default=0)
    assert packed.nbytes == packed.layout.skeleton_from + len(packed.skeleton)


@pytest.mark.parametrize(("segments", "skeleton_from"), [([(0, 9)], 8), ([(-1, 2)], 8), ([(3, -1)], 8), ([], 9)])
def test_a_layout_that_names_other_bytes_is_refused(segments: list[tuple[int, int]], skeleton_from: int) -> None:
    layout = Layout(tuple(Segment(*each) for each in segments), skeleton_from, 8)
    with pytest.raises(ValueError, match="exceeds an object of 8"):
        layout.check()
