"""Encodes fields as columns: spec, row lengths, memory locations. Only objects are copied here; see `EncodedColumn`.

Also parses the field specs that a caller declares for a partition.
Appends: stored rows and newly put values are concatenated into replacement rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensorclass
from torch import Tensor

from dataplane.core.checksums import UInt32s
from dataplane.core.plain_numbers import number_fits, numbers_dtype
from dataplane.core.row_copy import Int64s, Run, UInt8s, gather
from dataplane.core.schema import STANDARD_KINDS, TOKEN_ALIGNED_FIELDS
from dataplane.core.types import FieldKind, FieldSpec, field_spec
from dataplane.data.columns.row_source import RowSource
from dataplane.data.columns.values import (
    FlatValues,
    ListValues,
    RaggedValues,
    TensorValues,
    Values,
    in_host_memory,
    pack_rows,
    row_values,
)
from dataplane.data.jagged import (
    as_lengths,
    detached_values,
    host_starts_and_lengths,
    is_jagged,
    row_offsets,
    view_jagged_fields,
)
from dataplane.data.meta import FixedList
from dataplane.data.object_codec import describe_tensor, encode_rows, plain_tensor, type_name
from dataplane.data.tensor_memory import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    byte_view,
    tensor_from_numpy,
    tensor_of_numbers,
)
from dataplane.errors import InvalidRequestError, SchemaError, UnsupportedValueError, first_few

_COLUMN_HINT = (
    "A field is a tensor [N, ...], a nested (jagged) tensor, a list of N tensors, a list or object array of N plain "
    "Python values, or Shared(values, index)."
)


@dataclasses.dataclass(frozen=True)
class Shared:
    """A column whose rows share values: row i is `values[index[i]]`.

    values: K rows of any field kind (a tensor [K, ...], a nested tensor, lists). index: N integers in [0, K).
    Each value is stored and sent once, e.g. the prompt or image of a GRPO group. Unreferenced values are omitted.
    """

    values: Any
    index: Tensor | np.ndarray[Any, Any] | Sequence[int]


@dataclasses.dataclass(frozen=True)
class PerToken:
    """A padded tensor `[N, S, *inner]` whose row i has `lengths[i]` elements, one per token of sample i. If the schema
    declares the field as dense or objects, the padded tensor is put unchanged."""

    values: Tensor | np.ndarray[Any, Any]
    lengths: Tensor

    @staticmethod
    def of(fields: Mapping[str, Any], lengths: Any, names: Collection[str]) -> dict[str, Any]:
        """Return `fields` with the padded tensors (two or more dimensions) among `names` wrapped in `PerToken`."""
        counts = as_lengths(lengths)
        return {
            name: PerToken(value, counts) if name in names and _is_padded(value) else value
            for name, value in fields.items()
        }

    def values_for(self, spec: FieldSpec, name: str) -> Any:
        """Return the values in the form that `spec` requires: unchanged for dense fields and objects, else as a jagged
        tensor. InvalidRequestError, naming the field, for rows narrower than their sample."""
        if spec.kind in (FieldKind.DENSE, FieldKind.OBJECT):
            return self.values
        return view_jagged_fields({name: self.values}, lengths=self.lengths, token_aligned_fields=(name,))[name]


def _is_padded(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_nested and value.dim() > 1
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.ndim > 1


@dataclasses.dataclass(frozen=True)
class EncodedColumn:
    """One field of a put of N rows, ready to be written: K values, which rows can share (K is N if they do not).

    spec: settled. lengths: `[K]` int64, in units of `spec.unit_bytes`. sizes: `[K]` int64 bytes. index: `[N]` int64,
    row i is value `index[i]`; None if row i is value i. The column references the caller's tensors without a copy: they
    must not change before the last `write`. checksums: `[K]`, None unless requested. by_schema: whether the schema had
    already fixed the kind; otherwise the kind was derived from the value.
    """

    name: str
    spec: FieldSpec
    lengths: Int64s
    sizes: Int64s
    index: Int64s | None
    values: Values
    checksums: UInt32s | None = None
    by_schema: bool = False

    def with_checksums(self) -> EncodedColumn:
        """Return the column with checksums. Values that are not contiguous in CPU memory are copied there once."""
        values = in_host_memory(self.values)
        return dataclasses.replace(self, values=values, checksums=values.checksums())

    @functools.cached_property
    def nbytes(self) -> int:
        """Total size of all values in bytes."""
        return int(np.add.reduce(self.sizes))

    def bytes_of(self, first: int, last: int) -> int:
        """Return the total size of values [first, last) in bytes."""
        return self.nbytes if last - first == len(self.sizes) else int(np.add.reduce(self.sizes[first:last]))

    def write(self, first: int, last: int, target: UInt8s, later: list[Run] | None = None) -> None:
        """Copy values [first, last), concatenated, into `target`, which must have exactly their size.

        later: list to which long copies of contiguous CPU memory are added; the caller must perform them. With None
        they are performed here.
        """
        expected = self.bytes_of(first, last)
        assert target.nbytes == expected, f"field {self.name!r}: {target.nbytes} bytes of space for {expected}"
        self.values.write(first, last, target, later)

    def buffers(self, first: int, last: int) -> list[UInt8s]:
        """Return the bytes that `write` copies, as a list of non-empty arrays. Long values that are contiguous in CPU
        memory are not copied."""
        return self.values.buffers(first, last)


def encode_fields(
    fields: TensorDictBase | Mapping[str, Any],
    *,
    rows: int,
    specs: Mapping[str, FieldSpec],
    open_fields: Collection[str] = (),
    wide_fields: Collection[str] = (),
    partition: str = "",
    token_lengths: Any = None,
    pickles: bool = False,
) -> list[EncodedColumn]:
    """Encode the fields of a put of `rows` samples as columns, in the order of `fields`.

    specs: field specs of `partition`; a field may be missing or its spec open. The value settles the open parts: nested
    tensors are jagged, or ragged if their ragged dimension is not the first one of the rows. A dense tensor `[N, ...]`
    is dense. A list of tensors is jagged if their shapes agree beyond dimension 0, dense if all are scalars, else
    ragged. Tensors of two or more dimensions have the kind of `schema.STANDARD_KINDS` if that has their name. All other
    values are objects. An empty list without a declared kind is omitted.

    open_fields: fields of `specs` whose kind nobody declared. Rows that do not fit such a kind are encoded as the kind
    to which the field then widens (see `FieldSpec.widens_to`). wide_fields: fields whose tensors are encoded as ragged
    rows, which every field accepts whose kind nobody declared.

    A dense `[N, L, *inner]` put into a jagged field becomes N rows of length L. With `token_lengths` `[N]` (passed if
    the lengths of the samples are known, as in a write-back by meta) row i of a per-token field is its first
    `token_lengths[i]` elements. A list of plain numbers put into a dense field of numbers becomes a tensor.
    pickles: pickle objects that the codec does not support.

    Raises, before any copy: SchemaError (differs from the spec), InvalidRequestError (row counts, mixed dtypes,
    lengths), UnsupportedValueError (a value that no kind supports), each naming the field.
    """
    checked_lengths = None if token_lengths is None else as_lengths(token_lengths, rows=rows)
    columns: list[EncodedColumn] = []
    for name, value in _named_values(fields, rows):
        encoder = _FieldEncoder(
            name=name,
            spec=specs.get(name, FieldSpec()),
            partition=partition,
            token_lengths=checked_lengths if STANDARD_KINDS.get(name) is None or name in TOKEN_ALIGNED_FIELDS else None,
            open=name in open_fields,
            wide=name in wide_fields,
            default=STANDARD_KINDS.get(name),
            pickles=pickles,
        )
        column = encoder.encode_column(value, rows)
        if column is not None:
            columns.append(column)
    return columns


def require_fields(fields: Any) -> None:
    """Raise UnsupportedValueError unless `fields` is a TensorDict or a mapping, InvalidRequestError for names that are
    not non-empty strings."""
    if not isinstance(fields, TensorDictBase | Mapping):
        hint = "Pass a TensorDict or a mapping of field names to N rows each."
        raise UnsupportedValueError(field="argument fields", row=None, got=type_name(fields), hint=hint)
    for name in fields.keys():  # noqa: SIM118  # a TensorDict iterates over its rows
        if type(name) is not str or not name:
            raise InvalidRequestError(f"field names must be non-empty strings, got {name!r}")


def _named_values(fields: TensorDictBase | Mapping[str, Any], rows: int) -> list[tuple[str, Any]]:
    """Return the fields as (name, value). InvalidRequestError for another batch size than `rows` and for bad names."""
    if isinstance(fields, TensorDictBase):
        batch = tuple(fields.batch_size)
        if not batch or batch[0] != rows:
            raise InvalidRequestError(
                f"the TensorDict has batch_size {list(batch)}, expected [{rows}] (one per sample)"
            )
    require_fields(fields)
    return list(fields.items())


@dataclasses.dataclass(frozen=True)
class _FieldEncoder:
    """Encodes the value of one field; one method per kind of value.

    spec: what the schema has fixed so far. partition: for errors. token_lengths: length of each row `[N]` of a padded
    tensor in a jagged field (None: the full width). open: nobody declared the kind of `spec`, so it may widen. wide:
    encode tensors as ragged rows whatever the spec. default: the kind of tensors of two or more dimensions if the spec
    leaves the kind open (None: their shapes decide). pickles: pickle objects that the codec does not support."""

    name: str
    spec: FieldSpec
    partition: str
    token_lengths: Tensor | None
    open: bool = False
    wide: bool = False
    default: FieldKind | None = None
    pickles: bool = False

    def encode_column(self, value: Any, rows: int) -> EncodedColumn | None:
        """Encode the value, which must have `rows` rows. Return None for an empty list without a declared kind."""
        if isinstance(value, Shared):
            return self._encode_shared(value, rows)
        if isinstance(value, PerToken):
            value = value.values_for(self.spec, self.name)
        if isinstance(value, Tensor) and value.is_nested and value.layout is torch.jagged and not is_jagged(value):
            return dataclasses.replace(self, default=FieldKind.RAGGED).encode_column(list(value.unbind()), rows)
        value = self._normalize(value)
        if isinstance(value, list) and not value and not rows and self.spec.kind is None:
            return None
        if _row_count(value) != rows:
            raise InvalidRequestError(
                f"field {self.name!r} has {_row_count(value)} rows, expected {rows} (one per sample)"
            )
        widest = self._encode_widened(value) if self.wide else None
        if widest is not None:
            spec, lengths, values = widest
            return EncodedColumn(self.name, spec, lengths, values.sizes, index=None, values=values)
        spec, lengths, values = self._encode_fitting(value)
        by_schema = self.spec.kind is not None
        return EncodedColumn(self.name, spec, lengths, values.sizes, index=None, values=values, by_schema=by_schema)

    def _encode_shared(self, shared: Shared, rows: int) -> EncodedColumn | None:
        """Encode a `Shared` column, without unreferenced values. None if `encode_column` returns it for `values`."""
        index = self._check_index(shared.index, rows)
        values = self._normalize(shared.values)  # for its number of rows
        # `token_lengths` has one length per row, not per value: encode without them.
        column = dataclasses.replace(self, token_lengths=None).encode_column(values, _row_count(values))
        if column is None:
            return None
        if rows and index.max() >= len(column.sizes):
            raise InvalidRequestError(
                f"field {self.name!r}: Shared.index has {index.max()}, but its {len(column.sizes)} values count from 0"
            )
        used, new_index = np.unique(index, return_inverse=True)
        if len(used) == len(column.sizes):  # every value is referenced
            return dataclasses.replace(column, index=index)
        used_values = column.values.take(used)
        return dataclasses.replace(
            column,
            index=new_index.astype(np.int64),
            lengths=column.lengths[used],
            sizes=used_values.sizes,
            values=used_values,
        )

    def _check_index(self, index: Any, rows: int) -> Int64s:
        """Return `Shared.index` as an int64 array `[rows]`. InvalidRequestError for another shape, dtype or sign."""
        array = index.detach().cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
        if array.shape != (rows,) or (rows and (array.dtype.kind not in "iu" or array.min() < 0)):
            raise InvalidRequestError(
                f"field {self.name!r}: Shared.index must be {rows} integers of 0 or more (one per sample), "
                f"got {array.dtype} of shape {list(array.shape)}: {str(array.tolist())[:40]}"
            )
        return array.astype(np.int64)

    # --- normalization to a tensor, a nested tensor or a list ---

    def _normalize(self, value: Any) -> Tensor | list[Any]:
        """Convert the value to a tensor, a nested tensor or a list of rows."""
        if isinstance(value, Tensor):
            return self._normalize_tensor(value)
        if isinstance(value, NonTensorData) and isinstance(value.data, np.ndarray) and value.data.dtype.hasobject:
            value = value.data  # a TensorDict wraps object arrays in NonTensorData
        if isinstance(value, np.ndarray):
            return self._normalize_array(value)
        if isinstance(value, NonTensorStack):
            return list(value.tolist())
        if isinstance(value, NonTensorData):
            raise self._unsupported_error(
                f"a bare non-tensor value (NonTensorData of {type_name(value.data)})",
                "A field needs one value per sample: use a NonTensorStack, a list or an object array of N values.",
            )
        if isinstance(value, TensorDictBase | Mapping) or is_tensorclass(value):
            raise self._unsupported_error(
                f"a nested {type_name(value)}", "Flatten it first, e.g. td.flatten_keys('.')."
            )
        if type(value) not in (list, tuple, FixedList):
            raise self._unsupported_error(f"a value of type {type_name(value)}", _COLUMN_HINT)
        return list(value)

    def _normalize_tensor(self, tensor: Tensor) -> Tensor | list[Any]:
        """Return a jagged or dense tensor, or the rows of a nested tensor of another layout."""
        if is_jagged(tensor):
            return tensor
        if tensor.is_nested:
            return list(tensor.unbind())
        plain = self._plain_tensor(tensor, row=None)
        if plain.dim() == 0:
            raise self._no_rows_error("a tensor")
        return plain

    def _normalize_array(self, array: np.ndarray[Any, Any]) -> Tensor | list[Any]:
        """Convert a numeric array to a tensor over its memory; an object array `[N]` and an array of strings to a
        list."""
        if array.ndim == 0:
            raise self._no_rows_error("an array")
        if array.dtype.hasobject:
            if array.ndim > 1:
                raise self._unsupported_error(f"an object array of shape {list(array.shape)}", "Reshape it to [N].")
            return list(array)
        if array.dtype.kind in "US":
            return array.tolist() if array.ndim == 1 else list(array)
        return self._from_numpy(array, row=None)

    def _from_numpy(self, array: np.ndarray[Any, Any], row: int | None) -> Tensor:
        """Convert a numeric array to a tensor over its memory. row: its row in the field (None: the whole field), for
        errors."""
        if array.dtype.name not in DTYPE_NAMES.values():
            raise self._unsupported_error(
                f"a numpy array of dtype {array.dtype}",
                "Numeric arrays are stored as tensors; for other dtypes use an object array of N values.",
                row,
            )
        return tensor_from_numpy(array)

    def _plain_tensor(self, tensor: Tensor, row: int | None) -> Tensor:
        """Return the tensor in an ordinary form, see `object_codec.plain_tensor`. UnsupportedValueError if it has none.
        row: its row in the field (None: the whole field), for errors."""
        plain = plain_tensor(tensor)
        if plain is None:
            hint = "Convert it to an ordinary dense tensor first (to_dense(), dequantize(), DTensor.full_tensor())."
            # An ordinary tensor, but of a dtype that columns do not support.
            if tensor.layout == torch.strided and not tensor.is_quantized and tensor.dtype not in DTYPE_NAMES:
                hint = f"Put its bytes, x.view(torch.uint8), and view the bytes as {tensor.dtype} after reading."
            raise self._unsupported_error(describe_tensor(tensor), hint, row)
        return plain

    # --- kinds ---

    def _encode_fitting(self, value: Tensor | list[Any]) -> tuple[FieldSpec, Int64s, Values]:
        """Return (settled spec, lengths, values) of a normalized value. If it does not fit the schema, encode it as the
        kind to which the field can widen, or raise SchemaError."""
        try:
            encoded = self._encode(value)
            if self.spec.accepts(encoded[0]):
                return encoded
            error = self._schema_error(str(encoded[0]))
        except SchemaError as raised:
            error = raised
        widened = self._encode_widened(value) if self.open else None
        if widened is None or not self.spec.widens_to(widened[0]):
            raise error
        return widened

    def _encode_widened(self, value: Tensor | list[Any]) -> tuple[FieldSpec, Int64s, Values] | None:
        """Encode tensors and numbers as ragged rows, or tensors as dense ones for a field of objects. None for other
        values."""
        kind = FieldKind.DENSE if self.spec.kind is FieldKind.OBJECT else FieldKind.RAGGED
        as_kind = dataclasses.replace(self, spec=FieldSpec(kind), open=False)
        if isinstance(value, list) and as_kind._to_tensors(value) is None:
            numbers = self._to_numbers(value)
            return None if numbers is None else as_kind._encode(numbers)
        return as_kind._encode(value)

    def _encode(self, value: Tensor | list[Any]) -> tuple[FieldSpec, Int64s, Values]:
        """Return (settled spec, lengths, values) of a normalized value, according to the kind of the schema."""
        kind = self.spec.kind
        if isinstance(value, list):
            tensors = None if kind is FieldKind.OBJECT else self._to_tensors(value)
            if tensors is not None:
                return self._encode_tensor_list(tensors)
            numbers = self._to_numbers(value)
            return self._encode_objects(value) if numbers is None else self._encode(numbers)
        if kind is FieldKind.OBJECT:
            raise self._schema_error(f"a tensor ({DTYPE_NAMES.get(value.dtype, value.dtype)})")
        if is_jagged(value):
            # One row at a time: a ragged field takes any rows, a dense field of known shape takes rows of that shape.
            ragged = FieldKind.RAGGED in (kind, self.default if kind is None else None)
            if ragged or (kind is FieldKind.DENSE and self.spec.settled):
                return self._encode_tensor_list([self._plain_tensor(row, i) for i, row in enumerate(value.unbind())])
            return self._encode_nested(value)
        if kind is None and value.dim() > 1 and not self._is_narrow(value):
            kind = self.default
        match kind:
            case None | FieldKind.DENSE:
                return self._encode_dense(value)
            case FieldKind.JAGGED:
                return self._encode_padded(value)
        return self._encode_tensor_list(list(value.unbind()))  # ragged

    def _to_tensors(self, rows: list[Any]) -> list[Tensor] | None:
        """Return the rows as tensors if all are tensors or numeric arrays, else None: they are objects."""
        if not rows:  # fits any kind that the schema declares
            return None if self.spec.kind is None else []
        if all(isinstance(row, Tensor) for row in rows):
            return [self._plain_tensor(row, i) for i, row in enumerate(rows)]
        if all(isinstance(row, Tensor) or (type(row) is np.ndarray and row.dtype.kind in "biufc") for row in rows):
            return [
                self._plain_tensor(row, i) if isinstance(row, Tensor) else self._from_numpy(row, i)
                for i, row in enumerate(rows)
            ]
        return None

    def _to_numbers(self, rows: list[Any]) -> Tensor | None:
        """Return numbers for a field of tensors as a tensor `[N]` of the dtype of the spec, or if that is open of
        torch's default; None if a row is no number, or for a field of objects or of no kind. SchemaError, naming the
        row, for a number that does not fit."""
        if self.spec.kind is not FieldKind.DENSE and not (self.open and self.spec.dtype is not None):
            return None
        numbers = [row.item() if isinstance(row, np.generic) else row for row in rows]
        if self.spec.kind is FieldKind.OBJECT or numbers_dtype(numbers) is None:
            return None
        if self.spec.dtype is None:
            return torch.tensor(numbers)
        for row, number in enumerate(numbers):
            if not number_fits(number, self.spec.dtype):
                raise self._schema_error(f"the number {number!r} (row {row})")
        return tensor_of_numbers(numbers, TORCH_DTYPES[self.spec.dtype])

    def _encode_objects(self, rows: list[Any]) -> tuple[FieldSpec, Int64s, Values]:
        """Encode Python values with the object codec. The length of an object is its size in bytes."""
        if self.spec.kind not in (None, FieldKind.OBJECT):
            kinds = sorted({type_name(row) for row in rows})
            hint = "Pass a tensor or a numeric array for each row."
            raise self._schema_error(f"objects (rows of type {first_few(kinds)})", hint)
        buffer, row_sizes = encode_rows(rows, field=self.name, pickles=self.pickles)
        sizes = np.array(row_sizes, dtype=np.int64)
        values = FlatValues(np.frombuffer(buffer, dtype=np.uint8), np.cumsum(sizes) - sizes, sizes)
        return FieldSpec(FieldKind.OBJECT, numbers_dtype(rows)), sizes, values

    def _encode_dense(self, tensor: Tensor) -> tuple[FieldSpec, Int64s, Values]:
        """Encode a tensor `[N, *inner]`. Each row has the length 1."""
        spec = self._field_spec(FieldKind.DENSE, tensor, tuple(tensor.shape[1:]))
        ones = np.ones(len(tensor), dtype=np.int64)
        return spec, ones, row_values(tensor, lengths=None)

    def _encode_padded(self, tensor: Tensor) -> tuple[FieldSpec, Int64s, Values]:
        """Encode a tensor `[N, L, *inner]` as rows of length L, or of `token_lengths` if given."""
        if tensor.dim() < 2:
            shape = list(tensor.shape)
            raise self._schema_error(f"dense {DTYPE_NAMES[tensor.dtype]} of shape {shape} (two axes are needed)")
        width = tensor.shape[1]
        lengths = np.full(len(tensor), width, dtype=np.int64)
        not_per_token = self.open and self.name not in TOKEN_ALIGNED_FIELDS and self._is_narrow(tensor)
        if self.token_lengths is not None and not not_per_token:
            lengths = self.token_lengths.numpy()
            if self._is_narrow(tensor):
                longest = int(lengths.max())
                raise InvalidRequestError(
                    f"field {self.name!r}: rows have width {width}, but the longest sample has {longest} tokens"
                )
        spec = self._field_spec(FieldKind.JAGGED, tensor, tuple(tensor.shape[2:]))
        return spec, lengths, row_values(tensor, lengths)

    def _is_narrow(self, tensor: Tensor) -> bool:
        """Whether a tensor `[N, L, ...]` has rows that are shorter than their sample has tokens."""
        lengths = self.token_lengths
        return lengths is not None and len(lengths) > 0 and int(lengths.max()) > tensor.shape[1]

    def _encode_nested(self, nested: Tensor) -> tuple[FieldSpec, Int64s, Values]:
        """Encode a jagged tensor. InvalidRequestError for rows outside its values: a copy would read foreign memory."""
        values = self._plain_tensor(detached_values(nested), row=None)
        starts, lengths = host_starts_and_lengths(nested)
        outside = (starts < 0) | (lengths < 0) | (starts + lengths > len(values))
        if outside.any():
            row = int(np.argmax(outside))
            raise InvalidRequestError(
                f"field {self.name!r}: row {row} of the nested tensor (start {starts[row]}, length {lengths[row]}) is "
                f"outside its values (length {len(values)}); correct its offsets or lengths"
            )
        spec = self._field_spec(FieldKind.JAGGED, values, tuple(values.shape[1:]))
        if values.device.type == "cpu" and values.is_contiguous():
            unit_bytes = spec.unit_bytes
            return spec, lengths, FlatValues(byte_view(values), starts * unit_bytes, lengths * unit_bytes)
        if values.device.type != "cpu" and row_offsets(nested) is None:  # do not copy the holes between rows
            values, starts = pack_rows(values, starts, lengths)
        return spec, lengths, TensorValues(values, starts, lengths)

    def _encode_tensor_list(self, tensors: list[Tensor]) -> tuple[FieldSpec, Int64s, Values]:
        """Encode a list of tensors; the schema or their shapes determine the kind."""
        if not tensors:
            return self._encode_empty_list()
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            names = sorted(DTYPE_NAMES[dtype] for dtype in dtypes)
            raise InvalidRequestError(f"field {self.name!r}: convert its rows to one dtype, got {first_few(names)}")
        kind = self.spec.kind or _list_kind(tensors, self.default)  # dense, jagged or ragged
        first = tensors[0]
        if kind is FieldKind.RAGGED:
            ragged = RaggedValues(tensors)
            return FieldSpec(kind, DTYPE_NAMES[first.dtype]), ragged.sizes, ragged
        # Rows of a jagged field may differ in dimension 0, which is their length; dense rows have no such dimension.
        length_dims = 0 if kind is FieldKind.DENSE else 1
        inner = first.shape[length_dims:]
        for row, tensor in enumerate(tensors):
            if tensor.dim() < length_dims or tensor.shape[length_dims:] != inner:
                what = f"rows of shapes {list(first.shape)} (row 0) and {list(tensor.shape)} (row {row})"
                scalars = tensor.dim() < length_dims
                raise self._schema_error(f"a row without dimensions (row {row})" if scalars else what)
        spec = self._field_spec(kind, first, tuple(inner))
        if kind is FieldKind.DENSE:
            return spec, np.ones(len(tensors), dtype=np.int64), ListValues([row.unsqueeze(0) for row in tensors])
        lengths = np.array([tensor.shape[0] for tensor in tensors], dtype=np.int64)
        return spec, lengths, ListValues(tensors)

    def _encode_empty_list(self) -> tuple[FieldSpec, Int64s, Values]:
        """Encode an empty list. InvalidRequestError if the schema leaves dtype or shape open."""
        if not self.spec.settled:
            raise InvalidRequestError(
                f"field {self.name!r}: an empty list has no dtype and shape; declare the field, or put rows first"
            )
        none = np.zeros(0, dtype=np.int64)
        return self.spec, none, FlatValues(np.zeros(0, dtype=np.uint8), none, none)

    def _field_spec(self, kind: FieldKind, tensor: Tensor, inner: tuple[int, ...]) -> FieldSpec:
        """Return the spec of these values. InvalidRequestError, naming the field, for a shape that no spec can have."""
        try:
            return _spec_of(kind, tensor.dtype, inner)
        except ValueError as error:
            raise InvalidRequestError(f"field {self.name!r}: {error}. Reshape the values") from None

    # --- errors ---

    def _no_rows_error(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"field {self.name!r}: {what} without dimensions has no rows; expected [N, ...]")

    def _schema_error(self, got: str, hint: str = "") -> SchemaError:
        """Return the error for values that do not fit the schema. hint: replaces the usual remedy."""
        if not hint and self.spec.kind in (FieldKind.DENSE, FieldKind.JAGGED) and not self.open:
            hint = (
                'Convert the values; or, if the rows of the field have any shapes, declare FieldSpec("ragged") for it '
                "in register_partition."
            )
        elif not hint and self.spec.kind is FieldKind.OBJECT and self.spec.dtype is not None:
            hint = (
                f"The rows of the field are plain numbers, which need {self.spec.dtype}: put a tensor [N] of that "
                "dtype or of one that holds all of its numbers, or declare the field."
            )
        return SchemaError(partition=self.partition, field=self.name, got=got, expected=str(self.spec), hint=hint)

    def _unsupported_error(self, got: str, hint: str, row: int | None = None) -> UnsupportedValueError:
        return UnsupportedValueError(field=self.name, row=row, got=got, hint=hint)


@functools.lru_cache(maxsize=256)
def _spec_of(kind: FieldKind, dtype: torch.dtype, inner: tuple[int, ...]) -> FieldSpec:
    return FieldSpec(kind, DTYPE_NAMES[dtype], inner)


def _row_count(value: Tensor | list[Any]) -> int:
    return len(value) if isinstance(value, list) else int(value.shape[0])


def _list_kind(tensors: list[Tensor], default: FieldKind | None) -> FieldKind:
    """Return the kind of a list of rows, by their shapes and the default; see `encode_fields`."""
    if all(tensor.dim() == 0 for tensor in tensors):
        return FieldKind.DENSE
    inner = tensors[0].shape[1:]
    same_inner = all(tensor.dim() > 0 and tensor.shape[1:] == inner for tensor in tensors)
    return FieldKind.JAGGED if same_inner and default is not FieldKind.RAGGED else FieldKind.RAGGED


def declared_specs(fields: Iterable[str] | Mapping[str, Any] | None) -> dict[str, FieldSpec]:
    """Parse the `fields` of `register_partition`: names, or name -> FieldSpec (or a mapping of its parts, or None).

    The first put settles the parts that a spec leaves open (see `encode_fields`). Raises ValueError for names that
    repeat, are empty or are not str, and for invalid specs; TypeError if `fields` is not iterable.
    """
    if isinstance(fields, str):
        raise InvalidRequestError(f"fields={fields!r}: pass a list of names, not one string")
    if fields is not None and not isinstance(fields, Iterable):
        hint = "Pass a list of names, or a mapping of names to FieldSpecs."
        raise UnsupportedValueError(field="argument fields", row=None, got=repr(fields), hint=hint)
    pairs = list(fields.items()) if isinstance(fields, Mapping) else [(name, None) for name in fields or ()]
    specs: dict[str, FieldSpec] = {}
    for name, given in pairs:
        if type(name) is not str or not name:
            raise InvalidRequestError(f"field names must be non-empty strings, got {name!r}")
        if name in specs:
            raise InvalidRequestError(f"field {name!r} is declared twice; name each field once")
        specs[name] = _parse_spec(name, given)
    return specs


def _parse_spec(name: str, given: Any) -> FieldSpec:
    try:
        return field_spec(given)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"field {name!r}: {error}") from error


def appended(column: EncodedColumn, stored: RowSource, stored_lengths: Int64s, rows: Int64s) -> EncodedColumn:
    """Return the jagged column with its values appended to the stored ones.

    Row `rows[i]` begins with row i of `stored`, which has `stored_lengths[i]` elements (of 0 bytes if the inner shape
    contains a 0). Other rows keep their values. Copies both into new memory; values that rows shared are duplicated.
    Raises `ChecksumError` if stored rows do not match their checksums.
    """
    values = column.values
    lengths = column.lengths
    if column.index is not None:
        values = values.take(column.index)
        lengths = lengths[column.index]
    count = len(lengths)
    tails = np.empty(int(values.sizes.sum()), np.uint8)
    values.write(0, count, tails)
    # Each row has two parts: part 0 is the stored row (without bytes if there is none), part 1 is the appended value.
    # `which` is the number of the buffer that has a part: one of `stored.buffers`, or `tails` after them.
    which = np.full((count, 2), len(stored.buffers), np.int32)
    offsets = np.zeros((count, 2), np.int64)
    sizes = np.zeros((count, 2), np.int64)
    which[rows, 0] = 0 if stored.which is None else stored.which
    offsets[rows, 0], sizes[rows, 0] = stored.offsets, stored.sizes
    offsets[:, 1], sizes[:, 1] = np.cumsum(values.sizes) - values.sizes, values.sizes
    # A stored row without bytes may have any offset: let it begin at the start of `tails`.
    which[sizes[:, 0] == 0, 0], offsets[sizes[:, 0] == 0, 0] = len(stored.buffers), 0
    joined = np.empty(int(sizes.sum()), np.uint8)
    # Row-major: the two parts of each row follow each other.
    gather([*stored.buffers, tails], which.reshape(-1), offsets.reshape(-1), sizes.reshape(-1), joined)
    totals: Int64s = sizes.sum(axis=1)
    starts = np.cumsum(totals) - totals
    if stored.check is not None:
        stored.check(joined, starts[rows], slice(None))  # all stored rows, at their new location
    flat = FlatValues(joined, starts, totals)
    total_lengths = lengths.copy()
    total_lengths[rows] += stored_lengths
    return dataclasses.replace(column, lengths=total_lengths, sizes=totals, index=None, values=flat)
