"""What answers carry."""

from __future__ import annotations

from dataplane.core.types import FieldSpec
from dataplane.ledger.commands.parts import (
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
    """Base of what answers carry."""


class Done(Result, frozen=True, kw_only=True):
    """Nothing to tell."""


class UnitList(Result, frozen=True, kw_only=True):
    units: tuple[UnitInfo, ...]


class Described(Result, frozen=True, kw_only=True):
    """`fields` holds every declared or live field with what is fixed of its spec now; `undeclared` those that are only
    live."""

    partition: str
    fields: dict[str, FieldSpec]
    strict: bool
    tasks: tuple[str, ...]
    num_samples: int | None
    group_size: int | None
    sealed: bool
    live: int
    undeclared: tuple[str, ...] = ()


class Allocated(Result, frozen=True, kw_only=True):
    """Covers every value of every column, ordered by (column, first). `evicted` are the ids of samples that had to go
    for it before all tasks had consumed them (the first `budgets.REPORTED` of them).
    `checksums`: the commit is to have them."""

    placements: tuple[Placement, ...]
    checksums: bool = False
    evicted: tuple[str, ...] = ()


class Preallocated(Result, frozen=True, kw_only=True):
    """Where the space begins: bytes from the start of the arena, at a granule. `checksums`: commits into it are to have
    them."""

    offset: int
    checksums: bool = False


class Committed(Result, frozen=True, kw_only=True):
    """Handles of the samples, in the command's order. `evicted` as in `Allocated`, for preallocated space. `born` of
    the samples did not live before. `overwritten_bytes` are those of values that replaced others in all their samples.
    `fields` and `tags` are as in `Listed`, if they were asked for."""

    rows: Int64s
    generations: Int64s
    evicted: tuple[str, ...] = ()
    born: int = 0
    overwritten_bytes: int = 0
    fields: tuple[str, ...] = ()
    tags: tuple[TagColumn, ...] = ()


class Located(Result, frozen=True, kw_only=True):
    fields: tuple[FieldLocations, ...]
    rows: Int64s
    generations: Int64s


class Claimed(Result, frozen=True, kw_only=True):
    """`fields` are those produced for all of the samples. `dropped` are the ids of samples that claims of the task
    cleared as members of partial groups since the last answer (the last `tasks.REPORTED` of them). `claim` is the id of
    the claim (0: nothing was claimed)."""

    ids: tuple[str, ...]
    rows: Int64s
    generations: Int64s
    fields: tuple[str, ...]
    tags: tuple[TagColumn, ...]
    dropped: tuple[str, ...] = ()
    claim: int = 0


class ClaimsSettled(Result, frozen=True, kw_only=True):
    """Done to all samples of the command but those at these places in it, which do not live any more."""

    cleared: Int64s


class Consumption(Result, frozen=True, kw_only=True):
    consumed: bool


class Cleared(Result, frozen=True, kw_only=True):
    count: int


class Listed(Result, frozen=True, kw_only=True):
    """`fields` are those produced for all of the samples."""

    ids: tuple[str, ...]
    rows: Int64s
    generations: Int64s
    fields: tuple[str, ...]
    tags: tuple[TagColumn, ...]


class UnitStats(Value, frozen=True, kw_only=True):
    """Bytes: free + reserved + live + retired + unbacked = capacity. `pinned_bytes` overlaps the last three.

    `used_bytes` sums reserved, live and retired; `peak_used_bytes` is the most that ever was; new rows may take it up
    to `limit_bytes`. `pressed`: see `StatsReport`. `problem` says why the arena could not grow when it was asked last,
    or that its unit has not answered for long. `extents` counts the columns of puts that hold bytes, `fragments` the
    free ranges, of which the largest has `largest_free_bytes`. `draining`: it gets nothing new (see `Drain`).
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
    """`fields` are those of the task's latest claim (none before its first), `ready` counts the live samples with all
    of them that it has not claimed. `claimed` counts live ones: of these `leased` are on lease and `held` wait for
    their ranks. `waiting` counts its claims that wait. `lag`: how many versions the stalest of its oldest ready samples
    is behind the partition's, by their tag `weight_version`, which is `stalest_version` (None: they are not known; the
    lag is not either while the partition's version was never set)."""

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
    """`claimed` and `produced` count live samples by task and by field. `version` is what `SetVersion` said last (None:
    it was never called). `dropped` counts the samples cleared as members of partial groups, by whatever claim.

    `used_bytes` is what counts against `budget_bytes` (None: no budget): live, reserved for puts, and cleared but still
    read; `peak_used_bytes` the most it ever was; new rows may take it up to `limit_bytes`. `evicted` counts consumed
    samples that went to make space, `evicted_unconsumed` others."""

    partition: str
    live: int
    born: int
    num_samples: int | None
    sealed: bool
    live_bytes: int
    produced: dict[str, int]
    claimed: dict[str, int]
    waiting_claims: int
    version: int | None
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
    session: int
    name: str
    host: str
    state: str
    silent_s: float
    parked: int
    reservations: int
    pins: int


class StatsReport(Result, frozen=True, kw_only=True):
    """`partitions` are those asked for, of `partition_count`.

    A unit, or a partition with a budget, is `pressed` from when it uses `high_watermark` of its `limit_bytes` until
    it is down to `low_watermark` of it."""

    epoch: int
    now: float
    units: tuple[UnitStats, ...]
    partitions: tuple[PartitionStats, ...]
    sessions: tuple[SessionStats, ...]
    waiting_allocations: int
    low_watermark: float = 0.0
    high_watermark: float = 0.0
    partition_count: int = 0


class UnitShrunk(Value, frozen=True, kw_only=True):
    """`given_bytes` went back to the machine, `backed_bytes` are still held. `error` says why nothing did, or why it is
    not known."""

    unit: int
    name: str
    given_bytes: int
    backed_bytes: int
    error: str = ""


class Shrunken(Result, frozen=True, kw_only=True):
    units: tuple[UnitShrunk, ...]

    @property
    def given_bytes(self) -> int:
        """By all units together."""
        return sum(unit.given_bytes for unit in self.units)


class Writer(Value, frozen=True, kw_only=True):
    """A session that wrote to a partition, `ago_s` seconds ago; `live` while it is there. `fields` are those that were
    asked about and that nobody wrote after it."""

    session: int
    name: str
    ago_s: float
    live: bool
    fields: tuple[str, ...]


class Blocked(Result, frozen=True, kw_only=True):
    """What keeps a task's next samples from a claim; `why` says it in a sentence.

    unclaimed: live samples that the task has not claimed. Of these: `ready` have all fields, `matching` of those
    fulfil all predicates; `lacking` counts those without each field; `filtered` counts the ready ones that do not
    fulfil each predicate (by its text). undeclared: fields nobody declared or produced. unproduced: declared fields
    that no live sample has. groups, partial_groups: groups with and without enough ready members (None: the claim takes
    no groups), `partial` the ready members of the first few of the latter. claimed: live samples that the task has
    claimed, of which `leased` are on lease and `held` wait for their ranks. dropped: samples dropped with partial
    groups. born of `expected` samples were put; `complete` if no more are to come. version: the partition's.
    writers: who wrote last, latest first. waiting_puts: of the partition, that wait for space, the longest for
    `waiting_puts_s`; waiting_writers: whose the first few are.
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
    groups: int | None
    partial_groups: int | None
    partial: dict[str, int]
    dropped: int
    born: int
    expected: int | None
    complete: bool
    version: int | None
    writers: tuple[Writer, ...]
    waiting_puts: int = 0
    waiting_puts_s: float = 0.0
    waiting_writers: tuple[str, ...] = ()
    why: str


class Saved(Result, frozen=True, kw_only=True):
    """What was taken, in the order in which it was named (or registered)."""

    partitions: tuple[SavedPartition, ...]


class SavedRows(Result, frozen=True, kw_only=True):
    """`ids` and `tags` are empty unless asked for. Cells of length above 0 at the same place are the same bytes; length
    -1: not produced."""

    ids: tuple[str, ...]
    tags: tuple[TagColumn, ...]
    fields: tuple[FieldLocations, ...]


class FoundCells(Result, frozen=True, kw_only=True):
    """Cells that lie on a unit; none: nothing lives there. Cell i is of row `rows[i]` and is the value `index[i]`, of
    which `lengths` (in the spec's units), `offsets` (bytes from the start of the arena) and `checksums` (0: none) tell;
    cells of one value are the same bytes.

    cells, live: how many cells live on the unit, and bytes by partition, those found among them. reserved: extents of
    puts under way, `reserved_bytes` together. pinned_bytes: what readers hold, this call's own pin aside. holders: the
    sessions that have either.
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
    """How many cells are elsewhere now, and how many had been written or cleared meanwhile."""

    cells: int
    skipped: int
