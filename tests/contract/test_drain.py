"""Draining a storage unit, through the whole service: what lived there is elsewhere, the same, and nobody waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, DrainError, InvalidRequestError, Shared, connect
from dataplane.client.operations.drain_unit import DrainProgress
from dataplane.config import MIB
from dataplane.core import failpoints
from dataplane.errors import ChecksumError
from tests.faults.forks import forks
from tests.restarts import RestartableService, one_unit, wait_until

pytestmark = pytest.mark.integration

FIELDS = ["tokens", "score", "text", "prompt", "matrix"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartableService]:
    """A service with one storage unit; tests start more."""
    with one_unit(tmp_path / "state") as restartable:
        yield restartable


def content(*numbers: int) -> dict[str, Any]:
    """Rows of every kind, of which any reader can tell whose they are."""
    prompts = Shared([torch.full((70,), k) for k in range(2)], torch.tensor([n % 2 for n in numbers]))
    return {
        "tokens": [torch.arange(n % 5) + n for n in numbers],
        "score": torch.tensor([float(n) for n in numbers]),
        "text": [f"text {n}" * (n % 3) for n in numbers],
        "prompt": prompts,
        "matrix": [torch.full((n % 3 + 1, 2), n, dtype=torch.bfloat16) for n in numbers],
    }


def put(client: DataPlaneClient, *numbers: int) -> Any:
    ids = [f"s{n}" for n in numbers]
    return client.put_samples(ids, "p", content(*numbers), tags=[{"n": n} for n in numbers])


def check(client: DataPlaneClient, names: Any, *numbers: int) -> None:
    got = client.get_samples(names, "p", FIELDS)
    for place, n in enumerate(numbers):
        assert got["tokens"].unbind()[place].tolist() == [n + k for k in range(n % 5)]
        assert got["score"][place].item() == n
        assert got["text"][place] == f"text {n}" * (n % 3)
        assert got["prompt"].unbind()[place].tolist() == [n % 2] * 70
        assert got["matrix"][place].tolist() == [[n, n]] * (n % 3 + 1)


def live_bytes(client: DataPlaneClient) -> dict[int, int]:
    return {unit.unit: unit.live_bytes for unit in client.stats().units}


def test_everything_is_elsewhere_and_the_same(server: RestartableService, client: DataPlaneClient) -> None:
    client.register_partition("p", FIELDS, None, ["train", "score"])
    first, second = put(client, *range(10)), put(client, *range(10, 17))
    claimed = client.claim_meta("p", "train", ["tokens"], 4)
    before = live_bytes(client)[1]
    server.unit()
    done = client.drain(1, timeout_s=60)
    assert (done.unit, done.cells, done.pinned_bytes) == (1, 17 * len(FIELDS), 0)
    assert live_bytes(client)[1] == 0
    assert 0 < live_bytes(client)[2] <= before, "what was shared is shared"
    client.drop_unit(1)
    assert [unit.unit for unit in client.stats().units] == [2]
    check(client, first, *range(10))
    check(client, second, *range(10, 17))
    check(client, claimed, *range(4))
    assert [tag["n"] for tag in client.list_samples("p").tags or ()] == list(range(17))
    assert client.claim_meta("p", "train", ["tokens"], 99, blocking=False).size == 13
    client.put_samples(first, "p", {"score": torch.arange(10) * 2.0})
    assert client.get_samples(first, "p", ["score"])["score"].tolist() == [2.0 * n for n in range(10)]
    with pytest.raises(InvalidRequestError, match="no storage unit 1"):
        client.drain(1)


def test_a_unit_with_rows_is_not_dropped_but_by_force(server: RestartableService, client: DataPlaneClient) -> None:
    client.register_partition("p", FIELDS, None, ["train"])
    put(client, 1)
    with pytest.raises(InvalidRequestError, match="1 live samples; drain it"):
        client.drop_unit(1)
    client.drop_unit(1, force=True)
    assert client.list_samples("p").size == 0


def test_others_write_and_clear_and_read_meanwhile(
    server: RestartableService, open_client: Callable[[], DataPlaneClient], client: DataPlaneClient
) -> None:
    client.register_partition("p", FIELDS, None, ["train"])
    put(client, *range(8))
    server.unit()
    other = open_client()
    views = other.get_samples(["s5"], "p", ["tokens"], copy=False)
    turns = 0

    def meanwhile() -> None:
        nonlocal turns
        turns += 1
        if turns == 1:
            other.clear_samples(["s1"], "p")
            other.put_samples(["s1"], "p", content(101), tags=[{"n": 101}])
            other.put_samples(["s2"], "p", content(102))
            other.clear_samples(["s3"], "p")
        check(other, ["s0", "s1", "s2", "s4"], 0, 101, 102, 4)

    copied: list[None] = []
    failpoints.arm("move.mid_copy", lambda: copied.append(None))
    failpoints.arm("move.before_switch", meanwhile)
    try:
        client.drain(1, timeout_s=60)
    finally:
        failpoints.disarm()
    assert len(copied) == turns >= len(FIELDS)
    assert views["tokens"].unbind()[0].tolist() == []
    del views
    check(client, ["s0", "s1", "s2", "s4", "s5", "s6", "s7"], 0, 101, 102, 4, 5, 6, 7)
    assert live_bytes(client)[1] == 0
    client.drop_unit(1)
    check(client, ["s0", "s1", "s2", "s4", "s5", "s6", "s7"], 0, 101, 102, 4, 5, 6, 7)


def undone(client: DataPlaneClient) -> str:
    """Why unit 1 cannot be drained."""
    with pytest.raises(DrainError) as failed:
        client.drain(1, timeout_s=1)
    return str(failed.value)


def test_without_space_elsewhere_it_ends_by_saying_what_is_left_and_goes_on_when_there_is(
    server: RestartableService, client: DataPlaneClient
) -> None:
    client.register_partition("p", ["x"], None, ["train"])
    rows = torch.arange(3 * MIB, dtype=torch.uint8).reshape(12, -1)
    client.put_samples([f"s{n}" for n in range(12)], "p", {"x": rows})
    with pytest.raises(
        DrainError, match=r"not drained: no other storage unit has space .* Nothing was changed"
    ) as refused:
        client.drain(1, timeout_s=60)
    assert not refused.value.marked
    assert not client.stats().units[0].draining
    with pytest.raises(
        DrainError, match=r"12 values of samples are left; partition 'p' has 3,145,728 bytes there"
    ) as failed:
        client.drain(1, timeout_s=0.2, force=True)
    assert failed.value.marked
    assert failed.value.facts["live"] == {"p": 3 * MIB}
    server.unit(capacity_bytes=MIB)
    wait_until(lambda: "no space for 262,144 bytes" in undone(client), "no space for what is left")
    assert client.stats().units[0].draining
    assert live_bytes(client)[2] == MIB
    assert torch.equal(client.get_samples([f"s{n}" for n in range(12)], "p", ["x"])["x"], rows)
    seen: list[DrainProgress] = []
    waiting = threading.Thread(target=client.drain, args=(1, 60), kwargs={"on_progress": seen.append})
    waiting.start()
    server.unit()
    waiting.join()
    assert seen[-1].left_cells == 0
    assert live_bytes(client)[1] == 0
    client.drop_unit(1)
    assert torch.equal(client.get_samples([f"s{n}" for n in range(12)], "p", ["x"])["x"], rows)


def test_a_unit_that_is_gone_cannot_be_drained(server: RestartableService, client: DataPlaneClient) -> None:
    client.register_partition("p", FIELDS, None, ["train"])
    put(client, 1, 2)
    server.unit()
    server.units[0].stop()
    wait_until(lambda: not client.stats().units[0].connected)
    with connect(server.address, force_remote=True) as remote, pytest.raises(DrainError) as failed:
        remote.drain(1, timeout_s=30)
    assert failed.value.facts["cells"] == 2 * len(FIELDS)
    assert "storage unit 1" in failed.value.facts["why"]


def test_undrained_it_takes_rows_again(server: RestartableService, client: DataPlaneClient) -> None:
    client.register_partition("p", FIELDS, None, ["train"])
    server.unit()
    client.drain(1, timeout_s=10)
    put(client, 1)
    assert live_bytes(client)[1] == 0
    client.undrain(1)
    client.drain(2, timeout_s=60)
    put(client, 2)
    assert live_bytes(client)[2] == 0
    check(client, ["s1", "s2"], 1, 2)


def test_a_damaged_row_is_named_and_not_passed_on(server: RestartableService) -> None:
    with connect(server.address, force_remote=True) as client:
        client.register_partition("p", ["x"], None, ["train"])
        client.put_samples(["good", "bad"], "p", {"x": torch.arange(200, dtype=torch.uint8).reshape(2, 100)})
        server.unit()
        arena = server.units[0]._arena
        assert arena is not None
        arena.data[150] ^= 1
        with pytest.raises(ChecksumError, match="'bad'"):
            client.drain(1, timeout_s=30)
        assert client.get_samples(["good"], "p", ["x"])["x"][0].tolist() == list(range(100))
        client.clear_samples(["bad"], "p")
        client.drain(1, timeout_s=30)
        client.drop_unit(1)
        assert client.get_samples(["good"], "p", ["x"])["x"][0].tolist() == list(range(100))


def test_who_drains_may_be_killed_and_the_service_restarted(tmp_path: Path) -> None:
    """Killed before a switch, and after it: whoever drains next finds all that is left."""
    restartable = RestartableService(tmp_path / "state")
    try:
        restartable.start()
        restartable.unit()
        with connect(restartable.address, reconnect_s=60.0) as client:
            client.register_partition("p", FIELDS, None, ["train"])
            meta = put(client, *range(12))
            restartable.unit()
            for point in ("move.before_switch", "call.Move.after"):
                assert killed_at(point, restartable.address) == -signal.SIGKILL
                restartable.restart()
                check(client, meta, *range(12))
                assert client.stats().units[0].draining
            wait_until(lambda: all(unit.connected for unit in client.stats().units))
            client.drain(1, timeout_s=60)
            client.drop_unit(1)
            check(client, meta, *range(12))
            idle = client.stats().units[0]
            wait_until(lambda: client.stats().units[0].reserved_bytes == 0, "space of the killed goes back")
            assert idle.live_bytes > 0
    finally:
        restartable.close()


def killed_at(point: str, address: str) -> int:
    """The exit code of a child that drains unit 1 and dies at that failpoint."""
    child = forks.Process(target=_drain_and_die, args=(point, address))
    child.start()
    child.join(120)
    code = child.exitcode
    assert code is not None
    return code


def _drain_and_die(point: str, address: str) -> None:
    failpoints.arm(point, lambda: os.kill(os.getpid(), signal.SIGKILL))
    connect(address, reconnect_s=60.0).drain(1, 60)
