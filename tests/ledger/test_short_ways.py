"""`PutRows` and `LocateRows`: the short ways leave the state, and give the answers, of the general commands."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.core.schema import variants_of
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import DataPlaneError, InvalidRequestError
from dataplane.ledger import Ledger, Limits
from dataplane.ledger import commands as c
from dataplane.ledger import ledger as ledger_module
from dataplane.ledger.commands.short import PlanColumn, decode_plan, encode_plan
from dataplane.ledger.encoding.messages import decode, encode
from dataplane.ledger.samples import put_rows as put_rows_module
from dataplane.ledger.samples.locate_rows import locate_rows
from dataplane.ledger.samples.put_rows import put_rows
from dataplane.ledger.state.extents import Account, Extents
from dataplane.ledger.state.rows import Rows
from dataplane.ledger.state.sessions import Preallocation, Session
from dataplane.ledger.state.state import State
from tests.ledger.cell_books import check_cells
from tests.ledger.driver import BYTES, Client, Driver, by_ids
from tests.ledger.fingerprint import fingerprint
from tests.ledger.values import canonical

SPECS = {
    "tokens": FieldSpec(FieldKind.JAGGED, "int32", ()),
    "scores": FieldSpec(FieldKind.DENSE, "float32", (2,)),
    "mask": FieldSpec(FieldKind.JAGGED, "uint8", (3,)),
    "text": FieldSpec(FieldKind.OBJECT, None, None),
}
TAGS: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "score": [0.5, 1.5],
    "kind": ["a", "b"],
    "mixed": [1, "a", None],
    "input_lengths": [0, 17],
}


WAYS: dict[str, Any] = {"put": put_rows, "locate": locate_rows}
"""The short ways under test."""


class Twins(Driver):
    """Gives one ledger the short commands, and another one the general ones with the same meaning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        ledgers = {name: settings[name] for name in settings if name not in ("capacity", "units")}
        self.general = Ledger(7, **ledgers)
        self.ways: Counter[str] = Counter()
        monkeypatch.setattr(ledger_module, "put_rows", self.put_rows)
        monkeypatch.setattr(ledger_module, "locate_rows", self.locate_rows)
        super().__init__(**settings)

    def put_rows(self, *arguments: Any) -> c.Committed | None:
        """Count which way is taken."""
        result = WAYS["put"](*arguments)
        self.ways["general" if result is None else "short"] += 1
        return result

    def locate_rows(self, state: State, *arguments: Any) -> c.RowsLocated | None:
        """Count which way is taken. The second ledger always takes the general one."""
        if state is self.general._state:
            return None
        result = WAYS["locate"](state, *arguments)
        self.ways["located generally" if result is None else "located shortly"] += 1
        return result

    def compare_located(self, call: c.Call, short: c.RowsLocated, general: c.Located) -> None:
        """Check that both answers say the same, and let the second ledger keep the first one."""
        if short.general is None:
            plan = decode_plan(call.command.plan)  # type: ignore[attr-defined]
            columns = plan.columns
            if plan.complete:
                partition = self.general._state.partitions[call.command.partition]  # type: ignore[attr-defined]
                assert set(partition.common_fields(general.rows)) == set(plan.names)
            assert (short.rows, short.generations) == (tuple(general.rows), tuple(general.generations))
            assert [each.name for each in general.fields] == [each.name for each in columns]
            assert [each.spec for each in general.fields] == [each.spec for each in columns]
            assert short.offsets == tuple(np.concatenate([each.offsets for each in general.fields]).tolist())
            assert short.lengths == tuple(np.concatenate([each.lengths for each in general.fields]).tolist())
            assert {unit for each in general.fields for unit in each.units.tolist()} == {short.unit}
            zeros = np.zeros(len(short.rows), np.uint32)
            checksums = [zeros if each.checksums is None else each.checksums for each in general.fields]
            assert not any(map(np.any, checksums)) or short.checksums == tuple(np.concatenate(checksums).tolist())
            assert any(map(np.any, checksums)) or not any(short.checksums)
        else:
            assert canonical(short.general) == canonical(general)
        kept = self.ledger._state.sessions[call.session].answers
        if call.call_id in kept:
            self.general._state.sessions[call.session].answers[call.call_id] = kept[call.call_id]

    def apply(self, item: c.Input) -> list[c.Output]:
        """Apply an input to both; answers, orders and states must be equal."""
        item = decode(encode(item))  # as it arrives
        general = item
        if isinstance(item, c.Call) and isinstance(item.command, c.PutRows):
            with contextlib.suppress(InvalidRequestError):
                general = msgspec.structs.replace(item, command=item.command.expand())
        expected = self.general.apply(general)
        out = super().apply(item)
        for one, other in zip(out, expected, strict=True):
            if isinstance(one, c.Answer) and isinstance(one.result, c.RowsLocated):
                assert isinstance(item, c.Call)
                assert isinstance(other, c.Answer)
                if isinstance(other.result, c.RowsLocated) and other.result.general is not None:
                    self.compare_located(item, one.result, other.result.general)
            else:
                assert canonical(one) == canonical(other), item
        if len(self.log) % 8 == 0:
            self.compare()
        return out

    def compare(self) -> None:
        """Check that the states are equal, and that the extents agree with the cells."""
        assert fingerprint(self.ledger) == fingerprint(self.general)
        check_cells(self.ledger)


