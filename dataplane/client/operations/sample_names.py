"""Convert the caller's sample names and tags to ledger values and back."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

import numpy as np

from dataplane.client.operations.steps import Operation, Send
from dataplane.core.schema import INPUT_LENGTHS
from dataplane.core.types import INT64_MAX, INT64_MIN, Scalar
from dataplane.data.meta import KVBatchMeta, list_of_names, name_of
from dataplane.errors import InvalidRequestError, StaleSampleError, UnsupportedValueError, first_few
from dataplane.ledger import commands as c

Names = Sequence[str] | KVBatchMeta


def ids_of(names: Names) -> list[str]:
    """Return the sample ids of `names`. If that is not a meta, check that it is a list of distinct strings.

    Raise `UnsupportedValueError` (a TypeError) for values that are not strings, `InvalidRequestError` (a
    ValueError) naming the duplicates.
    """
    if isinstance(names, KVBatchMeta):
        return list(names.sample_ids)
    if isinstance(names, str | bytes) or not isinstance(names, Sequence):
        raise UnsupportedValueError(
            field="argument sample_ids",
            row=None,
            got=type(names).__name__,
            hint="Pass a list of strings or a KVBatchMeta.",
        )
    ids = list_of_names("sample_ids", names)
    if len(set(ids)) != len(ids):
        duplicates = [name for name, count in Counter(ids).items() if count > 1]
        raise InvalidRequestError(f"sample ids must be distinct, but {first_few(duplicates)} occur more than once")
    return ids


def samples_of(names: Names, partition: str, ids: Sequence[str] | None = None) -> c.Samples:
    """Convert `names` for the ledger: row handles if a meta has them, else ids (`ids`: the result
    of `ids_of`).

    Raise `UnsupportedValueError` (a TypeError) unless `partition` is a string, and
    `InvalidRequestError` (a ValueError) for a meta of another partition."""
    name_of("partition_id", partition)
    if isinstance(names, KVBatchMeta):
        if names.partition_id != partition:
            raise InvalidRequestError(
                f"the meta has samples of partition {names.partition_id!r}, and the call names "
                f"partition {partition!r}: pass the meta's partition, or ids of samples"
            )
        if names.handles is not None:
            rows, generations = names.handles
            return c.Samples(rows=rows, generations=generations)
    return c.Samples(ids=tuple(ids_of(names) if ids is None else ids))


def scalar(tag: str, row: int, value: Any) -> Scalar:
    """Convert `value` to a tag: str, bool, int, float or None. Numpy and torch scalars become the equal Python
    scalar, other real numbers a float. Raise `UnsupportedValueError`, naming `tag` and `row`, for other values."""
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
        hint="Tags are small scalars (str, bool, int of at most 64 bits, float, None); put anything larger as a field.",
    )


_PLAIN = frozenset({bool, int, float, type(None)})
"""Types of tags that `tag_columns` stores without conversion."""
_USUAL = _PLAIN | {str}


def tag_columns(
    tags: Sequence[Mapping[str, Any]] | None, count: int, convert: Callable[[str, int, Any], Scalar] = scalar
) -> tuple[c.TagColumn, ...]:
    """Convert one mapping per sample to columns. Raise `InvalidRequestError` if the number of mappings is not
    `count`, `UnsupportedValueError` for other types.

    convert: returns the stored tag for a value that is not a bool, int, float or None; its arguments are the tag's
    name, the sample's position and the value.
    """
    if tags is None:
        return ()
    if isinstance(tags, Mapping) or not isinstance(tags, Sequence):
        raise UnsupportedValueError(
            field="argument tags",
            row=None,
            got=type(tags).__name__,
            hint="Pass one mapping of tags per sample, in a list.",
        )
    if len(tags) != count:
        raise InvalidRequestError(f"tags: got {len(tags)} mappings for {count} samples; pass one per sample")
    usual = _usual_columns(tags, convert)
    if usual is not None:
        return usual
    # Tag name -> its values, and the positions of the samples that have them.
    columns: dict[str, tuple[list[Scalar], list[int]]] = {}
    for row, mapping in enumerate(tags):
        if not isinstance(mapping, Mapping) or set(map(type, mapping)) - {str}:
            got = "a mapping with non-string names" if isinstance(mapping, Mapping) else type(mapping).__name__
            hint = "Pass a mapping of tag names to values for each sample."
            raise UnsupportedValueError(field="argument tags", row=row, got=got, hint=hint)
        for name, value in mapping.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = [], []
            stored = value if type(value) in _PLAIN else convert(name, row, value)
            if type(stored) is int and not INT64_MIN <= stored <= INT64_MAX:
                hint = "Store the integer as text."
                raise UnsupportedValueError(field=f"tag {name}", row=row, got=f"{stored} (over 64 bits)", hint=hint)
            column[0].append(stored)
            column[1].append(row)
    return tuple(
        [
            c.TagColumn(
                name=name,
                values=tuple(values),
                positions=None if len(values) == count else np.array(positions, dtype=np.int64),  # None: all samples
            )
            for name, (values, positions) in columns.items()
        ]
    )


def _usual_columns(
    tags: Sequence[Mapping[str, Any]], convert: Callable[[str, int, Any], Scalar]
) -> tuple[c.TagColumn, ...] | None:
    """Return the columns, whole ones at a time, if all samples have the same tags and `convert`
    changes no value; otherwise None."""
    if set(map(type, tags)) != {dict} or set(map(type, chain.from_iterable(tags))) - {str}:
        return None
    if len(set(map(len, tags))) > 1:
        return None
    columns = []
    for name in tags[0]:
        try:
            values = tuple([mapping[name] for mapping in tags])
        except KeyError:
            return None
        types = set(map(type, values))
        if not types <= _USUAL:
            return None
        if int in types:
            numbers = values if len(types) == 1 else [value for value in values if type(value) is int]
            if min(numbers) < INT64_MIN or max(numbers) > INT64_MAX:
                return None
        if str in types:
            texts = set(values) if len(types) == 1 else {text for text in values if type(text) is str}
            if any(convert(name, 0, text) is not text for text in texts):
                return None
        columns.append(c.TagColumn(name=name, values=values))
    return tuple(columns)


def tags_of(columns: Sequence[c.TagColumn], count: int) -> list[dict[str, Scalar]]:
    """Convert columns to one dict per sample; a sample without a tag lacks the key."""
    # A copy of a dict is faster than its entries one by one. Tags that not all samples have, and
    # those after them, are added later, because each dict has the order of the columns.
    whole = takewhile(lambda column: column.positions is None and len(column.values), columns)
    first = {column.name: column.values[0] for column in whole}
    tags = [first.copy() for _ in range(count)]
    for column in columns:
        name = column.name
        if column.index is not None and len(column.values) == 1 and name in first:
            continue  # all samples have this value
        tagged = tags if column.positions is None else [tags[row] for row in column.positions.tolist()]
        for sample_tags, value in zip(tagged, column.each, strict=True):
            sample_tags[name] = value
    return tags


def meta_of(
    listed: c.Claimed | c.Listed, partition: str, *, task: str | None = None, fields: Sequence[str] | None = None
) -> KVBatchMeta:
    """Return the meta of samples that the service listed or claimed, with tags, handles and, if all samples have the
    tag `input_lengths`, sequence lengths. fields: the fields of the meta (none: those that the service listed)."""
    count = len(listed.ids)
    lengths: list[Any] | None = None
    for tag in listed.tags:
        if tag.name == INPUT_LENGTHS and tag.positions is None and count and None not in tag.values:
            lengths = [int(value) for value in tag.each if value is not None]
    is_claim = isinstance(listed, c.Claimed) and listed.claim  # claim id 0: a peek claims nothing
    return KVBatchMeta.of_service(
        partition,
        list(listed.ids),
        list(fields) if fields else list(listed.fields) or None,
        rows=listed.rows,
        generations=listed.generations,
        task=task,
        claims=np.full(count, listed.claim, np.int64) if is_claim else None,  # type: ignore[union-attr]
        sequence_lengths=lengths,
        tags=tags_of(listed.tags, count),
    )


def send_for_samples(ids: Sequence[str], command: c.Command) -> Operation[Any]:
    """Send a command and return the `Sent` with its result. An error about row handles is raised with the caller's ids
    of these rows."""
    try:
        return (yield Send(command))
    except StaleSampleError as error:
        raise error.with_ids(ids) from None
