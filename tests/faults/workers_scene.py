"""What a storm over workers rages over: a job on two hosts, and what must be true of it whatever happens.

Two workers, a broker and the job's directory are on the first host, a worker and a broker on the second. Every worker
sends to, and receives from, every other; each puts items for all workers into a channel of either broker, and takes its
own. The hosts are network namespaces joined by a cable, where this machine may have them.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from tests.faults import board as places
from tests.faults.books import StormError
from tests.faults.cast import PROGRESS_S
from tests.faults.hosts import Host, Hosts, missing
from tests.faults.launcher import Launcher
from tests.faults.workers_books import WorkersBooks
from tests.faults.workers_cast import Member
from tests.faults.workers_roles import CHANNELS, LOOK_S, WORKERS, lanes

BROKERS = ("broker-0", "broker-1")
"""By the rank of the node."""
MORE_DESCRIPTORS = 64
"""A process that nothing happened to may have so many more at the end than at the beginning."""
LOOK_AT_BOOKS_S = 0.2


class WorkersScene:
    """All processes. `cabled`: whether there is a cable between the hosts."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tq-storm-", dir="/tmp"))
        self.cabled = not missing()
        self.members: dict[str, Member] = {}
        self._ends = contextlib.ExitStack()
        self._first: dict[str, int] = {}
        self._hosts: Hosts | None = None

    # --- the beginning --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everything; all get on when this returns."""
        self._hosts = self._ends.enter_context(Hosts(self.folder)) if self.cabled else None
        hosts: list[Host | None] = [None, None] if self._hosts is None else [self._hosts.one, self._hosts.two]
        launchers = [Launcher(f"host-{number}", host) for number, host in enumerate(hosts)]
        for launcher in launchers:
            self._ends.callback(launcher.end)
        near, far = launchers
        self._member("directory", near, "directory", near.address)
        address = (self.folder / "directory.address").read_text()
        for rank, (name, launcher) in enumerate(zip(BROKERS, launchers, strict=True)):
            self._member(name, launcher, "broker", address, rank, launcher.address)
        for name in WORKERS:
            launcher = far if name == "far" else near
            self._member(name, launcher, "worker", address, launcher.address)
        self.all_get_on()
        self._first = self._descriptors()

    def _member(self, name: str, launcher: Launcher, role: str, *arguments: object) -> None:
        member = self.members[name] = Member(name, self.folder, launcher, role, *arguments)
        member.start()

    def cable(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        assert self._hosts is not None
        self._hosts.cable(delay_s=delay_s, loss=loss)

    # --- faults ---------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """What a broker holds dies with it."""
        self.members[name].kill()
        if name.startswith("broker"):
            *_, last = (line for line in (self.folder / f"{name}.notes").read_text().splitlines() if line)
            with (self.folder / "scene.notes").open("a") as notes:
                notes.write(f"dead {last.split(' ')[1]}\n")

    # --- what must be true ----------------------------------------------------------------------------------------

    def all_get_on(self, *, but: Collection[str] = ()) -> None:
        """Every worker but those does again, twice, everything that has to do with none of the processes in `but`;
        nobody ended, and nothing of what they wrote down is wrong."""
        absent = {*but, *(channel for channel, broker in zip(CHANNELS, BROKERS, strict=True) if broker in but)}
        before = {
            (name, lane): self.members[name].count(lane)
            for name in WORKERS
            if name not in but
            for lane, what in enumerate(lanes(name))
            if what.partition(" ")[2] not in absent
        }
        end = time.monotonic() + PROGRESS_S
        while late := [key for key, count in before.items() if self.members[key[0]].count(key[1]) < count + 2]:
            self._nobody_ended()
            if time.monotonic() > end:
                told = [f"{name}: {lanes(name)[lane]}" for name, lane in late]
                raise StormError(f"no progress within {PROGRESS_S:.0f} s: {told}; {WorkersBooks(self.folder).told()}")
            time.sleep(LOOK_S)
        self._nobody_ended()
        WorkersBooks(self.folder).outstanding()

    def _nobody_ended(self) -> None:
        for member in self.members.values():
            if member.pid:
                member.lives()

    def _descriptors(self) -> dict[str, int]:
        return {name: member.descriptors() for name, member in self.members.items() if member.pid}

    # --- the end --------------------------------------------------------------------------------------------------

    def settle(self) -> str:
        """Nothing new is begun, what is under way comes to its end; then all end by themselves and leave nothing."""
        for name in WORKERS:
            self.members[name].rest()
        books = self._all_came()
        self._nothing_grew()
        self._end(*WORKERS)
        for name in BROKERS:
            self._await_empty(self.members[name])
        self._end(*BROKERS)
        if self.members["directory"].pid:
            self._end("directory")
        self._nothing_is_left()
        return books.told()

    def _end(self, *names: str) -> None:
        for name in names:
            self.members[name].ask_to_end()
        for name in names:
            self.members[name].await_end()

    def _all_came(self) -> WorkersBooks:
        end = time.monotonic() + PROGRESS_S
        while True:
            self._nobody_ended()
            books = WorkersBooks(self.folder)
            late = books.outstanding()
            late += [f"an item of {name}" for name in BROKERS if self.members[name].has(places.ITEMS)]
            if not late:
                return books
            if time.monotonic() > end:
                raise StormError(f"never came: {late[:8]} and {max(0, len(late) - 8)} more; {books.told()}")
            time.sleep(LOOK_AT_BOOKS_S)

    def _nothing_grew(self) -> None:
        now = self._descriptors()
        kept = {name for name in self._first if name in now and name in ("aside", "directory")}
        grown = {name: now[name] for name in kept if now[name] > self._first[name] + MORE_DESCRIPTORS}
        if grown:
            raise StormError(f"descriptors: {grown}, at first {self._first}")

    def _await_empty(self, broker: Member) -> None:
        """Nobody uses it: nothing of its memory is in use."""
        end = time.monotonic() + PROGRESS_S
        while True:
            nbytes = broker.has(places.BYTES)
            if not nbytes:
                return
            if time.monotonic() > end:
                raise StormError(f"{broker.name} holds {nbytes:,} bytes for nobody")
            time.sleep(LOOK_AT_BOOKS_S)

    def _nothing_is_left(self) -> None:
        """In memory that processes of a host share by name."""
        for host in () if self._hosts is None else (self._hosts.one, self._hosts.two):
            left = subprocess.run(
                host.inside("ls", "-A", "/dev/shm"), capture_output=True, check=True, text=True
            ).stdout
            if left:
                raise StormError(f"left in /dev/shm: {left.split()}")

    def close(self, *, keep: bool) -> None:
        """End everything. keep: the notes and logs, for whoever wants to know what happened."""
        self._ends.close()
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
