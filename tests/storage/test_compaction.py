"""Arenas that are compacted for a put that waits, through the whole service: with readers, and processes that die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, FieldSpec, connect
from dataplane.config import MIB, DataPlaneConfig
from dataplane.core import failpoints
from dataplane.core.types import FieldKind
from dataplane.storage import compaction
from dataplane.storage.unit import StorageUnit
from tests.children import START_S
from tests.faults.forks import forks
from tests.restarts import CONFIG, WAIT_S, RestartableService, one_unit, wait_until

pytestmark = pytest.mark.integration

FIELDS = {"x": FieldSpec(FieldKind.JAGGED, "uint8", ())}
KEPT = [f"s{i}" for i in range(1, 13, 2)]
LARGE = 5 * MIB
"""Of 16 MiB, 10 are free, in pieces of at most 4."""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartableService]:
    with one_unit(tmp_path / "state") as restartable:
        yield restartable


def row(name: str, nbytes: int = MIB) -> torch.Tensor:
    return torch.full((nbytes,), int(name[1:]) + 1, dtype=torch.uint8)


def fill(client: DataPlaneClient) -> None:
    """Thirteen samples of 1 MiB, of which every second goes."""
    client.register_partition("p", FIELDS, None, ["t"])
    for i in range(13):
        client.put_samples([f"s{i}"], "p", {"x": [row(f"s{i}")]})
    client.clear_samples([f"s{i}" for i in range(0, 13, 2)], "p")


def read(client: DataPlaneClient, name: str, **more: Any) -> torch.Tensor:
    values: torch.Tensor = client.get_samples([name], "p", ["x"], **more)["x"].values()
    return values


def check(client: DataPlaneClient) -> None:
    for name in KEPT:
        assert torch.equal(read(client, name), row(name)), name
    assert torch.equal(read(client, "s99"), row("s99", LARGE))


@contextmanager
def putting(address: str) -> Iterator[Future[Any]]:
    """A put of a sample that is too large for every free piece."""
    with connect(address, reconnect_s=WAIT_S) as client, ThreadPoolExecutor(1) as threads:
        yield threads.submit(client.put_samples, ["s99"], "p", {"x": [row("s99", LARGE)]})


class Halt:
    """Where the storage unit's thread stands at a failpoint until it may go on."""

    def __init__(self, point: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        failpoints.arm(point, self.stand)

    def stand(self) -> None:
        self.reached.set()
        assert self.go_on.wait(WAIT_S)

    def await_reached(self) -> None:
        assert self.reached.wait(WAIT_S)


def test_a_put_that_waits_for_a_larger_piece_gets_it(server: RestartableService) -> None:
    with connect(server.address) as client:
        fill(client)
        view = read(client, "s11", copy=False)
        with putting(server.address) as put:
            put.result(WAIT_S)
        check(client)
        assert torch.equal(view, row("s11"))


def test_who_begins_to_read_a_row_that_is_copied_keeps_its_old_bytes(server: RestartableService) -> None:
    with connect(server.address) as client:
        fill(client)
        read(client, "s1")
        halt = Halt("unit.before_compacted")
        with putting(server.address) as put:
            halt.await_reached()
            views = [read(client, name, copy=False) for name in KEPT]
            halt.go_on.set()
            wait_until(lambda: client.stats().units[0].retired_bytes)
            assert not put.done()
            assert all(torch.equal(view, row(name)) for view, name in zip(views, KEPT, strict=True))
            views.clear()
            put.result(WAIT_S)
        check(client)


def test_rows_that_are_cleared_or_written_while_they_are_copied(server: RestartableService) -> None:
    with connect(server.address) as client:
        fill(client)
        read(client, "s1")
        halt = Halt("unit.before_compacted")
        with putting(server.address) as put:
            halt.await_reached()
            client.clear_samples(["s9", "s11"], "p")
            client.put_samples(["s5", "s7"], "p", {"x": [row("s5"), row("s7")]}, mode="update")
            client.put_samples(["s11"], "p", {"x": [row("s11")]})
            assert not put.done()
            halt.go_on.set()
            put.result(WAIT_S)
        client.put_samples(["s9"], "p", {"x": [row("s9")]})
        check(client)


def test_the_controller_may_end_while_the_unit_copies(tmp_path: Path) -> None:
    restartable = RestartableService(tmp_path / "state")
    try:
        restartable.start()
        restartable.unit()
        with connect(restartable.address, reconnect_s=WAIT_S) as client:
            fill(client)
            halt = Halt("unit.before_compacted")
            with putting(restartable.address) as put:
                halt.await_reached()
                restartable.stop()
                halt.go_on.set()
                restartable.start()
                put.result(WAIT_S)
            check(client)
    finally:
        restartable.close()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["unit.mid_compaction", "unit.before_compacted"])
def test_a_unit_that_is_killed_while_it_copies_does_it_again(tmp_path: Path, point: str) -> None:
    restartable = RestartableService(tmp_path / "state")
    config = replace(CONFIG, state_dir=str(tmp_path / "unit"), arena_dir=str(tmp_path))
    units: list[Any] = []
    try:
        restartable.start()
        units.append(_start(restartable.address, config, point))
        with connect(restartable.address, reconnect_s=WAIT_S) as client:
            fill(client)
            with putting(restartable.address) as put:
                units[0].join(WAIT_S)
                assert units[0].exitcode == -signal.SIGKILL
                units.append(_start(restartable.address, config, ""))
                put.result(WAIT_S)
            check(client)
    finally:
        for unit in units:
            unit.kill()
            unit.join()
        restartable.close()


def _start(address: str, config: DataPlaneConfig, point: str) -> Any:
    """A storage unit in a process of its own, that is ready; it dies at the failpoint."""
    ours, theirs = forks.Pipe()
    unit = forks.Process(target=_be_a_unit, args=(theirs, address, config, point), daemon=True)
    unit.start()
    assert ours.poll(START_S)
    assert ours.recv() == 1
    return unit


def _be_a_unit(ready: Connection, address: str, config: DataPlaneConfig, point: str) -> None:
    compaction.STEP_BYTES = MIB  # a row at a time
    if point:
        die: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        failpoints.arm(point, die)
    unit = StorageUnit(config, address, name="unit").start()
    ready.send(unit.number)
    threading.Event().wait()
