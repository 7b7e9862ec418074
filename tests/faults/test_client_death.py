"""`kill -9` of a client anywhere leaves nobody else stuck and no byte leaked.

The proofs wait on events of the service itself: a put that needs the dead client's space, a claim that needs its
samples.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, Server, connect, serve
from tests.faults.dying import SESSION_TIMEOUT_S, Dying, give_up

pytestmark = pytest.mark.slow

MIB = 1 << 20

Victim = Callable[..., Dying]


@pytest.fixture
def server() -> Iterator[Server]:
    settings = {"capacity_bytes": 8 * MIB, "reserve_fraction": 0.0, "heartbeat_s": 0.2}
    with serve({**settings, "session_timeout_s": SESSION_TIMEOUT_S}) as running:
        yield running


@pytest.fixture
def survivor(server: Server) -> Iterator[DataPlaneClient]:
    with connect(server.address, heartbeat_s=0.2, put_timeout_s=60.0) as client:
        client.register_partition("p", {"x": None}, None, ["train"])
        client.register_partition("elsewhere", ["x"], None, ["train"])
        yield client


@pytest.fixture
def victim(server: Server) -> Iterator[Victim]:
    started: list[Dying] = []

    def start(**settings: Any) -> Dying:
        started.append(Dying(server.address, {"how": "kill", "partition": "p", "at": "", **settings}))
        return started[-1]

    yield start
    for dying in started:
        dying.close()


def rows(count: int, value: int = 1) -> torch.Tensor:
    return torch.full((count, MIB), value, dtype=torch.uint8)


def names(count: int, prefix: str = "s") -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def nothing_held(client: DataPlaneClient) -> bool:
    (unit,) = client.stats().units
    return unit.reserved_bytes == unit.retired_bytes == unit.pinned_bytes == 0


LOCAL_PUT = ["put.mid_copy", "put.before_commit", "call.Allocate.before", "call.Allocate.after", "call.Commit.before"]
REMOTE_PUT = ["bulk.write.between_frames", "put.before_commit", "call.Allocate.after"]
BEFORE_ATTACHED = ["call.Allocate.after", "call.Locate.after", "get.mid_copy"]
"""Where a local client holds bytes, and no unit can tell that it is gone."""


def give_up_if_unattached(server: Server, connection_kind: str, at: str) -> None:
    """End the session of the dead client if no unit can tell that it is gone."""
    if connection_kind == "remote" or at in BEFORE_ATTACHED:
        give_up(server)


@pytest.mark.parametrize(
    ("connection_kind", "at"), [("local", at) for at in LOCAL_PUT] + [("remote", at) for at in REMOTE_PUT], ids=str
)
def test_killed_in_a_put(
    server: Server, survivor: DataPlaneClient, victim: Victim, connection_kind: str, at: str
) -> None:
    dying = victim(connection_kind=connection_kind, job="put", at=at)
    assert dying.said() == "there"
    assert dying.ended() == -signal.SIGKILL
    give_up_if_unattached(server, connection_kind, at)
    survivor.put_samples(names(7), "p", {"x": rows(7)})
    assert survivor.list_samples("p").sample_ids == names(7)
    assert torch.equal(survivor.get_samples(names(7), "p", ["x"])["x"], rows(7))
    assert nothing_held(survivor)


def test_killed_after_a_commit_the_rows_stay(survivor: DataPlaneClient, victim: Victim) -> None:
    dying = victim(connection_kind="local", job="put", at="call.Commit.after")
    assert dying.ended() == -signal.SIGKILL
    back = survivor.get_samples(names(5, "v"), "p", ["x"])
    assert torch.equal(back["x"], rows(5, 0))


@pytest.mark.parametrize(
    ("connection_kind", "at"),
    [
        ("local", "get.mid_copy"),
        ("local", "get.copied"),
        ("local", "get.before_release"),
        ("local", "call.Locate.before"),
        ("local", "call.Locate.after"),
        ("remote", "bulk.read.between_frames"),
        ("remote", "get.before_release"),
    ],
    ids=str,
)
def test_killed_in_a_get(
    server: Server, survivor: DataPlaneClient, victim: Victim, connection_kind: str, at: str
) -> None:
    survivor.put_samples(names(5), "p", {"x": rows(5)})
    dying = victim(connection_kind=connection_kind, job="get", at=at)
    assert dying.said() == "there"
    dying.ended()
    give_up_if_unattached(server, connection_kind, at)
    survivor.clear_samples(names(5), "p")
    survivor.put_samples(names(7), "p", {"x": rows(7, 2)})
    assert torch.equal(survivor.get_samples(names(7), "p", ["x"])["x"], rows(7, 2))
    assert nothing_held(survivor)


@pytest.mark.parametrize("at", ["call.Claim.before", "call.Claim.after"])
def test_killed_around_a_claim(server: Server, survivor: DataPlaneClient, victim: Victim, at: str) -> None:
    survivor.put_samples(names(5), "p", {"x": torch.arange(5)})
    dying = victim(connection_kind="local", job="claim", at=at)
    assert dying.said() == "claiming"
    assert dying.ended() == -signal.SIGKILL
    give_up(server)
    assert survivor.claim_meta("p", "train", ["x"], 5, timeout_s=60.0).sample_ids == names(5)


def test_killed_while_a_claim_waits(server: Server, survivor: DataPlaneClient, victim: Victim) -> None:
    dying = victim(connection_kind="local", job="claim")
    assert dying.said() == "claiming"
    while not any(part.waiting_claims for part in survivor.stats().partitions):
        assert dying.alive
    dying.kill()
    survivor.put_samples(names(5), "p", {"x": torch.arange(5)})
    give_up(server)
    assert survivor.claim_meta("p", "train", ["x"], 5, timeout_s=60.0).sample_ids == names(5)


def test_a_stopped_reader_keeps_its_bytes_until_it_dies(survivor: DataPlaneClient, victim: Victim) -> None:
    """SIGSTOP for longer than every time-out: the bytes under its views are not reused, and come back at its death."""
    survivor.put_samples(names(5), "p", {"x": rows(5)})
    stopped = victim(connection_kind="local", job="views", how="stop")
    assert stopped.said() == "there"
    survivor.clear_samples(names(5), "p")
    with (
        connect(survivor.config.address, heartbeat_s=0.2, put_timeout_s=6.0) as hurried,
        pytest.raises(TimeoutError, match="victim"),
    ):
        hurried.put_samples(names(7), "p", {"x": rows(7, 2)})
    stopped.kill()
    survivor.put_samples(names(7), "p", {"x": rows(7, 2)})
    assert nothing_held(survivor)


def test_a_stopped_remote_writer_is_fenced(server: Server, survivor: DataPlaneClient, victim: Victim) -> None:
    """It is given up after its silence; when it wakes, its frames and its commit are refused."""
    stopped = victim(connection_kind="remote", job="put", at="bulk.write.between_frames", how="stop")
    assert stopped.said() == "there"
    give_up(server)
    survivor.put_samples(names(7), "p", {"x": rows(7)})
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.ended() == 1
    assert survivor.list_samples("p").sample_ids == names(7)
    assert torch.equal(survivor.get_samples(names(7), "p", ["x"])["x"], rows(7))
