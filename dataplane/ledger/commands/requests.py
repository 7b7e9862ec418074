"""The commands of a session."""

from __future__ import annotations

from typing import Generic, TypeVar, get_args

from dataplane.core.schema import WEIGHT_VERSION
from dataplane.core.types import FieldSpec
from dataplane.ledger.commands.results import (
    Allocated,
    Blocked,
    Claimed,
    ClaimsSettled,
    Cleared,
    Committed,
    Consumption,
    Described,
    Done,
    FoundCells,
    Listed,
    Located,
    Moved,
    Preallocated,
    Result,
    Saved,
    SavedRows,
    StatsReport,
    UnitList,
)
from dataplane.ledger.commands.values import (
    ColumnSizes,
    CommitColumn,
    FieldLocations,
    Int64,
    Int64s,
    Mode,
    OnFull,
    Order,
    Partial,
    Predicate,
    Samples,
    SavedPartition,
    TagColumn,
    Value,
    WhenFull,
)

R = TypeVar("R", bound=Result)


class Command(Value, frozen=True, kw_only=True):
    """Base class of the commands of a `Call`. `timeout_s` of a command that can park counts from the last `Tick`."""


class Answered(Command, Generic[R], frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A command with a result of type `R`. Its subclasses are the methods of the protocol."""

    @classmethod
    def answer(cls) -> type[Result]:
        """Return the type of its result."""
        (result_type,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        return result_type  # type: ignore[no-any-return]


class Bye(Answered[Done], frozen=True, kw_only=True):
    """End the session. Answered `Done`. Pinned bytes stay allocated until the units prove that the session
    cannot access them."""


class Units(Answered[UnitList], frozen=True, kw_only=True):
    """List all storage units. Answered `UnitList`."""


class Register(Answered[Done], frozen=True, kw_only=True):
    """Declare a partition, or replace schema, expected size and tasks of an existing one. Answered `Done`. Rows, tags
    and the cursors of remaining tasks are kept. A new count begins (live rows plus ids born since), and a seal is
    lifted.

    `fields` maps names to specs, which may be open. The client alone decides which columns are jagged by name.
    `num_samples` is the expected number of samples (None: unknown until a `Seal`).

    `budget_bytes` limits the bytes of the partition's extents: reserved for its puts, live, or cleared but still read.
    Shared values count once, preallocated space counts from the commit that takes it. New rows may use the budget less
    the reserve, updates all of it. A budget below the current use is allowed: puts wait until the use falls.
    `when_full` applies when the budget or the units are full. Waiting puts follow the latest registration.

    With `extend`, an existing partition only gets the fields and tasks that it lacks; everything else is ignored.
    """

    partition: str
    fields: dict[str, FieldSpec]
    num_samples: Int64 | None
    tasks: tuple[str, ...]
    group_size: Int64 | None = None
    enums: dict[str, tuple[str, ...]] | None = None
    strict: bool = False
    budget_bytes: Int64 | None = None
    when_full: WhenFull = WhenFull.WAIT
    extend: bool = False


class Seal(Answered[Done], frozen=True, kw_only=True):
    """Refuse new ids from now on. Answered `Done`."""

    partition: str


class Describe(Answered[Described], frozen=True, kw_only=True):
    """Return the facts that a writer needs to encode a put. Answered `Described`."""

    partition: str


class Allocate(Answered[Allocated], frozen=True, kw_only=True):
    """Reserve space for a put. Answered `Allocated`. The id of this call names the reservation.

    If there is no space, the call waits up to `timeout_s` or fails, according to `on_full`. Waiting calls are served in
    order of arrival, updates before new rows (`update=False`). A call that waits for the budget of its partition holds
    up only calls of this partition. So does a call for which enough bytes are free, but in pieces that are too small;
    it holds up no calls at all if its partition has no budget.

    Placement prefers the unit `unit_wish`, then units that this session is attached to, then units on its host,
    then the emptiest. All columns go in one piece if they fit, else column by column, else columns are split
    between values. A draining unit gets nothing.

    `samples` are those that the put will name (None: unknown). Live ones among them are not evicted, for this
    put or another, until it is committed, aborted or refused.

    `moving`: space for a `Move` (one column, `update`). No budget counts it and nothing is evicted for it. It is
    served after all waiting updates, and after new rows that there is space for.
    """

    partition: str
    columns: tuple[ColumnSizes, ...]
    update: bool = False
    unit_wish: Int64 | None = None
    on_full: OnFull = OnFull.WAIT
    timeout_s: float = 60.0
    moving: bool = False
    samples: Samples | None = None


class Preallocate(Answered[Preallocated], frozen=True, kw_only=True):
    """Reserve `nbytes` in one piece for future small puts, in a unit that proved the session local to it. Answered
    `Preallocated`. Each of those puts needs only a commit, which cuts its portion off.

    Never waits: raises `CapacityTimeoutError` if waiting puts need the space, if more than half of the space for new
    rows would be in use, if `nbytes` exceeds 1/`Limits.preallocated_divisor` of that space, or if no free piece is
    enough. `Abort` frees what no commit has taken.
    """

    unit: Int64
    nbytes: Int64


class Abort(Answered[Done], frozen=True, kw_only=True):
    """Free the reservation of call `reservation`. Answered `Done`. If that call is parked, lost or not yet seen,
    it never executes. The client sends this only after every copy into the bytes has ended."""

    reservation: Int64


class Commit(Answered[Committed], frozen=True, kw_only=True):
    """Make rows visible: validate everything, then switch all rows, or change nothing and free the reservation.
    Answered `Committed`.

    `columns` are those of the Allocate, in its order; a tags-only put has none and `reservation` None. With
    `offset`, `reservation` is a `Preallocate`: the columns lie one after another from that byte of the arena,
    each from its own granule, and a fault keeps the space reserved. Samples given by handles imply mode update.

    `located` is the id of a Locate that still pins its cells. Those cells must still be where it found them
    (`expected`, its answer for the same samples), or still be missing, else `RowsChangedError`.

    With `listed`, the answer has fields and tags of the samples, as a List right after the commit would.
    """

    partition: str
    samples: Samples
    mode: Mode
    reservation: Int64 | None = None
    offset: Int64 | None = None
    columns: tuple[CommitColumn, ...] = ()
    tags: tuple[TagColumn, ...] = ()
    located: Int64 | None = None
    expected: tuple[FieldLocations, ...] = ()
    listed: bool = False


class Locate(Answered[Located], frozen=True, kw_only=True):
    """Return where the fields of the samples are, and pin them under this call's id. Answered `Located`.

    The pins last until a `Release`. With `brief`, they last until the client confirms the answer,
    which it does after its read, and need no `Release`.

    With `missing_ok`, unknown fields, cells that were not produced and ids that do not live (row -1, generation
    0) are not errors, and the answer includes variants (`schema.variants_of`).
    """

    partition: str
    samples: Samples
    fields: tuple[str, ...]
    missing_ok: bool = False
    brief: bool = False


class Release(Answered[Done], frozen=True, kw_only=True):
    """Unpin the cells that call `located` pinned, even if that call was lost or is not yet seen. Answered `Done`."""

    located: Int64


class Claim(Answered[Claimed], frozen=True, kw_only=True):
    """Claim up to `batch_size` samples whose `fields` are all produced. Answered `Claimed`.

    Parks until `min_batch_size` (default: batch_size) samples are ready, or the partition is
    complete and all of the task's unclaimed live samples are ready, or `timeout_s` is over
    (`ClaimTimeoutError`, nothing claimed). With `blocking=False`, returns at once with the ready
    samples, possibly none. With `group_size`, takes whole groups only: samples with equal tag
    `group_by`, `group_size` of them ready. With `lease_s`, samples that are not acknowledged in
    time return to the pool. With `max_lag`, takes only samples whose tag `version_tag` is at least
    the partition's version (`SetVersion`) when the claim is evaluated, less `max_lag`. With
    `where`, takes only samples that meet all conditions. `sampler` names a strategy of
    `ledger.claims.samplers` (default: "length-balanced" for shares, "group-n" with `group_size`,
    else "sequential").

    With `partial_after_s`, a group is overdue if, that long after its oldest unclaimed member was born, fewer than
    `group_size` unclaimed members have all fields. It then counts as whole with the members it has (`partial` RELEASE),
    or its unclaimed members are cleared when a claim with this policy is evaluated, and listed in `Claimed.dropped`
    (DROP). The last, smaller batch waits until then.

    With `dp_rank`, `dp_world` and `step`, `batch_size` is that of the whole step. The first rank to claim fixes the
    selection of the step, and each rank gets its share once. Unclaimed shares are held for `lease_s` (`shares.HOLD_S`).
    `InvalidRequestError` if the terms differ from those of the step or the rank had its share already,
    `ShareConflictError` if a share was returned and another claim has it now.

    With `samples` (and `blocking=False`), claims exactly those, in that order, if all of them live, are unclaimed and
    have the fields, else none; sizes are ignored. With `peek`, returns the samples without claiming them.
    """

    partition: str
    task: str
    fields: tuple[str, ...]
    batch_size: Int64
    min_batch_size: Int64 | None = None
    blocking: bool = True
    timeout_s: float = 60.0
    where: tuple[Predicate, ...] = ()
    group_by: str = "group"
    group_size: Int64 | None = None
    order: Order = Order.OLDEST
    lease_s: float | None = None
    dp_rank: Int64 | None = None
    dp_world: Int64 | None = None
    step: Int64 | None = None
    sampler: str | None = None
    max_lag: Int64 | None = None
    version_tag: str = WEIGHT_VERSION
    partial_after_s: float | None = None
    partial: Partial = Partial.RELEASE
    samples: Samples | None = None
    peek: bool = False


class Unclaim(Answered[Done], frozen=True, kw_only=True):
    """Withdraw the claim of call `claimed`, whose answer the client will not use. Answered `Done`. A parked
    claim ends, an answered claim returns its samples, and a claim that is not yet seen never executes."""

    claimed: Int64


class Ack(Answered[ClaimsSettled], frozen=True, kw_only=True):
    """Acknowledge leased samples for the task. Answered `ClaimsSettled`. `claims` has, for each sample, the id of its
    claim (see `Claimed`).

    Acknowledges all samples that it can. The answer lists samples that no longer live. Samples that are not on lease to
    their claim are left unchanged, and a `StaleSampleError` names them after all others are acknowledged.
    """

    partition: str
    task: str
    samples: Samples
    claims: Int64s


class Nack(Answered[ClaimsSettled], frozen=True, kw_only=True):
    """Return claimed samples to the pool: those that their claim (see `Ack`) holds, on lease or not, and has not
    acknowledged. Answered `ClaimsSettled`. Samples in the pool stay there; all others as with `Ack`.

    Without `claims`, returns all of the samples that are not on lease, whichever claim consumed them, as if the
    task had never claimed them.
    """

    partition: str
    task: str
    samples: Samples
    claims: Int64s | None = None


class Extend(Answered[ClaimsSettled], frozen=True, kw_only=True):
    """Let the leases of these samples end `lease_s` from now. Answered `ClaimsSettled`. `claims` and other
    samples are treated as with `Ack`."""

    partition: str
    task: str
    samples: Samples
    lease_s: float
    claims: Int64s


class CheckConsumption(Answered[Consumption], frozen=True, kw_only=True):
    """Check whether the partition is complete and each task has consumed every live sample: claimed it and, if
    the claim was on lease, acknowledged it. Answered `Consumption`."""

    partition: str
    tasks: tuple[str, ...]


class Clear(Answered[Cleared], frozen=True, kw_only=True):
    """Drop these samples, or with `samples=None` the whole partition with its schema. Answered `Cleared`.
    Unknown ids and stale handles are ignored, and so is an unknown partition with `samples=None`."""

    partition: str
    samples: Samples | None


class SetTags(Answered[Done], frozen=True, kw_only=True):
    """Merge tags into live samples. Answered `Done`."""

    partition: str
    samples: Samples
    tags: tuple[TagColumn, ...]


class SetVersion(Answered[Done], frozen=True, kw_only=True):
    """Set the partition's version, from which the `max_lag` of claims counts. Answered `Done`. The version may
    decrease; until it is set, claims count from 0."""

    partition: str
    version: Int64


class List(Answered[Listed], frozen=True, kw_only=True):
    """List all live samples, oldest first, up to `limit`, or with `samples` exactly those. Answered `Listed`."""

    partition: str
    samples: Samples | None = None
    limit: Int64 | None = None


class Stats(Answered[StatsReport], frozen=True, kw_only=True):
    """Return statistics of these partitions (none named: all), oldest first, at most `limit` of them (0: no
    limit). Answered `StatsReport`."""

    partitions: tuple[str, ...] = ()
    limit: Int64 = 0


class WhyBlocked(Answered[Blocked], frozen=True, kw_only=True):
    """Explain why a claim of `fields` by `task` would wait now. Answered `Blocked`. The other fields are as in
    `Claim`."""

    partition: str
    task: str
    fields: tuple[str, ...] = ()
    where: tuple[Predicate, ...] = ()
    group_by: str = "group"
    group_size: Int64 | None = None
    max_lag: Int64 | None = None
    version_tag: str = WEIGHT_VERSION


class Save(Answered[Saved], frozen=True, kw_only=True):
    """Snapshot these partitions (none named: all that are not staged) at this instant, and pin all their bytes
    until `Release` of this call's id. Answered `Saved`; `ReadSaved` returns the contents in parts.

    A sample counts as claimed by a task only if the claim is final. A sample on lease, held for a rank, or in an
    answer that its session has not confirmed counts as unclaimed, because sessions are not saved.
    """

    partitions: tuple[str, ...] = ()


class ReadSaved(Answered[SavedRows], frozen=True, kw_only=True):
    """Return samples [first, last), oldest first, of a partition as call `saved` took it: with `names` their ids
    and tags, and the locations of their cells of `fields`. Answered `SavedRows`."""

    saved: Int64
    partition: str
    first: Int64
    last: Int64
    fields: tuple[str, ...] = ()
    names: bool = False


class Stage(Answered[Done], frozen=True, kw_only=True):
    """Create a partition without schema or tasks that belongs to this session. Answered `Done`. It is an ordinary
    partition, except that it is dropped with the session unless a `Publish` names it, and that a `Save` without
    names skips it. `PartitionExistsError` if the name is taken."""

    partition: str


class Publish(Answered[Done], frozen=True, kw_only=True):
    """Turn partitions that this session staged into those of `partitions` (same order), all or none. Answered
    `Done`. Sets name, schema, tasks with their claimed samples, size, seal and version.

    With `replace`, existing partitions of those names are dropped first; otherwise `PartitionExistsError`. The
    declarations must hold for the staged rows (`SchemaError`), whose number must be `live`.
    """

    staged: tuple[str, ...]
    partitions: tuple[SavedPartition, ...]
    replace: bool = False


class Drain(Answered[Done], frozen=True, kw_only=True):
    """Place nothing new on the unit from now on, so that `FindCells` and `Move` can empty it. Answered `Done`.
    `undo` makes it an ordinary unit again. Commits into space that was reserved there before still succeed.
    `DrainError` if no other unit has space for new rows, unless the unit is already draining or `force` is set."""

    unit: Int64
    undo: bool = False
    force: bool = False


class FindCells(Answered[FoundCells], frozen=True, kw_only=True):
    """Find some cells of one field that lie on the unit, by address, and pin them under this call's id.
    Answered `FoundCells`.

    Returns at most `max_cells` (more only if they share bytes) and `max_bytes` of distinct values, at least one;
    those of `partition` and `field` first. If no cells lie on the unit, the call waits up to `timeout_s` while puts
    have reserved space on the unit or readers pin its bytes.
    """

    unit: Int64
    max_cells: Int64 = 16384
    max_bytes: Int64 = 64 << 20
    partition: str = ""
    field: str = ""
    timeout_s: float = 0.0


class Move(Answered[Moved], frozen=True, kw_only=True):
    """Point cells at copies of their bytes, which lie in the space that call `reservation` (an `Allocate` with
    `moving`) reserved. Answered `Moved`. Releases call `located`, the `FindCells` that found and pinned the cells.

    The arrays are as they were found: cell i has value `index[i]`, which lay at `offsets[index[i]]` of the unit. Cells
    that have been moved or cleared since are left unchanged. Versions, claims, tags, lengths and checksums stay the
    same. A fault changes nothing except that the reservation is freed.
    """

    partition: str
    field: str
    unit: Int64
    rows: Int64s
    generations: Int64s
    index: Int64s
    offsets: Int64s
    lengths: Int64s
    located: Int64
    reservation: Int64


class Forget(Answered[Done], frozen=True, kw_only=True):
    """Forget a storage unit. If live rows lie on it, `force` is required and clears those rows. Answered `Done`."""

    unit: Int64
    force: bool = False
