"""The result of a probe, and helpers that run processes and a service."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.measure import Spread, quieten
from benchmarks.systems.service import Service
from dataplane import DataPlaneClient, connect

PARTITION = "probe"
REPLY_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number: the median of `rounds`. There is one round if repetitions would give the same value. `note`:
    describes the measurement."""

    name: str
    rounds: Sequence[float]
    unit: str
    note: str = ""

    @property
    def value(self) -> float:
        return Spread.of(self.rounds).median


@contextmanager
def service(*, capacity_bytes: int = 1 << 30, fields: Sequence[str] = ()) -> Iterator[tuple[Service, DataPlaneClient]]:
    """Yield a service process and a client in this process. fields: the fields that the partition declares."""
    running = Service({"capacity_bytes": capacity_bytes})
    try:
        with connect(running.address) as client:
            client.register_partition(PARTITION, list(fields), None, ["task"])
            yield running, client
    finally:
        running.close()


def side_by_side(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `work(go, *arguments[i])` in one process for each i and return the results. Each prepares, then calls
    `go()`, which returns when all have called it."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(len(arguments))
    pipes, processes = [], []
    for each in arguments:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_call, args=(theirs, barrier, work, each))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = [_result(pipe) for pipe in pipes]
    except BaseException:
        for process in processes:
            process.kill()
        raise
    for process in processes:
        process.join(REPLY_S)
    return results


def _result(pipe: Connection) -> Any:
    if not pipe.poll(REPLY_S):
        raise TimeoutError(f"a probe process did not answer within {REPLY_S:.0f} s")
    return pipe.recv()


def _call(pipe: Connection, barrier: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    quieten()
    pipe.send(work(lambda: barrier.wait(REPLY_S), *arguments))
