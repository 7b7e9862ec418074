"""Keys of a channel's queues as bytes that are equal where the keys are."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

_pack = msgspec.msgpack.Encoder().encode


def key_bytes(key: Any) -> bytes:
    """Of strings, numbers, bytes, None and tuples of these the same in every process; True is 1 and 1.0 is 1, as in a
    dict. Other hashable keys are equal if they pickle alike. TypeError for a key that is not hashable."""
    hash(key)
    try:
        return b"m" + _pack(_plain(key))
    except TypeError:
        return b"p" + pickle.dumps(key, protocol=5)


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
