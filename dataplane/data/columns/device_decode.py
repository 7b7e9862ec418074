"""Decodes stored rows to tensors on a CUDA device: the GPU itself reads them from registered shared memory.

Rows in memory that the GPU cannot access (received from another host, or of an arena that CUDA cannot register) and
parts of elements are copied to pinned memory first. One kernel for each alignment then copies the rows of all columns
to their places, padded or jagged. Without Triton the CPU pads the rows, in pinned memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack
from torch import Tensor

from dataplane.core import cuda_copy
from dataplane.core.cuda_memory import DeviceBuffer, copying, pinned
from dataplane.core.row_copy import CopyRuns, Int64s, Run, UInt8s, address, copy_runs
from dataplane.core.types import FieldKind
from dataplane.data.columns.decode import Column, Empty, SharedOffsets, decode_batch
from dataplane.data.columns.row_source import RowSource
from dataplane.data.jagged import (
    checked_pads,
    detached_values,
    is_jagged,
    jagged_from_values,
    pad_element,
    padded_width,
)
from dataplane.data.tensor_memory import TORCH_DTYPES, fill, tensor_over
from dataplane.errors import InvalidRequestError


def decode_on_device(
    sources: Mapping[str, RowSource],
    device: torch.device,
    *,
    layout: str = "padded",
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
    others: Collection[str] = (),
    copier: CopyRuns = copy_runs,
    pickles: bool = False,
) -> dict[str, Column]:
    """Return the result of `decode_batch` with its tensors on `device`, a CUDA device. Object columns stay on the CPU.

    Blocks until the copies are complete. They run on a stream of their own, so kernels of other streams go on. Call
    `use_on_current_stream` before the tensors are used. Raises as `decode_batch`.
    """
    if layout not in ("padded", "jagged"):
        raise InvalidRequestError(f"layout={layout!r}: expected 'padded' or 'jagged'")
    tensors = {
        name: source for name, source in sources.items() if source.spec.kind in (FieldKind.DENSE, FieldKind.JAGGED)
    }
    if cuda_copy.copy_kernel() is None:
        tensors = {}
    rest = {name: source for name, source in sources.items() if name not in tensors}
    pads = checked_pads(pad_value_dict)
    decoded = decode_batch(
        rest,
        layout=layout,
        pad_value_dict=pads,
        pad_to_seqlen=pad_to_seqlen,
        others=others,
        empty=_empty_pinned,
        copier=copier,
        pickles=pickles,
    )
    targets = [
        _Target.of(
            name,
            source,
            padded=layout == "padded",
            pad_value=pads.get(name, 0),
            width=0 if name in others else pad_to_seqlen,
        )
        for name, source in tensors.items()
    ]
    readable = _stage([target.source for target in targets], copier)
    with copying(device):
        offsets = SharedOffsets(device)
        moved = {name: _to_device(column, device, sources[name], offsets) for name, column in decoded.items()}
        outs = _fill(targets, readable, device)
        moved |= {target.name: target.column(out, offsets) for target, out in zip(targets, outs, strict=True)}
    return {name: moved[name] for name in sources}


def use_on_current_stream(columns: Iterable[Any]) -> None:
    """Let the current stream of this thread use the tensors of columns on CUDA devices. torch then reuses their memory
    only after the work that this stream has when they are freed."""
    for tensor in itertools.chain.from_iterable(map(_tensors_of, columns)):
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@dataclasses.dataclass(frozen=True)
class _Target:
    """The tensor to fill with the rows of a column. positions: `[entries]` of the entries of `source` in it, in bytes.
    pad: the element that fills the other positions; None if the rows fill the tensor."""

    name: str
    source: RowSource
    shape: tuple[int, ...]
    positions: Int64s
    pad: np.ndarray[Any, Any] | None

    @classmethod
    def of(cls, name: str, source: RowSource, *, padded: bool, pad_value: Any, width: int) -> _Target:
        """Check the rows and the arguments. `padded` applies to jagged columns."""
        spec, sizes = source.spec, source.sizes  # `sizes` checks the rows
        inner = spec.inner or ()
        if not padded or spec.kind is FieldKind.DENSE:
            shape = (int(source.lengths.sum()), *inner)
            return cls(name, source, shape, np.cumsum(sizes) - sizes, None)
        try:
            width = padded_width(int(source.row_lengths.max(initial=0)), width)
            pad = pad_element(pad_value, TORCH_DTYPES[spec.dtype or ""])
        except InvalidRequestError as error:
            raise InvalidRequestError(f"field {name!r}: {error}") from error
        full = bool((source.row_lengths == width).all())
        positions = source.padded_positions(width * spec.unit_bytes)
        return cls(name, source, (len(source), width, *inner), positions, None if full else pad)

    def allocate(self, device: torch.device) -> Tensor:
        """Return the tensor, filled with padding if there is any."""
        out = torch.empty(self.shape, dtype=TORCH_DTYPES[self.source.spec.dtype or ""], device=device)
        if self.pad is not None:
            fill(out, self.pad)
        return out

    def column(self, out: Tensor, offsets: SharedOffsets) -> Tensor:
        """Return the filled tensor as the column: jagged if it is not padded."""
        if self.source.spec.kind is FieldKind.DENSE or out.dim() == 2 + len(self.source.spec.inner or ()):
            return out
        row_offsets, span = offsets.of(self.source.row_lengths)
        return jagged_from_values(out, row_offsets, span=span)


def _stage(sources: Sequence[RowSource], copier: CopyRuns) -> list[RowSource]:
    """Return sources that a GPU can read once their memory is registered: unchanged, or with their rows copied to
    pinned memory. The rows are verified if they have checksums."""
    runs: list[Run] = []
    staged = [source if _is_in_place(source) else _copy_to_pinned(source, runs) for source in sources]
    copier(runs)
    for source in staged:
        source.check_in_place()
    return staged


def _fill(targets: Sequence[_Target], sources: Sequence[RowSource], device: torch.device) -> list[Tensor]:
    """Allocate the tensors and enqueue the copies of their rows, which `sources` has. The caller waits for these within
    `copying`."""
    runs: list[Run] = []
    covered = [source if _cover(source) else _copy_to_pinned(source, runs) for source in sources]
    copy_runs(runs)
    outs = [target.allocate(device) for target in targets]
    copies = [
        (_addresses(source), target.positions + out.data_ptr(), source.sizes)
        for source, target, out in zip(covered, targets, outs, strict=True)
    ]
    cuda_copy.copy(copies, device)
    return outs


def _is_in_place(source: RowSource) -> bool:
    """Return whether a GPU can read the rows where they are once their memory is registered."""
    used = source.buffers if source.which is None else [source.buffers[number] for number in np.unique(source.which)]
    return source.part is None and all(isinstance(buffer, DeviceBuffer) for buffer in used)


def _cover(source: RowSource) -> bool:
    """Register the memory of the rows of an `_is_in_place` source. Return whether a GPU can read all of them."""
    ends = np.where(source.sizes > 0, source.offsets + source.sizes, 0)
    which = np.zeros(len(ends), np.int32) if source.which is None else source.which
    for number, buffer in enumerate(source.buffers):
        end = int(ends[which == number].max(initial=0))
        if end and isinstance(buffer, DeviceBuffer) and not buffer.cover(end):
            return False
    return True


def _copy_to_pinned(source: RowSource, runs: list[Run]) -> RowSource:
    """Return the source with its rows in pinned memory. They are there after the copies added to `runs`."""
    sizes = source.sizes
    memory = pinned(int(sizes.sum()))
    source.copy_to(memory, runs)
    return dataclasses.replace(
        source, buffers=[memory], which=None, offsets=np.cumsum(sizes) - sizes, part=None, whole_buffers=0
    )


def _addresses(source: RowSource) -> Int64s:
    """Return the address of each entry, as the GPU and this process see it."""
    starts = np.array([address(buffer) for buffer in source.buffers], np.int64)
    if source.which is None:
        return source.offsets + (starts[0] if len(starts) else 0)
    addresses: Int64s = source.offsets + starts[source.which]
    return addresses


def _empty_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, UInt8s]:
    """Allocate pinned memory. An `Empty`."""
    memory = pinned(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return tensor_over(memory, shape, dtype), memory


_: Empty = _empty_pinned


def _to_device(column: Column, device: torch.device, source: RowSource, offsets: SharedOffsets) -> Column:
    """Enqueue the copy of a decoded column. Object arrays are returned unchanged."""
    if isinstance(column, list):
        return [row.to(device, non_blocking=True) for row in column]
    if not isinstance(column, Tensor):
        return column
    if not is_jagged(column):
        return column.to(device, non_blocking=True)
    row_offsets, span = offsets.of(source.row_lengths)
    return jagged_from_values(detached_values(column).to(device, non_blocking=True), row_offsets, span=span)


def _tensors_of(column: Any) -> list[Tensor]:
    """Return the plain tensors of a column."""
    if isinstance(column, NonTensorStack):  # ragged rows, or objects
        column = column.tolist()
    if isinstance(column, list):
        return [row for row in column if isinstance(row, Tensor)]
    if not isinstance(column, Tensor):
        return []
    return [detached_values(column), column.offsets()] if is_jagged(column) else [column]  # type: ignore[attr-defined]
