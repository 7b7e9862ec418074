"""Keys of a channel's queues as bytes that are equal where the keys are."""

from __future__ import annotations

import io
import pickle
from typing import Any

import msgspec

MOST_BYTES = 1 << 20

_pack = msgspec.msgpack.Encoder().encode


def key_bytes(key: Any) -> bytes:
    """Of strings, numbers, bytes, None and tuples of these the same in every process; True is 1 and 1.0 is 1, as in a
    dict. Other hashable keys are equal if they pickle alike, such as members of an enum. TypeError for a key that is
    not hashable, or not equal to its copy in another process, ValueError for one of more than `MOST_BYTES`."""
    try:
        raw = b"m" + _pack(_plain(key))
    except TypeError:
        raw = b"p" + _pickled(key)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"a key of {len(raw):,} bytes; a channel's key has at most {MOST_BYTES:,}")
    return raw


def _pickled(key: Any) -> bytes:
    """Whatever parts of it are one object: keys are compared by value."""
    target = io.BytesIO()
    pickler = pickle.Pickler(target, protocol=5)
    pickler.fast = True
    why = "it is not equal to its copy in another process"
    try:
        pickler.dump(key)
        copy = pickle.loads(target.getvalue())  # noqa: S301 (bytes of this function's own making)
        if hash(copy) == hash(key) and copy == key:
            return target.getvalue()
    except Exception as error:
        why = str(error)
    raise TypeError(
        f"a key of type {type(key).__name__} is refused: {why}. Keys of a channel are strings, numbers, bytes, None, "
        "tuples of these, and other hashable values that are equal to their copies, such as members of an enum"
    )


def _plain(key: Any) -> Any:
    """The key of plain values only, types marked where msgpack would make two of them alike."""
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
