"""Types shared by all layers: field kinds, dtypes by name, field specs. This module does not import torch."""

from __future__ import annotations

import enum
import functools
import math
from typing import Any, TypeVar

import msgspec

from dataplane.core.plain_numbers import fits

PROTOCOL_VERSION = 13
INT64_MIN = -(1 << 63)
INT64_MAX = (1 << 63) - 1
GRANULE_BYTES = 64
"""Alignment of extents: they start and end on multiples of this, so no two extents share a cache line."""
_Integers = TypeVar("_Integers")


def ceil_div(dividend: _Integers, divisor: Any) -> _Integers:
    """Divide, rounding up. The dividend, or both, may be an int or an array of integers."""
    numerator: Any = dividend
    quotient: _Integers = -(-numerator // divisor)
    return quotient


def granules_up(nbytes: _Integers) -> _Integers:
    """Round up to whole granules: an int, or an array of integers."""
    rounded: Any = ceil_div(nbytes, GRANULE_BYTES)
    product: _Integers = rounded * GRANULE_BYTES
    return product


MAX_DIMENSIONS = 32
MAX_ELEMENTS = 1 << 40
"""Limit for the inner shape of a row: the bytes of the maximum number of such rows fit into 64 bits."""

Scalar = str | bool | int | float | None
"""Type of a tag value."""

DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of every dtype that a column can hold, by torch's dtype name."""


class FieldKind(enum.StrEnum):
    """How the shapes of a field's rows relate (see docs/concepts/fields.md).

    DENSE: rows of one shape. JAGGED: rows that differ in their first dimension. RAGGED: rows of any
    shape and one dtype. OBJECT: objects in msgpack.
    """

    DENSE = "dense"
    JAGGED = "jagged"
    RAGGED = "ragged"
    OBJECT = "object"


class Checksums(enum.StrEnum):
    """Policy for the rows that get a checksum from their writer."""

    ACROSS_HOSTS = "across-hosts"
    """All rows while clients and storage units are on several hosts, else the rows sent over the network."""
    ALWAYS = "always"
    NEVER = "never"


@functools.lru_cache(maxsize=4096)
def _shape(inner: tuple[int, ...]) -> tuple[int, ...]:
    """Return the inner shape as a tuple of ints. Raises ValueError if a size is negative, or it has too
    many dimensions or elements."""
    sizes = tuple(int(size) for size in inner)
    if sizes and min(sizes) < 0:
        raise ValueError(f"FieldSpec: the inner shape {list(sizes[:MAX_DIMENSIONS])} has a negative size")
    # A size of 0 counts as 1, so that it does not hide large ones.
    if len(sizes) > MAX_DIMENSIONS or math.prod(max(1, size) for size in sizes) > MAX_ELEMENTS:
        raise ValueError(
            f"FieldSpec: an inner shape must have at most {MAX_DIMENSIONS} dimensions and {MAX_ELEMENTS:,} elements, "
            f"got {len(sizes)} dimensions: {list(sizes[:MAX_DIMENSIONS])}"
        )
    return sizes


class FieldSpec(msgspec.Struct, frozen=True, kw_only=False, dict=True):
    """Kind, dtype and inner shape of a field. A part that is None is undecided until the first put fixes it.

    kind: a `FieldKind` or its name. dtype: torch's dtype name ("bfloat16"; a `torch.dtype` is accepted too). inner: the
    shape of one element of a jagged row, or of one dense row; None for ragged and object.

    Declared objects have no dtype. The service sets the dtype of an object field that nobody declared while all of its
    rows are plain numbers: the smallest dtype that holds them (see `core.plain_numbers`).
    """

    kind: FieldKind | None = None
    dtype: str | None = None
    inner: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Convert each part, in place, to its stored form. ValueError if a part is invalid."""
        if self.kind is not None and not isinstance(self.kind, FieldKind):
            if self.kind not in list(FieldKind):
                raise ValueError(f"FieldSpec: unknown kind {self.kind!r}; expected one of {', '.join(FieldKind)}")
            msgspec.structs.force_setattr(self, "kind", FieldKind(self.kind))
        is_name = isinstance(self.dtype, str) and self.dtype in DTYPE_BYTES
        if self.dtype is not None and not is_name:
            name = str(self.dtype).removeprefix("torch.")
            if name not in DTYPE_BYTES:
                raise ValueError(f"FieldSpec: unknown dtype {self.dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
            msgspec.structs.force_setattr(self, "dtype", name)
        if self.inner is not None and self.inner != ():
            msgspec.structs.force_setattr(self, "inner", _shape(tuple(self.inner)))

    @functools.cached_property
    def settled(self) -> bool:
        """Whether every part that the kind requires is set."""
        match self.kind:
            case None:
                return False
            case FieldKind.OBJECT:
                return True
            case FieldKind.RAGGED:
                return self.dtype is not None
            case _:
                return self.dtype is not None and self.inner is not None

    @property
    def unit_bytes(self) -> int:
        """Bytes per unit of a cell's length. The unit is one element of a jagged row, a whole dense row (length 1), or
        one byte for other kinds."""
        if self.kind is FieldKind.JAGGED or self.kind is FieldKind.DENSE:
            assert self.dtype is not None, self
            assert self.inner is not None, self
            return DTYPE_BYTES[self.dtype] * math.prod(self.inner)
        return 1

    def accepts(self, other: FieldSpec) -> bool:
        """Whether values of the settled spec `other` may be put into a field with this spec."""
        if self.kind is FieldKind.OBJECT:
            return other.kind is FieldKind.OBJECT
        return (
            self.kind in (None, other.kind) and self.dtype in (None, other.dtype) and self.inner in (None, other.inner)
        )

    def widens_to(self, other: FieldSpec) -> bool:
        """Whether a field of this settled spec can hold values of the settled spec `other` if its kind changes to that
        of `other`: from dense or jagged rows to ragged ones, and from objects that are plain numbers to dense rows."""
        if other.kind is FieldKind.RAGGED:
            return self.kind in (FieldKind.DENSE, FieldKind.JAGGED) and self.dtype == other.dtype
        if other.kind is FieldKind.DENSE and self.kind is FieldKind.OBJECT:
            return other.inner == () and self.dtype is not None and fits(self.dtype, other.dtype or "")
        return False

    def __str__(self) -> str:
        words = [str(self.kind or "any kind")]
        if self.dtype is not None and self.kind is not FieldKind.OBJECT:
            words.append(self.dtype)
        if self.inner is not None:
            words.append(f"inner shape {list(self.inner)}")
        return " ".join(words)


def field_spec(value: Any) -> FieldSpec:
    """Return `value` as a `FieldSpec`: unchanged, from a mapping with its keys, or undecided in all parts for None."""
    if value is None:
        return FieldSpec()
    if isinstance(value, FieldSpec):
        return value
    if isinstance(value, dict):
        return FieldSpec(**value)
    raise TypeError(f"expected a FieldSpec, a mapping of its parts or None, got {type(value).__name__}")
