"""The values of one column in the caller's memory, before they are copied to a target.

Each class holds K values. `sizes` `[K]` are their sizes in bytes.
- `write(first, last, target, later)` copies values [first, last), concatenated, into `target`, which must have exactly
  their size. Tensors may be on any device and have any strides; nearly all take one copy (see `copy_tensor`). Long
  copies of contiguous CPU memory are added to the list `later`, and the caller must perform them; with None they are
  performed at once.
- `buffers(first, last)` returns the same bytes as a list of arrays. Long values that are contiguous in CPU memory are
  not copied.
- `take(indices)` returns the values at `indices`, without a copy.
- `checksums()` returns one checksum per value `[K]`. It copies values whose bytes are accessible only through torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from dataplane.core.checksums import UInt32s, checksums_of, settled
from dataplane.core.devices import CPU
from dataplane.core.row_copy import LONG_BYTES, Int64s, Run, UInt8s, address, gather, merge_runs
from dataplane.core.types import ceil_div
from dataplane.data.tensor_memory import byte_view

RAGGED_ALIGN_BYTES = 16
"""The size of a ragged row and the offset of its data are multiples of this."""

_WORTH_A_BUFFER_BYTES = 16384
"""`buffers` concatenates rows that are shorter than this on average: a separate frame costs more than the copy."""


class Values(Protocol):
    """Interface of a column's values; the module docstring describes the methods."""

    sizes: Int64s

    @property
    def device(self) -> torch.device:
        """The CPU if all values are in its memory, so that a copy does not wait for an accelerator; otherwise the
        device of the first value that is not."""

    def write(self, first: int, last: int, target: UInt8s, later: list[Run] | None = None) -> None: ...

    def buffers(self, first: int, last: int) -> list[UInt8s]: ...

    def take(self, indices: Int64s) -> Values: ...

    def checksums(self) -> UInt32s: ...