def plan_of(names: list[str], *, by_schema: bool = True, complete: bool = False, **other: FieldSpec) -> bytes:
    """The plan of these columns of `SPECS`, with other specs for some."""
    specs = {**SPECS, **other}
    columns = tuple([PlanColumn(name, specs[name], by_schema=by_schema) for name in names])
    return encode_plan(columns, complete=complete)


class Writer:
    """Makes small puts of one client into its preallocated space."""

    def __init__(self, client: Client, chance: random.Random) -> None:
        self.client = client
        self.chance = chance
        self.space = 0
        self.offset = 0
        self.end = 0

    def preallocate(self, nbytes: int = 4096) -> None:
        got = self.client.raw(c.Preallocate(unit=1, nbytes=nbytes))
        if isinstance(got, c.Preallocated):
            self.space = self.client.last_call_id
            self.offset = got.offset
            self.end = got.offset + nbytes

    def command(self, samples: dict[str, Any], count: int) -> c.PutRows:
        """A put of random columns and tags of these samples."""
        chance = self.chance
        names = chance.sample(list(SPECS), chance.choice([0, 1, 2, 2, 3, 4]))
        others: dict[str, FieldSpec] = {}
        if names and chance.random() < 0.05:
            others = {names[0]: chance.choice([FieldSpec("jagged", "int16", ()), FieldSpec("ragged", "int32")])}
        if chance.random() < 0.02:
            names.append(variants_of("mask"))
            others[variants_of("mask")] = SPECS["text"]
        plan = plan_of(names, by_schema=chance.random() < 0.9, **others)
        lengths = []
        for column in decode_plan(plan).columns:
            lengths += [1 if column.is_dense else chance.choice([0, 1, 5, 40]) for _ in range(count)]
        if chance.random() < 0.03:
            lengths = lengths[:-1] + chance.choice([[], [-1], [1 << 40]])
        checksums = tuple(range(1, len(lengths) + 1)) if chance.random() < 0.2 else ()
        tags = {
            name: tuple(chance.choice(TAGS[name]) for _ in range(count))
            for name in chance.sample(list(TAGS), chance.choice([0, 0, 1, 2, 3]))
        }
        return c.PutRows(
            partition=chance.choice(["p"] * 9 + ["q"] * 5 + ["nowhere"]),
            mode=chance.choice([c.Mode.UPSERT] * 6 + [c.Mode.CREATE, c.Mode.UPDATE]),
            reservation=self.space,
            offset=self.offset if chance.random() < 0.95 else self.offset + chance.choice([64, 1, 128]),
            plan=plan if chance.random() < 0.99 else b"\xff",
            lengths=tuple(lengths),
            checksums=checksums,
            tags=tags,
            listed=chance.random() < 0.3,
            **samples,
        )

    def put(self, samples: dict[str, Any], count: int) -> None:
        """Send such a put, sometimes again under its number."""
        if self.end - self.offset < 1024:
            self.preallocate()
        command = self.command(samples, count)
        got = self.client.raw(command)
        again = self.chance.random()
        if again < 0.1:
            self.client.driver.answers.clear()
            self.client.post(command, call_id=self.client.last_call_id)
        if isinstance(got, c.Committed):
            commit = command.expand()
            sizes = [int((column.lengths * column.spec.unit_bytes).sum()) for column in commit.columns]
            self.offset = command.offset + sum(-(-size // 64) * 64 for size in sizes)


def some_samples(client: Client, chance: random.Random) -> tuple[dict[str, Any], int]:
    """How a put names its samples: by new and existing ids, some of them twice, or by handles, some of them old."""
    count = chance.choice([1, 1, 1, 2, 4])
    if chance.random() < 0.75:
        ids = [f"s{chance.randrange(60)}" for _ in range(count)]
        if chance.random() < 0.95:
            ids = list(dict.fromkeys(ids))
        return {"ids": tuple(ids)}, len(ids)
    got = client.raw(c.List(partition="p"))
    if isinstance(got, DataPlaneError) or len(got.rows) < count:  # type: ignore[union-attr]
        return {"ids": ("a",)}, 1
    assert isinstance(got, c.Listed)
    chosen = chance.sample(range(len(got.rows)), count)
    generations = [int(got.generations[i]) - (chance.random() < 0.02) for i in chosen]
    return {"rows": tuple(int(got.rows[i]) for i in chosen), "generations": tuple(generations)}, count


def register(client: Client, chance: random.Random) -> None:
    """Declare some of the fields, with or without a budget, enumerations and strictness."""
    fields = {name: chance.choice([SPECS[name]] * 4 + [FieldSpec()]) for name in SPECS if chance.random() < 0.9}
    budget = chance.choice([None] * 8 + [4096, 65536])
    command = c.Register(
        partition=chance.choice(["p", "p", "q"]),
        fields=fields,
        num_samples=None,
        tasks=("train", "score"),
        enums=chance.choice([None] * 6 + [{"kind": ("a", "b")}, {"kind": ("a",)}]),
        strict=chance.random() < 0.05,
        budget_bytes=budget,
        when_full=chance.choice(list(c.WhenFull)),
    )
    client.raw(command)


def other_work(driver: Twins, client: Client, chance: random.Random) -> None:
    """Anything else that changes what a put finds."""
    ids = [f"s{chance.randrange(60)}" for _ in range(chance.randrange(1, 12))]
    match chance.randrange(15):
        case 0 if chance.random() < 0.5:
            register(client, chance)
        case 1 | 2:
            client.raw(c.Clear(partition="p", samples=by_ids(*dict.fromkeys(ids))))
        case 3:
            partial = chance.choice([None, 5.0])
            client.post(client.claim(chance.randrange(1, 6), ["tokens"], lease_s=partial, timeout_s=30.0))
        case 4:
            client.post(client.claim(2, ["tokens", "text"], task="score", blocking=False))
        case 5:
            client.post(client.claim(3, [], where=(c.Predicate(tag="n", op=">", value=1),), timeout_s=20.0))
        case 6:
            client.post(c.Locate(partition="p", samples=by_ids(*dict.fromkeys(ids)), fields=("tokens",)))
            if chance.random() < 0.7:
                client.raw(c.Release(located=client.last_call_id))
        case 12 | 13:
            names = chance.sample(list(SPECS), chance.choice([1, 2, 3]))
            samples, _ = some_samples(client, chance)
            partition = chance.choice(["p", "p", "q"])
            plan = plan_of(names, complete=chance.random() < 0.5)
            client.post(c.LocateRows(partition=partition, plan=plan, **samples))
            if chance.random() < 0.8:
                client.raw(c.Release(located=client.last_call_id))
        case 7:
            driver.tick(driver.now + 3 * chance.random())
        case 8:
            sizes = {"tokens": [chance.choice([4, 4000, 60000])]}
            client.post(client.allocate(sizes, chance.choice(["p", "q"]), timeout_s=2.0))
            if chance.random() < 0.9:
                client.raw(c.Abort(reservation=client.last_call_id))
        case 9 if chance.random() < 0.3:
            client.raw(c.Seal(partition="q"))
        case 10 if chance.random() < 0.2:
            client.raw(c.Clear(partition=chance.choice(["p", "q"]), samples=None))
        case 11 if chance.random() < 0.2:
            client.post(c.FindCells(unit=1, timeout_s=2.0))
        case 9:
            error = chance.choice([None, None, "no memory"])
            driver.apply(c.Grown(unit=1, backed_bytes=1 << 17, error=error))
        case 14 if chance.random() < 0.4:
            driver.apply(
                c.Restarted(
                    epoch=driver.ledger.epoch + 1,
                    reserve_fraction=0.15,
                    heartbeat_s=2.0,
                    session_timeout_s=20.0,
                    checksums="across-hosts",
                    low_watermark=chance.choice([0.1, 0.75]),
                    high_watermark=chance.choice([0.2, 0.9]),
                )
            )


def history(seed: int, monkeypatch: pytest.MonkeyPatch) -> Twins:
    """Random work of two clients, most of it small puts."""
    chance = random.Random(seed)
    limits = Limits(preallocated_divisor=4, id_bytes=64, tag_bytes=8)
    driver = Twins(monkeypatch, capacity=1 << 17, limits=limits)
    clients = [driver.client(f"c{i}", attach=[1]) for i in range(2)]
    writers = [Writer(client, chance) for client in clients]
    clients[0].register("p", specs=SPECS, tasks=("train", "score"))
    clients[0].register("q", specs={}, tasks=("train", "score"))
    for writer in writers:
        writer.preallocate()
    for _ in range(250):
        writer = chance.choice(writers)
        if chance.random() < 0.7:
            writer.put(*some_samples(writer.client, chance))
        else:
            other_work(driver, writer.client, chance)
    driver.compare()
    return driver


@pytest.mark.parametrize("seed", range(8))
def test_the_short_ways_leave_the_state_of_the_general_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = history(seed, monkeypatch).ways
    assert ways["short"] + ways["general"] > 100, ways


@pytest.mark.parametrize("confirmed", [(), (2, 2)])
@pytest.mark.parametrize("general", [False, True])
def test_pins_of_a_short_read_end_when_its_answer_is_confirmed(general: bool, confirmed: tuple[int, ...]) -> None:
    """By the watermark, or above it while an earlier call waits; not by calls that confirm
    others."""
    driver = Driver()
    writer = driver.client()
    writer.register("p", specs={"tokens": BYTES}, tasks=("train",))
    writer.put(["a"], {"tokens": [64]})
    plan = plan_of(["tokens"]) if general else plan_of(["tokens"], tokens=BYTES)
    reader = driver.client()
    waiting = reader.waits(reader.claim(1, ["missing"], timeout_s=60.0)) if confirmed else reader.post(c.Units())
    read = c.LocateRows(partition="p", plan=plan, ids=("a",))
    located = driver.apply(c.Call(session=reader.session, call_id=2, watermark=waiting, command=read))[0].result
    assert isinstance(located, c.RowsLocated)
    assert (located.general is not None) is general
    writer.clear("a")
    for watermark, confirms in [(1, ()), (1, (1, 1)), (1 if confirmed else 3, confirmed)]:
        assert writer.unit().pinned_bytes == 64
        call_id = reader.last_call_id = max(reader.last_call_id, 2) + 1
        driver.apply(
            c.Call(
                session=reader.session,
                call_id=call_id,
                watermark=watermark,
                confirmed=confirms,
                command=c.Units(),
            )
        )
    assert writer.unit().pinned_bytes == 0
    session = driver.ledger._state.sessions[reader.session]
    assert not session.pins
    assert not session.brief_pins


def small_put(client: Client, ids: tuple[str, ...], **lengths: int) -> int:
    """Put a value of so many bytes per field and sample into space for just these, and return its
    offset."""
    nbytes = sum(-(-length * len(ids) // 64) * 64 for length in lengths.values())
    space = client.call(c.Preallocated, c.Preallocate(unit=1, nbytes=nbytes + 64))
    command = c.PutRows(
        partition="p",
        mode=c.Mode.UPSERT,
        reservation=client.last_call_id,
        offset=space.offset,
        plan=plan_of(list(lengths), **dict.fromkeys(lengths, BYTES)),
        lengths=tuple([length for length in lengths.values() for _ in ids]),
        ids=ids,
    )
    reservation = client.last_call_id
    client.call(c.Committed, command)
    client.do(c.Abort(reservation=reservation))
    return space.offset


@pytest.mark.parametrize("read", [False, True])
def test_values_of_a_small_put_of_one_row_share_an_extent_and_leave_it_one_by_one(read: bool) -> None:
    client = Driver().client(attach=[1])
    client.register("p", specs=dict.fromkeys("xyz", BYTES))
    first = small_put(client, ("a",), x=64, y=100, z=1)
    assert client.unit().extents == 1
    assert client.used() == 64 + 128 + 64
    if read:
        client.locate(by_ids("a"), ["x"])
    located = client.last_call_id
    second = small_put(client, ("a",), y=64)
    assert client.unit().extents == 2
    assert client.used() == 64 + 64 + 64 + 128 * read
    if read:
        client.do(c.Release(located=located))
        assert client.used() == 64 + 64 + 64
    held = [(1, first, 64), (1, first + 192, 64), (1, second, 64)]
    assert sorted(client.driver.ledger.held_ranges()) == sorted(held)
    client.clear("a")
    assert client.unit().extents == client.used() == 0


def test_a_small_put_of_several_rows_is_trimmed_when_half_of_its_bytes_are_replaced() -> None:
    client = Driver().client(attach=[1])
    client.register("p", specs=dict.fromkeys("xy", BYTES))
    small_put(client, ("a", "b"), x=64, y=64)
    small_put(client, ("a", "b"), x=64)
    assert client.used() == 6 * 64
    small_put(client, ("a",), y=64)
    assert client.used() == (1 + 2 + 1) * 64
    client.clear("b")
    assert client.used() == (2 + 1) * 64
    client.clear("a")
    assert client.unit().extents == client.used() == 0


def uncharged(extents: Extents, unit: int, start: int, size: int, account: Account, cells: int) -> int:
    number = create_live(extents, unit, start, size, account, cells)
    account.used_bytes -= size
    return number


def kept(*_: Any) -> None:
    """Free nothing."""


def greedy(extents: Extents, extent_id: int, due: list[tuple[int, int]]) -> None:
    free_due(extents, extent_id, [(start, size + 64) for start, size in due])


def late(table: Rows, name: str, generation: int, now: float) -> int:
    row = create_one(table, name, generation, now)
    table.since[row] += 1.0
    return row


def tagless(*arguments: Any) -> c.Committed | None:
    state, session, command = arguments
    return put_rows(state, session, msgspec.structs.replace(command, tags={}))


def shifted(space: Preallocation, extents: Extents, position: int, start: int) -> None:
    cut(space, extents, position, start + 64)


def unpinned(state: State, session: Session, call_id: int, command: c.LocateRows) -> c.RowsLocated | None:
    located = locate_rows(state, session, call_id, command)
    if located is not None:
        session.pins.pop(call_id)
    return located


def unread(*arguments: Any) -> c.RowsLocated | None:
    located = locate_rows(*arguments)
    return None if located is None else msgspec.structs.replace(located, offsets=located.offsets[::-1])


def incomplete(state: State, session: Session, call_id: int, command: c.LocateRows) -> c.RowsLocated | None:
    plan = encode_plan(decode_plan(command.plan).columns)
    return locate_rows(state, session, call_id, msgspec.structs.replace(command, plan=plan))


create_live = Extents.create_live
free_due = Extents._free_due
create_one = Rows.create_one
cut = put_rows_module._cut
DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "bytes are not charged": (Extents, "create_live", uncharged),
    "a sample is born late": (Rows, "create_one", late),
    "dead parts stay": (Extents, "_release_part", kept),
    "a part is freed with its neighbour": (Extents, "_free_due", greedy),
    "tags are lost": (WAYS, "put", tagless),
    "the rest of the space begins too late": (put_rows_module, "_cut", shifted),
    "nothing is pinned": (WAYS, "locate", unpinned),
    "offsets are of other rows": (WAYS, "locate", unread),
    "a complete plan need not be complete": (WAYS, "locate", incomplete),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, replacement = DEFECTS[defect]
    if target is WAYS:
        monkeypatch.setitem(WAYS, name, replacement)
    else:
        monkeypatch.setattr(target, name, replacement)
    assert any(finds(seed, monkeypatch) for seed in range(8))


def finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the history of this seed finds a difference."""
    try:
        history(seed, monkeypatch)
    except AssertionError:
        return True
    return False
