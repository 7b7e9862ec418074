"""Encoding of messages between processes of a job: msgpack of known types, and errors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from dataplane.errors import ERROR_TYPES, DataPlaneError, InternalError, rebuild
from workers import errors

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""Encode any message."""


def decoder(kind: Any) -> Callable[[Any], Any]:
    """Return a decoder for messages of `kind`. It raises msgspec.DecodeError for other data."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_or_raise(data: Any) -> Any:
        try:
            return decode(data)
        except (ValueError, RecursionError) as error:
            # msgspec raises other types for text that is not UTF-8 and for data nested too deeply for Python.
            raise msgspec.DecodeError(str(error)) from error

    return decode_or_raise


class CarriesError(Protocol):
    """A message that carries an error: the class name of an error of this package or the data plane, and its keyword
    arguments."""

    @property
    def error(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]: ...


def carried(error: DataPlaneError) -> dict[str, Any]:
    """Return the fields of a message that carries `error`."""
    return {"error": type(error).__name__, "facts": error.facts}


def error_of(message: CarriesError) -> DataPlaneError:
    """Return the error that a message carries. If there is no such class, or it does not accept the facts, return an
    `InternalError` that shows name and facts."""
    name = message.error
    facts = message.facts
    kind = getattr(errors, name, ERROR_TYPES.get(name))  # `name` may be any text, so `kind` may be any object
    try:
        if isinstance(kind, type) and issubclass(kind, DataPlaneError):
            return rebuild(kind, facts)
        why = "this version does not have this error class"
    except Exception as failed:
        why = repr(failed)
    return InternalError(
        what=f"a peer sent error {name[:80]!r} with facts {str(facts)[:200]}, which cannot be rebuilt: {why}"
    )
