"""Maps the keys of a channel to its branches."""

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
    """Routes of the channel `ident`, with one branch behind each of `links`. wish: the preferred branch for a new key.
    Thread-safe.

    The first branch assigns keys. The assigned branch learns of its key and reports it if the first branch is lost:
    keys in use still work, and new keys raise `ChannelLostError`. `_branches`: those of the keys that this handle has
    used."""

    def __init__(self, ident: str, links: Sequence[Link | LocalLink], *, wish: int) -> None:
        self._ident = ident
        self._links = links
        self._wish = wish
        self._branches: dict[bytes, int] = {}

    def link(self, key: bytes, what: str) -> Link | LocalLink:
        """Return the link to the branch that stores the key. what: names the operation in errors."""
        if len(self._links) == 1:
            return self._links[0]
        branch = self._branches.get(key)
        if branch is None:
            branch = self._branches[key] = self._find_branch(key, what)
        return self._links[branch]

    def _find_branch(self, key: bytes, what: str) -> int:
        """Return the branch that stores the key: that which the first branch assigns, or, if that has ended or is lost,
        the branch that has the key already. 0 if no branch has it: its operations then report the
        end of the channel."""
        lost: list[ChannelLostError] = []
        branch: int | None = None
        try:
            branch = self._ask_branch(0, key, self._wish, what)
        except ChannelLostError as error:
            lost.append(error)
        if branch is not None:
            if branch != 0:
                # The assigned branch notes the key, for the case that the first branch is lost.
                self._ask_branch(branch, key, branch, what)
            return branch
        # The first branch has ended or is lost. Another branch may store the key.
        # A lost first branch is not asked a second time.
        branches_with_key, other_lost = self.find_branches_with_key(key, what, first=1 if lost else 0)
        if branches_with_key:
            return branches_with_key[0]
        lost += other_lost
        if lost:
            raise lost[0]
        return 0

    def _ask_branch(self, branch: int, key: bytes, wish: int, what: str) -> int | None:
        """Ask `branch` which branch stores the key; a new key gets the branch `wish`. Return None if the channel has
        ended on `branch`. what: names the operation in errors."""
        answer = self._links[branch].ask(
            lambda request_id: wire.RouteKey(request_id, self._ident, key, wish), what, time.monotonic() + ASK_S
        )
        return answer.replica if isinstance(answer, wire.Routed) else None  # the protocol calls a branch a replica

    def find_branches_with_key(
        self, key: bytes, what: str, *, first: int = 0
    ) -> tuple[list[int], list[ChannelLostError]]:
        """Return the branches, from branch `first` on, that have the key or items of it, and the error of each branch
        whose broker does not answer."""
        branches_with_key = []
        lost = []
        for branch, link in enumerate(self._links[first:], first):
            try:
                counts = self._request_counts(link, key, what)
            except ChannelLostError as error:
                lost.append(error)
                continue
            if counts.size or counts.leased or counts.routed:
                branches_with_key.append(branch)
        return branches_with_key, lost

    def count(self, key: bytes, what: str) -> wire.Counted:
        """Return the counts of the key's queue."""
        return self._request_counts(self.link(key, what), key, what)

    def _request_counts(self, link: Link | LocalLink, key: bytes, what: str) -> wire.Counted:
        answer = link.ask(lambda request_id: wire.Count(request_id, self._ident, key), what, time.monotonic() + ASK_S)
        assert isinstance(answer, wire.Counted), answer
        return answer
