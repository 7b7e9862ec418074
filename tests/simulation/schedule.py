"""Who acts next. A schedule is a string of bytes: each step takes one for what happens and one for to whom.

When the bytes are used up the world turns kind: everybody wakes, nothing is lost, and all must come to its end.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.client import Client
from tests.simulation.scripts import drop
from tests.simulation.world import World

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
