"""The results that answers carry."""

from __future__ import annotations

from dataplane.core.types import FieldSpec
from dataplane.ledger.commands.values import (
    FieldLocations,
    Int64s,
    Placement,
    SavedPartition,
    TagColumn,
    UInt32s,
    UnitInfo,
    Value,
    WhenFull,
)


class Result(Value, frozen=True, kw_only=True):
    """Base class of the results that answers carry."""


class Done(Result, frozen=True, kw_only=True):
    """Success without a value."""


class UnitList(Result, frozen=True, kw_only=True):
    """All storage units, in order of their ids."""

    units: tuple[UnitInfo, ...]


class Described(Result, frozen=True, kw_only=True):
    """`fields` maps every declared or live field to the part of its spec that is fixed now. `undeclared` lists
    the fields that exist in live rows only, `open` those whose kind nobody declared, so that puts may widen it, and
    `widened` those whose kind is another one than that of their first put."""

    partition: str
    fields: dict[str, FieldSpec]
    strict: bool
    tasks: tuple[str, ...]
    num_samples: int | None = None
    group_size: int | None = None
    sealed: bool
    live: int
    undeclared: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()


class Allocated(Result, frozen=True, kw_only=True):
    """Placements of every value of every column, ordered by (column, first). `checksums`: the commit must have
    checksums. `evicted` are the ids of samples that were evicted for this put before all tasks had consumed them
    (the first `budgets.REPORTED` of them)."""

    placements: tuple[Placement, ...]
    checksums: bool = False
    evicted: tuple[str, ...] = ()


class Preallocated(Result, frozen=True, kw_only=True):
    """`offset` is the start of the space: bytes from the start of the arena, at a granule. `checksums`: commits
    into the space must have checksums."""

    offset: int
    checksums: bool = False


class Committed(Result, frozen=True, kw_only=True):
    """Handles of the samples, in the command's order. `evicted` as in `Allocated`, for preallocated space.
    `born` counts the new samples. `overwritten_bytes` sums the values that replaced older ones in all their
    samples. `fields` and `tags` are as in `Listed`, on request."""

    rows: Int64s
    generations: Int64s
    evicted: tuple[str, ...] = ()
    born: int = 0
    overwritten_bytes: int = 0
    fields: tuple[str, ...] = ()
    tags: tuple[TagColumn, ...] = ()


class Located(Result, frozen=True, kw_only=True):
    """Locations of the cells of each field, and row and generation of each sample. After the fields, `fields` has the
    hidden columns that have cells of the samples (`schema.columns_of`); a sample without a cell in a column has length
    -1 there. `widened` are the fields whose kind is another one than that of their first put."""

    fields: tuple[FieldLocations, ...]
    rows: Int64s
    generations: Int64s
    widened: tuple[str, ...] = ()


class Claimed(Result, frozen=True, kw_only=True):
    """`fields` are those produced for all of the samples. `dropped` are the ids of samples that claims of the
    task cleared as members of partial groups since the last answer (the last `tasks.REPORTED` of them). `claim`
    is the claim id (0: nothing was claimed)."""

    ids: tuple[str, ...]
    rows: Int64s
    generations: Int64s
    fields: tuple[str, ...]
    tags: tuple[TagColumn, ...]
    dropped: tuple[str, ...] = ()
    claim: int = 0


class ClaimsSettled(Result, frozen=True, kw_only=True):
    """The command took effect on all its samples except those at positions `cleared`, which no longer live."""

    cleared: Int64s


class Consumption(Result, frozen=True, kw_only=True):
    """The result of `CheckConsumption`."""

    consumed: bool


class Cleared(Result, frozen=True, kw_only=True):
    """`count`: number of samples that were removed."""

    count: int


class Listed(Result, frozen=True, kw_only=True):
    """`fields` are those produced for all of the samples."""

    ids: tuple[str, ...]
    rows: Int64s
    generations: Int64s
    fields: tuple[str, ...]
    tags: tuple[TagColumn, ...]


class UnitStats(Value, frozen=True, kw_only=True):
    """Bytes: free + reserved (by puts) + live + retired (cleared, still read) + unbacked (not yet
    memory) = capacity. `pinned_bytes` (held by readers) overlaps reserved, live and retired.

    `used_bytes` sums reserved, live and retired; `peak_used_bytes` is its maximum so far. New rows may use up to
    `limit_bytes`. `pressed`: see `StatsReport`. `problem` says why the arena could not grow when last asked, or that
    the unit has not answered for a while. `extents` counts the columns of puts that hold bytes. `fragments` counts the
    free ranges; the largest has `largest_free_bytes`. `draining`: the unit gets nothing new (see `Drain`).
    """

    unit: int
    name: str
    host: str
    connected: bool
    capacity_bytes: int
    unbacked_bytes: int
    free_bytes: int
    reserved_bytes: int
    live_bytes: int
    retired_bytes: int
    pinned_bytes: int
    used_bytes: int = 0
    peak_used_bytes: int = 0
    limit_bytes: int = 0
    pressed: bool = False
    problem: str = ""
    extents: int = 0
    fragments: int = 0
    largest_free_bytes: int = 0
    draining: bool = False


class TaskStats(Value, frozen=True, kw_only=True):
    """`fields` are those of the task's latest claim (empty before its first). `ready` counts the live samples
    with all of them that the task has not claimed. `claimed` counts live samples; `leased` of them are on lease
    and `held` wait for their ranks. `waiting` counts the task's waiting claims. `stalest_version` is the lowest
    tag `weight_version` of the oldest ready samples (None: unknown). `lag` is the partition's version minus that
    (None: one of them is unknown)."""

    task: str
    fields: tuple[str, ...]
    ready: int
    leased: int
    held: int
    claimed: int
    waiting: int
    lag: int | None = None
    stalest_version: int | None = None


