"""Conversion of message parts whose wire format differs from the ledger's value: arrays, specs, samples, tags.

Each kind of part has two functions. `..._to_pb` returns the value for the message's field; `..._from_pb` converts the
field back. Wire data is only checked for its form (`InvalidRequestError`); the ledger checks its meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataplane.core.types import FieldKind, FieldSpec, Scalar
from dataplane.errors import InvalidRequestError
from dataplane.ledger.commands import Int32s, Int64s, Predicate, Samples, TagColumn, UInt32s
from dataplane.protocol.pb import control_pb2 as pb

Keywords = dict[str, Any]
"""The fields of a message, by name. Parts are passed in this form and not as messages, because protobuf copies a
message by serializing and parsing it."""

_WIRE64 = np.dtype("<i8")
_WIRE32 = np.dtype("<i4")
_WIRE_UNSIGNED = np.dtype("<u4")
_WIRE_REAL = np.dtype("<f8")

_KINDS: tuple[FieldKind | None, ...] = (None, *FieldKind)
"""Field kinds by their number in the protocol's enum `FieldKind`."""
_KIND_NUMBERS: dict[FieldKind | None, Any] = {kind: number for number, kind in enumerate(_KINDS)}


# --- arrays -----------------------------------------------------------------------------------------------------


def int64s_to_pb(values: Int64s) -> bytes:
    return values.astype(_WIRE64, copy=False).tobytes()


def int64s_from_pb(wire: bytes) -> Int64s:
    """Return a read-only view of the message's bytes."""
    return _array_from(wire, _WIRE64)


def int32s_to_pb(values: Int32s) -> bytes:
    return values.astype(_WIRE32, copy=False).tobytes()


def int32s_from_pb(wire: bytes) -> Int32s:
    """Return a read-only view of the message's bytes."""
    return _array_from(wire, _WIRE32)


def uint32s_to_pb(values: UInt32s) -> bytes:
    return values.astype(_WIRE_UNSIGNED, copy=False).tobytes()


def uint32s_from_pb(wire: bytes) -> UInt32s:
    """Return a read-only view of the message's bytes."""
    return _array_from(wire, _WIRE_UNSIGNED)


def _array_from(wire: bytes, dtype: np.dtype[Any]) -> np.ndarray[tuple[int], Any]:
    """Return the bytes as an array: a read-only view if `dtype` has this machine's byte order, otherwise a copy."""
    if len(wire) % dtype.itemsize:
        raise InvalidRequestError(
            f"a column of {dtype.itemsize}-byte values has {len(wire)} bytes, which is not a whole number of values"
        )
    array = np.frombuffer(wire, dtype)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


# --- scalars ----------------------------------------------------------------------------------------------------


def scalar_to_pb(value: Scalar) -> Keywords:
    """Return the field that holds the value of a tag; none for None. bool is tested before int, its base class."""
    match value:
        case None:
            return {}
        case bool():
            return {"boolean": value}
        case str():
            return {"text": value}
        case int():
            return {"integer": value}
        case float():
            return {"real": value}
    raise InvalidRequestError(
        f"tag value {value!r}: expected a str, bool, int, float or None, got {type(value).__name__}"
    )


def scalar_from_pb(wire: pb.Scalar) -> Scalar:
    """Return the value of a tag."""
    kind = wire.WhichOneof("kind")
    if kind is None:  # the tag has the value None
        return None
    value: Scalar = getattr(wire, kind)
    return value


# --- specs ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def spec_to_pb(spec: FieldSpec) -> pb.FieldSpec:
    """Return the message of a spec. It is cached and shared between calls: do not modify it."""
    inner = None if spec.inner is None else pb.Shape(sizes=spec.inner)
    return pb.FieldSpec(kind=_KIND_NUMBERS[spec.kind], dtype=spec.dtype, inner=inner)


def spec_from_pb(wire: pb.FieldSpec) -> FieldSpec:
    """Return the spec of a message. Equal messages return the same cached object."""
    return _cached_spec(wire.SerializeToString())


