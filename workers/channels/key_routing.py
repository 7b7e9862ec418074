"""Maps the keys of a channel to its parts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from workers.channels import wire
from workers.channels.connection_pool import Link
from workers.channels.errors import ChannelLostError
from workers.channels.local import LocalLink

ASK_S = 30.0
"""Timeout of requests that do not wait for items."""


class Routes:
    """Routes of the channel `ident`, with one part behind each of `links`. wish: the preferred part for a new key.
    Thread-safe.

    The first part assigns keys. The assigned part learns of its key and reports it if the first part is lost: keys in
    use still work, and new keys raise `ChannelLostError`.
    """

    def __init__(self, ident: str, links: Sequence[Link | LocalLink], *, wish: int) -> None:
        self._ident = ident
        self._links = links
        self._wish = wish
        self._found: dict[bytes, int] = {}

    def link(self, key: bytes, what: str) -> Link | LocalLink:
        """Return the link to the part that stores the key. what: names the operation in errors."""
        if len(self._links) == 1:
            return self._links[0]
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._find(key, what)
        return self._links[found]

    def _find(self, key: bytes, what: str) -> int:
        """Ask the first part which part stores the key; if that fails, ask the other parts."""
        gone: list[ChannelLostError] = []
        found: int | None = None
        try:
            found = self._ask(0, key, self._wish, what)
        except ChannelLostError as error:
            gone.append(error)
        if found is not None:
            if found:
                self._ask(found, key, found, what)
            return found
        # The first part has ended or is lost. Another part may store the key.
        having, lost = self.survey(key, what, first=len(gone))
        if (gone or lost) and not having:
            raise (gone or lost)[0]
        return having[0] if having else 0

    def _ask(self, place: int, key: bytes, wish: int, what: str) -> int | None:
        """Ask the part at `place` which part stores the key. Return None if that part has ended."""
        answer = self._links[place].ask(
            lambda number: wire.RouteKey(number, self._ident, key, wish), what, time.monotonic() + ASK_S
        )
        return answer.replica if isinstance(answer, wire.Routed) else None

    def survey(self, key: bytes, what: str, *, first: int = 0) -> tuple[list[int], list[ChannelLostError]]:
        """Return the parts, from place `first` on, that store the key or items of it, and the error of each part
        whose broker does not answer."""
        having, lost = [], []
        for place, link in enumerate(self._links[first:], first):
            try:
                counted = self._counted(link, key, what)
            except ChannelLostError as error:
                lost.append(error)
                continue
            if counted.size or counted.leased or counted.routed:
                having.append(place)
        return having, lost

    def count(self, key: bytes, what: str) -> wire.Counted:
        """Return the counts of the key's queue."""
        return self._counted(self.link(key, what), key, what)

    def _counted(self, link: Link | LocalLink, key: bytes, what: str) -> wire.Counted:
        answer = link.ask(lambda number: wire.Count(number, self._ident, key), what, time.monotonic() + ASK_S)
        assert isinstance(answer, wire.Counted), answer
        return answer
