"""Channels for tests, by each kind of connection, and what waits for them. Fixtures are imported by the files that use
them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from tests.workers.channels.peer import Peer
from workers.channels import Channel, ChannelBroker, background, connection, connection_pool
from workers.channels import broker as broker_module
from workers.channels.broker import ChannelBroker
from workers.channels.discovery import ChannelSettings
from workers.directory import DirectoryClient
from workers.messages.async_work import AsyncWork
from workers.transport.stream import Endpoint

MIB = 1 << 20
CAPACITY = 32 * MIB
CONNECTION_KINDS = ("shared", "tcp", "local")
WAIT_S = 60.0

# On a busy machine a broker may stand still for longer than users wait for one.
connection.CONNECT_S = connection.GRACE_S = connection_pool.GRACE_S = background.GRACE_S = broker_module.STOP_WAIT_S = (
    WAIT_S
)


def elsewhere(endpoint: str) -> str:
    """The same broker, as from another machine."""
    return str(dataclasses.replace(Endpoint.parse(endpoint), host="another"))


@contextlib.contextmanager
def hosted(directory: DirectoryClient, ranks: Iterable[int]) -> Iterator[list[ChannelBroker]]:
    """A broker on each of these nodes."""
    with contextlib.ExitStack() as stack:
        brokers = []
        for rank in ranks:
            brokers.append(ChannelBroker.of_node(directory.address, rank, capacity_bytes=CAPACITY))
            stack.callback(brokers[-1].close)
        yield brokers


@pytest.fixture
def broker() -> Iterator[ChannelBroker]:
    with ChannelBroker(capacity_bytes=CAPACITY) as running:
        yield running


@pytest.fixture
def make(broker: ChannelBroker, request: pytest.FixtureRequest) -> Iterator[Callable[..., Channel]]:
    """A maker of channels with one kind of connection; without a parameter, by shared memory."""
    connection_kind = getattr(request, "param", "shared")
    made: list[Channel] = []

    def channel(maxsize: int = 0, **more: Any) -> Channel:
        if connection_kind == "local":
            made.append(Channel.create("c", maxsize=maxsize, local=True, **more))
            return made[-1]
        endpoint = broker.endpoint if connection_kind == "shared" else elsewhere(broker.endpoint)
        settings = ChannelSettings(
            name="c", ident=f"c{len(made)}", maxsize=maxsize, distributed=False, nodes=(0,), endpoints=(endpoint,)
        )
        made.append(Channel(settings, **more))
        made[-1]._create()
        return made[-1]

    yield channel
    for each in made:
        each.disconnect()


@pytest.fixture
def peer() -> Iterator[Peer]:
    process = Peer()
    yield process
    process.stop()


every_connection = pytest.mark.parametrize("make", CONNECTION_KINDS, indirect=True)
every_wire = pytest.mark.parametrize("make", CONNECTION_KINDS[:2], indirect=True)


def waiting(channel: Channel, *, gets: int = 0, puts: int = 0) -> None:
    """Returns once so many wait at the broker."""
    event = threading.Event()
    while True:
        counted = channel._count("default_queue")
        if (counted.gets, counted.puts) == (gets, puts):
            return
        event.wait(0.005)


@contextlib.contextmanager
def alongside(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """`work` in a thread; at the end it has ended, and what it returned or raised is in the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield outcome
    thread.join(60)
    assert not thread.is_alive()


def finished(outcome: Any) -> Any:
    """What a handle gives; anything else as it is."""
    return outcome.wait() if isinstance(outcome, AsyncWork) else outcome


@dataclasses.dataclass
class Sample:
    name: str
    tokens: torch.Tensor
