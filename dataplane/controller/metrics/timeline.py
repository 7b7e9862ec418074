"""Who did what when: the last operations that moved samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

KEPT = 2_000
OPEN = 4_096
"""Operations that have begun and not ended, and names of clients: so many are remembered."""
SHOWN_FIELDS = 6

Key = TypeVar("Key")
Kept = TypeVar("Kept")


class TimelineSpan(msgspec.Struct, frozen=True, kw_only=True):
    """`what` is put, claim, get, clear or version, `name` the task of a claim, else the fields. Unix time."""

    client: str
    session: int
    what: str
    partition: str
    name: str
    samples: int
    bytes: int
    start: float
    end: float


class TimelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Oldest end first."""

    spans: list[TimelineSpan]


Done = tuple[int, str, str, Sequence[str], int, int, float, float]
"""Session, what, partition, task or fields, samples, bytes, start, end."""


class Timeline:
    """The last `KEPT` spans. One thread writes; what is a name now is joined when it is read."""

    def __init__(self) -> None:
        self._done: deque[Done] = deque(maxlen=KEPT)
        self.clients: dict[int, str] = {}
        self.add: Callable[[Done], None] = self._done.append

    def opened(self, session: int, name: str) -> None:
        """The session is that client's."""
        bounded(self.clients, session, name)

    def report(self, unix_s: float) -> TimelineReport:
        """unix_s: what makes Unix time of the times in the spans."""
        return TimelineReport(
            spans=[
                TimelineSpan(
                    client=self.clients.get(session, f"session {session}"),
                    session=session,
                    what=what,
                    partition=partition,
                    name=_joined(names),
                    samples=samples,
                    bytes=nbytes,
                    start=start + unix_s,
                    end=end + unix_s,
                )
                for session, what, partition, names, samples, nbytes, start, end in list(self._done)
            ]
        )


def bounded(kept: dict[Key, Kept], key: Key, value: Kept) -> Kept | None:
    """Keep `value`, and give up the oldest of those that are too many."""
    kept[key] = value
    return None if len(kept) <= OPEN else kept.pop(next(iter(kept)))


def _joined(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_FIELDS
    shown = ", ".join(names[:SHOWN_FIELDS])
    return shown if more <= 0 else f"{shown} and {more} more"
