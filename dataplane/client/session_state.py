"""The client-side state of a session: connections to units, cached schemas, preallocated space of small puts, and
the pins of returned views.

`Turns` are of calls that take turns, such as the appends to a sample.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from dataplane.client.preallocated import PreallocatedBuffer
from dataplane.client.unit_connections import UnitConnections
from dataplane.config import PUT_TIMEOUT_S, DataPlaneConfig
from dataplane.core.bounded import Bounded
from dataplane.core.buffer_pool import BufferPool
from dataplane.core.durations import as_timeout
from dataplane.core.types import FieldSpec
from dataplane.data.columns import from_pool
from dataplane.data.columns.parallel_copy import Copier, default_threads
from dataplane.errors import InvalidRequestError
from dataplane.ledger.commands import Abort, Command, Release
from dataplane.storage.session_lock import SessionLock

if TYPE_CHECKING:
    from dataplane.client.operations.short_get import ReadPlan
    from dataplane.client.operations.short_put import PutPlan

T = TypeVar("T")


def _taken(queue: collections.deque[T]) -> Iterator[T]:
    """Remove the items of the queue, to which other threads have access, and yield them."""
    with contextlib.suppress(IndexError):  # it is empty
        while True:
            yield queue.popleft()


class Hold:
    """Keeps the session's lock held as long as this object is referenced; the last reference releases the lock.

    The session state refers to it while the session is open, and so does every view. The bytes under a view
    therefore outlive a closed client, and in a forked child that inherited views they outlive the parent.
    """

    def __init__(self, lock: SessionLock) -> None:
        weakref.finalize(self, lock.close).atexit = False


class Pin:
    """Represents the pins of one `Locate` while views of its bytes exist."""

    __slots__ = ("__weakref__", "_hold")

    def __init__(self, hold: Hold | None) -> None:
        self._hold = hold


class _PinRef(weakref.ref[Pin]):
    """Weak reference to the pin of call `call_id`."""

    __slots__ = ("call_id",)
    call_id: int


class Pins:
    """The ids of `Locate` calls whose last view was deleted. Deletion runs no Python code of this class, because it may
    happen at any point of any thread."""

    def __init__(self) -> None:
        self._living: set[_PinRef] = set()
        """Keeps the weak references alive, until `dropped` has yielded their ids."""
        self.gone: collections.deque[_PinRef] = collections.deque()
        """References to deleted pins, until `dropped` has yielded their ids."""

    def take(self, call_id: int, hold: Hold | None) -> Pin:
        """Return a pin for the bytes of call `call_id`. `dropped()` yields the id after the last reference to the
        pin is gone."""
        pin = Pin(hold)
        # When the pin is deleted, the interpreter appends its reference to `gone`.
        reference = _PinRef(pin, self.gone.append)
        reference.call_id = call_id
        self._living.add(reference)
        return pin

    def dropped(self) -> Iterator[int]:
        """Yield the ids of deleted pins, and forget them."""
        for reference in _taken(self.gone):
            self._living.discard(reference)
            yield reference.call_id


class Schema(dict[str, FieldSpec]):
    """The known fields of a partition: declared fields, and undeclared fields that live samples have. open: those whose
    kind nobody declared, so that puts may widen it. widened: those whose kind did. strict: the service rejects
    undeclared fields."""

    def __init__(
        self,
        fields: Mapping[str, FieldSpec] = MappingProxyType({}),
        *,
        undeclared: Iterable[str] = (),
        open: Iterable[str] = (),
        widened: Iterable[str] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(fields)
        self._undeclared = frozenset(undeclared)
        self.open = frozenset(open)
        self.widened = frozenset(widened)
        self.strict = strict

    @property
    def declared(self) -> list[str]:
        """The names of declared fields."""
        return [name for name in self if self.declares(name)]

    def declares(self, name: str) -> bool:
        """Return whether a field of this name is declared."""
        return name in self and name not in self._undeclared


WARNED = 4096
"""Maximum number of remembered names."""


class Warned:
    """Field names for which this client has logged a warning, so that each is logged only once. Thread-safe. `_names`
    is used as an ordered set of (operation, partition, field name), the least recently passed first."""

    def __init__(self, most: int = WARNED) -> None:
        self._lock = threading.Lock()
        self._names: Bounded[tuple[str, str, str], None] = Bounded(most)

    def filter_new(self, what: str, partition: str, names: Iterable[str]) -> list[str]:
        """Return the names that were not passed before with the same `what` and `partition`, and remember them. what:
        the operation that warns, such as "put"."""
        new = []
        with self._lock:
            for name in names:
                key = what, partition, name
                if key not in self._names:
                    new.append(name)
                self._names.store(key, None)
        return new


SCHEMAS = 256
"""Maximum number of schemas that a client caches; it fetches other schemas again."""


class Schemas:
    """LRU cache of the schemas of partitions that this client puts into or claims from. A client is not notified of
    partitions that others clear; their entries are evicted as new ones are added. Thread-safe."""

    def __init__(self, most: int = SCHEMAS) -> None:
        self._lock = threading.Lock()
        self._known: Bounded[str, Schema] = Bounded(most)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, partition: str) -> Schema | None:
        """Return the cached schema of the partition; None if there is none."""
        with self._lock:
            known = self._known.pop(partition, None)
            if known is not None:
                self._known[partition] = known  # the latest one now
            return known

    def remember(self, partition: str, fields: Schema) -> None:
        """Cache the schema of the partition."""
        with self._lock:
            self._known.store(partition, fields)

    def forget(self, partition: str) -> None:
        with self._lock:
            self._known.pop(partition, None)


def check_pickles(config: DataPlaneConfig) -> None:
    """Raise `InvalidRequestError` if pickling is enabled for a service that accepts unauthenticated clients."""
    if config.pickles and config.secret() is None:
        raise InvalidRequestError(
            "objects='pickle' requires a service with a token, because unpickling objects of other clients can execute "
            "arbitrary code; start the service with a token"
        )


class SessionState:
    """The client-side state of a session. durable: the service and its units keep their contents across a restart.
    put_timeout_s: the service's value, used if the config has none.

    `memory` is the pool of buffers that reads reuse, and `empty` allocates tensors from it. `copier` copies long runs
    in several threads. `warned` and `schemas` avoid repeated warnings and requests. `pins` are the pins of returned
    views, `preallocated` is the space for small puts, `appends` are the turns of the calls that append to samples.
    `_lock` is the session's file lock (None: no shared memory); `_hold` is the session's reference that keeps it held
    (see `Hold`).
    """

    def __init__(
        self,
        config: DataPlaneConfig,
        *,
        session: int,
        lock: SessionLock | None,
        durable: bool = False,
        put_timeout_s: float = PUT_TIMEOUT_S,
    ) -> None:
        self.config = config
        if config.put_timeout_s is not None:
            put_timeout_s = config.put_timeout_s
        self.put_timeout_s = as_timeout("put_timeout_s", put_timeout_s)
        self.session = session
        self.durable = durable
        self.schemas = Schemas()
        self.warned = Warned()
        # By partition and names of fields, the plans of small puts.
        self.put_plans: dict[tuple[str, ...], PutPlan] = {}
        # By partition and names of fields, the plans of small reads. None: such rows are on several units.
        self.read_plans: dict[tuple[str, ...], ReadPlan | None] = {}
        self.pins = Pins()
        self.preallocated = PreallocatedBuffer()
        self.appends = Turns()
        self.memory = BufferPool(config.result_memory_bytes)
        self.copier = Copier(config.copy_threads or default_threads())
        self.connections = UnitConnections(
            config, session=session, lock=lock, memory=self.memory, copier=self.copier.copy
        )
        self.empty = from_pool(self.memory)
        self.releasable = (self.pins.gone, self.preallocated.returned, self.connections.unstopped)
        """If they are all empty, there are no `leftovers`."""
        self._lock = lock
        self._hold = None if lock is None else Hold(lock)

    @property
    def lock_stands(self) -> bool:
        """Whether the session's lock, if it has one, has been held without interruption."""
        return self._lock is None or self._lock.stands

    def pin(self, call_id: int) -> Pin:
        """Return a pin that views of the bytes located by call `call_id` share."""
        return self.pins.take(call_id, self._hold)

    def leftovers(self) -> Iterator[Command]:
        """Yield the commands that release pins without views, unused preallocated space and the space of failed puts
        that can be freed by now."""
        for call_id in self.pins.dropped():
            yield Release(located=call_id)
        for call_id in _taken(self.preallocated.returned):
            yield Abort(reservation=call_id)
        for call_id in self.connections.take_settled():
            yield Abort(reservation=call_id)

    def idle_leftovers(self) -> Iterator[Command]:
        """Yield the same commands for a heartbeat, after giving up idle preallocated space."""
        self.preallocated.give_up_idle()
        return self.leftovers()

    def forked(self) -> None:
        """In a forked child, drop the session's reference to the parent's lock: only existing views keep it held."""
        self._hold = None

    def close(self) -> None:
        """Close the connections, free pooled memory and stop the copy threads. Release the lock,
        unless existing views hold it. `leftovers` then yields the commands that release all unused
        preallocated space, which the service would otherwise keep until the last view is gone."""
        self.connections.close()
        self.preallocated.give_up_all()
        self.memory.drop()
        self.copier.close()
        self._hold = None


