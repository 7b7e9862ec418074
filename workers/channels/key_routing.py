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
    use still work, and new keys raise `ChannelLostError`. `_parts`: the parts of the keys that this handle has used.
    """

    def __init__(self, ident: str, links: Sequence[Link | LocalLink], *, wish: int) -> None:
        self._ident = ident
        self._links = links
        self._wish = wish
        self._parts: dict[bytes, int] = {}

    def link(self, key: bytes, what: str) -> Link | LocalLink:
        """Return the link to the part that stores the key. what: names the operation in errors."""
        if len(self._links) == 1:
            return self._links[0]
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = self._find_part(key, what)
        return self._links[part]

    def _find_part(self, key: bytes, what: str) -> int:
        """Return the part that stores the key: that which the first part assigns, or, if that has ended or is lost, the
        part that has the key already. 0 if no part has it: its operations then report the end of the channel."""
        lost: list[ChannelLostError] = []
        part: int | None = None
        try:
            part = self._ask_part(0, key, self._wish, what)
        except ChannelLostError as error:
            lost.append(error)
        if part is not None:
            if part != 0:
                # The assigned part notes the key, for the case that the first part is lost.
                self._ask_part(part, key, part, what)
            return part
        # The first part has ended or is lost. Another part may store the key.
        # A lost first part is not asked a second time.
        parts_with_key, other_lost = self.find_parts_with_key(key, what, first=1 if lost else 0)
        if parts_with_key:
            return parts_with_key[0]
        lost += other_lost
        if lost:
            raise lost[0]
        return 0

    def _ask_part(self, part: int, key: bytes, wish: int, what: str) -> int | None:
        """Ask `part` which part stores the key; a new key gets the part `wish`. Return None if the channel has ended on
        `part`. what: names the operation in errors."""
        answer = self._links[part].ask(
            lambda number: wire.RouteKey(number, self._ident, key, wish), what, time.monotonic() + ASK_S
        )
        return answer.replica if isinstance(answer, wire.Routed) else None  # the protocol calls a part a replica

    def find_parts_with_key(self, key: bytes, what: str, *, first: int = 0) -> tuple[list[int], list[ChannelLostError]]:
        """Return the parts, from part `first` on, that have the key or items of it, and the error of each part whose
        broker does not answer."""
        parts_with_key = []
        lost = []
        for part, link in enumerate(self._links[first:], first):
            try:
                counts = self._request_counts(link, key, what)
            except ChannelLostError as error:
                lost.append(error)
                continue
            if counts.size or counts.leased or counts.routed:
                parts_with_key.append(part)
        return parts_with_key, lost

    def count(self, key: bytes, what: str) -> wire.Counted:
        """Return the counts of the key's queue."""
        return self._request_counts(self.link(key, what), key, what)

    def _request_counts(self, link: Link | LocalLink, key: bytes, what: str) -> wire.Counted:
        answer = link.ask(lambda number: wire.Count(number, self._ident, key), what, time.monotonic() + ASK_S)
        assert isinstance(answer, wire.Counted), answer
        return answer
