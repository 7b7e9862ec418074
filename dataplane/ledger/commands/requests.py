"""The commands of a session."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar, get_args

from dataplane.core.types import FieldSpec
from dataplane.ledger.commands.parts import (
    ColumnSizes,
    CommitColumn,
    FieldLocations,
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
    Shrunken,
    StatsReport,
    UnitList,
)

R = TypeVar("R", bound=Result)


class Command(Value, frozen=True, kw_only=True):
    """Base of what a `Call` carries. `timeout_s` of those that can park counts from the ledger's last `Tick`.

    lasting: whether it changes what an epoch after the machine's end still has.
    """

    lasting: ClassVar[bool] = True


class Answered(Command, Generic[R], frozen=True, kw_only=True):
    """A command that is answered by an `R`. Its subclasses are the methods of the protocol."""

    @classmethod
    def answer(cls) -> type[Result]:
        """The type of its result."""
        (found,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        return found  # type: ignore[no-any-return]


class Bye(Answered[Done], frozen=True, kw_only=True):
    """Ends the session. Answered `Done`. Bytes still pinned by living views stay until the units prove them gone."""


class Units(Answered[UnitList], frozen=True, kw_only=True):
    """Asks for all storage units. Answered `UnitList`."""

    lasting = False


class Register(Answered[Done], frozen=True, kw_only=True):
    """Declares a partition, or replaces schema, expected size and tasks of a live one (rows, tags and the cursors of
    tasks that stay are kept; a new count begins: live rows plus ids born since; a seal is lifted). Answered `Done`.

    `fields` maps names to specs, which may be open; which columns are jagged by name is the client's business.

    `budget_bytes` bounds what extents of the partition occupy: reserved for its puts, live, or cleared and still read;
    shared values once; preallocated space from the commit that takes it. New rows get it less the reserve, updates all
    of it. A budget below what is there is no error: puts wait until there is less. `when_full` holds for the budget,
    and when the units are full. Puts that wait are judged by what was registered last.

    With `extend`, a partition that lives only gets the fields and tasks that it has not; the rest is not looked at.
    """

    partition: str
    fields: dict[str, FieldSpec]
    num_samples: int | None
    tasks: tuple[str, ...]
    group_size: int | None = None
    enums: dict[str, tuple[str, ...]] | None = None
    strict: bool = False
    budget_bytes: int | None = None
    when_full: WhenFull = WhenFull.WAIT
    extend: bool = False


class Seal(Answered[Done], frozen=True, kw_only=True):
    """No new ids from now on. Answered `Done`."""

    partition: str


class Describe(Answered[Described], frozen=True, kw_only=True):
    """Answered `Described`: what a writer must know to encode a put."""

    partition: str


class Allocate(Answered[Allocated], frozen=True, kw_only=True):
    """Reserves space; the reservation is named by this call's number. Answered `Allocated`; parks while there is no
    space (`on_full`), first come first served within new rows (`update=False`) and within updates, but for puts that
    wait for a free piece that is large enough: those hold up nobody.

    Placement: the unit `unit_wish`, then units this session is attached to, then units on its host, then the emptiest;
    all columns in one piece if they fit, else column by column, else columns split between values. Never a unit that is
    being drained.

    `samples` are those that the put will name (None: not said). Those of them that live are evicted for no put, neither
    this one nor another, until it is committed, aborted or refused.

    `moving`: space for a `Move` (one column, `update`). No budget counts it, nobody is evicted for it, and it is served
    after all updates that wait, and new rows that there is space for.
    """

    partition: str
    columns: tuple[ColumnSizes, ...]
    update: bool = False
    unit_wish: int | None = None
    on_full: OnFull = OnFull.WAIT
    timeout_s: float = 60.0
    moving: bool = False
    samples: Samples | None = None


class Preallocate(Answered[Preallocated], frozen=True, kw_only=True):
    """Reserves `nbytes` in one piece for small puts to come, in a unit that proved the session local to it: each of
    their commits cuts its part off, so that it is their only command. Answered `Preallocated`.

    Never parks: `CapacityTimeoutError` at once when puts wait for space, or half of what new rows may take is in use,
    or `nbytes` is a large part of it. `Abort` gives back what no commit has taken.
    """

    unit: int
    nbytes: int


class Abort(Answered[Done], frozen=True, kw_only=True):
    """Gives the reservation of call `reservation` back (also when that call is parked, lost or not yet seen: then it
    will never execute). The client sends it only after every copy into the bytes has ended. Answered `Done`."""

    reservation: int


class Commit(Answered[Committed], frozen=True, kw_only=True):
    """Makes rows visible: validates everything, then switches all, or changes nothing and frees the reservation.

    `columns` are those of the Allocate, in its order; none (and `reservation` None) for a tags-only put.
    With `offset`, `reservation` is an `Preallocate`: the columns lie one after another from that byte of the arena,
    each from a granule of its own, and a fault leaves the space reserved.
    Samples given by handles imply mode update. Answered `Committed`.

    With `located`, the number of a Locate that still pins its cells: those cells must be where it found them
    (`expected`, which it answered for the same samples), or still missing, else `RowsChangedError`.

    With `listed` the answer has fields and tags of the samples, as a List right after the commit would.
    """

    partition: str
    samples: Samples
    mode: Mode
    reservation: int | None = None
    offset: int | None = None
    columns: tuple[CommitColumn, ...] = ()
    tags: tuple[TagColumn, ...] = ()
    located: int | None = None
    expected: tuple[FieldLocations, ...] = ()
    listed: bool = False


class Locate(Answered[Located], frozen=True, kw_only=True):
    """Where the fields of the samples are, and a pin on them named by this call's number. Answered `Located`.

    With `missing_ok`, unknown fields, cells that were not produced and ids that do not live (row -1, generation 0) are
    no errors, and after the fields come those of their hidden columns (`schema.variants_of`) that have cells of the
    rows. With `serials` the answer has them (not with `missing_ok`). `unpinned`: nothing is pinned, and what is there
    may be gone when the answer comes.
    """

    lasting = False
    partition: str
    samples: Samples
    fields: tuple[str, ...]
    missing_ok: bool = False
    serials: bool = False
    unpinned: bool = False


class Release(Answered[Done], frozen=True, kw_only=True):
    """Unpins what call `located` pinned (also when that call was lost or not yet seen). Answered `Done`."""

    lasting = False
    located: int


class Claim(Answered[Claimed], frozen=True, kw_only=True):
    """Moves the task's cursor over up to `batch_size` samples whose `fields` are all produced. Answered `Claimed`.

    Parks until `min_batch_size` (default: batch_size) samples are ready, or the partition is complete and all of the
    task's unclaimed live samples are ready, or `timeout_s` is over (`ClaimTimeoutError`, nothing claimed). With
    `blocking=False` answers at once with what is ready, possibly nothing. With `group_size`, takes whole groups only:
    samples with equal tag `group_by`, `group_size` of them ready. With `lease_s`, samples not acknowledged in time go
    back. With `max_lag`, only samples whose tag `version_tag` is at least the partition's version (`SetVersion`), as it
    is when the claim is judged, less `max_lag`. `sampler` names a strategy of `ledger.samplers`.

    With `partial_after_s`, a group fewer than `group_size` of whose unclaimed members have all fields that long after
    the oldest of them was born counts as whole with those it has (`partial` RELEASE), or its unclaimed members are
    cleared when a claim with this policy is judged and told of in `Claimed.dropped` (DROP). A tail waits until then.

    With `dp_rank`, `dp_world` and `step`: `batch_size` is that of a whole step, whose selection the first rank to ask
    fixes; each rank is answered its share of it, once. Shares that nobody asked for are held for `lease_s`
    (`shares.HOLD_S`). `InvalidRequestError` for other terms than the step was fixed on and for a share had before,
    `ShareConflictError` for one that went back and is another's now.

    With `samples` (and `blocking=False`): exactly those, in that order, if all of them live, are unclaimed and have the
    fields, else none; sizes are not looked at. With `peek`, what it would get, and nothing is claimed.
    """

    partition: str
    task: str
    fields: tuple[str, ...]
    batch_size: int
    min_batch_size: int | None = None
    blocking: bool = True
    timeout_s: float = 60.0
    where: tuple[Predicate, ...] = ()
    group_by: str = "group"
    group_size: int | None = None
    order: Order = Order.OLDEST
    lease_s: float | None = None
    dp_rank: int | None = None
    dp_world: int | None = None
    step: int | None = None
    sampler: str | None = None
    max_lag: int | None = None
    version_tag: str = "weight_version"
    partial_after_s: float | None = None
    partial: Partial = Partial.RELEASE
    samples: Samples | None = None
    peek: bool = False


class Unclaim(Answered[Done], frozen=True, kw_only=True):
    """Withdraws the claim of call `claimed`: parked, it ends; answered, its samples go back; not yet seen, it will
    never execute. For a claim whose answer nobody will use. Answered `Done`."""

    claimed: int


class Ack(Answered[ClaimsSettled], frozen=True, kw_only=True):
    """The task is done with these leased samples. `claims` has for each the id of the claim that it is of (see
    `Claimed`). Answered `ClaimsSettled`.

    It does what it can: samples that do not live any more are told of in the answer; those that are not on lease to
    their claim (any more) are left as they are and, once all others are acknowledged, named by a `StaleSampleError`.
    """

    partition: str
    task: str
    samples: Samples
    claims: Int64s


class Nack(Answered[ClaimsSettled], frozen=True, kw_only=True):
    """These claimed samples go back to the pool: those that their claim (see `Ack`) holds, on lease or not, and has not
    acknowledged. What is in the pool already stays there; others as with `Ack`. Answered `ClaimsSettled`.

    Without `claims`, all of them that are not on lease, whichever claim consumed them: as if the task had never seen
    them.
    """

    partition: str
    task: str
    samples: Samples
    claims: Int64s | None = None


class Extend(Answered[ClaimsSettled], frozen=True, kw_only=True):
    """The leases of these samples now end `lease_s` from now; claims and others as with `Ack`. Answered
    `ClaimsSettled`."""

    partition: str
    task: str
    samples: Samples
    lease_s: float
    claims: Int64s


class CheckConsumption(Answered[Consumption], frozen=True, kw_only=True):
    """Whether the partition is complete and each task has consumed every live sample: claimed it and, where the claim
    was on lease, acknowledged it. Answered `Consumption`."""

    partition: str
    tasks: tuple[str, ...]


class Clear(Answered[Cleared], frozen=True, kw_only=True):
    """Drops these samples (unknown ids and stale handles are ignored), or with `samples=None` the whole partition,
    schema and all (an unknown partition is ignored too). Answered `Cleared`."""

    partition: str
    samples: Samples | None


class SetTags(Answered[Done], frozen=True, kw_only=True):
    """Merges tags into live samples. Answered `Done`."""

    partition: str
    samples: Samples
    tags: tuple[TagColumn, ...]


class SetVersion(Answered[Done], frozen=True, kw_only=True):
    """The partition's version, from which `max_lag` of claims counts, is this now (it may go back; until it is set,
    they count from 0). Answered `Done`."""

    partition: str
    version: int


class List(Answered[Listed], frozen=True, kw_only=True):
    """All live samples, oldest first, up to `limit`; or with `samples` exactly those. Answered `Listed`."""

    lasting = False
    partition: str
    samples: Samples | None = None
    limit: int | None = None


class Stats(Answered[StatsReport], frozen=True, kw_only=True):
    """Of these partitions (none named: of all), at most `limit`, the oldest (0: all of them). Answered
    `StatsReport`."""

    lasting = False
    partitions: tuple[str, ...] = ()
    limit: int = 0


class Shrink(Answered[Shrunken], frozen=True, kw_only=True):
    """Every connected unit gives the memory above its highest used byte back to the machine. Answered `Shrunken` when
    all have, or at the deadline. Puts make them grow again."""

    timeout_s: float = 30.0


class WhyBlocked(Answered[Blocked], frozen=True, kw_only=True):
    """Why a claim of `fields` by `task` would wait now; the rest as in `Claim`. Answered `Blocked`."""

    lasting = False
    partition: str
    task: str
    fields: tuple[str, ...] = ()
    where: tuple[Predicate, ...] = ()
    group_by: str = "group"
    group_size: int | None = None
    max_lag: int | None = None
    version_tag: str = "weight_version"


class Save(Answered[Saved], frozen=True, kw_only=True):
    """Takes what these partitions (none named: all that are not staged) are at this instant, and pins every byte of it,
    until `Release` of this call's number. Answered `Saved`; `ReadSaved` asks for the rest, part by part.

    A sample counts as claimed by a task if it is so for good: one on lease, held for a rank, or in an answer that its
    session has not confirmed counts as unclaimed, because whoever has it is not saved.
    """

    partitions: tuple[str, ...] = ()


class ReadSaved(Answered[SavedRows], frozen=True, kw_only=True):
    """Samples [first, last), oldest first, of a partition as call `saved` took it: with `names` their ids and tags, and
    where their cells of `fields` are. Answered `SavedRows`."""

    saved: int
    partition: str
    first: int
    last: int
    fields: tuple[str, ...] = ()
    names: bool = False


class Stage(Answered[Done], frozen=True, kw_only=True):
    """Makes a partition without schema or tasks that is this session's and goes with it, until a `Publish`. It is like
    any other, but for `Save`. Answered `Done`; `PartitionExistsError` if there is one of that name."""

    partition: str


class Publish(Answered[Done], frozen=True, kw_only=True):
    """Partitions that this session staged become those of `partitions` (same order): name, schema, tasks with what each
    has claimed, size, seal and version, all at once or none. Answered `Done`.

    Partitions of those names that exist are dropped first under `replace`, else it is `PartitionExistsError`. What is
    declared must hold for the staged rows (`SchemaError`), whose number must be `live`.
    """

    staged: tuple[str, ...]
    partitions: tuple[SavedPartition, ...]
    replace: bool = False


class Drain(Answered[Done], frozen=True, kw_only=True):
    """The unit gets nothing new from now on, and is to be emptied with `FindCells` and `Move`; with `undo`, it is as
    any other again. Commits into space that was reserved there before still happen. Refused with a `DrainError` where
    no other unit has space for new rows, unless it is drained already or with `force`. Answered `Done`."""

    unit: int
    undo: bool = False
    force: bool = False


class FindCells(Answered[FoundCells], frozen=True, kw_only=True):
    """Some cells of one field that lie on the unit, by address, and a pin on them named by this call's number. Answered
    `FoundCells`.

    At most `max_cells` (more only where they are the same bytes) and `max_bytes` of distinct values, one at least;
    those of `partition` and `field` first. When there are none, it parks while puts have space there or readers hold
    pins, up to `timeout_s`.
    """

    unit: int
    max_cells: int = 16384
    max_bytes: int = 64 << 20
    partition: str = ""
    field: str = ""
    timeout_s: float = 0.0


class Move(Answered[Moved], frozen=True, kw_only=True):
    """Points cells at copies of their bytes, which lie in the space that call `reservation` (an `Allocate` with
    `moving`) reserved, and releases call `located`, the `FindCells` that found and pinned them. Answered `Moved`.

    The arrays are as they were found: cell i is value `index[i]`, which lay at `offsets[index[i]]` of the unit. A cell
    that is elsewhere by now, or gone, is left as it is. Nothing else changes: no version, claim, tag, length or
    checksum. A fault changes nothing but that the reservation is freed.
    """

    partition: str
    field: str
    unit: int
    rows: Int64s
    generations: Int64s
    index: Int64s
    offsets: Int64s
    lengths: Int64s
    located: int
    reservation: int


class Forget(Answered[Done], frozen=True, kw_only=True):
    """Forgets a storage unit; with live rows on it only under `force`, which clears those rows. Answered `Done`."""

    unit: int
    force: bool = False
