# ruff: noqa: F401
"""Channels between processes that live and die; without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane.core.addresses import split_address
from tests.restarts import wait_until
from tests.workers.channels.channels import (
    CAPACITY,
    CONNECTION_KINDS,
    alongside,
    broker,
    elsewhere,
    every_wire,
    make,
    peer,
    waiting,
)
from tests.workers.channels.peer import Peer, kept, say
from workers.channels import (
    Channel,
    ChannelBroker,
    ChannelLostError,
    wire,
)
from workers.channels.discovery import ChannelSettings
from workers.transport import stream_server
from workers.transport.stream import Endpoint

pytestmark = pytest.mark.slow


def _get(channel: Channel) -> Any:
    return channel.get()


def _get_and_hold(channel: Channel, count: int) -> None:
    """Have items handed out, and not taken."""
    works = [channel.get(async_op=True) for _ in range(count)]
    kept()["works"] = works
    while not all(work.done() for work in works):
        threading.Event().wait(0.005)


def _collect_forever(channel: Channel) -> None:
    channel.get_batch(1000)


def _put_forever(channel: Channel, size: int) -> None:
    for number in range(1_000_000):
        channel.put((number, torch.full((size,), number)))
        if number == 3:
            say("going")


def _keep_reserved(channel: Channel) -> None:
    with channel._links[0]._borrowed_connection("a test") as line:  # type: ignore[union-attr]
        reserve = wire.Reserve(line.next_request_id(), channel._settings.ident, b"", CAPACITY // 2, False)
        line.ask(reserve, "a test", time.monotonic() + 60)
    kept()["channel"] = channel


@every_wire
def test_items_cross_processes(make: Callable[..., Channel], peer: Peer) -> None:
    channel = make()
    for item in (1, torch.arange(100), torch.arange(300_000)):
        channel.put(item)
        got = peer.call(_get, channel)
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(item))


@every_wire
def test_what_a_getter_that_died_had_not_taken_goes_to_the_next(make: Callable[..., Channel], peer: Peer) -> None:
    channel = make()
    for number in range(4):
        channel.put(torch.full((20_000,), number))
    peer.call(_get_and_hold, channel, 2)
    assert channel.qsize() == 2
    peer.kill()
    wait_until(lambda: channel.qsize() == 4, "what it had not taken to be back")
    assert [int(channel.get()[0]) for _ in range(4)] == list(range(4))


def test_a_getter_that_dies_waiting_takes_nothing(make: Callable[..., Channel], peer: Peer) -> None:
    channel = make()
    peer.begin(_collect_forever, channel)
    waiting(channel, gets=1)
    channel.put("a", weight=1)
    channel.put("b", weight=1)
    peer.kill()
    assert [channel.get(), channel.get()] == ["a", "b"]


@every_wire
def test_a_putter_that_dies_leaves_whole_items_and_its_memory(make: Callable[..., Channel], peer: Peer) -> None:
    channel = make(maxsize=2)
    peer.begin(_put_forever, channel, 100_000)
    got = []
    for _ in range(6):
        got.append(channel.get())
    assert peer.said() == "going"
    peer.kill()
    with contextlib.suppress(asyncio.QueueEmpty):
        while True:
            got.append(channel.get_nowait())
    assert [number for number, _ in got] == list(range(len(got)))
    assert all(torch.equal(values, torch.full((100_000,), number)) for number, values in got)
    channel.put(torch.zeros(CAPACITY // 8 * 7, dtype=torch.uint8), timeout_s=30)


def test_space_that_a_dead_process_had_reserved_is_free_again(make: Callable[..., Channel], peer: Peer) -> None:
    channel = make()
    peer.call(_keep_reserved, channel)
    item = torch.zeros(CAPACITY // 4 * 3, dtype=torch.uint8)
    with pytest.raises(asyncio.QueueFull):
        channel.put_nowait(item)
    peer.kill()
    channel.put(item, timeout_s=30)


def _run_broker() -> str:
    kept()["broker"] = ChannelBroker(capacity_bytes=CAPACITY)
    return kept()["broker"].endpoint


@pytest.mark.parametrize("connection_kind", CONNECTION_KINDS[:2])
def test_a_broker_that_dies_is_named_to_all_who_use_it(peer: Peer, connection_kind: str) -> None:
    endpoint = peer.call(_run_broker)
    address = Endpoint.parse(endpoint).address
    endpoint = endpoint if connection_kind == "shared" else elsewhere(endpoint)
    settings = ChannelSettings(name="c", ident="c", maxsize=1, distributed=False, nodes=(0,), endpoints=(endpoint,))
    channel = Channel(settings)
    channel._create()
    channel.put(1)
    get, put = channel.get(key="k", async_op=True), channel.put(2, async_op=True)
    with alongside(lambda: channel.get(key="x")) as outcome:
        while channel._count("x").gets < 1:
            threading.Event().wait(0.005)
        peer.kill()
    for call in (get.wait, put.wait, channel.get, lambda: channel.put(3), channel.qsize):
        with pytest.raises(ChannelLostError, match=address):
            call()
    assert isinstance(outcome[0], ChannelLostError)
    channel.close()
    channel.disconnect()


def _use_and_fork(channel: Channel) -> int:
    """What becomes of a child that uses the channel, too."""
    channel.put(1)
    channel.put(2, async_op=True).wait()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            channel.put(channel.get() + channel.get(async_op=True).wait())
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_uses_the_channel_on_its_own(make: Callable[..., Channel], peer: Peer) -> None:
    channel = make()
    assert peer.call(_use_and_fork, channel) == 0
    assert channel.get() == 3


def _fork_and_get(channel: Channel) -> None:
    """Leave a child that does nothing, and an item that was handed out."""
    work = channel.get(async_op=True)
    while not work.done():
        threading.Event().wait(0.005)
    kept()["work"] = work
    child = os.fork()
    if child == 0:
        signal.pause()
    say(child)


def test_the_child_of_a_getter_that_died_does_not_keep_its_items(make: Callable[..., Channel], peer: Peer) -> None:
    channel = make()
    channel.put("a")
    peer.begin(_fork_and_get, channel)
    child = peer.said()
    try:
        peer.signal(signal.SIGKILL)
        assert channel.get(timeout_s=30) == "a"
    finally:
        os.kill(child, signal.SIGKILL)
        peer.kill()


def test_a_client_without_the_token_is_turned_away(broker: ChannelBroker) -> None:
    wrong = str(dataclasses.replace(Endpoint.parse(broker.endpoint), token="wrong"))
    settings = ChannelSettings(name="c", ident="c", maxsize=0, distributed=False, nodes=(0,), endpoints=(wrong,))
    with pytest.raises(ChannelLostError):
        Channel(settings).get()
    assert broker.alive


@pytest.mark.parametrize("token", ["wrong", "gar\u00e7on", "\U0001f511"])
def test_a_token_of_any_letters_is_only_wrong(broker: ChannelBroker, token: str) -> None:
    host, port = split_address(Endpoint.parse(broker.endpoint).address)
    with socket.create_connection((host, port), timeout=20) as peer:
        peer.sendall(wire.encode(wire.OpenBroker(1, wire.VERSION, token, False)))
        assert peer.recv(1) == b""
    assert broker.alive


class NoDescriptors:
    """A listener for connections that can take none, until it is `open`."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.asked = 0
        self.open = False

    def accept(self) -> Any:
        self.asked += 1
        if not self.open:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._real.accept()

    def close(self) -> None:
        self._real.close()


@pytest.mark.parametrize("retry_s", [1000.0, 0.2], ids=["one ends", "later"])
def test_a_broker_out_of_descriptors_waits_until_it_has_some(
    broker: ChannelBroker,
    make: Callable[..., Channel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    retry_s: float,
) -> None:
    monkeypatch.setattr(stream_server, "RETRY_S", retry_s)
    first = make()
    other = pickle.loads(pickle.dumps(first))
    listeners = {fd: NoDescriptors(real) for fd, real in broker._server._listeners.items()}
    monkeypatch.setattr(broker._server, "_listeners", listeners)
    begun = time.monotonic()
    with alongside(lambda: other.put(1)) as outcome:
        while not any(each.asked for each in listeners.values()):
            threading.Event().wait(0.005)
        threading.Event().wait(0.3)
        asked = sum(each.asked for each in listeners.values())
        assert asked <= 1 + (time.monotonic() - begun) / retry_s
        first.put(0)
        for each in listeners.values():
            each.open = True
        if retry_s > 1:
            first.disconnect()
    assert outcome == [None]
    assert [other.get(), other.get()] == [0, 1]
    assert "Cannot accept connections of" in caplog.text
    other.disconnect()
