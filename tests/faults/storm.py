"""A storm: clients work on a service while its processes and theirs are killed and stopped, their calls disturbed and
cancelled, and the network between them broken and slowed down, one fault after another.

`python -m tests.faults.storm --seed 7`; `--minutes 30` goes on for so long, with more and more clients; `--parts 3`
deals the faults to three storms that run at the same time, each on its own service. Every fault there is comes once, in
an order that the seed decides; then more, at random. After each fault everybody must get on
with their work, and what was committed must be there; at the end the books must balance: every sample that was put is
consumed exactly once, every row read was right, and no byte and no session is left. Prints now and then what it does;
exit code 1, and what went wrong, otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator

from tests.faults.acting import Order
from tests.faults.books import StormError
from tests.faults.cast import PROGRESS_S, Player
from tests.faults.command import Part, Say, main
from tests.faults.scene import Scene
from tests.faults.weather import AT_START, CONTROLLER_AT_START, UNIT_AT_START, Fault, every_fault

LONG_S = 2.5
"""Longer than a session is waited for, a lease lasts, or a hurried client waits for anything."""
POKE_S, POKE_MOST_S = 3.0, 12.0
"""Seconds before the first poke. The pause doubles after each poke, up to `POKE_MOST_S`."""
POKED_TIMES = 3
"""Factor on `PROGRESS_S` for places that need a poke. A poke can miss: a producer that is killed between two puts
leaves nothing to fence."""
CALM_EVERY = 40
SAY_EVERY_S = 20.0
MOST_ASLEEP = 3
MOST_CLIENTS = 16
SLOW = "saver"
"""Its operations take a second, for the disk: it is not waited for when something happened to another client."""
POKES = {
    "session.found": "controller",
    "controller.before_opened": "consumer-near",
    "controller.before_added": "south",
    "controller.before_order": "producer-far",
    "unit.report.before": "consumer-near",
    "unit.report.after": "consumer-near",
    "unit.attach": "consumer-near",
    "unit.attached": "consumer-near",
    "unit.fence.before": "producer-near",
    "unit.fence.after": "producer-near",
}
"""The player whose restart makes a process reach each place soon. For the far unit it is the far player, because
clients mostly use the unit of their own host."""


class Storm:
    """`seed` decides what happens to whom, and when. part: (k, n), the k-th (from 0) of n storms that share faults."""

    def __init__(self, seed: int, part: Part = (0, 1)) -> None:
        self._deal, self._part = random.Random(seed), part
        self.random = random.Random(f"{seed} {part}")
        self.scene = Scene()

    def plan(self, count: int) -> list[Fault]:
        """This part of `count` faults: each once, then some again; in the order in which they are to happen."""
        every = list(every_fault())
        plan: list[Fault] = []
        while len(plan) < count:
            self._deal.shuffle(every)
            plan += every
        part, parts = self._part
        return plan[part:count:parts]

    def happen(self, fault: Fault) -> None:
        """One fault, and what must be true after it."""
        self._wake_those_who_slept_enough()
        if fault.who not in self.scene.clients:
            self.everybody_wakes()
        elif self.scene.clients[fault.who].asleep_until:
            self._wake_one(self.scene.clients[fault.who])
        match fault.kind:
            case "kill":
                time.sleep(self.random.random() * 0.2)
                self._begin_anew(self.scene.everybody[fault.who])
            case "stop":
                self._stop(self.scene.everybody[fault.who])
            case "network":
                self._disturb(fault.who, fault.how)
            case "service":
                self._kill_the_service()
            case _:
                assert fault.order is not None
                self._order(self.scene.everybody[fault.who], fault.order)
        others = fault.who in self.scene.clients and fault.who != SLOW
        self.scene.everybody_gets_on(but=SLOW if others else "")

    # --- each kind ------------------------------------------------------------------------------------------------

    def _begin_anew(self, player: Player) -> None:
        player.kill()
        player.start()
        player.ready()

    def _kill_the_service(self) -> None:
        service = (self.scene.controller, *self.scene.units.values())
        for player in service:
            player.process.kill()
        for player in service:
            player.process.join()
        for player in service:
            player.start()
            player.ready()

    def _stop(self, player: Player) -> None:
        """A client sleeps while others go on; without a process of the service nobody does, so that is waited for."""
        player.stop()
        self._falls_asleep(player)

    def _falls_asleep(self, player: Player) -> None:
        if player.name in self.scene.clients:
            player.asleep_until = time.monotonic() + LONG_S
            asleep = sorted((p for p in self.scene.clients.values() if p.asleep_until), key=lambda p: p.asleep_until)
            for one in asleep[:-MOST_ASLEEP]:
                self._wake_one(one)
            return
        time.sleep(LONG_S)
        player.wake()

    def _wake_one(self, player: Player) -> None:
        time.sleep(max(0.0, player.asleep_until - time.monotonic()))
        player.wake()

    def everybody_wakes(self) -> None:
        """When they have slept enough."""
        for player in self.scene.clients.values():
            if player.asleep_until:
                self._wake_one(player)

    def _wake_those_who_slept_enough(self) -> None:
        for player in self.scene.clients.values():
            if player.asleep_until and player.asleep_until <= time.monotonic():
                player.wake()

    def _disturb(self, link: str, how: str) -> None:
        network = self.scene.network
        network.disturb(link, how)
        if how in ("close", "freeze"):
            time.sleep(LONG_S)
        elif how in ("delay", "slow"):
            self.scene.everybody_gets_on()
        network.disturb(link, "mend")

    def _order(self, player: Player, order: Order) -> None:
        before = player.obeyed
        at_start = order.at in AT_START or order.at in CONTROLLER_AT_START or order.at in UNIT_AT_START
        if at_start:
            player.kill()
            player.start(order)
        else:
            nth = 1 if order.at in POKES else self.random.randint(1, 3)
            order = Order(order.at, order.how, nth)
            player.tell(order)
        self._until_it_obeyed(player, order, before)
        if order.how == "kill":
            player.await_death()
            player.start()
            player.ready()
        elif order.how == "stop":
            player.await_stop()
            self._falls_asleep(player)
            if at_start:
                player.ready()

    def _until_it_obeyed(self, player: Player, order: Order, before: int) -> None:
        poke = POKES.get(order.at)
        if poke and player.name == "south":
            poke = poke.replace("-near", "-far")
        # On a busy machine a saver takes half a minute from one time to the next.
        limit_s = (POKED_TIMES if poke else order.nth) * PROGRESS_S
        end, wait_s = time.monotonic() + limit_s, POKE_S if poke else limit_s
        while not player.await_obeyed(before, wait_s):
            code = player.process.exitcode
            if player.obeyed > before:  # just now, and it may have died of it
                return
            if code is not None or time.monotonic() > end:
                raise StormError(f"{player.name} did not come to {order.at} (exit code {code})")
            if poke:
                wait_s = min(2 * wait_s, POKE_MOST_S)
                poked = self.scene.everybody[poke]
                poked.kill()
                poked.start()  # it may not get ready before `player` goes on


class Course:
    """A storm from its beginning to its end. say: gets a line now and then, `every_line`: for each fault. minutes: how
    long it goes on at least, with more and more clients."""

    def __init__(
        self,
        count: int,
        seed: int,
        say: Say,
        *,
        part: Part = (0, 1),
        every_line: bool = False,
        minutes: float = 0.0,
    ) -> None:
        self._storm = Storm(seed, part)
        self._count, self._seed, self._say, self._every_line, self._minutes = count, seed, say, every_line, minutes
        self._begun = self._said_at = time.monotonic()
        self._number = 0
        self._recent: list[str] = []

    def run(self) -> None:
        """Raises `StormError`."""
        scene, fine = self._storm.scene, False
        try:
            scene.begin()
            for fault in self._faults():
                self._next(fault)
            self._calm()
            self._say(scene.settle())
            self._say(f"{self._number} faults in {self._lasted_s():.0f} s, seed {self._seed}")
            fine = True
        except StormError as error:
            last = "; ".join(self._recent)
            raise StormError(f"{error}\nthe last faults: {last}\nnotes and logs: {scene.folder}") from error
        finally:
            scene.close(keep=not fine)

    def _lasted_s(self) -> float:
        return time.monotonic() - self._begun

    def _faults(self) -> Iterator[Fault]:
        yield from self._storm.plan(self._count)
        while self._lasted_s() < 60 * self._minutes:
            yield from self._storm.plan(CALM_EVERY)

    def _next(self, fault: Fault) -> None:
        self._number += 1
        self._recent = [*self._recent[-4:], str(fault)]
        self._storm.happen(fault)
        if self._number % CALM_EVERY == 0:
            self._calm()
        if self._every_line or time.monotonic() - self._said_at > SAY_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"{self._number:4} faults  {self._lasted_s():6.1f} s  {fault}")

    def _calm(self) -> None:
        self._storm.everybody_wakes()
        figures = self._storm.scene.calm()
        if self._minutes:
            self._say(f"{len(self._storm.scene.clients)} clients at rest: {figures}")
            if len(self._storm.scene.clients) < MOST_CLIENTS:
                self._storm.scene.more_clients()


def _storm(arguments: argparse.Namespace, part: Part, say: Say) -> None:
    seed, verbose, minutes = arguments.seed, arguments.verbose, arguments.minutes
    Course(arguments.faults, seed, say, part=part, every_line=verbose, minutes=minutes).run()


if __name__ == "__main__":
    every = len(list(every_fault()))
    which = f"how many (there are {every} different ones)"
    sys.exit(main("tests.faults.storm", __doc__, _storm, faults=every, which=which))
