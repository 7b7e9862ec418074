"""What clients tell of their operations, sync and async alike."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from dataplane import ClaimTimeoutError, OpEvent, Server, Shared, build_data_plane_client, connect, connect_async, serve
from dataplane.client.events import OnEvent
from dataplane.config import MIB
from tests.contract.conftest import Blocking

pytestmark = pytest.mark.integration

Opener = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 32 * MIB, "put_timeout_s": 0.3}) as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def opened(request: pytest.FixtureRequest, server: Server) -> Iterator[Opener]:
    """Makes clients of both kinds; what they did is gone afterwards."""
    clients: list[Any] = []

    def open_one(on_event: OnEvent | None, **settings: Any) -> Any:
        if request.param == "sync":
            client: Any = connect(server.address, on_event=on_event, **settings)
        else:
            client = Blocking(connect_async(server.address, on_event=on_event, **settings))
        clients.append(client)
        return client

    yield open_one
    for client in clients:
        client.close()
    with connect(server.address) as last:
        for found in last.stats().partitions:
            last.clear_samples(None, found.partition)


def test_a_sample_from_its_put_to_its_end(opened: Opener) -> None:
    events: list[OpEvent] = []
    client = opened(events.append)
    client.register_partition("p", ["ids", "reward"], 2, ["t"])
    client.put_samples(["a", "b"], "p", {"ids": [torch.arange(n) for n in (3, 1)], "reward": torch.zeros(2)})
    meta = client.claim_meta("p", "t", ["ids"], 2, lease_s=60)
    client.get_data(meta, ["ids"])
    client.get_batch(meta, ["ids", "reward"])
    client.ack(meta)
    client.set_tags(meta, "p", [{"x": 1}, {"x": 2}])
    client.set_version("p", 3)
    client.check_consumption_status("p", ["t"])
    client.clear_samples(["a"], "p")
    client.clear_samples(None, "p")
    told = [(event.op, event.partition, event.task, event.fields, event.samples, event.bytes) for event in events]
    assert told == [
        ("register_partition", "p", "", (), 0, 0),
        ("put", "p", "", ("ids", "reward"), 2, 40),
        ("claim", "p", "t", ("ids",), 2, 0),
        ("get", "p", "", ("ids",), 2, 32),
        ("get", "p", "", ("ids", "reward"), 2, 40),
        ("ack", "p", "t", (), 0, 0),
        ("set_tags", "p", "", (), 2, 0),
        ("set_version", "p", "", (), 0, 0),
        ("check_consumption", "p", "", (), 0, 0),
        ("clear", "p", "", (), 1, 0),
        ("clear", "p", "", (), 1, 0),
    ]
    assert all(event.error == "" for event in events)
    assert all(0 <= event.waited_s <= event.took_s for event in events)
    assert [event.started for event in events] == sorted(event.started for event in events)


def test_what_is_stored_is_never_counted_twice(opened: Opener) -> None:
    events: list[OpEvent] = []
    client = opened(events.append)
    client.register_partition("p", ["x", "what", "image"], None, [])
    client.put_samples(["a", "b"], "p", {"x": torch.zeros(2, 5)})
    client.put_samples(["b", "c"], "p", {"x": torch.zeros(2, 5)})
    client.put_samples(["a", "b", "c"], "p", {"x": torch.zeros(3, 5)}, mode="update")
    client.put_samples(["a", "b"], "p", {"image": Shared([torch.zeros(100)], [0, 0])})
    client.put_samples(["c"], "p", {"what": [{"text": "y" * 500}]})
    client.put_samples(["c"], "p", tags=[{"k": 1}])
    puts = [event for event in events if event.op == "put"]
    assert [(put.samples, put.new_samples) for put in puts] == [(2, 2), (2, 1), (3, 0), (2, 0), (1, 0), (1, 0)]
    assert [put.bytes for put in puts[:4]] == [40, 40, 60, 400]
    assert [put.new_bytes for put in puts[:4]] == [40, 20, 0, 400]
    assert [put.overwritten_bytes for put in puts[:4]] == [0, 20, 60, 0]
    assert puts[4].bytes == puts[4].new_bytes >= 500, "objects count"
    assert puts[5].bytes == 0
    values = client.get_samples(["a", "b", "c"], "p", ["x"])
    assert sum(put.new_bytes for put in puts[:3]) == values["x"].nbytes


def test_an_append_is_one_put_of_what_it_wrote(opened: Opener) -> None:
    events: list[OpEvent] = []
    client = opened(events.append)
    client.register_partition("p", ["ids"], None, [])
    client.put_samples(["a"], "p", {"ids": [torch.arange(3)]})
    client.put_samples(["a", "b"], "p", {"ids": [torch.arange(2), torch.arange(1)]}, mode="append")
    assert [(event.op, event.bytes, event.new_bytes) for event in events[1:]] == [("put", 24, 24), ("put", 48, 8)]


def test_what_waits_says_how_long_and_what_fails_with_what(opened: Opener) -> None:
    events: list[OpEvent] = []
    client = opened(events.append, put_timeout_s=0.2)
    client.register_partition("p", ["x"], None, ["t"], budget_bytes=MIB)
    with pytest.raises(ClaimTimeoutError):
        client.claim_meta("p", "t", ["x"], 1, timeout_s=0.1)
    for number in range(2):
        client.put_samples([f"s{number}"], "p", {"x": torch.zeros(1, 100_000)})
    with pytest.raises(TimeoutError):
        client.put_samples(["s2"], "p", {"x": torch.zeros(1, 100_000)})
    with pytest.raises(KeyError):
        client.get_samples(["nobody"], "p", ["x"])
    with pytest.raises(TypeError):
        client.put_samples(["s"], "p", {"x": [object()]})
    claim, *puts, get, other = events[1:]
    assert (claim.error, claim.samples) == ("ClaimTimeoutError", 0)
    assert claim.waited_s > 0.02
    assert (puts[-1].error, puts[-1].bytes, puts[-1].new_bytes) == ("CapacityTimeoutError", 0, 0)
    assert puts[-1].waited_s > 0.1
    assert (get.op, get.fields, get.error) == ("get", ("x",), "SampleNotFoundError")
    assert (other.op, other.error, other.samples) == ("put", "UnsupportedValueError", 0)


def test_a_callback_that_fails_breaks_nothing_and_is_logged_once(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Semaphore(0)

    def fails(event: OpEvent) -> None:
        called.release()
        raise ZeroDivisionError("of all things")

    client = opened(fails)
    client.register_partition("p", ["x"], None, [])
    client.put_samples(["a"], "p", {"x": torch.ones(1)})
    assert client.get_samples(["a"], "p", ["x"])["x"].item() == 1
    assert all(called.acquire(blocking=False) for _ in range(3))
    assert caplog.text.count("Traceback") == 1
    assert "further failures are not logged" in caplog.text


def test_it_can_be_set_and_taken_away(server: Server) -> None:
    events: list[OpEvent] = []
    with connect(server.address) as client:
        assert client.on_event is None
        client.register_partition("p", ["x"], None, [])
        client.on_event = events.append
        client.stats()
        client.on_event = None
        client.clear_samples(None, "p")
    assert [event.op for event in events] == ["stats"]


def test_an_event_is_a_value(server: Server) -> None:
    events: list[OpEvent] = []
    with connect(server.address, on_event=events.append) as client:
        client.stats()
        assert pickle.loads(pickle.dumps(client)).on_event is None
    assert pickle.loads(pickle.dumps(events[0])) == events[0]
    with pytest.raises(FrozenInstanceError):
        events[0].bytes = 1  # type: ignore[misc]


def test_a_bootstrapped_client_takes_one_too() -> None:
    events: list[OpEvent] = []
    with build_data_plane_client({"capacity_bytes": MIB}, bootstrap=True, on_event=events.append) as client:
        client.stats()
    assert [event.op for event in events] == ["stats"]


def test_a_cancelled_operation_is_told_of(server: Server) -> None:
    events: list[OpEvent] = []

    async def run() -> None:
        async with connect_async(server.address, on_event=events.append) as client:
            await client.register_partition("p", ["x"], None, ["t"])
            claim = asyncio.create_task(client.claim_meta("p", "t", ["x"], 1, timeout_s=60))
            while not (await client.waits()).waits:
                await asyncio.sleep(0.01)
            claim.cancel()
            await asyncio.gather(claim, return_exceptions=True)
            await client.clear_samples(None, "p")

    asyncio.run(run())
    (claim,) = [event for event in events if event.op == "claim"]
    assert (claim.error, claim.samples) == ("CancelledError", 0)
