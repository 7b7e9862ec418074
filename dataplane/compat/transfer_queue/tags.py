"""Tags of any type. The service stores scalars; lists, mappings and other values are encoded as strings."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from dataplane.client.operations import sample_names
from dataplane.data.object_codec import decode_object, encode_object
from dataplane.errors import InternalError, UnsupportedValueError
from dataplane.ledger import commands as c

ENCODED = "\x1fobject:"
"""Prefix of a tag that is an encoded value in base64."""


def tag_columns(tags: Sequence[Mapping[str, Any] | None] | None, count: int) -> tuple[c.TagColumn, ...]:
    """Encode the tags of `count` samples for the service. None instead of a mapping means no tags.
    `UnsupportedValueError` for values that an object column cannot store."""
    return sample_names.tag_columns(None if tags is None else [mapping or {} for mapping in tags], count, _to_scalar)


def _to_scalar(name: str, row: int, value: Any) -> Any:
    """Convert a tag value to a scalar, or encode it as a string with the prefix `ENCODED`. `sample_names.tag_columns`
    stores values of type bool, int, float and None itself."""
    # A text that begins with the prefix is encoded, too, so that it is not decoded as something else.
    if type(value) is str and not value.startswith(ENCODED):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        return sample_names.scalar(name, row, value.item())  # a NumPy or torch scalar
    try:
        encoded = encode_object(value, field=f"tag {name}")
    except UnsupportedValueError as error:
        hint = "Tags are scalars, and lists and dicts of scalars; put other values as a field."
        raise UnsupportedValueError(**{**error.facts, "row": row, "hint": hint}) from None
    return ENCODED + base64.b64encode(encoded).decode("ascii")


def tags_of(columns: Sequence[c.TagColumn], count: int) -> list[dict[str, Any]]:
    """Return one dict per sample, with decoded values."""
    tags: list[dict[str, Any]] = sample_names.tags_of(columns, count)
    for column in columns:
        if any(map(_is_encoded, set(column.values))):  # most columns have no encoded value
            for sample_tags in tags:
                value = sample_tags.get(column.name)
                if _is_encoded(value):
                    sample_tags[column.name] = _decode(value)
    return tags


def _decode(text: str) -> Any:
    """Decode a value. Return text that is not an encoded value unchanged, because a native client can put any text."""
    try:
        return decode_object(base64.b64decode(text.removeprefix(ENCODED), validate=True))
    except (ValueError, InternalError, UnsupportedValueError):
        return text


def _is_encoded(value: Any) -> TypeGuard[str]:
    return type(value) is str and value.startswith(ENCODED)
