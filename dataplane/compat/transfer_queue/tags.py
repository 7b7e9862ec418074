"""Tags of any kind: the service keeps scalars; lists, mappings and other values travel as strings of their bytes."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from dataplane.client.operations import sample_names
from dataplane.data.object_codec import decode_object, encode_object
from dataplane.errors import InternalError, UnsupportedValueError
from dataplane.ledger import commands as c

ENCODED = "\x1fobject:"
"""A tag that begins so is a value's bytes, in base 64."""


def tag_columns(tags: Sequence[Mapping[str, Any] | None] | None, count: int) -> tuple[c.TagColumn, ...]:
    """The tags of `count` samples as the service keeps them; None in place of a mapping is an empty one.
    `UnsupportedValueError` for values that no object column carries."""
    return sample_names.tag_columns(None if tags is None else [mine or {} for mine in tags], count, _stored)


def _stored(name: str, row: int, value: Any) -> Any:
    if type(value) is str and not value.startswith(ENCODED):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        return sample_names.scalar(name, row, value.item())  # a scalar of numpy's or torch's
    try:
        encoded = encode_object(value, field=f"tag {name}")
    except UnsupportedValueError as error:
        hint = "Tags are scalars, and lists and dicts of them; put anything else as a field."
        raise UnsupportedValueError(**{**error.facts, "row": row, "hint": hint}) from None
    return ENCODED + base64.b64encode(encoded).decode("ascii")


def tags_of(columns: Sequence[c.TagColumn], count: int) -> list[dict[str, Any]]:
    """One dict per sample, with the values that were put."""
    tags: list[dict[str, Any]] = sample_names.tags_of(columns, count)
    for column in columns:
        if any(map(_is_encoded, set(column.values))):
            for mine in tags:
                value = mine.get(column.name)
                if _is_encoded(value):
                    mine[column.name] = _decoded(value)
    return tags


def _decoded(text: str) -> Any:
    """The value; the text itself where it is a native client's own and says no value."""
    try:
        return decode_object(base64.b64decode(text.removeprefix(ENCODED), validate=True))
    except (ValueError, InternalError, UnsupportedValueError):
        return text


def _is_encoded(value: Any) -> TypeGuard[str]:
    return type(value) is str and value.startswith(ENCODED)
