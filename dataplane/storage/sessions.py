"""The sessions of a storage unit: attached sessions with their locks, fenced sessions, and aborted puts. Uses files,
but no sockets."""

from __future__ import annotations

import contextlib
import hmac
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.core.addresses import boot_id
from dataplane.core.file_locks import is_local, sweep
from dataplane.core.number_set import NumberSet
from dataplane.errors import InvalidRequestError, SessionExpiredError
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.arena import Arena
from dataplane.storage.session_lock import PeerLock

log = logging.getLogger(__name__)

MAX_STOPS = 256
"""Maximum number of aborted puts recorded for one session. Beyond it, the lowest call id is dropped, and every id up
to it counts as aborted: a wrongly rejected old put is an error, but an accepted late write would corrupt rows."""


@dataclass(slots=True)
class _Stops:
    """The aborted puts of one session: every id up to `floor`, and those in `call_ids`."""

    floor: int = 0
    call_ids: set[int] = field(default_factory=set)


class StoppedPuts:
    """Aborted puts whose late writes are rejected, by (session, id of the Allocate call). Holds at most
    `MAX_STOPS` ids for each session that aborted a put and is not fenced. Every request of a fenced session is
    rejected, so `forget` drops its ids."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Stops] = {}

    def stop(self, session: int, reservation: int) -> None:
        """Record an aborted put. Idempotent."""
        stops = self._sessions.setdefault(session, _Stops())
        if reservation <= stops.floor:  # it counts as aborted already
            return
        stops.call_ids.add(reservation)
        if len(stops.call_ids) > MAX_STOPS:
            stops.floor = min(stops.call_ids)
            stops.call_ids.remove(stops.floor)

    def covers(self, session: int, reservation: int) -> bool:
        """Whether the put was aborted, or counts as aborted because of the floor."""
        stops = self._sessions.get(session)
        return stops is not None and (reservation <= stops.floor or reservation in stops.call_ids)

    def forget(self, session: int) -> None:
        """Drop the ids of a session that was fenced."""
        self._sessions.pop(session, None)

    def __len__(self) -> int:
        """Return how many ids are recorded, with the floors above 0."""
        return sum(len(stops.call_ids) + bool(stops.floor) for stops in self._sessions.values())


@dataclass(eq=False)
class _Pending:
    """An attach request whose proof has not arrived. secret: the bytes that the proof must contain."""

    lock: PeerLock
    secret: bytes


class Sessions:
    """The sessions of one unit. Not thread-safe: used by the thread of the bulk server only.

    `_pending`: sessions that were sent a challenge. `_attached`: sessions that map the arena, with their locks.
    `_fenced`: sessions whose requests are rejected. `_stopped`: aborted puts. `_directories`: those in which a session
    lock is accepted.
    """

    def __init__(self, arena: Arena, *, lock_directories: Iterable[Path]) -> None:
        self._arena = arena
        self._directories = frozenset(lock_directories)
        self._host = boot_id()
        self._arena_is_local = is_local(arena.path)
        self._pending: dict[int, _Pending] = {}
        self._attached: dict[int, PeerLock] = {}
        self._fenced = NumberSet()
        self._stopped = StoppedPuts()

    @property
    def count(self) -> int:
        """The number of attached sessions. Callable from any thread."""
        return len(self._attached)

    def admit(self, session: int) -> None:
        """Raises SessionExpiredError for a fenced session."""
        if session in self._fenced:
            why = "the service has closed it, and the storage unit rejects its requests"
            raise SessionExpiredError(session=session, why=why)

    def stop_put(self, session: int, reservation: int) -> None:
        """Reject every further write of this put."""
        self._stopped.stop(session, reservation)

    def is_stopped(self, session: int, reservation: int) -> bool:
        """Whether writes of this put are rejected."""
        return self._stopped.covers(session, reservation)

    def attach(self, session: int, request: pb.Attach) -> pb.Challenge:
        """Return a challenge for a client that may be local, or the reason why it stays remote. Raises
        InvalidRequestError if the session is attached with another lock."""
        if not request.lock_path:
            return pb.Challenge(local=False, why="the client requested a remote connection")
        if request.boot_id != self._host:
            return pb.Challenge(local=False, why="the client runs on another host")
        if not self._arena_is_local:
            return pb.Challenge(local=False, why="the arena is not on a local file system")
        try:
            lock = PeerLock.open(request.lock_path, directories=self._directories)
        except OSError as error:
            lock = f"its session lock is not accessible: {error}"
        if isinstance(lock, str):  # the reason why there is no lock
            return pb.Challenge(local=False, why=lock)
        self._reject_second_lock(session, lock)
        challenge = self._arena.challenge()
        self._forget_pending(session)  # an earlier attach request of the session
        self._pending[session] = _Pending(lock, challenge.secret)
        return pb.Challenge(
            local=True,
            arena_path=str(self._arena.path),
            cookie=self._arena.cookie,
            offset=challenge.offset,
            length=len(challenge.secret),
        )

    def _reject_second_lock(self, session: int, lock: PeerLock) -> None:
        """Drop `lock` and raise InvalidRequestError if the session is attached with another lock. With a second lock,
        the unit could no longer prove that the session's first process has ended."""
        known = self._attached.get(session)
        if known is not None and not known.same_file(lock):
            lock.drop()
            raise InvalidRequestError(f"session {session} is already attached to this unit with another lock file")

    def prove(self, session: int, seen: bytes) -> str:
        """Attach the session and return the path of its lock. Raises InvalidRequestError without a pending
        challenge, and if `seen` differs from its secret."""
        pending = self._pending.pop(session, None)
        if pending is None:
            raise InvalidRequestError(f"session {session} sent a proof without a pending challenge")
        if not hmac.compare_digest(pending.secret, seen):
            pending.lock.drop()
            raise InvalidRequestError(f"session {session} sent a wrong proof: it does not map this unit's arena")
        if session in self._attached:  # with the same lock; one descriptor of it is enough
            pending.lock.drop()
        else:
            self._attached[session] = pending.lock
        return str(self._attached[session].path)

    def fence(self, session: int, lock_path: str = "", *, first: int = 0, last: int = 0) -> bool:
        """Fence this session, unless it is attached and its lock is still held. Return whether it is fenced; then no
        process of it can access the arena, and the ended sessions from `first` to `last` are fenced too.

        lock_path: the lock of a session that attached in this epoch of the unit or in an earlier one with the same
        arena. Raises OSError if the lock is not accessible; the session is then not fenced.
        """
        lock = self._attached.get(session) or self._find_again(session, lock_path)  # which attaches it again
        if lock is not None and lock.held():
            return False
        # `first` and `last` may be 0: without a range, only this session is fenced.
        self._fenced.add(min(first or session, session), max(last, session))
        self._stopped.forget(session)
        self._forget_pending(session)
        if lock is not None:
            del self._attached[session]
            lock.bury()
        else:  # its lock file, if it left one, is not known
            self._sweep()
        return True

    def _find_again(self, session: int, lock_path: str) -> PeerLock | None:
        """Return the lock of a session that attached in an earlier epoch of this unit, and attach the session again.
        Return None without a `lock_path`, for a fenced session, and if no process holds the lock any longer."""
        if not lock_path or session in self._fenced:
            return None
        lock = PeerLock.open(lock_path, directories=self._directories)
        if isinstance(lock, str):  # the reason, for example that it is not held
            return None
        self._attached[session] = lock
        return lock

    def _sweep(self) -> None:
        """Remove free lock files, which clients killed before they attached here leave behind."""
        for directory in self._directories:
            with contextlib.suppress(OSError):
                sweep(directory)

    def bury_dead(self) -> list[int]:
        """Fence every attached session whose lock is free, which closes its descriptor, and return these sessions.
        Sessions that ended normally are among them."""
        dead = [session for session, lock in self._attached.items() if not lock.held()]
        for session in dead:
            self.fence(session)
        return dead

    def _forget_pending(self, session: int) -> None:
        pending = self._pending.pop(session, None)
        if pending is not None:
            pending.lock.drop()

    def close(self) -> None:
        """Close every descriptor; remove the lock files of attached sessions that no process holds."""
        for session in list(self._pending):  # a copy, because entries are removed
            self._forget_pending(session)
        for lock in self._attached.values():
            if lock.held():
                lock.drop()
            else:
                lock.bury()
        self._attached.clear()
