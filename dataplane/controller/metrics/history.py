"""What the dashboard's charts show: throughput per second, and the last operations on samples. The
recorder adds to both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from dataplane.core.bounded import Bounded

KEPT_S = 900  # of the throughput: a quarter of an hour
KEPT = 2_000  # spans of the timeline
OPEN = 4_096
"""Maximum number of entries in each bounded mapping (operations in progress, client names)."""
SHOWN_FIELDS = 6  # names in a span; of further ones only the number is shown


class FlowReport(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput per second. `times` are the ends of the seconds (Unix time), oldest first. The other lists are aligned
    with them: samples and bytes in that second, and the live bytes at its end."""

    step_s: int
    times: list[int]
    puts: list[int]
    put_bytes: list[int]
    claims: list[int]
    gets: list[int]
    get_bytes: list[int]
    clears: list[int]
    live_bytes: list[int]


decode_flow_report = msgspec.json.Decoder(FlowReport).decode


class Second:
    """Throughput of one second, which ends at `end` (Unix time)."""

    __slots__ = ("claims", "clears", "end", "get_bytes", "gets", "live_bytes", "put_bytes", "puts")

    def __init__(self, end: int, live_bytes: int) -> None:
        self.end = end
        self.live_bytes = live_bytes
        self.puts = self.put_bytes = self.claims = self.gets = self.get_bytes = self.clears = 0


class Throughput:
    """The seconds with activity among the last `KEPT_S`. Only one thread may write."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=KEPT_S)
        self._latest = Second(end=0, live_bytes=0)

    def second_at(self, now: float) -> Second:
        """Return the record of the second that contains `now` (Unix time), to add to. If `now` is before the latest
        second, return that one."""
        if now >= self._latest.end:
            end = int(now) + 1
            self._latest = Second(end, self._latest.live_bytes)
            self._seconds.append(self._latest)
        return self._latest

    def report(self, now: float, later_s: int = 0) -> FlowReport:
        """Report the last `KEPT_S` complete seconds before `now`. `later_s` is added to the reported times."""
        last = int(now)
        first = last - KEPT_S + 1
        known = list(self._seconds)  # a copy, because another thread adds seconds
        by_end = {second.end: second for second in known}
        # The live bytes before the first reported second.
        live_bytes = next((second.live_bytes for second in reversed(known) if second.end < first), 0)
        row: list[Second] = []
        for end in range(first, last + 1):
            second = by_end.get(end) or Second(end, live_bytes)  # a second without activity keeps the live bytes
            live_bytes = second.live_bytes
            row.append(second)
        return FlowReport(
            step_s=1,
            times=[second.end + later_s for second in row],
            puts=[second.puts for second in row],
            put_bytes=[second.put_bytes for second in row],
            claims=[second.claims for second in row],
            gets=[second.gets for second in row],
            get_bytes=[second.get_bytes for second in row],
            clears=[second.clears for second in row],
            live_bytes=[second.live_bytes for second in row],
        )


class TimelineSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. `what` is put, claim, get, clear or version. `name` is the task of a claim, the
    version, or the fields. `start` and `end` are Unix times."""

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
    """The last `KEPT` spans. Only one thread may write. A report joins the names."""

    def __init__(self) -> None:
        self._done: deque[Done] = deque(maxlen=KEPT)
        self.clients: Bounded[int, str] = Bounded(OPEN)  # names, by session
        self.add: Callable[[Done], None] = self._done.append

    def opened(self, session: int, name: str) -> None:
        """Record the client name of a session."""
        self.clients.store(session, name)

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


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_FIELDS
    shown = ", ".join(names[:SHOWN_FIELDS])
    return shown if more <= 0 else f"{shown} and {more} more"
