"""Convert fields of the original package to and from columns of this service.

In the original, every row is a separate tensor. Here a field has a kind. `[N]` is dense. Rows of one dimension are
jagged, even if all have the same length, so that the next put may have other lengths. Rows of more dimensions are
ragged, because any dimension may differ (position ids `[4, L]`, images). All other values, NumPy arrays included, are
objects.

Values that do not fit the column of their field go, as objects, to a second column: the field's hidden column
(`schema.variants_of`). A sample's value is in one of the two.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from torch import Tensor

from dataplane.client.operations import sample_names
from dataplane.core.schema import columns_of, field_of, variants_of
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.jagged import jagged_from_values
from dataplane.data.object_codec import decode_object, encode_object
from dataplane.data.tensor_memory import TORCH_DTYPES
from dataplane.errors import UNDECLARED, InternalError, SchemaError, UnsupportedValueError
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)

FieldSchema = dict[str, Any]
"""One entry of `BatchMeta.field_schema`."""
Parser = Callable[[dict[str, Any]], Any]

JAGGED_DIMENSIONS = 2
"""Number of dimensions of a tensor `[N, L]`, which is stored as N jagged rows."""


def row_count(data: TensorDictBase) -> int:
    """Return the number of rows. ValueError if the batch has no dimension of rows, TypeError if it
    is not a TensorDict."""
    if not is_tensor_collection(data):
        raise TypeError(f"data: expected a TensorDict, got {type(data).__name__}")
    if not data.batch_size:
        raise ValueError("the TensorDict has batch_size=[]: its first dimension must be the number of rows")
    return int(data.batch_size[0])


def extract_field_schema(data: TensorDict) -> dict[str, FieldSchema]:
    """Return the `BatchMeta.field_schema` of these values; empty without rows. ValueError if a field does not have
    `batch_size` rows."""
    rows = row_count(data)
    return {str(name): _schema_of(str(name), value, rows) for name, value in data.items()} if rows else {}


def _schema_of(name: str, value: Any, rows: int) -> FieldSchema:
    """Return the schema of one field. ValueError unless it has `rows` rows."""
    shapes: list[Any] = []  # of each row, only for nested tensors; `shape` is then that of the first row
    if isinstance(value, Tensor) and value.is_nested:
        shapes = [tuple(row.shape) for row in value.unbind()]
        count = len(shapes)
        shape = torch.Size(shapes[0]) if shapes else None
    elif isinstance(value, Tensor):
        count = len(value)
        # As in the original, a scalar has the shape [1].
        shape = value.shape[1:] if value.dim() > 1 else torch.Size([1])
    else:
        count = len(value)
        shape = None
    if count != rows:
        raise ValueError(f"field {name!r} has {count} rows, but the batch_size of its TensorDict is {rows}")
    is_tensor = isinstance(value, Tensor)
    schema: FieldSchema = {
        "dtype": value.dtype if is_tensor else None,
        "shape": shape,
        "is_nested": bool(shapes),
        "is_non_tensor": not is_tensor,
    }
    if shapes:
        schema["per_sample_shapes"] = shapes
    return schema


def unknown_schema() -> FieldSchema:
    """Return the `BatchMeta.field_schema` entry of a field before its first put."""
    return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}


# --- to the service


def to_columns(fields: Mapping[str, Any] | TensorDictBase) -> dict[str, Any]:
    """Return the column values to put for these fields. No data is copied."""
    return {str(name): _to_column(value) for name, value in fields.items()}


def _to_column(value: Any) -> Any:
    """Convert one field to a value for `put`: a dense tensor `[N, L]` with N > 0 becomes N jagged rows; arrays and
    lists in NonTensorData become lists of rows; other values stay as they are. Dense tensors are detached."""
    if isinstance(value, NonTensorData) and isinstance(value.data, np.ndarray | list | tuple):
        return list(value.data)
    if not isinstance(value, Tensor) or value.is_nested:
        return value
    rows = value.detach() if value.requires_grad else value
    if rows.dim() != JAGGED_DIMENSIONS or not len(rows):
        return rows
    if len(rows) == 1:
        return [rows[0]]  # `put` takes a list of rows as jagged, too; a nested tensor of one row costs more than a copy
    return _as_jagged(rows)


def _as_jagged(dense: Tensor) -> Tensor:
    """Return `[N, L, *inner]` as a nested tensor (layout jagged) of N rows of length L."""
    count, length = dense.shape[:2]
    offsets = torch.arange(count + 1, dtype=torch.int64, device=dense.device) * length
    return jagged_from_values(dense.reshape(count * length, *dense.shape[2:]), offsets, span=(length, length))


def to_other_column(columns: dict[str, Any], error: SchemaError) -> bool:
    """Change `columns` after a put of them failed with `error`: move the field that does not fit its column to the
    field's hidden column, or make its rows objects if its column holds objects. Return whether a retry can succeed."""
    name = error.facts["field"]
    # No retry if the field was not put, for a value that does not fit a hidden column, or for an undeclared field.
    if name not in columns or name != field_of(name) or error.facts["got"] == UNDECLARED:
        return False
    rows = rows_of(columns[name])
    if error.facts["expected"] == str(FieldSpec(FieldKind.OBJECT)):  # a list of rows is encoded as objects there
        columns[name] = rows
    else:
        del columns[name]
        # A tuple is never encoded as a tensor or a number, so these rows are objects for any type of value.
        columns[variants_of(name)] = [(row,) for row in rows]
    return True


