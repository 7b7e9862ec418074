"""Encodes the keys of a channel's queues as bytes, equal for equal keys."""

from __future__ import annotations

import io
import pickle
from typing import Any

import msgspec

MOST_BYTES = 1 << 20

_encode = msgspec.msgpack.Encoder().encode


def key_bytes(key: Any) -> bytes:
    """Encode a key. Strings, numbers, bytes, None and tuples of these have the same bytes in every process; as in a
    dict, True equals 1 and 1.0 equals 1. Other hashable keys are equal if their pickles are, such as members of an
    enum. TypeError for a key that is not hashable or differs from its copy in another process, ValueError above
    `MOST_BYTES`."""
    # The first byte says how the key is encoded, so that keys of both encodings differ.
    try:
        raw = b"m" + _encode(_msgpack_form(key))
    except TypeError:
        raw = b"p" + _pickle_key(key)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"key of {len(raw):,} bytes is too long: a channel's key has at most {MOST_BYTES:,}")
    return raw


def _pickle_key(key: Any) -> bytes:
    """Pickle a key. TypeError if that fails, or if the key does not equal its copy."""
    target = io.BytesIO()
    pickler = pickle.Pickler(target, protocol=5)
    # No memoization: equal keys have equal bytes, even if parts of one of them are the same object.
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


def _msgpack_form(key: Any) -> Any:
    """Return a value to encode for a key of None, strings, bytes, numbers and tuples of these: keys that are equal in a
    dict get equal values. TypeError for other keys."""
    # `type` excludes subclasses, which may define another equality.
    match key:
        case None | str() | bytes() if type(key) in (type(None), str, bytes):
            return key
        case bool() | int() if -(2**63) <= key < 2**63 and type(key) in (bool, int):
            return int(key)
        case float() if type(key) is float:
            return int(key) if key.is_integer() and abs(key) < 2**63 else key
        case tuple() if type(key) is tuple:
            return [_msgpack_form(each) for each in key]
    raise TypeError(f"{type(key).__name__} is not a plain key")
