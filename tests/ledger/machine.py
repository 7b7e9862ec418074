"""The ledger beside its model: every answer is taken into the books, every invariant checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis.stateful import invariant

from dataplane.core.types import PROTOCOL_VERSION, Checksums
from dataplane.errors import DataPlaneError, SampleNotFoundError, StaleSampleError
from dataplane.ledger import Ledger
from dataplane.ledger.commands import (
    Abort,
    Ack,
    Allocate,
    Allocated,
    Answer,
    Bye,
    Call,
    CheckConsumption,
    Claim,
    Claimed,
    ClaimsSettled,
    Clear,
    Cleared,
    Command,
    Commit,
    Committed,
    Consumption,
    Drain,
    Extend,
    FenceSession,
    FindCells,
    FoundCells,
    GrowArena,
    Grown,
    Heartbeat,
    Input,
    List,
    Listed,
    Locate,
    Located,
    Move,
    Moved,
    Nack,
    OnFull,
    Opened,
    OpenSession,
    Output,
    Preallocate,
    Preallocated,
    Publish,
    ReadSaved,
    Register,
    Release,
    Save,
    Saved,
    SavedRows,
    Seal,
    SessionAlive,
    SessionGone,
    SessionSilent,
    SetTags,
    SetVersion,
    Stage,
    StatsReport,
    Tick,
    Unclaim,
    WhenFull,
    WhyBlocked,
)
from tests.ledger.budget_books import BudgetBooks, given_bytes
from tests.ledger.checks import LIMITS, RESERVE, Client, ReservationChecks, Unit
from tests.ledger.claim_model import Name
from tests.ledger.fingerprint import fingerprint
from tests.ledger.model import Model, merge_tags
from tests.ledger.oracle import overlooked
from tests.ledger.save_model import SaveBooks
from tests.ledger.values import canonical

HOSTS = ("host0", "host1")
HEARTBEAT_S = 2.0


class LedgerDriver(ReservationChecks):
    """Feeds the ledger and keeps the books; the rules are in `test_model.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.fixed = Ledger(7, limits=LIMITS, checksums=Checksums.ALWAYS), {}
        self.watch_selections()
        self.model = Model()
        self.books = SaveBooks(self.model)
        self.budgets = BudgetBooks(self.model, RESERVE)
        self.log: list[Input] = []
        self.outputs: list[Output] = []
        self.said: list[Any] = []
        self.units: dict[int, Unit] = {}
        self.clients: dict[int, Client] = {}
        self.parked: dict[Name, float] = {}
        self.answers: dict[Name, Any] = {}
        self.withdrawn: set[Name] = set()
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
        else:
            if isinstance(command, Allocate):
                self.check_turn(name, command)
            self.effect(name, command, answer.result)

    def refused(self, name: Name, command: Command, error: DataPlaneError, late: float | None) -> None:
        kind = type(error).__name__
        assert kind != "InternalError", error
        if kind == "SessionExpiredError":
            self.expired(name[0])
        if isinstance(command, Allocate):
            self.budgets.excused = True
        if isinstance(error, SampleNotFoundError | StaleSampleError) and late is None:
            self.budgets.check_told(command, error)
        if isinstance(command, Ack | Nack | Extend) and isinstance(error, StaleSampleError):
            self.conclude(command, error.positions)
        if isinstance(command, Commit) and (name[0], command.reservation) not in self.model.ahead:
            self.model.reserved.pop((name[0], command.reservation or 0), None)
        if isinstance(command, Move):
            self.model.reserved.pop((name[0], command.reservation), None)
        if late is not None:
            allowed = {
                "CapacityTimeoutError": late <= self.model.now or self.may_reject(command),
                "ClaimTimeoutError": late <= self.model.now,
                "CallCancelledError": name in self.withdrawn,
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

    def expired(self, session: int) -> None:
        """The ledger says that the session is over: its claims went back."""
        client = self.clients[session]
        assert client.suspect or client.said_bye, f"session {session} was given up without cause"
        client.over = True
        self.books.ended(session)
        lost = list(self.model.claims_of(session))
        self.model.give_back(lambda held: any(held is one for one in lost))

    def effect(self, name: Name, command: Command, result: Any) -> None:
        model = self.model
        match command, result:
            case Register(), _:
                model.register(command)
            case Seal(partition=partition), _:
                model.partitions[partition].sealed = True
            case Allocate(), Allocated():
                assert name not in self.withdrawn
                self.grant(name, command, result)
            case Preallocate(), Preallocated():
                assert name not in self.withdrawn
                self.grant_preallocated(name, command, result)
            case Commit(), Committed():
                model.committed(name, command, result)
                if command.reservation is not None and command.offset is None:
                    del model.reserved[name[0], command.reservation]
            case Locate(), Located():
                assert name not in self.withdrawn
                model.located(name, command, result)
            case Claim(), Claimed():
                assert name not in self.withdrawn
                self.check_claim(name, command, result)
                model.claimed(name, command, result)
            case Clear(), Cleared():
                model.cleared(command, result)
            case List(), Listed():
                partition = model.partitions[command.partition]
                named = partition.in_order()[: command.limit]
                if command.samples is not None:
                    named = model.named(partition, command.samples)
                model.check_view(named, result)
            case CheckConsumption(), Consumption():
                self.check_consumption(command, result)
            case FindCells(), FoundCells():
                assert name not in self.withdrawn
                model.found_cells(name, command, result)
            case ((Ack() | Nack() | Extend()), ClaimsSettled()):
                dead = set(range(len(command.samples))) - self.conclude(command, ())
                assert result.cleared.tolist() == sorted(dead)
            case Move(), Moved():
                model.moved(name, command, result)
            case Save(), Saved():
                assert name not in self.withdrawn
                self.books.saved(name, command, result)
            case ReadSaved(), SavedRows():
                self.books.read(name[0], command, result)
            case StatsReport() | WhyBlocked(), _:
                pass
            case _:
                self.plain_effect(name, command)

    def conclude(self, command: Ack | Nack | Extend, refused: Sequence[int]) -> set[int]:
        """Done to all samples of the command that live, but to those at the places that were refused; the places of
        all that live."""
        settled = self.model.settled(self.model.partitions[command.partition], command)
        for place, sample, _ in settled:
            held = sample.claims.get(command.task)
            if place in refused:
                continue
            if isinstance(command, Nack):
                sample.claims.pop(command.task, None)
                continue
            assert held is not None
            if isinstance(command, Ack):
                held.until, held.acked = None, True
            else:
                held.until = self.model.now + command.lease_s
        return {place for place, _, _ in settled}

    def plain_effect(self, name: Name, command: Command) -> None:
        """What a `Done` means."""
        model, session = self.model, name[0]
        match command:
            case Abort(reservation=call_id) | Release(located=call_id) | Unclaim(claimed=call_id):
                self.withdrawn.add((session, call_id))
        match command:
            case Abort(reservation=call_id):
                model.reserved.pop((session, call_id), None)
            case Release(located=call_id):
                model.pins.pop((session, call_id), None)
                self.books.taken.pop((session, call_id), None)
            case Drain(unit=unit, undo=undo):
                (model.draining.discard if undo else model.draining.add)(unit)
            case Stage():
                self.books.stage(session, command)
            case Publish():
                self.books.publish(command)
            case Unclaim(claimed=call_id):
                mine = [held for held in model.claims_of(session) if held.name[1] == call_id]
                unconfirmed = not model.has_answer((session, call_id))
                model.give_back(lambda held: unconfirmed and any(held is one for one in mine))
            case SetVersion():
                model.partitions[command.partition].version = command.version
            case SetTags():
                merge_tags(model.named(model.partitions[command.partition], command.samples), command.tags)
            case Bye():
                self.clients[session].said_bye = True
                self.books.ended(session)
                self.budgets.excused = True
                lost = list(model.claims_of(session))
                model.give_back(lambda held: any(held is one for one in lost))
                self.parked = {key: late for key, late in self.parked.items() if key[0] != session}
                for key in [key for key in model.reserved if key[0] == session]:
                    del model.reserved[key]

    def check_consumption(self, command: CheckConsumption, result: Consumption) -> None:
        partition = self.model.partitions[command.partition]
        claims = [s.claims.get(task) for s in partition.samples.values() for task in command.tasks]
        if not any(held is not None and held.limbo for held in claims):
            assert result.consumed == (
                partition.complete and all(held is not None and not held.open for held in claims)
            )

    def call(self, client: Client, command: Command, *, call_id: int | None = None) -> Answer | None:
        """One command of the session; None if it parked."""
        if call_id is None:
            call_id = client.next
            client.next += 1
        name = (client.id, call_id)
        faults = self.books.faults(client.id, command) or self.model.faults(client.id, command)
        if isinstance(command, Drain) and self.takes_the_last_space(command):
            faults.must |= {"DrainError"}
        if name in self.withdrawn:
            faults.must |= {"CallCancelledError"}
        self.model.commands[name] = command
        self.model.below[client.id] = max(self.model.below.get(client.id, 1), client.below)
        named, client.has = client.has, ()
        self.model.told.update((client.id, other) for other in named)
        client.heard = self.model.now
        pairs = tuple(bound for other in named for bound in (other, other))
        item = Call(session=client.id, call_id=call_id, watermark=client.below, confirmed=pairs, command=command)
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
            gone = {"SessionExpiredError"} if client.suspect else set()
            assert kind in faults.must | faults.may | free | gone, (command, answer.result, faults)
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
        client = self.clients[opened.session] = Client(opened.session, host, heard=self.model.now)
        return client

    def quiet(self, client: Client) -> None:
        """From now on the ledger may give this session up, if nothing shows that it lives."""
        if not (client.alive and client.attached):
            client.suspect = True
            for held in self.model.claims_of(client.id):
                held.limbo = True

    def proven_gone(self, unit: Unit, client: Client) -> None:
        """The session is over; what it may lose goes back now, what it holds in this unit is free."""
        client.suspect = True
        lost = list(self.model.claims_of(client.id))
        self.model.give_back(lambda held: any(held is one for one in lost))
        for name in [name for name in self.model.reserved if name[0] == client.id]:
            self.model.reserved[name] = [held for held in self.model.reserved[name] if held[0] != unit.id]
        for name in [name for name in self.model.pins if name[0] == client.id]:
            self.model.pins[name] = {place for place in self.model.pins[name] if place.unit != unit.id}

    def withdraw(self, name: Name, command: Command) -> None:
        self.withdrawn.add(name)
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
        self.proven_gone(unit, client)
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
        self.model.give_back(lambda held: held.until is not None and held.until <= self.model.now)
        self.feed(Tick(now=self.model.now))
        assert all(late > self.model.now for late in self.parked.values()), "a parked call outlived its deadline"

    # --- invariants ------------------------------------------------------------------------------------------

    @invariant()
    def nobody_waits_who_could_be_served(self) -> None:
        assert not overlooked(self.ledger)

    @invariant()
    def the_next_deadline_is_early_enough(self) -> None:
        due = [*self.parked.values()]
        for partition in self.model.partitions.values():
            for sample in partition.samples.values():
                due += [held.until for held in sample.claims.values() if held.until is not None and not held.limbo]
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
