# ruff: noqa: F401
"""One channel from its broker's host and, through a proxy, from another. Fixtures are imported by the files that use
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from dataplane.core.addresses import split_address
from tests.restarts import Proxy
from tests.workers.channels.channels import broker
from workers.channels import Channel, ChannelBroker
from workers.channels.discovery import ChannelSettings
from workers.transport.stream import Endpoint


@pytest.fixture
def proxy(broker: ChannelBroker) -> Iterator[Proxy]:
    between = Proxy(split_address(Endpoint.parse(broker.endpoint).address)[1])
    yield between
    between.close()


@pytest.fixture
def near_and_far(broker: ChannelBroker, proxy: Proxy) -> Iterator[tuple[Channel, Channel]]:
    """One channel, used from the broker's host and from another."""
    settings = ChannelSettings(
        name="c", ident="c", maxsize=0, distributed=False, nodes=(0,), endpoints=(broker.endpoint,)
    )
    beyond = dataclasses.replace(Endpoint.parse(broker.endpoint), host="another", address=f"127.0.0.1:{proxy.port}")
    far = dataclasses.replace(settings, endpoints=(str(beyond),))
    channels = Channel(settings), Channel(far)
    channels[0]._create()
    yield channels
    for each in channels:
        each.disconnect()
