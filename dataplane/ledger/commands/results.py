"""What answers carry."""

from __future__ import annotations

from dataplane.ledger.commands.parts import FieldLocations, Int64s, Placement, TagColumn, UnitInfo, Value
from dataplane.types import FieldSpec


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
