"""Plans, which hypothesis chooses (the participants, and the events that happen to them), and how to run one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from dataplane.ledger import Ledger, Limits
from dataplane.ledger.commands import Mode
from tests.simulation.client import Client
from tests.simulation.movers import mover
from tests.simulation.schedule import finish, play, settle
from tests.simulation.scripts import (
    Make,
    cleaner,
    closer,
    dripper,
    producer,
    reader,
    register,
    saver,
    scorer,
    trainer,
    waiter,
)
from tests.simulation.world import World

HOSTS = ("host0", "host1")


@dataclass(frozen=True)
class Plan:
    """What a world is made of."""

    units: tuple[tuple[str, int, int], ...]
    clients: tuple[tuple[str, tuple[Make, ...]], ...]


def scripts() -> st.SearchStrategy[Make]:
    seed = st.integers(0, 50)
    count = st.integers(1, 12)
    mode = st.sampled_from([Mode.UPSERT, Mode.UPSERT, Mode.CREATE])
    return st.one_of(
        st.builds(producer, seed, count, shared=st.booleans(), mode=mode),
        st.builds(scorer, seed, count, lease_s=st.sampled_from([None, 3.0])),
        st.builds(trainer, seed, count),
        st.builds(waiter, count),
        st.builds(reader, seed, count),
        st.builds(cleaner, seed, count),
        st.builds(dripper, seed, count),
        st.builds(saver, seed, count),
        st.builds(mover, seed, count),
        st.builds(closer, seed, count),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One or two nearly full arenas; always somebody who puts, scores, trains and reads, who moves
    what is in two, and maybe others."""
    granules = draw(st.integers(12, 40))
    units = [(HOSTS[0], 64 * granules, 64 * draw(st.integers(0, granules)))]
    if draw(st.booleans()):
        granules = draw(st.integers(12, 40))
        units.append((draw(st.sampled_from(HOSTS)), 64 * granules, 64 * granules))
    host = st.sampled_from(HOSTS)
    seed = draw(st.integers(0, 50))
    clients: list[tuple[str, tuple[Make, ...]]] = [
        (draw(host), (producer(seed, 12, shared=seed % 2 == 0, mode=Mode.UPSERT),)),
        (draw(host), (scorer(seed, 12, lease_s=None), waiter(3), reader(seed, 8))),
        (HOSTS[0], (dripper(seed, 6), cleaner(seed, 4))),
        (draw(host), (saver(seed, 9),)),
        (draw(host), (trainer(seed, 10), reader(seed + 1, 8))),
    ]
    if seed % 2:
        clients.append((draw(host), (scorer(seed + 1, 12, lease_s=3.0),)))
    if seed % 4 == 0:
        clients.append((draw(host), (closer(seed, 2),)))
    if len(units) > 1:
        clients.append((draw(host), (mover(seed, 8), producer(seed + 1, 8, shared=True, mode=Mode.UPSERT))))
    more = st.tuples(host, st.lists(scripts(), min_size=1, max_size=2).map(tuple))
    clients += draw(st.lists(more, max_size=2))
    return Plan(tuple(units), tuple(clients))


def schedules() -> st.SearchStrategy[bytes]:
    """Short ones that hypothesis makes byte by byte, and long ones of which it chooses seed and length."""
    long = st.builds(lambda seed, size: Random(seed).randbytes(size), st.integers(0, 1 << 32), st.integers(500, 4000))
    return st.one_of(long, long, st.binary(min_size=300, max_size=1500))


def new_ledger() -> Ledger:
    """One that grants preallocated space in these small arenas too."""
    return Ledger(1, limits=Limits(preallocated_part=2))


def simulate(plan: Plan, decisions: bytes) -> World:
    """Run the world that `plan` and `decisions` describe, and check everything on the way."""
    world = World(new_ledger())
    for host, capacity, backed in plan.units:
        world.add_unit(host, capacity, backed)
    Client(world, "first", HOSTS[0], [register]).open()
    settle(world)
    for i, (host, makes) in enumerate(plan.clients):
        Client(world, f"client{i}", host, list(makes))
    play(world, decisions)
    finish(world, HOSTS[0])
    return world
