"""A storm: clients work on a service while its processes and theirs are killed and stopped, one fault after another.

`python -m tests.faults.storm --faults 200 --seed 7`. After each fault everybody must get on with their work; at the end
the books must balance: every sample that was put is consumed exactly once, every row read was right, and no byte and no
session is left. Prints what it did; exit code 1, and what went wrong, otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataplane import connect
from dataplane.folder import own_path
from dataplane.kept import discard
from dataplane.lockfile import sweep
from tests.faults.forks import forks
from tests.faults.players import (
    CLIENT,
    PARTITION,
    TASK,
    consume,
    play,
    produce,
    serve_controller,
    serve_unit,
    verify,
)

PROGRESS_S = 90.0
"""After a fault everybody has this long to get on."""
START_S = 60.0
UNITS = ("north", "south")
CLIENT_FAILPOINTS = (
    "call.Allocate.before",
    "call.Allocate.after",
    "put.mid_copy",
    "bulk.write.between_frames",
    "put.before_commit",
    "call.Commit.before",
    "call.Commit.after",
    "call.Claim.before",
    "call.Claim.after",
    "call.Locate.before",
    "call.Locate.after",
    "get.mid_copy",
    "bulk.read.between_frames",
    "get.before_release",
    "call.Release.before",
    "call.Release.after",
    "call.Ack.before",
    "call.Ack.after",
    "call.Clear.before",
    "call.Clear.after",
)
CONTROLLER_FAILPOINTS = ("journal.before_append", "journal.after_append", "journal.applied")


class StormError(AssertionError):
    """What must never happen did."""


class Player:
    """A process with a role, which can be ended, stopped, and started again."""

    def __init__(self, name: str, start: Callable[[str], Any]) -> None:
        self.name = name
        self._start = start
        self.process: Any = None

    def start(self, failpoint: str = "") -> None:
        self.process = self._start(failpoint)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(START_S)

    def stop_for(self, seconds: float) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.process.pid, signal.SIGCONT)


class Storm:
    """Everything that runs. `seed` decides what happens to whom."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="tq-storm-", dir="/tmp"))
        self.state = str(self.folder / "state")
        self.address = ""
        self.pipes: dict[str, Any] = {}
        self.progress: dict[str, Any] = {}
        self.done: Counter[str] = Counter()
        self.controller = Player("controller", self._start_controller)
        self.units = [Player(name, lambda failpoint, name=name: self._start_unit(name)) for name in UNITS]
        acts = [("producer-local", produce, False), ("producer-remote", produce, True)]
        acts += [("consumer-local", consume, False), ("consumer-remote", consume, True)]
        self.clients = [
            Player(name, lambda failpoint, one=(name, act, remote): self._start_client(*one, failpoint))
            for name, act, remote in acts
        ]

    # --- processes ------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, role: Any, *arguments: Any) -> Any:
        ours, theirs = forks.Pipe()
        process = forks.Process(target=role, args=(theirs, *arguments), daemon=True, name=name)
        process.start()
        theirs.close()
        self.pipes[name] = ours
        return process

    def _said(self, name: str, process: Any) -> Any:
        try:
            if self.pipes[name].poll(START_S):
                return self.pipes[name].recv()
        except (EOFError, ConnectionError):
            process.join(START_S)
        raise StormError(f"{name} did not start (exit code {process.exitcode})")

    def _start_controller(self, failpoint: str) -> Any:
        process = self._spawn("controller", serve_controller, self.state, failpoint)
        if failpoint:
            return process  # it may die before it has said anything
        address = self._said("controller", process)
        if self.address not in ("", address):
            raise StormError(f"the service moved from {self.address} to {address}")
        self.address = address
        return process

    def _start_unit(self, name: str) -> Any:
        process = self._spawn(name, serve_unit, self.state, self.address, name)
        self._said(name, process)
        return process

    def _start_client(self, name: str, act: Any, remote: bool, failpoint: str) -> Any:
        progress = self.progress.setdefault(name, forks.Value("q", 0, lock=False))
        arguments = (act, name, str(self.folder), progress, failpoint, self.address, remote)
        process = forks.Process(target=play, args=arguments, daemon=True, name=name)
        process.start()
        return process

    # --- faults ---------------------------------------------------------------------------------------------------

    def faults(self) -> list[Callable[[], str]]:
        """Every kind of fault once, in an order of its own."""
        kinds: list[Callable[[], str]] = [
            *[lambda at=at: self.client_dies_at(at) for at in CLIENT_FAILPOINTS],
            *[lambda at=at: self.controller_dies_at(at) for at in CONTROLLER_FAILPOINTS],
            *[lambda one=one: self.killed(one) for one in (self.controller, *self.units, *self.clients)],
            *[lambda one=one: self.stopped(one) for one in (self.controller, *self.units, *self.clients)],
            self.service_killed,
        ]
        self.random.shuffle(kinds)
        return kinds

    def killed(self, player: Player) -> str:
        time.sleep(self.random.random() * 0.2)
        player.kill()
        player.start()
        return f"kill {player.name}"

    def service_killed(self) -> str:
        """Controller and units at once."""
        for player in (self.controller, *self.units):
            player.process.kill()
        for player in (self.controller, *self.units):
            player.process.join(START_S)
            player.start()
        return "kill the whole service"

    def stopped(self, player: Player) -> str:
        """Longer than a session is waited for, or a lease lasts, by chance."""
        seconds = self.random.choice([0.3, 2.5, 5.0])
        player.stop_for(seconds)
        return f"stop {player.name} for {seconds} s"

    def client_dies_at(self, failpoint: str) -> str:
        """Whoever of those that come by there dies there."""
        producing = failpoint.split(".")[0] == "put" or failpoint.split(".")[1] in ("Allocate", "Commit", "write")
        remote = failpoint.startswith("bulk")
        local_only = failpoint.endswith("mid_copy")
        player = self.clients[(0 if producing else 2) + (remote or (not local_only and self.random.random() < 0.5))]
        player.kill()
        player.start(failpoint)
        self._await_death(player, failpoint)
        player.start()
        return f"{player.name} dies at {failpoint}"

    def controller_dies_at(self, failpoint: str) -> str:
        self.controller.kill()
        self.controller.start(failpoint)
        self._await_death(self.controller, failpoint)
        self.controller.start()
        return f"controller dies at {failpoint}"

    def _await_death(self, player: Player, failpoint: str) -> None:
        player.process.join(PROGRESS_S)
        if player.process.exitcode != -signal.SIGKILL:
            raise StormError(f"{player.name} did not come to {failpoint} (exit code {player.process.exitcode})")

    # --- the course of it -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.controller.start()
        for unit in self.units:
            unit.start()
        with connect(self.address, **CLIENT) as client:
            fields = {"tokens": None, "number": None, "text": None}
            client.register_partition(PARTITION, fields, None, [TASK])
        for player in self.clients:
            player.start()
        self.everybody_gets_on()

    def everybody_gets_on(self) -> None:
        """Each client brings two more operations to an end, and nobody has seen anything wrong."""
        before = {name: progress.value for name, progress in self.progress.items()}
        end = time.monotonic() + PROGRESS_S
        waiting = set(before)
        while waiting:
            waiting = {name for name in waiting if self.progress[name].value < before[name] + 2}
            for player in (self.controller, *self.units, *self.clients):
                if player.process.exitcode is not None:
                    raise StormError(f"{player.name} ended with code {player.process.exitcode}: {self.bad()}")
            if time.monotonic() > end:
                raise StormError(f"no progress of {sorted(waiting)} within {PROGRESS_S:.0f} s")
            time.sleep(0.01)

    def bad(self) -> list[str]:
        """What players noted that must never be."""
        lines = [line for path in self.folder.glob("*.notes") for line in path.read_text().splitlines()]
        return [line for line in lines if line.startswith("BAD")]

    def settle(self) -> str:
        """Everybody leaves; what is left is consumed; then the books are reckoned up."""
        for player in self.clients:
            player.kill()
        drained: list[str] = []
        with connect(self.address, **CLIENT) as client:
            client.seal(PARTITION)
            while True:
                meta = client.claim_meta(PARTITION, TASK, ["tokens"], 64, timeout_s=PROGRESS_S)
                if meta.size:
                    verify(client, meta)
                    drained += meta.sample_ids
                elif not client.why_blocked(PARTITION, TASK).leased:
                    break
                else:
                    time.sleep(0.1)  # what the dead had on lease comes back
            left = client.list_samples(PARTITION)
            client.clear_samples(None, PARTITION)
            self._await_empty(client)
        return self._reckon(drained, left.size)

    def _await_empty(self, client: Any) -> None:
        end = time.monotonic() + PROGRESS_S
        while True:
            stats = client.stats()
            held = {unit.name: unit.reserved_bytes + unit.live_bytes + unit.retired_bytes for unit in stats.units}
            if not any(held.values()) and len(stats.sessions) == 1 and len(stats.units) == len(UNITS):
                return
            if time.monotonic() > end:
                raise StormError(f"bytes or sessions are left: {held}, {stats.sessions}")
            time.sleep(0.1)

    def _reckon(self, drained: list[str], left: int) -> str:
        put: set[str] = set()
        tried: set[str] = set()
        acking: set[str] = set()
        acked: Counter[str] = Counter(drained)
        errors: Counter[str] = Counter()
        for path in self.folder.glob("*.notes"):
            for line in path.read_text().splitlines():
                what, *words = line.split(" ")
                match what:
                    case "putting":
                        tried.update(words)
                    case "put":
                        put.update(words)
                    case "acking":
                        acking.update(words)
                    case "acked":
                        acked.update(words)
                    case "error":
                        errors.update(words)
                    case _:
                        raise StormError(line)
        twice = [name for name, count in acked.items() if count > 1]
        lost = put - set(acked) - acking
        unknown = (set(acked) | acking) - tried
        if twice or lost or unknown:
            some = f"consumed twice: {twice[:5]}; lost: {sorted(lost)[:5]}; never put: {sorted(unknown)[:5]}"
            raise StormError(some)
        return (
            f"{len(put)} samples put, {len(acked)} consumed once each ({len(drained)} of them at the end, {left} were "
            f"still there), {len(tried - put)} and {len(acking - set(acked))} of unknown outcome; "
            f"errors that clients saw: {dict(errors.most_common()) or 'none'}"
        )

    def close(self) -> None:
        for player in (*self.clients, self.controller, *self.units):
            if player.process is not None:
                player.process.kill()
                player.process.join(START_S)
        discard(self.state, ["/dev/shm"])
        sweep(own_path("/dev/shm"))  # the locks of the dead, as the next storage unit here would
        shutil.rmtree(self.folder, ignore_errors=True)


def run(faults: int, seed: int, say: Callable[[str], None]) -> None:
    """`faults` faults, every kind before any comes again. Raises `StormError`."""
    storm = Storm(seed)
    begun = time.monotonic()
    try:
        storm.begin()
        waiting: list[Callable[[], str]] = []
        for number in range(faults):
            waiting = waiting or storm.faults()
            done = waiting.pop()()
            storm.everybody_gets_on()
            say(f"{number + 1:4} of {faults}  {time.monotonic() - begun:6.1f} s  {done}")
        say(storm.settle())
        say(f"{faults} faults in {time.monotonic() - begun:.0f} s, seed {seed}")
    finally:
        storm.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="decides what happens to whom; random if not given")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"a storm of {arguments.faults} faults, seed {seed}", flush=True)
    try:
        run(arguments.faults, seed, lambda text: print(text, flush=True))
    except StormError as error:
        print(f"seed {seed}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
