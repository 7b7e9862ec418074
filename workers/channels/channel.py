"""Queues between workers: put in one process, got in another.

A channel could have been a partition of the data plane: bounded, journalled, inspectable. It is not, because there an
item costs its producer a reservation and a commit, and its consumer a claim, a location, a read and an acknowledgement,
each through the controller: 300 items of 64 KB a second on a machine where Ray's queue passes as many, and a channel
4,500; 200 of 4 MB to a channel's 900. The memory is the data plane's (`dataplane.storage.arena`), and so are its ways:
space is reserved, written by the producer, read by the consumer, and the bytes of a tensor are copied once into it and
once out of it, never through a socket on one host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dataplane.core.durations import seconds
from workers.channels import wire
from workers.channels.answers import error_of
from workers.channels.connection import to_settle
from workers.channels.connection_pool import Link
from workers.channels.discovery import NOTICE_S, await_others, find_brokers, opened
from workers.channels.errors import ChannelClosedError, ChannelLostError, ChannelSettingsError, LocalChannelError
from workers.channels.items import Parcel, as_weight
from workers.channels.key_routing import ASK_S, Routes
from workers.channels.keys import key_bytes
from workers.channels.local import LocalLink
from workers.channels.preview import CANNOT_SHOW, SHOW_S, SHOWN_ITEMS, shown
from workers.channels.settings import ChannelSettings, as_maxsize, as_node_rank, check_name, node_rank_here
from workers.directory import DirectoryClient, Kind
from workers.errors import DirectoryLostError, NameInUseError
from workers.messages.async_work import AsyncWork
from workers.transport.poll_thread import refuse_waiting
from workers.transport.stream import StreamSilentError

DEFAULT_KEY = "default_queue"
TIMEOUT_S = 1800.0
"""How long a put or get waits at most, unless told otherwise."""

T = TypeVar("T")


class Channel:
    """A named set of queues, one for each key, first in first out. Thread-safe, and may be sent to other workers.

    `maxsize` bounds each queue in items (0: it is bounded in bytes only, by the memory of its node's broker); a put
    waits for a place. Every wait ends at its timeout (`timeout_s`, by default the handle's, which is `TIMEOUT_S`) with
    `ChannelTimeoutError`, and says every 30 s in the log what it waits for. A wait takes no processor time.

    An item is the getter's once it has arrived there (and, of another host's broker, once that has said that it knows);
    if its process dies before, the next getter has it. Any Python object that can be pickled is an item. Tensors come
    back on the CPU, those of a CUDA device on the getter's current one, if any; they are its own, and no views.

    With `async_op` a call returns a handle (`wait`, `async_wait`, `done`, `then`) at once; what was put is what the
    item was at the call. An item that nobody takes from its handle goes to the next getter when the handle goes. The
    handle's own `timeout` is another: after it, `wait` raises `MessageTimeoutError`, and the call goes on.

    A key is a string, a number, bytes, None, a tuple of these, or another hashable value that is equal to its copies in
    other processes, such as a member of an enum; TypeError for others, ValueError for one of more than 1 MiB.

    Errors of any call: `ChannelLostError` where the broker's process died, `ChannelClosedError` after `disconnect`,
    ValueError for a wait without an end.
    """

    def __init__(
        self, settings: ChannelSettings, *, node_rank: int | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Use `create` or `connect`."""
        self._settings = settings
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._node_rank = node_rank_here() if node_rank is None else node_rank
        self._links: list[Link | LocalLink] = [Link(endpoint, settings.name) for endpoint in settings.endpoints] or [
            LocalLink(settings.name)
        ]
        wish = settings.nodes.index(self._node_rank) if self._node_rank in settings.nodes else 0
        self._routes = Routes(settings.ident, self._links, wish=wish)

    # --- made and found

    @classmethod
    def create(
        cls,
        name: str,
        *,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        directory: DirectoryClient | None = None,
        here: int | None = None,
        nodes: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Channel:
        """A new channel, or that of the name if it has the same settings; `ChannelSettingsError` if it has others,
        `ChannelLostError` if some of its nodes' brokers are gone. One that has lost all of its brokers is forgotten.

        distributed: it has a part on every node that has a broker now, and a key is on the node where it was first
        used; otherwise it is on node `node_rank`. A broker that is being started, or started again after it died, is
        waited for, up to a minute, if no other will do. One that does not answer is a `ChannelLostError`, unless the
        directory gives it up within `NOTICE_S`. local: it is in this process only, any number of the same name.
        directory: by default that of the environment, else of this process's Ray job, as `Cluster()` finds or starts
        it. here, nodes: the rank of this process's node, and how many there are, by default what the environment says
        (else a node that is none is a `NameNotFoundError` after that minute). TypeError or ValueError for arguments
        that cannot be.
        """
        check_name(name)
        maxsize, node_rank = as_maxsize(maxsize), as_node_rank(node_rank, nodes)
        wanted = ChannelSettings(
            name=name,
            ident=f"{name}/{secrets.token_hex(8)}",
            maxsize=maxsize,
            distributed=distributed and not local,
            nodes=(node_rank_here() if here is None else here,),
            endpoints=(),
        )

        def make(settings: ChannelSettings) -> Channel:
            return cls(settings, node_rank=here, timeout_s=timeout_s)

        if local:
            channel = make(wanted)
            channel._create()
            return channel
        with opened(directory, join=True) as known:
            wanted = dataclasses.replace(wanted, directory=known.address)
            return _enter(_held(known, None if distributed else node_rank, wanted, make), known)

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        directory: DirectoryClient | None = None,
        here: int | None = None,
        wait_s: float = 0.0,
        timeout_s: float = TIMEOUT_S,
    ) -> Channel:
        """The channel of that name, once there is one: waits for it for up to `wait_s`, then `NameNotFoundError`;
        `WorkerLostError` if it was closed, `ChannelLostError` if its brokers are gone."""
        check_name(name)
        with opened(directory) as known:
            settings = ChannelSettings.of(known.lookup_channel(name, wait_s), known.address)
        channel = cls(settings, node_rank=here, timeout_s=timeout_s)
        lost = channel._lost(f"connection to channel {name!r}")
        if len(lost) == len(settings.endpoints):
            channel.disconnect()
            raise lost[0]
        return channel

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def maxsize(self) -> int:
        return self._settings.maxsize

    @property
    def distributed(self) -> bool:
        return self._settings.distributed

    @property
    def is_local(self) -> bool:
        """Whether it is in this process only."""
        return not self._settings.endpoints

    # --- items

    def put(
        self,
        item: Any,
        weight: float = 0,
        key: Any = DEFAULT_KEY,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> AsyncWork[None] | None:
        """Put `item` at the end of its key's queue; returns when it is there. weight: what it counts in `get_batch`.
        Where there is no memory for it, it waits, and later puts under its key behind it; smaller ones of other keys
        and channels may pass it.

        `NotSerializableError`, `ItemTooLargeError`, or `ChannelClosedError`: then nothing was put, and the channel is
        as it was.
        """
        what = self._what("put", key)
        ready, request, link = self._prepare(item, weight, key, False, what)
        until = self._until(timeout_s)
        if async_op:
            _, future = link.begin_put(request, ready, what, until)
            return AsyncWork(future, what, lambda answer: self._nothing(answer, key))
        refuse_waiting(what)
        self._nothing(link.put(request, ready, what, until), key)
        return None

    def put_nowait(self, item: Any, weight: float = 0, key: Any = DEFAULT_KEY) -> None:
        """The same without waiting for a place: `asyncio.QueueFull` where there is none, or no memory."""
        what = self._what("put_nowait", key)
        ready, request, link = self._prepare(item, weight, key, True, what)
        self._nothing(link.put(request, ready, what, self._until(ASK_S)), key)

    def get(self, key: Any = DEFAULT_KEY, async_op: bool = False, *, timeout_s: float | None = None) -> Any:
        """The first item of the key's queue; waits for one. `EndOfChannelError` once the channel is closed and the
        queue has no more."""
        return self._get("get", key, None, async_op, timeout_s, lambda answer: self._items(answer, key)[0])

    def get_nowait(self, key: Any = DEFAULT_KEY) -> Any:
        """The same without waiting: `asyncio.QueueEmpty` where there is none."""
        what = self._what("get_nowait", key)
        make, link = self._getting(key, None, True, what)
        return self._items(link.ask(make, what, self._until(ASK_S)), key)[0]

    def get_batch(
        self,
        target_weight: float = 0,
        key: Any = DEFAULT_KEY,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """A list of items from the front: as soon as they weigh `target_weight` or more (a sum of doubles, rounded
        once), or the next one would make them weigh more. So an item that alone is heavier comes alone. Batches are
        collected one after another, each whole; a closed channel gives what is left."""
        target = as_weight("target_weight", target_weight)
        return self._get("get_batch", key, target, async_op, timeout_s, lambda answer: self._items(answer, key))

    def qsize(self, key: Any = DEFAULT_KEY) -> int:
        """Items in the key's queue now, without those that were handed out."""
        return self._count(key).size

    def empty(self, key: Any = DEFAULT_KEY) -> bool:
        """Whether the key's queue has no item now."""
        return self.qsize(key) == 0

    def full(self, key: Any = DEFAULT_KEY) -> bool:
        """Whether the key's queue has as many items as it may have; never, where `maxsize` is 0."""
        return 0 < self.maxsize <= self.qsize(key)

    # --- the end

    def close(self) -> None:
        """End the channel, for everyone: it takes no more items, puts that wait raise `ChannelClosedError`, getters
        have what is left and then `EndOfChannelError`. Its name is free. What this handle holds of connections and
        threads goes as soon as nothing uses it. Of a part that cannot be closed the error is raised once the rest is
        done. Idempotent."""
        failed = self._close_parts(self._links)
        self._unregister()
        self._retire()
        if failed is not None:
            raise failed

    def _close_parts(self, links: Sequence[Link | LocalLink]) -> Exception | None:
        """All of them; the first error, but of those that are gone: one that stands still is not, and may go on."""
        what, failed = f"close of channel {self.name!r}", None
        for link in links:
            try:
                link.ask_after_puts(lambda number: wire.Close(number, self._settings.ident), what, self._until(ASK_S))
            except ChannelClosedError:
                pass
            except Exception as error:
                if not isinstance(error, ChannelLostError) or isinstance(error.__cause__, StreamSilentError):
                    failed = failed or error
        return failed

    def _undo(self, links: Sequence[Link | LocalLink], because: BaseException) -> None:
        """Close parts, because of an error, which this does not hide."""
        failed = self._close_parts(links)
        if failed is not None:
            because.add_note(f"and what was made of channel {self.name!r} before could not all be closed: {failed}")

    def _retire(self) -> None:
        """Keep no connection or thread that is not in use; calls still work."""
        for link in self._links:
            link.retire()

    def disconnect(self) -> None:
        """Let go of connections and threads; the channel itself goes on (but a local one, which ends). Calls under way
        raise `ChannelClosedError`, as do later ones. Done when the handle is garbage, too. Idempotent."""
        for link in self._links:
            link.close()

    def _unregister(self) -> None:
        settings = self._settings
        if settings.directory is None or settings.incarnation is None:
            return
        with contextlib.suppress(DirectoryLostError), DirectoryClient(settings.directory) as directory:
            directory.end(Kind.CHANNEL, settings.name, settings.incarnation, "it was closed")

    # --- inside

    def _create(self) -> None:
        """All of its parts, or none: those before the one that cannot be made are closed."""
        what, settings = f"creation of channel {self.name!r}", self._settings
        made = settings.ident, settings.name, settings.maxsize
        for place, link in enumerate(self._links):
            try:
                link.ask(lambda number: wire.Create(number, *made), what, self._until(ASK_S))
            except BaseException as error:
                self._undo(self._links[:place], error)
                raise

    def _prepare(self, item: Any, weight: float, key: Any, nowait: bool, what: str) -> tuple[Any, wire.Put, Any]:
        """The item ready to go, the request, and the link to the part that has the key."""
        weight, raw = as_weight(f"{what}: weight", weight), self._key(key)
        link = self._routes.link(raw, what)
        ready = item if isinstance(link, LocalLink) else Parcel.of(item, f"an item of {what}")
        return ready, wire.Put(0, self._settings.ident, raw, _NOTHING, weight, nowait), link

    def _get(
        self,
        verb: str,
        key: Any,
        target: float | None,
        async_op: bool,
        timeout_s: float | None,
        finish: Callable[..., T],
    ) -> T | AsyncWork[T]:
        what = self._what(verb, key)
        make, link = self._getting(key, target, False, what)
        if not async_op:
            refuse_waiting(what)
            return finish(link.ask(make, what, self._until(timeout_s)))
        future, drop = link.begin(make, what, self._until(timeout_s))
        work = AsyncWork(future, what, finish, to_settle)
        weakref.finalize(work, drop).atexit = False
        return work

    def _getting(
        self, key: Any, target: float | None, nowait: bool, what: str
    ) -> tuple[Callable[[int], wire.Get], Any]:
        """What makes the request, and the link to the part that has the key."""
        ident, raw = self._settings.ident, self._key(key)
        return lambda number: wire.Get(number, ident, raw, target, nowait), self._routes.link(raw, what)

    def _count(self, key: Any) -> wire.Counted:
        return self._routes.count(self._key(key), self._what("qsize", key))

    def _nothing(self, answer: Any, key: Any) -> None:
        if not isinstance(answer, wire.BrokerDone):
            raise self._error(answer, key)

    def _items(self, answer: Any, key: Any) -> list[Any]:
        if not hasattr(answer, "take"):
            raise self._error(answer, key)
        items: list[Any] = answer.take()
        return items

    def _error(self, answer: Any, key: Any) -> Exception:
        if isinstance(answer, wire.Ended):
            self._retire()
        return error_of(answer, self.name, key)

    def _key(self, key: Any) -> bytes:
        return _DEFAULT if key is DEFAULT_KEY else key_bytes(key)

    def _lost(self, what: str) -> list[ChannelLostError]:
        """Of each part whose broker does not answer, how that is to be said."""
        return self._routes.survey(_DEFAULT, what)[1]

    def _what(self, verb: str, key: Any) -> str:
        what = f"{verb} of channel {self.name!r}"
        return what if key is DEFAULT_KEY else f"{what}, key {key!r}"

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else seconds("timeout_s", timeout_s))

    def __repr__(self) -> str:
        where = "local" if self.is_local else str(self._settings)
        return f"Channel({self.name!r}, {where})"

    def __str__(self) -> str:
        """The first items of the default queue, in short, and how many more there are; or why that is not known."""
        what = f"look at channel {self.name!r}"
        try:
            make = functools.partial(wire.Peek, channel=self._settings.ident, key=_DEFAULT, most=SHOWN_ITEMS)
            return shown(self._routes.link(_DEFAULT, what).ask(make, what, self._until(SHOW_S)), self.is_local)
        except CANNOT_SHOW as error:
            return f"{self!r}: {error}"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_local:
            raise LocalChannelError(channel=self.name)
        return functools.partial(Channel, timeout_s=self._timeout_s), (self._settings,)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NOTHING = wire.Item(None)
_DEFAULT = key_bytes(DEFAULT_KEY)


def _held(
    directory: DirectoryClient,
    node_rank: int | None,
    wanted: ChannelSettings,
    make: Callable[[ChannelSettings], Channel],
) -> Channel:
    """What `make` makes of `wanted` and the brokers of a node (of all, if None), once they hold it. A broker that died
    is started again: where one cannot be reached, what the directory finds out within `NOTICE_S` is waited for."""
    until = time.monotonic() + NOTICE_S
    while True:
        brokers = find_brokers(directory, node_rank)
        channel = make(dataclasses.replace(wanted, nodes=tuple(brokers), endpoints=tuple(brokers.values())))
        try:
            channel._create()
            return channel
        except BaseException as error:
            channel.disconnect()
            if not isinstance(error, ChannelLostError) or not await_others(directory, brokers, until):
                raise


def _enter(channel: Channel, directory: DirectoryClient) -> Channel:
    """Take the name of a channel that its brokers hold; where that is taken, the channel that has it."""
    try:
        taken = _named(channel, directory)
    except BaseException as error:
        channel._undo(channel._links, error)
        channel.disconnect()
        raise
    if taken is not channel:
        channel.close()
        channel.disconnect()
    return taken


def _named(channel: Channel, directory: DirectoryClient) -> Channel:
    settings = channel._settings
    while True:
        try:
            entry = directory.register_channel(settings.name, settings.endpoints, settings.facts, owned=False)
        except NameInUseError:
            there = _there(channel, directory)
            if there is not None:
                return there
        else:
            channel._settings = ChannelSettings.of(entry, directory.address)
            return channel


def _there(channel: Channel, directory: DirectoryClient) -> Channel | None:
    """The channel that has the name of this one, if it is alive and made alike; None if the name is free now."""
    entries = [each for each in directory.listing(Kind.CHANNEL) if each.name == channel.name]
    if not entries:
        return None
    found, ours = ChannelSettings.of(entries[0], directory.address), channel._settings
    there = Channel(found, node_rank=channel._node_rank, timeout_s=channel._timeout_s)
    lost = there._lost(f"creation of channel {channel.name!r}")
    if len(lost) == len(found.endpoints):
        directory.end(Kind.CHANNEL, found.name, found.incarnation, "its brokers are gone")
        return None
    error: Exception | None = lost[0] if lost else None
    if error is not None:
        error.add_note(f"other parts of {there!r} are there; `close` it (`connect` finds it) to have another made")
    # The nodes of a distributed one are those that had a broker when it was made.
    alike = (found.maxsize, found.distributed) == (ours.maxsize, ours.distributed)
    if not alike or not (found.distributed or found.nodes == ours.nodes):
        error = error or ChannelSettingsError(channel=channel.name, got=str(ours), expected=str(found))
    if error is not None:
        there.disconnect()
        raise error
    return there
