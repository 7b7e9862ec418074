"""Queues between workers: one process puts an item, another process gets it.

A channel is not a partition of the data plane, because an item of a partition is too expensive. Its producer needs a
reservation and a commit; its consumer needs a claim, a location, a read and an acknowledgement. Each of these calls
goes through the controller. On one machine a partition passes 300 items of 64 KB a second, about as many as Ray's
queue, and a channel 4,500; of items of 4 MB, 200 and 900. A channel uses the same kind of memory as the data plane
(`dataplane.storage.arena`): the producer reserves space and writes, and the consumer reads. The bytes of a tensor are
copied once into that memory and once out of it, and on one host they never pass through a socket.
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
"""Default timeout of a put or get."""

T = TypeVar("T")


class Channel:
    """A named set of queues, one for each key, first in first out. Thread-safe. Handles can be sent to other workers.

    `maxsize` bounds each queue in items. With 0 only the memory of the node's broker bounds it, in bytes. A put waits
    for a free place. Every wait ends at its timeout (`timeout_s`, by default the handle's, which is `TIMEOUT_S`) with
    `ChannelTimeoutError`, and logs every 30 s what it waits for. A wait uses no processor time.

    An item belongs to the getter once it has arrived in the getter's process (and, if the broker is on another host,
    once the broker has confirmed that). If that process dies earlier, the next getter receives the item. Any Python
    object that can be pickled is an item. Tensors arrive on the CPU, those of a CUDA device on the getter's current
    device, if it has one. Received tensors own their memory and are not views.

    With `async_op` a call returns a handle (`wait`, `async_wait`, `done`, `then`) at once; a put then sends the item
    as it was at the call. If a handle is garbage-collected before its item is taken, the next getter receives the
    item. The `timeout` of the handle's `wait` is separate: after it, `wait` raises `MessageTimeoutError`, and the
    call continues.

    A key is a string, a number, bytes, None, a tuple of these, or another hashable value that equals its copies in
    other processes, such as a member of an enum. Other keys raise TypeError; a key of more than 1 MiB raises
    ValueError.

    Every call may raise `ChannelLostError` if the broker's process died, `ChannelClosedError` after `disconnect`, and
    ValueError for an infinite timeout.
    """

    def __init__(
        self, settings: ChannelSettings, *, node_rank: int | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Use `create` or `connect` instead."""
        self._settings = settings
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._node_rank = node_rank_here() if node_rank is None else node_rank
        self._links: list[Link | LocalLink] = [Link(endpoint, settings.name) for endpoint in settings.endpoints] or [
            LocalLink(settings.name)
        ]
        wish = settings.nodes.index(self._node_rank) if self._node_rank in settings.nodes else 0
        self._routes = Routes(settings.ident, self._links, wish=wish)

    # --- create and connect

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
        """Return a new channel, or the existing channel of that name if it has the same settings.
        `ChannelSettingsError` if the existing channel has other settings, `ChannelLostError` if some of its brokers
        are lost. A channel that lost all of its brokers is replaced.

        distributed: the channel has a part on every node that has a broker now, and the node that first uses a key
        stores its queue. Otherwise the channel is on node `node_rank`. If the channel needs a broker that is starting
        or restarting, the call waits up to a minute for it. A broker that does not answer raises `ChannelLostError`,
        unless the directory declares it lost within `NOTICE_S`. local: the channel exists in this process only; any
        number may have the same name. directory: by default that of the environment, else that of this process's Ray
        job, as `Cluster()` finds or starts it. here, nodes: the rank of this process's node and the number of nodes,
        by default from the environment; if the number is unknown, a rank without a node raises `NameNotFoundError`
        after that minute. TypeError or ValueError for invalid arguments.
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
            return _register_or_find(_create_on_brokers(known, None if distributed else node_rank, wanted, make), known)

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
        """Return the channel of that name. Blocks for up to `wait_s` until it exists. Raises `NameNotFoundError`
        after that, `WorkerLostError` if the channel was closed, `ChannelLostError` if its brokers are lost."""
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
        """Whether the channel exists in this process only."""
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
        """Put `item` at the end of the queue of `key`, and return when it is stored. weight: what the item counts in
        `get_batch`. If the broker has no memory for the item, the put waits; later puts under the same key stay
        behind it, and smaller items of other keys and channels may overtake it.

        Raises `NotSerializableError`, `ItemTooLargeError` or `ChannelClosedError`; the channel is then unchanged.
        """
        what = self._describe("put", key)
        ready, request, link = self._prepare(item, weight, key, False, what)
        until = self._deadline(timeout_s)
        if async_op:
            _, future = link.begin_put(request, ready, what, until)
            return AsyncWork(future, what, lambda answer: self._check_done(answer, key))
        refuse_waiting(what)
        self._check_done(link.put(request, ready, what, until), key)
        return None

    def put_nowait(self, item: Any, weight: float = 0, key: Any = DEFAULT_KEY) -> None:
        """Put `item` without waiting. `asyncio.QueueFull` if the queue has no free place or the broker no memory."""
        what = self._describe("put_nowait", key)
        ready, request, link = self._prepare(item, weight, key, True, what)
        self._check_done(link.put(request, ready, what, self._deadline(ASK_S)), key)

    def get(self, key: Any = DEFAULT_KEY, async_op: bool = False, *, timeout_s: float | None = None) -> Any:
        """Return the first item of the key's queue; blocks until there is one. `EndOfChannelError` once the channel
        is closed and the queue is empty."""
        return self._get("get", key, None, async_op, timeout_s, lambda answer: self._items(answer, key)[0])

    def get_nowait(self, key: Any = DEFAULT_KEY) -> Any:
        """Return the first item without waiting. `asyncio.QueueEmpty` if the queue has none."""
        what = self._describe("get_nowait", key)
        make, link = self._getting(key, None, True, what)
        return self._items(link.ask(make, what, self._deadline(ASK_S)), key)[0]

    def get_batch(
        self,
        target_weight: float = 0,
        key: Any = DEFAULT_KEY,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Return a list of items from the front of the queue. The batch is complete when the items weigh
        `target_weight` or more (a sum of doubles, rounded once), or when the next item would exceed it. A heavier
        single item is therefore returned alone. Batches are collected one after another, each completely. A closed
        channel returns the remaining items."""
        target = as_weight("target_weight", target_weight)
        return self._get("get_batch", key, target, async_op, timeout_s, lambda answer: self._items(answer, key))

    def qsize(self, key: Any = DEFAULT_KEY) -> int:
        """Return the number of items in the key's queue now, without those that getters have received."""
        return self._count(key).size

    def empty(self, key: Any = DEFAULT_KEY) -> bool:
        """Return whether the key's queue has no item now."""
        return self.qsize(key) == 0

    def full(self, key: Any = DEFAULT_KEY) -> bool:
        """Return whether the key's queue holds `maxsize` items. Always false if `maxsize` is 0."""
        return 0 < self.maxsize <= self.qsize(key)

    # --- close

    def close(self) -> None:
        """Close the channel for all processes and free its name. The channel accepts no more items, and waiting puts
        raise `ChannelClosedError`. Getters receive the remaining items, then `EndOfChannelError`. The connections and
        threads of this handle close as soon as they are unused. If a part cannot be closed, its error is raised after
        the other parts were closed. Idempotent."""
        failed = self._close_parts(self._links)
        self._unregister()
        self._retire()
        if failed is not None:
            raise failed

    def _close_parts(self, links: Sequence[Link | LocalLink]) -> Exception | None:
        """Close all parts and return the first error. The errors of lost parts are ignored, but not that of a part
        that does not respond: it may continue."""
        what, failed = f"close of channel {self.name!r}", None
        for link in links:
            try:
                link.ask_after_puts(
                    lambda number: wire.Close(number, self._settings.ident), what, self._deadline(ASK_S)
                )
            except ChannelClosedError:
                pass
            except Exception as error:
                if not isinstance(error, ChannelLostError) or isinstance(error.__cause__, StreamSilentError):
                    failed = failed or error
        return failed

    def _undo(self, links: Sequence[Link | LocalLink], because: BaseException) -> None:
        """Close parts after an error. A failure to close them is added to that error as a note."""
        failed = self._close_parts(links)
        if failed is not None:
            because.add_note(f"Some parts of channel {self.name!r} that were already created are still open: {failed}")

    def _retire(self) -> None:
        """Close connections and threads as soon as they are unused. Calls still work."""
        for link in self._links:
            link.retire()

    def disconnect(self) -> None:
        """Close the connections and threads of this handle. The channel itself continues, except a local channel,
        which ends. Pending and later calls raise `ChannelClosedError`. Garbage collection of the handle has the same
        effect. Idempotent."""
        for link in self._links:
            link.close()

    def _unregister(self) -> None:
        settings = self._settings
        if settings.directory is None or settings.incarnation is None:
            return
        with contextlib.suppress(DirectoryLostError), DirectoryClient(settings.directory) as directory:
            directory.end(Kind.CHANNEL, settings.name, settings.incarnation, "it was closed")

    # --- internals

    def _create(self) -> None:
        """Create all parts of the channel. If one fails, the parts created before it are closed."""
        what, settings = f"creation of channel {self.name!r}", self._settings
        made = settings.ident, settings.name, settings.maxsize
        for place, link in enumerate(self._links):
            try:
                link.ask(lambda number: wire.Create(number, *made), what, self._deadline(ASK_S))
            except BaseException as error:
                self._undo(self._links[:place], error)
                raise

    def _prepare(self, item: Any, weight: float, key: Any, nowait: bool, what: str) -> tuple[Any, wire.Put, Any]:
        """Return the packed item, its request, and the link to the part that stores the key."""
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
        what = self._describe(verb, key)
        make, link = self._getting(key, target, False, what)
        if not async_op:
            refuse_waiting(what)
            return finish(link.ask(make, what, self._deadline(timeout_s)))
        future, drop = link.begin(make, what, self._deadline(timeout_s))
        work = AsyncWork(future, what, finish, to_settle)
        weakref.finalize(work, drop).atexit = False
        return work

    def _getting(
        self, key: Any, target: float | None, nowait: bool, what: str
    ) -> tuple[Callable[[int], wire.Get], Any]:
        """Return a function that makes the request, and the link to the part that stores the key."""
        ident, raw = self._settings.ident, self._key(key)
        return lambda number: wire.Get(number, ident, raw, target, nowait), self._routes.link(raw, what)

    def _count(self, key: Any) -> wire.Counted:
        return self._routes.count(self._key(key), self._describe("qsize", key))

    def _check_done(self, answer: Any, key: Any) -> None:
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
        """Return a `ChannelLostError` for each part whose broker does not answer."""
        return self._routes.survey(_DEFAULT, what)[1]

    def _describe(self, verb: str, key: Any) -> str:
        what = f"{verb} of channel {self.name!r}"
        return what if key is DEFAULT_KEY else f"{what}, key {key!r}"

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else seconds("timeout_s", timeout_s))

    def __repr__(self) -> str:
        where = "local" if self.is_local else str(self._settings)
        return f"Channel({self.name!r}, {where})"

    def __str__(self) -> str:
        """Show the first items of the default queue and the number of the others, or the error that prevents it."""
        what = f"look at channel {self.name!r}"
        try:
            make = functools.partial(wire.Peek, channel=self._settings.ident, key=_DEFAULT, most=SHOWN_ITEMS)
            return shown(self._routes.link(_DEFAULT, what).ask(make, what, self._deadline(SHOW_S)), self.is_local)
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