class FlatValues:
    """Values in one CPU buffer, each contiguous: value k is `memory[starts[k]:][:sizes[k]]`."""

    def __init__(self, memory: UInt8s, starts: Int64s, sizes: Int64s) -> None:
        self.memory = memory
        self.starts = starts
        self.sizes = sizes

    @property
    def device(self) -> torch.device:
        return CPU

    def write(self, first: int, last: int, target: UInt8s, later: list[Run] | None = None) -> None:
        gather([self.memory], None, self.starts[first:last], self.sizes[first:last], target, later=later)

    def buffers(self, first: int, last: int) -> list[UInt8s]:
        _, starts, stops = merge_runs(None, self.starts[first:last], self.sizes[first:last])
        return [self.memory[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def take(self, indices: Int64s) -> FlatValues:
        return FlatValues(self.memory, self.starts[indices], self.sizes[indices])

    def checksums(self) -> UInt32s:
        return checksums_of(self.memory, self.starts, self.sizes)


def in_host_memory(values: Values) -> Values:
    """Return the same values, each contiguous in CPU memory. Copies them once unless they already are."""
    if isinstance(values, FlatValues):
        return values
    if isinstance(values, ListValues | RaggedValues) and all(t.is_cpu and t.is_contiguous() for t in values.tensors):
        return values
    memory = np.empty(int(values.sizes.sum()), np.uint8)
    values.write(0, len(values.sizes), memory)
    return FlatValues(memory, np.cumsum(values.sizes) - values.sizes, values.sizes)


class TensorValues:
    """Values that torch must copy (on an accelerator, or strided): value k is
    `tensor[starts[k]:starts[k] + counts[k]]`. step_bytes: size of one step along dimension 0."""

    def __init__(self, tensor: Tensor, starts: Int64s, counts: Int64s) -> None:
        self.tensor = tensor
        self.starts = starts
        self.counts = counts
        self.step_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
        self.sizes: Int64s = counts * self.step_bytes

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def _pieces(self, first: int, last: int) -> Iterator[Tensor]:
        """Yield values [first, last) as slices of the tensor; values that are adjacent there are one slice."""
        _, starts, stops = merge_runs(None, self.starts[first:last], self.counts[first:last])
        return (self.tensor[start:stop] for start, stop in zip(starts, stops, strict=True))

    def write(self, first: int, last: int, target: UInt8s, later: list[Run] | None = None) -> None:
        """Copy values [first, last) into `target`; see the module docstring."""
        position = 0
        for piece in self._pieces(first, last):
            end = position + len(piece) * self.step_bytes
            copy_tensor(piece, target[position:end], later)
            position = end

    def buffers(self, first: int, last: int) -> list[UInt8s]:
        return [byte_view(piece.cpu().contiguous()) for piece in self._pieces(first, last)]

    def take(self, indices: Int64s) -> TensorValues:
        return TensorValues(self.tensor, self.starts[indices], self.counts[indices])

    def checksums(self) -> UInt32s:
        return in_host_memory(self).checksums()


class ListValues:
    """Values that are one tensor `[len, *inner]` each, on any device. Dtype and inner shape are equal."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.sizes: Int64s = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self.tensors if not tensor.is_cpu), CPU)

    def write(self, first: int, last: int, target: UInt8s, later: list[Run] | None = None) -> None:
        """Copy values [first, last) into `target`; see the module docstring."""
        tensors = self.tensors[first:last]
        if not target.nbytes:  # the code below needs a first tensor
            return
        # Concatenate into `target` at once. (Nothing is added to `later`: torch makes the copy.)
        if all(tensor.is_cpu for tensor in tensors) and _is_aligned(target, tensors[0].element_size()):
            out = torch.from_numpy(target).view(tensors[0].dtype).view(-1, *tensors[0].shape[1:])
            torch.cat(tensors, out=out)
        else:
            copy_tensor(_cat_on_one_device(tensors), target, later)

    def buffers(self, first: int, last: int) -> list[UInt8s]:
        """Return values [first, last) as arrays: short ones concatenated, long ones without a copy if possible."""
        tensors = self.tensors[first:last]
        if not self.sizes[first:last].any():
            return []
        if int(self.sizes[first:last].sum()) < len(tensors) * _WORTH_A_BUFFER_BYTES:
            return [byte_view(_cat_on_one_device(tensors).cpu())]
        return [byte_view(tensor.cpu().contiguous()) for tensor in tensors if tensor.nbytes]

    def take(self, indices: Int64s) -> ListValues:
        return ListValues([self.tensors[k] for k in indices.tolist()])

    def checksums(self) -> UInt32s:
        return settled([xxhash.xxh3_64_intdigest(byte_view(tensor.cpu().contiguous()).data) for tensor in self.tensors])


def _cat_on_one_device(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors that can be on different devices, on the device of the first one."""
    device = tensors[0].device
    return torch.cat([tensor.to(device) for tensor in tensors])


class RaggedValues:
    """Values that are tensors of different shapes, stored as a header with the shape, the data, and zero padding."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.sizes: Int64s = np.array(
            [_round_up(ragged_header_bytes(tensor.dim()) + tensor.nbytes) for tensor in tensors], dtype=np.int64
        )

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self.tensors if not tensor.is_cpu), CPU)

    def write(self, first: int, last: int, target: UInt8s, later: list[Run] | None = None) -> None:
        """Copy values [first, last) into `target`; see the module docstring."""
        position = 0
        for tensor, size in zip(self.tensors[first:last], self.sizes[first:last].tolist(), strict=True):
            header = ragged_header(tensor)
            data_start = position + len(header)
            target[position:data_start] = header
            copy_tensor(tensor, target[data_start : data_start + tensor.nbytes], later)
            position += size
            target[data_start + tensor.nbytes : position] = 0  # the padding

    def buffers(self, first: int, last: int) -> list[UInt8s]:
        """Return values [first, last) as arrays: header, data and padding of each."""
        chunks: list[UInt8s] = []
        for tensor, size in zip(self.tensors[first:last], self.sizes[first:last].tolist(), strict=True):
            header = ragged_header(tensor)
            padding = np.zeros(size - len(header) - tensor.nbytes, dtype=np.uint8)
            chunks += [header, byte_view(tensor.cpu().contiguous()), padding]
        return [chunk for chunk in chunks if chunk.nbytes]

    def take(self, indices: Int64s) -> RaggedValues:
        return RaggedValues([self.tensors[k] for k in indices.tolist()])

    def checksums(self) -> UInt32s:
        return settled([self._digest(k) for k in range(len(self.tensors))])

    def _digest(self, k: int) -> int:
        """Return the hash of value k with its header and padding."""
        digest = xxhash.xxh3_64()
        for chunk in self.buffers(k, k + 1):  # only value k
            digest.update(chunk.data)
        return digest.intdigest()


def row_values(tensor: Tensor, lengths: Int64s | None) -> Values:
    """Return the rows of `tensor` [N, ...] as values; with `lengths`, only the first `lengths[i]` steps of row i."""
    rows = len(tensor)
    row_shape = tensor.shape[1:]
    # Without lengths the unit is a whole row, otherwise one step of it.
    unit_bytes = tensor.element_size() * math.prod(row_shape if lengths is None else row_shape[1:])
    sizes = np.full(rows, unit_bytes, dtype=np.int64) if lengths is None else lengths * unit_bytes
    if not tensor.numel():
        return FlatValues(np.zeros(0, dtype=np.uint8), np.zeros(rows, dtype=np.int64), sizes)
    if tensor.device.type == "cpu" and tensor[0].is_contiguous():
        # Each row is contiguous, even if the rows are not adjacent: view the memory from the first row to the last.
        row_stride = tensor.stride(0)
        flat = tensor.as_strided(((rows - 1) * row_stride + math.prod(row_shape),), (1,))
        starts = np.arange(rows, dtype=np.int64) * (row_stride * tensor.element_size())
        return FlatValues(byte_view(flat), starts, sizes)
    # Only torch can copy the other tensors: those on an accelerator, and those with strided rows.
    if lengths is None or (lengths == tensor.shape[1]).all():  # whole rows
        return TensorValues(tensor, np.arange(rows, dtype=np.int64), np.ones(rows, dtype=np.int64))
    starts = np.arange(rows, dtype=np.int64) * tensor.shape[1]
    flat = tensor.reshape(rows * tensor.shape[1], *row_shape[1:])  # also has the steps after each row's length
    if tensor.device.type != "cpu":  # leave these steps out of the copy to the host
        flat, starts = pack_rows(flat, starts, lengths)
    return TensorValues(flat, starts, lengths)


def pack_rows(values: Tensor, starts: Int64s, lengths: Int64s) -> tuple[Tensor, Int64s]:
    """Pack rows, of which row i is `values[starts[i]:][:lengths[i]]`, on their device, so that one copy to the host
    suffices instead of one per row. Return the packed values and the start of each row in them."""
    packed_starts = np.cumsum(lengths) - lengths
    # Element j of row i goes from `starts[i] + j` to `packed_starts[i] + j`.
    sources = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - packed_starts, lengths)
    return values[torch.from_numpy(sources).to(values.device)], packed_starts


def copy_tensor(tensor: Tensor, target: UInt8s, later: list[Run] | None = None) -> None:
    """Copy the tensor's elements, row-major, into `target`, which must have exactly their size, from any device.

    Takes one copy, or two if only torch can copy the tensor and the target is not aligned to the element (torch crashes
    on such targets). Long copies that do not need torch are added to `later` instead, if it is given."""
    if not target.nbytes:
        return
    if tensor.is_cpu and tensor.is_contiguous():
        if later is not None and target.nbytes >= LONG_BYTES:
            later.append((target, byte_view(tensor)))
        else:
            target[...] = byte_view(tensor)
    elif _is_aligned(target, tensor.element_size()):
        torch.from_numpy(target).view(tensor.dtype).view(tensor.shape).copy_(tensor)
    else:
        target[...] = byte_view(tensor.cpu().contiguous())


def _is_aligned(target: UInt8s, item_bytes: int) -> bool:
    return address(target) % item_bytes == 0


def ragged_header_bytes(dims: int) -> int:
    """Return the size of the header of a ragged row with this number of dimensions."""
    return _round_up(8 * (1 + dims))


def ragged_header(tensor: Tensor) -> UInt8s:
    """Return the header: number of dimensions and sizes as little-endian int64, zero-padded to the alignment."""
    packed = struct.pack(f"<{1 + tensor.dim()}q", tensor.dim(), *tensor.shape)
    return np.frombuffer(packed.ljust(ragged_header_bytes(tensor.dim()), b"\0"), dtype=np.uint8)


def _round_up(nbytes: int) -> int:
    return ceil_div(nbytes, RAGGED_ALIGN_BYTES) * RAGGED_ALIGN_BYTES
