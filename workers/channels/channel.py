"""Queues between workers: one process puts an item, another process gets it.

A channel is not a partition of the data plane, because an item of a partition is too expensive. Its producer needs a
reservation and a commit; its consumer needs a claim, a location, a read and an acknowledgement. Each of these calls
goes through the controller. On one machine a partition passes 300 items of 64 KB a second, about as many as Ray's
queue, and a channel 4,500; of items of 4 MB, 200 and 900. A channel uses the same kind of memory as the data plane
(`dataplane.storage.arena`): the producer reserves space and writes, and the consumer reads. The bytes of a tensor are
copied once into that memory and once out of it, and on one host they never pass through a socket.

This file also encodes keys as bytes (equal for equal keys), makes errors of a broker's answers, and formats a queue's
items as a short text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import io
import pickle
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from dataplane.core.buffer_pool import BufferPool
from dataplane.core.durations import as_timeout
from dataplane.errors import ServiceError, WaitTimeoutError
from workers.channels import items, wire
from workers.channels.connection import acknowledgement_of
from workers.channels.connection_pool import Link
from workers.channels.discovery import (
    NOTICE_S,
    ChannelSettings,
    as_maxsize,
    as_node_rank,
    await_broker_change,
    check_name,
    directory_or_default,
    find_brokers,
    node_rank_here,
)
from workers.channels.errors import (
    ChannelClosedError,
    ChannelLostError,
    ChannelSettingsError,
    EndOfChannelError,
    ItemTooLargeError,
    LocalChannelError,
)
from workers.channels.items import Parcel, as_weight
from workers.channels.key_routing import ASK_S, Routes
from workers.channels.local import LocalLink
from workers.channels.wire import NOWHERE
from workers.directory import DirectoryClient, Kind
from workers.errors import DirectoryLostError, NameInUseError
from workers.messages.async_work import AsyncWork
from workers.transport.stream import StreamSilentError
from workers.transport.waiting import DEFAULT_TIMEOUT, Timeout, timeout_or

DEFAULT_KEY = "default_queue"
TIMEOUT_S = 1800.0
"""Default timeout of a put or get."""
SHOWN_ITEMS = 20
SHOWN_CHARS = 200
"""Most characters for each item."""
SHOW_S = 5.0
"""How long a broker may take to answer."""
CANNOT_SHOW = (ServiceError, WaitTimeoutError, ChannelClosedError)
"""Errors of a request for the items."""
MOST_BYTES = 1 << 20
"""Limit of an encoded key."""
_encode = msgspec.msgpack.Encoder().encode

T = TypeVar("T")


def key_bytes(key: Any) -> bytes:
    """Encode a key. Strings, numbers, bytes, None and tuples of these have the same bytes in every process; as in a
    dict, True equals 1 and 1.0 equals 1. Other hashable keys are equal if their pickles are, such as members of an
    enum. TypeError for a key that is not hashable or differs from its copy in another process, ValueError above
    `MOST_BYTES`."""
    # The first byte says how the key is encoded, so that keys of both encodings differ.
    try:
        raw = b"m" + _encode(_msgpack_form(key))
    except TypeError:
        raw = b"p" + _pickle_key(key)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"key of {len(raw):,} bytes is too long: a channel's key has at most {MOST_BYTES:,}")
    return raw


def _pickle_key(key: Any) -> bytes:
    """Pickle a key. TypeError if that fails, or if the key does not equal its copy."""
    target = io.BytesIO()
    pickler = pickle.Pickler(target, protocol=5)
    # No memoization: equal keys have equal bytes, even if parts of one of them are the same object.
    pickler.fast = True
    why = "it is not equal to its copy in another process"
    try:
        pickler.dump(key)
        copy = pickle.loads(target.getvalue())  # noqa: S301 (bytes made by this function)
        if hash(copy) == hash(key) and copy == key:
            return target.getvalue()
    except Exception as error:
        why = str(error)
    raise TypeError(
        f"key of type {type(key).__name__} is not supported: {why}. Use strings, numbers, bytes, None, tuples of "
        "these, or other hashable values that equal their copies, such as members of an enum"
    )


def _msgpack_form(key: Any) -> Any:
    """Return a value to encode for a key of None, strings, bytes, numbers and tuples of these: keys that are equal in a
    dict get equal values. TypeError for other keys."""
    # `type` excludes subclasses, which may define another equality.
    match key:
        case None | str() | bytes() if type(key) in (type(None), str, bytes):
            return key
        case bool() | int() if -(2**63) <= key < 2**63 and type(key) in (bool, int):
            return int(key)
        case float() if type(key) is float:
            return int(key) if key.is_integer() and abs(key) < 2**63 else key
        case tuple() if type(key) is tuple:
            return [_msgpack_form(each) for each in key]
    raise TypeError(f"{type(key).__name__} is not a plain key")


class Channel:
    """A named set of queues, one for each key, first in first out. Thread-safe. Handles can be sent to other workers.

    `maxsize` bounds each queue in items. With 0 only the memory of the node's broker bounds it, in bytes. A put waits
    for a free place. A wait ends at its timeout (`timeout_s`, by default the handle's) with
    `ChannelTimeoutError`; with None or infinity only when the call succeeds or the channel ends or
    is lost. It logs every 30 s what it waits for, and uses no processor time.

    An item belongs to the getter once it has arrived in the getter's process (and, if the broker is on another host,
    once the broker has confirmed that). If that process dies earlier, the next getter receives the item. Any Python
    object that can be pickled is an item. Tensors arrive on the CPU, those of an accelerator on the getter's
    current one, if it has any. Received tensors own their memory and are not views.

    With `async_op` a call returns a handle (`wait`, `async_wait`, `done`, `then`) at once; a put then sends the item
    as it was at the call. If a handle is garbage-collected before its item is taken, the next getter receives the
    item. The `timeout` of the handle's `wait` is separate: after it, `wait` raises `MessageTimeoutError`, and the
    call continues.

    A key is a string, a number, bytes, None, a tuple of these, or another hashable value that equals its copies in
    other processes, such as a member of an enum. Other keys raise TypeError; a key of more than 1 MiB raises
    ValueError.

    Every call may raise `ChannelLostError` if the broker's process died, `ChannelClosedError` after `disconnect`, and
    ValueError for a negative timeout.

    `_links`: one for each branch, in the order of `settings.nodes`; `_routes`: finds the link of a key.
    """

    def __init__(
        self, settings: ChannelSettings, *, node_rank: int | None = None, timeout_s: float | None = TIMEOUT_S
    ) -> None:
        """Use `create` or `connect` instead."""
        self._settings = settings
        self._timeout_s = as_timeout("timeout_s", timeout_s)
        self._node_rank = node_rank_here() if node_rank is None else node_rank
        self._links: list[Link | LocalLink] = [Link(endpoint, settings.name) for endpoint in settings.endpoints]
        if not self._links:
            self._links.append(LocalLink(settings.name))
        # The keys that this handle uses first are stored on this node, if the channel has a branch here.
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
        timeout_s: float | None = TIMEOUT_S,
    ) -> Channel:
        """Return a new channel, or the existing channel of that name if it has the same settings.
        `ChannelSettingsError` if the existing channel has other settings, `ChannelLostError` if some of its brokers
        are lost. A channel that lost all of its brokers is replaced.

        distributed: the channel has a branch on every node that has a broker now, and the node that first uses a key
        stores its queue. Otherwise the channel is on node `node_rank`. If the channel needs a broker that is starting
        or restarting, the call waits up to a minute for it. A broker that does not answer raises `ChannelLostError`,
        unless the directory declares it lost within `NOTICE_S`. local: the channel exists in this process only; any
        number may have the same name. directory: by default that of the environment, else that of this process's Ray
        job, as `Cluster()` finds or starts it. here, nodes: the rank of this process's node and the number of nodes,
        by default from the environment; if the number is unknown, a rank without a node raises `NameNotFoundError`
        after that minute. TypeError or ValueError for invalid arguments.
        """
        check_name(name)
        maxsize = as_maxsize(maxsize)
        node_rank = as_node_rank(node_rank, nodes)
        settings = ChannelSettings(
            name=name,
            ident=f"{name}/{secrets.token_hex(8)}",
            maxsize=maxsize,
            distributed=distributed and not local,
            nodes=(node_rank_here() if here is None else here,),
            endpoints=(),  # of a local channel; `_create_on_brokers` replaces them and the nodes
        )

        def make(settings: ChannelSettings) -> Channel:
            return cls(settings, node_rank=here, timeout_s=timeout_s)

        if local:
            channel = make(settings)
            channel._create()
            return channel
        with directory_or_default(directory, join=True) as client:
            settings = dataclasses.replace(settings, directory=client.address)
            channel = _create_on_brokers(client, None if distributed else node_rank, settings, make)
            return _register_or_find(channel, client)

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        directory: DirectoryClient | None = None,
        here: int | None = None,
        wait_s: float = 0.0,
        timeout_s: float | None = TIMEOUT_S,
    ) -> Channel:
        """Return the channel of that name. Blocks for up to `wait_s` until it exists. Raises `NameNotFoundError`
        after that, `WorkerLostError` if the channel was closed, `ChannelLostError` if all of its brokers are lost."""
        check_name(name)
        with directory_or_default(directory) as client:
            settings = ChannelSettings.of(client.lookup_channel(name, wait_s), client.address)
        channel = cls(settings, node_rank=here, timeout_s=timeout_s)
        lost = channel._find_lost_branches(f"connection to channel {name!r}")
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
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> AsyncWork[None] | None:
        """Put `item` at the end of the queue of `key`, and return when it is stored. weight: what the item counts in
        `get_batch`. If the broker has no memory for the item, the put waits; later puts under the same key stay
        behind it, and smaller items of other keys and channels may overtake it.

        Raises `NotSerializableError`, `ItemTooLargeError` or `ChannelClosedError`; the channel is then unchanged.
        """
        what = self._describe("put", key)
        packed, request, link = self._prepare_put(item, weight, key, nowait=False, what=what)
        until = self._deadline(timeout_s)
        if async_op:
            _, future = link.begin_put(request, packed, what, until)
            return AsyncWork(future, what, lambda answer: self._check_put(answer, key))
        self._check_put(link.put(request, packed, what, until), key)
        return None

    def put_nowait(self, item: Any, weight: float = 0, key: Any = DEFAULT_KEY) -> None:
        """Put `item` without waiting. `asyncio.QueueFull` if the queue has no free place or the broker no memory."""
        what = self._describe("put_nowait", key)
        packed, request, link = self._prepare_put(item, weight, key, nowait=True, what=what)
        self._check_put(link.put(request, packed, what, self._deadline(ASK_S)), key)

    def get(self, key: Any = DEFAULT_KEY, async_op: bool = False, *, timeout_s: Timeout = DEFAULT_TIMEOUT) -> Any:
        """Return the first item of the key's queue; blocks until there is one. `EndOfChannelError` once the channel
        is closed and the queue is empty."""
        return self._get("get", key, None, async_op, timeout_s, lambda answer: self._take_items(answer, key)[0])

    def get_nowait(self, key: Any = DEFAULT_KEY) -> Any:
        """Return the first item without waiting. `asyncio.QueueEmpty` if the queue has none."""
        what = self._describe("get_nowait", key)
        make, link = self._prepare_get(key, target=None, nowait=True, what=what)
        return self._take_items(link.ask(make, what, self._deadline(ASK_S)), key)[0]

    def get_batch(
        self,
        target_weight: float = 0,
        key: Any = DEFAULT_KEY,
        async_op: bool = False,
        *,
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """Return a list of items from the front of the queue. The batch is complete when the items weigh
        `target_weight` or more (a sum of doubles), or when the next item would exceed it. A heavier
        single item is therefore returned alone. Batches are collected one after another, each completely. A closed
        channel returns the remaining items."""
        target = as_weight("target_weight", target_weight)
        return self._get("get_batch", key, target, async_op, timeout_s, lambda answer: self._take_items(answer, key))

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
        threads of this handle close as soon as they are unused. If a branch cannot be closed, its error is raised after
        the other branches were closed. Idempotent."""
        failed = self._close_branches(self._links)
        self._unregister()
        self._retire()
        if failed is not None:
            raise failed

    def _close_branches(self, links: Sequence[Link | LocalLink]) -> Exception | None:
        """Close all branches, even after an error, and return the first one. Errors of closed and lost branches are
        ignored, but not that of a branch that does not respond: it may continue."""
        what = f"close of channel {self.name!r}"
        failed = None
        for link in links:
            try:
                link.ask_after_puts(
                    lambda request_id: wire.Close(request_id, self._settings.ident), what, self._deadline(ASK_S)
                )
            except ChannelClosedError:
                pass
            except Exception as error:
                if not isinstance(error, ChannelLostError) or isinstance(error.__cause__, StreamSilentError):
                    failed = failed or error
        return failed

    def _close_created(self, links: Sequence[Link | LocalLink], error: BaseException) -> None:
        """Close the created branches after `error`. A failure to close them is added to `error` as a note."""
        failed = self._close_branches(links)
        if failed is not None:
            error.add_note(f"Some branches of channel {self.name!r} that were already created are still open: {failed}")

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
        """Remove the name from the directory, if it is registered and the directory is alive."""
        settings = self._settings
        if settings.directory is None or settings.incarnation is None:
            return
        with contextlib.suppress(DirectoryLostError), DirectoryClient(settings.directory) as directory:
            directory.end(Kind.CHANNEL, settings.name, settings.incarnation, why="it was closed")

    # --- internals

    def _create(self) -> None:
        """Create all branches of the channel. If one fails, the branches created before it are closed."""
        what = f"creation of channel {self.name!r}"
        settings = self._settings
        identity = settings.ident, settings.name, settings.maxsize
        for created, link in enumerate(self._links):
            try:
                link.ask(lambda request_id: wire.Create(request_id, *identity), what, self._deadline(ASK_S))
            except BaseException as error:
                self._close_created(self._links[:created], error)
                raise

    def _prepare_put(self, item: Any, weight: float, key: Any, nowait: bool, what: str) -> tuple[Any, wire.Put, Any]:
        """Return the packed item (in a local channel the item itself), the request, whose id and item the link
        sets, and the link to the branch of the key."""
        weight = as_weight(f"{what}: weight", weight)
        raw_key = self._encode_key(key)
        link = self._routes.link(raw_key, what)
        packed = item if isinstance(link, LocalLink) else Parcel.of(item, f"an item of {what}")
        return packed, wire.Put(0, self._settings.ident, raw_key, _NO_ITEM, weight, nowait), link

    def _get(
        self,
        verb: str,
        key: Any,
        target: float | None,
        async_op: bool,
        timeout_s: Timeout,
        finish: Callable[..., T],
    ) -> T | AsyncWork[T]:
        """Get one item, or with `target` a batch. Return what `finish` makes of the answer, with `async_op` the work
        for that."""
        what = self._describe(verb, key)
        make, link = self._prepare_get(key, target, nowait=False, what=what)
        if not async_op:
            return finish(link.ask(make, what, self._deadline(timeout_s)))
        future, drop = link.begin(make, what, self._deadline(timeout_s))
        # settle: items of a broker on another host are acknowledged before `finish` takes them.
        work = AsyncWork(future, what, finish, settle=acknowledgement_of)
        # If the work is garbage-collected, the get is cancelled.
        weakref.finalize(work, drop).atexit = False
        return work

    def _prepare_get(
        self, key: Any, target: float | None, nowait: bool, what: str
    ) -> tuple[Callable[[int], wire.Get], Any]:
        """Return a function that makes the request with an id, and the link to the branch that stores the key."""
        ident = self._settings.ident
        raw_key = self._encode_key(key)
        return lambda request_id: wire.Get(request_id, ident, raw_key, target, nowait), self._routes.link(raw_key, what)

    def _count(self, key: Any) -> wire.Counted:
        return self._routes.count(self._encode_key(key), self._describe("qsize", key))

    def _check_put(self, answer: Any, key: Any) -> None:
        if not isinstance(answer, wire.BrokerDone):
            raise self._error_for(answer, key)

    def _take_items(self, answer: Any, key: Any) -> list[Any]:
        if not hasattr(answer, "take"):
            raise self._error_for(answer, key)
        items: list[Any] = answer.take()
        return items

    def _error_for(self, answer: Any, key: Any) -> Exception:
        """Return the error for an answer that is not a result. At the end of the channel also retire this handle."""
        if isinstance(answer, wire.Ended):
            self._retire()
        return error_of(answer, self.name, key)

    def _encode_key(self, key: Any) -> bytes:
        return _DEFAULT if key is DEFAULT_KEY else key_bytes(key)

    def _find_lost_branches(self, what: str) -> list[ChannelLostError]:
        """Return a `ChannelLostError` for each branch whose broker does not answer."""
        return self._routes.find_branches_with_key(_DEFAULT, what)[1]

    def _describe(self, verb: str, key: Any) -> str:
        what = f"{verb} of channel {self.name!r}"
        return what if key is DEFAULT_KEY else f"{what}, key {key!r}"

    def _deadline(self, timeout_s: Timeout) -> float:
        return time.monotonic() + timeout_or(self._timeout_s, timeout_s)

    def __repr__(self) -> str:
        where = "local" if self.is_local else str(self._settings)
        return f"Channel({self.name!r}, {where})"

    def __str__(self) -> str:
        """Show the first items of the default queue and the number of the others, or the error that prevents it."""
        what = f"look at channel {self.name!r}"
        try:
            make = functools.partial(wire.Peek, channel=self._settings.ident, key=_DEFAULT, most=SHOWN_ITEMS)
            return format_items(
                self._routes.link(_DEFAULT, what).ask(make, what, self._deadline(SHOW_S)), self.is_local
            )
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


