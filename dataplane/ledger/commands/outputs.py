"""What the ledger gives out: answers, and orders to storage units."""

from __future__ import annotations

from dataplane.errors import DataPlaneError
from dataplane.ledger.commands.parts import Int64s, UInt32s, UnitInfo, Value
from dataplane.ledger.commands.results import Result


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
    lock is still held is reported `SessionAlive` instead (and is not fenced). `lock_path` is where the lock is of one
    that attached, for a unit that was restarted since. Of the sessions from `first` to `last`, all others are over and
    hold nothing: they are to be refused with it."""

    unit: int
    session: int
    lock_path: str = ""
    first: int = 0
    last: int = 0


class Notice(Output, frozen=True, kw_only=True):
    """For the log of the service: something a person should know, or act upon (`warning`)."""

    text: str
    warning: bool = True


class GrowArena(Output, frozen=True, kw_only=True):
    """To `unit`: back the arena up to `backed_bytes`, then report `Grown`."""

    unit: int
    backed_bytes: int


class ShrinkArena(Output, frozen=True, kw_only=True):
    """To `unit`: forget orders to grow that came before, give the memory from `backed_bytes` on back to the machine,
    then report `Shrunk`. Only report it if an order of this `number` was carried out already."""

    unit: int
    number: int
    backed_bytes: int


class CompactArena(Output, frozen=True, kw_only=True):
    """To `unit`: copy `sizes[i]` bytes from `sources[i]` to `targets[i]` of the arena, then report `Compacted`. Only
    report it if an order of this `number` was carried out already. No range overlaps another."""

    unit: int
    number: int
    sources: Int64s
    targets: Int64s
    sizes: Int64s


class CheckRows(Output, frozen=True, kw_only=True):
    """To `unit`: compare these rows of one field with their checksums, then report `RowsChecked`. Row `rows[i]` is
    `sizes[i]` bytes at `offsets[i]` of the arena."""

    unit: int
    partition: str
    field: str
    rows: Int64s
    generations: Int64s
    offsets: Int64s
    sizes: Int64s
    checksums: UInt32s


UnitOrder = FenceSession | GrowArena | ShrinkArena | CompactArena | CheckRows
