"""Numbers of this worker's broadcast calls, by which each call gets the message of the same number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.messages.deliveries import Key, Posting


@dataclass
class _CallNumbers:
    """calls: number of calls for broadcasts of a source in a stream since the source started; next_from: the first
    call that belongs to the next process of the source's name, None while the source's present process is known."""

    calls: int = 0
    next_from: int | None = 0


class BroadcastCalls:
    """Numbers the calls of a receiver for broadcasts of each source in each stream. The source numbers its calls too,
    from its start on; if its process is replaced, `source_lost` and `source_renewed` restart the numbers here.

    waiting: the waiting receives of each stream, oldest first.
    """

    def __init__(self, waiting: Mapping[Key, Sequence[Posting]]) -> None:
        self._waiting = waiting
        self._streams: dict[Key, _CallNumbers] = {}
        self._sources: set[str] = set()
        """Sources whose present process is known."""

    def __contains__(self, key: Key) -> bool:
        """Whether this worker has called for broadcasts of that stream."""
        return key in self._streams

    def next_number(self, key: Key) -> int:
        """Return the number of a call that is made now. In a new stream, all calls belong to the source's next process
        unless its present one is known."""
        stream = self._streams.setdefault(key, _CallNumbers(next_from=None if key[0] in self._sources else 0))
        stream.calls += 1
        return stream.calls - 1

    def calls_behind(self, key: Key, number: int) -> int:
        """Return how many calls ago the message of that number was expected; negative if its call is still to come. 0
        outside of broadcasts."""
        stream = self._streams.get(key)
        if stream is None:
            return 0
        # The next message is expected by the oldest waiting call, or else by the next call.
        waiting = self._waiting.get(key, ())
        return (waiting[0].number if waiting else stream.calls) - number

    def note_matched(self, key: Key, number: int) -> None:
        """Record that the call of that number got a message. If the source is lost, this call does not belong to the
        next process of that name."""
        stream = self._streams.get(key)
        if stream is not None and stream.next_from is not None:
            stream.next_from = max(stream.next_from, number + 1)

    def source_lost(self, source: str) -> None:
        """Record that the source is lost: calls from now on belong to its next process."""
        self._sources.discard(source)
        for _, stream in self._streams_of(source):
            stream.next_from = stream.calls

    def source_renewed(self, source: str) -> None:
        """Restart the numbering for a new process of the source. Its first call is the oldest that waits, or the first
        after the loss of the previous process became known, whichever is earlier."""
        self._sources.add(source)
        for key, stream in self._streams_of(source):
            waiting = self._waiting.get(key, ())
            # None: the source was replaced without a reported loss, so all calls so far belong to its previous process.
            since_loss = stream.calls if stream.next_from is None else stream.next_from
            # Calls that wait have no message of the previous process, so they belong to the new one.
            first = min([since_loss, *(posting.number for posting in waiting)])
            stream.calls, stream.next_from = stream.calls - first, None
            for posting in waiting:
                posting.number -= first

    def clear(self) -> None:
        """Restart the numbering of all streams."""
        self._streams.clear()

    def _streams_of(self, source: str) -> list[tuple[Key, _CallNumbers]]:
        return [(key, stream) for key, stream in self._streams.items() if key[0] == source]
