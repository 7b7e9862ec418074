"""Tags of any kind: the service keeps scalars; lists, mappings and other values travel as strings of their bytes."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from dataplane import samples
from dataplane.ledger import commands as c
from dataplane.objects import decode_object, encode_object

ENCODED = "\x1fobject:"
"""A tag that begins so is a value's bytes, in base 64."""

_PLAIN = frozenset({bool, int, float, type(None)})


def stored_tags(tags: Sequence[Mapping[str, Any] | None] | None) -> list[dict[str, Any]] | None:
    """The tags as the service keeps them; None in place of a mapping is an empty one. `UnsupportedValueError` for
    values that no object column carries."""
    if tags is None:
        return None
    return [{name: _stored(name, value) for name, value in (mine or {}).items()} for mine in tags]


def _stored(name: str, value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is str and not value.startswith(ENCODED)):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        return value.item()  # a scalar of numpy's or torch's
    return ENCODED + base64.b64encode(encode_object(value, field=f"tag {name}")).decode("ascii")


def tag_columns(tags: Sequence[Mapping[str, Any] | None] | None, count: int) -> tuple[c.TagColumn, ...]:
    """The tags of `count` samples as a command carries them."""
    return samples.tag_columns(stored_tags(tags), count)


def tags_of(columns: Sequence[c.TagColumn], count: int) -> list[dict[str, Any]]:
    """One dict per sample, with the values that were put."""
    tags: list[dict[str, Any]] = samples.tags_of(columns, count)
    for column in columns:
        if any(map(_is_encoded, set(column.values))):
            for mine in tags:
                value = mine.get(column.name)
                if _is_encoded(value):
                    mine[column.name] = decode_object(base64.b64decode(value.removeprefix(ENCODED)))
    return tags


def _is_encoded(value: Any) -> TypeGuard[str]:
    return type(value) is str and value.startswith(ENCODED)
