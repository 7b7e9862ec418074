"""The client's half of "exactly once": numbers, the watermark, and what becomes of calls that nobody waits for.

No I/O, no clock and no locks: whoever drives it says what was sent and answered, one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.ledger.commands import (
    Abort,
    Allocate,
    AllocateAhead,
    Call,
    Claim,
    Command,
    Commit,
    FindCells,
    Locate,
    Move,
    Release,
    Save,
    Unclaim,
)


@dataclass(slots=True)
class _Open:
    """A number without an answer. `settles`: the abandoned number whose fate is known when this one is answered."""

    command: Command
    posted: bool
    sent_at: float
    settles: int | None = None
    abandoned: bool = False


HOLD = 2048
"""How far numbers run ahead of an unanswered one before the watermark goes past it: half of what the ledger takes."""


class Numbering:
    """Numbers the calls of one session and knows which are unanswered.

    The watermark is the lowest unanswered number; one that is `hold` behind the newest is named apart, so that a call
    that waits for hours does not stop the others. An abandoned call counts as unanswered
    until the command that undoes it is answered, so that an undo always finds what it is to undo, and a claim whose
    answer nobody took is never confirmed.
    """

    def __init__(self, session: int, *, hold: int = HOLD) -> None:
        self.session = session
        self._hold = hold
        self._next = 1
        self._open: dict[int, _Open] = {}

    @property
    def watermark(self) -> int:
        """The lowest unanswered number that is not `waiting`; the next number if there is none."""
        return self._view()[0]

    @property
    def waiting(self) -> tuple[int, ...]:
        """The unanswered numbers below the watermark."""
        return self._view()[1]

    def _view(self) -> tuple[int, tuple[int, ...]]:
        waiting: list[int] = []
        for number in self._open:
            if number >= self._next - self._hold:
                return number, tuple(waiting)
            waiting.append(number)
        return self._next, tuple(waiting)

    @property
    def unanswered(self) -> int:
        """How many numbers are."""
        return len(self._open)

    def issue(self, command: Command, *, now: float, posted: bool = False) -> Call:
        """A new number for `command`, about to be sent. `posted`: nobody waits; `due` tells when to repeat it."""
        number = self._next
        self._next += 1
        self._open[number] = _Open(command, posted, now)
        return self._call(number)

    def repeat(self, number: int, *, now: float) -> Call:
        """The call of an unanswered number again, about to be sent once more."""
        self._open[number].sent_at = now
        return self._call(number)

    def is_open(self, number: int) -> bool:
        """Whether the number was issued and not settled yet."""
        return number in self._open

    def answered(self, number: int) -> None:
        """An answer came (also a second time, also late). An abandoned number stays open until its undo is answered."""
        entry = self._open.get(number)
        if entry is None or entry.abandoned:
            return
        del self._open[number]
        if entry.settles is not None:
            self._open.pop(entry.settles, None)

    def abandon(self, number: int, *, now: float) -> Call | None:
        """Nobody will use the answer of `number`. The posted call to send that undoes it; None if nothing is to undo.

        A call without an undo is below the watermark at once: if it has not been executed yet, it never will be.
        """
        entry = self._open.get(number)
        if entry is None or entry.abandoned:
            return None
        undo = undo_of(number, entry.command)
        if undo is None:
            del self._open[number]
            return None
        entry.abandoned = True
        call = self.issue(undo, now=now, posted=True)
        self._open[call.number].settles = number
        return call

    def due(self, sent_before: float) -> list[int]:
        """Posted numbers still unanswered that were last sent before `sent_before`."""
        return [number for number, entry in self._open.items() if entry.posted and entry.sent_at < sent_before]

    def _call(self, number: int) -> Call:
        watermark, waiting = self._view()
        command = self._open[number].command
        return Call(session=self.session, number=number, watermark=watermark, waiting=waiting, command=command)


def undo_of(number: int, command: Command) -> Command | None:
    """What takes back a call whose fate is unknown, if it may hold something."""
    match command:
        case Allocate() | AllocateAhead():
            return Abort(reservation=number)
        case Commit(reservation=int(reservation), offset=None):
            # Executed, it holds nothing any more and the abort does nothing; lost, its reservation must go back.
            return Abort(reservation=reservation)
        case Move(reservation=int(reservation)):
            return Abort(reservation=reservation)
        case Locate() | Save() | FindCells():
            return Release(located=number)
        case Claim():
            return Unclaim(claimed=number)
    return None
