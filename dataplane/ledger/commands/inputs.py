"""What the ledger takes: numbered calls, and the reports of the shell and of the storage units."""

from __future__ import annotations

from dataplane.core.types import Checksums
from dataplane.ledger.commands.parts import Int64s, Value
from dataplane.ledger.commands.requests import Command


class Input(Value, frozen=True, kw_only=True):
    """Base of what `Ledger.apply` takes."""


class Call(Input, frozen=True, kw_only=True):
    """A command with its place: `number` counts up from 1 within the session, `watermark` is the session's lowest
    unanswered number, `confirmed` names answered numbers above it: the first and the last of a range, of the next one,
    and so on. Answers to numbers that are below the watermark or were ever named are forgotten, claims confirmed, and a
    late repetition is refused. A client names each number until a call that named it is answered."""

    session: int
    number: int
    watermark: int
    command: Command
    confirmed: tuple[int, ...] = ()


class OpenSession(Input, frozen=True, kw_only=True):
    """`nonce` makes a retry find the same session. `host` is the client's boot id. A session that goes on, maybe in
    another epoch of the service, says its number (`session`) and the `epoch` it knows: it is never given another
    number. `lock_path` is the file whose lock is held as long as the client's process lives; "" for one that never uses
    shared memory. Output: `Opened`."""

    nonce: str
    host: str
    name: str
    protocol_version: int
    session: int = 0
    epoch: int = 0
    lock_path: str = ""


class Heartbeat(Input, frozen=True, kw_only=True):
    """The session's client was heard (every `Call` says so too)."""

    session: int


class SessionSilent(Input, frozen=True, kw_only=True):
    """The session's liveness stream ended without a Bye: find out now whether its process is gone."""

    session: int


class AddUnit(Input, frozen=True, kw_only=True):
    """A storage unit offers its arena. The same cookie again with a higher epoch, or after `UnitLost`, or with the
    number that it has (`unit`), is the same unit coming back; a live cookie twice is refused otherwise, and so is a
    unit that has a number from a service that lost its state. Another `host` than before is the same machine, started
    anew. `fsynced`: what is written there outlives the machine. `recheck`: its rows are to be checked before they are
    read. `instead_of` is the cookie of the arena it had before, which is lost with its rows. `anew`: it had one and
    cannot tell which; if that cookie is unknown too, it is what lost units of its name (those of its host, if there
    are some) had. `shrinks` is the number of the last `ShrinkArena` it has carried out, `compactions` that of the last
    `CompactArena`. Output: `UnitAdded`."""

    name: str
    host: str
    epoch: int
    cookie: str
    capacity_bytes: int
    backed_bytes: int
    endpoints: tuple[str, ...]
    arena_path: str
    unit: int = 0
    fsynced: bool = False
    recheck: bool = False
    instead_of: str = ""
    curve_key: str = ""
    shrinks: int = 0
    anew: bool = False
    compactions: int = 0


class UnitLost(Input, frozen=True, kw_only=True):
    """The unit's stream ended. It gets no new rows; its rows stay located (clients find out for themselves)."""

    unit: int


class DropUnit(Input, frozen=True, kw_only=True):
    """Forgets a unit; with live rows on it only under `force`, which clears those rows. Output: `UnitDropped`."""

    unit: int
    force: bool = False


class SessionAttached(Input, frozen=True, kw_only=True):
    """The unit's handshake proved that the session's process shares its host and maps its arena. `lock_path` is the
    file whose lock is held as long as that process lives."""

    unit: int
    session: int
    lock_path: str = ""


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
    """The arena is backed by memory up to `backed_bytes`. `error` says why it could not be more. `shrinks` is the
    number of the last `ShrinkArena` that was carried out before."""

    unit: int
    backed_bytes: int
    error: str | None = None
    shrinks: int = 0


class Shrunk(Input, frozen=True, kw_only=True):
    """The unit has carried out `ShrinkArena` of this `number` (again, perhaps); its arena is backed up to
    `backed_bytes`. `error` says why the memory did not go back to the machine."""

    unit: int
    number: int
    backed_bytes: int
    error: str | None = None


class Compacted(Input, frozen=True, kw_only=True):
    """The unit has carried out `CompactArena` of this `number` (again, perhaps). `error` says why the copies cannot be
    used."""

    unit: int
    number: int
    error: str | None = None


class RowsChecked(Input, frozen=True, kw_only=True):
    """Of the rows of one `CheckRows`, up to row `last` of a field, those whose bytes were not those of their checksum:
    row, generation and where in the arena."""

    unit: int
    partition: str
    field: str
    last: int
    rows: Int64s
    generations: Int64s
    offsets: Int64s


class Restarted(Input, frozen=True, kw_only=True):
    """The ledger was made again from its log, in a new epoch of the service: `epoch` is greater than any before. Units
    have to offer themselves again, every session has its full time to be heard, and leases begin again in full. The
    settings are those of the new epoch."""

    epoch: int
    reserve_fraction: float
    heartbeat_s: float
    session_timeout_s: float
    checksums: Checksums = Checksums.ACROSS_HOSTS
    low_watermark: float = 0.75
    high_watermark: float = 0.9


class Tick(Input, frozen=True, kw_only=True):
    """The clock: seconds, monotonic, never going back."""

    now: float
