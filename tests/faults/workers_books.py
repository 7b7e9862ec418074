"""The reckoning of a storm over workers: what they wrote down, put together.

A message that was sent is received once, and those of one worker to another in the order in which they were sent. It
may be lost only where an end of the pair was told: its sender by the error of that operation or of one after it, its
receiver by `WorkerLostError` or by being started anew. An item that was put is taken once, by the one getter of its
key in the order of its putter; it may be lost only with its broker, or on its way to a getter that was killed or told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.faults.acting import BAD
from tests.faults.books import StormError

LOSES_MESSAGES = frozenset({"WorkerLostError"})
NOT_PUT = "ChannelTimeoutError"
"""Says that nothing was put."""
_OF_RECEIVERS = frozenset({"run", "got", "missed", "taken", "untaken"})
"""Read first, while all write on, so that whatever is known to be received is known to have been sent, too."""
_OF_SENDERS = frozenset({"sending", "sent", "unsent", "putting", "put", "unput", "uncreated", "dead", BAD})
BATCH = 2
"""So many items a getter may have taken before it wrote one down."""

Tag = tuple[int, int]
"""A message's: its sender's run, and its number there."""


def message(text: str) -> Tag:
    run, _, number = text.partition(".")
    return int(run), int(number)


@dataclass
class Pair:
    """Messages from one worker to another. sent: those whose `send` returned; failed: those whose did not; told: after
    which received message (by its place among them) the receiver was told of a loss."""

    tried: set[Tag] = field(default_factory=set)
    sent: list[Tag] = field(default_factory=list)
    failed: list[Tag] = field(default_factory=list)
    received: list[Tag] = field(default_factory=list)
    told: set[int] = field(default_factory=set)

    def reckon(self, name: str) -> list[Tag]:
        """Those that were sent and have yet to come. StormError for what must never be."""
        for before, after in pairwise(self.received):
            if after <= before:
                raise StormError(f"{name}: {after} was received after {before}")
        if unknown := set(self.received) - self.tried:
            raise StormError(f"{name}: received, and never sent: {sorted(unknown)[:5]}")
        last_run = max((run for run, _ in self.tried), default=0)
        missing = sorted(set(self.sent) - set(self.received))
        for place, after in enumerate(self.received):
            before = self.received[place - 1] if place else (0, 0)
            gap = [tag for tag in missing if before < tag < after and tag[0] == after[0]]
            if gap and place not in self.told and not self._sender_told(gap[0], after):
                raise StormError(f"{name}: sent and lost, though nobody was told: {gap[:5]}, before {after}")
        newest = self.received[-1] if self.received else (0, 0)
        tail = [tag for tag in missing if tag > newest and tag[0] == last_run]
        return [] if len(self.received) in self.told else [tag for tag in tail if not self._sender_told(tag, None)]

    def _sender_told(self, first: Tag, last: Tag | None) -> bool:
        return any(first < tag and (last is None or tag < last) for tag in self.failed)


@dataclass
class Queue:
    """Items of one key of a channel. refused: those of which the putter was told that they were not put; returned:
    after which taken item (by its place) one that came back may come, out of its order; allowed: how many may have
    been taken though nobody wrote it down."""

    tried: set[str] = field(default_factory=set)
    put: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    taken: list[str] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)
    allowed: int = 0

    def reckon(self, name: str, dead: set[str]) -> list[str]:
        """Those that were put and have yet to be taken. dead: brokers that were killed. StormError for what must never
        be."""
        if twice := [tag for tag, count in Counter(self.taken).items() if count > 1]:
            raise StormError(f"{name}: taken twice: {twice[:5]}")
        taken = set(self.taken)
        if unknown := taken - self.tried:
            raise StormError(f"{name}: taken, and never put: {sorted(unknown)[:5]}")
        if false := self.refused.intersection(self.taken):
            raise StormError(f"{name}: taken, though their putter was told that they were not put: {sorted(false)[:5]}")
        self._check_order(name)
        missing = [tag for tag in self.put if tag not in taken and tag.rpartition("@")[2] not in dead]
        return missing if len(missing) > self.allowed else []

    def _check_order(self, name: str) -> None:
        put, newest = set(self.put), dict[str, tuple[Tag, str]]()
        for place, tag in enumerate(self.taken):
            if place in self.returned:
                newest.clear()
            if tag not in put:
                continue
            who, _, rest = tag.partition(":")
            number, _, broker = rest.partition("@")
            before = newest.get(f"{who}@{broker}")
            if before is not None and message(number) < before[0]:
                raise StormError(f"{name}: {tag} was taken after {before[1]}")
            newest[f"{who}@{broker}"] = message(number), tag


class WorkersBooks:
    """What the workers in `folder` have written down until now."""

    def __init__(self, folder: Path) -> None:
        self.pairs: dict[tuple[str, str], Pair] = {}
        self.queues: dict[tuple[str, str], Queue] = {}
        self.errors: Counter[str] = Counter()
        self.dead: set[str] = set()
        self._lives: Counter[str] = Counter()
        for verbs in (_OF_RECEIVERS, _OF_SENDERS):
            for path in sorted(folder.glob("*.notes")):
                self._read(path.stem, [line for line in _lines(path) if line[0] in verbs])

    def _read(self, who: str, lines: list[list[str]]) -> None:
        for verb, *words in lines:
            if verb == "run":
                self._begun(who)
            elif verb == "dead":
                self.dead.update(words)
            elif verb in ("sending", "sent", "unsent", "got", "missed"):
                self._message(who, verb, *words)
            elif verb in ("putting", "put", "unput", "taken", "untaken"):
                self._item(verb, *words)
            elif verb == "uncreated":
                self.errors[f"creation {words[1]}"] += 1
            else:
                raise StormError(f"{who}: {verb} {' '.join(words)}")

    def _begun(self, who: str) -> None:
        self._lives[who] += 1
        if self._lives[who] == 1:
            return
        for (_, receiver), pair in self.pairs.items():
            if receiver == who:
                pair.told.add(len(pair.received))
        for (_, key), queue in self.queues.items():
            if key == who:
                queue.returned.add(len(queue.taken))
                queue.allowed += BATCH

    def _message(self, who: str, verb: str, peer: str, what: str, error: str = "") -> None:
        names = (peer, who) if verb in ("got", "missed") else (who, peer)
        pair = self.pairs.setdefault(names, Pair())
        match verb:
            case "sending":
                pair.tried.add(message(what))
            case "sent":
                pair.sent.append(message(what))
            case "unsent":
                pair.failed.append(message(what))
                self.errors[f"send {error}"] += 1
            case "got":
                pair.received.append(message(what))
            case "missed":
                self.errors[f"recv {what}"] += 1
                if what in LOSES_MESSAGES:
                    pair.told.add(len(pair.received))

    def _item(self, verb: str, channel: str, key: str, *words: str) -> None:
        queue = self.queues.setdefault((channel, key), Queue())
        match verb:
            case "putting":
                queue.tried.add(words[0])
            case "put":
                queue.put.append(words[0])
            case "unput":
                if words[1] == NOT_PUT:
                    queue.refused.add(words[0])
                self.errors[f"put {words[1]}"] += 1
            case "taken":
                queue.taken += words
            case "untaken":
                self.errors[f"get {words[0]}"] += 1
                if words[0] != NOT_PUT:
                    queue.returned.add(len(queue.taken))
                if words[1] == "taking":
                    queue.allowed += BATCH

    def outstanding(self) -> list[str]:
        """What has yet to come. StormError for what must never be."""
        late = []
        for (sender, receiver), pair in self.pairs.items():
            name = f"{sender} to {receiver}"
            late += [f"{name}: {tag}" for tag in pair.reckon(name)]
        for (channel, key), queue in self.queues.items():
            name = f"{channel}, key {key}"
            late += [f"{name}: {tag}" for tag in queue.reckon(name, self.dead)]
        return late

    def told(self) -> str:
        """All in a sentence or two."""
        received = sum(len(pair.received) for pair in self.pairs.values())
        taken = sum(len(queue.taken) for queue in self.queues.values())
        errors = dict(self.errors.most_common()) or "none"
        return f"{received:,} messages received and {taken:,} items taken, once each and in order; errors: {errors}"


def _lines(path: Path) -> Iterator[list[str]]:
    """Whole ones: a process may write on."""
    *whole, _ = path.read_text().split("\n")
    return (line.split(" ") for line in whole)
