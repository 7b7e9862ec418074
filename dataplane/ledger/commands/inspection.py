"""Commands that inspect a running service in detail, and their results: for people and dashboards, not for
programs that move samples."""

from __future__ import annotations

import enum

from dataplane.core.types import FieldSpec, Scalar
from dataplane.ledger.commands.requests import Answered
from dataplane.ledger.commands.results import Result
from dataplane.ledger.commands.values import Int64, Int64s, Samples, Value


class TaskMatrix(Value, frozen=True, kw_only=True):
    """Of the samples examined in each part: how many the task has `claimed`, and how many of these are `leased`."""

    task: str
    claimed: Int64s
    leased: Int64s


class Matrix(Result, frozen=True, kw_only=True):
    """The live samples of a partition in equal parts, oldest first. `samples` counts the samples of each part,
    `examined` those that were examined: all, or in a large partition some of each part, evenly spread.
    `produced` counts how many examined samples have each field. `first_generation` and `last_generation` are the
    generations of the oldest and the youngest sample (0: no live sample)."""

    partition: str
    live: int
    first_generation: int
    last_generation: int
    samples: Int64s
    examined: Int64s
    produced: dict[str, Int64s]
    tasks: tuple[TaskMatrix, ...]


class Inspect(Answered[Matrix], frozen=True, kw_only=True):
    """Return how much of a partition is produced and consumed, by age, in at most `columns` parts. Answered
    `Matrix`."""

    partition: str
    columns: Int64


class TaskState(enum.StrEnum):
    """The state of a sample for a task. HELD: the sample is in the share of a data-parallel rank that has not
    claimed it yet."""

    UNCLAIMED = "unclaimed"
    HELD = "held"
    LEASED = "leased"
    CLAIMED = "claimed"


class ShownTask(Value, frozen=True, kw_only=True):
    """`lacking`: fields of the task's latest claim that the sample does not have. `client`: the client that
    leases it ("": none). `until`: when the lease or hold ends, by the ledger's clock (None: neither)."""

    task: str
    state: TaskState
    lacking: tuple[str, ...]
    client: str = ""
    until: float | None = None


class ShownCell(Value, frozen=True, kw_only=True):
    """One field of a sample: `size_bytes` from `offset` in the arena of `unit`; `length` is in the spec's units.
    `shared`: other samples share its bytes. `pinned`: a reader pins its extent now, which may hold neighbouring
    cells."""

    field: str
    spec: FieldSpec
    unit: int
    offset: int
    length: int
    size_bytes: int
    pinned: bool
    shared: bool


class Shown(Result, frozen=True, kw_only=True):
    """`since` is when the sample was born, by the ledger's clock `now`. `missing` are known fields that it lacks."""

    partition: str
    sample: str
    row: int
    generation: int
    since: float
    now: float
    cells: tuple[ShownCell, ...]
    missing: tuple[str, ...]
    tags: dict[str, Scalar]
    tasks: tuple[ShownTask, ...]


class Show(Answered[Shown], frozen=True, kw_only=True):
    """Return all facts about one sample of `partition`, or with "" of the first registered partition that has
    its id. Answered `Shown`."""

    partition: str = ""
    samples: Samples


class MemoryMap(Result, frozen=True, kw_only=True):
    """Bytes by address: part i covers [i * cell_bytes, (i + 1) * cell_bytes) of the arena. Backed
    bytes that are neither live, reserved (by puts) nor retired (cleared, still read) are free;
    `pinned` (held by readers) overlaps these three. `fragments` counts the free ranges, `extents`
    the columns of puts that hold bytes."""

    unit: int
    capacity_bytes: int
    backed_bytes: int
    cell_bytes: int
    live: Int64s
    reserved: Int64s
    retired: Int64s
    pinned: Int64s
    free_bytes: int
    largest_free_bytes: int
    fragments: int
    extents: int


class MapMemory(Answered[MemoryMap], frozen=True, kw_only=True):
    """Return how the bytes of a unit's arena are used, in at most `cells` equal parts. Answered `MemoryMap`."""

    unit: Int64
    cells: Int64


class WaitKind(enum.StrEnum):
    """What a call waits for: samples (CLAIM) or space (PUT)."""

    CLAIM = "claim"
    PUT = "put"


class Wait(Value, frozen=True, kw_only=True):
    """A call that waits. For a claim, `wanted` is the minimum number of samples with all `fields`, and `ready`
    how many are ready now. For a put, `wanted` is its bytes, and `ready` the free bytes of all units together.
    `since` and `until` are by the ledger's clock."""

    session: int
    client: str
    what: WaitKind
    partition: str
    task: str
    fields: tuple[str, ...]
    wanted: int
    ready: int
    since: float
    until: float


class WaitList(Result, frozen=True, kw_only=True):
    """`now` is the ledger's clock. `total` includes the calls beyond the limit."""

    now: float
    waits: tuple[Wait, ...]
    total: int


class Waits(Answered[WaitList], frozen=True, kw_only=True):
    """List waiting calls, longest wait first: those of `partition` ("": all), claims of `task` ("": of all
    tasks, and puts), at most `limit` (0: all). Answered `WaitList`."""

    partition: str = ""
    task: str = ""
    limit: Int64 = 0
