"""Commands that look closely at a running service, and what answers them: for people and pictures, not for programs
that move samples."""

from __future__ import annotations

import enum

from dataplane.core.types import FieldSpec, Scalar
from dataplane.ledger.commands.parts import Int64s, Samples, Value
from dataplane.ledger.commands.requests import Answered
from dataplane.ledger.commands.results import Result


class TaskMatrix(Value, frozen=True, kw_only=True):
    """Of the samples examined in each part: how many the task has `claimed`, and how many of these are `leased`."""

    task: str
    claimed: Int64s
    leased: Int64s


class Matrix(Result, frozen=True, kw_only=True):
    """The live samples of a partition in equal parts, oldest first. `samples` counts those in each part, `examined`
    those that were looked at: all, or where there are very many some of each part, evenly spread. `produced` counts
    how many of them have each field. `first_generation`, `last_generation`: the generation numbers of the oldest and
    the youngest (0: none lives)."""

    partition: str
    live: int
    first_generation: int
    last_generation: int
    samples: Int64s
    examined: Int64s
    produced: dict[str, Int64s]
    tasks: tuple[TaskMatrix, ...]


class Inspect(Answered[Matrix], frozen=True, kw_only=True):
    """What of a partition is produced and consumed, in `columns` parts at most, by age. Answered `Matrix`."""

    lasting = False
    partition: str
    columns: int


class TaskState(enum.StrEnum):
    """How a task stands to a sample. HELD: it is in the share of a data-parallel rank that has not come for it."""

    UNCLAIMED = "unclaimed"
    HELD = "held"
    LEASED = "leased"
    CLAIMED = "claimed"


class ShownTask(Value, frozen=True, kw_only=True):
    """`lacking`: fields that the task's latest claim wanted and the sample does not have. `client`: who leases it ("":
    nobody), until `until` by the ledger's clock (None: nobody)."""

    task: str
    state: TaskState
    lacking: tuple[str, ...]
    client: str = ""
    until: float | None = None


class ShownCell(Value, frozen=True, kw_only=True):
    """One field of a sample: `size_bytes` from `offset` in the arena of `unit`; `length` is in the spec's units.
    `shared`: its bytes are other samples' too. `pinned`: somebody reads them, or their neighbours, now."""

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
    """Everything about one sample of `partition`, or of the first that has it ("": in the order of registration; it is
    named by its id then). Answered `Shown`."""

    lasting = False
    partition: str = ""
    samples: Samples


class MemoryMap(Result, frozen=True, kw_only=True):
    """Bytes by address: part i covers [i * cell_bytes, (i + 1) * cell_bytes) of the arena. What is backed and neither
    live, reserved nor retired is free; `pinned` overlaps these three. `fragments` counts the free ranges."""

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
    """What the bytes of a unit's arena are, in `cells` equal parts at most. Answered `MemoryMap`."""

    lasting = False
    unit: int
    cells: int


class WaitKind(enum.StrEnum):
    """What is waited for: samples, or space."""

    CLAIM = "claim"
    PUT = "put"


class Wait(Value, frozen=True, kw_only=True):
    """A call that waits: of a claim, `wanted` samples (the fewest that it takes) with all `fields`, of which `ready`
    are there now; of a put, `wanted` bytes, of which `ready` are free in all units together. From `since` until
    `until`, by the ledger's clock."""

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
    """`now` is the ledger's clock. `total` counts those beyond the limit, too."""

    now: float
    waits: tuple[Wait, ...]
    total: int


class Waits(Answered[WaitList], frozen=True, kw_only=True):
    """Who waits for what, longest first: for `partition` ("": any), claims of `task` ("": of any, and puts), at most
    `limit` (0: all). Answered `WaitList`."""

    lasting = False
    partition: str = ""
    task: str = ""
    limit: int = 0
