"""The commands of a session."""

from __future__ import annotations

from dataplane.ledger.commands.parts import (
    ColumnSizes,
    CommitColumn,
    Mode,
    OnFull,
    Order,
    Predicate,
    Samples,
    TagColumn,
    Value,
)
from dataplane.types import FieldSpec


class Command(Value, frozen=True, kw_only=True):
    """Base of what a `Call` carries. `timeout_s` of those that can park counts from the ledger's last `Tick`."""


class Bye(Command, frozen=True, kw_only=True):
    """Ends the session. Answered `Done`. Bytes still pinned by living views stay until the units prove them gone."""


class Units(Command, frozen=True, kw_only=True):
    """Asks for all storage units. Answered `UnitList`."""


class Register(Command, frozen=True, kw_only=True):
    """Declares a partition, or replaces schema, expected size and tasks of a live one (rows, tags and the cursors of
    tasks that stay are kept; a new count begins: live rows plus ids born since; a seal is lifted). Answered `Done`.

    `fields` maps names to specs, which may be open; which columns are jagged by name is the client's business.
    """

    partition: str
    fields: dict[str, FieldSpec]
    num_samples: int | None
    tasks: tuple[str, ...]
    group_size: int | None = None
    enums: dict[str, tuple[str, ...]] | None = None
    strict: bool = False


class Seal(Command, frozen=True, kw_only=True):
    """No new ids from now on. Answered `Done`."""

    partition: str


class Describe(Command, frozen=True, kw_only=True):
    """Answered `Described`: what a writer must know to encode a put."""

    partition: str


class Allocate(Command, frozen=True, kw_only=True):
    """Reserves room; the reservation is named by this call's number. Answered `Allocated`; parks while there is no room
    (`on_full`), first come first served within new rows (`update=False`) and within updates.

    Placement: the unit `unit_wish`, then units this session is attached to, then units on its host, then the emptiest;
    all columns in one piece if they fit, else column by column, else columns split between values.
    """

    partition: str
    columns: tuple[ColumnSizes, ...]
    update: bool = False
    unit_wish: int | None = None
    on_full: OnFull = OnFull.WAIT
    timeout_s: float = 60.0


class Abort(Command, frozen=True, kw_only=True):
    """Gives the reservation of call `reservation` back (also when that call is parked, lost or not yet seen: then it
    will never execute). The client sends it only after every copy into the bytes has ended. Answered `Done`."""

    reservation: int


class Commit(Command, frozen=True, kw_only=True):
    """Makes rows visible: validates everything, then switches all, or changes nothing and frees the reservation.

    `columns` are those of the Allocate, in its order; none (and `reservation` None) for a tags-only put.
    Samples given by handles imply mode update. Answered `Committed`.
    """

    partition: str
    samples: Samples
    mode: Mode
    reservation: int | None = None
    columns: tuple[CommitColumn, ...] = ()
    tags: tuple[TagColumn, ...] = ()


class Locate(Command, frozen=True, kw_only=True):
    """Where the fields of the samples are, and a pin on them named by this call's number. Answered `Located`."""

    partition: str
    samples: Samples
    fields: tuple[str, ...]


class Release(Command, frozen=True, kw_only=True):
    """Unpins what call `located` pinned (also when that call was lost or not yet seen). Answered `Done`."""

    located: int


class Claim(Command, frozen=True, kw_only=True):
    """Moves the task's cursor over up to `batch_size` samples whose `fields` are all produced. Answered `Claimed`.

    Parks until `min_batch_size` (default: batch_size) samples are ready, or the partition is complete and all of the
    task's unclaimed live samples are ready, or `timeout_s` is over (`ClaimTimeoutError`, nothing claimed). With
    `blocking=False` answers at once with what is ready, possibly nothing. With `group_size`, takes whole groups only:
    samples with equal tag `group_by`, `group_size` of them ready. With `lease_s`, samples not acknowledged in time go
    back.
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


class Unclaim(Command, frozen=True, kw_only=True):
    """Withdraws the claim of call `claimed`: parked, it ends; answered, its samples go back; not yet seen, it will
    never execute. For a claim whose answer nobody will use. Answered `Done`."""

    claimed: int


class Ack(Command, frozen=True, kw_only=True):
    """The task is done with these leased samples. Answered `Done`; samples no longer leased to this session are
    `StaleSampleError`, nothing acknowledged."""

    partition: str
    task: str
    samples: Samples


class Nack(Command, frozen=True, kw_only=True):
    """These claimed samples (leased or not) go back to the pool. Answered `Done`."""

    partition: str
    task: str
    samples: Samples


class Extend(Command, frozen=True, kw_only=True):
    """The leases of these samples now end `lease_s` from now. Answered `Done`."""

    partition: str
    task: str
    samples: Samples
    lease_s: float


class CheckConsumption(Command, frozen=True, kw_only=True):
    """Whether the partition is complete and each task has claimed every live sample. Answered `Consumption`."""

    partition: str
    tasks: tuple[str, ...]


class Clear(Command, frozen=True, kw_only=True):
    """Drops these samples (unknown ids and stale handles are ignored), or with `samples=None` the whole partition,
    schema and all (an unknown partition is ignored too). Answered `Cleared`."""

    partition: str
    samples: Samples | None


class SetTags(Command, frozen=True, kw_only=True):
    """Merges tags into live samples. Answered `Done`."""

    partition: str
    samples: Samples
    tags: tuple[TagColumn, ...]


class List(Command, frozen=True, kw_only=True):
    """All live samples, oldest first, or with `samples` exactly those. Answered `Listed`."""

    partition: str
    samples: Samples | None = None


class Stats(Command, frozen=True, kw_only=True):
    """Answered `StatsReport`."""


class WhyBlocked(Command, frozen=True, kw_only=True):
    """Why a claim of `fields` by `task` would wait now. Answered `Blocked`."""

    partition: str
    task: str
    fields: tuple[str, ...] = ()
