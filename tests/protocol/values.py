"""Random ledger values, built from their annotations."""

from __future__ import annotations

import enum
import functools
import typing
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from dataplane.core.types import DTYPE_BYTES, FieldKind, FieldSpec, Scalar
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import codec
from dataplane.protocol.pb import control_pb2 as pb

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(max_size=8)
SCALAR = st.one_of(
    st.none(), st.booleans(), TEXT, INT64, st.floats(allow_nan=False), st.sampled_from([-(1 << 63), (1 << 63) - 1])
)
NATURAL = st.integers(0, (1 << 63) - 1)
OFFERED = {
    "cookie": st.text(min_size=1, max_size=8),
    "capacity_bytes": NATURAL,
    "backed_bytes": NATURAL,
    "unit": NATURAL,
    "endpoints": st.lists(st.sampled_from(["ipc://@tq", "tcp://host:1"]), max_size=3).map(tuple),
    "curve_key": st.sampled_from(["", "k" * 40]),
}
"""Fields of an `AddUnit` that do not take every value of their type."""
SPECS = st.builds(
    FieldSpec,
    kind=st.none() | st.sampled_from(list(FieldKind)),
    dtype=st.none() | st.sampled_from(list(DTYPE_BYTES)),
    inner=st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


def int64s() -> st.SearchStrategy[c.Int64s]:
    return st.lists(INT64, max_size=5).map(lambda values: np.array(values, np.int64))


@st.composite
def samples(draw: st.DrawFn) -> c.Samples:
    if draw(st.booleans()):
        return c.Samples(ids=tuple(draw(st.lists(TEXT, max_size=4))))
    pairs = draw(st.lists(st.tuples(INT64, INT64), max_size=4))
    rows, generations = zip(*pairs, strict=True) if pairs else ((), ())
    return c.Samples(rows=np.array(rows, np.int64), generations=np.array(generations, np.int64))


@st.composite
def tag_columns(draw: st.DrawFn) -> c.TagColumn:
    kind = draw(st.sampled_from([SCALAR, TEXT, st.booleans(), INT64, st.floats(allow_nan=False)]))
    values: list[Any] = draw(st.lists(kind, max_size=4))
    positions = draw(st.none() | st.lists(INT64, min_size=len(values), max_size=len(values)))
    return c.TagColumn(
        name=draw(TEXT),
        values=tuple(values),
        positions=None if positions is None else np.array(positions, np.int64),
    )


PREDICATES = st.builds(c.Predicate, tag=TEXT, op=TEXT, value=SCALAR | st.lists(SCALAR, max_size=3).map(tuple))


def of_hint(hint: Any) -> st.SearchStrategy[Any]:
    """Values of one annotation."""
    by_hand: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXT,
        int: INT64,
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        bytes: st.binary(max_size=5),
        FieldSpec: SPECS,
        Scalar: SCALAR,
        c.Samples: samples(),
        c.TagColumn: tag_columns(),
        c.Predicate: PREDICATES,
        c.Int64s: int64s(),
        c.Int32s: st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=5).map(lambda v: np.array(v, np.int32)),
        c.UInt32s: st.lists(st.integers(0, (1 << 32) - 1), max_size=5).map(lambda v: np.array(v, np.uint32)),
    }
    if hint in by_hand:
        return by_hand[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:
        (inner,) = (arg for arg in args if arg is not type(None))
        return st.none() | of_hint(inner)
    if origin is tuple:
        return st.lists(of_hint(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, of_hint(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    return of_type(hint)


def of_type(value_type: type[c.Value]) -> st.SearchStrategy[Any]:
    """Values of one type of command, report, output or result; an output's error is left out."""
    hints = typing.get_type_hints(value_type)
    fields = ((name, hints[name]) for name in value_type.__struct_fields__)
    parts = {name: of_hint(hint) for name, hint in fields if "Error" not in str(hint)}
    return st.builds(value_type, **parts | (OFFERED if value_type is c.AddUnit else {}))


def plain(value: Any, *, by_name: bool = False) -> Any:
    """What `value` holds as things that compare with ==, types told apart. by_name: mappings in the
    order of names, and not in their own."""
    again = functools.partial(plain, by_name=by_name)
    if isinstance(value, msgspec.Struct):
        parts = {name: again(getattr(value, name)) for name in value.__struct_fields__}
        return type(value).__name__, tuple(parts.items())
    if isinstance(value, np.ndarray):
        return str(value.dtype), tuple(value.tolist())
    if isinstance(value, tuple):
        return tuple(map(again, value))
    if isinstance(value, dict):
        entries = sorted(value.items()) if by_name else value.items()
        return tuple((key, again(item)) for key, item in entries)
    return type(value).__name__, value


def grpc_request(item: c.Input) -> Any:
    """The message of a request that a client in another language sends."""
    name, *content = msgspec.msgpack.decode(messages.encode(item))
    fields = dict(zip(item.__struct_fields__, content, strict=True))
    if isinstance(item, c.Call):
        command = fields.pop("command")
        name = command.pop("type")
        fields = {"header": fields, **command}
    return codec.filled(getattr(pb, f"{name}Request"), fields)


def from_message(kind: type[Any], wire: Any) -> Any:
    """The result or output that a client or storage unit reads."""
    return messages.decode_with(messages.decoder(kind), msgspec.msgpack.encode(codec.content_of(wire)))
