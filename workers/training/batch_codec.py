"""Encode a batch of columns as a small header and one flat buffer of bytes, and decode it. No sockets, no collectives.

The buffer holds the jagged bytes of each column without padding of rows. Columns start at multiples of 64 bytes; their
rows are contiguous. Tensors are stored as their bytes, values of object columns in the codec of
`dataplane.data.object_codec`. There are no pickles. The header (msgpack) describes the buffer. It stores row lengths
once per set of columns that share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor

from dataplane.core.devices import CPU
from dataplane.core.types import GRANULE_BYTES
from dataplane.data.jagged import is_jagged, jagged_from_values, offsets_of, row_lengths
from dataplane.data.object_codec import decode_object, encode_object, encode_rows, object_array
from dataplane.data.tensor_memory import DTYPE_NAMES, TORCH_DTYPES, flat_bytes


class _Dense(msgspec.Struct, frozen=True, tag="dense", array_like=True):
    """A tensor of any shape. In every kind of column, `start` is the offset of its first byte in the payload, and
    `dtype` a name from `DTYPE_NAMES`."""

    name: str
    start: int
    dtype: str
    shape: tuple[int, ...]


class _Jagged(msgspec.Struct, frozen=True, tag="jagged", array_like=True):
    """A jagged nested tensor. `lengths` is the index of its row lengths in the header's list, `inner` the shape of a
    row after the jagged dimension."""

    name: str
    start: int
    dtype: str
    inner: tuple[int, ...]
    lengths: int


class _Ragged(msgspec.Struct, frozen=True, tag="ragged", array_like=True):
    """A list of tensors of one dtype, each with its own shape."""

    name: str
    start: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]


class _Value(msgspec.Struct, frozen=True, tag="value", array_like=True):
    """One Python value for the whole batch, encoded by the object codec in `size` bytes."""

    name: str
    start: int
    size: int


class _Objects(msgspec.Struct, frozen=True, tag="objects", array_like=True):
    """Python values, encoded by the object codec. `sizes`: int64 bytes per value. `form`: their original container."""

    name: str
    start: int
    form: str
    sizes: bytes


_Column = _Dense | _Jagged | _Ragged | _Objects | _Value


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The description of a payload. `lengths` are int64 row lengths as bytes, one entry per distinct set."""

    payload_bytes: int
    columns: tuple[_Column, ...]
    lengths: tuple[bytes, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Header:
        return msgspec.msgpack.decode(data, type=cls)


@dataclass
class PackedBatch:
    """A header and the pieces of its payload: (start, uint8 [n]), in ascending order. Readers ignore gaps."""

    header: Header
    pieces: list[tuple[int, Tensor]]

    def flat(self, device: torch.device = CPU) -> Tensor:
        """Copy the pieces, on any devices, into one payload, uint8 [payload_bytes] on `device`."""
        flat = torch.empty(self.header.payload_bytes, dtype=torch.uint8, device=device)
        end = 0
        for start, piece in self.pieces:
            flat[end:start].zero_()  # the gap between two columns
            end = start + piece.numel()
            flat[start:end].copy_(piece)
        return flat


def pack(batch: Mapping[str, Any]) -> PackedBatch:
    """Encode the columns of `batch`, in its order.

    Supported are tensors (any strides, device, dtype), jagged nested tensors, lists of tensors of one dtype, object
    arrays, lists of values, `NonTensorStack`, and single values for the whole batch (a string, a dict, a number) that
    `dataplane.data.object_codec` supports. `UnsupportedValueError` (a TypeError), naming the column, for other values.
    """
    packer = _Packer()
    for name, value in batch.items():
        packer.add(str(name), value)
    header = Header(payload_bytes=packer.end, columns=tuple(packer.columns), lengths=tuple(packer.lengths))
    return PackedBatch(header, packer.pieces)


@dataclass
class _Packer:
    """A payload under construction. lengths: index in the header's list by the row lengths as bytes; end: size of the
    payload so far. `columns` and `pieces` are those of `Header` and `PackedBatch`.

    The methods `_add_KIND` append the bytes of a column of that kind and return its description.
    """

    columns: list[_Column] = field(default_factory=list)
    lengths: dict[bytes, int] = field(default_factory=dict)
    pieces: list[tuple[int, Tensor]] = field(default_factory=list)
    end: int = 0

    def add(self, name: str, value: Any) -> None:
        """Encode one column. The type of `value` determines its kind."""
        if isinstance(value, Tensor):
            self.columns.append(self._add_nested(name, value) if value.is_nested else self._add_dense(name, value))
        elif isinstance(value, NonTensorStack):
            self.columns.append(self._add_objects(name, value.tolist(), "stack"))
        elif isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
            self.columns.append(self._add_objects(name, list(value), "array"))
        elif isinstance(value, list) and value and all(isinstance(row, Tensor) for row in value):
            self.columns.append(self._add_ragged(name, value))
        elif isinstance(value, list):
            self.columns.append(self._add_objects(name, value, "list"))
        else:
            self.columns.append(self._add_value(name, value.data if isinstance(value, NonTensorData) else value))

    def _align(self) -> int:
        """Begin a column: move `end` to the next multiple of `GRANULE_BYTES` and return it."""
        self.end = -(-self.end // GRANULE_BYTES) * GRANULE_BYTES
        return self.end

    def _append(self, data: Tensor) -> None:
        """Add bytes (uint8 [n]) at the end of the payload."""
        if data.numel():
            self.pieces.append((self.end, data))
            self.end += data.numel()

    def _add_dense(self, name: str, value: Tensor) -> _Dense:
        start = self._align()
        self._append(_elements(value))
        return _Dense(name, start, DTYPE_NAMES[value.dtype], tuple(value.shape))

    def _add_nested(self, name: str, value: Tensor) -> _Jagged:
        values, lengths = values_and_lengths(value)
        # Columns with equal row lengths share one entry of the header's list.
        lengths_index = self.lengths.setdefault(lengths.numpy().tobytes(), len(self.lengths))
        start = self._align()
        self._append(_elements(values))
        return _Jagged(name, start, DTYPE_NAMES[values.dtype], tuple(values.shape[1:]), lengths_index)

    def _add_ragged(self, name: str, rows: Sequence[Tensor]) -> _Ragged:
        dtypes = {row.dtype for row in rows}
        if len(dtypes) > 1:
            raise TypeError(f"column {name!r}: all rows must have the same dtype, got {', '.join(map(str, dtypes))}")
        start = self._align()
        for row in rows:
            self._append(_elements(row))
        return _Ragged(name, start, DTYPE_NAMES[rows[0].dtype], tuple(tuple(row.shape) for row in rows))

    def _add_value(self, name: str, value: Any) -> _Value:
        start = self._align()
        encoded = encode_object(value, field=name)
        self._append(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))  # copied: bytes are read-only
        return _Value(name, start, len(encoded))

    def _add_objects(self, name: str, values: Sequence[Any], form: str) -> _Objects:
        start = self._align()
        encoded, sizes = encode_rows(values, field=name)
        if encoded:  # `frombuffer` rejects an empty buffer
            self._append(torch.frombuffer(encoded, dtype=torch.uint8))
        return _Objects(name, start, form, np.array(sizes, dtype=np.int64).tobytes())


def unpack(header: Header, flat: Tensor) -> dict[str, Any]:
    """Decode the columns of a payload, on the device of `flat` (uint8 [payload_bytes]).

    Jagged columns are views of `flat`, and columns with equal lengths share one offsets tensor. All others are copies,
    so that a reference to a small column does not keep the payload in memory.
    """
    layouts = [_RowLayout(np.frombuffer(lengths, dtype=np.int64), flat.device) for lengths in header.lengths]
    return {column.name: _decode_column(column, flat, layouts) for column in header.columns}


class _RowLayout:
    """The rows of all jagged columns with the same row lengths [N]. offsets: tensor [N + 1] on the device; total: sum
    of the lengths; span: smallest and largest length."""

    def __init__(self, lengths: np.ndarray[Any, np.dtype[np.int64]], device: torch.device) -> None:
        self.offsets = offsets_of(torch.tensor(lengths)).to(device)
        self.total = int(lengths.sum())
        self.span = (min(lengths.tolist(), default=0), max(lengths.tolist(), default=0))


def _decode_column(column: _Column, flat: Tensor, layouts: Sequence[_RowLayout]) -> Any:
    """Return the values of one column. layouts: one per entry of the header's `lengths`."""
    match column:
        case _Dense():
            return _view(flat, column.start, column.dtype, column.shape).clone()  # a copy, see `unpack`
        case _Jagged():
            layout = layouts[column.lengths]
            values = _view(flat, column.start, column.dtype, (layout.total, *column.inner))
            return jagged_from_values(values, layout.offsets, span=layout.span)
        case _Ragged():
            return _decode_ragged(column, flat)
        case _Value():
            return decode_object(flat[column.start : column.start + column.size].cpu().numpy().tobytes())
        case _Objects():
            return _FORMS[column.form](_decode_objects(column, flat))


def _decode_ragged(column: _Ragged, flat: Tensor) -> list[Tensor]:
    """Return a copy of each row."""
    rows = []
    start, itemsize = column.start, TORCH_DTYPES[column.dtype].itemsize
    for shape in column.shapes:
        rows.append(_view(flat, start, column.dtype, shape).clone())
        start += math.prod(shape) * itemsize
    return rows


def _decode_objects(column: _Objects, flat: Tensor) -> list[Any]:
    """Return the Python values of the column."""
    sizes = np.frombuffer(column.sizes, dtype=np.int64)
    data = flat[column.start : column.start + int(sizes.sum())].cpu().numpy().tobytes()
    ends = np.cumsum(sizes)
    return [decode_object(data[end - size : end]) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]


_FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "array": object_array,
    "list": list,
    "stack": lambda values: NonTensorStack(*values),
}
"""By the `form` of an object column, the function that puts a list of values into the original container."""


def _view(flat: Tensor, start: int, dtype: str, shape: Sequence[int]) -> Tensor:
    """Return the bytes from `start` on as a tensor of this dtype and shape, without a copy."""
    torch_dtype = TORCH_DTYPES[dtype]
    nbytes = math.prod(shape) * torch_dtype.itemsize
    return flat[start : start + nbytes].view(torch_dtype).view(tuple(shape))


def values_and_lengths(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values [T, *inner] without holes, row lengths [N] int64 on the CPU) of a nested tensor."""
    jagged: Any = nested
    if is_jagged(jagged) and jagged.lengths() is None:  # without lengths, rows have no holes between them
        offsets = jagged.offsets()
        return jagged.values()[int(offsets[0]) : int(offsets[-1])], row_lengths(jagged).cpu()
    rows = list(nested.unbind())  # with holes, or another kind of nested tensor: copy the rows
    values = torch.cat(rows) if rows else torch.empty(0, dtype=nested.dtype)
    return values, torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in row-major order as uint8 [nbytes] on the CPU, as a view if possible."""
    return _elements(tensor).cpu()


def _elements(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in row-major order as uint8 [nbytes] on its device, as a view if possible."""
    return flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
