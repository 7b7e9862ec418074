"""Real Gloo ranks for tests: processes that form a fresh process group for every scenario they are given.

A scenario is a module-level function `scenario(rank, *args)`; it runs on every rank inside an initialised default group
and its results come back in rank order, an exception as the exception itself.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from dataplane import failpoints

WAIT_S = 90.0
_spawn = multiprocessing.get_context("spawn")


class RankDied:
    """Stands for the result of a rank whose process ended during the scenario."""


def _serve(connection: Connection, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    while True:
        task = connection.recv()
        if task is None:
            return
        store, scenario, args = task
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        try:
            outcome = scenario(rank, *args)
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            outcome = error
        finally:
            failpoints.disarm()
            dist.destroy_process_group()
        connection.send(outcome)


class Ranks:
    """`world` processes that run scenarios together; those that died are started again for the next scenario."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._directory = tempfile.TemporaryDirectory(prefix="gloo-")
        self._numbers = itertools.count()
        self._processes: list[Any] = [None] * world
        self._connections: list[Any] = [None] * world

    def run(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's result or exception; `RankDied` for one whose process ended."""
        for rank in range(self.world):
            if self._processes[rank] is None or not self._processes[rank].is_alive():
                self._start(rank)
        store = os.path.join(self._directory.name, str(next(self._numbers)))
        for connection in self._connections:
            connection.send((store, scenario, args))
        return [self._outcome(rank) for rank in range(self.world)]

    def _start(self, rank: int) -> None:
        if self._connections[rank] is not None:
            self._connections[rank].close()
        ours, theirs = _spawn.Pipe()
        process = _spawn.Process(target=_serve, args=(theirs, rank, self.world), daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._connections[rank] = process, ours

    def _outcome(self, rank: int) -> Any:
        if not self._connections[rank].poll(WAIT_S):
            raise AssertionError(f"rank {rank} did not come back within {WAIT_S} s")
        try:
            return self._connections[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return RankDied()

    def close(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            if process is None:
                continue
            if process.is_alive():
                connection.send(None)
                process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            connection.close()
        self._directory.cleanup()


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    group = Ranks(world)
    try:
        yield group
    finally:
        group.close()
