"""The client's half of "exactly once": numbers, the watermark, and what becomes of calls that nobody waits for.

No I/O, no clock and no locks: whoever drives it says what was sent and answered, one thread at a time.
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
    Move,
    Preallocate,
    Release,
    Save,
    Unclaim,
)


@dataclass(slots=True)
class _Open:
    """A number without an answer. `settles`: the abandoned number whose fate is known when this one is answered.
    `named`: how many numbers the session had settled up to the last that this call named as `confirmed`."""

    command: Command
    posted: bool
    sent_at: float
    named: int
    settles: int | None = None
    abandoned: bool = False


MOST_NAMED = 1024
"""How many ranges of settled numbers one call names; later ones name the rest."""


class CallNumbers:
    """Numbers the calls of one session and knows which are unanswered.

    The watermark is the lowest unanswered number. Numbers above it that are answered are named in each call
    (`confirmed`) until a call that named them is answered: however long one call waits, the others are confirmed by the
    next call. An abandoned call counts as unanswered until the command that undoes it is answered, so that an undo
    always finds what it is to undo, and a claim whose answer nobody took is never confirmed.
    """

    def __init__(self, session: int) -> None:
        self.session = session
        self._next = 1
        self._open: dict[int, _Open] = {}
        self._settled: deque[list[int]] = deque()
        """Ranges (first and last) in the order in which they were settled, after the first `_known` of `_count`."""
        self._count = 0
        self._known = 0

    @property
    def watermark(self) -> int:
        """The lowest unanswered number; the next number if there is none."""
        return next(iter(self._open), self._next)

    @property
    def confirmed(self) -> tuple[int, ...]:
        """Ranges of the answered numbers above the watermark that the service may not know of: first, last, first..."""
        if not self._settled:
            return ()
        watermark = self.watermark
        return tuple(chain.from_iterable([run for run in islice(self._settled, MOST_NAMED) if run[1] > watermark]))

    @property
    def unanswered(self) -> int:
        """How many numbers are."""
        return len(self._open)

    def issue(self, command: Command, *, now: float, posted: bool = False) -> Call:
        """A new number for `command`, about to be sent. `posted`: nobody waits; `due` tells when to repeat it."""
        number = self._next
        self._next += 1
        self._open[number] = _Open(command, posted, now, self._named())
        return self._call(number)

    def repeat(self, number: int, *, now: float) -> Call:
        """The call of an unanswered number again, about to be sent once more."""
        self._open[number].sent_at = now
        return self._call(number)

    def is_open(self, number: int) -> bool:
        """Whether the number was issued and not settled yet."""
        return number in self._open

    def answered(self, number: int, *, heard: bool = True) -> None:
        """An answer came (also a second time, also late). An abandoned number stays open until its undo is answered.
        `heard`: the answer shows that the service took in what the call named."""
        entry = self._open.get(number)
        if entry is None or entry.abandoned:
            return
        if heard:
            self._forget(entry.named - self._known)
        self._settle(number)
        if entry.settles is not None:
            self._settle(entry.settles)

    def abandon(self, number: int, *, now: float) -> Call | None:
        """Nobody will use the answer of `number`. The posted call to send that undoes it; None if nothing is to undo.

        A call without an undo is settled at once: if it has not been executed yet, it never will be.
        """
        entry = self._open.get(number)
        if entry is None or entry.abandoned:
            return None
        undo = undo_of(number, entry.command)
        if undo is None:
            self._settle(number)
            return None
        entry.abandoned = True
        call = self.issue(undo, now=now, posted=True)
        self._open[call.number].settles = number
        return call

    def due(self, sent_before: float) -> list[int]:
        """Posted numbers still unanswered that were last sent before `sent_before`."""
        return [number for number, entry in self._open.items() if entry.posted and entry.sent_at < sent_before]

    def _settle(self, number: int) -> None:
        if self._open.pop(number, None) is None:
            return
        if self._settled and self._settled[-1][1] == number - 1:
            self._settled[-1][1] = number
        else:
            self._settled.append([number, number])
        self._count += 1

    def _named(self) -> int:
        """How many numbers were settled up to the last that a call names now."""
        watermark = self.watermark
        while self._settled and self._settled[0][1] < watermark:
            self._forget(self._settled[0][1] - self._settled[0][0] + 1)
        if len(self._settled) <= MOST_NAMED:
            return self._count
        return self._known + sum([last - first + 1 for first, last in islice(self._settled, MOST_NAMED)])

    def _forget(self, count: int) -> None:
        """The service knows, or will learn from the watermark, of this many of the numbers settled first."""
        self._known += max(0, count)
        while count > 0:
            first, last = run = self._settled[0]
            if last - first >= count:
                run[0] += count
                return
            self._settled.popleft()
            count -= last - first + 1

    def _call(self, number: int) -> Call:
        return Call(
            session=self.session,
            number=number,
            watermark=self.watermark,
            confirmed=self.confirmed,
            command=self._open[number].command,
        )


def undo_of(number: int, command: Command) -> Command | None:
    """What takes back a call whose fate is unknown, if it may hold something."""
    match command:
        case Allocate() | Preallocate():
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
