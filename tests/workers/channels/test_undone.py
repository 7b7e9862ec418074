# ruff: noqa: F401
"""A channel that cannot be made, and parts of it that cannot be closed: what is said is why, and all is tried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.directories import client, directory
from tests.workers.channels.channels import hosted
from workers.channels import Channel, ChannelTimeoutError
from workers.channels import channel as channel_module
from workers.channels.broker import ChannelBroker
from workers.channels.connection_pool import Link
from workers.channels.wire import Close, Create
from workers.directory import DirectoryClient, Kind
from workers.errors import DirectoryLostError

pytestmark = pytest.mark.integration


@pytest.fixture
def brokers(client: DirectoryClient) -> Iterator[list[ChannelBroker]]:
    with hosted(client, range(2)) as running:
        yield running


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, brokers: list[ChannelBroker]) -> list[str]:
    """Whom a close was asked of; none is confirmed."""
    closed: list[str] = []
    real = Link.ask

    def ask(link: Link, make: Any, what: str, until: float) -> Any:
        request = make(1)
        if isinstance(request, Close):
            closed.append(str(link.endpoint))
            raise ChannelTimeoutError(what=what, waited_s=0.0)
        return real(link, make, what, until)

    monkeypatch.setattr(Link, "ask", ask)
    return closed


def test_why_it_cannot_be_made_is_not_hidden(
    client: DirectoryClient, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Link.ask

    def ask(link: Link, make: Any, what: str, until: float) -> Any:
        if isinstance(make(1), Create) and str(link.endpoint) == brokers_of[1]:
            raise MemoryError("no place for the second part")
        return real(link, make, what, until)

    brokers_of = list(channel_module.find_brokers(client, None).values())
    monkeypatch.setattr(Link, "ask", ask)
    with pytest.raises(MemoryError, match="no place for the second part") as raised:
        Channel.create("c", distributed=True, directory=client, here=0)
    assert asked == brokers_of[:1]
    assert "already created are still open: close of channel 'c'" in raised.value.__notes__[0]


def test_why_it_has_no_name_is_not_hidden(
    client: DirectoryClient, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(*_: object, **__: object) -> Any:
        raise DirectoryLostError(address="nowhere", why="it is gone")

    monkeypatch.setattr(client, "register_channel", register)
    with pytest.raises(DirectoryLostError, match="nowhere: it is gone") as raised:
        Channel.create("c", distributed=True, directory=client, here=0)
    assert len(asked) == 2
    assert "already created are still open: close of channel 'c'" in raised.value.__notes__[0]


def test_of_what_cannot_be_closed_all_parts_are_tried_and_the_name_is_free(
    client: DirectoryClient, asked: list[str]
) -> None:
    made = Channel.create("c", distributed=True, directory=client, here=0)
    with pytest.raises(ChannelTimeoutError, match="close of channel 'c'"):
        made.close()
    assert len(asked) == 2
    assert "c" not in [entry.name for entry in client.listing(Kind.CHANNEL)]
    made.disconnect()
