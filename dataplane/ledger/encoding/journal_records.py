"""Encoding of the ledger's inputs as journal records: msgpack of plain values by name, without pickle.

A record is [name of the input, its values], or for a `Call` [name of the command, session, number, watermark,
confirmed, values of the command]. Arrays are encoded as the bytes of their little-endian elements. An input with an
integer beyond 64 bits (in a tag) is encoded as an image. A later version can read the records of an earlier version if
all fields added since have defaults.
"""

from __future__ import annotations

import sys
from typing import Any, get_args

import msgspec
import numpy as np

from dataplane.ledger.commands import Answered, Call, Input
from dataplane.ledger.encoding.image import dump, load

assert sys.byteorder == "little", "records contain little-endian arrays, and this machine is big-endian"


class RecordError(ValueError):
    """The bytes are not a record that this version can read."""


def encode(item: Input) -> bytes:
    """Encode an input as a record."""
    try:
        # A call is a record of six parts, so that a decoder can choose the type of the command by its name.
        if type(item) is Call:
            command = item.command
            return _encode([type(command).__name__, item.session, item.number, item.watermark, item.confirmed, command])
        return _encode([type(item).__name__, item])
    except OverflowError:  # an integer beyond 64 bits
        return _encode([_AS_IMAGE, dump([item])])


def decode(record: bytes | memoryview) -> Input:
    """Decode a record written by `encode`. Arrays of the input are read-only. Raises `RecordError` for other bytes."""
    try:
        parts = _split.decode(record)  # still encoded
        name = _text.decode(parts[0])
        value: Any
        if name == _AS_IMAGE:
            value = load(_content.decode(parts[1]))[0]
        else:
            value = _decoders[name].decode(parts[-1])
        if len(parts) == 2 and isinstance(value, Input):  # an input other than a call, or any input as an image
            return value
        # A call: `value` is its command. The four parts in between are decoded together, as one array.
        session, number, watermark, confirmed = _place.decode(_FOUR + b"".join(map(bytes, parts[1:-1])))
        return Call(session=session, number=number, watermark=watermark, confirmed=confirmed, command=value)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise RecordError(f"not a record of an input: {error!r}") from error


def _plain(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"a record cannot contain a {type(value).__name__}")


def _array(kind: Any, content: bytes) -> Any:
    (dtype,) = get_args(get_args(kind)[1])
    return np.frombuffer(content, dtype)


_AS_IMAGE = ""
"""The name of a record whose input is encoded as an image; no input has this name."""
_FOUR = b"\x94"
"""The msgpack header of an array of four."""
_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
# Decoders of a record into its encoded parts, and of these parts: an image; a name; the (session, number, watermark,
# confirmed) of a call; an input or command, by name.
_split = msgspec.msgpack.Decoder(list[msgspec.Raw])
_content = msgspec.msgpack.Decoder(bytes)
_text = msgspec.msgpack.Decoder(str)
_place = msgspec.msgpack.Decoder(tuple[int, int, int, tuple[int, ...]])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_array)
    for kind in (*Input.__subclasses__(), *Answered.__subclasses__())
    if kind is not Call
}
