"""The simulated world: one controller, storage units, clients, and a network that does as the schedule says.

Commands and their answers may be lost, doubled, delayed and reordered. Bulk frames may be delayed and reordered. What a
unit and the controller tell each other is delayed but comes, in order. Every message boundary is a place where a
client may stop, be killed, or wake up again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dataplane.ledger import Ledger
from dataplane.ledger.commands import (
    AddUnit,
    Answer,
    FenceSession,
    GrowArena,
    Grown,
    Heartbeat,
    Input,
    Notice,
    Opened,
    Output,
    Restarted,
    SessionAlive,
    SessionAttached,
    SessionGone,
    SessionSilent,
    Tick,
    UnitAdded,
    UnitLost,
)
from tests.ledger.claim_model import Name
from tests.simulation.record import Recorder

if TYPE_CHECKING:
    from tests.simulation.client import Client


@dataclass
class Message:
    """Something on its way: `deliver` is what happens when it arrives. `link` keeps an order, None keeps none. While
    the client `to` is paused it waits at its server."""

    what: str
    deliver: Callable[[], None]
    lossy: bool
    link: Any = None
    to: Client | None = None


@dataclass
class Unit:
    """A storage unit: refuses fenced sessions, knows which local processes hold their lock, grows when told."""

    world: World
    host: str
    capacity: int
    backed: int
    index: int
    id: int = 0
    epoch: int = 1
    fenced: set[int] = field(default_factory=set)
    attached: dict[int, Client] = field(default_factory=dict)
    stopped: set[Name] = field(default_factory=set)

    def offer(self) -> AddUnit:
        """How it presents itself, at first and whenever its link to the controller was lost."""
        return AddUnit(
            name=f"unit{self.index}",
            host=self.host,
            epoch=self.epoch,
            cookie=f"cookie{self.index}",
            capacity_bytes=self.capacity,
            backed_bytes=self.backed,
            endpoints=(f"ipc://unit{self.index}",),
            arena_path=f"/nowhere/unit{self.index}",
        )

    def order(self, order: Output) -> None:
        """What the controller tells this unit."""
        match order:
            case FenceSession(session=session, lock_path=lock_path):
                said = self.fence(session, lock_path)
                if isinstance(said, SessionGone):
                    self.fence_with(session, range(order.first, order.last + 1))
                self.world.report(self, said)
            case GrowArena(backed_bytes=wanted):
                self.backed = max(self.backed, min(wanted, self.capacity))
                self.world.record.backed[self.id] = self.backed
                self.world.report(self, Grown(unit=self.id, backed_bytes=self.backed))
            case _:
                raise AssertionError(order)

    def restart(self) -> None:
        """kill -9, and another run that goes on with the arena: it has seen nobody attach, and fenced nobody."""
        self.epoch += 1
        self.fenced, self.attached, self.stopped = set(), {}, set()

    def fence_with(self, session: int, others: range) -> None:
        """Sessions that are refused with the fenced one are over."""
        there = self.world.record.ledger._state.sessions
        assert not [other for other in others if other != session and other in there], "a session that is there"
        self.fenced.update(others)

    def fence(self, session: int, lock_path: str) -> Input:
        client = self.attached.get(session) or (self.world.by_session.get(session) if lock_path else None)
        if client is not None and session in client.locks:
            self.attached[session] = client
            return SessionAlive(unit=self.id, session=session)
        self.fenced.add(session)
        return SessionGone(unit=self.id, session=session)

    def attach(self, session: int, client: Client) -> bool:
        """The handshake of a process on this host; it holds its lock."""
        if session in self.fenced or session not in client.locks:
            return False
        self.attached[session] = client
        self.world.report(self, SessionAttached(unit=self.id, session=session, lock_path=client.lock_path))
        return True

    def write(self, grant: Name, offset: int, data: bytes, epoch: int) -> str:
        """A frame of a remote put: "written", or refused because the session is "fenced", the put was "stopped", or the
        unit "restarted" since the client learned of it."""
        if epoch != self.epoch:
            return "restarted"
        if grant[0] in self.fenced:
            return "fenced"
        if grant in self.stopped:
            return "stopped"
        self.world.record.write(self.id, offset, data, grant)
        return "written"

    def stop(self, grant: Name, epoch: int) -> str:
        """The client gave up waiting for its frames: whatever of this put is still under way is refused from now on."""
        if epoch != self.epoch:
            return "restarted"
        if grant[0] in self.fenced:
            return "fenced"
        self.stopped.add(grant)
        return "stopped"

    def read(self, session: int, offset: int, nbytes: int, epoch: int) -> bytes | None:
        if session in self.fenced or epoch != self.epoch:
            return None
        return self.world.record.read(self.id, offset, nbytes)


class World:
    """Everything there is. `schedule` decides (see `plans.py`); the methods here are what can happen."""

    def __init__(self, ledger: Ledger) -> None:
        self.record = Recorder(ledger)
        self.now = 0.0
        self.messages: list[Message] = []
        self.units: list[Unit] = []
        self.clients: list[Client] = []
        self.by_session: dict[int, Client] = {}
        self.versions = 0
        self.epoch = ledger.epoch
        self.apply(Tick(now=0.0))

    # --- making it -------------------------------------------------------------------------------------------

    def add_unit(self, host: str, capacity: int, backed: int) -> Unit:
        unit = Unit(self, host, capacity, backed, len(self.units))
        added = self.record.apply(unit.offer())
        (answer,) = [output for output in added if isinstance(output, UnitAdded)]
        assert answer.error is None, answer.error
        unit.id = answer.unit
        self.units.append(unit)
        self.record.backed[unit.id] = unit.backed
        self.route([output for output in added if output is not answer])
        return unit

    def break_link(self, unit: Unit) -> None:
        """What the unit and the controller were telling each other is lost; then the unit comes back."""
        links = (("report", unit.id), ("order", unit.id))
        self.messages = [message for message in self.messages if message.link not in links]
        self.report(unit, UnitLost(unit=unit.id))
        self.send("AddUnit", partial(self.offer, unit), lossy=False, link=links[0])

    def restart_unit(self, unit: Unit) -> None:
        """It is killed, with what it had not said yet, and comes back."""
        unit.restart()
        self.break_link(unit)

    def restart(self) -> None:
        """Kill the controller and restart it from its journal. Units notice, and reconnect."""
        links = [("report", unit.id) for unit in self.units] + [("order", unit.id) for unit in self.units]
        self.messages = [message for message in self.messages if message.link not in links]
        self.record.ledger = Ledger.restored(self.record.ledger.image())
        self.epoch += 1
        settings = {"reserve_fraction": 0.15, "heartbeat_s": 2.0, "session_timeout_s": 20.0}
        self.apply(Restarted(epoch=self.epoch, **settings))
        for unit in self.units:
            self.send("AddUnit", partial(self.offer, unit), lossy=False, link=("report", unit.id))

    def offer(self, unit: Unit) -> None:
        self.apply(unit.offer())

    def unit(self, unit_id: int) -> Unit:
        return next(unit for unit in self.units if unit.id == unit_id)

    def version(self) -> int:
        self.versions += 1
        return self.versions

    # --- messages --------------------------------------------------------------------------------------------

    def send(
        self,
        what: str,
        deliver: Callable[[], None],
        *,
        lossy: bool = True,
        link: Any = None,
        to: Client | None = None,
    ) -> None:
        self.messages.append(Message(what, deliver, lossy, link, to))

    def report(self, unit: Unit, item: Input) -> None:
        """A unit's report to the controller, in order."""
        link = ("report", unit.id)
        self.send(f"{type(item).__name__} from {unit.id}", lambda: self.apply(item), lossy=False, link=link)

    def call(self, item: Input) -> None:
        """A client's message to the controller."""
        self.send(type(item).__name__, lambda: self.apply(item))

    def silent(self, session: int) -> None:
        """A client's stream breaks; the controller will notice."""
        item = SessionSilent(session=session)
        self.send("silent", lambda: self.apply(item), lossy=False)

    def apply(self, item: Input) -> None:
        self.route(self.record.apply(item))

    def route(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Answer(session=session):
                    client = self.by_session.get(session)
                    if client is not None:
                        self.send("answer", partial(client.answered, output), to=client)
                case Opened(nonce=nonce):
                    client = next(client for client in self.clients if client.name == nonce.split(".")[0])
                    self.send("opened", partial(client.opened, output), to=client)
                case FenceSession(unit=unit_id) | GrowArena(unit=unit_id):
                    unit = self.unit(unit_id)
                    link = ("order", unit_id)
                    self.send("order", partial(unit.order, output), lossy=False, link=link)
                case UnitAdded(error=error):
                    assert error is None, error
                case Notice():
                    pass
                case _:
                    raise AssertionError(output)

    def deliverable(self) -> list[int]:
        """Places of the messages that may arrive next: all without a link, the first of each link."""
        seen: set[Any] = set()
        places = []
        for place, message in enumerate(self.messages):
            paused = message.to is not None and message.to.paused
            if not paused and (message.link is None or message.link not in seen):
                places.append(place)
            if message.link is not None:
                seen.add(message.link)
        return places

    def deliver(self, place: int) -> None:
        self.messages.pop(place).deliver()

    def lose(self, place: int) -> None:
        if self.messages[place].lossy:
            del self.messages[place]

    def double(self, place: int) -> None:
        if self.messages[place].lossy:
            self.messages.append(self.messages[place])

    # --- time ------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Time goes by: clients that are awake say so, the ledger hears the clock."""
        self.now += seconds
        for client in self.clients:
            if client.awake and client.session:
                self.call(Heartbeat(session=client.session))
        self.apply(Tick(now=self.now))