def _create_on_brokers(
    directory: DirectoryClient,
    node_rank: int | None,
    wanted: ChannelSettings,
    make: Callable[[ChannelSettings], Channel],
) -> Channel:
    """Return the channel that `make` makes of `wanted` and the brokers of a node (of all nodes if None), after these
    brokers have created it. Ray restarts a broker that died: if a broker cannot be reached, this waits up to
    `NOTICE_S` for the directory to report its end or its successor."""
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


def _register_or_find(channel: Channel, directory: DirectoryClient) -> Channel:
    """Register the name of a created channel. If the name is taken, return the channel that has it."""
    try:
        taken = _register(channel, directory)
    except BaseException as error:
        channel._undo(channel._links, error)
        channel.disconnect()
        raise
    if taken is not channel:
        channel.close()
        channel.disconnect()
    return taken


def _register(channel: Channel, directory: DirectoryClient) -> Channel:
    """Register the channel, or find the channel that has its name, until one of both succeeds."""
    settings = channel._settings
    while True:
        try:
            entry = directory.register_channel(settings.name, settings.endpoints, settings.facts, owned=False)
        except NameInUseError:
            there = _find_existing(channel, directory)
            if there is not None:
                return there
        else:
            channel._settings = ChannelSettings.of(entry, directory.address)
            return channel


def _find_existing(channel: Channel, directory: DirectoryClient) -> Channel | None:
    """Return the existing channel of the same name if it is alive and has the same settings; None if the name is free
    now."""
    entries = [each for each in directory.listing(Kind.CHANNEL) if each.name == channel.name]
    if not entries:
        return None
    found, ours = ChannelSettings.of(entries[0], directory.address), channel._settings
    there = Channel(found, node_rank=channel._node_rank, timeout_s=channel._timeout_s)
    lost = there._lost(f"creation of channel {channel.name!r}")
    if len(lost) == len(found.endpoints):
        directory.end(Kind.CHANNEL, found.name, found.incarnation, "its brokers are lost")
        return None
    error: Exception | None = lost[0] if lost else None
    if error is not None:
        error.add_note(f"Other parts of {there!r} are alive; to replace the channel, `connect` to it and `close` it")
    # A distributed channel keeps the nodes that had a broker when it was created.
    alike = (found.maxsize, found.distributed) == (ours.maxsize, ours.distributed)
    if not alike or not (found.distributed or found.nodes == ours.nodes):
        error = error or ChannelSettingsError(channel=channel.name, got=str(ours), expected=str(found))
    if error is not None:
        there.disconnect()
        raise error
    return there
