"""What one worker reads of another: msgpack of known types, and errors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.errors import ERROR_TYPES, DataPlaneError, InternalError
from dataplane.errors.base import rebuild


def reader(kind: Any) -> Callable[[Any], Any]:
    """Reads msgpack of `kind`, and raises msgspec.DecodeError for anything else."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(data: Any) -> Any:
        try:
            return decode(data)
        except (ValueError, RecursionError) as error:
            # Texts that are no UTF-8, and what is nested too deep for Python: msgspec lets these through as they are.
            raise msgspec.DecodeError(str(error)) from error

    return read


def error_of(kinds: object, name: str, facts: dict[str, Any]) -> DataPlaneError:
    """The error of that name with these facts; its class is in the module `kinds`, or one of the data plane's. An
    `InternalError` that shows both where there is no such class, or it does not take the facts."""
    kind = getattr(kinds, name, ERROR_TYPES.get(name))
    try:
        if isinstance(kind, type) and issubclass(kind, DataPlaneError):
            return rebuild(kind, facts)
        why = "no error of this version"
    except Exception as failed:
        why = repr(failed)
    return InternalError(what=f"another worker told {name[:80]!r}, of {str(facts)[:200]} ({why})")