class Turn:
    """The turn of a call. ready: done when it is the first turn of all its keys, unless `enter` returned that."""

    def __init__(self, keys: Iterable[Hashable]) -> None:
        self.keys = frozenset(keys)
        self.ready: Future[None] = Future()


class Turns:
    """Turns in the order in which they were entered. Thread-safe. `_queues`: the turns of each key, first to last."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, dict[Turn, None]] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._queues)

    def enter(self, turn: Turn) -> bool:
        """Add a turn after all others that have a key in common with it. Return whether it is ready at once."""
        with self._guard:
            for key in turn.keys:
                self._queues.setdefault(key, {})[turn] = None
            return self._is_first(turn)

    def leave(self, turn: Turn) -> None:
        """End a turn, ready or not. Turns that are now the first of all their keys become ready."""
        with self._guard:
            for key in turn.keys:
                del self._queues[key][turn]
                if not self._queues[key]:
                    del self._queues[key]
            for first in {next(iter(self._queues[key])) for key in turn.keys & self._queues.keys()}:
                if not first.ready.done() and self._is_first(first):
                    first.ready.set_result(None)

    def _is_first(self, turn: Turn) -> bool:
        """Return whether the turn is the first of all its keys."""
        return all(next(iter(self._queues[key])) is turn for key in turn.keys)
