"""Reads whose storage unit goes under them, because what was there was moved away."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dataplane import DataPlaneClient, SampleNotFoundError, connect
from dataplane.client.operations import drain_unit
from dataplane.core import failpoints
from dataplane.errors import StorageUnitError
from tests.restarts import RestartableService, one_unit, wait_until

pytestmark = pytest.mark.integration

ROWS = [torch.arange(100), torch.arange(7)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartableService]:
    """A service with two storage units, whose rows are all in the first."""
    with one_unit(tmp_path / "state") as restartable:
        with connect(restartable.address) as client:
            client.register_partition("p", ["x"], None, ["train"])
            client.put_samples(["a", "b"], "p", {"x": ROWS})
        restartable.unit()
        yield restartable


@pytest.fixture
def client(server: RestartableService) -> Iterator[DataPlaneClient]:
    with connect(server.address, force_remote=True) as made:
        yield made


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Nothing that refers to itself goes in this test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("copy", [True, False])
def test_rows_that_were_moved_are_read_where_they_are_now(
    server: RestartableService, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, copy: bool
) -> None:
    monkeypatch.setattr(drain_unit, "LOOK_S", 0.1)  # for a reader, who does not end before
    acts = [lambda: leave(server)]
    failpoints.arm("get.mid_copy", lambda: acts.pop()() if acts else None)
    got = client.get_samples(["b", "a"], "p", ["x"], copy=copy)
    assert [row.tolist() for row in got["x"].unbind()] == [ROWS[1].tolist(), ROWS[0].tolist()]
    assert not acts
    del got
    wait_until(lambda: all(unit.pinned_bytes == 0 for unit in client.stats().units))


def leave(server: RestartableService) -> None:
    """The first unit is emptied, and ends, though somebody reads."""
    with connect(server.address) as other:
        other.drain(1, timeout_s=300)
    server.units[0].stop()


def test_rows_that_are_gone_with_their_unit_are_told_of(server: RestartableService, client: DataPlaneClient) -> None:
    def die() -> None:
        server.units[0].stop()
        with connect(server.address) as other:
            wait_until(lambda: not other.stats().units[0].connected)
            other.drop_unit(1, force=True)

    acts = [die]
    failpoints.arm("get.mid_copy", lambda: acts.pop()() if acts else None)
    with pytest.raises(SampleNotFoundError, match=r"2 of them were lost with storage unit 1 \("):
        client.get_samples(["a", "b"], "p", ["x"])


def test_a_unit_that_still_has_the_rows_is_asked_once(server: RestartableService, client: DataPlaneClient) -> None:
    copies = []
    failpoints.arm("get.mid_copy", lambda: copies.append(1))
    server.units[0].stop()
    with pytest.raises(StorageUnitError, match="storage unit 1"):
        client.get_samples(["a", "b"], "p", ["x"])
    assert copies == [1]
    wait_until(lambda: all(unit.pinned_bytes == 0 for unit in client.stats().units))
