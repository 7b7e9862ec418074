"""Where a process may open no more files, what needs one says so, leaves none open, and works once there are some."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataplane.core.addresses import split_address
from dataplane.protocol.fd_limits import OF_A_CONTEXT
from tests.alone import alone
from tests.open_files import exhausted
from tests.restarts import Proxy, wait_until
from tests.workers.channels.channels import CAPACITY, broker, make
from tests.workers.messages.messengers import Here, address, one_connection
from workers.channels import Channel, ChannelBroker
from workers.directory import Directory, DirectoryClient, Kind, server
from workers.directory import client as client_module
from workers.errors import OpenFilesError
from workers.messages import Messenger
from workers.placement.ports import PortKeeper

pytestmark = pytest.mark.integration
__all__ = ["broker", "make", "one_connection"]


def _refused(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, work: Callable[[], Any]) -> None:
    before = psutil.Process().num_fds()
    says = r"cannot open more files \(ulimit -n \d+\); raise the limit of open files"
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


def test_messages(one_connection: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    client = one_connection.client()
    assert client.listing(Kind.WORKER) == [], "it is connected"
    monkeypatch.setattr(one_connection, "client", lambda: client)
    _refused(monkeypatch, os, "eventfd", lambda: one_connection.worker(address(0)))
    a = one_connection.worker(address(0))
    assert a.broadcast(1, [address(0)]) == 1


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = PortKeeper()
    _refused(monkeypatch, socket, "socket", lambda: keeper.hold(1))
    keeper.release(keeper.hold(1))


def test_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    with exhausted(monkeypatch, os, "eventfd"), pytest.raises(OpenFilesError, match="a channel broker: "):
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


def test_a_directory_and_its_client_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither opens a file where one of its clients, or it, has lost its connection."""
    monkeypatch.setattr(server, "GRACE_S", 600.0)
    monkeypatch.setattr(client_module, "AWAY_S", 600.0)
    with Directory.serve() as served:
        proxy = Proxy(split_address(served.address)[1])
        with DirectoryClient(f"127.0.0.1:{proxy.port}") as client:
            client.register_group("g", {})
            client.register_channel("c", ("somewhere",), {})
            with exhausted(monkeypatch, Path, "read_text"):
                proxy.cut()
                proxy.heal()
                assert client.lookup_group("g").live
                assert client.lookup_channel("c").live
        proxy.close()


# --- where ZMQ's threads would find none, and end the process -----------------------------------------------------


def _refuse_with(left: int) -> None:
    """Alone: the hard limit cannot be raised again."""
    client_says, messages_say = "a client of the job's directory", "messages of worker g:0"
    served = Directory.serve()
    client = DirectoryClient(served.address)
    assert client.listing(Kind.WORKER) == [], "it is connected"
    first = os.dup(0)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + left, first + left))
    for says, work in (
        ("serving a job's directory", Directory.serve),
        (client_says, lambda: DirectoryClient(served.address)),
        (messages_say, lambda: Messenger(address(0), client)),
    ):
        with pytest.raises(OpenFilesError, match=f"{says}.*cannot open more files"):
            work()
    client.close()
    served.close()


@pytest.mark.parametrize("left", [0, 5, OF_A_CONTEXT - 1])
def test_too_few_for_a_context(left: int) -> None:
    alone(_refuse_with, left)


def _serve_with_the_least() -> None:
    first = os.dup(0)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with Directory.serve() as served, DirectoryClient(served.address) as client, Messenger(address(0), client) as a:
        assert a.broadcast(1, [address(0)]) == 1


def test_a_directory_allows_itself_what_it_may_have_before_it_counts() -> None:
    alone(_serve_with_the_least)
