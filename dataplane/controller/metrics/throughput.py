"""Throughput of the service per second."""

from __future__ import annotations

from collections import deque

import msgspec

KEPT_S = 900  # a quarter of an hour


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
