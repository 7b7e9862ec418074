"""A simulated client process: threads of scripts, call ids, retries, sessions that end and begin again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dataplane.client.rpc.call_ids import CallIds
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import DataPlaneError, SessionExpiredError, StaleCallError
from dataplane.ledger.commands import (
    Answer,
    Bye,
    Claimed,
    Command,
    Opened,
    OpenSession,
    Result,
    UnitInfo,
)
from tests.ledger.claim_model import Name

if TYPE_CHECKING:
    from tests.simulation.world import World


class Withdrawn(Exception):
    """The caller gave up waiting (a timeout or a cancelled task)."""


class SessionOver(Exception):
    """The service, or a unit, no longer knows this session."""


class Ask(NamedTuple):
    """Send the command and wait; resumes with a `Reply`, or raises its error."""

    command: Command


class Post(NamedTuple):
    """Send the command, resend until it is answered, do not wait."""

    command: Command


class Write(NamedTuple):
    """Copy into the arena: at once on this host, else by a frame that is under way until `Drain`."""

    unit: int
    offset: int
    data: bytes
    grant: Name


class Drain(NamedTuple):
    """Wait until every frame of this thread has been acknowledged."""


class Stop(NamedTuple):
    """Wait until the unit has agreed to refuse what is still under way of a put; nothing to do on this host."""

    unit: int
    grant: Name


class Read(NamedTuple):
    """Copy out of the arena; resumes with the bytes."""

    unit: int
    offset: int
    nbytes: int


class Reply(NamedTuple):
    call_id: int
    result: Any


Step = Ask | Post | Write | Drain | Stop | Read
Script = Generator[Step, Any, None]


@dataclass
class Thread:
    """One script under way. `waits_for` is a call's id, a token of the bulk connection, "drain", or None: it can
    run."""

    make: Callable[[Client, Thread], Script]
    script: Script | None = None
    waits_for: Any = None
    resume: Any = None
    frames: set[int] = field(default_factory=set)
    started: bool = False
    shielded: bool = False
    finished: bool = False
    rounds: int = 0

    def start(self, client: Client) -> None:
        self.script = self.make(client, self)
        self.waits_for = self.resume = None
        self.frames = set()
        self.started = self.shielded = False


class Client:
    """A process on `host`. `locks` are the sessions whose lock file it holds, `claims` what it was given and no call
    made since has confirmed yet, `confirms` which of them each call under way does."""

    def __init__(self, world: World, name: str, host: str, scripts: list[Callable[[Client, Thread], Script]]) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.alive = True
        self.paused = False
        self.session = 0
        self.epoch = 0
        self.state = "closed"
        self.opens = 0
        self.nonce = ""
        self.locks: set[int] = set()
        self.units: dict[int, UnitInfo] = {}
        self.local: set[int] = set()
        self.handshakes = 0
        self.call_ids = CallIds(0)
        self.posted: set[int] = set()
        self.claims: list[int] = []
        self.confirms: dict[int, list[int]] = {}
        self.bye = 0
        self.threads = [Thread(make) for make in scripts]
        world.clients.append(self)

    @property
    def lock_path(self) -> str:
        """Where the lock of the session is that is open, or being opened."""
        return f"/nowhere/{self.nonce}.lock"

    @property
    def awake(self) -> bool:
        return self.alive and not self.paused

    @property
    def finished(self) -> bool:
        return not self.alive or self.state == "done"

    # --- sessions --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a session (again)."""
        self.opens += 1
        self.nonce = f"{self.name}.{self.opens}"
        self.bye = 0
        self.state = "opening"
        self.session = 0
        self.send_open()

    def send_open(self) -> None:
        self.world.call(
            OpenSession(
                nonce=self.nonce,
                host=self.host,
                name=self.name,
                protocol_version=PROTOCOL_VERSION,
                lock_path=self.lock_path,
            )
        )

    def go_on(self) -> None:
        """Ask whoever is the service now for the session, and where the units are."""
        self.world.call(
            OpenSession(
                nonce=self.nonce,
                host=self.host,
                name=self.name,
                protocol_version=PROTOCOL_VERSION,
                lock_path=self.lock_path,
                session=self.session,
                epoch=self.epoch,
            )
        )

    def found(self, opened: Opened) -> None:
        """The session again, or its end; a late copy of the first request opens another once it has ended."""
        if isinstance(opened.error, SessionExpiredError) or opened.session not in (0, self.session):
            self.session_over()
            return
        assert opened.error is None, opened.error
        self.epoch = max(self.epoch, opened.epoch)
        for unit in opened.units:
            if unit.unit not in self.units or unit.epoch > self.units[unit.unit].epoch:
                self.units[unit.unit] = unit

    def opened(self, opened: Opened) -> None:
        if self.alive and self.state in ("open", "closing") and opened.nonce == self.nonce:
            self.found(opened)
        if not self.alive or self.state != "opening" or opened.nonce != self.nonce:
            return
        assert opened.error is None, opened.error
        self.session = opened.session
        self.epoch = opened.epoch
        assert self.session not in self.world.by_session, "a session id was given twice"
        self.world.by_session[self.session] = self
        self.locks.add(self.session)
        self.units = {unit.unit: unit for unit in opened.units}
        self.local = set()
        self.call_ids = CallIds(self.session)
        self.posted = set()
        self.claims = []
        self.confirms = {}
        self.state = "attaching"
        near = [unit for unit in self.world.units if unit.host == self.host]
        self.handshakes = len(near)
        for unit in near:
            self.world.send("handshake", lambda unit=unit, s=self.session: self.shake(unit, s), lossy=False)
        self.maybe_ready()

    def shake(self, unit: Any, session: int) -> None:
        """The unit's half of the handshake; its reply comes back as a message."""
        fine = session in self.locks and unit.attach(session, self)
        self.world.send("handshake", lambda: self.shaken(unit.id, session, fine), lossy=False, to=self)

    def shaken(self, unit: int, session: int, fine: bool) -> None:
        if not self.alive or session != self.session or self.state != "attaching":
            return
        if not fine:
            self.session_over()
            return
        self.local.add(unit)
        self.handshakes -= 1
        self.maybe_ready()

    def maybe_ready(self) -> None:
        if self.state == "attaching" and not self.handshakes:
            self.state = "open"
            for thread in self.threads:
                if not thread.finished:
                    thread.start(self)

    def session_over(self) -> None:
        """The session ends under us: threads end where they stand (none is in a copy), the lock goes."""
        if self.state == "closing":
            self.end()
            return
        for thread in self.threads:
            if thread.script is not None and not thread.finished:
                thread.script.close()
                thread.script = None
        self.locks.discard(self.session)
        self.world.silent(self.session)
        self.open()

    def kill(self) -> None:
        """kill -9: nothing runs any more, the kernel drops the locks, the streams break. Frames sent are sent."""
        self.alive = False
        self.locks.clear()
        for thread in self.threads:
            if thread.script is not None:
                thread.script.close()
                thread.script = None
        if self.session:
            self.world.silent(self.session)

    def end(self) -> None:
        self.state = "done"
        self.locks.clear()
        self.world.silent(self.session)

    # --- commands --------------------------------------------------------------------------------------------

    def issue(self, command: Command, *, posted: bool = False) -> int:
        """Send a new call; its id."""
        call = self.call_ids.issue(command, now=self.world.now, posted=posted)
        if posted:
            self.posted.add(call.call_id)
        self.confirms[call.call_id] = list(self.claims)
        self.world.call(call)
        return call.call_id

    def unanswered(self) -> list[int]:
        """Numbers to resend: those somebody waits for, and those posted."""
        waited = {thread.waits_for for thread in self.threads if isinstance(thread.waits_for, int)}
        return sorted({*waited, *self.call_ids.due(float("inf")), self.bye} - {0})

    def retry(self, pick: Callable[[int], int]) -> None:
        """Resend something unanswered, or look for the session."""
        if self.state == "opening":
            self.send_open()
        elif self.state in ("open", "closing") and not pick(4):
            self.go_on()
        elif self.state in ("open", "closing") and self.unanswered():
            call_ids = self.unanswered()
            self.world.call(self.call_ids.repeat(call_ids[pick(len(call_ids))], now=self.world.now))

    def retry_all(self) -> None:
        if self.state == "opening":
            self.send_open()
        elif self.state in ("open", "closing"):
            for call_id in self.unanswered():
                self.world.call(self.call_ids.repeat(call_id, now=self.world.now))

    def answered(self, answer: Answer) -> None:
        if not self.alive or answer.session != self.session or self.state not in ("open", "closing"):
            return
        if isinstance(answer.result, SessionExpiredError):
            self.session_over()
            return
        if not self.call_ids.is_open(answer.call_id):
            return
        self.call_ids.record_answer(answer.call_id)
        self.check_claims(answer)
        if self.state == "closing" and answer.call_id == self.bye:
            self.end()
            return
        for thread in self.threads:
            if thread.waits_for == answer.call_id:
                assert not isinstance(answer.result, StaleCallError), f"it was waited for: {answer}"
                thread.waits_for = None
                thread.resume = Reply(answer.call_id, answer.result)
                if isinstance(answer.result, DataPlaneError):
                    self.call_ids.abandon(answer.call_id, now=self.world.now)  # if it is a brief read
                return
        failed = answer.call_id in self.posted and not isinstance(answer.result, Result)
        assert not failed, f"a posted call failed: {answer}"

    def check_claims(self, answer: Answer) -> None:
        """Whatever else is open, claims answered before this call was made are final now."""
        final = self.confirms.pop(answer.call_id, [])
        for call_id in final:
            self.world.record.final((self.session, call_id))
        self.claims = [call_id for call_id in self.claims if call_id not in final]
        if isinstance(answer.result, Claimed) and not self.call_ids.is_open(answer.call_id):
            self.claims.append(answer.call_id)

    # --- threads ---------------------------------------------------------------------------------------------

    def runnable(self) -> list[Thread]:
        if not self.awake or self.state != "open":
            return []
        return [t for t in self.threads if t.script is not None and not t.finished and t.waits_for is None]

    def run(self, thread: Thread) -> None:
        """One step of the thread, up to its next message boundary."""
        value, thread.resume = thread.resume, None
        if isinstance(value, Reply) and isinstance(value.result, DataPlaneError):
            value = value.result
        self.drive(thread, value)

    def drive(self, thread: Thread, value: Any) -> None:
        assert thread.script is not None
        thread.started = True
        try:
            step = thread.script.throw(value) if isinstance(value, Exception) else thread.script.send(value)
        except StopIteration:
            thread.finished, thread.script = True, None
            self.maybe_close()
            return
        self.take(thread, step)

    def take(self, thread: Thread, step: Step) -> None:
        match step:
            case Ask(command):
                thread.waits_for = self.issue(command)
            case Post(command):
                thread.resume = self.issue(command, posted=True)
            case Write(unit, offset, data, grant) if unit in self.local:
                self.world.record.write(unit, offset, data, grant)
            case Write(unit, offset, data, grant):
                self.send_frame(thread, unit, offset, data, grant)
            case Drain():
                thread.waits_for = "drain" if thread.frames else None
            case Stop(unit, grant) if unit not in self.local:
                thread.waits_for = "stop"
                self.send_stop(thread, unit, grant)
            case Stop():
                pass
            case Read(unit, offset, nbytes) if unit in self.local:
                thread.resume = self.world.record.read(unit, offset, nbytes)
            case Read(unit, offset, nbytes):
                thread.waits_for = "read"
                self.send_read(thread, unit, offset, nbytes)

    def withdraw(self, thread: Thread) -> None:
        """The caller of this thread's call, or copy, gives up."""
        if thread.shielded or not thread.started:
            return
        if thread.waits_for in (None, "drain"):
            if thread.resume is None:
                thread.waits_for, thread.frames = None, set()
                self.drive(thread, Withdrawn())
            return
        if isinstance(thread.waits_for, int):
            undo = self.call_ids.abandon(thread.waits_for, now=self.world.now)
            if undo is not None:
                self.posted.add(undo.call_id)
                self.world.call(undo)
            thread.waits_for = None
            self.drive(thread, Withdrawn())

    def maybe_close(self) -> None:
        if all(thread.finished for thread in self.threads):
            self.state = "closing"
            self.bye = self.issue(Bye())

    # --- the bulk connection ---------------------------------------------------------------------------------------

    def send_frame(self, thread: Thread, unit: int, offset: int, data: bytes, grant: Name) -> None:
        script, frame, epoch = thread.script, self.world.version(), self.units[unit].epoch
        thread.frames.add(frame)

        def acknowledged(said: str) -> None:
            if not self.alive or thread.script is not script or frame not in thread.frames:
                return
            if said in ("fenced", "restarted"):
                self.session_over()
                return
            thread.frames.discard(frame)
            if not thread.frames and thread.waits_for == "drain":
                thread.waits_for = None

        def arrive() -> None:
            said = self.world.unit(unit).write(grant, offset, data, epoch)
            self.world.send("write ack", lambda: acknowledged(said), lossy=False, to=self)

        self.world.send("write frame", arrive, lossy=False)

    def send_stop(self, thread: Thread, unit: int, grant: Name) -> None:
        script, epoch = thread.script, self.units[unit].epoch

        def agreed(said: str) -> None:
            if not self.alive or thread.script is not script:
                return
            if said in ("fenced", "restarted"):
                self.session_over()
                return
            thread.waits_for = None

        def arrive() -> None:
            said = self.world.unit(unit).stop(grant, epoch)
            self.world.send("stop ack", lambda: agreed(said), lossy=False, to=self)

        self.world.send("stop frame", arrive, lossy=False)

    def send_read(self, thread: Thread, unit: int, offset: int, nbytes: int) -> None:
        script, session, epoch = thread.script, self.session, self.units[unit].epoch

        def received(data: bytes | None) -> None:
            if not self.alive or thread.script is not script:
                return
            if data is None:
                self.session_over()
                return
            thread.waits_for, thread.resume = None, data

        def arrive() -> None:
            data = self.world.unit(unit).read(session, offset, nbytes, epoch)
            self.world.send("read reply", lambda: received(data), lossy=False, to=self)

        self.world.send("read frame", arrive, lossy=False)
