"""How callers name samples and their tags, as ledger values and back."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.client.operations.steps import Operation, Send
from dataplane.core.schema import INPUT_LENGTHS
from dataplane.core.types import Scalar
from dataplane.data.meta import KVBatchMeta
from dataplane.errors import InvalidRequestError, StaleSampleError, UnsupportedValueError, first_few
from dataplane.ledger import commands as c

Names = Sequence[str] | KVBatchMeta


def ids_of(names: Names) -> list[str]:
    """The sample ids that `names` names, checked: a list of distinct, non-empty strings.

    Raises: `UnsupportedValueError` (a TypeError) for anything but strings, `InvalidRequestError` (a ValueError) for
    duplicates, naming them.
    """
    if isinstance(names, KVBatchMeta):
        return list(names.sample_ids)
    if isinstance(names, str | bytes) or not isinstance(names, Sequence):
        raise UnsupportedValueError(
            field="sample_ids", row=None, got=type(names).__name__, hint="Pass a list of strings or a KVBatchMeta."
        )
    ids = list(names)
    if set(map(type, ids)) - {str}:
        for row, name in enumerate(ids):
            if not isinstance(name, str):
                raise UnsupportedValueError(
                    field="sample_ids", row=row, got=type(name).__name__, hint="Sample ids are strings."
                )
    if len(set(ids)) != len(ids):
        twice = [name for name, count in Counter(ids).items() if count > 1]
        raise InvalidRequestError(f"sample ids must be distinct; {first_few(twice)} came more than once in one call")
    return ids


def samples_of(names: Names, ids: Sequence[str] | None = None) -> c.Samples:
    """`names` for the ledger: by row handles where a meta carries them, else by ids (`ids`: what `ids_of` gave)."""
    if isinstance(names, KVBatchMeta) and names.handles is not None:
        rows, generations = names.handles
        return c.Samples(rows=rows, generations=generations)
    return c.Samples(ids=tuple(ids_of(names) if ids is None else ids))


def scalar(tag: str, row: int, value: Any) -> Scalar:
    """`value` as a tag: str, bool, int, float or None; numpy and torch scalars become the Python scalar they equal."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        plain = item()
        if isinstance(plain, bool | int | float | str):
            return plain
    if isinstance(value, numbers.Real):
        return float(value)
    raise UnsupportedValueError(
        field=f"tag {tag}",
        row=row,
        got=type(value).__name__,
        hint="Tags are small scalars (str, bool, int, float, None); put anything larger as a field.",
    )


_PLAIN = frozenset({bool, int, float, type(None)})


def tag_columns(
    tags: Sequence[Mapping[str, Any]] | None, count: int, convert: Callable[[str, int, Any], Scalar] = scalar
) -> tuple[c.TagColumn, ...]:
    """One mapping per sample, as columns. Raises `InvalidRequestError` when their number is not `count`.

    convert: returns the tag to store for a value that is not a bool, int, float or None; it gets the tag's name, the
    sample's position and the value.
    """
    if tags is None:
        return ()
    if isinstance(tags, Mapping) or not isinstance(tags, Sequence):
        raise UnsupportedValueError(
            field="tags", row=None, got=type(tags).__name__, hint="Pass one mapping of tags per sample, in a list."
        )
    if len(tags) != count:
        raise InvalidRequestError(f"tags: got {len(tags)} mappings for {count} samples; pass one per sample")
    found: dict[str, tuple[list[Scalar], list[int]]] = {}
    for row, mapping in enumerate(tags):
        if not isinstance(mapping, Mapping) or set(map(type, mapping)) - {str}:
            got = "other names than strings" if isinstance(mapping, Mapping) else type(mapping).__name__
            hint = "Pass a mapping of tag names to values for each sample."
            raise UnsupportedValueError(field="tags", row=row, got=got, hint=hint)
        for name, value in mapping.items():
            column = found.get(name)
            if column is None:
                column = found[name] = [], []
            column[0].append(value if type(value) in _PLAIN else convert(name, row, value))
            column[1].append(row)
    return tuple(
        c.TagColumn(
            name=name,
            values=tuple(values),
            positions=None if len(values) == count else np.array(positions, dtype=np.int64),
        )
        for name, (values, positions) in found.items()
    )


def tags_of(columns: Sequence[c.TagColumn], count: int) -> list[dict[str, Scalar]]:
    """Columns as one dict per sample; a sample without a tag lacks the key."""
    tags: list[dict[str, Scalar]] = [{} for _ in range(count)]
    for column in columns:
        name = column.name
        mine = tags if column.positions is None else [tags[row] for row in column.positions.tolist()]
        for tag, value in zip(mine, column.values, strict=True):
            tag[name] = value
    return tags


def meta_of(
    listed: c.Claimed | c.Listed, partition: str, *, task: str | None = None, fields: Sequence[str] | None = None
) -> KVBatchMeta:
    """The meta of samples that the service named, with tags, handles and the tag `input_lengths` as sequence
    lengths."""
    tags = tags_of(listed.tags, len(listed.ids))
    lengths = [tag.get(INPUT_LENGTHS) for tag in tags]
    known = [int(length) for length in lengths if length is not None]
    meta = KVBatchMeta(
        partition_id=partition,
        task_name=task,
        sample_ids=list(listed.ids),
        fields=list(fields) if fields else list(listed.fields) or None,
        sequence_lengths=known if len(known) == len(lengths) and known else None,
        tags=tags,
    )
    meta = meta.with_handles(listed.rows, listed.generations)
    if not isinstance(listed, c.Claimed) or not listed.claim:
        return meta
    return meta.with_claims(np.full(meta.size, listed.claim, np.int64))


def name_tuple(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """A list of names, which one string is not."""
    if isinstance(names, str):
        raise InvalidRequestError(f"{what}={names!r}: pass a list of names, not one string")
    return tuple(names)


def naming(ids: Sequence[str], command: c.Command, meanwhile: Callable[[], Any] | None = None) -> Operation[Any]:
    """Send; an error about row handles is raised with the ids the caller knows them by."""
    try:
        return (yield Send(command, meanwhile))
    except StaleSampleError as error:
        raise error.with_ids(ids) from None
