"""Channels by name: how they are created and found, and brokers that end and come back; without Ray."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.restarts import wait_until
from tests.workers.channels.channels import (
    CAPACITY,
    alongside,
    broker,  # noqa: F401
)
from tests.workers.channels.peer import Peer, kept
from workers.channels import (
    Channel,
    ChannelBroker,
    ChannelClosedError,
    ChannelLostError,
    ChannelSettingsError,
    EndOfChannelError,
)
from workers.channels import channel as channel_module
from workers.channels.broker import ChannelBroker
from workers.channels.discovery import broker_name
from workers.directory import DIRECTORY_VARIABLE, Directory, DirectoryClient, Kind
from workers.directory import server as directory_server
from workers.errors import NameNotFoundError, WorkerLostError
from workers.transport.stream_server import StreamServer

pytestmark = pytest.mark.slow


@pytest.fixture
def directory() -> Iterator[DirectoryClient]:
    server = Directory.serve()
    client = DirectoryClient(server.address)
    yield client
    client.close()
    server.close()


@pytest.fixture
def nodes(directory: DirectoryClient) -> Iterator[list[ChannelBroker]]:
    """Brokers of three nodes."""
    brokers = [ChannelBroker(capacity_bytes=CAPACITY) for _ in range(3)]
    for rank, each in enumerate(brokers):
        directory.register_channel(broker_name(rank), (each.endpoint,), {})
    yield brokers
    for each in brokers:
        each.close()


@pytest.mark.usefixtures("nodes")
def test_channels_are_found_by_name_and_the_name_is_free_at_the_end(
    directory: DirectoryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = Channel.create("c", maxsize=2, directory=directory)
    monkeypatch.setenv(DIRECTORY_VARIABLE, directory.address)
    found = Channel.connect("c")
    created.put("a")
    assert found.get() == "a"
    assert (found.name, found.maxsize, found.distributed, found.is_local) == ("c", 2, False, False)
    copy = pickle.loads(pickle.dumps(found))
    copy.close()
    with pytest.raises(EndOfChannelError):
        found.get()
    with pytest.raises(WorkerLostError):
        Channel.connect("c", directory=directory)
    assert [entry.name for entry in directory.listing(Kind.CHANNEL) if entry.name == "c"] == []
    again = Channel.create("c", maxsize=5, directory=directory)
    with pytest.raises(EndOfChannelError):
        found.get()
    for each in (created, found, copy, again):
        each.disconnect()


@pytest.mark.usefixtures("nodes")
def test_a_name_that_nobody_has_is_waited_for(directory: DirectoryClient) -> None:
    with pytest.raises(NameNotFoundError, match="'c'"):
        Channel.connect("c", directory=directory)
    with alongside(lambda: Channel.connect("c", directory=directory, wait_s=30)) as outcome:
        created = Channel.create("c", directory=directory)
    outcome[0].put(1)
    assert created.get() == 1
    created.disconnect()
    outcome[0].disconnect()


def test_creating_an_existing_name_needs_the_same_settings(
    directory: DirectoryClient, nodes: list[ChannelBroker]
) -> None:
    first = Channel.create("c", maxsize=2, directory=directory)
    first.put("a")
    second = Channel.create("c", maxsize=2, directory=directory)
    assert second.get() == "a"
    for other in ({"maxsize": 3}, {"maxsize": 2, "distributed": True}, {"maxsize": 2, "node_rank": 1}):
        with pytest.raises(ChannelSettingsError, match="exists with other settings: maxsize=2, on node 0, not "):
            Channel.create("c", directory=directory, **other)
    first.put("b")
    assert second.get() == "b"
    assert [each._state.channels for each in nodes] == [1, 0, 0]
    for each in (first, second):
        each.disconnect()


def test_a_name_whose_broker_died_can_be_taken(directory: DirectoryClient, nodes: list[ChannelBroker]) -> None:
    old = Channel.create("c", node_rank=1, directory=directory)
    nodes[1].close()
    with pytest.raises(
        ChannelLostError, match=r"connection to channel 'c': the process at .* that holds the channel's items"
    ):
        Channel.connect("c", directory=directory)
    new = Channel.create("c", node_rank=0, directory=directory)
    new.put(1)
    assert Channel.connect("c", directory=directory).get() == 1
    with pytest.raises(ChannelLostError):
        old.get()
    new.disconnect()


def _host(directory: str) -> str:
    kept()["broker"] = ChannelBroker.of_node(directory, 0, capacity_bytes=CAPACITY)
    return str(kept()["broker"].endpoint)


def _begin() -> None:
    """Returns once the process has started and imported this module, which takes long on a busy machine."""


def _has_broker(directory: DirectoryClient) -> bool:
    return broker_name(0) in {entry.name for entry in directory.listing(Kind.CHANNEL)}


def test_a_broker_that_is_killed_is_waited_for(directory: DirectoryClient) -> None:
    first, second = Peer(), Peer()
    second.call(_begin)
    first.call(_host, directory.address)
    old = Channel.create("c", directory=directory)
    first.kill()
    with alongside(lambda: Channel.create("c", directory=directory)) as outcome:
        wait_until(lambda: not _has_broker(directory), "the directory to know of the broker's end")
        second.call(_host, directory.address)
    new = outcome[0]
    new.put("a")
    assert new.get() == "a"
    with pytest.raises(ChannelLostError):
        old.get()
    for each in (old, new):
        each.disconnect()
    first.stop()
    second.stop()


def test_a_broker_whose_end_the_directory_has_yet_to_notice(
    directory: DirectoryClient, broker: ChannelBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be reached, and is listed: what the directory says of it next is waited for."""
    monkeypatch.setattr(channel_module, "NOTICE_S", 60.0)
    dead = ChannelBroker(capacity_bytes=CAPACITY)
    directory.register_channel(broker_name(0), (dead.endpoint,), {}, returns=True)
    dead.close()
    waits = threading.Event()
    subscribe = directory.subscribe

    def note(listener: Callable[[Any], None]) -> Callable[[], None]:
        waits.set()
        return subscribe(listener)

    monkeypatch.setattr(directory, "subscribe", note)
    with alongside(lambda: Channel.create("c", directory=directory)) as outcome:
        assert waits.wait(60)
        directory.register_channel(broker_name(0), (broker.endpoint,), {}, returns=True)
    outcome[0].put("a")
    assert outcome[0].get() == "a"
    outcome[0].disconnect()


