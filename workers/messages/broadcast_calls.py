"""The numbers of this worker's calls for broadcasts, by which each gets the message that is its own and no other's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.messages.deliveries import Key, Posting


@dataclass
class _Stream:
    """made: the calls for broadcasts of a source in a stream since the source was started; next_from: the first call
    that is for the next process of the source's name, None while only the present one is known."""

    made: int = 0
    next_from: int | None = 0


class BroadcastCalls:
    """waiting: the receives of each stream that wait, the oldest first."""

    def __init__(self, waiting: Mapping[Key, Sequence[Posting]]) -> None:
        self._waiting = waiting
        self._streams: dict[Key, _Stream] = {}
        self._sources: set[str] = set()
        """Those whose present process is known."""

    def __contains__(self, key: Key) -> bool:
        """Whether messages there are broadcasts, for which this worker has made a call."""
        return key in self._streams

    def next(self, key: Key) -> int:
        """The number of a call that is made now."""
        stream = self._streams.setdefault(key, _Stream(next_from=None if key[0] in self._sources else 0))
        stream.made += 1
        return stream.made - 1

    def behind(self, key: Key, number: int) -> int:
        """How many calls ago the message of that number was waited for, below 0: how many calls from now it will be.
        0 outside of broadcasts."""
        stream = self._streams.get(key)
        if stream is None:
            return 0
        waiting = self._waiting.get(key, ())
        return (waiting[0].number if waiting else stream.made) - number

    def met(self, key: Key, number: int) -> None:
        """A message of a source that is gone takes the call of its number, which is then not the next source's."""
        stream = self._streams.get(key)
        if stream is not None and stream.next_from is not None:
            stream.next_from = max(stream.next_from, number + 1)

    def lost(self, source: str) -> None:
        """The source is gone: calls from now on are for its next process."""
        self._sources.discard(source)
        for _, stream in self._of(source):
            stream.next_from = stream.made

    def renewed(self, source: str) -> None:
        """A new process of the source is there: calls are counted anew, from those that wait, or that were made since
        the one before was known to be gone."""
        self._sources.add(source)
        for key, stream in self._of(source):
            waiting = self._waiting.get(key, ())
            first = stream.made if stream.next_from is None else stream.next_from
            first = min([first, *(posting.number for posting in waiting)])
            stream.made, stream.next_from = stream.made - first, None
            for posting in waiting:
                posting.number -= first

    def clear(self) -> None:
        """Count all streams anew."""
        self._streams.clear()

    def _of(self, source: str) -> list[tuple[Key, _Stream]]:
        return [(key, stream) for key, stream in self._streams.items() if key[0] == source]
