"""What goes into the ledger and what comes out: values, each of which can be written down and replayed.

Inputs are either a `Call` (a numbered command of a client's session) or one of the unnumbered reports of the shell
and of the storage units (`OpenSession`, `Heartbeat`, `SessionSilent`, `AddUnit`, `UnitLost`, `SessionAttached`,
`SessionGone`, `SessionAlive`, `Grown`, `Tick`). Outputs are answers (`Answer`, `Opened`, `UnitAdded`) and orders to
units (`FenceSession`, `GrowArena`).

Samples are named by ids or by row handles (row, birth), never both. Arrays are one-dimensional numpy arrays, aligned
with the samples unless said otherwise: rows and births int64, lengths int64, offsets int64 (bytes from the start of
the arena), units int32.
"""

from __future__ import annotations

import enum

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import DataPlaneError
from dataplane.types import FieldSpec, Scalar

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class Value(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Base of all inputs and outputs."""


class Mode(enum.StrEnum):
    """What a commit may do with the ids it names."""

    UPSERT = "upsert"
    CREATE = "create"
    UPDATE = "update"


class OnFull(enum.StrEnum):
    """What an allocation does when there is no room now."""

    WAIT = "wait"
    REJECT = "reject"


class Order(enum.StrEnum):
    """Which claimable samples a claim takes first, by birth."""

    OLDEST = "oldest"
    FRESHEST = "freshest"


# --- parts ----------------------------------------------------------------------------------------------------


class Samples(Value, frozen=True, kw_only=True):
    """Names samples: `ids`, or the handles (`rows`, `births`)."""

    ids: tuple[str, ...] | None = None
    rows: Int64s | None = None
    births: Int64s | None = None

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
    """Room wanted for one column: `sizes[k]` bytes for its k-th value (values, not samples, where rows are shared)."""

    name: str
    sizes: Int64s


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
    """

    name: str
    spec: FieldSpec
    lengths: Int64s
    index: Int64s | None = None


class FieldLocations(Value, frozen=True, kw_only=True):
    """Where one field of the named samples is; all arrays are aligned with the samples."""

    name: str
    spec: FieldSpec
    units: Int32s
    offsets: Int64s
    lengths: Int64s


class UnitInfo(Value, frozen=True, kw_only=True):
    """A storage unit as clients need it. `endpoints` are ZMQ addresses, ipc before tcp."""

    unit: int
    name: str
    host: str
    epoch: int
    endpoints: tuple[str, ...]
    arena_path: str
    capacity_bytes: int


# --- commands of a session --------------------------------------------------------------------------------------


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


# --- inputs -----------------------------------------------------------------------------------------------------


class Input(Value, frozen=True, kw_only=True):
    """Base of what `Ledger.apply` takes."""


class Call(Input, frozen=True, kw_only=True):
    """A command with its place: `number` counts up from 1 within the session, `watermark` is the session's lowest
    unanswered number (answers below it are forgotten, claims below it confirmed)."""

    session: int
    number: int
    watermark: int
    command: Command


class OpenSession(Input, frozen=True, kw_only=True):
    """`nonce` makes a retry find the same session. `host` is the client's boot id. Output: `Opened`."""

    nonce: str
    host: str
    name: str
    protocol_version: int


class Heartbeat(Input, frozen=True, kw_only=True):
    """The session's client was heard (every `Call` says so too)."""

    session: int


class SessionSilent(Input, frozen=True, kw_only=True):
    """The session's liveness stream ended without a Bye: find out now whether its process is gone."""

    session: int


class AddUnit(Input, frozen=True, kw_only=True):
    """A storage unit offers its arena. The same cookie again with a higher epoch, or after `UnitLost`, is the same unit
    coming back; a live cookie twice is refused. Output: `UnitAdded`."""

    name: str
    host: str
    epoch: int
    cookie: str
    capacity_bytes: int
    backed_bytes: int
    endpoints: tuple[str, ...]
    arena_path: str


class UnitLost(Input, frozen=True, kw_only=True):
    """The unit's stream ended. It gets no new rows; its rows stay located (clients find out for themselves)."""

    unit: int


class DropUnit(Input, frozen=True, kw_only=True):
    """Forgets a unit; with live rows on it only under `force`, which clears those rows. Output: `UnitDropped`."""

    unit: int
    force: bool = False


class SessionAttached(Input, frozen=True, kw_only=True):
    """The unit's handshake proved that the session's process shares its host and maps its arena."""

    unit: int
    session: int


class SessionGone(Input, frozen=True, kw_only=True):
    """The unit has proof: the session's lock was free (local), or the session is fenced (remote). Nothing of it can
    touch this unit's bytes any more."""

    unit: int
    session: int


class SessionAlive(Input, frozen=True, kw_only=True):
    """The unit tried the session's lock and found it held."""

    unit: int
    session: int


class Grown(Input, frozen=True, kw_only=True):
    """The arena is backed by memory up to `backed_bytes`. `error` says why it could not be more."""

    unit: int
    backed_bytes: int
    error: str | None = None


class Tick(Input, frozen=True, kw_only=True):
    """The clock: seconds, monotonic, never going back."""

    now: float


# --- outputs ----------------------------------------------------------------------------------------------------


class Output(Value, frozen=True, kw_only=True):
    """Base of what `Ledger.apply` returns, in the order in which it must leave."""


class Opened(Output, frozen=True, kw_only=True):
    nonce: str
    session: int = 0
    epoch: int = 0
    units: tuple[UnitInfo, ...] = ()
    error: DataPlaneError | None = None


class UnitAdded(Output, frozen=True, kw_only=True):
    cookie: str
    unit: int = 0
    error: DataPlaneError | None = None


class UnitDropped(Output, frozen=True, kw_only=True):
    unit: int
    error: DataPlaneError | None = None


class Answer(Output, frozen=True, kw_only=True):
    """The one answer of (session, number); `result` is a `Result` or the error to raise."""

    session: int
    number: int
    result: Result | DataPlaneError


class FenceSession(Output, frozen=True, kw_only=True):
    """To `unit`: end all this session can do to your bytes, then report `SessionGone`; a locally attached session whose
    lock is still held is reported `SessionAlive` instead (and is not fenced)."""

    unit: int
    session: int


class GrowArena(Output, frozen=True, kw_only=True):
    """To `unit`: back the arena up to `backed_bytes`, then report `Grown`."""

    unit: int
    backed_bytes: int


# --- results ----------------------------------------------------------------------------------------------------


class Result(Value, frozen=True, kw_only=True):
    """Base of what answers carry."""


class Done(Result, frozen=True, kw_only=True):
    """Nothing to tell."""


class UnitList(Result, frozen=True, kw_only=True):
    units: tuple[UnitInfo, ...]


class Described(Result, frozen=True, kw_only=True):
    """`fields` holds every declared or live field with what is fixed of its spec now."""

    partition: str
    fields: dict[str, FieldSpec]
    strict: bool
    tasks: tuple[str, ...]
    num_samples: int | None
    group_size: int | None
    sealed: bool
    live: int


class Allocated(Result, frozen=True, kw_only=True):
    """Covers every value of every column, ordered by (column, first)."""

    placements: tuple[Placement, ...]


class Committed(Result, frozen=True, kw_only=True):
    """Handles of the samples, in the command's order."""

    rows: Int64s
    births: Int64s


class Located(Result, frozen=True, kw_only=True):
    fields: tuple[FieldLocations, ...]
    rows: Int64s
    births: Int64s


class Claimed(Result, frozen=True, kw_only=True):
    """`fields` are those produced for all of the samples."""

    ids: tuple[str, ...]
    rows: Int64s
    births: Int64s
    fields: tuple[str, ...]
    tags: tuple[TagColumn, ...]


class Consumption(Result, frozen=True, kw_only=True):
    consumed: bool


class Cleared(Result, frozen=True, kw_only=True):
    count: int


class Listed(Result, frozen=True, kw_only=True):
    """`fields` are those produced for all of the samples."""

    ids: tuple[str, ...]
    rows: Int64s
    births: Int64s
    fields: tuple[str, ...]
    tags: tuple[TagColumn, ...]


class UnitStats(Value, frozen=True, kw_only=True):
    """Bytes: free + reserved + live + retired + unbacked = capacity. `pinned_bytes` overlaps the last three."""

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


class PartitionStats(Value, frozen=True, kw_only=True):
    """`claimed` and `produced` count live samples by task and by field."""

    partition: str
    live: int
    born: int
    num_samples: int | None
    sealed: bool
    live_bytes: int
    produced: dict[str, int]
    claimed: dict[str, int]
    waiting_claims: int


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
    epoch: int
    now: float
    units: tuple[UnitStats, ...]
    partitions: tuple[PartitionStats, ...]
    sessions: tuple[SessionStats, ...]
    waiting_allocations: int


class Blocked(Result, frozen=True, kw_only=True):
    """Counts of the task's unclaimed live samples: all, ready, and those lacking each field; `why` is one sentence."""

    unclaimed: int
    ready: int
    leased: int
    lacking: dict[str, int]
    why: str
