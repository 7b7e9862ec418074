"""Outputs of the ledger: answers, orders to storage units, and log entries."""

from __future__ import annotations

from dataplane.errors import DataPlaneError
from dataplane.ledger.commands.parts import UnitInfo, Value
from dataplane.ledger.commands.results import Result


class Output(Value, frozen=True, kw_only=True):
    """Base class of the outputs of `Ledger.apply`, which must leave in the order in which it returns them."""


class Opened(Output, frozen=True, kw_only=True):
    """The result of the `OpenSession` with this nonce: the number of the session and the storage units, or `error`."""

    nonce: str
    session: int = 0
    epoch: int = 0
    units: tuple[UnitInfo, ...] = ()
    error: DataPlaneError | None = None


class UnitAdded(Output, frozen=True, kw_only=True):
    """The result of the `AddUnit` with this cookie: the number of the unit, or `error`."""

    cookie: str
    unit: int = 0
    error: DataPlaneError | None = None


class UnitDropped(Output, frozen=True, kw_only=True):
    """The result of a `DropUnit`. `error`: why the unit was not dropped."""

    unit: int
    error: DataPlaneError | None = None


class Answer(Output, frozen=True, kw_only=True):
    """The only answer to call `number` of `session`. `result` is a `Result` or the error to raise."""

    session: int
    number: int
    result: Result | DataPlaneError


class FenceSession(Output, frozen=True, kw_only=True):
    """Order to `unit`: fence the session, which ends its access to the unit's bytes, then report `SessionGone`.
    A locally attached session whose lock is still held is not fenced; the unit reports `SessionAlive` instead.
    `lock_path` is the lock file of an attached session, for a unit that restarted since. All other sessions from
    `first` to `last` have ended and hold nothing; the unit refuses them as well."""

    unit: int
    session: int
    lock_path: str = ""
    first: int = 0
    last: int = 0


class Notice(Output, frozen=True, kw_only=True):
    """An entry for the log of the service. `warning`: an operator may have to act."""

    text: str
    warning: bool = True


class GrowArena(Output, frozen=True, kw_only=True):
    """Order to `unit`: back the arena up to `backed_bytes`, then report `Grown`."""

    unit: int
    backed_bytes: int


UnitOrder = FenceSession | GrowArena
