"""Inputs of the ledger: calls, and reports of the shell and of the storage units.

Outputs of the ledger (`Output`): answers, orders to storage units, and log entries.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Annotated

import msgspec

from dataplane.core.types import Checksums
from dataplane.errors import DataPlaneError
from dataplane.ledger.commands import inspection as inspection  # its commands, too, are in `AnyCommand`
from dataplane.ledger.commands import short as short  # and this one
from dataplane.ledger.commands.requests import Answered, Command
from dataplane.ledger.commands.results import Result
from dataplane.ledger.commands.values import Int64, Natural, UnitInfo, Value

if TYPE_CHECKING:
    AnyCommand = Command
else:  # the types that a decoder accepts
    AnyCommand = functools.reduce(operator.or_, Answered.__subclasses__())


class Input(Value, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base class of the inputs of `Ledger.apply`. `encoding.messages` has their encoded form."""


class Call(Input, frozen=True, kw_only=True):
    """A command of a session. `call_id` counts up from 1 within the session. `watermark` is the
    session's lowest unanswered call id. `confirmed` lists answered call ids above the watermark as
    inclusive ranges: first and last of one range, then of the next. The ledger forgets answers
    below the watermark or in `confirmed`, makes their claims final, ends the pins of `LocateRows`,
    and refuses late repetitions of these calls. A client repeats a confirmed call until a call that
    carried it is answered."""

    session: Natural
    call_id: Natural
    watermark: Natural
    command: AnyCommand
    confirmed: tuple[Natural, ...] = ()


class OpenSession(Input, frozen=True, kw_only=True):
    """Open a session, or continue one. Output: `Opened`. `nonce` lets a retry find the same session. `host` is
    the client's boot id. A client that continues a session, possibly in another epoch of the service, sends the
    session's id (`session`) and the `epoch` that it expects; it never gets another id. `lock_path` is
    the file that the client process keeps locked while it runs; "" for a client that never uses shared memory."""

    nonce: str
    host: str
    name: str
    protocol_version: Int64
    session: Int64 = 0
    epoch: Int64 = 0
    lock_path: str = ""


class Identify(Value, frozen=True, kw_only=True, tag=True, array_like=True):
    """A storage unit asks for the name of the service's state, before it sends `AddUnit`. The controller answers it
    without the ledger."""

    protocol_version: Int64


class Heartbeat(Input, frozen=True, kw_only=True):
    """The session's client was heard from. Every `Call` implies this."""

    session: Int64


class SessionSilent(Input, frozen=True, kw_only=True):
    """The connection with the session's heartbeats ended without a `Bye`: check at once whether its process still
    runs."""

    session: Int64


class AddUnit(Input, frozen=True, kw_only=True):
    """A storage unit offers its arena. Output: `UnitAdded`.

    `host` is the boot id of its host. `cookie` is the random content of the arena's header, which
    identifies the arena. `backed_bytes` of the arena are backed by memory. `endpoints` are the ZMQ
    addresses of the unit's server, ipc before tcp. `curve_key` is its public key in z85 ("":
    unencrypted).

    An offer with a known cookie is the same unit coming back if its epoch is higher, or if its epoch is the same and it
    follows `UnitLost` or carries the unit's id (`unit`). Otherwise it is refused. An offer with an id but an
    unknown cookie is refused too: its id comes from a service that lost its state.

    `instead_of` is the cookie of the unit's previous arena, which is lost with its rows.
    `anew`: the unit lost its arena and cannot name it. If `instead_of` is unknown too, all disconnected units of its
    name (those on its host, if any) count as lost.
    """

    name: str
    host: str
    epoch: Int64
    cookie: Annotated[str, msgspec.Meta(min_length=1)]
    capacity_bytes: Natural
    backed_bytes: Natural
    endpoints: tuple[Annotated[str, msgspec.Meta(pattern="^(ipc|tcp)://.")], ...]
    arena_path: str
    unit: Natural = 0
    instead_of: str = ""
    curve_key: Annotated[str, msgspec.Meta(pattern="^(.{40})?$")] = ""
    anew: bool = False


class UnitLost(Input, frozen=True, kw_only=True):
    """The unit's connection ended. It gets no new rows. Its rows stay located, and clients detect failed reads
    themselves."""

    unit: Int64


class DropUnit(Input, frozen=True, kw_only=True):
    """Forget a unit. If live rows lie on it, `force` is required and clears those rows. Output: `UnitDropped`."""

    unit: Int64
    force: bool = False


class SessionAttached(Input, frozen=True, kw_only=True):
    """The unit's handshake proved that the session's process shares its host and maps its arena. `lock_path` is
    the file that the process keeps locked while it runs."""

    unit: Int64
    session: Int64
    lock_path: str = ""


class SessionGone(Input, frozen=True, kw_only=True):
    """The unit has proof that the session can no longer access its bytes: the session's lock was free (local
    session), or the session is fenced (remote session)."""

    unit: Int64
    session: Int64


class SessionAlive(Input, frozen=True, kw_only=True):
    """The unit tried the session's lock and found it held."""

    unit: Int64
    session: Int64


class Grown(Input, frozen=True, kw_only=True):
    """The arena is backed by memory up to `backed_bytes`. `error` says why it is not more."""

    unit: Int64
    backed_bytes: Int64
    error: str | None = None


UnitReport = SessionAttached | SessionGone | SessionAlive | Grown
"""What a registered storage unit sends."""


class Restarted(Input, frozen=True, kw_only=True):
    """The ledger was restored from its log in a new epoch of the service. `epoch` is greater than all earlier
    ones. Units must offer themselves again, every session gets its full timeout to be heard, and leases start
    again in full. The settings are those of the new epoch."""

    epoch: Int64
    reserve_fraction: float
    heartbeat_s: float
    session_timeout_s: float
    checksums: Checksums = Checksums.ACROSS_HOSTS
    low_watermark: float = 0.75
    high_watermark: float = 0.9


class Tick(Input, frozen=True, kw_only=True):
    """Advance the clock to `now`, in seconds. The clock is monotonic."""

    now: float


class Output(Value, frozen=True, kw_only=True):
    """Base class of the outputs of `Ledger.apply`, which must leave in the order in which it returns them."""


class Opened(Output, frozen=True, kw_only=True):
    """The result of the `OpenSession` with this nonce: the id of the session and the storage units, or `error`."""

    nonce: str
    session: int = 0
    epoch: int = 0
    units: tuple[UnitInfo, ...] = ()
    error: DataPlaneError | None = None


class UnitAdded(Output, frozen=True, kw_only=True, tag=True):
    """The result of the `AddUnit` with this cookie: the id of the unit, or `error`."""

    cookie: str
    unit: int = 0
    error: DataPlaneError | None = None


class UnitDropped(Output, frozen=True, kw_only=True):
    """The result of a `DropUnit`. `error`: why the unit was not dropped."""

    unit: int
    error: DataPlaneError | None = None


class Answer(Output, frozen=True, kw_only=True):
    """The only answer to call `call_id` of `session`. `result` is a `Result` or the error to raise."""

    session: int
    call_id: int
    result: Result | DataPlaneError


class FenceSession(Output, frozen=True, kw_only=True, tag=True):
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


class GrowArena(Output, frozen=True, kw_only=True, tag=True):
    """Order to `unit`: back the arena up to `backed_bytes`, then report `Grown`."""

    unit: int
    backed_bytes: int


UnitOrder = FenceSession | GrowArena
