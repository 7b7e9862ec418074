"""What a storage unit knows of sessions: who is local to it by proof, who is fenced, which puts were stopped. Files,
but no sockets."""

from __future__ import annotations

import contextlib
import hmac
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.core.addresses import boot_id
from dataplane.core.contiguous_runs import Stretches
from dataplane.core.file_locks import is_local, sweep
from dataplane.errors import InvalidRequestError, SessionExpiredError
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.arena import Arena
from dataplane.storage.session_lock import PeerLock

log = logging.getLogger(__name__)

MAX_STOPS = 256
"""Stopped puts of one session that are told apart. Of more than these, the lowest number is forgotten, and it and every
number below it counts as stopped: to refuse an old put too many costs an error, to let a late frame in costs bytes."""


@dataclass(slots=True)
class _Stops:
    """Every number up to `floor` is stopped, and those in `numbers`."""

    floor: int = 0
    numbers: set[int] = field(default_factory=set)


class StoppedPuts:
    """Which puts a unit writes no byte of any more, by (session, number of the Allocate call). At most
    `MAX_STOPS` numbers for each session that ever stopped one and is not fenced: a fenced session is refused
    everything, so `forget` drops its numbers."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Stops] = {}

    def stop(self, session: int, reservation: int) -> None:
        """From now on `covers` says so. Idempotent."""
        stops = self._sessions.setdefault(session, _Stops())
        if reservation <= stops.floor:
            return
        stops.numbers.add(reservation)
        if len(stops.numbers) > MAX_STOPS:
            stops.floor = min(stops.numbers)
            stops.numbers.remove(stops.floor)

    def covers(self, session: int, reservation: int) -> bool:
        """Whether the put was stopped, or is older than all that are still told apart."""
        stops = self._sessions.get(session)
        return stops is not None and (reservation <= stops.floor or reservation in stops.numbers)

    def forget(self, session: int) -> None:
        """The session is refused as a whole."""
        self._sessions.pop(session, None)

    def __len__(self) -> int:
        """How many numbers are kept."""
        return sum(len(stops.numbers) + bool(stops.floor) for stops in self._sessions.values())


@dataclass(eq=False)
class _Pending:
    """An attach whose proof has not come yet."""

    lock: PeerLock
    secret: bytes


class Sessions:
    """One thread only: the unit's poll thread."""

    def __init__(self, arena: Arena, *, lock_directories: Iterable[Path]) -> None:
        self._arena = arena
        self._directories = frozenset(lock_directories)
        self._host = boot_id()
        self._arena_is_local = is_local(arena.path)
        self._pending: dict[int, _Pending] = {}
        self._attached: dict[int, PeerLock] = {}
        self._fenced = Stretches()
        self._stopped = StoppedPuts()

    @property
    def count(self) -> int:
        """How many are attached. Any thread."""
        return len(self._attached)

    def admit(self, session: int) -> None:
        """Raises SessionExpiredError for a fenced session."""
        if session in self._fenced:
            raise SessionExpiredError(session=session, why="the storage unit was told that its process is gone")

    def stop_put(self, session: int, reservation: int) -> None:
        """Refuse every write of this put from now on."""
        self._stopped.stop(session, reservation)

    def is_stopped(self, session: int, reservation: int) -> bool:
        """Whether writes of this put are refused."""
        return self._stopped.covers(session, reservation)

    def attach(self, session: int, request: pb.Attach) -> pb.Challenge:
        """A challenge for a client that may be local, or the reason why it stays remote."""
        if not request.lock_path:
            return pb.Challenge(local=False, why="the client asked for the remote connection")
        if request.boot_id != self._host:
            return pb.Challenge(local=False, why="the client runs on another host")
        if not self._arena_is_local:
            return pb.Challenge(local=False, why="the arena is not on a local file system")
        try:
            lock = PeerLock.open(request.lock_path, directories=self._directories)
        except OSError as error:
            lock = f"its session lock cannot be looked at: {error}"
        if isinstance(lock, str):
            return pb.Challenge(local=False, why=lock)
        self._refuse_second_lock(session, lock)
        challenge = self._arena.challenge()
        self._forget_pending(session)
        self._pending[session] = _Pending(lock, challenge.secret)
        return pb.Challenge(
            local=True,
            arena_path=str(self._arena.path),
            cookie=self._arena.cookie,
            offset=challenge.offset,
            length=len(challenge.secret),
        )

    def _refuse_second_lock(self, session: int, lock: PeerLock) -> None:
        """A session has one lock from its start to its end: swapping it would give up the proof that its first process
        is gone."""
        known = self._attached.get(session)
        if known is not None and not known.same_file(lock):
            lock.drop()
            raise InvalidRequestError(f"session {session} is attached to this unit with another lock file")

    def prove(self, session: int, seen: bytes) -> str:
        """The session is attached from now on: where its lock is. Raises InvalidRequestError if `seen` is not what the
        challenge wrote."""
        pending = self._pending.pop(session, None)
        if pending is None:
            raise InvalidRequestError(f"session {session} sent a proof that nobody asked for")
        if not hmac.compare_digest(pending.secret, seen):
            pending.lock.drop()
            raise InvalidRequestError(f"session {session} does not map this unit's arena")
        if session in self._attached:
            pending.lock.drop()
        else:
            self._attached[session] = pending.lock
        return str(self._attached[session].path)

    def fence(self, session: int, lock_path: str = "", *, first: int = 0, last: int = 0) -> bool:
        """Refuse everything of this session from now on, unless it is attached and its lock is still held. Whether it
        is fenced: then nothing of it can touch the arena any more, nor of the sessions from `first` to `last`, which
        are over.

        lock_path: where the lock is of a session that attached, here or before this unit was restarted over its arena.
        OSError if it cannot be looked at: then nothing is known.
        """
        lock = self._attached.get(session) or self._find_again(session, lock_path)
        if lock is not None and lock.held():
            return False
        self._fenced.add(min(first or session, session), max(last, session))
        self._stopped.forget(session)
        self._forget_pending(session)
        if lock is not None:
            del self._attached[session]
            lock.bury()
        else:
            self._sweep()
        return True

    def _find_again(self, session: int, lock_path: str) -> PeerLock | None:
        """The lock, if it is still held, of a session that attached in an earlier epoch of this unit."""
        if not lock_path or session in self._fenced:
            return None
        lock = PeerLock.open(lock_path, directories=self._directories)
        if isinstance(lock, str):
            return None
        self._attached[session] = lock
        return lock

    def _sweep(self) -> None:
        """A client that was killed before it attached here leaves a lock file that nobody holds."""
        for directory in self._directories:
            with contextlib.suppress(OSError):
                sweep(directory)

    def bury_dead(self) -> list[int]:
        """Fence every attached session whose lock is free; which ones. Keeps the descriptors of sessions that ended in
        peace from piling up."""
        dead = [session for session, lock in self._attached.items() if not lock.held()]
        for session in dead:
            self.fence(session)
        return dead

    def _forget_pending(self, session: int) -> None:
        pending = self._pending.pop(session, None)
        if pending is not None:
            pending.lock.drop()

    def close(self) -> None:
        """Close every descriptor; remove the lock files that nobody holds any more."""
        for session in list(self._pending):
            self._forget_pending(session)
        for lock in self._attached.values():
            if lock.held():
                lock.drop()
            else:
                lock.bury()
        self._attached.clear()
