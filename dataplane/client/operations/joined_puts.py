"""Small puts that are ready at the same moment, stored together with one commit into preallocated space."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from dataplane.client.preallocated import SMALL_BYTES, bytes_of
from dataplane.core.devices import CPU
from dataplane.data.columns import EncodedColumn
from dataplane.data.columns.values import JoinedValues
from dataplane.ledger import commands as c

PUT_BYTES = 64 << 10
"""Maximum bytes of a put that is stored together with others: the copy of a larger one takes longer than its commit."""
JOINED_BYTES = SMALL_BYTES
"""Maximum bytes of the puts that are stored together: as much preallocated space can be requested."""
JOINED_PUTS = 256
"""Maximum number of puts that are stored together."""


@dataclass(frozen=True, slots=True, eq=False)
class SmallPut:
    """A put that can be stored together with others. ids: of its samples. nbytes: its bytes in an arena. key: puts with
    equal keys fit together."""

    commit: c.Commit
    ids: Sequence[str]
    encoded: Sequence[EncodedColumn]
    nbytes: int
    key: Hashable


def small_put(commit: c.Commit, ids: Sequence[str], encoded: Sequence[EncodedColumn]) -> SmallPut | None:
    """Return the put in the form in which it can be stored together with others, or None if it must be stored alone:
    it is large, shares values between samples, has values on an accelerator, or has tags for some of its samples
    only."""
    nbytes = bytes_of(encoded)
    if nbytes > PUT_BYTES:
        return None
    if any(column.index is not None or column.values.device != CPU for column in encoded):
        return None
    if any(tag.positions is not None for tag in commit.tags):
        return None
    columns = tuple((column.name, column.spec, column.by_schema) for column in encoded)
    by_handles = commit.samples.ids is None
    key = (commit.partition, commit.mode, commit.listed, by_handles, columns, tuple(tag.name for tag in commit.tags))
    return SmallPut(commit, ids, encoded, nbytes, key)


@dataclass(slots=True, eq=False)
class _JoinedPuts:
    """Puts to store together, as positions, with their samples and bytes."""

    positions: list[int] = field(default_factory=list)
    samples: set[str] = field(default_factory=set)
    nbytes: int = 0

    def has_room(self, put: SmallPut) -> bool:
        """Whether the put is within the limits, and names none of their samples."""
        fits = len(self.positions) < JOINED_PUTS and self.nbytes + put.nbytes <= JOINED_BYTES
        return fits and self.samples.isdisjoint(put.ids)


def joined_positions(puts: Sequence[SmallPut]) -> list[list[int]]:
    """Return which puts to store together, as lists of positions in `puts`. No list has a sample twice."""
    all_joined: list[_JoinedPuts] = []
    last_joined: dict[Hashable, _JoinedPuts] = {}  # by key
    for position, put in enumerate(puts):
        joined = last_joined.get(put.key)
        if joined is None or not joined.has_room(put):
            joined = last_joined[put.key] = _JoinedPuts()
            all_joined.append(joined)
        joined.positions.append(position)
        joined.samples.update(put.ids)
        joined.nbytes += put.nbytes
    return [joined.positions for joined in all_joined]


def results_of(puts: Sequence[SmallPut], committed: c.Committed) -> list[c.Committed]:
    """Return the result of each put of a group from that of their commit. The counts `born` and `overwritten_bytes`
    stay those of the group, and samples that were evicted are in the first result only."""
    results = []
    ranges = pairwise(accumulate((len(put.ids) for put in puts), initial=0))
    for number, (put, (first, last)) in enumerate(zip(puts, ranges, strict=True)):
        result = msgspec.structs.replace(
            committed,
            rows=committed.rows[first:last],
            generations=committed.generations[first:last],
            evicted=() if number else committed.evicted,
            fields=committed.put_fields[number].names if put.commit.listed else (),
            tags=_tags_between(committed.tags, first, last),
            put_fields=(),
        )
        results.append(result)
    return results


def _tags_between(tags: Sequence[c.TagColumn], first: int, last: int) -> tuple[c.TagColumn, ...]:
    """Return the tags of samples [first, last), which are then counted from 0; without tags that none of them has."""
    found = []
    for tag in tags:
        if tag.positions is None:
            found.append(c.TagColumn(name=tag.name, values=tag.values[first:last]))
            continue
        begin, end = np.searchsorted(tag.positions, (first, last)).tolist()
        if begin < end:
            positions = None if end - begin == last - first else tag.positions[begin:end] - first
            found.append(c.TagColumn(name=tag.name, values=tag.values[begin:end], positions=positions))
    return tuple(found)


def joined_commit(puts: Sequence[SmallPut]) -> c.Commit:
    """Return the commit of all samples and tags of joined puts, with the size of each put, still without columns."""
    commit = puts[0].commit
    tags = tuple(
        c.TagColumn(name=tag.name, values=tuple(value for put in puts for value in put.commit.tags[number].values))
        for number, tag in enumerate(commit.tags)
    )
    named = [put.commit.samples for put in puts]
    if commit.samples.ids is None:
        rows = np.concatenate([each.rows for each in named])
        samples = c.Samples(rows=rows, generations=np.concatenate([each.generations for each in named]))
    else:
        samples = c.Samples(ids=tuple(each for put in puts for each in put.ids))
    return msgspec.structs.replace(commit, samples=samples, tags=tags, put_sizes=tuple(len(put.ids) for put in puts))


def joined_columns(puts: Sequence[SmallPut]) -> list[EncodedColumn]:
    """Return the columns of joined puts: the values of all, one after another, still in the memory of the callers."""
    joined = []
    for number, column in enumerate(puts[0].encoded):
        columns = [put.encoded[number] for put in puts]
        values = JoinedValues([column.values for column in columns])
        lengths = np.concatenate([column.lengths for column in columns])
        joined.append(replace(column, lengths=lengths, sizes=values.sizes, values=values))
    return joined
