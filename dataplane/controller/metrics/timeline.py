"""Timeline of the last operations on samples, with client, partition and times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

KEPT = 2_000  # spans
OPEN = 4_096
"""Maximum number of entries in each bounded mapping (operations in progress, client names)."""
SHOWN_FIELDS = 6  # names in a span; of further ones only the number is shown

Key = TypeVar("Key")
Kept = TypeVar("Kept")


class TimelineSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. `what` is put, claim, get, clear or version. `name` is the task of a claim, the version, or the
    fields. `start` and `end` are Unix times."""

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
    """The spans, ordered by end time, oldest first."""

    spans: list[TimelineSpan]


Done = tuple[int, str, str, Sequence[str], int, int, float, float]
"""Session, what, partition, task or fields, samples, bytes, start, end."""


class Timeline:
    """The last `KEPT` spans. Only one thread may write. Names are joined when a report is created."""

    def __init__(self) -> None:
        self._done: deque[Done] = deque(maxlen=KEPT)
        self.clients: dict[int, str] = {}  # names, by session
        self.add: Callable[[Done], None] = self._done.append

    def opened(self, session: int, name: str) -> None:
        """Record the client name of a session."""
        store_bounded(self.clients, session, name)

    def report(self, unix_s: float) -> TimelineReport:
        """Report all spans. unix_s: offset from the clock of the spans to Unix time."""
        return TimelineReport(
            spans=[
                TimelineSpan(
                    client=self.clients.get(session, f"session {session}"),
                    session=session,
                    what=what,
                    partition=partition,
                    name=_join_names(names),
                    samples=samples,
                    bytes=nbytes,
                    start=start + unix_s,
                    end=end + unix_s,
                )
                # A copy, because another thread adds spans.
                for session, what, partition, names, samples, nbytes, start, end in list(self._done)
            ]
        )


def store_bounded(kept: dict[Key, Kept], key: Key, value: Kept) -> Kept | None:
    """Store `value`. If `kept` then exceeds `OPEN` entries, remove the oldest and return its value, otherwise None."""
    kept[key] = value
    return None if len(kept) <= OPEN else kept.pop(next(iter(kept)))


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_FIELDS
    shown = ", ".join(names[:SHOWN_FIELDS])
    return shown if more <= 0 else f"{shown} and {more} more"
