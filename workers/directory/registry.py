"""The directory's registry of names, waiting lookups and watchers. No sockets, threads or clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from workers import errors
from workers.directory.address import SEPARATOR, WorkerAddress
from workers.directory.wire import (
    DirectoryEntry,
    End,
    EntryState,
    Failed,
    Found,
    Gone,
    Kind,
    Listing,
    Lookup,
    RegisterProcess,
    Reply,
    failed,
)

WORLD_SIZE = "world_size"
"""The fact of a group that has its number of workers, if known."""
MOST_GONE = 4096
"""How many ended entries are kept, so that lookups of them fail at once. Beyond that the oldest is deleted."""

Session = bytes
Key = tuple[Kind, str]
Effects = list[tuple[Session, Reply]]
"""The replies to send, in order, with their sessions."""


@dataclass
class _Waiter:
    session: Session
    number: int
    asked: float
    until: float


@dataclass
class _Record:
    """asked: session and number of the request that registered the entry."""

    entry: DirectoryEntry
    owner: Session | None
    asked: tuple[Session, int]
    returns: bool
    watchers: set[Session] = field(default_factory=set)


class Registry:
    """Every method that needs the time gets it as an argument, which never decreases. Methods return the replies to
    send.

    The end of a group ends its workers, and fails the lookups that wait for one of them. Registration of a group
    deletes the records of workers of the earlier group with its name.
    """

    def __init__(self) -> None:
        self._live: dict[Key, _Record] = {}
        self._ended: OrderedDict[Key, DirectoryEntry] = OrderedDict()
        self._waiting: dict[Key, list[_Waiter]] = {}
        self._incarnation = 0

    def register(self, session: Session, request: RegisterProcess) -> Effects:
        """Reply with the new entry. `NameInUseError` if the name has a live entry, unless this same request made it,
        or both the entry and the request have `returns` set."""
        key, asked = (request.kind, request.name), (session, request.number)
        effects: Effects = []
        held = self._live.get(key)
        if held is not None and held.asked == asked:
            return [(session, Found(request.number, (held.entry,)))]
        if held is not None and not (held.returns and request.returns):
            error = errors.NameInUseError(kind=request.kind, name=request.name)
            return [(session, failed(request.number, error))]
        if held is not None:
            effects, _ = self._finish(held, EntryState.LOST, "another process took its place")
        self._incarnation += 1
        entry = DirectoryEntry(
            kind=request.kind,
            name=request.name,
            incarnation=self._incarnation,
            endpoints=request.endpoints,
            facts=request.facts,
        )
        self._ended.pop(key, None)
        if request.kind is Kind.GROUP:
            for stale in [gone for gone in self._ended if _belongs(gone, request.name)]:
                del self._ended[stale]
            for awaited in list(self._waiting):
                if wrong := _no_such_rank(awaited, entry):
                    effects += [(waiter.session, failed(waiter.number, wrong)) for waiter in self._waiting.pop(awaited)]
        kept = self._live[key] = _Record(entry, session if request.owned else None, asked, request.returns)
        effects.append((session, Found(request.number, (entry,))))
        for waiter in self._waiting.pop(key, ()):
            kept.watchers.add(waiter.session)
            effects.append((waiter.session, Found(waiter.number, (entry,))))
        return effects

    def lookup(self, session: Session, request: Lookup, now: float) -> Effects:
        """Reply with the entry as soon as it is live. `WorkerLostError` if it or its group has ended for good (a
        lost entry with `returns` is awaited instead); `NoSuchRankError` for a rank that the group does not have."""
        key = (request.kind, request.name)
        kept = self._live.get(key)
        if kept is not None:
            kept.watchers.add(session)
            return [(session, Found(request.number, (kept.entry,)))]
        gone = self._ended.get(key) or self._ended.get((Kind.GROUP, _root(key)))
        if gone is not None:
            return [(session, _lost(request.number, request.name, gone))]
        group = self._live.get((Kind.GROUP, _root(key)))
        if group is not None and (error := _no_such_rank(key, group.entry)):
            return [(session, failed(request.number, error))]
        waiter = _Waiter(session, request.number, now, now + request.wait_s)
        if request.wait_s <= 0:
            return [(session, _not_found(waiter, key, now))]
        self._waiting.setdefault(key, []).append(waiter)
        return []

    def end(self, session: Session, request: End) -> Effects:
        """Reply with the ended entry, or with no entry if none was live."""
        kept = self._live.get((request.kind, request.name))
        if kept is None or request.incarnation not in (None, kept.entry.incarnation):
            return [(session, Found(request.number))]
        effects, entry = self._finish(kept, EntryState.ENDED, request.why)
        return [*effects, (session, Found(request.number, (entry,)))]

    def listing(self, session: Session, request: Listing) -> Effects:
        """Reply with the live entries of a kind, in order of registration."""
        entries = tuple(kept.entry for kept in self._live.values() if kept.entry.kind is request.kind)
        return [(session, Found(request.number, entries))]

    def leave(self, session: Session, state: EntryState, why: str) -> Effects:
        """End everything that a session owns, because its process closed it (ENDED) or died (LOST)."""
        for key, waiters in list(self._waiting.items()):
            self._set_waiters(key, [waiter for waiter in waiters if waiter.session != session])
        for kept in self._live.values():
            kept.watchers.discard(session)
        effects: Effects = []
        for kept in [kept for kept in self._live.values() if kept.owner == session]:
            if (kept.entry.kind, kept.entry.name) in self._live:
                effects += self._finish(kept, state, why)[0]
        return effects

    def owner(self, kind: Kind, name: str) -> Session | None:
        """Return the session that owns the live entry of that name, if any."""
        kept = self._live.get((kind, name))
        return None if kept is None else kept.owner

    def expire(self, now: float) -> Effects:
        """Fail the lookups whose wait is over."""
        effects: Effects = []
        for key, waiters in list(self._waiting.items()):
            over = [waiter for waiter in waiters if waiter.until <= now]
            effects += [(waiter.session, _not_found(waiter, key, now)) for waiter in over]
            self._set_waiters(key, [waiter for waiter in waiters if waiter.until > now])
        return effects

    def next_expiry(self) -> float | None:
        """Return the time at which `expire` has work to do, or None."""
        return min((waiter.until for waiters in self._waiting.values() for waiter in waiters), default=None)

    def _set_waiters(self, key: Key, waiters: list[_Waiter]) -> None:
        if waiters:
            self._waiting[key] = waiters
        else:
            self._waiting.pop(key, None)

    def _finish(self, kept: _Record, state: EntryState, why: str) -> tuple[Effects, DirectoryEntry]:
        """End an entry, and with a group its workers. Return the notifications for watchers and waiting lookups, and
        the ended entry."""
        effects: Effects = []
        last = kept.entry
        for each in list(self._with_members(kept)):
            entry = each.entry
            key = (entry.kind, entry.name)
            last = DirectoryEntry(
                kind=entry.kind,
                name=entry.name,
                incarnation=entry.incarnation,
                state=state,
                endpoints=entry.endpoints,
                facts=entry.facts,
                why=why,
            )
            del self._live[key]
            if not (each.returns and state is EntryState.LOST):
                self._record_end(key, last)
            effects += [(watcher, Gone(last)) for watcher in sorted(each.watchers)]
        if kept.entry.kind is Kind.GROUP:
            for key in [key for key in self._waiting if _belongs(key, kept.entry.name)]:
                for waiter in self._waiting.pop(key):
                    effects.append((waiter.session, _lost(waiter.number, key[1], last)))
        return effects, last

    def _with_members(self, kept: _Record) -> Iterator[_Record]:
        if kept.entry.kind is Kind.GROUP:
            yield from (each for key, each in self._live.items() if _belongs(key, kept.entry.name))
        yield kept

    def _record_end(self, key: Key, gone: DirectoryEntry) -> None:
        self._ended[key] = gone
        self._ended.move_to_end(key)
        while len(self._ended) > MOST_GONE:
            self._ended.popitem(last=False)


def _root(key: Key) -> str:
    kind, name = key
    return name.partition(SEPARATOR)[0] if kind is Kind.WORKER else ""


def _belongs(key: Key, group: str) -> bool:
    return key[0] is Kind.WORKER and _root(key) == group


def _no_such_rank(key: Key, group: DirectoryEntry) -> errors.NoSuchRankError | None:
    """Return the error for a worker of that group whose rank the group does not have, else None."""
    size = group.facts.get(WORLD_SIZE)
    if not _belongs(key, group.name) or not isinstance(size, int):
        return None
    try:
        path = WorkerAddress.from_name(key[1]).rank_path
    except ValueError:
        return None
    if not path or path[0] < size:
        return None
    return errors.NoSuchRankError(group=group.name, rank=path[0], size=size)


def _not_found(waiter: _Waiter, key: Key, now: float) -> Failed:
    return failed(waiter.number, errors.NameNotFoundError(kind=key[0], name=key[1], waited_s=now - waiter.asked))


def _lost(number: int, name: str, gone: DirectoryEntry) -> Failed:
    why = gone.why if gone.name == name else f"its {gone.kind} {gone.name!r} ended ({gone.why})"
    return failed(number, errors.WorkerLostError(worker=name, why=why))
