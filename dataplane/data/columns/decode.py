"""Decodes rows in memory to tensors and objects, either with one gathering copy or as views.

Parameters of most functions: `empty` allocates the tensors of the result, `copier` makes the copies of long rows, and
with `pickles` pickled objects are unpickled. A settled spec has a dtype unless its kind is objects: `spec.dtype or ""`
only satisfies the type checker.

Rows are verified against the checksums of their writer at their final location in memory.
Fields whose kind widened: rows that were put before are converted to the present kind while they are read.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from dataplane.core.buffer_pool import FROM_BYTES, BufferPool
from dataplane.core.checksums import damaged
from dataplane.core.row_copy import (
    CopyRuns,
    Int64s,
    Run,
    UInt8s,
    address,
    copy_runs,
    merge_runs,
)
from dataplane.core.types import DTYPE_BYTES, FieldKind, FieldSpec
from dataplane.data.columns.row_source import RowSource, check_together
from dataplane.data.columns.values import RaggedValues, Values, ragged_header_bytes, row_values
from dataplane.data.jagged import checked_pads, jagged_from_values, pad_element, padded_width
from dataplane.data.object_codec import decode_object, object_array
from dataplane.data.tensor_memory import (
    TORCH_DTYPES,
    byte_view,
    tensor_at,
    tensor_of_numbers,
    tensor_over,
    writable_alias,
)
from dataplane.errors import ChecksumError, InternalError, InvalidRequestError
from dataplane.ledger.commands import FieldLocations

Column = Tensor | list[Tensor] | np.ndarray[Any, Any]
"""A decoded column: a dense or jagged tensor, a list of ragged tensors, or an object array."""

Empty = Callable[[tuple[int, ...], torch.dtype], tuple[Tensor, UInt8s]]
"""Allocates an uninitialized contiguous tensor and returns (the tensor, its bytes)."""


class _Copies:
    """Pending copies of long rows, and the checks to run after them. Functions that decode add to it and return columns
    that are complete only after `make`; all copies of a read are then made together, with several threads. runs:
    (target, source) of each copy; the `later` of `gather`. _checks: one per column with checksums."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._checks: list[Callable[[], None]] = []

    def check_later(self, source: RowSource, memory: UInt8s, offsets: Callable[[], Int64s]) -> None:
        """Verify the rows of `source`, at `offsets()` of `memory`, once the copies are made."""
        check = source.check
        if check is not None:
            self._checks.append(lambda: check(memory, offsets(), slice(None)))

    def make(self, copier: CopyRuns) -> None:
        """Make the copies, then run the checks."""
        copier(self.runs)
        for check in self._checks:
            check()