@functools.lru_cache(maxsize=4096)
def _cached_spec(serialized: bytes) -> FieldSpec:
    """Return the spec of a serialized `pb.FieldSpec`. (Messages are not hashable, so they cannot be cache keys.)"""
    wire = pb.FieldSpec.FromString(serialized)
    inner = tuple(wire.inner.sizes) if wire.HasField("inner") else None  # the inner shape
    if not 0 <= wire.kind < len(_KINDS):
        raise InvalidRequestError(
            f"unknown field kind {wire.kind}; the client may be newer than the service: install the same release on "
            "both"
        )
    if inner is not None and min(inner, default=0) < 0:
        raise InvalidRequestError(f"inner shape {list(inner)} of a field has a negative size")
    try:
        return FieldSpec(_KINDS[wire.kind], wire.dtype if wire.HasField("dtype") else None, inner)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


# --- samples ----------------------------------------------------------------------------------------------------


def samples_to_pb(samples: Samples) -> Keywords:
    """Return the fields that name the samples: by their ids, or by handles (row and generation of each)."""
    if samples.ids is not None:
        return {"ids": {"values": samples.ids}}
    assert samples.rows is not None
    assert samples.generations is not None
    return {"handles": {"rows": int64s_to_pb(samples.rows), "generations": int64s_to_pb(samples.generations)}}


def samples_from_pb(wire: pb.Samples) -> Samples:
    """Return the samples that a message names by ids or by handles."""
    match wire.WhichOneof("naming"):
        case "ids":
            return Samples(ids=tuple(wire.ids.values))
        case "handles":
            rows = int64s_from_pb(wire.handles.rows)
            generations = int64s_from_pb(wire.handles.generations)
            return Samples(rows=rows, generations=generations)
    raise InvalidRequestError("a message Samples has neither ids nor handles; set one of them")


# --- tags -------------------------------------------------------------------------------------------------------


def tag_to_pb(tag: TagColumn) -> Keywords:
    """Return the fields of a tag column. Values of one type become one array; mixed types, None, large integers and
    subclasses of the scalar types are converted one by one."""
    positions = None if tag.positions is None else int64s_to_pb(tag.positions)
    return {"name": tag.name, "positions": positions, **_tag_values(tag.values)}


def _tag_values(values: Sequence[Scalar]) -> Keywords:
    """Return the field that holds the values of a tag column, by their common type."""
    kinds = set(map(type, values))
    if kinds == {str}:
        return {"texts": {"values": values}}
    if kinds == {float}:
        return {"reals": np.array(values, _WIRE_REAL).tobytes()}
    if kinds == {bool}:
        return {"booleans": bytes(values)}  # type: ignore[arg-type]  # a byte for each
    if kinds == {int}:
        return {"integers": np.array(values, _WIRE64).tobytes()}
    return {"mixed": {"values": [scalar_to_pb(value) for value in values]}}


def tag_from_pb(wire: pb.TagColumn) -> TagColumn:
    """Return the tag column of a message."""
    values: Sequence[Scalar]
    match wire.WhichOneof("values"):
        case "texts":
            values = tuple(wire.texts.values)
        case "reals":
            values = tuple(_array_from(wire.reals, _WIRE_REAL).tolist())
        case "booleans":
            values = tuple(map(bool, wire.booleans))
        case "integers":
            values = tuple(_array_from(wire.integers, _WIRE64).tolist())
        case "mixed":
            values = tuple(map(scalar_from_pb, wire.mixed.values))
        case _:
            raise InvalidRequestError(f"tag {wire.name!r} has no values")
    positions = int64s_from_pb(wire.positions) if wire.HasField("positions") else None
    return TagColumn(name=wire.name, values=values, positions=positions)


def predicate_to_pb(predicate: Predicate) -> Keywords:
    """Return the fields of a condition on a tag. A tuple of values is sent as `several`, a single value as `one`."""
    if isinstance(predicate.value, tuple):
        several = {"values": [scalar_to_pb(value) for value in predicate.value]}
        return {"tag": predicate.tag, "op": predicate.op, "several": several}
    return {"tag": predicate.tag, "op": predicate.op, "one": scalar_to_pb(predicate.value)}


def predicate_from_pb(wire: pb.Predicate) -> Predicate:
    """Return the condition on a tag of a message."""
    match wire.WhichOneof("operand"):
        case "one":
            return Predicate(tag=wire.tag, op=wire.op, value=scalar_from_pb(wire.one))
        case "several":
            return Predicate(tag=wire.tag, op=wire.op, value=tuple(map(scalar_from_pb, wire.several.values)))
    raise InvalidRequestError(f"predicate on tag {wire.tag!r} has no value to compare with")
