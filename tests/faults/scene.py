"""What a storm rages over: a service on two hosts with all its clients, and what must be true of them whatever happens.

A bystander that no fault ever touches checks after every fault that samples committed at the beginning are there, and
that it can work.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dataplane import DataPlaneClient, SessionExpiredError, StaleSampleError, connect
from dataplane.core.file_locks import sweep
from dataplane.core.private_dir import own_path
from dataplane.storage.arena_record import discard
from tests.faults import books, players
from tests.faults.acting import Actor, Order, play
from tests.faults.books import Books, StormError
from tests.faults.cast import LOOK_S, PROGRESS_S, Player
from tests.faults.growth import Figures
from tests.faults.houses import BACKED_BYTES, ELSEWHERE, HERE, serve_controller, serve_unit
from tests.faults.network import HOST, Network
from tests.faults.players import ALBUM, FIELDS, HURRIED, LONG_TIMEOUTS, PARTITION, TASK, Role, columns, verify
from tests.faults.pulse import Pulse
from tests.faults.weather import UNIT_FIRST_POINTS, UNITS

MONUMENT = "monument"
BYSTANDER = "bystander"
FAR_STONES = [f"far-stone-{number}" for number in range(16)]
STONES = [f"stone-{number}" for number in range(BACKED_BYTES // 2 // 12_000)]
TOGETHER = 256
"""Samples that are verified in one read."""
STILL_S = 0.5
"""Where this process stood still for so long at once, the machine is so busy that the bystander may have been silent
for longer than its session lasts."""

T = TypeVar("T")


def found(actor: Actor, address: str, role: Role) -> None:
    """Put the part of the monument that lies on the other host, once."""
    with connect(address, client_name=role.name, **role.settings) as client:
        client.put_samples(FAR_STONES, MONUMENT, columns(FAR_STONES))
    actor.has_done_something()
    threading.Event().wait()


def _put_stones(client: DataPlaneClient) -> None:
    client.put_samples(STONES, MONUMENT, columns(STONES))


def _look(client: DataPlaneClient) -> None:
    """The monument stands, and samples can be put, read and cleared."""
    stones = client.list_samples(MONUMENT)
    if set(stones.sample_ids) != {*STONES, *FAR_STONES}:
        raise StormError(f"{stones.size} of {len(STONES) + len(FAR_STONES)} committed samples are left")
    verify(client, stones)
    names = players.new_names(BYSTANDER)
    meta = client.put_samples(names, BYSTANDER, columns(names), mode="create")
    verify(client, meta)
    client.clear_samples(meta, BYSTANDER)


def enough(name: str) -> int:
    """Operations that end after which one must have begun in the meantime; a saver's has many beginnings."""
    return 1 if name == "saver" else 2


