"""Many sessions of one controller, few of which put samples while the others are idle, or wait for claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import anonymous_bytes, cpu_seconds, percentile
from benchmarks.probes.base import PARTITION, Figure, service, side_by_side
from benchmarks.probes.raw_sessions import RawSession, RawSessions, Script, put_values, sample_columns
from dataplane.ledger import commands as c

SESSIONS = 8192
QUICK_SESSIONS = 1024
PROCESSES = 4
ONE_IN = 20
"""One session of this many puts a sample each `PUT_EVERY_S`."""
PUT_EVERY_S = 1.0
ROUND_S = 5.0
ROUNDS = 4
SETTLE_S = 20.0
"""Time after the opening, in which the sessions learn their heartbeat interval."""
QUICK_ROUNDS, QUICK_SETTLE_S = 2, 4.0
CLAIM_S = 600.0
"""Longer than the probe runs."""
STATES = ("idle", "with a claim elsewhere", "with a claim in the partition")
KIB = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of one process. `latencies`: seconds of its puts. `beats`, `commands`: answered ones of its sessions.
    `service_s`: processor time of the service."""

    latencies: list[float]
    beats: int
    commands: int
    seconds: float
    service_s: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process has measured. `rounds`: by state. `sizes`: bytes of the service at the start, with the sessions,
    with their connections for commands, and with the claims of each state."""

    rounds: list[list[Round]]
    sizes: list[int]
    errors: list[str]


def crowd(*, quick: bool) -> list[Figure]:
    """Measure puts of one sample with four fields by one session in 20, once a second each, while the other sessions
    are idle, wait for a claim in another partition, and wait for a claim in the same partition as well."""
    count = (QUICK_SESSIONS if quick else SESSIONS) // PROCESSES
    turns, settle_s = (QUICK_ROUNDS, QUICK_SETTLE_S) if quick else (ROUNDS, SETTLE_S)
    with service(fields=list(sample_columns())) as (running, client):
        client.register_partition("elsewhere", ["late"], None, ["task"])
        parts: list[Part] = side_by_side(
            _part, [(running.address, running.pid, count, n, turns, settle_s) for n in range(PROCESSES)]
        )
    errors = [error for part in parts for error in part.errors]
    if errors:
        raise RuntimeError(f"{len(errors)} errors, of which the first is: {errors[0]}")
    sessions = PROCESSES * count
    others = sessions - PROCESSES * len(range(0, count, ONE_IN))
    names = (
        f"{sessions:,} sessions",
        "connections for commands",
        "claims that wait",
        "claims that wait in the partition",
    )
    counts = (sessions, others, others, others)
    figures = []
    for place, (name, number) in enumerate(zip(names, counts, strict=True)):
        grown = parts[0].sizes[place + 1] - parts[0].sizes[place]
        figures.append(Figure(name=f"service memory for each of {name}", rounds=[grown / number / KIB], unit="KiB"))
    for place, state in enumerate(STATES):
        rounds = [[part.rounds[place][number] for part in parts] for number in range(turns)]
        figures += _figures(f"{others:,} sessions {state}", rounds)
    return figures


def _figures(beside: str, rounds: Sequence[Sequence[Round]]) -> Iterator[Figure]:
    """Yield the figures of one state. rounds: of each process."""
    latencies = [[each for part in parts for each in part.latencies] for parts in rounds]
    for fraction, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "longest")):
        values = [1e3 * percentile(each, fraction) for each in latencies]
        yield Figure(name=f"put beside {beside}, {name}", rounds=values, unit="ms", note=f"{len(latencies[0])} puts")
    beats = [sum(part.beats for part in parts) / parts[0].seconds for parts in rounds]
    yield Figure(name=f"heartbeats, {beside}", rounds=beats, unit="/s")
    commands = [sum(part.commands for part in parts) / parts[0].seconds for parts in rounds]
    yield Figure(name=f"commands, {beside}", rounds=commands, unit="/s")
    shares = [100 * parts[0].service_s / parts[0].seconds for parts in rounds]
    yield Figure(name=f"processor time of the service, {beside}", rounds=shares, unit="% of a core")


def _part(go: Callable[[], Any], address: str, pid: int, count: int, process: int, turns: int, settle_s: float) -> Part:
    """Measure with `count` sessions. The processes take their steps together."""
    clients = RawSessions(address, count, number=process)
    sizes: list[int] = []
    rounds: list[list[Round]] = []

    def together(step: Callable[[], object]) -> None:
        step()
        clients.run_beside(go)
        sizes.append(anonymous_bytes(pid))
        clients.run_beside(go)

    together(lambda: None)
    together(lambda: clients.open(count))
    clients.run_for(settle_s)
    latencies: list[float] = []
    putters = clients.sessions[::ONE_IN]
    for number, session in enumerate(putters):
        script = _put_each_second(latencies, f"{process}-{number}")
        clients.start(session, script, after_s=PUT_EVERY_S * number / len(putters))
    clients.run_for(PUT_EVERY_S)
    others = [session for number, session in enumerate(clients.sessions) if number % ONE_IN]
    rounds.append(_measure(clients, latencies, pid, turns))
    together(lambda: _run(clients, others, c.Describe(partition=PARTITION)))
    for partition in ("elsewhere", PARTITION):
        claim = c.Claim(partition=partition, task="task", fields=("late",), batch_size=1, timeout_s=CLAIM_S)
        together(lambda claim=claim: _run(clients, others, claim, answered=False))
        clients.run_for(ROUND_S)
        rounds.append(_measure(clients, latencies, pid, turns))
    clients.run_beside(go)
    clients.close()
    return Part(rounds=rounds, sizes=sizes, errors=clients.errors)


def _put_each_second(latencies: list[float], prefix: str) -> Script:
    """Put a sample and clear it, and add the seconds of the put to `latencies`; each `PUT_EVERY_S`, for ever. The times
    are fixed, so that sessions that were held up together do not put together from then on."""
    columns, due = sample_columns(), time.perf_counter()
    while True:
        samples = c.Samples(ids=(f"{prefix}-{due}",))
        began = time.perf_counter()
        yield from put_values(PARTITION, samples, columns)
        latencies.append(time.perf_counter() - began)
        yield c.Clear(partition=PARTITION, samples=samples)
        due += PUT_EVERY_S
        yield max(due - time.perf_counter(), 0.0)


def _run(clients: RawSessions, sessions: Sequence[RawSession], command: c.Command, *, answered: bool = True) -> None:
    """Let each session send the command, 1,000 a second in this process. answered: wait for the answers."""
    done = []

    def once() -> Script:
        if not answered:
            done.append(True)
        yield command
        done.append(True)

    for number, session in enumerate(sessions):
        clients.start(session, once(), after_s=number / 1000)
    clients.run_until(lambda: len(done) >= len(sessions))


def _measure(clients: RawSessions, latencies: list[float], pid: int, count: int) -> list[Round]:
    rounds = []
    for _ in range(count):
        latencies.clear()
        clients.beats = clients.commands = 0
        began, service_s = time.perf_counter(), cpu_seconds(pid)
        clients.run_for(ROUND_S)
        rounds.append(
            Round(
                latencies=list(latencies),
                beats=clients.beats,
                commands=clients.commands,
                seconds=time.perf_counter() - began,
                service_s=cpu_seconds(pid) - service_s,
            )
        )
    return rounds
