"""The client side of exactly-once execution: call ids, the watermark, and the settlement of abandoned calls.

This module has no I/O, clock or locks: the caller reports sent calls and responses, from one thread at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain, islice

from dataplane.ledger.commands import (
    Abort,
    Allocate,
    Call,
    Claim,
    Command,
    Commit,
    FindCells,
    Locate,
    LocateRows,
    Move,
    Preallocate,
    Release,
    Save,
    Unclaim,
)


@dataclass(slots=True)
class _Open:
    """A call whose id is not settled. `settles`: the abandoned call that the response to this call settles, too.
    `listed`: count of settled calls of the session, up to the last one that this call listed in `confirmed`."""

    command: Command
    posted: bool
    sent_at: float
    listed: int
    settles: int | None = None
    abandoned: bool = False


MOST_RANGES = 1024
"""Maximum number of ranges of settled ids in one call; later calls list the rest."""


class CallIds:
    """Issues the call ids of one session and tracks unanswered ones.

    The watermark is the lowest unanswered id. Answered ids above it are listed in each call (`confirmed`)
    until a call that listed them is answered: even if one call waits long, the next call confirms the others. An
    abandoned call counts as unanswered until the command that undoes it is answered. The service therefore still
    has the call when the undo arrives, and never receives a confirmation of a claim whose response was dropped.
    """

    def __init__(self, session: int) -> None:
        self.session = session
        self.confirms = True  # whether calls confirm the answers that have arrived
        self.ended_read: int | None = None
        """The last call passed to `settle`, if no call has confirmed it since."""
        self._next = 1
        self._open: dict[int, _Open] = {}  # the calls that are not settled, ascending
        self._settled: deque[list[int]] = deque()
        """Ranges [first, last] of settled ids in the order of their settlement, without the first
        `_forgotten_count` of all `_settled_count` settled ids."""
        self._settled_count = 0
        self._forgotten_count = 0

    @property
    def watermark(self) -> int:
        """The lowest unanswered id, or the next id if all are answered."""
        return next(iter(self._open), self._next)

    @property
    def confirmed(self) -> tuple[int, ...]:
        """Ranges of answered ids above the watermark that the service may not have seen: first, last, first,
        ..."""
        watermark = self.watermark
        ranges = islice(self._settled, MOST_RANGES)
        # The watermark covers ranges that end below it.
        return tuple(chain.from_iterable([each for each in ranges if each[1] > watermark]))

    @property
    def unanswered(self) -> int:
        """The count of unanswered calls."""
        return len(self._open)

    def issue(self, command: Command, *, now: float, posted: bool = False) -> Call:
        """Assign a new id to `command`, which is about to be sent. `posted`: no caller waits for it; `due`
        returns it for resending."""
        call_id = self._next
        listed = self._count_listed() if self._settled else self._settled_count
        self._open[call_id] = _Open(command, posted, now, listed)
        self._next += 1
        return self._call(call_id)

    def repeat(self, call_id: int, *, now: float) -> Call:
        """Return an unanswered call for resending."""
        self._open[call_id].sent_at = now  # `listed` stays: the first sending, which listed less, may be answered
        return self._call(call_id)

    def is_open(self, call_id: int) -> bool:
        """Return whether the id was issued and is not settled yet."""
        return call_id in self._open

    def record_answer(self, call_id: int, *, processed: bool = True) -> None:
        """Settle a call after its response (duplicate and late responses included). An abandoned call
        stays open until its undo is answered, and a brief read (see `Locate`) until `settle`, because
        its bytes may still be read. `processed`: the response proves that the service processed the
        ids that the call confirmed; they are not listed again."""
        entry = self._open.get(call_id)
        if entry is None or entry.abandoned:
            return
        if processed and entry.listed > self._forgotten_count:
            # Drop the ids that this call listed, without those dropped since.
            self._forget(entry.listed - self._forgotten_count)
        command = entry.command
        if isinstance(command, LocateRows) or (isinstance(command, Locate) and command.brief):
            return
        self._remove(call_id)
        if entry.settles is not None:
            self._remove(entry.settles)

    def settle(self, call_id: int) -> None:
        """Settle a brief read whose bytes are not read any longer, or a call of which nothing is
        needed. The next call confirms it, which ends the pins of a read."""
        self._remove(call_id)
        self.ended_read = call_id

    def abandon(self, call_id: int, *, now: float) -> Call | None:
        """Abandon a call: its response will not be used. Return the posted call that undoes it, or None if it needs
        no undo.

        A call without an undo is settled immediately: if it was not executed yet, it never will be.
        """
        entry = self._open.get(call_id)
        if entry is None or entry.abandoned:
            return None
        undo = undo_of(call_id, entry.command)
        if undo is None:
            self.settle(call_id)
            return None
        entry.abandoned = True
        call = self.issue(undo, now=now, posted=True)
        self._open[call.call_id].settles = call_id
        return call

    def due(self, sent_before: float) -> list[int]:
        """Return the posted, unanswered calls that were last sent before `sent_before`."""
        return [call_id for call_id, entry in self._open.items() if entry.posted and entry.sent_at < sent_before]

    def _remove(self, call_id: int) -> None:
        """Remove an open call. Add its id to the settled ones, which calls list, unless the
        watermark covers it. Idempotent."""
        if self._open.pop(call_id, None) is None or next(iter(self._open), call_id) >= call_id:
            return
        if self._settled and self._settled[-1][1] == call_id - 1:
            self._settled[-1][1] = call_id
        else:
            self._settled.append([call_id, call_id])
        self._settled_count += 1

    def _count_listed(self) -> int:
        """Return the count of settled calls up to the last one that a call lists now (see `confirmed`). First forget
        the oldest ranges that the watermark covers."""
        watermark = self.watermark
        while self._settled and self._settled[0][1] < watermark:
            self._forget(self._settled[0][1] - self._settled[0][0] + 1)
        if len(self._settled) <= MOST_RANGES:  # the call lists all of them
            return self._settled_count
        return self._forgotten_count + sum([last - first + 1 for first, last in islice(self._settled, MOST_RANGES)])

    def _forget(self, count: int) -> None:
        """Drop the oldest `count` ids of `_settled`: the service has them, or derives them from the
        watermark."""
        self._forgotten_count += count
        while count > 0:
            first, last = oldest = self._settled[0]
            if last - first >= count:
                oldest[0] += count  # only a part of this range
                return
            self._settled.popleft()
            count -= last - first + 1

    def _call(self, call_id: int) -> Call:
        """Return the open call with the confirmations as of now."""
        self.ended_read = None
        return Call(
            session=self.session,
            call_id=call_id,
            watermark=next(iter(self._open)) if self.confirms else 0,
            confirmed=self.confirmed if self._settled and self.confirms else (),
            command=self._open[call_id].command,
        )


def undo_of(call_id: int, command: Command) -> Command | None:
    """Return the command that reverts a call with unknown outcome, or None if the call holds no resources."""
    match command:
        case Allocate() | Preallocate():
            return Abort(reservation=call_id)
        case Commit(reservation=int(reservation), offset=None):
            # If the commit was executed, the abort has no effect; if it was lost, its reservation must be released.
            # With an offset, the space is preallocated, and `PreallocatedBuffer` releases it.
            return Abort(reservation=reservation)
        case Move(reservation=int(reservation)):
            return Abort(reservation=reservation)
        case Locate(brief=False) | Save() | FindCells():
            return Release(located=call_id)
        case Claim():
            return Unclaim(claimed=call_id)
    return None
