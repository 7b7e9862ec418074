"""Trainers and producers race over one partition, and some are killed: every sample is consumed exactly once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from dataplane import DataPlaneClient, Server, connect, serve
from tests.faults.market import GROUP, PARTITION, TASK, names, produce, start, train

pytestmark = pytest.mark.integration

WAIT_S = 60
GROUPS = 6
CLAIM = {"group_size": GROUP, "min_batch_size": GROUP, "lease_s": 600.0}


class Market:
    """The processes of one scene."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.started: list[tuple[Any, Any]] = []

    def start(self, role: Any, *arguments: Any) -> tuple[Any, Any]:
        self.started.append(start(role, self.address, *arguments))
        return self.started[-1]

    def producer(self, who: str, dies_in: int | None = None) -> tuple[Any, Any]:
        return self.start(produce, who, GROUPS, dies_in)

    def trainer(self, who: str, *, dies: bool = False, **claim: Any) -> tuple[Any, Any]:
        return self.start(train, who, {**CLAIM, **claim}, dies)

    def go(self, *members: tuple[Any, Any]) -> None:
        """Let these begin, at once, when all are connected."""
        assert [said(member) for member in members] == ["here"] * len(members)
        for _, pipe in members:
            pipe.send("go")

    def close(self) -> None:
        for process, pipe in self.started:
            process.kill()
            process.join(WAIT_S)
            pipe.close()


def said(member: tuple[Any, Any]) -> Any:
    """What a process sends next."""
    process, pipe = member
    assert pipe.poll(WAIT_S), f"{process} is silent"
    return pipe.recv()


def killed(member: tuple[Any, Any]) -> bool:
    """Whether it died as it was told to."""
    member[0].join(WAIT_S)
    return bool(member[0].exitcode == -signal.SIGKILL)


@pytest.fixture
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 << 20, "heartbeat_s": 0.2, "session_timeout_s": 3.0}) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[DataPlaneClient]:
    with connect(server.address) as client:
        client.register_partition(PARTITION, ["x"], None, [TASK])
        yield client


@pytest.fixture
def market(server: Server, client: DataPlaneClient) -> Iterator[Market]:
    market = Market(server.address)
    yield market
    market.close()


def test_two_trainers_and_four_producers(client: DataPlaneClient, market: Market) -> None:
    producers = [market.producer(f"r{n}") for n in range(4)]
    trainers = [market.trainer(f"t{n}") for n in range(2)]
    market.go(*producers, *trainers)
    assert [said(producer) for producer in producers] == ["done"] * 4
    client.seal(PARTITION)
    consumed = [name for trainer in trainers for name in said(trainer)[0]]
    everything = [name for who in range(4) for number in range(GROUPS) for name in names(f"r{who}", number)]
    assert sorted(consumed) == sorted(everything)
    assert client.check_consumption_status(PARTITION, [TASK])


@pytest.mark.parametrize("partial", ["release", "drop"])
def test_a_producer_killed_in_the_middle_of_a_group(client: DataPlaneClient, market: Market, partial: str) -> None:
    dying, living = market.producer("dying", dies_in=1), market.producer("living")
    market.go(dying, living)
    assert killed(dying)
    assert said(living) == "done"
    client.seal(PARTITION)
    trainers = [market.trainer(f"t{n}", partial_after_s=0.3, partial=partial) for n in range(2)]
    market.go(*trainers)
    outcomes = [said(trainer) for trainer in trainers]
    consumed = [name for done, _ in outcomes for name in done]
    half = names("dying", 1)[: GROUP // 2]
    whole = [*names("dying", 0), *(name for number in range(GROUPS) for name in names("living", number))]
    assert sorted(consumed) == sorted([*whole, *half] if partial == "release" else whole)
    assert sorted(name for _, dropped in outcomes for name in dropped) == ([] if partial == "release" else half)


def test_a_trainer_killed_between_claim_and_acknowledgement(client: DataPlaneClient, market: Market) -> None:
    """Its leases would hold for ten minutes more; its death ends them."""
    producer, dying = market.producer("r"), market.trainer("dying", dies=True)
    market.go(producer, dying)
    lost = said(dying)
    assert killed(dying)
    assert said(producer) == "done"
    client.seal(PARTITION)
    heir = market.trainer("heir")
    market.go(heir)
    consumed, _ = said(heir)
    assert len(lost) >= GROUP
    assert set(lost) <= set(consumed)
    assert sorted(consumed) == sorted(name for number in range(GROUPS) for name in names("r", number))
