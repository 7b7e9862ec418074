"""Which puts a storage unit writes no byte of any more: numbers only, no sockets."""

from __future__ import annotations

from dataclasses import dataclass, field

STOPS_KEPT = 256
"""Stopped puts of one session that are told apart. Of more than these, the lowest number is forgotten, and it and every
number below it counts as stopped: to refuse an old put too many costs an error, to let a late frame in costs bytes."""


@dataclass(slots=True)
class _Stops:
    """Every number up to `floor` is stopped, and those in `numbers`."""

    floor: int = 0
    numbers: set[int] = field(default_factory=set)


class StoppedPuts:
    """Puts by (session, number of the Allocate call). At most `STOPS_KEPT` numbers for each session that ever stopped
    one and is not fenced: a fenced session is refused everything, so `forget` drops its numbers."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Stops] = {}

    def stop(self, session: int, reservation: int) -> None:
        """From now on `covers` says so. Idempotent."""
        stops = self._sessions.setdefault(session, _Stops())
        if reservation <= stops.floor:
            return
        stops.numbers.add(reservation)
        if len(stops.numbers) > STOPS_KEPT:
            stops.floor = min(stops.numbers)
            stops.numbers.remove(stops.floor)

    def covers(self, session: int, reservation: int) -> bool:
        """Whether the put was stopped, or is older than all that are still told apart."""
        stops = self._sessions.get(session)
        return stops is not None and (reservation <= stops.floor or reservation in stops.numbers)

    def forget(self, session: int) -> None:
        """The session is refused as a whole."""
        self._sessions.pop(session, None)

    def __len__(self) -> int:
        """How many numbers are kept."""
        return sum(len(stops.numbers) + bool(stops.floor) for stops in self._sessions.values())
