"""Puts of a sample or two, one after another: what they cost in commands, and that nothing is lost or held by them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, connect
from dataplane.client.preallocated import SMALL_BYTES, PreallocatedBuffer
from dataplane.errors import SampleExistsError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c

pytestmark = pytest.mark.integration

PUTS = 40
LIMIT_S = 60.0


class Commands(Counter[str]):
    """What commands the service was given, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: set[int] = set()
        self.attached: set[int] = set()
        self._seen: set[tuple[int, int, int]] = set()

    def note(self, ledger: Ledger, item: c.Input) -> None:
        match item:
            case c.SessionAttached(session=session):
                self.attached.add(session)
            # What is not answered soon is asked again, under its id.
            case c.Call(session=session, call_id=call_id, command=command):
                if (call := (id(ledger), session, call_id)) not in self._seen:
                    self._seen.add(call)
                    self[type(command).__name__] += 1
                    if isinstance(command, c.Commit):
                        self.writers.add(session)

    def wait_until_writers_are_attached(self) -> None:
        """The service hears of it from the storage unit: without that it grants no preallocated space."""
        until(lambda: self.writers <= self.attached, "the storage unit has not reported that the client attached")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """What commands the service was given."""
    given = Commands()
    honest = Ledger.apply

    def apply(self: Ledger, item: c.Input) -> list[c.Output]:
        given.note(self, item)
        return honest(self, item)

    monkeypatch.setattr(Ledger, "apply", apply)
    return given


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, puts come soon after one another, and space is not idle between them."""
    monkeypatch.setattr("dataplane.client.preallocated.SOON_S", 1e9)
    monkeypatch.setattr(PreallocatedBuffer, "give_up_idle", lambda self: None)


def row(number: int, width: int = 8) -> dict[str, Any]:
    return {"x": torch.full((1, width), number), "y": torch.tensor([float(number)])}


def put(client: DataPlaneClient, partition: str, number: int, **more: Any) -> Any:
    return client.put_samples([f"s{number}"], partition, row(number), **more)


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.usefixtures("steady")
def test_a_small_local_put_or_read_is_one_command(
    commands: Commands, client: DataPlaneClient, partition: str, connection_kind: str
) -> None:
    client.register_partition(partition, ["x", "y"], None, [])
    put(client, partition, -1)
    if connection_kind.startswith("local"):
        commands.wait_until_writers_are_attached()
    commands.clear()
    for number in range(PUTS):
        put(client, partition, number)
    is_short = connection_kind in ("local", "local-async")
    assert commands["PutRows" if is_short else "Commit"] == PUTS
    if connection_kind.startswith("local"):
        assert commands["Preallocate"] == 1
        assert commands["Allocate"] == 0
    else:
        assert commands["Allocate"] == PUTS
        assert commands["Preallocate"] == 0
    read = client.get_samples([f"s{n}" for n in range(PUTS)], partition, ["x", "y"])
    assert torch.equal(read["y"], torch.arange(PUTS, dtype=torch.float32))
    assert torch.equal(read["x"], torch.arange(PUTS).repeat_interleave(8).view(PUTS, 8))
    commands.clear()
    for number in range(PUTS):
        assert client.get_samples([f"s{number}"], partition, ["x", "y"])["y"].tolist() == [number]
    assert commands["LocateRows" if is_short else "Locate"] == PUTS


@pytest.mark.usefixtures("steady")
def test_a_large_put_asks_for_space_of_its_own(client: DataPlaneClient, partition: str, commands: Commands) -> None:
    client.register_partition(partition, ["x", "y"], None, [])
    for number in range(3):
        client.put_samples([f"s{number}"], partition, row(number, SMALL_BYTES // 8))
    assert commands["Allocate"] == commands["Commit"] == 3


@pytest.mark.usefixtures("steady")
def test_threads_share_preallocated_space(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x", "y"], None, [])
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + PUTS):
                put(client, partition, number, mode="create")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(PUTS * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    count = 4 * PUTS
    read = client.get_samples([f"s{n}" for n in range(count)], partition, ["x"])
    assert torch.equal(read["x"], torch.arange(count).repeat_interleave(8).view(count, 8))


@pytest.mark.usefixtures("steady")
def test_a_refused_put_harms_no_other(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x", "y"], None, [])
    for number in range(4):
        put(client, partition, number)
        with pytest.raises(SampleExistsError):
            client.put_samples([f"s{number}"], partition, row(99), mode="create")
    assert client.get_samples([f"s{n}" for n in range(4)], partition, ["y"])["y"].tolist() == [0, 1, 2, 3]


@pytest.fixture
def onlooker(server: Any) -> Iterator[DataPlaneClient]:
    with connect(server.address) as client:
        yield client


def test_idle_space_goes_back_by_itself(
    client: DataPlaneClient, onlooker: DataPlaneClient, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client.preallocated.SOON_S", 1e9)
    client.register_partition(partition, ["x", "y"], None, [])
    for number in range(3):
        put(client, partition, number)
    until(lambda: onlooker.stats().units[0].reserved_bytes == 0, "space of an idle client is still reserved")
    put(client, partition, 3)


def test_pins_of_dropped_views_go_without_another_call(
    client: DataPlaneClient, onlooker: DataPlaneClient, partition: str
) -> None:
    client.register_partition(partition, ["x", "y"], None, [])
    meta = put(client, partition, 0)
    views = client.get_samples(meta, partition, ["x"], copy=False)
    onlooker.clear_samples(["s0"], partition)
    del views
    until(lambda: onlooker.stats().units[0].retired_bytes == 0, "bytes of dropped views are still pinned")


@pytest.mark.usefixtures("steady")
def test_a_closed_client_whose_view_lives_keeps_no_unused_space(
    open_client: Callable[[], DataPlaneClient],
    onlooker: DataPlaneClient,
    partition: str,
    commands: Commands,
    connection_kind: str,
) -> None:
    onlooker.register_partition(partition, ["x", "y"], None, [])
    closing = open_client()
    meta = put(closing, partition, 0)
    if connection_kind.startswith("local"):
        commands.wait_until_writers_are_attached()
    put(closing, partition, 1)
    put(closing, partition, 2)
    view = closing.get_samples(meta, partition, ["x"], copy=False)["x"]
    assert (onlooker.stats().units[0].reserved_bytes > 0) == connection_kind.startswith("local")
    closing.close()
    assert onlooker.stats().units[0].reserved_bytes == 0
    onlooker.clear_samples(meta, partition)
    put(onlooker, partition, 3)
    assert torch.equal(view, torch.zeros(1, 8, dtype=torch.int64))
