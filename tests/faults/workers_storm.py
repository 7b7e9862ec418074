"""A storm over workers: they send messages and use channels while they, the brokers of channels and the job's directory
are killed and stopped, and the cable between their hosts is cut, slow and lossy.

`python -m tests.faults.workers_storm --seed 7`; `--minutes 10` goes on for so long; `--parts 3` deals the faults to
three jobs that run at the same time. Every fault there is comes once, in an order that the seed decides; then more, at
random; the last one is the directory's death. After each fault everybody must get on with their work, and what they
wrote down must be right: messages of a pair are received once and in order, items are taken once, what is lost was told
to one who needed it, by an error of the right name and in its time. At the end everything has come, and nothing is
left of descriptors, memory and processes. Exit code 1, and what went wrong, otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.faults import board as places
from tests.faults.books import StormError
from tests.faults.command import Part, Say, main
from tests.faults.workers_scene import WorkersScene

SHORT_S = 3.0
"""Survived by all who stand still for so long, and by those who wait for them."""
LONG_S = 12.0
"""Longer than the directory waits for a worker, or a broker, that it does not hear."""
CUT_S = 5.0
LONG_CUT_S = 17.0
"""Longer than a connection of a channel lasts without an answer."""
LOSSY_S = 3.0
AFTER_S = 4.0
"""So long it takes all to get on after a fault, about."""
DELAY_S, LOSS = 0.02, 0.02


@dataclass(frozen=True)
class WorkersFault:
    """kind: "kill", "stop" (for `seconds`), "stop in recv", "stop in send" (the same, in the middle of a large one),
    "cut" (for `seconds`) or "lossy". who: a process, or ""."""

    kind: str
    who: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.who, f"{self.seconds:.0f} s" if self.seconds else "")))


def every_fault(*, cabled: bool) -> list[WorkersFault]:
    """Each once."""
    every = [
        WorkersFault("stop in recv", "near", LONG_S),
        WorkersFault("stop in send", "near", LONG_S),
        WorkersFault("stop in recv", "far", LONG_S),
        WorkersFault("stop", "broker-1", LONG_S),
        WorkersFault("stop", "directory", LONG_S),
        WorkersFault("kill", "near"),
        WorkersFault("kill", "far"),
        WorkersFault("kill", "broker-0"),
        WorkersFault("kill", "broker-1"),
        WorkersFault("stop", "broker-0", SHORT_S),
        WorkersFault("stop", "near", SHORT_S),
        WorkersFault("stop", "directory", SHORT_S),
    ]
    if cabled:
        every += [WorkersFault("cut", seconds=CUT_S), WorkersFault("cut", seconds=LONG_CUT_S), WorkersFault("lossy")]
    return every


def dealt(faults: list[WorkersFault], parts: int) -> list[list[WorkersFault]]:
    """Among so many parts, which take about as long as each other."""
    hands: list[list[WorkersFault]] = [[] for _ in range(parts)]
    for fault in sorted(faults, key=lambda fault: -fault.seconds):
        min(hands, key=lambda hand: sum(each.seconds + AFTER_S for each in hand)).append(fault)
    return hands


DIRECTORY_DIES = WorkersFault("kill", "directory")


class WorkersStorm:
    """`seed` decides the order. part: (k, n), the k-th (from 0) of n storms that share faults."""

    def __init__(self, seed: int, part: Part = (0, 1)) -> None:
        self._deal, self._part = random.Random(seed), part
        self.random = random.Random(f"{seed} {part}")
        self.scene = WorkersScene()

    def plan(self) -> list[WorkersFault]:
        """This part of all faults, in the order in which they are to happen."""
        part, parts = self._part
        mine = dealt(every_fault(cabled=self.scene.cabled), parts)[part]
        self._deal.shuffle(mine)
        return mine

    def happen(self, fault: WorkersFault) -> None:
        """One fault, and what must be true meanwhile and after it."""
        time.sleep(self.random.random() * 0.2)
        match fault.kind:
            case "kill":
                self.scene.kill(fault.who)
                if fault == DIRECTORY_DIES:
                    self.scene.all_get_on()
                    return
                self.scene.all_get_on(but={fault.who})
                self.scene.members[fault.who].start()
            case "stop" | "stop in recv" | "stop in send":
                self._stop(fault)
            case "cut":
                self._cut(fault.seconds)
            case _:
                self.scene.cable(delay_s=DELAY_S, loss=LOSS)
                self._for(LOSSY_S, lambda: self.scene.all_get_on())
                self.scene.cable()
        self.scene.all_get_on()

    def _stop(self, fault: WorkersFault) -> None:
        member = self.scene.members[fault.who]
        if fault.kind == "stop":
            member.stop()
        else:
            member.tell(places.STOP_IN_RECV if fault.kind == "stop in recv" else places.STOP_IN_SEND)
            member.await_stop()
        self._for(fault.seconds, lambda: self.scene.all_get_on(but={fault.who}))
        member.wake()

    def _cut(self, seconds: float) -> None:
        """Late frames are under way when it happens, as on a long cable: answers get lost, too."""
        self.scene.cable(delay_s=DELAY_S)
        self.scene.all_get_on()
        self.scene.cable(loss=1)
        self._for(seconds, lambda: self.scene.all_get_on(but={"far", "broker-1"}))
        self.scene.cable()

    @staticmethod
    def _for(seconds: float, work: Callable[[], None]) -> None:
        end = time.monotonic() + seconds
        work()
        time.sleep(max(0.0, end - time.monotonic()))


class WorkersCourse:
    """A storm from its beginning to its end. say: gets a line for each fault. minutes: how long it goes on at least.
    most: so many of the faults, at first."""

    def __init__(
        self,
        seed: int,
        say: Say,
        *,
        part: Part = (0, 1),
        minutes: float = 0.0,
        most: int | None = None,
    ) -> None:
        self._storm = WorkersStorm(seed, part)
        self._seed, self._say, self._minutes, self._most = seed, say, minutes, most
        self._begun = time.monotonic()
        self._recent: list[str] = []
        self._number = 0

    def run(self) -> None:
        """Raises `StormError`."""
        scene, fine = self._storm.scene, False
        if not scene.cabled:
            self._say("this machine has no hosts of its own: no cable is cut, and workers are on one")
        try:
            scene.begin()
            for fault in self._faults():
                self._number += 1
                self._recent = [*self._recent[-4:], str(fault)]
                self._say(f"{self._number:4} faults  {self._lasted_s():6.1f} s  {fault}")
                self._storm.happen(fault)
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

    def _faults(self) -> Iterator[WorkersFault]:
        yield from self._storm.plan()[: self._most]
        while self._lasted_s() < 60 * self._minutes:
            yield from self._storm.plan()
        yield DIRECTORY_DIES


def _storm(arguments: argparse.Namespace, part: Part, say: Say) -> None:
    def say_some(text: str) -> None:
        if arguments.verbose or "faults  " not in text:
            say(text)

    WorkersCourse(arguments.seed, say_some, part=part, minutes=arguments.minutes, most=arguments.faults).run()


if __name__ == "__main__":
    which = "at most this many of them"
    sys.exit(main("tests.faults.workers_storm", __doc__, _storm, faults=None, which=which))
