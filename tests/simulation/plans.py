"""Plans of simulated clients, and the schedule that interleaves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from dataplane.ledger import Ledger, Limits
from dataplane.ledger.commands import Mode
from tests.simulation.client import Client
from tests.simulation.scripts import (
    Make,
    cleaner,
    closer,
    dripper,
    drop,
    mover,
    producer,
    reader,
    register,
    saver,
    scorer,
    trainer,
    waiter,
)
from tests.simulation.world import World

# --- Who acts next. A schedule is a string of bytes: each step takes one for what happens and one for
# to whom. When the bytes are used up the world turns kind: everybody wakes, nothing is lost, and
# all must come to its end.


MOST_CLIENTS = 10
MOST_STEPS = 10_000
"""Far more than a world ever takes to come to rest."""


class Schedule:
    """The decisions, one after another."""

    def __init__(self, decisions: bytes) -> None:
        self.decisions = decisions
        self.place = 0

    @property
    def left(self) -> bool:
        return self.place < len(self.decisions)

    def byte(self) -> int:
        if not self.left:
            return 0
        self.place += 1
        return self.decisions[self.place - 1]

    def pick(self, count: int) -> int:
        return self.byte() % count


def run_one(world: World, schedule: Schedule) -> None:
    able = [(client, thread) for client in world.clients for thread in client.runnable()]
    if able:
        client, thread = able[schedule.pick(len(able))]
        client.run(thread)
    else:
        deliver(world, schedule)


def deliver(world: World, schedule: Schedule) -> None:
    places = world.deliverable()
    if places:
        world.deliver(places[schedule.pick(len(places))])


def lose(world: World, schedule: Schedule) -> None:
    if world.messages:
        world.lose(schedule.pick(len(world.messages)))


def double(world: World, schedule: Schedule) -> None:
    if world.messages:
        world.double(schedule.pick(len(world.messages)))


def retry(world: World, schedule: Schedule) -> None:
    awake = [client for client in world.clients if client.awake]
    if awake:
        awake[schedule.pick(len(awake))].retry(schedule.pick)


def pause(world: World, schedule: Schedule) -> None:
    client = world.clients[schedule.pick(len(world.clients))]
    client.paused = not client.paused


def kill(world: World, schedule: Schedule) -> None:
    client = world.clients[schedule.pick(len(world.clients))]
    if not client.finished:
        client.kill()
        if len(world.clients) < MOST_CLIENTS:
            Client(world, f"again{len(world.clients)}", client.host, [thread.make for thread in client.threads]).open()


def withdraw(world: World, schedule: Schedule) -> None:
    able = [(c, thread) for c in world.clients if c.awake and c.state == "open" for thread in c.threads]
    able = [(c, thread) for c, thread in able if thread.script is not None]
    if able:
        client, thread = able[schedule.pick(len(able))]
        client.withdraw(thread)


def break_stream(world: World, schedule: Schedule) -> None:
    client = world.clients[schedule.pick(len(world.clients))]
    if client.session:
        world.silent(client.session)


def break_link(world: World, schedule: Schedule) -> None:
    world.break_link(world.units[schedule.pick(len(world.units))])


def restart_unit(world: World, schedule: Schedule) -> None:
    world.restart_unit(world.units[schedule.pick(len(world.units))])


def restart(world: World, schedule: Schedule) -> None:
    world.restart()


def wait(seconds: float) -> Callable[[World, Schedule], None]:
    def act(world: World, schedule: Schedule) -> None:
        world.advance(seconds)

    return act


ACTIONS: list[tuple[int, Callable[[World, Schedule], None]]] = [
    (100, run_one),
    (190, deliver),
    (200, lose),
    (210, double),
    (222, retry),
    (234, wait(0.4)),
    (238, wait(3.0)),
    (239, wait(45.0)),
    (242, pause),
    (243, kill),
    (251, withdraw),
    (253, break_stream),
    (254, break_link),
    (255, restart_unit),
    (256, restart),
]
"""Each byte below the bound (and not below one before) means the action."""


def play(world: World, decisions: bytes) -> None:
    """The whole run of a world whose clients have been made: the schedule, then a kind end."""
    for client in world.clients:
        if client.state == "closed":
            client.open()
    schedule = Schedule(decisions)
    while schedule.left:
        byte = schedule.byte()
        next(act for bound, act in ACTIONS if byte < bound)(world, schedule)
    settle(world)


def settle(world: World) -> None:
    """Everybody wakes and nothing is lost; within a bounded time all clients must be done."""
    for client in world.clients:
        client.paused = False
    for _ in range(400):
        flow(world)
        if all(client.finished for client in world.clients):
            return
        for client in world.clients:
            if client.alive:
                client.retry_all()
        world.advance(1.0)
    stuck = {c.name: [t.waits_for for t in c.threads] for c in world.clients if not c.finished}
    raise AssertionError(
        f"stuck: {stuck}; {[(c.name, c.state, c.unanswered()) for c in world.clients if c.name in stuck]}"
    )


def flow(world: World) -> None:
    """Deliver and run until nothing moves."""
    for _ in range(MOST_STEPS):
        places = world.deliverable()
        able = [(client, thread) for client in world.clients for thread in client.runnable()]
        if places:
            world.deliver(places[0])
        elif able:
            able[0][0].run(able[0][1])
        else:
            return
    raise AssertionError("no end to it")


def finish(world: World, host: str) -> None:
    """The dead are found out, a last client clears everything: then every byte must be free."""
    for _ in range(6):
        world.advance(30.0)
        flow(world)
    Client(world, "last", host, [drop]).open()
    settle(world)
    for _ in range(6):
        world.advance(30.0)
        flow(world)


# --- Plans, which hypothesis chooses (the participants, and the events that happen to them), and how
# to run one.


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
    return Ledger(1, limits=Limits(preallocated_divisor=2))


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