class Scene:
    """All processes."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tq-storm-", dir="/tmp"))
        self.network = Network()
        self.controller = self._player("controller", serve_controller, says=True)
        for link, ports in (("clients", 2), ("south-link", 2)):
            self.network.link(link, self.folder / "controller.port", ports=ports)
        for unit in UNITS:
            self.network.link(unit, self.folder / f"{unit}.port")
        self.address = ""
        self.units: dict[str, Player] = {}
        self.clients: dict[str, Player] = {}
        self._bystander: DataPlaneClient | None = None
        self._pulse = Pulse()
        self._first: Figures | None = None

    def _player(self, name: str, role: Any, *arguments: Any, says: bool = False) -> Player:
        return Player(name, str(self.folder), role, *arguments, says=says)

    @property
    def everybody(self) -> dict[str, Player]:
        return {"controller": self.controller, **self.units, **self.clients}

    @property
    def bystander(self) -> DataPlaneClient:
        assert self._bystander is not None, "the storm has not begun"
        return self._bystander

    # --- the beginning --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everything. The first runs of a storage unit end at the places that only first runs reach."""
        self.network.start()
        self.controller.start()
        self.address = self.controller.ready()
        near, far = self.address, f"{HOST}:{self.network.ports['clients']}"
        link = f"{HOST}:{self.network.ports['south-link']}"
        for unit, address, host in (("north", near, HERE), ("south", link, ELSEWHERE)):
            port = self.network.ports[unit]
            self.units[unit] = self._player(unit, serve_unit, address, port, host, says=True)
            self.units[unit].start(Order(UNIT_FIRST_POINTS[0], "kill"))
            self.units[unit].await_death()
            self.units[unit].start()
            self.units[unit].ready()
        self._bystander = self._arrive()
        for partition, tasks in ((PARTITION, [TASK]), (MONUMENT, []), (BYSTANDER, [])):
            self.bystander.register_partition(partition, dict.fromkeys(FIELDS), None, tasks)
        self._build_monument(far)
        for role, act, address in self._roles(near, far):
            self.clients[role.name] = self._player(role.name, play, act, address, role)
            self.clients[role.name].start()
        self.everybody_gets_on()

    def _roles(self, near: str, far: str) -> list[tuple[Role, Any, str]]:
        remote = {**HURRIED, "force_remote": True}
        return [
            (Role("producer-near", LONG_TIMEOUTS), players.produce, near),
            (Role("producer-far", remote, ELSEWHERE), players.produce, far),
            (Role("consumer-near", LONG_TIMEOUTS), players.consume, near),
            (Role("consumer-far", HURRIED, ELSEWHERE), players.consume, far),
            (Role("streamer", LONG_TIMEOUTS), players.stream, near),
            (Role("saver", LONG_TIMEOUTS), players.save, near),
            (Role("roamer", HURRIED), players.roam, near),
        ]

    def _build_monument(self, far: str) -> None:
        founder = self._player("founder", play, found, far, Role("founder", LONG_TIMEOUTS, ELSEWHERE))
        founder.start()
        end = time.monotonic() + PROGRESS_S
        while not founder.done:
            if founder.process.exitcode is not None or time.monotonic() > end:
                raise StormError(f"the founder put nothing: {books.bad(self.folder)}")
            time.sleep(LOOK_S)
        founder.kill()
        north = self.units["north"]
        north.tell(Order(UNIT_FIRST_POINTS[1], "kill"))
        put = threading.Thread(target=self._by_bystander, args=(_put_stones,))
        put.start()
        north.await_death()
        north.start()
        north.ready()
        put.join(PROGRESS_S)
        if put.is_alive():
            raise StormError("a put that needed a storage unit to grow hangs since the unit died")

    # --- what must be true ----------------------------------------------------------------------------------------

    def everybody_gets_on(self, *, but: str = "") -> None:
        """Each client that is awake, `but` that one, brings another operation to an end, from its beginning; nobody has
        seen anything wrong, and the bystander finds everything in its place."""
        for player in (self.controller, *self.units.values()):
            player.ready()
        awake = {name: player for name, player in self.clients.items() if not player.asleep_until and name != but}
        before = {name: player.done for name, player in awake.items()}
        end = time.monotonic() + PROGRESS_S
        while waiting := [name for name, done in before.items() if self.clients[name].done < done + enough(name)]:
            self.nobody_ended()
            if time.monotonic() > end:
                raise StormError(f"no progress of {waiting} within {PROGRESS_S:.0f} s")
            time.sleep(LOOK_S)
        self.nobody_ended()
        self._look_around()

    def nobody_ended(self) -> None:
        self._all_live(self.everybody)

    def _all_live(self, players: dict[str, Player]) -> None:
        for name, player in players.items():
            if player.process.exitcode is not None:
                raise StormError(f"{name} ended with code {player.process.exitcode}: {books.bad(self.folder)[:3]}")

    def _arrive(self) -> DataPlaneClient:
        return connect(self.address, client_name=BYSTANDER, **LONG_TIMEOUTS)

    def _by_bystander(self, work: Callable[[DataPlaneClient], T]) -> T:
        """Its session lasts, whatever happens to others. Only where this process stood still, while no storage unit was
        there to say that it lives, it opens another session and does its work again."""
        try:
            done = work(self.bystander)
        except SessionExpiredError as error:
            if self._pulse.longest_s < STILL_S:
                raise StormError(f"the session of a bystander that never stood still has ended: {error}") from error
            self.bystander.close()
            self._bystander = self._arrive()
            done = work(self.bystander)
        self._pulse.begin_anew()
        return done

    def _look_around(self) -> None:
        self._by_bystander(_look)

    def calm(self) -> Figures:
        """All rest for a moment: nothing is reserved, pinned or retired, every session is somebody's (sleepers may have
        none), every sample is what it should be, and nothing has grown."""
        for player in self.clients.values():
            player.rest(True)
        self._await_books_balance({BYSTANDER, *self.clients})
        self._verify_all()
        service = {player.name: player.process.pid for player in (self.controller, *self.units.values())}
        figures = Figures.of(service, self.folder / "state")
        self._first = self._first or figures
        figures.check(self._first)
        for player in self.clients.values():
            player.rest(False)
        return figures

    def _verify_all(self) -> None:
        """Whoever does not rest yet may still clear some."""
        end = time.monotonic() + PROGRESS_S
        while True:
            there = self.bystander.list_samples(PARTITION)
            try:
                for first in range(0, there.size, TOGETHER):
                    verify(self.bystander, there.slice(first, min(first + TOGETHER, there.size)))
            except StaleSampleError as error:
                if time.monotonic() > end:
                    raise StormError(f"somebody does not rest: {error}") from error
            else:
                return

    def more_clients(self) -> None:
        """Another producer and another consumer, for more load."""
        number = len(self.clients)
        for name, act in ((f"producer-{number}", players.produce), (f"consumer-{number}", players.consume)):
            self.clients[name] = self._player(name, play, act, self.address, Role(name, LONG_TIMEOUTS))
            self.clients[name].start()

    def _await_books_balance(self, names: set[str], *, empty: bool = False) -> None:
        end = time.monotonic() + PROGRESS_S
        while True:
            stats = self.bystander.stats()
            held = {unit.name: unit.reserved_bytes + unit.pinned_bytes + unit.retired_bytes for unit in stats.units}
            live = {unit.name: unit.live_bytes for unit in stats.units}
            fine = not any(held.values()) and not (empty and any(live.values()))
            sessions = Counter(session.name for session in stats.sessions)
            fine = fine and sessions.total() == len(sessions) and names >= sessions.keys()
            if fine and set(held) == set(UNITS):
                return
            if time.monotonic() > end:
                raise StormError(f"held {held}, live {live}, sessions of {sorted(names)}: {stats.sessions}")
            time.sleep(0.05)

    # --- the end --------------------------------------------------------------------------------------------------

    def settle(self) -> str:
        """Everybody leaves; what is left is consumed; then the books are reckoned up, in a sentence."""
        for player in self.clients.values():
            player.kill()
        client, drained = self.bystander, []
        client.seal(PARTITION)
        while True:
            meta = client.claim_meta(PARTITION, TASK, ["tokens"], 64, timeout_s=PROGRESS_S)
            if meta.size:
                verify(client, meta)
                drained += meta.sample_ids
                client.clear_samples(meta, PARTITION)  # there may be no space for anything else
            elif not client.why_blocked(PARTITION, TASK).leased:
                break
            else:
                time.sleep(0.1)  # what the dead had on lease comes back
        self._look_around()
        for partition in (PARTITION, MONUMENT, BYSTANDER, ALBUM):
            client.clear_samples(None, partition)
        self._await_books_balance({BYSTANDER}, empty=True)
        self._all_live({"controller": self.controller, **self.units})
        return Books(self.folder, drained).reckon()

    def close(self, *, keep: bool) -> None:
        """End everything. keep: the notes and logs, for whoever wants to know what happened."""
        for player in self.clients.values():
            player.end()
        if self._bystander is not None:
            self._bystander.close()
        for player in self.everybody.values():
            player.end()
        self.network.close()
        self._pulse.close()
        discard(self.folder / "state", ["/dev/shm", self.folder])
        with contextlib.suppress(FileNotFoundError):
            sweep(own_path("/dev/shm"))  # the locks of the dead, as the next storage unit here would
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