def test_a_broker_that_stood_still_is_known_again_with_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HEARTBEAT_MS", 100), ("SILENCE_MS", 1000), ("GRACE_S", 0.1)):
        monkeypatch.setattr(directory_server, name, value)
    with Directory.serve() as server, DirectoryClient(server.address) as directory:
        peer = Peer()
        endpoint = peer.call(_host, server.address)
        channel = Channel.create("c", directory=directory)
        channel.put("a")
        peer.signal(signal.SIGSTOP)
        wait_until(lambda: not _has_broker(directory), "the directory to give up the broker")
        peer.signal(signal.SIGCONT)
        assert directory.lookup_channel(broker_name(0), 60).endpoints == (endpoint,)
        found = Channel.create("c", directory=directory)
        assert found.get() == "a"
        for each in (channel, found):
            each.disconnect()
        peer.stop()


def test_a_broker_tells_how_it_ended(directory: DirectoryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = ChannelBroker.of_node(directory.address, 0, capacity_bytes=CAPACITY)
    closed.close()
    assert closed.wait()

    def fail(server: StreamServer) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(channel_module, "NOTICE_S", 0.0)
    monkeypatch.setattr(StreamServer, "_resume_accepting", fail)
    dead = ChannelBroker.of_node(directory.address, 1, capacity_bytes=CAPACITY)
    with contextlib.suppress(ChannelLostError):
        Channel.create("c", node_rank=1, directory=directory)
    assert not dead.wait()
    dead.close()


def test_a_channel_that_lost_one_of_its_nodes(directory: DirectoryClient, nodes: list[ChannelBroker]) -> None:
    old = Channel.create("c", distributed=True, directory=directory, here=1)
    old.put("a", key="k")
    directory.end(Kind.CHANNEL, broker_name(2))
    nodes[2].close()
    with pytest.raises(ChannelLostError, match="creation of channel 'c'"):
        Channel.create("c", distributed=True, directory=directory)
    found = Channel.connect("c", directory=directory)
    assert found.get(key="k") == "a"
    found.close()
    new = Channel.create("c", distributed=True, directory=directory)
    new.put(1)
    assert new.get() == 1
    for each in (old, found, new):
        each.disconnect()


@pytest.mark.usefixtures("nodes")
def test_a_key_of_a_distributed_channel_is_where_it_was_first_used(directory: DirectoryClient) -> None:
    handles = [Channel.create("c", distributed=True, directory=directory, here=rank) for rank in range(3)]
    assert handles[0].distributed
    for rank, handle in enumerate(handles):
        handle.put(f"from {rank}", key=rank)
    assert [handles[0].get(key=rank) for rank in range(3)] == ["from 0", "from 1", "from 2"]
    assert list(handles[2]._routes._branches.values()) == [2]
    assert sorted(handles[0]._routes._branches.values()) == [0, 1, 2]
    for handle in handles:
        handle.disconnect()


@pytest.mark.usefixtures("nodes")
def test_a_distributed_channel_is_drained_on_every_node(directory: DirectoryClient) -> None:
    first = Channel.create("c", distributed=True, directory=directory, here=1)
    first.put("a", key="k")
    first.close()
    other = pickle.loads(pickle.dumps(first))
    assert other.get(key="k") == "a"
    for key in ("k", "z"):
        with pytest.raises(EndOfChannelError):
            other.get(key=key)
    with pytest.raises(ChannelClosedError):
        other.put(1, key="z")
    first.disconnect()
    other.disconnect()
