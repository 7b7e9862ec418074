"""Which brokers a job has, and that one of them is gone: what a cluster asks its directory."""

from __future__ import annotations

import threading
import time

import pytest

from tests.directories import client, directory  # noqa: F401
from tests.restarts import wait_until
from workers.channels import discovery
from workers.channels.discovery import await_broker_change, broker_name, find_brokers
from workers.directory import DirectoryClient, Kind
from workers.errors import NameNotFoundError

pytestmark = pytest.mark.integration


def broker(client: DirectoryClient, node_rank: int) -> str:
    endpoint = f"tcp://127.0.0.1:{1000 + node_rank}"
    client.register_channel(broker_name(node_rank), (endpoint,), {})
    return endpoint


def soon() -> float:
    return time.monotonic() + 60.0


def test_all_brokers_and_no_channel(client: DirectoryClient) -> None:
    client.register_channel("rollouts", ("tcp://127.0.0.1:9",), {})
    there = {rank: broker(client, rank) for rank in (2, 0)}
    found = find_brokers(client, None)
    assert found == there
    assert list(found) == [0, 2]


def test_the_broker_of_a_node_is_waited_for(client: DirectoryClient) -> None:
    found: list[dict[int, str]] = []
    asking = threading.Thread(target=lambda: found.append(find_brokers(client, 3)))
    asking.start()
    endpoint = broker(client, 3)
    asking.join(60.0)
    assert found == [{3: endpoint}]


def test_no_broker_is_a_named_error(client: DirectoryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIND_S", 0.05)
    for node_rank in (None, 1):
        with pytest.raises(NameNotFoundError):
            find_brokers(client, node_rank)
    broker(client, 2)
    with pytest.raises(NameNotFoundError) as raised:
        find_brokers(client, 1)
    assert raised.value.__notes__ == ["node 1 has no channel broker; nodes with a broker: [2]"]


def test_brokers_that_stay_are_waited_for_until_then(client: DirectoryClient) -> None:
    assert not await_broker_change(client, {0: broker(client, 0)}, time.monotonic())


def test_a_broker_in_the_place_of_another_is_noticed_at_once(client: DirectoryClient) -> None:
    broker(client, 0)
    assert await_broker_change(client, {0: "tcp://127.0.0.1:9"}, soon())
    assert await_broker_change(client, {1: "tcp://127.0.0.1:9"}, soon())


def test_a_broker_that_ends_meanwhile_is_noticed(client: DirectoryClient) -> None:
    there = {0: broker(client, 0)}
    noticed: list[bool] = []
    waiting = threading.Thread(target=lambda: noticed.append(await_broker_change(client, there, soon())))
    waiting.start()
    wait_until(lambda: bool(client._listeners), lambda: "it listens")
    client.end(Kind.CHANNEL, broker_name(0))
    waiting.join(60.0)
    assert noticed == [True]
