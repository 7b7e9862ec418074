"""What processes of a job write and read of each other: msgpack of known types, and errors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from dataplane.errors import ERROR_TYPES, DataPlaneError, InternalError
from dataplane.errors.base import rebuild
from workers import errors

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""Writes any message."""


def decoder(kind: Any) -> Callable[[Any], Any]:
    """Reads messages of `kind`, and raises msgspec.DecodeError for anything else."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(data: Any) -> Any:
        try:
            return decode(data)
        except (ValueError, RecursionError) as error:
            # Texts that are no UTF-8, and what is nested too deep for Python: msgspec lets these through as they are.
            raise msgspec.DecodeError(str(error)) from error

    return read


class CarriesError(Protocol):
    """A message that carries an error: the name of one of this package's, or the data plane's, and its keywords."""

    @property
    def error(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]: ...


def carried(error: DataPlaneError) -> dict[str, Any]:
    """The fields of a message that carries `error`."""
    return {"error": type(error).__name__, "facts": error.facts}


def error_of(message: CarriesError) -> DataPlaneError:
    """The error that a message carries. An `InternalError` that shows its name and facts where there is no such class,
    or it does not take the facts."""
    name, facts = message.error, message.facts
    kind = getattr(errors, name, ERROR_TYPES.get(name))
    try:
        if isinstance(kind, type) and issubclass(kind, DataPlaneError):
            return rebuild(kind, facts)
        why = "no error of this version"
    except Exception as failed:
        why = repr(failed)
    return InternalError(what=f"another worker told {name[:80]!r}, of {str(facts)[:200]} ({why})")
