"""The players of a storm over workers, from the inside: a directory, brokers of channels, and workers that send,
receive, put and get for ever, whatever happens to them.

Whoever receives can tell from the tag of a message or item whether its content is right. A worker writes down what it
is about to do, and what came of it; `workers_books` puts that together. The names of errors that may come are in
`MAY_FAIL`, and how long an operation may take at most before it tells of one follows from its timeout.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.faults import board as places
from tests.faults.acting import Actor, begin
from tests.faults.board import LANES, board
from workers.channels import Channel, ChannelLostError
from workers.channels.broker import ChannelBroker
from workers.channels.connection import UNCONFIRMED
from workers.channels.errors import ChannelTimeoutError
from workers.directory import Directory, DirectoryClient
from workers.directory.address import WorkerAddress
from workers.errors import DirectoryLostError, MessageTimeoutError, NameInUseError, NameNotFoundError, WorkerLostError
from workers.messages import Messenger, deliveries
from workers.transport import pickling
from workers.transport.stream import Endpoint

GROUP = "w"
WORKERS = ("near", "far", "aside")
"""By rank. `far` is on the other host; nothing ever happens to `aside`."""
CHANNELS = ("first", "second")
"""By the rank of the node that has it."""
CAPACITY_BYTES = 32 << 20
MAXSIZE = 60
MESSAGE_S = 120.0
"""Longer than a scene waits for progress, so that a message that hangs is noticed."""
CHANNEL_S = 5.0
CREATE_S = 90.0
"""A broker is waited for for a minute, and noticed to be gone within a quarter of one."""
LATE_S = 60.0
"""So much later than its stated time an operation may end, on a machine that is busy."""
PACE_S = 0.08
LOOK_S = 0.04
SMALL, MIDDLE, LARGE, ITEM = 16, 20_000, 800_000, 120_000
"""Numbers of 8 bytes in a body: of a message that carries its bytes, of one in shared memory, of one that comes from
another host in parts; and of a large item."""
LARGE_BYTES = 4 << 20

MESSAGES_MAY_FAIL = (WorkerLostError, MessageTimeoutError, NameNotFoundError, DirectoryLostError)
CHANNELS_MAY_FAIL = (ChannelLostError, ChannelTimeoutError)
CREATION_MAY_FAIL = (ChannelLostError, ChannelTimeoutError, WorkerLostError, NameNotFoundError, DirectoryLostError)


def lanes(name: str) -> list[str]:
    """What a worker does again and again, in the order of its board."""
    peers = [peer for peer in WORKERS if peer != name]
    verbs = {"send": peers, "recv": peers, "put": CHANNELS, "get": CHANNELS}
    return [f"{verb} {other}" for verb, others in verbs.items() for other in others]


def body(tag: str, count: int) -> torch.Tensor:
    """What a message or item of that tag holds."""
    return torch.arange(count) + zlib.crc32(tag.encode())


@dataclass
class Run:
    """A run of this process. number: later runs have greater ones; over: set when the run must end."""

    actor: Actor
    shared: memoryview
    number: int
    over: threading.Event

    def rests(self) -> bool:
        return bool(self.shared[places.REST])

    def did(self, lane: int) -> None:
        self.shared[LANES + lane] += 1

    def late(self, what: str, begun: float, limit_s: float, error: Exception) -> None:
        """It failed with `error`: by then?"""
        took_s = time.monotonic() - begun
        if took_s > limit_s + LATE_S:
            self.actor.fail(f"{what}: {type(error).__name__} after {took_s:.0f} s, where {limit_s:.0f} s are stated")

    def right(self, what: str, found: Any) -> str:
        """The tag of what came. Ends this process if its content is not of that tag."""
        tag, values_of_it = found
        if not torch.equal(values_of_it, body(tag, values_of_it.numel())):
            self.actor.fail(f"{what} brought {tag} with another content")
        return str(tag)


def play(name: str, folder: str, role: str, arguments: list[Any]) -> None:
    """Runs a process of the scene. lives_on: the host that it is to take itself to be on, "" for where it is."""
    *rest, lives_on = arguments
    shared = board(folder, name)
    actor = begin(name, folder, shared, [], lives_on)
    try:
        {"directory": direct, "broker": hold, "worker": work}[role](actor, shared, *rest)
    except BaseException:
        actor.fail(traceback.format_exc())
    os._exit(0)


def _orders(shared: memoryview) -> Any:
    """One after another, as they come, until it is to end."""
    shared[places.READY] += 1
    while True:
        order = shared[places.ORDER]
        if order == places.END:
            return
        if order == places.TELL:
            shared[places.ORDER] = 0
            yield order
            shared[1] += 1
        time.sleep(LOOK_S)


def direct(actor: Actor, shared: memoryview, host: str) -> None:
    """A directory."""
    with Directory.serve(host) as directory:
        path = actor.folder / "directory.address"
        path.with_suffix(".new").write_text(directory.address)
        path.with_suffix(".new").rename(path)
        for _ in _orders(shared):
            pass


def hold(actor: Actor, shared: memoryview, directory: str, rank: int, host: str) -> None:
    """The broker of a node, which tells how many bytes of its memory are in use, and how many items it has."""
    broker = ChannelBroker.of_node(directory, rank, host=host, capacity_bytes=CAPACITY_BYTES)
    actor.note("broker", Endpoint.parse(broker.endpoint).address)
    for _ in _orders(shared):
        channels = list(broker._state._channels.values())
        queues = [queue for channel in channels for queue in list(channel.queues.values())]
        collected = sum(len(get.taken) for queue in queues for get in list(queue.gets))
        shared[places.ITEMS] = sum(len(queue.items) + queue.leased for queue in queues) + collected
        shared[places.BYTES] = broker._memory.used_bytes
    broker.close()


# --- a worker ---------------------------------------------------------------------------------------------------------


def work(actor: Actor, shared: memoryview, directory: str, host: str) -> None:
    """A worker, with a thread for each of its lanes."""
    run = Run(actor, shared, time.time_ns(), threading.Event())
    actor.note("run", run.number)
    _stop_where_told(shared, alone=actor.name == "far")
    client = DirectoryClient(directory)
    messenger = _register(actor.name, client, host)
    does: dict[str, Callable[..., None]] = {"send": _send, "recv": _recv, "put": _put, "get": _get}
    threads = []
    for lane, what in enumerate(lanes(actor.name)):
        verb, _, other = what.partition(" ")
        with_what: Any = messenger if verb in ("send", "recv") else client
        threads.append(threading.Thread(target=_forever, args=(run, does[verb], lane, other, with_what)))
        threads[-1].start()
    for _ in _orders(shared):
        pass
    run.over.set()
    messenger.close()
    for thread in threads:
        thread.join(MESSAGE_S + LATE_S)
    client.close()
    left = [each for each in _descriptors() if "memfd" in each]
    if left or any(thread.is_alive() for thread in threads):
        actor.fail(f"left at the end: {left}, {threading.enumerate()}")


def _descriptors() -> list[str]:
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return found


def _register(name: str, client: DirectoryClient, host: str) -> Messenger:
    """The one before may not be known to be dead yet."""
    address, end = WorkerAddress(GROUP, WORKERS.index(name)), time.monotonic() + LATE_S
    while True:
        try:
            return Messenger(address, client, host=host, timeout_s=MESSAGE_S)
        except NameInUseError:
            if time.monotonic() > end:
                raise
            time.sleep(PACE_S)


def _forever(run: Run, act: Callable[..., None], lane: int, other: str, with_what: Any) -> None:
    try:
        act(run, lane, other, with_what)
    except BaseException:
        if not run.over.is_set():
            run.actor.fail(traceback.format_exc())


def _stop_where_told(shared: memoryview, *, alone: bool) -> None:
    """Have this process stop itself in the middle of a large send or receive when it is told to: of one in memory that
    it shares with its sender, unless it is alone on its host."""
    unpack, write = deliveries.unpack, pickling.Packed.write

    def stop(order: int, nbytes: int) -> None:
        if shared[places.ORDER] == order and nbytes >= LARGE_BYTES:
            shared[places.ORDER] = 0
            shared[1] += 1
            os.kill(os.getpid(), signal.SIGSTOP)

    def stopping_unpack(layout: pickling.Layout, *rest: Any, **more: Any) -> Any:
        if alone or not more.get("own"):
            stop(places.STOP_IN_RECV, layout.nbytes)
        return unpack(layout, *rest, **more)

    def stopping_write(packed: pickling.Packed, memory: Any) -> None:
        stop(places.STOP_IN_SEND, packed.nbytes)
        write(packed, memory)

    deliveries.unpack = stopping_unpack
    pickling.Packed.write = stopping_write  # type: ignore[method-assign]


# --- messages


def _address(name: str) -> WorkerAddress:
    return WorkerAddress(GROUP, WORKERS.index(name))


def _size(number: int) -> int:
    return LARGE if number % 12 == 0 else MIDDLE if number % 3 == 0 else SMALL


def _send(run: Run, lane: int, peer: str, messenger: Messenger) -> None:
    for number in itertools.count(1):
        while run.rests() and not run.over.is_set():
            time.sleep(LOOK_S)
        if run.over.is_set():
            return
        tag, begun = f"{run.number}.{number}", time.monotonic()
        run.actor.note("sending", peer, tag)
        try:
            messenger.send((tag, body(tag, _size(number))), _address(peer))
        except MESSAGES_MAY_FAIL as error:
            run.actor.note("unsent", peer, tag, type(error).__name__)
            run.late(f"send to {peer}", begun, MESSAGE_S, error)
        else:
            run.actor.note("sent", peer, tag)
            run.did(lane)
        time.sleep(PACE_S)


def _recv(run: Run, lane: int, peer: str, messenger: Messenger) -> None:
    while not run.over.is_set():
        begun = time.monotonic()
        try:
            tag = run.right(f"recv from {peer}", messenger.recv(_address(peer)))
        except MESSAGES_MAY_FAIL as error:
            run.actor.note("missed", peer, type(error).__name__)
            run.late(f"recv from {peer}", begun, MESSAGE_S, error)
            time.sleep(PACE_S)
        else:
            run.actor.note("got", peer, tag)
            run.did(lane)


# --- channels


def _port(channel: Channel) -> str:
    """Tells one run of its broker from another."""
    return Endpoint.parse(channel._settings.endpoints[0]).address


def _opened(run: Run, name: str, client: DirectoryClient) -> Channel:
    """The channel, which may have to be created anew."""
    while True:
        begun = time.monotonic()
        try:
            rank = CHANNELS.index(name)
            return Channel.create(name, maxsize=MAXSIZE, node_rank=rank, directory=client, timeout_s=CHANNEL_S)
        except CREATION_MAY_FAIL as error:
            run.actor.note("uncreated", name, type(error).__name__)
            run.late(f"creation of {name}", begun, CREATE_S, error)
            if run.over.is_set():
                raise
            time.sleep(PACE_S)


def _put(run: Run, lane: int, name: str, client: DirectoryClient) -> None:
    channel: Channel | None = None
    for number in itertools.count(1):
        while run.rests() and not run.over.is_set():
            time.sleep(LOOK_S)
        if run.over.is_set():
            break
        channel = channel or _opened(run, name, client)
        key = WORKERS[number % len(WORKERS)]
        tag, begun = f"{run.actor.name}:{run.number}.{number}@{_port(channel)}", time.monotonic()
        item = (tag, body(tag, ITEM if number % 10 == 0 else MIDDLE if number % 4 == 0 else SMALL))
        run.actor.note("putting", name, key, tag)
        try:
            if number % 5 == 0:
                handle = channel.put(item, 1, key, async_op=True)
                assert handle is not None
                handle.wait()
            else:
                channel.put(item, 1, key)
        except CHANNELS_MAY_FAIL as error:
            run.actor.note("unput", name, key, tag, type(error).__name__)
            run.late(f"put to {name}", begun, CHANNEL_S, error)
            channel = _after(error, channel)
        else:
            run.actor.note("put", name, key, tag)
            run.did(lane)
        time.sleep(PACE_S)
    if channel is not None:
        channel.disconnect()


def _get(run: Run, lane: int, name: str, client: DirectoryClient) -> None:
    channel: Channel | None = None
    key = run.actor.name
    for number in itertools.count(1):
        if run.over.is_set():
            break
        channel = channel or _opened(run, name, client)
        begun = time.monotonic()
        try:
            if number % 7 == 0:
                found = channel.get_batch(2, key)
            elif number % 3 == 0:
                found = [channel.get(key, async_op=True).wait()]
            else:
                found = [channel.get(key)]
        except CHANNELS_MAY_FAIL as error:
            taking = UNCONFIRMED in str(error)
            run.actor.note("untaken", name, key, type(error).__name__, "taking" if taking else "waiting")
            run.late(f"get from {name}", begun, CHANNEL_S, error)
            channel = _after(error, channel)
        else:
            run.actor.note("taken", name, key, *(run.right(f"get from {name}", each) for each in found))
            run.did(lane)
    if channel is not None:
        channel.disconnect()


def _after(error: Exception, channel: Channel) -> Channel | None:
    """The handle to go on with: none where the broker is gone."""
    if not isinstance(error, ChannelLostError):
        return channel
    with contextlib.suppress(ChannelLostError):
        channel.disconnect()
    return None
