"""The ledger beside its model: every answer is taken into the books, every invariant checked."""

from __future__ import annotations

from typing import Any

from hypothesis.stateful import invariant

from dataplane.core.types import PROTOCOL_VERSION, Checksums
from dataplane.errors import DataPlaneError, SampleNotFoundError, StaleSampleError
from dataplane.ledger import Ledger
from dataplane.ledger.commands import (
    Allocate,
    Allocated,
    Answer,
    Bye,
    Call,
    Claim,
    Clear,
    Command,
    Commit,
    Drain,
    FenceSession,
    FindCells,
    GrowArena,
    Grown,
    Heartbeat,
    Input,
    OnFull,
    Opened,
    OpenSession,
    Output,
    Preallocate,
    SessionAlive,
    SessionGone,
    SessionSilent,
    Tick,
    WhenFull,
)
from tests.ledger.budget_books import BudgetBooks, given_bytes
from tests.ledger.checks import RESERVE, Client, ReservationChecks, Unit
from tests.ledger.claim_model import LIMITS, Faults, Name
from tests.ledger.fingerprint import fingerprint
from tests.ledger.model import Model
from tests.ledger.values import canonical

HOSTS = ("host0", "host1")
HEARTBEAT_S = 2.0


class LedgerDriver(ReservationChecks):
    """Feeds the ledger and keeps the books; the rules are in `test_model.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(7, limits=LIMITS, checksums=Checksums.ALWAYS)
        self.model = Model()
        self.budgets = BudgetBooks(self.model, RESERVE)
        self.log: list[Input] = []
        self.outputs: list[Output] = []
        self.said: list[Any] = []
        self.units: dict[int, Unit] = {}
        self.clients: dict[int, Client] = {}
        self.parked: dict[Name, float] = {}
        self.answers: dict[Name, Any] = {}
        self.turns: dict[Name, int] = {}
        self.plans: dict[Name, Commit] = {}
        self.opened = 0
        self.granted_bytes = 0

    # --- driving ---------------------------------------------------------------------------------------------

    def feed(self, item: Input, first: Name | None = None) -> list[Output]:
        """Apply one input; take its outputs into the books, the answer `first` before the others."""
        self.log.append(item)
        self.budgets.asked(item, self.in_flight())
        outputs = self.ledger.apply(item)
        for session in self.model.take_ended(self.ledger):
            left = isinstance(item, Call) and isinstance(item.command, Bye)
            cause = self.clients[session].suspect or (left and item.session == session)
            assert cause, f"session {session} was given up without cause"
        self.outputs += outputs
        self.said += [canonical(output) for output in outputs]
        answers = [output for output in outputs if isinstance(output, Answer)]
        asked = item.command if isinstance(item, Call) else None
        self.budgets.answered(answers)
        self.granted_bytes = sum(
            given_bytes(command, answer.result)
            for answer in answers
            if isinstance(answer.result, Allocated)
            and isinstance(command := self.model.commands[answer.session, answer.call_id], Allocate)
        )
        if not isinstance(asked, Allocate):  # those that space is given to are answered in their turn
            answers.sort(key=lambda answer: (answer.session, answer.call_id) != first)
        for answer in answers:
            name = (answer.session, answer.call_id)
            if name != first or isinstance(self.model.commands[name], Allocate):
                self.budgets.sync(self.ledger)
            self.take(answer)
        self.budgets.sync(self.ledger)
        self.budgets.check_answers(self.ledger, answers)
        for output in outputs:
            if isinstance(output, FenceSession | GrowArena):
                self.units[output.unit].orders.append(output)
        return outputs

    def in_flight(self) -> dict[Name, bool]:
        """Calls that wait, and those that have space; whether their session surely lives."""
        clients = self.clients
        return {
            name: clients[name[0]].speaks and not clients[name[0]].suspect
            for name in [*self.parked, *self.model.reserved]
        }

    def take(self, answer: Answer) -> None:
        name = (answer.session, answer.call_id)
        assert name not in self.answers, f"{name} was answered again, unasked"
        self.answers[name] = canonical(answer.result)
        late = self.parked.pop(name, None)
        command = self.model.commands[name]
        if answer.session in self.clients:
            self.clients[answer.session].unread.add(answer.call_id)
        if isinstance(answer.result, DataPlaneError):
            self.refused(name, command, answer.result, late)
            return
        if isinstance(command, Allocate):
            self.check_turn(name, command)
        if isinstance(command, Claim):
            self.check_claim(name, command, answer.result)
        self.model.answered(name, command, answer.result)
        if isinstance(command, Allocate | Preallocate):
            self.check_backed(name)
        if isinstance(command, Preallocate):
            self.check_preallocated(name, command)
        if isinstance(command, Bye):
            self.bye(name[0])

    def refused(self, name: Name, command: Command, error: DataPlaneError, late: float | None) -> None:
        kind = type(error).__name__
        assert kind != "InternalError", error
        if kind == "SessionExpiredError":
            assert name[0] not in self.model.sessions
            self.clients[name[0]].over = True
        if isinstance(command, Allocate):
            self.budgets.excused = True
        if isinstance(error, SampleNotFoundError | StaleSampleError) and late is None:
            self.budgets.check_told(command, error)
        self.model.refused(name, command, error)
        if late is not None:
            allowed = {
                "CapacityTimeoutError": late <= self.model.now or self.may_reject(command),
                "ClaimTimeoutError": late <= self.model.now,
                "CallCancelledError": name in self.model.withdrawn,
                "SessionExpiredError": self.clients[name[0]].over,
                "PartitionDroppedError": not isinstance(command, FindCells),
                "TaskNotFoundError": isinstance(command, Claim),
                "RequestTooLargeError": isinstance(command, Allocate),
                "InvalidRequestError": isinstance(command, Claim),
                "ShareConflictError": isinstance(command, Claim),
            }
            assert allowed.get(kind), (name, command, error)
            if kind in ("InvalidRequestError", "ShareConflictError"):
                faults = self.model.parked_faults(command)
                assert kind in faults.must | faults.may, (name, command, error)

    def may_reject(self, command: Command) -> bool:
        partition = self.model.partitions.get(getattr(command, "partition", ""))
        rejecting = partition is not None and partition.when_full is WhenFull.REJECT
        rejecting = rejecting and isinstance(command, Allocate) and not command.moving
        return isinstance(command, Allocate) and (command.on_full is OnFull.REJECT or rejecting)

    def bye(self, session: int) -> None:
        self.clients[session].said_bye = True
        self.budgets.excused = True
        self.parked = {key: late for key, late in self.parked.items() if key[0] != session}

    def call(self, client: Client, command: Command, *, call_id: int | None = None) -> Answer | None:
        """One command of the session; None if it parked."""
        if call_id is None:
            call_id = client.next
            client.next += 1
        name = (client.id, call_id)
        faults = self.model.saves.faults(client.id, command) or self.model.faults(client.id, command)
        if isinstance(command, Drain) and self.takes_the_last_space(command):
            faults.must |= {"DrainError"}
        if name in self.model.withdrawn:
            faults.must |= {"CallCancelledError"}
        if client.id not in self.model.sessions:
            faults = Faults(set() if isinstance(command, Bye) else {"SessionExpiredError"})
        client.heard = self.model.now
        pairs = tuple(bound for other in client.has for bound in (other, other))
        client.has = ()
        item = Call(session=client.id, call_id=call_id, watermark=client.below, confirmed=pairs, command=command)
        self.model.asked(item)
        outputs = self.feed(item, name)
        answers = [o for o in outputs if isinstance(o, Answer) and (o.session, o.call_id) == name]
        assert len(answers) <= 1
        if not answers:
            assert not faults.must, (command, faults)
            waits = isinstance(command, Allocate)  # with REJECT too, while an arena grows
            waits |= isinstance(command, FindCells) and command.timeout_s > 0
            assert waits or (isinstance(command, Claim) and command.blocking), command
            self.turns[name] = len(self.turns)
            self.parked[name] = self.model.now + command.timeout_s  # type: ignore[attr-defined]
            return None
        self.judge(client, command, faults, answers[0])
        if isinstance(command, Allocate) and not command.update and len(outputs) == 1:
            self.check_reserve(answers[0])
        return answers[0]

    def judge(self, client: Client, command: Command, faults: Any, answer: Answer) -> None:
        if isinstance(answer.result, DataPlaneError):
            kind = type(answer.result).__name__
            free = {"CapacityTimeoutError", "RequestTooLargeError"} if isinstance(command, Allocate) else set()
            if isinstance(command, Commit) and command.offset is not None:
                free = {"CapacityTimeoutError"}
            if isinstance(command, Preallocate):
                free = {"CapacityTimeoutError"}
                faults.must |= set() if command.unit in client.attached else {"InvalidRequestError"}
            assert kind in faults.must | faults.may | free, (command, answer.result, faults)
        else:
            assert not faults.must, (command, answer.result, faults)

    def takes_the_last_space(self, command: Drain) -> bool:
        """Whether the order is to be refused: nothing new could be put anywhere else."""
        if command.undo or command.force or command.unit in self.model.draining:
            return False
        others = [
            unit
            for unit in self.ledger._state.units.values()
            if unit.unit_id not in {command.unit, *self.model.draining} and unit.connected
        ]
        return not any(
            unit.ceiling - int(unit.ceiling * unit.reserve_fraction) > unit.space.backed_bytes - unit.space.free_bytes
            for unit in others
        )

    # --- sessions, units, time ---------------------------------------------------------------------------------

    def open_session(self, host: str) -> Client:
        self.opened += 1
        item = OpenSession(
            nonce=f"n{self.opened}", host=host, name=f"c{self.opened}", protocol_version=PROTOCOL_VERSION
        )
        first, again = self.feed(item), self.feed(item)
        assert canonical(first) == canonical(again)
        (opened,) = first
        assert isinstance(opened, Opened)
        assert opened.session not in self.clients
        self.model.sessions.add(opened.session)
        client = self.clients[opened.session] = Client(opened.session, host, heard=self.model.now)
        return client

    def quiet(self, client: Client) -> None:
        """From now on the ledger may give this session up, if nothing shows that it lives."""
        client.suspect = client.suspect or not (client.alive and client.attached)

    def withdraw(self, name: Name, command: Command) -> None:
        self.model.withdrawn.add(name)
        self.call(self.clients[name[0]], command)

    def carry_out(self, unit: Unit) -> None:
        """A unit carries out its next order and reports."""
        order = unit.orders.popleft()
        if isinstance(order, GrowArena):
            assert unit.backed < order.backed_bytes <= unit.capacity
            unit.backed = order.backed_bytes
            self.feed(Grown(unit=unit.id, backed_bytes=order.backed_bytes))
            return
        assert isinstance(order, FenceSession)
        client = self.clients[order.session]
        if unit.id in client.attached and client.alive:
            self.feed(SessionAlive(unit=unit.id, session=client.id))
            return
        unit.fenced.add(client.id)
        client.suspect = True
        self.model.proven_gone(client.id, unit.id)
        self.feed(SessionGone(unit=unit.id, session=client.id))

    def pass_time(self, seconds: float) -> None:
        """The clock goes on; after a short while the clients that speak have been heard."""
        self.model.now += seconds
        for client in self.clients.values():
            if client.speaks and seconds < 2.0:
                client.heard = self.model.now
                self.feed(Heartbeat(session=client.id))
            if self.model.now - client.heard > HEARTBEAT_S:
                self.quiet(client)
        self.model.passed(self.model.now)
        self.feed(Tick(now=self.model.now))
        assert all(late > self.model.now for late in self.parked.values()), "a parked call outlived its deadline"

    # --- invariants ------------------------------------------------------------------------------------------

    @invariant()
    def the_next_deadline_is_early_enough(self) -> None:
        due = [*self.parked.values()]
        for partition in self.model.partitions.values():
            for sample in partition.samples.values():
                due += [held.until for held in sample.claims.values() if held.until is not None]
        if due:
            deadline = self.ledger.next_deadline()
            assert deadline is not None
            assert deadline <= min(due)

    def teardown(self) -> None:
        """Everybody leaves, all is cleared: every byte must be free. Then the written-down inputs replay."""
        if not self.units:
            return
        last = self.open_session(HOSTS[0])
        self.call(last, Clear(partition="p", samples=None))
        for client in self.clients.values():
            client.alive = False
            self.feed(SessionSilent(session=client.id))
        for _ in range(8):
            self.pass_time(23.9)
            for unit in self.units.values():
                while unit.orders:
                    self.carry_out(unit)
        assert not self.parked
        for unit in self.units.values():
            assert sum(size for _, size in self.ledger.free_ranges(unit.id)) == unit.backed, "bytes were lost"
        again = Ledger(7, limits=LIMITS, checksums=Checksums.ALWAYS)
        replayed = [canonical(output) for item in self.log for output in again.apply(item)]
        assert replayed == self.said == [canonical(output) for output in self.outputs]
        assert fingerprint(again) == fingerprint(self.ledger)
