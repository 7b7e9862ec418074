"""Encodes the keys of a channel's queues as bytes, equal for equal keys."""

from __future__ import annotations

import io
import pickle
from typing import Any

import msgspec

MOST_BYTES = 1 << 20

_pack = msgspec.msgpack.Encoder().encode


def key_bytes(key: Any) -> bytes:
    """Encode a key. Strings, numbers, bytes, None and tuples of these have the same bytes in every process; as in a
    dict, True equals 1 and 1.0 equals 1. Other hashable keys are equal if their pickles are, such as members of an
    enum. TypeError for a key that is not hashable or differs from its copy in another process, ValueError above
    `MOST_BYTES`."""
    try:
        raw = b"m" + _pack(_plain(key))
    except TypeError:
        raw = b"p" + _pickled(key)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"key of {len(raw):,} bytes is too long: a channel's key has at most {MOST_BYTES:,}")
    return raw


def _pickled(key: Any) -> bytes:
    """Pickle a key without memoization: keys are compared by value, even if parts of them are the same object."""
    target = io.BytesIO()
    pickler = pickle.Pickler(target, protocol=5)
    pickler.fast = True
    why = "it is not equal to its copy in another process"
    try:
        pickler.dump(key)
        copy = pickle.loads(target.getvalue())  # noqa: S301 (bytes made by this function)
        if hash(copy) == hash(key) and copy == key:
            return target.getvalue()
    except Exception as error:
        why = str(error)
    raise TypeError(
        f"key of type {type(key).__name__} is not supported: {why}. Use strings, numbers, bytes, None, tuples of "
        "these, or other hashable values that equal their copies, such as members of an enum"
    )


def _plain(key: Any) -> Any:
    """Return the msgpack form of a key of plain values, with types marked that msgpack would not distinguish.
    TypeError for other keys."""
    match key:
        case None | str() | bytes() if type(key) in (type(None), str, bytes):
            return key
        case bool() | int() if -(2**63) <= key < 2**63 and type(key) in (bool, int):
            return int(key)
        case float() if type(key) is float:
            return int(key) if key.is_integer() and abs(key) < 2**63 else key
        case tuple() if type(key) is tuple:
            return [_plain(each) for each in key]
    raise TypeError(f"{type(key).__name__} is not a plain key")