_NO_ITEM = wire.Item(None)
_DEFAULT = key_bytes(DEFAULT_KEY)


def _create_on_brokers(
    directory: DirectoryClient,
    node_rank: int | None,
    settings: ChannelSettings,
    make: Callable[[ChannelSettings], Channel],
) -> Channel:
    """Return the channel that `make` makes of `settings` and the brokers of a node (of all nodes if None), after these
    brokers have created it. Ray restarts a broker that died: if a broker cannot be reached, this waits up to
    `NOTICE_S` for the directory to report its end or its successor, then tries again."""
    until = time.monotonic() + NOTICE_S
    while True:
        brokers = find_brokers(directory, node_rank)
        channel = make(dataclasses.replace(settings, nodes=tuple(brokers), endpoints=tuple(brokers.values())))
        try:
            channel._create()
            return channel
        except BaseException as error:
            channel.disconnect()
            if not isinstance(error, ChannelLostError) or not await_broker_change(directory, brokers, until):
                raise


def _register_or_find(channel: Channel, directory: DirectoryClient) -> Channel:
    """Register the name of a created channel. If the name is taken, return the channel that has it."""
    try:
        registered = _register(channel, directory)
    except BaseException as error:
        channel._close_created(channel._links, error)
        channel.disconnect()
        raise
    if registered is not channel:  # the branches of `channel` have no name, so nobody can use them
        channel.close()
        channel.disconnect()
    return registered


