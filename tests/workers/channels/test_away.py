"""A channel over several nodes that is made while one of their brokers is away: dead, or standing still."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.restarts import wait_until
from tests.workers.channels.channels import CAPACITY, hosted
from tests.workers.channels.peer import Peer, kept
from workers.channels import Channel, connection
from workers.channels import channel as channel_module
from workers.channels.broker import ChannelBroker
from workers.channels.discovery import broker_name
from workers.channels.errors import ChannelLostError, ChannelSettingsError, EndOfChannelError
from workers.directory import Directory, DirectoryClient, Kind
from workers.directory import server as directory_server
from workers.transport.stream import Endpoint

pytestmark = pytest.mark.integration

RANKS = range(3)
AWAY = 1


@pytest.fixture
def directory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectoryClient]:
    """param: after how many ms of silence a connection ends; a process that goes on is back before it is given up."""
    for name, value in (("HEARTBEAT_MS", 100), ("SILENCE_MS", getattr(request, "param", 1000))):
        monkeypatch.setattr(directory_server, name, value)
    monkeypatch.setattr(channel_module, "NOTICE_S", 60.0)
    with Directory.serve() as server, DirectoryClient(server.address) as client:
        yield client


@pytest.fixture
def others(directory: DirectoryClient) -> Iterator[None]:
    """The brokers that stay."""
    with hosted(directory, [rank for rank in RANKS if rank != AWAY]):
        yield


def _host(directory: str) -> str:
    broker = kept()["broker"] = ChannelBroker.of_node(directory, AWAY, capacity_bytes=CAPACITY)
    return broker.endpoint


class Away:
    """The process of a broker, which is to go away."""

    def __init__(self, directory: DirectoryClient) -> None:
        self.peer = Peer()
        self.endpoint = Endpoint.parse(self.peer.call(_host, directory.address))
        self.still = False

    def stop(self) -> None:
        self.still = True
        self.peer.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.still = False
        with contextlib.suppress(ProcessLookupError):
            self.peer.signal(signal.SIGCONT)

    def answers_within(self, endpoint: Endpoint) -> float:
        """How long to wait for an answer from there: not long for one that will not come."""
        return 0.5 if self.still and endpoint == self.endpoint else connection.CONNECT_S


@pytest.fixture
def away(directory: DirectoryClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Away]:
    made = Away(directory)
    real = connection.BrokerConnection._shake_hands

    def shake_hands(each: connection.BrokerConnection, endpoint: Endpoint, _: float) -> None:
        real(each, endpoint, time.monotonic() + made.answers_within(endpoint))

    monkeypatch.setattr(connection.BrokerConnection, "_shake_hands", shake_hands)
    yield made
    made.go_on()
    made.peer.stop()


def _brokers(directory: DirectoryClient) -> set[str]:
    return {entry.name for entry in directory.listing(Kind.CHANNEL)}


def _kill(away: Away) -> None:
    away.peer.kill()


def _stop(away: Away) -> None:
    away.stop()


ways = pytest.mark.parametrize("go_away", [_kill, _stop])


def _works(channel: Channel) -> None:
    channel.put("a", key="k")
    assert channel.get(key="k", timeout_s=30) == "a"


@pytest.mark.slow
@ways
@pytest.mark.usefixtures("others")
def test_it_is_made_of_the_others_and_stays_what_its_name_means(
    directory: DirectoryClient, away: Away, go_away: Callable[[Away], None]
) -> None:
    go_away(away)
    made = Channel.create("c", distributed=True, directory=directory, here=0)
    assert made._settings.nodes == (0, 2)
    made.put("early", key="k")
    back = None
    if go_away is _kill:
        back = ChannelBroker.of_node(directory.address, AWAY, capacity_bytes=CAPACITY)
    else:
        away.go_on()
    wait_until(lambda: broker_name(AWAY) in _brokers(directory), "the directory has the broker again")
    found = Channel.create("c", distributed=True, directory=directory, here=AWAY)
    assert found.get(key="k", timeout_s=30) == "early"
    for other in ({"distributed": True, "maxsize": 3}, {"node_rank": 0}):
        with pytest.raises(ChannelSettingsError):
            Channel.create("c", directory=directory, **other)
    new = Channel.create("new", distributed=True, directory=directory, here=0)
    assert new._settings.nodes == (0, 1, 2)
    _works(new)
    for each in (made, found, new):
        each.disconnect()
    if back is not None:
        back.close()


@pytest.mark.slow
@pytest.mark.parametrize("directory", [600_000], indirect=True)
@pytest.mark.usefixtures("others")
def test_one_that_the_directory_still_has_is_a_named_error(
    directory: DirectoryClient, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left of the channel that could not be made."""
    monkeypatch.setattr(channel_module, "NOTICE_S", 0.0)
    asked: list[str] = []
    real = channel_module.Link.ask_after_puts

    def ask_after_puts(link: channel_module.Link, *args: object) -> object:
        asked.append(link.endpoint.address)
        return real(link, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(channel_module.Link, "ask_after_puts", ask_after_puts)
    away.stop()
    with pytest.raises(ChannelLostError, match=r"creation of channel 'c': .* \(it does not answer\)"):
        Channel.create("c", distributed=True, directory=directory, here=0)
    assert len(asked) == 1, "the part that was made is closed; the one that is away is not waited for again"
    away.go_on()
    made = Channel.create("c", distributed=True, directory=directory, here=0)
    _works(made)
    made.close()


@pytest.mark.slow
@pytest.mark.usefixtures("others")
def test_a_part_that_stands_still_was_not_closed_and_can_be(directory: DirectoryClient, away: Away) -> None:
    there = Channel.create("c", distributed=True, directory=directory, here=AWAY)
    work = there.get(key="k", async_op=True)
    closing = Channel(there._settings)
    away.stop()
    with pytest.raises(ChannelLostError, match=r"close of channel 'c': .* \(it does not answer\)"):
        closing.close()
    assert "c" not in _brokers(directory), "its name is free"
    assert not work.done()
    away.go_on()
    closing.close()
    with pytest.raises(EndOfChannelError):
        work.wait()
    for each in (there, closing):
        each.disconnect()
