"""Values that commands, answers and orders consist of."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.core.types import INT64_MAX, INT64_MIN, FieldSpec, Scalar
from dataplane.errors import InvalidRequestError

Int64 = Annotated[int, msgspec.Meta(ge=INT64_MIN, le=INT64_MAX)]
"""An integer that numpy holds. Decoding checks it."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
UInt8s = npt.NDArray[np.uint8]


class Value(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Base class of all inputs and outputs."""

    @classmethod
    def operation(cls) -> str:
        """Return its name in events and metrics: "set_version" for `SetVersion`."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


class Mode(enum.StrEnum):
    """Whether a commit may create samples, change live samples, or both."""

    UPSERT = "upsert"
    CREATE = "create"
    UPDATE = "update"


class OnFull(enum.StrEnum):
    """What an allocation does if it finds no space.

    WAIT: it waits until its deadline, unless its partition's `when_full` is REJECT. REJECT: it waits only for arenas
    that are growing, and fails otherwise.
    """

    WAIT = "wait"
    REJECT = "reject"


class WhenFull(enum.StrEnum):
    """A partition's policy for puts that find no space.

    WAIT: the put waits in line until its deadline. REJECT: as `OnFull.REJECT`. EVICT: consumed samples of the
    partition are evicted, oldest first, if that makes enough space; else the put waits.
    EVICT_OLDEST: the same, and if that is not enough, unconsumed samples are evicted as well, oldest first.
    """

    WAIT = "wait"
    REJECT = "reject"
    EVICT = "evict"
    EVICT_OLDEST = "evict_oldest"


class Order(enum.StrEnum):
    """Which claimable samples a claim takes first, by generation."""

    OLDEST = "oldest"
    FRESHEST = "freshest"


class Partial(enum.StrEnum):
    """How a claim treats groups that have been partial for too long."""

    RELEASE = "release"
    DROP = "drop"


class Samples(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Names of samples: `ids`, or handles (`rows`, `generations`)."""

    ids: tuple[str, ...] | None = None
    rows: Int64s | None = None
    generations: Int64s | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidRequestError` unless the samples are named in one way."""
        if self.ids is not None:
            well_formed = self.rows is None and self.generations is None
        else:
            well_formed = (
                self.rows is not None and self.generations is not None and len(self.rows) == len(self.generations)
            )
        if not well_formed:
            raise InvalidRequestError("name samples by ids, or by rows and generations of equal length")

    def __len__(self) -> int:
        if self.ids is not None:
            return len(self.ids)
        assert self.rows is not None
        return len(self.rows)


class TagColumn(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One tag of some samples: `values[i]` belongs to sample `positions[i]` of the command (None:
    to sample i).

    `index`, in answers only and without `positions`: sample i has value `index[i]` (None: value i),
    so that few values stand for many samples."""

    name: str
    values: tuple[str | bool | Int64 | float | None, ...]
    positions: Int64s | None = None
    index: UInt8s | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidRequestError` unless each value has a position, and each number of the
        index a value."""
        if self.positions is not None and len(self.positions) != len(self.values):
            count = len(self.positions)
            raise InvalidRequestError(f"tag {self.name!r} has {len(self.values)} values for {count} positions")
        if self.index is not None and len(self.index):
            most = int(self.index.max())
            if most >= len(self.values) or self.positions is not None:
                raise InvalidRequestError(
                    f"tag {self.name!r}: its index names value {most} of {len(self.values)}, or it has positions, too"
                )

    @property
    def each(self) -> Sequence[Scalar]:
        """The value of each sample that has the tag."""
        if self.index is None:
            return self.values
        if len(self.values) == 1:
            return self.values * len(self.index)
        return list(map(self.values.__getitem__, self.index.tolist()))


class Predicate(Value, frozen=True, kw_only=True):
    """`tag op value`, with op one of == != < <= > >= in. A sample without the tag does not match."""

    tag: str
    op: str
    value: Scalar | tuple[Scalar, ...]


class ColumnSizes(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Sizes of one column: `sizes[k]` bytes for its k-th value (per value, not per sample, where rows are
    shared). `by_schema` as in `CommitColumn`."""

    name: str
    sizes: Int64s
    by_schema: bool = False


class Placement(Value, frozen=True, kw_only=True):
    """Values [first, last) of column number `column` (from 0) lie one after another at `offset`, in
    bytes, in the arena of `unit`."""

    column: int
    first: int
    last: int
    unit: int
    offset: int


class CommitColumn(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One column of a commit. `lengths[k]` is the length of the k-th value in units of
    `spec.unit_bytes`: elements of a jagged row, dense rows, else bytes.

    `index[i]` is the value of sample i (None: sample i has value i); many samples may share one value. `checksums[k]`
    is the checksum of the k-th value (the low half of the 64-bit XXH3 of its bytes, 1 for 0, see
    `dataplane.core.checksums`; None: no checksums). `by_schema`: the writer took
    the kind from the field's entry in `Described`, not from the values. If the field's kind is open now, the values
    would have been encoded differently, and the commit fails with `StaleSchemaError`.
    """

    name: str
    spec: FieldSpec
    lengths: Int64s
    index: Int64s | None = None
    checksums: UInt32s | None = None
    by_schema: bool = False


class FieldLocations(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Locations of one field of the named samples; all arrays are aligned with the samples.
    `offsets` are in bytes from the start of the arena, `lengths` in the units of `CommitColumn`. A
    missing cell, where allowed, has length -1 (unit and offset are undefined). `checksums` are
    those that the reader must compare (0: none; None: none at all)."""

    name: str
    spec: FieldSpec
    units: Int32s
    offsets: Int64s
    lengths: Int64s
    checksums: UInt32s | None = None


class SavedField(Value, frozen=True, kw_only=True):
    """A field of a saved partition, and its declared spec (None: the field exists in live rows only)."""

    name: str
    declared: FieldSpec | None = None


class SavedTask(Value, frozen=True, kw_only=True):
    """A task, and one bit per sample, oldest first (the first in the highest bit of the first byte): whether the
    task's claim of the sample is final."""

    name: str
    claimed: bytes


class SavedPartition(Value, frozen=True, kw_only=True):
    """A saved partition without its samples. `live` counts its live samples, `born` those of the current count."""

    partition: str
    live: int
    born: int
    fields: tuple[SavedField, ...]
    tasks: tuple[SavedTask, ...]
    num_samples: int | None = None
    group_size: int | None = None
    enums: dict[str, tuple[str, ...]] | None = None
    strict: bool = False
    sealed: bool = False
    version: int | None = None
    budget_bytes: int | None = None
    when_full: WhenFull = WhenFull.WAIT


class UnitInfo(Value, frozen=True, kw_only=True):
    """A storage unit as clients see it. `host` is the boot id of its host. `epoch` grows with each
    restart of the unit. `endpoints` are ZMQ addresses, ipc before tcp. `arena_path` is the arena's
    file on that host. `curve_key` is the public key, in z85, for connections to the endpoints ("":
    unencrypted)."""

    unit: int
    name: str
    host: str
    epoch: int
    endpoints: tuple[str, ...]
    arena_path: str
    capacity_bytes: int
    curve_key: str = ""