def _register(channel: Channel, directory: DirectoryClient) -> Channel:
    """Register the channel, whose name outlives this process, and return it, or return the channel that has its name.
    Repeat until one of both succeeds: the other channel may end in between."""
    settings = channel._settings
    while True:
        try:
            entry = directory.register_channel(settings.name, settings.endpoints, settings.facts, owned=False)
        except NameInUseError:
            existing = _find_existing(channel, directory)
            if existing is not None:
                return existing
        else:
            # The entry adds the incarnation, with which `close` frees the name.
            channel._settings = ChannelSettings.of(entry, directory.address)
            return channel


def _find_existing(channel: Channel, directory: DirectoryClient) -> Channel | None:
    """Return the existing channel of the same name; None if the name is free now, also because all brokers of that
    channel are lost and this ended its entry. Raises if some are lost, or if its settings differ."""
    entries = [entry for entry in directory.listing(Kind.CHANNEL) if entry.name == channel.name]
    if not entries:
        return None
    existing_settings = ChannelSettings.of(entries[0], directory.address)
    ours = channel._settings
    existing = Channel(existing_settings, node_rank=channel._node_rank, timeout_s=channel._timeout_s)
    lost = existing._find_lost_branches(f"creation of channel {channel.name!r}")
    if len(lost) == len(existing_settings.endpoints):
        directory.end(Kind.CHANNEL, existing_settings.name, existing_settings.incarnation, why="its brokers are lost")
        return None
    error: Exception | None = lost[0] if lost else None
    if error is not None:
        error.add_note(
            f"Other branches of {existing!r} are alive; to replace the channel, `connect` to it and `close` it"
        )
    same_kind = (existing_settings.maxsize, existing_settings.distributed) == (ours.maxsize, ours.distributed)
    # A distributed channel keeps the nodes that had a broker when it was created, so its nodes may differ.
    same_nodes = existing_settings.distributed or existing_settings.nodes == ours.nodes
    if not same_kind or not same_nodes:
        error = error or ChannelSettingsError(channel=channel.name, got=str(ours), expected=str(existing_settings))
    if error is not None:
        existing.disconnect()
        raise error
    return existing


