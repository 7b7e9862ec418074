"""`KVBatchMeta`, which names samples by key and does not hold their data."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dataplane.compat.transfer_queue.defaults import warn_once


@dataclass
class KVBatchMeta:
    """The keys `[N]` and tags `[N]` (one mapping each) of samples of one partition.

    partition_id: None if unknown. fields: names of the fields that the meta refers to, None if unspecified. extra_info:
    metadata of the batch. ValueError for lists of different lengths and for duplicate names.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the lists, and copy tags and extra_info, so that the caller's stay independent."""
        if len(self.keys) != len(self.tags):
            raise ValueError(
                f"KVBatchMeta: keys and tags must have same length, one mapping per key; got {len(self.keys)} keys and "
                f"{len(self.tags)} tags"
            )
        for what, names in (("key", self.keys), ("field", self.fields or ())):
            if len(set(names)) != len(names):
                raise ValueError(
                    f"KVBatchMeta: Got duplicated {what}s; each must be unique, got {reprlib.repr(list(names))}"
                )
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _select(self, positions: Sequence[int]) -> KVBatchMeta:
        keys, tags = [self.keys[position] for position in positions], [self.tags[position] for position in positions]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """Return these keys, in this order. ValueError for duplicates, RuntimeError for a key that the meta lacks."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError(
                f"select_keys: Contain duplicate keys; each must be unique, got {reprlib.repr(list(keys_to_select))}"
            )
        positions = {key: position for position, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in positions]
        if unknown:
            raise RuntimeError(f"select_keys: {unknown[:5]} not found in current batch")
        return self._select([positions[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Reorder the samples in place. ValueError for duplicates and for another number of indexes
        than samples. Negative indexes count from the end; as in the original, -1 and N - 1 do not
        count as duplicates."""
        if len(indexes) != self.size:
            raise ValueError(f"reorder: {len(indexes)} indexes, which does not match the {self.size} samples")
        if len(set(indexes)) != len(indexes):
            raise ValueError(
                f"reorder: Contain duplicate indexes; each must be unique, got {reprlib.repr(list(indexes))}"
            )
        self.keys = [self.keys[position] for position in indexes]
        self.tags = [self.tags[position] for position in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split into `chunks` parts whose sizes differ by at most one, longer parts first. Parts
        can be empty. ZeroDivisionError for 0; no parts for a negative number."""
        return [self._select(part) for part in parts_of(self.size, chunks)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Join the samples of all metas, in order. Empty metas are ignored. ValueError if partitions, fields or entries
        of extra_info differ."""
        parts = [part for part in data or () if part]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts:
            if part.partition_id != first.partition_id:
                raise ValueError(
                    f"KVBatchMeta.concat: Partition do not match: {first.partition_id!r} and {part.partition_id!r}"
                )
            # After the first meta, one without fields matches any.
            if part.fields is not None and set(part.fields) != set(first.fields or ()):
                raise ValueError(f"KVBatchMeta.concat: Field names do not match: {first.fields} and {part.fields}")
        return cls(
            [key for part in parts for key in part.keys],
            [tag for part in parts for tag in part.tags],
            first.partition_id,
            first.fields,
            joined_info([part.extra_info or {} for part in parts], "KVBatchMeta.concat") or None,
        )


def joined_info(infos: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """Merge the entries of all mappings. ValueError if two values of a key differ. what: the caller, for the error."""
    joined: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in joined and not _same(joined[key], value):
                raise ValueError(
                    f"{what}: extra_info[{key!r}] has conflicting values, {reprlib.repr(joined[key])} and "
                    f"{reprlib.repr(value)}"
                )
            joined.setdefault(key, value)
    return joined


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, with the same type; arrays and tensors by shape and elements."""
    if type(one) is not type(other):
        return False
    if hasattr(one, "tolist"):
        return bool(one.shape == other.shape and one.tolist() == other.tolist())
    return bool(one == other)


def parts_of(size: int, chunks: int) -> list[range]:
    """Split the positions 0..size-1 into `chunks` ranges of nearly equal length. As in the
    original, ZeroDivisionError for 0, and no ranges for a negative number, here with a warning."""
    if chunks == 0:
        raise ZeroDivisionError("chunks=0: expected an integer of 1 or more")
    if chunks < 0:
        warn_once(f"chunks={chunks}: expected an integer of 1 or more; the result has no samples")
    length, longer_count = divmod(size, chunks)  # the first `longer_count` ranges have one position more
    ends = [number * length + min(number, longer_count) for number in range(chunks + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
