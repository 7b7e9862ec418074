"""What commands, answers and orders are made of."""

from __future__ import annotations

import enum
import re

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.core.types import FieldSpec, Scalar

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]


class Value(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Base of all inputs and outputs."""

    @classmethod
    def operation(cls) -> str:
        """Its name in events and metrics: "set_version" for `SetVersion`."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


class Mode(enum.StrEnum):
    """What a commit may do with the ids it names."""

    UPSERT = "upsert"
    CREATE = "create"
    UPDATE = "update"


class OnFull(enum.StrEnum):
    """What an allocation does when there is no space now."""

    WAIT = "wait"
    REJECT = "reject"


class WhenFull(enum.StrEnum):
    """What becomes of a put that finds no space, by its partition.

    WAIT: it waits, first come first served, until its deadline. REJECT: it fails at once. EVICT: the partition's
    consumed samples go, oldest first, if that makes space; else it waits. EVICT_OLDEST: the same, and where that is not
    enough, unconsumed ones go as well, oldest first.
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
    """What a claim does with groups that have been partial for too long."""

    RELEASE = "release"
    DROP = "drop"


class Samples(Value, frozen=True, kw_only=True):
    """Names samples: `ids`, or the handles (`rows`, `generations`)."""

    ids: tuple[str, ...] | None = None
    rows: Int64s | None = None
    generations: Int64s | None = None

    def __len__(self) -> int:
        if self.ids is not None:
            return len(self.ids)
        assert self.rows is not None
        return len(self.rows)


class TagColumn(Value, frozen=True, kw_only=True):
    """One tag of some samples: `values[i]` belongs to sample `positions[i]` of the command (None: to sample i)."""

    name: str
    values: tuple[Scalar, ...]
    positions: Int64s | None = None


class Predicate(Value, frozen=True, kw_only=True):
    """`tag op value` with op one of == != < <= > >= in; a sample without the tag does not match."""

    tag: str
    op: str
    value: Scalar | tuple[Scalar, ...]


class ColumnSizes(Value, frozen=True, kw_only=True):
    """Space wanted for one column: `sizes[k]` bytes for its k-th value (values, not samples, where rows are shared).
    `by_schema` as in `CommitColumn`."""

    name: str
    sizes: Int64s
    by_schema: bool = False


class Placement(Value, frozen=True, kw_only=True):
    """Values [first, last) of column number `column` lie one after another at `offset` in the arena of `unit`."""

    column: int
    first: int
    last: int
    unit: int
    offset: int


class CommitColumn(Value, frozen=True, kw_only=True):
    """One column of a commit. `lengths[k]` is the k-th value's length in units of `spec.unit_bytes`.

    `index[i]` is the value that sample i points at (None: sample i has value i); many samples may share one value.
    `checksums[k]` is the k-th value's (see `dataplane.core.checksums`; None: they have none). `by_schema`: the writer
    took the kind from what `Described` said of the field, not from the values; if the field's kind is open now, it
    would have encoded them otherwise, and the commit is `StaleSchemaError`.
    """

    name: str
    spec: FieldSpec
    lengths: Int64s
    index: Int64s | None = None
    checksums: UInt32s | None = None
    by_schema: bool = False


class FieldLocations(Value, frozen=True, kw_only=True):
    """Where one field of the named samples is; all arrays are aligned with the samples. Where a missing cell was
    allowed, its length is -1 (unit and offset mean nothing). `checksums` are those that the reader is to compare with
    (0: none; None: none of them). `serials`, if asked for: a cell that has the same one and offset again later has been
    there all the time."""

    name: str
    spec: FieldSpec
    units: Int32s
    offsets: Int64s
    lengths: Int64s
    checksums: UInt32s | None = None
    serials: Int64s | None = None


class SavedField(Value, frozen=True, kw_only=True):
    """A field of a partition, and what the schema declares of it (None: it is in live rows only)."""

    name: str
    declared: FieldSpec | None = None


class SavedTask(Value, frozen=True, kw_only=True):
    """A task, and a bit for each sample, oldest first (the first in the highest bit of the first byte): whether the
    task has claimed it for good."""

    name: str
    claimed: bytes


class SavedPartition(Value, frozen=True, kw_only=True):
    """A partition but for its samples, of which `live` live and `born` were born in this count."""

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
    """A storage unit as clients need it. `endpoints` are ZMQ addresses, ipc before tcp. `fsynced`: who writes into the
    mapped arena forces that to the disk before it commits. `curve_key`: the public key to talk to its endpoints with
    ("": in the clear)."""

    unit: int
    name: str
    host: str
    epoch: int
    endpoints: tuple[str, ...]
    arena_path: str
    capacity_bytes: int
    fsynced: bool = False
    curve_key: str = ""