def error_of(answer: Any, channel: str, key: Any) -> Exception:
    """Return the error for the answer to a put or get under `key`."""
    match answer:
        case wire.Full():
            return asyncio.QueueFull(f"channel {channel!r} has no free place under key {key!r}")
        case wire.Empty():
            return asyncio.QueueEmpty(f"channel {channel!r} has no item under key {key!r}")
        case wire.Ended():
            return EndOfChannelError(channel=channel, key=repr(key))
        case wire.Closed():
            return ChannelClosedError(channel=channel)
        case wire.TooLarge(limit_bytes=limit):
            return ItemTooLargeError(channel=channel, limit_bytes=limit)
    return RuntimeError(f"channel {channel!r}: unexpected answer {answer!r} from its broker")


def format_items(peeked: Any, local: bool) -> str:
    """Format the answer to `Peek` as a list, with the number of the other items. local: the items are objects of this
    process."""
    assert isinstance(peeked, wire.Peeked), peeked
    texts = [_shortened(_format_item(item, local)) for item in peeked.items]
    more = peeked.size - len(texts)
    if more > 0:
        texts.append(f"... {more} more")
    return f"[{', '.join(texts)}]"


def _format_item(item: wire.Item, local: bool) -> str:
    """Return the repr of an item; of an item in the broker's memory only its tensors and size."""
    try:
        if local:
            return repr(item.head)
        if item.space != NOWHERE:
            return items.outline(item.head)
        memory = np.frombuffer(bytearray(item.body), np.uint8)  # a small item: its bytes came with the answer
        return repr(items.unpack(item.head, memory, BufferPool(0), own=True).load())
    except Exception as error:  # raised by the item's own code
        return f"<cannot be shown: {type(error).__name__}: {error}>"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 3]}..."
