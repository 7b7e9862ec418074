"""Where a process may open no more files, what needs one says so, leaves none open, and works once there are some."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.channels import CAPACITY, broker, make
from tests.lives import wait_until
from tests.messengers import Here, address, one_road
from tests.open_files import exhausted
from workers.channel import Channel, ChannelBroker
from workers.directory import Directory, DirectoryClient, Kind
from workers.errors import OpenFilesError
from workers.ports import PortKeeper

pytestmark = pytest.mark.integration
__all__ = ["broker", "make", "one_road"]


def _refused(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, work: Callable[[], Any]) -> None:
    before = psutil.Process().num_fds()
    says = r"may have no more open files \(ulimit -n \d+\); allow it more"
    with exhausted(monkeypatch, owner, name), pytest.raises(OpenFilesError, match=says):
        work()
    # What was connected to closes its end once it notices.
    wait_until(lambda: psutil.Process().num_fds() <= before, "what was opened to be closed")


def test_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    _refused(monkeypatch, os, "eventfd", Directory.serve)
    with Directory.serve() as served:
        _refused(monkeypatch, os, "eventfd", lambda: DirectoryClient(served.address))
        with DirectoryClient(served.address) as client:
            assert client.listing


def test_messages(one_road: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    client = one_road.client()
    assert client.listing(Kind.WORKER) == [], "it is connected"
    monkeypatch.setattr(one_road, "client", lambda: client)
    _refused(monkeypatch, os, "eventfd", lambda: one_road.worker(address(0)))
    a = one_road.worker(address(0))
    assert a.broadcast(1, [address(0)]) == 1


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = PortKeeper()
    _refused(monkeypatch, socket, "socket", lambda: keeper.hold(1))
    keeper.release(keeper.hold(1))


def test_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    with exhausted(monkeypatch, os, "eventfd"), pytest.raises(OpenFilesError, match="a broker of channels: "):
        ChannelBroker(capacity_bytes=CAPACITY)
    _refused(monkeypatch, socket, "socket", lambda: ChannelBroker(capacity_bytes=CAPACITY))


def test_a_channel(make: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its broker is there all the time, and nothing is said of its end."""
    first = make()
    first.put(0)
    assert first.get() == 0, "it is connected"
    other = Channel(first._settings)
    _refused(monkeypatch, socket, "socket", lambda: other.put(1))
    _refused(monkeypatch, os, "eventfd", lambda: other.get(async_op=True))
    other.put(1)
    assert other.get(async_op=True).wait() == 1
    other.disconnect()