def declared_fields(columns: Mapping[str, Any]) -> dict[str, FieldSpec]:
    """Return the specs to declare before the first put of these fields: with a kind if it cannot be
    inferred from the values."""
    return {name: FieldSpec(_kind_to_declare(value)) for name, value in columns.items()}


def _kind_to_declare(value: Any) -> FieldKind | None:
    """Return the kind to declare for a field, or None if `put` infers it correctly."""
    if isinstance(value, Tensor):
        return FieldKind.RAGGED if value.dim() > JAGGED_DIMENSIONS else None
    if not isinstance(value, NonTensorStack | list):
        return None
    rows = rows_of(value)
    tensors = [row for row in rows if isinstance(row, Tensor)]
    # Only objects can be arrays, or tensors of several dtypes.
    if any(isinstance(row, np.ndarray) for row in rows) or len({row.dtype for row in tensors}) > 1:
        return FieldKind.OBJECT
    if rows and len(tensors) == len(rows) and all(row.dim() >= JAGGED_DIMENSIONS for row in tensors):
        return FieldKind.RAGGED
    return None


def apply_parser(
    fields: Mapping[str, Any] | TensorDictBase, parse: Parser | None
) -> Mapping[str, Any] | TensorDictBase:
    """Call `parse`, the caller's `data_parser`, with a dict of tensors (lists for nested tensors
    and objects). Return its fields, with lists of tensors joined; without a parser, the fields.
    TypeError if it does not return a dict, ValueError if it adds, removes or resizes fields."""
    if parse is None:
        return fields
    if not callable(parse):
        raise TypeError(f"data_parser: expected a function, got {type(parse).__name__}")
    given: dict[str, Any] = {str(name): _to_parser_value(value) for name, value in fields.items()}
    expected = {name: len(value) for name, value in given.items()}  # before the call, which can change `given`
    returned = parse(given)
    if not isinstance(returned, dict):
        raise TypeError(f"data_parser must return the dict of fields, got {type(returned).__name__}")
    got = {name: len(value) for name, value in returned.items()}
    if got != expected:
        raise ValueError(f"data_parser may neither add nor remove fields or values: got {got}, expected {expected}")
    return {name: value if isinstance(value, Tensor) else _pack_tensors(value) for name, value in returned.items()}


def _to_parser_value(value: Any) -> Any:
    """Return a dense tensor as it is, and the rows of any other field as a list."""
    if isinstance(value, Tensor):
        return list(value.unbind()) if value.is_nested else value
    return list(value.tolist()) if hasattr(value, "tolist") else list(value)


def _pack_tensors(values: Sequence[Any]) -> Any:
    """Join values into one if all of them are tensors; otherwise return them as a list."""
    return packed_rows(values) if values and all(isinstance(value, Tensor) for value in values) else list(values)


