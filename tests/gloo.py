"""Real Gloo ranks for tests: processes that form a fresh process group for every scenario they are given.

The fixtures here are session-wide by way of `tests/conftest.py`. A scenario is a module-level function
`scenario(rank, *args)`; it runs on every rank inside an initialised default group
and its results come back in rank order, an exception as the exception itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataplane.core import failpoints
from tests.children import START_S

WAIT_S = 90.0
_spawn = multiprocessing.get_context("spawn")


class RankDied:
    """Stands for the result of a rank whose process ended during the scenario."""


def _serve(connection: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    connection.send("started")
    while True:
        task = connection.recv()
        if task is None:
            return
        store, world, scenario, args = task
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        _meet(rank, world)
        try:
            outcome = scenario(rank, *args)
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            outcome = error
        finally:
            failpoints.disarm()
            dist.destroy_process_group()
        connection.send(outcome)


def _meet(rank: int, world: int) -> None:
    """A rank whose scenario closes its connections may not do so while a sibling still makes them."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{rank} is connected", "yes")
    store.wait([f"{other} is connected" for other in range(world)])


@dataclasses.dataclass
class Collectives:
    """The collectives of a rank, and the bytes of their buffers."""

    all_gathers: int = 0
    broadcasts: int = 0
    nbytes: int = 0


@contextlib.contextmanager
def counted_collectives() -> Iterator[Collectives]:
    """A context that counts the collectives of this process."""
    counts = Collectives()
    all_gather, broadcast = dist.all_gather, dist.broadcast

    def counted_all_gather(gathered: list[torch.Tensor], own: torch.Tensor, **options: Any) -> Any:
        counts.all_gathers += 1
        counts.nbytes += len(gathered) * own.nbytes
        return all_gather(gathered, own, **options)

    def counted_broadcast(tensor: torch.Tensor, **options: Any) -> Any:
        counts.broadcasts += 1
        counts.nbytes += tensor.nbytes
        return broadcast(tensor, **options)

    dist.all_gather, dist.broadcast = counted_all_gather, counted_broadcast  # type: ignore[assignment]
    try:
        yield counts
    finally:
        dist.all_gather, dist.broadcast = all_gather, broadcast


class Pool:
    """Processes that run scenarios together; those that died are started again for the next scenario."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gloo-")
        self._numbers = itertools.count()
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def run(self, world: int, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """Each of `world` ranks' result or exception; `RankDied` for one whose process ended."""
        for connection in [self._connections[rank] for rank in range(world) if self._see_to(rank)]:
            assert connection.poll(START_S), "a rank did not start"
            connection.recv()
        store = os.path.join(self._directory.name, str(next(self._numbers)))
        for connection in self._connections[:world]:
            connection.send((store, world, scenario, args))
        return [self._outcome(rank) for rank in range(world)]

    def _see_to(self, rank: int) -> bool:
        """Whether its process had to be started, and is to say that it has."""
        if rank < len(self._processes) and self._processes[rank].is_alive():
            return False
        ours, theirs = _spawn.Pipe()
        process = _spawn.Process(target=_serve, args=(theirs, rank), daemon=True)
        process.start()
        theirs.close()
        if rank < len(self._processes):
            self._connections[rank].close()
            self._processes[rank], self._connections[rank] = process, ours
        else:
            self._processes.append(process)
            self._connections.append(ours)
        return True

    def _outcome(self, rank: int) -> Any:
        if not self._connections[rank].poll(WAIT_S):
            for process in self._processes:  # the next scenario starts them again
                process.kill()
                process.join()
            raise AssertionError(f"rank {rank} did not come back within {WAIT_S} s")
        try:
            return self._connections[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return RankDied()

    def close(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            if process.is_alive():
                connection.send(None)
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            connection.close()
        self._directory.cleanup()


class Ranks:
    """`world` ranks of a pool."""

    def __init__(self, pool: Pool, world: int) -> None:
        self._pool = pool
        self.world = world

    def run(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pool.run(self.world, scenario, *args)


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(params=[2, 4])
def gloo(gloo_pool: Pool, request: pytest.FixtureRequest) -> Ranks:
    """2 ranks, then 4."""
    return Ranks(gloo_pool, request.param)


@pytest.fixture
def pair(gloo_pool: Pool) -> Ranks:
    """2 ranks."""
    return Ranks(gloo_pool, 2)


@pytest.fixture
def four(gloo_pool: Pool) -> Ranks:
    """4 ranks."""
    return Ranks(gloo_pool, 4)
