"""Parts of rows for a read: token ranges of each sample, and slices of the inner dimensions of fields."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dataplane.core.inner_slice import InnerSlice
from dataplane.core.row_copy import Int64s
from dataplane.core.types import DTYPE_BYTES, FieldKind, FieldSpec, ceil_div
from dataplane.data.columns import InnerPart
from dataplane.data.jagged import MOST_TOKENS, not_per_token
from dataplane.errors import InvalidRequestError
from dataplane.ledger.commands import FieldLocations


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """The tokens that one rank of a context-parallel group processes. Each row is cut into chunks of equal length.

    rank, size: rank within the group, and size of the group. zigzag: a row has `2 * size` chunks, of which rank r gets
    chunks r and `2 * size - 1 - r`, so that causal attention loads all ranks equally (as in Megatron-LM and NeMo-RL);
    otherwise it has `size` chunks, and rank r gets chunk r. pad_to: number of tokens to which every row counts as
    padded before it is cut, a multiple of the number of chunks; padded results then have `pad_to / size` columns. 0:
    each row counts as padded to the next multiple of the number of chunks (packed sequences).
    """

    rank: int
    size: int
    zigzag: bool = True
    pad_to: int = 0

    def __post_init__(self) -> None:
        """Convert the numbers to ints. Raise `InvalidRequestError` (a ValueError) for values out of range, and for
        others than integers."""
        if not isinstance(self.zigzag, bool | np.bool_):
            raise InvalidRequestError(f"ContextParallel: zigzag={self.zigzag!r}: expected True or False")
        object.__setattr__(self, "zigzag", bool(self.zigzag))
        for name in ("rank", "size", "pad_to"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise InvalidRequestError(f"ContextParallel: {name}={value!r}: expected an integer") from None
        if max(self.size, self.pad_to) > MOST_TOKENS:
            raise InvalidRequestError(f"{self}: size and pad_to are limited to {MOST_TOKENS:,}")
        if not 0 <= self.rank < self.size:
            raise InvalidRequestError(f"{self}: expected 0 <= rank < size")
        if self.pad_to < 0 or self.pad_to % self.chunks:
            raise InvalidRequestError(f"{self}: pad_to must be a multiple of the {self.chunks} chunks of a row")

    @property
    def chunks(self) -> int:
        """The number of chunks of a row."""
        return 2 * self.size if self.zigzag else self.size

    def ranges(self, lengths: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first and the end of each range of tokens as `[N, ranges per row]`, within rows of `lengths`
        `[N]`. Raise `InvalidRequestError` if a row is longer than `pad_to`."""
        if self.pad_to and len(lengths) and int(lengths.max()) > self.pad_to:
            raise InvalidRequestError(
                f"{self}: sample {int(lengths.argmax())} has {int(lengths.max())} tokens, more than pad_to"
            )
        chunk = ceil_div(lengths, self.chunks) if not self.pad_to else np.full(len(lengths), self.pad_to // self.chunks)
        numbers = [self.rank, self.chunks - 1 - self.rank] if self.zigzag else [self.rank]
        starts = np.stack([np.minimum(chunk * number, lengths) for number in numbers], axis=1)
        stops = np.stack([np.minimum(chunk * (number + 1), lengths) for number in numbers], axis=1)
        return starts, stops


Tokens = tuple[int, int] | Sequence[tuple[int, int]] | ContextParallel
"""Token ranges of a read: one (start, stop) for all samples, one for each, or those of a context-parallel rank."""
Inner = Mapping[str, slice | Sequence[slice]]
"""By field, slices of its first inner dimensions."""


class PartLocations(NamedTuple):
    """The locations of the parts of a field: `pieces` entries for each sample, and the part of each element."""

    entries: FieldLocations
    pieces: int
    inner: InnerPart | None


@dataclasses.dataclass(frozen=True)
class RowParts:
    """The validated parts of a read. ranges: `[N or 1, 2]` starts and stops, or a rule; None: all tokens. slices: by
    field."""

    ranges: Int64s | ContextParallel | None
    slices: Mapping[str, tuple[slice, ...]]

    @property
    def width(self) -> int:
        """The number of columns that padded results of per-token fields have at least."""
        ranges = self.ranges
        return ranges.pad_to // ranges.size if isinstance(ranges, ContextParallel) else 0

    def bounds(self, whole: Int64s) -> tuple[Int64s, Int64s]:
        """Return starts and stops of the token ranges, `[N, ranges per row]`, in samples of `whole` `[N]` tokens."""
        if self.ranges is None:
            return np.zeros((len(whole), 1), np.int64), whole[:, None]
        if isinstance(self.ranges, ContextParallel):
            return self.ranges.ranges(whole)
        starts, stops = (np.minimum(self.ranges[:, [column]], whole[:, None]) for column in (0, 1))
        return starts, stops

    def of(self, located: Sequence[FieldLocations], token_counts: Sequence[int] | None) -> list[PartLocations]:
        """Return the locations of the parts. Token ranges apply to the jagged fields with one element per token (see
        `not_per_token`, which takes `token_counts`). Raise `InvalidRequestError` for a field that cannot be sliced."""
        whole = not_per_token(jagged_lengths(located), token_counts)
        return [self._of_field(field, whole) for field in located]

    def _of_field(self, field: FieldLocations, whole: Collection[str]) -> PartLocations:
        spec = field.spec
        inner = _inner_part(field.name, spec, self.slices[field.name]) if field.name in self.slices else None
        if self.ranges is None or spec.kind is not FieldKind.JAGGED or field.name in whole:
            return PartLocations(field, 1, inner)
        starts, stops = self.bounds(field.lengths)
        pieces = starts.shape[1]
        entries = FieldLocations(
            name=field.name,
            spec=spec,
            units=np.repeat(field.units, pieces),
            offsets=(field.offsets[:, None] + starts * spec.unit_bytes).reshape(-1),
            lengths=(stops - starts).reshape(-1),
        )
        return PartLocations(entries, pieces, inner)


def jagged_lengths(located: Sequence[FieldLocations]) -> dict[str, list[int]]:
    """Return the row lengths of the jagged fields."""
    return {field.name: field.lengths.tolist() for field in located if field.spec.kind is FieldKind.JAGGED}


def row_parts(tokens: Tokens | None, inner: Inner | None, samples: int, fields: Collection[str]) -> RowParts | None:
    """Validate the parts of a read of `samples` samples and these fields; None if both are None. Raise
    `InvalidRequestError` for malformed ranges or slices, or slices of other fields."""
    if inner is not None and not isinstance(inner, Mapping):
        raise InvalidRequestError(f"inner={inner!r}: expected a mapping of field names to slices")
    slices = {name: _slices(name, value) for name, value in (inner or {}).items()}
    if tokens is None and not slices:
        return None
    unknown = [name for name in slices if name not in fields]
    if unknown:
        raise InvalidRequestError(f"inner has slices of {unknown}, which are not among the fields: {[*fields]}")
    if tokens is None or isinstance(tokens, ContextParallel):
        return RowParts(tokens, slices)
    return RowParts(_ranges(tokens, samples), slices)


def _ranges(tokens: Any, samples: int) -> Int64s:
    """Return token ranges as `[N or 1, 2]` int64."""
    try:
        ranges = np.array(tokens)
    except ValueError:  # of different lengths
        ranges = np.empty(0)
    if ranges.dtype == object and all(type(bound) is int for bound in ranges.flat):  # some are beyond int64
        ranges = np.clip(ranges, -1, MOST_TOKENS).astype(np.int64)
    if ranges.size == 0 and samples == 0:
        return np.zeros((0, 2), np.int64)
    ranges = ranges.reshape(1, 2) if ranges.shape == (2,) else ranges
    if ranges.ndim != 2 or ranges.shape[1] != 2 or not np.issubdtype(ranges.dtype, np.integer):
        raise InvalidRequestError(
            f"tokens={tokens!r}: expected (start, stop), one (start, stop) for each sample, or a ContextParallel"
        )
    if len(ranges) not in (1, samples):
        raise InvalidRequestError(f"tokens has {len(ranges)} ranges for {samples} samples; pass one for each, or one")
    wrong = np.flatnonzero((ranges[:, 0] < 0) | (ranges[:, 1] < ranges[:, 0]))
    if len(wrong):
        raise InvalidRequestError(f"tokens[{wrong[0]}]: {ranges[wrong[0]].tolist()}: expected 0 <= start <= stop")
    limited: Int64s = np.minimum(ranges, MOST_TOKENS).astype(np.int64)
    return limited


def _slices(name: str, value: Any) -> tuple[slice, ...]:
    slices = (value,) if isinstance(value, slice) else value
    if not isinstance(slices, Sequence) or not all(isinstance(each, slice) for each in slices):
        raise InvalidRequestError(f"inner[{name!r}]={value!r}: expected a slice, or a sequence of slices")
    try:
        slices = [slice(*map(_index, (each.start, each.stop, each.step))) for each in slices]
    except TypeError as error:
        raise InvalidRequestError(f"inner[{name!r}]={value!r}: {error}") from error
    if any(each.step is not None and each.step < 1 for each in slices):
        raise InvalidRequestError(f"inner[{name!r}]={value!r}: steps must be positive")
    return tuple(slices)


def _index(value: Any) -> int | None:
    """Return a bound or step of a slice as an int of at most `MOST_TOKENS`, which is beyond the end of any dimension;
    TypeError if it is not an integer."""
    return None if value is None else max(-MOST_TOKENS, min(operator.index(value), MOST_TOKENS))


def _inner_part(name: str, spec: FieldSpec, slices: tuple[slice, ...]) -> InnerPart:
    if spec.kind not in (FieldKind.DENSE, FieldKind.JAGGED) or len(slices) > len(spec.inner or ()):
        raise InvalidRequestError(f"inner[{name!r}] has {len(slices)} slices, but the field is {spec}")
    inner = spec.inner or ()
    # A step beyond the size selects as much as one of this size, and fits the int64 of the strides.
    slices = tuple(
        slice(each.start, each.stop, each.step and min(each.step, max(size, 1)))
        for size, each in zip(inner, slices, strict=False)
    )
    sizes = [len(range(size)[each]) for size, each in zip(inner, slices, strict=False)]
    part = FieldSpec(spec.kind, spec.dtype, (*sizes, *inner[len(slices) :]))
    return InnerPart(spec, part, slices, InnerSlice.of(inner, DTYPE_BYTES[spec.dtype or ""], slices))