# --- from the service


def from_columns(data: TensorDict) -> TensorDict:
    """Convert read values to the form of the original: tensor rows nested, even with equal lengths; scalars `[N]`;
    objects in a NonTensorStack."""
    converted: TensorDict = TensorDict._new_unsafe(  # without checks: faster
        {name: _from_column(value) for name, value in data.items()}, batch_size=data.batch_size
    )
    return converted


def _from_column(value: Any) -> Any:
    """Convert one read field; see `from_columns`."""
    if type(value) is Tensor:
        return _as_jagged(value) if value.dim() > 1 and len(value) else value
    if isinstance(value, Tensor):
        return value  # nested; the type check above is cheaper than any attribute of a nested tensor
    rows = value.tolist() if hasattr(value, "tolist") else list(value)
    return packed_rows(rows) if rows and all(isinstance(row, Tensor) for row in rows) else value


def packed_rows(rows: Sequence[Any]) -> Any:
    """Join rows into one value, the first that is possible of: stacked scalars, a jagged nested tensor, a strided
    nested tensor, a NonTensorStack."""
    if all(isinstance(row, Tensor) for row in rows):
        if all(row.dim() == 0 for row in rows):
            return torch.stack(list(rows))
        for layout in (torch.jagged, torch.strided):
            try:
                return torch.nested.as_nested_tensor(list(rows), layout=layout)
            except (RuntimeError, TypeError) as error:
                log.debug("rows cannot be nested with layout %s: %s", layout, error)
    return NonTensorStack(*rows)


def rows_of(value: Any) -> list[Any]:
    """Return the rows of a field as a list. Rows of a numeric array are tensors."""
    if isinstance(value, np.ndarray):
        return list(torch.as_tensor(value).unbind() if value.dtype.kind in "biufc" else value)
    if isinstance(value, Tensor):
        return list(value.unbind())
    return list(value.tolist()) if hasattr(value, "tolist") else list(value)