class SharedOffsets:
    """Cache of offsets tensors on one device, for one read. Columns with equal lengths share one, so that they can be
    combined. _by_lengths: the bytes of the lengths -> the result of `of`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._by_lengths: dict[bytes, tuple[Tensor, tuple[int, int]]] = {}

    def of(self, lengths: Int64s) -> tuple[Tensor, tuple[int, int]]:
        """Return (offsets `[N + 1]` int64, (shortest length, longest length))."""
        key = lengths.tobytes()
        cached = self._by_lengths.get(key)
        if cached is None:
            offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
            np.cumsum(lengths, out=offsets[1:])
            span = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
            cached = self._by_lengths[key] = (torch.from_numpy(offsets).to(self._device), span)
        return cached


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, UInt8s]:
    """Allocate new memory. An `Empty`."""
    memory = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    return tensor_over(memory, shape, dtype), memory


def from_pool(memory: BufferPool) -> Empty:
    """Return an `Empty` that reuses memory of the pool if available. Small tensors always get new memory."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, UInt8s]:
        """Allocate a tensor, from the pool if it is large. An `Empty`."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < FROM_BYTES:
            return fresh(shape, dtype)
        buffer = memory.take(nbytes)
        return tensor_over(buffer, shape, dtype), buffer

    return empty


def decode(source: RowSource) -> Column:
    """Decode the column into its own memory: dense `[N, *inner]`, a jagged tensor (also if all lengths are equal), a
    list of ragged tensors, or a `[N]` object array. Contiguous values in a buffer marked `ours` are not copied. Raises
    InternalError for malformed ragged or object rows, `ChecksumError` for rows that fail their check."""
    return decode_columns({"": source})[""]  # under any name


def decode_padded(source: RowSource, *, pad_value: Any = 0, width: int = 0) -> Tensor:
    """Decode a jagged column directly into a right-padded tensor `[N, S, *inner]`. S is `width` if that is more than 0,
    else the longest row. ValueError for another kind of column, if `width` is below the longest row, or if the dtype
    cannot hold `pad_value`."""
    copies = _Copies()
    padded = _prepare_padded(source, pad_value, width, fresh, copies)
    copies.make(copy_runs)
    return padded


def decode_views(source: RowSource, *, offsets: SharedOffsets | None = None) -> Column | None:
    """Return the column as views of its buffers. Return None for objects, for rows that are not aligned to the element,
    and for dense and jagged rows that are not adjacent in one buffer.

    The storage of the views keeps the array object in `buffers` alive, so that a finalizer on it runs when the last
    view is released. Views of read-only memory are read-only, which torch cannot express: writing to one crashes.
    """
    if source.spec.kind is FieldKind.OBJECT:
        return None
    views = _ragged_views(source) if source.spec.kind is FieldKind.RAGGED else _value_views(source, offsets)
    if views is not None:
        source.check_in_place()
    return views


def _value_views(source: RowSource, offsets: SharedOffsets | None) -> Tensor | None:
    """Return a dense or jagged column as a view, or None; see `decode_views`."""
    # One element for each range of adjacent rows; rows without bytes are skipped.
    buffer_numbers, starts, _ = merge_runs(source.which, source.offsets, source.stored_sizes)
    if not buffer_numbers or not source.spec.unit_bytes:  # no bytes, so a new tensor serves as the view
        return _with_shape(source, _allocate_values(source, fresh)[0], offsets)
    values = _view_values(source, buffer_numbers[0], starts[0]) if len(buffer_numbers) == 1 else None
    return None if values is None else _with_shape(source, values, offsets)


def assemble(
    sources: Mapping[str, RowSource],
    *,
    copy: bool = True,
    empty: Empty = fresh,
    copier: CopyRuns = copy_runs,
    pickles: bool = False,
) -> TensorDict:
    """Return the columns as a TensorDict of batch size `[N]`; object and ragged columns become a NonTensorStack. Jagged
    columns of equal lengths share one offsets tensor. `copy=False` uses views where `decode_views` supports them."""
    return as_tensordict(sources, decode_columns(sources, copy=copy, empty=empty, copier=copier, pickles=pickles))


def as_tensordict(sources: Mapping[str, RowSource], columns: Mapping[str, Column]) -> TensorDict:
    """Return decoded columns as `assemble` does."""
    row_counts = {len(source) for source in sources.values()}
    assert len(row_counts) <= 1, f"columns of different row counts: {row_counts}"
    stacked = {
        name: column if isinstance(column, Tensor) else _non_tensor_stack(list(column))
        for name, column in columns.items()
    }
    # Skips the checks of the constructor, which take 40 us: every column was created above with N rows.
    batch_size = torch.Size([row_counts.pop() if row_counts else 0])
    assembled: TensorDict = TensorDict._new_unsafe(stacked, batch_size=batch_size)
    return assembled


def decode_columns(
    sources: Mapping[str, RowSource],
    *,
    copy: bool = True,
    empty: Empty = fresh,
    copier: CopyRuns = copy_runs,
    pickles: bool = False,
) -> dict[str, Column]:
    """Decode every column as `decode` does, or with `copy=False` as views where `decode_views` supports them. Jagged
    columns of equal lengths share one offsets tensor."""
    check_together(sources.values())
    offsets = SharedOffsets()
    copies = _Copies()
    columns: dict[str, Column] = {}
    for name, source in sources.items():
        views = None if copy else decode_views(source, offsets=offsets)
        columns[name] = _prepare_copy(source, offsets, empty, copies, pickles) if views is None else views
    copies.make(copier)
    return columns


def decode_batch(
    sources: Mapping[str, RowSource],
    *,
    layout: str = "padded",
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
    others: Collection[str] = (),
    empty: Empty = fresh,
    copier: CopyRuns = copy_runs,
    pickles: bool = False,
) -> dict[str, Column]:
    """Decode the columns to the result of `materialize`, gathering directly into the padded tensors. `layout`,
    `pad_value_dict` and `pad_to_seqlen` are those of `materialize`. others: columns that are padded to their own
    longest row instead of `pad_to_seqlen`."""
    if layout == "jagged":
        return decode_columns(sources, empty=empty, copier=copier, pickles=pickles)
    if layout != "padded":
        raise InvalidRequestError(f"layout={layout!r}: expected 'padded' or 'jagged'")
    pads = checked_pads(pad_value_dict)
    check_together(sources.values())
    offsets = SharedOffsets()
    copies = _Copies()
    columns: dict[str, Column] = {}
    for name, source in sources.items():
        if source.spec.kind is not FieldKind.JAGGED:
            columns[name] = _prepare_copy(source, offsets, empty, copies, pickles)
            continue
        try:
            width = 0 if name in others else pad_to_seqlen
            columns[name] = _prepare_padded(source, pads.get(name, 0), width, empty, copies)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"field {name!r}: {error}") from error
    copies.make(copier)
    return columns


# --- parts --------------------------------------------------------------------------------------------------------


def _prepare_copy(source: RowSource, offsets: SharedOffsets, empty: Empty, copies: _Copies, pickles: bool) -> Column:
    """Prepare the result of `decode`; it is complete after the pending `copies` are made."""
    match source.spec.kind:
        case FieldKind.DENSE | FieldKind.JAGGED:
            in_place = decode_views(source, offsets=offsets) if source.ours else None  # a result may keep such memory
            if in_place is not None:
                return in_place
            values, target = _allocate_values(source, empty)
            source.copy_to(target, copies.runs)
            copies.check_later(source, target, lambda: np.cumsum(source.sizes) - source.sizes)
            return _with_shape(source, values, offsets)
        case FieldKind.RAGGED:
            return [_ragged_copy(source.spec, row) for row in source.verified_rows()]
    # Objects.
    return object_array([decode_object(row.data, pickles=pickles) for row in source.verified_rows()])


def _prepare_padded(source: RowSource, pad_value: Any, width: int, empty: Empty, copies: _Copies) -> Tensor:
    """Prepare the result of `decode_padded`; it is complete after the pending `copies` are made."""
    spec = source.spec
    if spec.kind is not FieldKind.JAGGED or spec.inner is None:
        raise InvalidRequestError(f"only jagged columns can be padded, got {spec}; read it with layout='jagged'")
    dtype = TORCH_DTYPES[spec.dtype or ""]
    _ = source.sizes  # checks the rows before the allocation
    padded_length = padded_width(int(source.row_lengths.max(initial=0)), width)
    pad = pad_element(pad_value, dtype)
    out, target = empty((len(source), padded_length, *spec.inner), dtype)
    rows = target.reshape(len(source), padded_length * spec.unit_bytes)  # the bytes of `out`, row by row
    source.copy_padded(rows, pad, copies.runs)
    copies.check_later(source, target, lambda: np.arange(len(source), dtype=np.int64) * rows.shape[1])  # row starts
    return out


def _allocate_values(source: RowSource, empty: Empty) -> tuple[Tensor, UInt8s]:
    """Allocate a tensor `[sum of the lengths, *inner]` for the values of all rows. Return it and its bytes."""
    spec, sizes = source.spec, source.sizes  # `sizes` checks the lengths before the allocation
    total = int(np.add.reduce(source.lengths)) if len(sizes) else 0
    return empty((total, *(spec.inner or ())), TORCH_DTYPES[spec.dtype or ""])


def _with_shape(source: RowSource, values: Tensor, offsets: SharedOffsets | None) -> Tensor:
    """Return the values of all rows as the column: dense values unchanged, others as a jagged tensor over them."""
    if source.spec.kind is FieldKind.DENSE:
        return values
    row_offsets, span = (offsets or SharedOffsets()).of(source.row_lengths)
    return jagged_from_values(values, row_offsets, span=span)


def _view_values(source: RowSource, buffer_number: int, start: int) -> Tensor | None:
    """View the values of all rows, which are adjacent from byte `start` of a buffer on, as `[sum of the lengths,
    *inner]`. Return None if they are not aligned to the element."""
    part = source.part if buffer_number < source.whole_buffers else None
    spec = source.spec if part is None else part.whole
    buffer = source.buffers[buffer_number]
    memory_address = address(buffer) + start
    if memory_address % DTYPE_BYTES[spec.dtype or ""]:
        return None
    shape = (int(source.lengths.sum()), *(spec.inner or ()))
    values = tensor_at(memory_address, shape, TORCH_DTYPES[spec.dtype or ""], buffer)
    return values if part is None else values[(slice(None), *part.slices)]


def _ragged_views(source: RowSource) -> list[Tensor] | None:
    """Return each ragged row as a view of its buffer. None if a row is not aligned to the element."""
    item_bytes = DTYPE_BYTES[source.spec.dtype or ""]
    rows = source.rows()
    if any(address(row) % item_bytes for row in rows):
        return None
    owners = [source.buffers[number] for number in source.buffer_numbers()]
    return [_ragged_view(source.spec, row, owner) for row, owner in zip(rows, owners, strict=True)]


def _ragged_copy(spec: FieldSpec, row: UInt8s) -> Tensor:
    shape, data = _parse_ragged_row(spec, row)
    out = torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype or ""])
    byte_view(out)[...] = data
    return out


def _ragged_view(spec: FieldSpec, row: UInt8s, owner: UInt8s) -> Tensor:
    shape, data = _parse_ragged_row(spec, row)
    flat = torch.from_numpy(writable_alias(data, owner))
    return flat.view(TORCH_DTYPES[spec.dtype or ""]).view(shape)


def _parse_ragged_row(spec: FieldSpec, row: UInt8s) -> tuple[tuple[int, ...], UInt8s]:
    """Parse a ragged row into its shape and data bytes. Raises InternalError if the header is malformed."""
    # The header: the number of dimensions and their sizes, 8 bytes each; see `values.ragged_header`.
    dims = struct.unpack_from("<q", row.data)[0] if row.nbytes >= 8 else -1  # -1: it has no header
    if not 0 <= dims <= 64 or ragged_header_bytes(dims) > row.nbytes:
        why = "too short for a header" if row.nbytes < 8 else f"its header has {dims} dimensions"
        raise InternalError(what=f"malformed ragged row of {row.nbytes} bytes: {why}")
    shape = struct.unpack_from(f"<{dims}q", row.data, 8)
    nbytes = math.prod(shape) * DTYPE_BYTES[spec.dtype or ""]
    start = ragged_header_bytes(dims)
    if any(size < 0 for size in shape) or start + nbytes > row.nbytes:
        raise InternalError(what=f"malformed ragged row of {row.nbytes} bytes: its header has shape {list(shape)}")
    return shape, row[start : start + nbytes]


def _non_tensor_stack(rows: list[Any]) -> Any:
    return NonTensorStack(*rows)


@dataclasses.dataclass(frozen=True)
class FieldCheck:
    """Compares the rows of one field with the checksums in `located`. A `Check` of `columns.decode`. samples: sample
    ids in row order, for error messages."""

    partition: str
    samples: Sequence[str]
    located: FieldLocations

    def __call__(self, memory: UInt8s, offsets: Int64s, rows: Int64s | slice) -> None:
        """Verify `rows` (indices, or a slice of all), which are at `offsets` of `memory`. `ChecksumError` names the
        first row that differs."""
        located = self.located
        assert located.checksums is not None
        sizes = located.lengths[rows] * located.spec.unit_bytes
        expected = located.checksums[rows]
        wrong, got = damaged(memory, offsets, sizes, expected)  # wrong: positions in `rows`
        if not len(wrong):
            return
        row = int(np.arange(len(located.lengths))[rows][wrong[0]])  # works for both forms of `rows`
        raise ChecksumError(
            partition=self.partition,
            sample=self.samples[row],
            field=located.name,
            unit=int(located.units[row]),
            expected=int(expected[wrong[0]]),
            got=int(got[0]),
            total=len(wrong),
        )


def checked(
    sources: Mapping[str, RowSource], located: Sequence[FieldLocations], partition: str, samples: Sequence[str]
) -> dict[str, RowSource]:
    """Return `sources` with a check for every field that has checksums; its rows are verified when they are read."""
    verified = dict(sources)
    for field in located:
        if field.checksums is not None:
            check = FieldCheck(partition, samples, field)
            verified[field.name] = dataclasses.replace(sources[field.name], check=check)
    return verified


class StoredSubset(NamedTuple):
    """Rows of a field that are stored in one of its columns. positions: their positions in the result `[n]`."""

    positions: Int64s
    source: RowSource


def widened(spec: FieldSpec, subsets: Sequence[StoredSubset], rows: int) -> RowSource:
    """Return all `rows` rows of a field as rows of `spec`, ragged or dense. Rows of other specs are converted into new
    memory; the others stay where they are, and keep their check. Raises `ChecksumError` for rows to convert that do not
    match their checksums."""
    present = [subset for subset in subsets if subset.source.spec == spec]
    buffers: list[UInt8s] = []
    which = np.zeros(rows, np.int32)
    offsets = np.zeros(rows, np.int64)
    lengths = np.zeros(rows, np.int64)
    check = None
    for positions, source in present:  # at most one
        which[positions] = 0 if source.which is None else source.which
        offsets[positions] = source.offsets
        lengths[positions] = source.lengths
        buffers += source.buffers
        check = None if source.check is None else _SubsetCheck(source, _indices_of(positions, rows))
    for positions, source in subsets:
        if source.spec != spec:
            sizes, memory = _converted(source, spec)
            which[positions] = len(buffers)
            offsets[positions] = np.cumsum(sizes) - sizes
            lengths[positions] = sizes if spec.kind is FieldKind.RAGGED else 1
            buffers.append(memory)
    return RowSource(spec, buffers, which, offsets, lengths, check=check)


def _converted(source: RowSource, spec: FieldSpec) -> tuple[Int64s, UInt8s]:
    """Return the rows of `source`, which are dense, jagged or plain numbers, as rows of `spec`: the size of each row,
    and the bytes of all rows one after another."""
    column = decode(source)
    rows = column if isinstance(column, Tensor) else tensor_of_numbers(list(column), TORCH_DTYPES[spec.dtype or ""])
    values: Values = RaggedValues(rows.unbind()) if spec.kind is FieldKind.RAGGED else row_values(rows, lengths=None)
    memory = np.empty(int(values.sizes.sum()), np.uint8)
    values.write(0, len(values.sizes), memory)
    return values.sizes, memory


def _indices_of(positions: Int64s, rows: int) -> Int64s:
    """Return the index in `positions` of each of the rows; -1 for the others."""
    indices = np.full(rows, -1, np.int64)
    indices[positions] = np.arange(len(positions))
    return indices


@dataclasses.dataclass(frozen=True)
class _SubsetCheck:
    """Verifies those rows of a field that `source` has. A `Check`. positions: see `_indices_of`."""

    source: RowSource
    positions: Int64s

    def __call__(self, memory: UInt8s, offsets: Int64s, rows: Int64s | slice) -> None:
        positions = self.positions[rows]
        own = positions >= 0
        assert self.source.check is not None
        self.source.check(memory, offsets[own], positions[own])
