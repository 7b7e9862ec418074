"""The directory's registry of names, waiting lookups and watchers. No sockets, threads or clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dataplane.core.bounded import Bounded
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
MAX_ENDED = 4096
"""How many ended entries are kept, so that lookups of them fail at once. Beyond that the oldest is deleted."""

Session = bytes
Key = tuple[Kind, str]
Effects = list[tuple[Session, Reply]]
"""The replies to send, in order, with their sessions."""


@dataclass
class _Waiter:
    """A lookup that waits for a registration. request_id: of its request; since, until: times."""

    session: Session
    request_id: int
    since: float
    until: float


@dataclass
class _Record:
    """A live entry. owner: the session whose end also ends the entry, if any; registered_by: session and id of the
    request that registered it; returns: see `RegisterProcess`; watchers: sessions that found the entry."""

    entry: DirectoryEntry
    owner: Session | None
    registered_by: tuple[Session, int]
    returns: bool
    watchers: set[Session] = field(default_factory=set)


class Registry:
    """The live and the ended entries, and the lookups that wait. Every method that needs the time gets it as an
    argument, which never decreases. Methods return the replies to send.

    The end of a group ends its workers, and fails the lookups that wait for one of them. Registration of a group
    deletes the records of workers of the earlier group with its name.

    `_ended`: the ended entries to report, the latest ended last; a name is in `_live`, in `_ended` or in neither.
    `_waiting`: the lookups of names that are in neither, in the order of arrival; `_incarnation`: that of the latest
    entry.
    """

    def __init__(self) -> None:
        self._live: dict[Key, _Record] = {}
        self._ended: Bounded[Key, DirectoryEntry] = Bounded(MAX_ENDED)
        self._waiting: dict[Key, list[_Waiter]] = {}
        self._incarnation = 0

    def register(self, session: Session, request: RegisterProcess) -> Effects:
        """Make an entry, and reply with it to the request and to the lookups that wait for it. `NameInUseError` if the
        name has a live entry, unless this same request made it (reply with it again), or both the entry and the request
        have `returns` set (replace it). Lookups that wait for a rank that a new group does not have fail."""
        key = (request.kind, request.name)
        registered_by = (session, request.request_id)
        effects: Effects = []
        existing = self._live.get(key)
        # The same request again: the client repeats unanswered requests on a new connection.
        if existing is not None and existing.registered_by == registered_by:
            return [(session, Found(request.request_id, (existing.entry,)))]
        if existing is not None and not (existing.returns and request.returns):
            error = errors.NameInUseError(kind=request.kind, name=request.name)
            return [(session, failed(request.request_id, error))]
        if existing is not None:  # both have `returns` set: the new process replaces it
            effects, _ = self._end_entry(existing, EntryState.LOST, why="another process took its place")
        self._incarnation += 1
        entry = DirectoryEntry(
            kind=request.kind,
            name=request.name,
            incarnation=self._incarnation,
            endpoints=request.endpoints,
            facts=request.facts,
        )
        self._ended.pop(key, None)
        if request.kind is Kind.WORKER_GROUP:
            # Forget the ended workers of an earlier group of this name, so that lookups wait for the new ones.
            for stale_key in [ended_key for ended_key in self._ended if _is_worker_of(ended_key, request.name)]:
                del self._ended[stale_key]
            for waited_key in list(self._waiting):
                rank_error = _missing_rank_error(waited_key, entry)
                if rank_error is not None:
                    waiters = self._waiting.pop(waited_key)
                    effects += [(waiter.session, failed(waiter.request_id, rank_error)) for waiter in waiters]
        record = self._live[key] = _Record(entry, session if request.owned else None, registered_by, request.returns)
        effects.append((session, Found(request.request_id, (entry,))))
        for waiter in self._waiting.pop(key, ()):
            record.watchers.add(waiter.session)
            effects.append((waiter.session, Found(waiter.request_id, (entry,))))
        return effects

    def lookup(self, session: Session, request: Lookup, now: float) -> Effects:
        """Reply with the entry if it is live; otherwise wait for it, up to the request's `wait_s`. `WorkerLostError` if
        it or its group has ended for good, `NoSuchRankError` for a rank that the group does not have,
        `NameNotFoundError` after the wait."""
        key = (request.kind, request.name)
        record = self._live.get(key)
        if record is not None:
            record.watchers.add(session)
            return [(session, Found(request.request_id, (record.entry,)))]
        # Not among the ended entries: a lost one that another process will register again (`returns`). It is awaited.
        ended = self._ended.get(key) or self._ended.get((Kind.WORKER_GROUP, _group_name(key)))
        if ended is not None:
            return [(session, _lost_reply(request.request_id, request.name, ended))]
        worker_group = self._live.get((Kind.WORKER_GROUP, _group_name(key)))
        error = None if worker_group is None else _missing_rank_error(key, worker_group.entry)
        if error is not None:
            return [(session, failed(request.request_id, error))]
        waiter = _Waiter(session, request.request_id, now, now + request.wait_s)
        if request.wait_s <= 0:
            return [(session, _not_found_reply(waiter, key, now))]
        self._waiting.setdefault(key, []).append(waiter)
        return []

    def end(self, session: Session, request: End) -> Effects:
        """End the live entry of that name (and incarnation, if given). Reply with it, or with no entry."""
        record = self._live.get((request.kind, request.name))
        if record is None or request.incarnation not in (None, record.entry.incarnation):
            return [(session, Found(request.request_id))]
        effects, entry = self._end_entry(record, EntryState.ENDED, request.why)
        return [*effects, (session, Found(request.request_id, (entry,)))]

    def listing(self, session: Session, request: Listing) -> Effects:
        """Reply with the live entries of a kind, in order of registration."""
        entries = tuple(record.entry for record in self._live.values() if record.entry.kind is request.kind)
        return [(session, Found(request.request_id, entries))]

    def leave(self, session: Session, state: EntryState, why: str) -> Effects:
        """End everything that a session owns, because its process closed it (ENDED) or died (LOST), and forget what it
        waits for and watches. Return the notifications for other sessions."""
        for key, waiters in list(self._waiting.items()):
            self._set_waiters(key, [waiter for waiter in waiters if waiter.session != session])
        for record in self._live.values():
            record.watchers.discard(session)
        effects: Effects = []
        owned = [record for record in self._live.values() if record.owner == session]
        for record in owned:
            # The end of a group, earlier in this loop, has ended its workers too.
            if (record.entry.kind, record.entry.name) in self._live:
                effects += self._end_entry(record, state, why)[0]
        return effects

    def owner(self, kind: Kind, name: str) -> Session | None:
        """Return the session that owns the live entry of that name, if any."""
        record = self._live.get((kind, name))
        return None if record is None else record.owner

    def expire(self, now: float) -> Effects:
        """Fail the lookups whose wait is over."""
        effects: Effects = []
        for key, waiters in list(self._waiting.items()):
            expired = [waiter for waiter in waiters if waiter.until <= now]
            effects += [(waiter.session, _not_found_reply(waiter, key, now)) for waiter in expired]
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

    def _end_entry(self, record: _Record, state: EntryState, why: str) -> tuple[Effects, DirectoryEntry]:
        """End an entry, and with a group its workers. Return the notifications for watchers and waiting lookups, and
        the ended entry."""
        effects: Effects = []
        ended = record.entry  # replaced in the loop
        for member in list(self._with_members(record)):  # the record itself comes last: `ended` is then its entry
            entry = member.entry
            key = (entry.kind, entry.name)
            ended = DirectoryEntry(
                kind=entry.kind,
                name=entry.name,
                incarnation=entry.incarnation,
                state=state,
                endpoints=entry.endpoints,
                facts=entry.facts,
                why=why,
            )
            del self._live[key]
            # Lookups of a lost entry with `returns` wait for its successor, so it must not count as ended.
            if not (member.returns and state is EntryState.LOST):
                self._ended.store(key, ended)  # so that lookups of it fail at once
            effects += [(watcher, Gone(ended)) for watcher in sorted(member.watchers)]
        if record.entry.kind is Kind.WORKER_GROUP:
            for key in [key for key in self._waiting if _is_worker_of(key, record.entry.name)]:
                for waiter in self._waiting.pop(key):
                    effects.append((waiter.session, _lost_reply(waiter.request_id, key[1], ended)))
        return effects, ended

    def _with_members(self, record: _Record) -> Iterator[_Record]:
        """Yield the record, and before it the workers if it is a group."""
        if record.entry.kind is Kind.WORKER_GROUP:
            yield from (member for key, member in self._live.items() if _is_worker_of(key, record.entry.name))
        yield record


def _group_name(key: Key) -> str:
    """Return the group of a worker's key; "", which is not a group's name, for keys of other kinds."""
    kind, name = key
    return name.partition(SEPARATOR)[0] if kind is Kind.WORKER else ""


def _is_worker_of(key: Key, worker_group: str) -> bool:
    return key[0] is Kind.WORKER and _group_name(key) == worker_group


def _missing_rank_error(key: Key, worker_group: DirectoryEntry) -> errors.NoSuchRankError | None:
    """Return the error if `key` is a worker of that group with a rank that the group does not have. None for all other
    keys, and if the group's size is unknown."""
    size = worker_group.facts.get(WORLD_SIZE)
    if not _is_worker_of(key, worker_group.name) or not isinstance(size, int):
        return None
    try:
        path = WorkerAddress.from_name(key[1]).rank_path
    except ValueError:  # a lookup may name anything
        return None
    if not path or path[0] < size:
        return None
    return errors.NoSuchRankError(group=worker_group.name, rank=path[0], size=size)


def _not_found_reply(waiter: _Waiter, key: Key, now: float) -> Failed:
    return failed(waiter.request_id, errors.NameNotFoundError(kind=key[0], name=key[1], waited_s=now - waiter.since))


def _lost_reply(request_id: int, name: str, ended: DirectoryEntry) -> Failed:
    why = ended.why if ended.name == name else f"its {ended.kind} {ended.name!r} ended ({ended.why})"
    return failed(request_id, errors.WorkerLostError(worker=name, why=why))