def rows_at(data: Mapping[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """Return the rows of each field at these positions."""
    rows_by_field = {str(name): rows_of(value) for name, value in data.items()}
    return {name: packed_rows([rows[position] for position in positions]) for name, rows in rows_by_field.items()}


def located_schema(locations: Sequence[c.FieldLocations]) -> dict[str, FieldSchema]:
    """Return the `BatchMeta.field_schema` of the fields that at least one of the samples has. locations: the columns of
    these samples, hidden ones included; a sample without a value has the length -1."""
    with_values = {column.name: column for column in locations if (column.lengths >= 0).any()}
    names = dict.fromkeys(map(field_of, with_values))
    return {name: _joined_schema([with_values.get(column) for column in columns_of(name)]) for name in names}


def _joined_schema(columns: Sequence[c.FieldLocations | None]) -> FieldSchema:
    """Join the schemas of a field's columns that have values, in the order of `schema.columns_of`: the dtype is that of
    the first one with tensors; rows of unknown shape have the shape None."""
    present = [column for column in columns if column is not None]
    own = next((column for column in present if column.spec.kind is not FieldKind.OBJECT), present[0])
    is_tensor = own.spec.kind is not FieldKind.OBJECT
    schema: FieldSchema = {
        "dtype": TORCH_DTYPES[own.spec.dtype or ""] if is_tensor else None,  # a tensor column with values has a dtype
        "shape": None,
        "is_nested": own.spec.kind is FieldKind.RAGGED or len(present) > 1,
        "is_non_tensor": not is_tensor,
    }
    shapes: list[tuple[int, ...] | None] = [None] * len(own.lengths)
    for column in present:
        for row, shape in _known_shapes(column).items():
            shapes[row] = shape
    if len(present) == 1:
        if own.spec.kind is FieldKind.DENSE:
            return {**schema, "shape": torch.Size(own.spec.inner or (1,))}
        if own.spec.kind is not FieldKind.JAGGED:
            return schema
        if len(set(shapes)) == 1:
            return {**schema, "shape": torch.Size(shapes[0] or ())}
    elif all(shape is None for shape in shapes):
        return schema
    return {**schema, "is_nested": True, "per_sample_shapes": shapes}


def _known_shapes(column: c.FieldLocations) -> dict[int, tuple[int, ...]]:
    """Return the shape of each row that a dense or jagged column has, by row."""
    spec = column.spec
    lengths = column.lengths.tolist()  # -1: no value
    inner = spec.inner or ()
    match spec.kind:
        case FieldKind.DENSE:  # of a scalar: [1], as in the original
            return {row: inner or (1,) for row, length in enumerate(lengths) if length >= 0}
        case FieldKind.JAGGED:
            return {row: (length, *inner) for row, length in enumerate(lengths) if length >= 0}
    return {}


def known_fields(locations: Sequence[c.FieldLocations], fields: Sequence[str]) -> list[str]:
    """Return those of `fields` that the partition has, with values or declared with a kind."""
    known = {field_of(column.name) for column in locations if column.spec.kind is not None}
    return [name for name in fields if name in known]


def produced(locations: Sequence[c.FieldLocations], count: int, fields: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return `[N, F]` with 1 where the sample has the field, otherwise 0. count: the number N of samples."""
    has_value = {column.name: column.lengths >= 0 for column in locations}  # a length of -1: no value
    none = np.zeros(count, np.bool_)
    # A value is in one of the field's columns.
    columns = [np.logical_or.reduce([has_value.get(column, none) for column in columns_of(name)]) for name in fields]
    return np.stack(columns, axis=1).astype(np.int8) if columns else np.ones((count, 0), np.int8)


ENCODED = "\x1fobject:"
"""Prefix of a tag that is an encoded value in base64."""


def tag_columns(tags: Sequence[Mapping[str, Any] | None] | None, count: int) -> tuple[c.TagColumn, ...]:
    """Encode the tags of `count` samples for the service. None instead of a mapping means no tags.
    `UnsupportedValueError` for values that an object column cannot store."""
    given = None if tags is None else [{} if mapping is None else mapping for mapping in tags]
    return sample_names.tag_columns(given, count, _to_scalar)


def _to_scalar(name: str, row: int, value: Any) -> Any:
    """Convert a tag value to a scalar, or encode it as a string with the prefix `ENCODED`. `sample_names.tag_columns`
    stores values of type bool, int, float and None itself."""
    # A text that begins with the prefix is encoded, too, so that it is not decoded as something else.
    if type(value) is str and not value.startswith(ENCODED):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        return sample_names.scalar(name, row, value.item())  # a NumPy or torch scalar
    try:
        encoded = encode_object(value, field=f"tag {name}")
    except UnsupportedValueError as error:
        hint = "Tags are scalars, and lists and dicts of scalars; put other values as a field."
        raise UnsupportedValueError(**{**error.facts, "row": row, "hint": hint}) from None
    return ENCODED + base64.b64encode(encoded).decode("ascii")


def tags_of(columns: Sequence[c.TagColumn], count: int) -> list[dict[str, Any]]:
    """Return one dict per sample, with decoded values."""
    tags: list[dict[str, Any]] = sample_names.tags_of(columns, count)
    for column in columns:
        if may_be_encoded(column.values):  # most columns have no encoded value
            for sample_tags in tags:
                value = sample_tags.get(column.name)
                if _is_encoded(value):
                    sample_tags[column.name] = _decode(value)
    return tags


def may_be_encoded(values: Sequence[Any]) -> bool:
    """Whether any of the values of a tag contains the prefix of encoded values."""
    try:
        return ENCODED in "".join(values)
    except TypeError:  # other values, too
        return ENCODED in "".join([value for value in values if type(value) is str])


def _decode(text: str) -> Any:
    """Decode a value. Return text that is not an encoded value unchanged, because a native client can put any text."""
    try:
        return decode_object(base64.b64decode(text.removeprefix(ENCODED), validate=True))
    except (ValueError, InternalError, UnsupportedValueError):
        return text


def _is_encoded(value: Any) -> TypeGuard[str]:
    return type(value) is str and value.startswith(ENCODED)