class PartitionStats(Value, frozen=True, kw_only=True):
    """`claimed` and `produced` count live samples by task and by field. `version` is that of the last `SetVersion`
    (None: never called). `dropped` counts the samples cleared as members of partial groups, by any claim.

    `used_bytes` counts against `budget_bytes` (None: no budget): live, reserved for puts, and cleared but still read.
    `peak_used_bytes` is its maximum so far. New rows may use up to `limit_bytes`. `evicted` counts evicted samples that
    were consumed, `evicted_unconsumed` the others.
    """

    partition: str
    live: int
    born: int
    num_samples: int | None = None
    sealed: bool
    live_bytes: int
    produced: dict[str, int]
    claimed: dict[str, int]
    waiting_claims: int
    version: int | None = None
    dropped: int
    used_bytes: int = 0
    peak_used_bytes: int = 0
    budget_bytes: int | None = None
    limit_bytes: int | None = None
    when_full: WhenFull = WhenFull.WAIT
    evicted: int = 0
    evicted_unconsumed: int = 0
    waiting_puts: int = 0
    pressed: bool = False
    tasks: tuple[TaskStats, ...] = ()


class SessionStats(Value, frozen=True, kw_only=True):
    """State of a session, last heard `silent_s` ago. `parked`: number of its waiting calls.
    `reservations` and `pins`: number of calls that reserved space, or pinned cells, and have not
    released them."""

    session: int
    name: str
    host: str
    state: str
    silent_s: float
    parked: int
    reservations: int
    pins: int


class StatsReport(Result, frozen=True, kw_only=True):
    """`partitions` are the requested ones, `partition_count` counts all. `now` is the ledger's
    clock in seconds. `waiting_allocations` counts the allocations that wait for space.

    A unit, or a partition with a budget, becomes `pressed` when it uses `high_watermark` of its `limit_bytes`,
    and stays so until it is down to `low_watermark` of it.
    """

    epoch: int
    now: float
    units: tuple[UnitStats, ...]
    partitions: tuple[PartitionStats, ...]
    sessions: tuple[SessionStats, ...]
    waiting_allocations: int
    low_watermark: float = 0.0
    high_watermark: float = 0.0
    partition_count: int = 0


class Writer(Value, frozen=True, kw_only=True):
    """A session that wrote to a partition `ago_s` seconds ago. `live`: the session has not ended. `fields` are
    the requested fields that no other session wrote later."""

    session: int
    name: str
    ago_s: float
    live: bool
    fields: tuple[str, ...]


class Blocked(Result, frozen=True, kw_only=True):
    """Why a claim of a task gets no samples; `why` says it in one sentence.

    unclaimed: live samples that the task has not claimed. `ready` of them have all fields, and `matching` of those
    fulfil all predicates. lacking: unclaimed samples without each field. filtered: ready samples that fail each
    predicate (by its text). undeclared: fields that were neither declared nor produced. unproduced: declared fields
    that no live sample has. groups, partial_groups: groups with and without enough ready members (None: the claim takes
    no groups). partial: ready members of the first few partial groups. claimed: live samples that the task has claimed;
    `leased` of them are on lease and `held` wait for their ranks. dropped: samples dropped with partial groups. born:
    how many of `expected` samples were put. complete: no more are expected. version: that of the partition. writers:
    the last writers, latest first. waiting_puts: puts of the partition that wait for space, the longest for
    `waiting_puts_s`. waiting_writers: clients of the first few of these puts.
    """

    unclaimed: int
    ready: int
    matching: int
    claimed: int
    leased: int
    held: int
    lacking: dict[str, int]
    undeclared: tuple[str, ...]
    unproduced: tuple[str, ...]
    filtered: dict[str, int]
    groups: int | None = None
    partial_groups: int | None = None
    partial: dict[str, int]
    dropped: int
    born: int
    expected: int | None = None
    complete: bool
    version: int | None = None
    writers: tuple[Writer, ...]
    waiting_puts: int = 0
    waiting_puts_s: float = 0.0
    waiting_writers: tuple[str, ...] = ()
    why: str


class Saved(Result, frozen=True, kw_only=True):
    """The snapshots, in the order of the command (or of registration)."""

    partitions: tuple[SavedPartition, ...]


class SavedRows(Result, frozen=True, kw_only=True):
    """`ids` and `tags` are empty unless requested. Cells of length above 0 at the same place share their bytes.
    Length -1: not produced."""

    ids: tuple[str, ...]
    tags: tuple[TagColumn, ...]
    fields: tuple[FieldLocations, ...]


class FoundCells(Result, frozen=True, kw_only=True):
    """Cells that lie on a unit; none if nothing lives there. Cell i belongs to row `rows[i]` and has value
    `index[i]`. `lengths` (in the spec's units), `offsets` (bytes from the start of the arena) and `checksums`
    (0: none) are per value; cells of one value share their bytes.

    cells, live: number of live cells on the unit, and their bytes by partition, including those found. reserved:
    extents of puts in progress, `reserved_bytes` in total. pinned_bytes: bytes that readers pin, without this
    call's own pin. holders: the sessions that hold reservations or pins.
    """

    partition: str
    field: str
    spec: FieldSpec
    rows: Int64s
    generations: Int64s
    index: Int64s
    offsets: Int64s
    lengths: Int64s
    checksums: UInt32s | None = None
    cells: int = 0
    live: dict[str, int]
    reserved: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    holders: tuple[str, ...] = ()


class Moved(Result, frozen=True, kw_only=True):
    """`cells` counts the moved cells, `skipped` those that were written or cleared in the meantime."""

    cells: int
    skipped: int
