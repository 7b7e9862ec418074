"""Child processes that hold the systems and run repetitions on request, so that the systems can be interleaved."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import cases, payload
from benchmarks.cases import Case, Op
from benchmarks.measure import cores, quieten, steady

REPLY_S = 180.0
WARM_UP = 1
CACHED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A system by name: its adapter class and its process. `how`: a description for the report."""

    name: str
    process: str
    module: str
    maker: str
    arguments: Mapping[str, Any]
    how: str


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="local",
        process="local",
        module="benchmarks.systems.dataplane_system",
        maker="DataPlane",
        arguments={},
        how="this project by shared memory: client process, service process (controller and one unit)",
    ),
    Entry(
        name="views",
        process="views",
        module="benchmarks.systems.dataplane_system",
        maker="DataPlane",
        arguments={"views": True},
        how="the same, whole-batch reads with copy=False",
    ),
    Entry(
        name="remote",
        process="remote",
        module="benchmarks.systems.dataplane_system",
        maker="DataPlane",
        arguments={"remote": True},
        how="the same over TCP on loopback, without shared memory",
    ),
    Entry(
        name="journal",
        process="journal",
        module="benchmarks.systems.dataplane_system",
        maker="DataPlane",
        arguments={"journal": True},
        how="local with a state directory: every command is written to the journal before its answer",
    ),
    Entry(
        name="ray-numpy",
        process="ray",
        module="benchmarks.systems.ray_system",
        maker="RayStore",
        arguments={"tensors": False},
        how="Ray's object store, the batch as one object of numpy arrays; driver process",
    ),
    Entry(
        name="ray-tensors",
        process="ray",
        module="benchmarks.systems.ray_system",
        maker="RayStore",
        arguments={"tensors": True},
        how="the same, as torch tensors",
    ),
    Entry(
        name="TransferQueue",
        process="ray",
        module="benchmarks.systems.transfer_queue_system",
        maker="TransferQueue",
        arguments={},
        how="PyPI 0.1.11: SimpleStorage, 2 storage units, polling mode, key-value calls; its 3 actors and the driver",
    ),
    Entry(
        name="raw-zmq",
        process="raw-zmq",
        module="benchmarks.systems.raw_zmq",
        maker="RawZmq",
        arguments={},
        how="the same bytes between two processes over TCP on loopback, warm buffers",
    ),
    Entry(
        name="round-trip",
        process="round-trip",
        module="benchmarks.systems.round_trip",
        maker="RoundTrip",
        arguments={},
        how="64 bytes to another Python process and back over ZMQ on loopback TCP, for any operation",
    ),
    Entry(
        name="memcpy-1",
        process="memcpy",
        module="benchmarks.systems.ceiling",
        maker="Ceiling",
        arguments={"threads": 1},
        how="the same bytes into a warm buffer, one thread",
    ),
    Entry(
        name="memcpy-all",
        process="memcpy",
        module="benchmarks.systems.ceiling",
        maker="Ceiling",
        arguments={},
        how="the same with a thread on every core",
    ),
)


class Runner:
    """One child process and its systems. Calls block until it answers, at most `REPLY_S`."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_main, args=(theirs, tuple(entries)))
        self._process.start()
        theirs.close()

    def call(self, verb: str, *arguments: Any) -> Any:
        """Run a method of `_Held` in the child. RuntimeError has the child's traceback."""
        self.begin(verb, *arguments)
        return self.end()

    def begin(self, verb: str, *arguments: Any) -> None:
        """Send the call without waiting for its answer."""
        self._pipe.send((verb, arguments))

    def end(self) -> Any:
        """Return the answer to `begin`."""
        if not self._pipe.poll(REPLY_S):
            raise TimeoutError(f"a benchmarked system did not answer within {REPLY_S:.0f} s")
        worked, value = self._pipe.recv()
        if not worked:
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        """Close the systems, then end the process."""
        if self._process.is_alive():
            self.call("close")
        self._process.join(REPLY_S)


class _Held:
    """The systems of the child process. `_held`: stored batches by system and case."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._systems: dict[str, Any] = {}
        self._held: dict[tuple[str, str], Any] = {}

    def open(self) -> None:
        for entry in self._entries:
            system = getattr(importlib.import_module(entry.module), entry.maker)(**entry.arguments)
            system.open()
            self._systems[entry.name] = system

    def prepare(self, name: str, case: Case) -> float:
        """Build the batch, store it if the operation reads it, and run unmeasured turns. Return the seconds of the
        very first repetition."""
        system, batch = self._systems[name], payload.build(case.batch)
        self._held[name, case.name] = system.put(batch) if cases.stored(case.op) else None
        cold = self.repeat(name, case)
        for _ in range(WARM_UP):
            self.turn(name, case)
        gc.collect()
        gc.freeze()
        return cold

    def digests(self, name: str, case: Case) -> list[dict[str, str]]:
        """Return the digests of the batch as the system returns it."""
        system, batch = self._systems[name], payload.build(case.batch)
        stored = self._held[name, case.name]
        held = system.put(batch) if stored is None else stored
        found = [payload.digest(columns) for columns in cases.read_back(case.op, system, batch, held)]
        if stored is None:
            system.drop(held)
        return found

    def turn(self, name: str, case: Case) -> float:
        """Return the seconds of a repetition, the median of a turn. A batch that fits the caches is moved once
        before, unmeasured, because other systems have used the processor since this one's last turn. A step is long
        enough without that."""
        if case.op is not Op.STEP and payload.build(case.batch).nbytes <= CACHED_BYTES:
            self.repeat(name, case)
        return steady(partial(self.repeat, name, case))

    def repeat(self, name: str, case: Case) -> float:
        return float(cases.repeat(case.op, self._systems[name], payload.build(case.batch), self._held[name, case.name]))

    def finish(self, name: str, case: Case) -> None:
        held = self._held.pop((name, case.name))
        if held is not None:
            self._systems[name].drop(held)
        payload.build.cache_clear()
        gc.unfreeze()
        gc.collect()

    def close(self) -> None:
        for system in reversed(self._systems.values()):
            system.close()
        self._systems.clear()


def _main(pipe: Connection, entries: Sequence[Entry]) -> None:
    quieten()
    os.environ.update({"TQ_NUM_THREADS": str(cores()), "TQ_LOGGING_LEVEL": "ERROR", "RAY_DEDUP_LOGS": "0"})
    held = _Held(entries)
    while True:
        try:
            verb, arguments = pipe.recv()
        except EOFError:
            held.close()
            return
        try:
            answer = (True, getattr(held, verb)(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
        if verb == "close":
            return
