"""Field specs that a caller declares for a partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dataplane.core.types import FieldSpec, field_spec
from dataplane.errors import InvalidRequestError, UnsupportedValueError


def declared_specs(fields: Iterable[str] | Mapping[str, Any] | None) -> dict[str, FieldSpec]:
    """Parse the `fields` of `register_partition`: names, or name -> FieldSpec (or a mapping of its parts, or None).

    The first put settles the parts that a spec leaves open (see `encode_fields`). Raises ValueError for names that
    repeat, are empty or are not str, and for invalid specs; TypeError if `fields` is not iterable.
    """
    if isinstance(fields, str):
        raise InvalidRequestError(f"fields={fields!r}: pass a list of names, not one string")
    if fields is not None and not isinstance(fields, Iterable):
        hint = "Pass a list of names, or a mapping of names to FieldSpecs."
        raise UnsupportedValueError(field="argument fields", row=None, got=repr(fields), hint=hint)
    pairs = list(fields.items()) if isinstance(fields, Mapping) else [(name, None) for name in fields or ()]
    specs: dict[str, FieldSpec] = {}
    for name, given in pairs:
        if type(name) is not str or not name:
            raise InvalidRequestError(f"field names must be non-empty strings, got {name!r}")
        if name in specs:
            raise InvalidRequestError(f"field {name!r} is declared twice; name each field once")
        specs[name] = _parse_spec(name, given)
    return specs


def _parse_spec(name: str, given: Any) -> FieldSpec:
    try:
        return field_spec(given)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"field {name!r}: {error}") from error
