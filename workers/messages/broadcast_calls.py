"""Numbers of this worker's broadcast calls, by which each call gets the message of the same number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.messages.deliveries import Key, Posting


@dataclass
class _Stream:
    """made: number of calls for broadcasts of a source in a stream since the source started; next_from: the first
    call that belongs to the next process of the source's name, None while the source's present process is known."""

    made: int = 0
    next_from: int | None = 0


class BroadcastCalls:
    """waiting: the waiting receives of each stream, oldest first."""

    def __init__(self, waiting: Mapping[Key, Sequence[Posting]]) -> None:
        self._waiting = waiting
        self._streams: dict[Key, _Stream] = {}
        self._sources: set[str] = set()
        """Sources whose present process is known."""

    def __contains__(self, key: Key) -> bool:
        """Whether this worker has called for broadcasts of that stream."""
        return key in self._streams

    def next(self, key: Key) -> int:
        """Return the number of a call that is made now."""
        stream = self._streams.setdefault(key, _Stream(next_from=None if key[0] in self._sources else 0))
        stream.made += 1
        return stream.made - 1

    def behind(self, key: Key, number: int) -> int:
        """Return how many calls ago the message of that number was expected; negative if its call is still to come. 0
        outside of broadcasts."""
        stream = self._streams.get(key)
        if stream is None:
            return 0
        waiting = self._waiting.get(key, ())
        return (waiting[0].number if waiting else stream.made) - number

    def met(self, key: Key, number: int) -> None:
        """Assign the call of that number to a message of a lost source, so that it is not the next source's."""
        stream = self._streams.get(key)
        if stream is not None and stream.next_from is not None:
            stream.next_from = max(stream.next_from, number + 1)

    def lost(self, source: str) -> None:
        """Record that the source is lost: calls from now on belong to its next process."""
        self._sources.discard(source)
        for _, stream in self._of(source):
            stream.next_from = stream.made

    def renewed(self, source: str) -> None:
        """Restart the numbering for a new process of the source: with the waiting calls, or those since the previous
        process was known to be lost."""
        self._sources.add(source)
        for key, stream in self._of(source):
            waiting = self._waiting.get(key, ())
            first = stream.made if stream.next_from is None else stream.next_from
            first = min([first, *(posting.number for posting in waiting)])
            stream.made, stream.next_from = stream.made - first, None
            for posting in waiting:
                posting.number -= first

    def clear(self) -> None:
        """Restart the numbering of all streams."""
        self._streams.clear()

    def _of(self, source: str) -> list[tuple[Key, _Stream]]:
        return [(key, stream) for key, stream in self._streams.items() if key[0] == source]
