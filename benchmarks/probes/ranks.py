"""The commands of GRPO steps of 1,024 ranks: the processor time of the service for each kind alone, and
for whole steps beside what the kinds add up to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.measure import cpu_seconds, ratios
from benchmarks.probes.base import PARTITION, Figure, service
from benchmarks.probes.raw_sessions import RawSession, RawSessions, Script, put_values, sample_columns
from dataplane.data.columns import encode_fields
from dataplane.ledger import commands as c

RANKS = 1024
ROWS = 4
"""Samples that each rank puts, claims, reads, updates and clears in a step."""
RATE = 1400
"""Commands per second, in the steps and of each kind."""
ROUNDS = 5
IDLE_S = 5.0


@dataclass(eq=False, slots=True)
class Rank:
    """One rank, and the samples that it has claimed."""

    session: RawSession
    name: str
    step: int = 0
    claimed: c.Samples | None = None

    def put(self) -> Script:
        """Put each sample as it is finished: four fields."""
        self.step += 1
        for row in range(ROWS):
            samples = c.Samples(ids=(f"{self.name}-{self.step}-{row}",))
            yield from put_values(PARTITION, samples, sample_columns())

    def claim(self) -> Script:
        fields = tuple(sample_columns())
        _, found = yield c.Claim(partition=PARTITION, task="task", fields=fields, batch_size=ROWS)
        self.claimed = c.Samples(rows=found.rows, generations=found.generations)

    def read(self) -> Script:
        assert self.claimed is not None
        fields = tuple(sample_columns())
        number, _ = yield c.Locate(partition=PARTITION, samples=self.claimed, fields=fields, brief=True)
        assert self.session.calls is not None
        self.session.calls.settle(number)

    def update(self) -> Script:
        """Write one field back."""
        assert self.claimed is not None
        rows = torch.nested.nested_tensor([torch.zeros(1848) for _ in range(ROWS)], layout=torch.jagged)
        columns = encode_fields({"advantages": rows}, rows=ROWS, specs={}, partition="")
        yield from put_values(PARTITION, self.claimed, {"advantages": columns[0]}, c.Mode.UPDATE)

    def clear(self) -> Script:
        yield c.Clear(partition=PARTITION, samples=self.claimed)

    def whole(self) -> Script:
        for kind in KINDS.values():
            yield from kind.script(self)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of work, and the number of its commands in a step of one rank."""

    script: Callable[[Rank], Script]
    commands: int


KINDS: Mapping[str, Kind] = {
    "put of a sample": Kind(script=Rank.put, commands=2 * ROWS),
    "claim": Kind(script=Rank.claim, commands=1),
    "read": Kind(script=Rank.read, commands=2),
    "write-back": Kind(script=Rank.update, commands=2),
    "clear": Kind(script=Rank.clear, commands=1),
}
STEP = Kind(script=Rank.whole, commands=sum(kind.commands for kind in KINDS.values()))


def steps(*, quick: bool) -> list[Figure]:
    """Measure the microseconds of the service's processor time for each command of each kind, and those of whole steps
    relative to the sum of their commands. The heartbeats are measured alone, and subtracted."""
    with service(capacity_bytes=4 << 30, fields=list(sample_columns())) as (running, _):
        clients = RawSessions(running.address, RANKS)
        clients.open(RANKS)
        ranks = [Rank(session, f"{number}") for number, session in enumerate(clients.sessions)]
        clients.run_for(IDLE_S)
        idle: list[float] = []
        costs: dict[str, list[float]] = {name: [] for name in KINDS}
        whole: list[float] = []
        full: list[float] = []
        for _ in range(2 if quick else ROUNDS):
            begun = cpu_seconds(running.pid)
            clients.run_for(IDLE_S)
            idle.append((cpu_seconds(running.pid) - begun) / IDLE_S)
            for name, kind in KINDS.items():
                costs[name].append(_cost(clients, ranks, kind, running.pid, idle[-1]))
            whole.append(_cost(clients, ranks, STEP, running.pid, idle[-1]))
            full.append(_cost(clients, ranks, STEP, running.pid, idle[-1], rate=math.inf))
        clients.close()
    if clients.errors:
        raise RuntimeError(f"{len(clients.errors)} errors, of which the first is: {clients.errors[0]}")
    predicted = [
        sum(costs[name][number] * kind.commands for name, kind in KINDS.items()) / STEP.commands
        for number in range(len(whole))
    ]
    note = f"{RANKS:,} sessions, {RATE:,} commands a second"
    return [
        *(
            Figure(name=f"service per command of a {name}", rounds=each, unit="us", note=note)
            for name, each in costs.items()
        ),
        Figure(name="service per command of a step", rounds=whole, unit="us", note=note),
        Figure(name="service per command of a step, all ranks at once", rounds=full, unit="us"),
        Figure(name="service for a step, measured : predicted", rounds=ratios(whole, predicted), unit="x"),
        Figure(
            name=f"service for heartbeats of {RANKS:,} sessions",
            rounds=[100 * each for each in idle],
            unit="% of a core",
        ),
    ]


def _cost(clients: RawSessions, ranks: list[Rank], kind: Kind, pid: int, idle: float, rate: float = RATE) -> float:
    """Let each rank do this work. Return the microseconds of the service's processor time for each command. rate:
    commands per second. idle: processor time per second without commands, which is subtracted."""
    done: list[Rank] = []

    def once(rank: Rank) -> Script:
        yield from kind.script(rank)
        done.append(rank)

    begun, answered = cpu_seconds(pid), clients.commands
    started = time.perf_counter()
    for number, rank in enumerate(ranks):
        clients.start(rank.session, once(rank), after_s=number * kind.commands / rate)
    clients.run_until(lambda: len(done) == len(ranks) or bool(clients.errors))
    seconds = time.perf_counter() - started
    return 1e6 * (cpu_seconds(pid) - begun - idle * seconds) / (clients.commands - answered)
