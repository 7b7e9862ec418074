"""What simulated clients do: put, update, read, claim, clear, in rounds, whatever the network does to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dataplane.client.operations.drain_unit import move_of
from dataplane.core.types import GRANULE_BYTES, FieldSpec, granules_up
from dataplane.errors import (
    BadRequestError,
    DataPlaneError,
    NotFoundError,
    ServiceRestartedError,
    StaleCallError,
    StaleSampleError,
    StorageUnitError,
    WaitTimeoutError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.commands import (
    Abort,
    Ack,
    Allocate,
    CheckConsumption,
    Claim,
    Claimed,
    Clear,
    ColumnSizes,
    Commit,
    CommitColumn,
    Extend,
    Int64s,
    List,
    Locate,
    Mode,
    Nack,
    Preallocate,
    Publish,
    ReadSaved,
    Register,
    Release,
    Samples,
    Save,
    SavedPartition,
    SavedRows,
    Seal,
    SetTags,
    Stage,
    TagColumn,
    UInt32s,
)
from tests.ledger.values import BYTES, WORDS, by_ids, int64s, value_locations
from tests.simulation.client import Ask, Client, Drain, Post, Read, Reply, Script, Stop, Thread, Withdrawn, Write
from tests.simulation.record import PlannedColumn, Value, checksum, content, portion_locations

PARTITION = "train"
ALBUM = "album"
"""What savers bring back of what they saved."""
TASKS = ("score", "train")
FIELDS = {"tokens": WORDS, "prompt": BYTES, "score": BYTES}
PIECE = 96
"""Bytes copied between two message boundaries."""

Make = Callable[[Client, Thread], Script]


class Column(NamedTuple):
    """One column to put: whose value, how long, and which value each sample points at."""

    name: str
    spec: FieldSpec
    owners: Sequence[str]
    lengths: Sequence[int]
    index: Sequence[int] | None = None


def rounds(count: int, body: Callable[[Client, Thread], Script]) -> Make:
    """A script of `count` rounds; a round that the service refuses, or that is withdrawn, is over."""

    def script(client: Client, thread: Thread) -> Script:
        while thread.rounds < count:
            thread.rounds += 1
            thread.shielded = False
            try:
                yield from body(client, thread)
            except StaleCallError:
                raise
            except (
                Withdrawn,
                NotFoundError,
                BadRequestError,
                ServiceRestartedError,
                StorageUnitError,
                WaitTimeoutError,
            ):
                pass

    return script


def put(
    client: Client,
    thread: Thread,
    samples: Samples,
    columns: Sequence[Column],
    mode: Mode,
    partition: str = PARTITION,
) -> Script:
    """Allocate, copy piece by piece, commit. Withdrawn: what is under way is stopped, then the space is given back."""
    record = client.world.record
    plan = [planned(client, column) for column in columns]
    sizes = [[value.nbytes for value in column.values] for column in plan]
    reply = yield Ask(
        Allocate(
            partition=partition,
            columns=tuple(ColumnSizes(name=c.name, sizes=int64s(s)) for c, s in zip(columns, sizes, strict=True)),
            update=mode is Mode.UPDATE,
            timeout_s=10.0,
            samples=samples,
        )
    )
    grant = (client.session, reply.call_id)
    record.plans[grant] = plan
    try:
        for column, places in zip(plan, value_locations(sizes, reply.result), strict=True):
            for value, (unit, offset) in zip(column.values, places, strict=True):
                data = content(value)
                for at in range(0, value.nbytes, PIECE):
                    yield Write(unit, offset + at, data[at : at + PIECE], grant)
        yield Drain()
    except Withdrawn:
        thread.shielded = True
        for unit in sorted({placement.unit for placement in reply.result.placements}):
            yield Stop(unit, grant)
        yield Post(Abort(reservation=reply.call_id))
        raise
    sums = checksums_of(plan) if reply.result.checksums else None
    commit = commit_of(samples, columns, mode, reply.call_id, checksums=sums)
    yield Ask(msgspec.structs.replace(commit, partition=partition))


def checksums_of(plan: Sequence[PlannedColumn]) -> list[UInt32s]:
    """Of the values of each column, as their writer knows them."""
    return [np.array([checksum(content(value)) for value in column.values], np.uint32) for column in plan]


def commit_of(
    samples: Samples,
    columns: Sequence[Column],
    mode: Mode,
    reservation: int,
    offset: int | None = None,
    checksums: Sequence[UInt32s] | None = None,
) -> Commit:
    return Commit(
        partition=PARTITION,
        samples=samples,
        mode=mode,
        reservation=reservation,
        offset=offset,
        columns=tuple(
            CommitColumn(
                name=c.name,
                spec=c.spec,
                lengths=int64s(c.lengths),
                index=None if c.index is None else int64s(c.index),
                checksums=None if checksums is None else checksums[number],
            )
            for number, c in enumerate(columns)
        ),
    )


def drip(client: Client, thread: Thread, puts: Sequence[tuple[Samples, Sequence[Column]]], space_bytes: int) -> Script:
    """Small puts into space that the client allocated ahead in a unit it is local to: copy, commit, the next. A put
    that fails or is withdrawn leaves a hole; in the end what nobody took goes back."""
    if not client.local:
        return
    unit = min(client.local)
    reply = yield Ask(Preallocate(unit=unit, nbytes=space_bytes))
    space, offset = (client.session, reply.call_id), reply.result.offset
    end = offset + space_bytes
    try:
        for samples, columns in puts:
            plan = [planned(client, column) for column in columns]
            nbytes = sum(granules_up(sum(value.nbytes for value in column.values)) for column in plan)
            if offset + nbytes > end:
                break
            client.world.record.portions[*space, offset] = plan
            yield from fill(plan, unit, offset, space)
            sums = checksums_of(plan) if reply.result.checksums else None
            yield Ask(commit_of(samples, columns, Mode.UPSERT, reply.call_id, offset, sums))
            offset += nbytes
    except (Withdrawn, DataPlaneError):
        thread.shielded = True
        yield Post(Abort(reservation=reply.call_id))
        raise
    yield Post(Abort(reservation=reply.call_id))


def fill(plan: Sequence[PlannedColumn], unit: int, offset: int, grant: tuple[int, int]) -> Script:
    """Copy a put's values to where they will lie."""
    for column, places in zip(plan, portion_locations(list(plan), unit, offset), strict=True):
        for value, (_, start) in zip(column.values, places, strict=True):
            data = content(value)
            for at in range(0, value.nbytes, PIECE):
                yield Write(unit, start + at, data[at : at + PIECE], grant)


def planned(client: Client, column: Column) -> PlannedColumn:
    values = [
        Value(owner, column.name, client.world.version(), length * column.spec.unit_bytes)
        for owner, length in zip(column.owners, column.lengths, strict=True)
    ]
    return PlannedColumn(column.name, values)


def get(client: Client, samples: Samples, fields: Sequence[str], partition: str = PARTITION) -> Script:
    """Locate, read row by row, end the read; every row is checked."""
    reply = yield Ask(Locate(partition=partition, samples=samples, fields=tuple(fields), brief=True))
    try:
        yield from read(client, reply)
    finally:
        client.call_ids.settle(reply.call_id)


def read(client: Client, reply: Reply) -> Script:
    """Every cell that the answer tells of, row by row."""
    for found in reply.result.fields:
        for i, length in enumerate(found.lengths.tolist()):
            nbytes = length * found.spec.unit_bytes
            if nbytes > 0:
                data = yield Read(int(found.units[i]), int(found.offsets[i]), nbytes)
                client.world.record.check_read((client.session, reply.call_id), found.name, i, data)
                if found.checksums is not None and found.checksums[i]:
                    assert checksum(data) == found.checksums[i], "a reader would discard a row that is whole"


def saver(seed: int, count: int) -> Make:
    """Saves the partition and reads all of it as it was then, in pieces; brings some of it back as another partition,
    in the place of what was brought back before."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        saved = yield Ask(Save(partitions=(PARTITION,)))
        (described,) = saved.result.partitions
        pieces = []
        try:
            for first in range(0, described.live, 4):
                piece = yield Ask(piece_of(saved.call_id, described, first))
                yield from read(client, piece)
                pieces.append(piece.result)
        except (Withdrawn, DataPlaneError):
            thread.shielded = True
            yield Post(Release(located=saved.call_id))
            raise
        yield Post(Release(located=saved.call_id))
        if pieces and random.random() < 0.9:
            yield from bring_back(client, thread, f"staged.{client.session}.{saved.call_id}", described, pieces[0])

    return rounds(count, body)


def piece_of(saved: int, described: SavedPartition, first: int) -> ReadSaved:
    return ReadSaved(
        saved=saved,
        partition=PARTITION,
        first=first,
        last=min(first + 4, described.live),
        fields=tuple(field.name for field in described.fields),
        names=True,
    )


def bring_back(client: Client, thread: Thread, staged: str, described: SavedPartition, piece: SavedRows) -> Script:
    """Fill a staged partition and publish it; whatever fails, it goes."""
    ids = piece.ids[:2]
    wanted = msgspec.structs.replace(described, partition=ALBUM, live=len(ids), born=len(ids), tasks=())
    yield Ask(Stage(partition=staged))
    try:
        columns = [Column("prompt", BYTES, ids, [40 + 30 * place for place in range(len(ids))])]
        yield from put(client, thread, by_ids(ids), columns, Mode.CREATE, staged)
        yield Ask(Publish(staged=(staged,), partitions=(wanted,), replace=True))
    except (Withdrawn, DataPlaneError):
        thread.shielded = True
        with contextlib.suppress(NotFoundError):  # it was published, after all
            yield Ask(Clear(partition=staged, samples=None))
        raise
    yield from get(client, by_ids(ids), ["prompt"], ALBUM)


def producer(seed: int, count: int, *, shared: bool, mode: Mode) -> Make:
    """Puts the same few ids again and again; some lengths are 0, a prompt may be shared by its group."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        ids = random.sample([f"s{i}" for i in range(6)], random.randint(1, 4))
        tokens = Column("tokens", WORDS, ids, [random.choice([0, 1, 7, 8, 30]) for _ in ids])
        if shared:
            prompt = Column("prompt", BYTES, ["group"], [random.choice([5, 64, 130])], [0] * len(ids))
        else:
            prompt = Column("prompt", BYTES, ids, [random.choice([0, 3, 64, 100]) for _ in ids])
        yield from put(client, thread, by_ids(ids), [tokens, prompt], mode)

    return rounds(count, body)


def dripper(seed: int, count: int) -> Make:
    """Puts a sample or two at a time into space allocated ahead."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        puts = []
        for _ in range(random.randint(1, 4)):
            ids = random.sample([f"s{i}" for i in range(6)], random.randint(1, 2))
            columns = [Column("prompt", BYTES, ids, [random.choice([0, 3, 64, 100]) for _ in ids])]
            puts.append((by_ids(ids), columns))
        yield from drip(client, thread, puts, GRANULE_BYTES * random.randint(1, 6))

    return rounds(count, body)


def scorer(seed: int, count: int, *, lease_s: float | None) -> Make:
    """Claims, reads, writes a column back by handle, gives back; see `settle` for what is on lease."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        reply = yield Ask(
            Claim(
                partition=PARTITION,
                task="score",
                fields=("tokens",),
                batch_size=random.randint(1, 3),
                min_batch_size=1,
                blocking=random.random() < 0.7,
                timeout_s=5.0,
                lease_s=lease_s,
            )
        )
        samples = handles_of(reply.result)
        if not len(samples):
            return
        owners = reply.result.ids
        claimed = {"partition": PARTITION, "task": "score", "samples": samples, "claims": claims_of(reply.result)}
        yield from get(client, samples, ["tokens"])
        score = Column("score", BYTES, owners, [random.choice([1, 8, 70]) for _ in owners])
        yield from put(client, thread, samples, [score], Mode.UPDATE)
        if lease_s is not None:
            yield from settle(client, random, claimed, lease_s)
        elif random.random() < 0.2:
            yield Ask(Nack(**claimed))

    return rounds(count, body)


def settle(client: Client, random: Random, claimed: dict[str, Any], lease_s: float) -> Script:
    """What becomes of samples on lease: they are tagged, cleared, kept longer, acknowledged, given back in time or
    late. What is stale is no error of this script's."""
    samples = claimed["samples"]
    one = Samples(rows=samples.rows[:1], generations=samples.generations[:1])
    if random.random() < 0.3:
        tag = TagColumn(name="seen", values=(client.world.version(),))
        yield Ask(SetTags(partition=PARTITION, samples=one, tags=(tag,)))
    if random.random() < 0.3:
        yield Ask(Clear(partition=PARTITION, samples=one))
    steps = [Extend(**claimed, lease_s=lease_s), Ack(**claimed), Nack(**claimed)]
    for step in random.choice([steps[:2], steps[1:], [steps[0], steps[2]], steps[2:]]):
        with contextlib.suppress(StaleSampleError):
            yield Ask(step)


def closer(seed: int, count: int) -> Make:
    """Seals the partition, or says that all of it was put, asks whether it is consumed, and opens it again."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        if random.random() < 0.3:
            yield Ask(Seal(partition=PARTITION))
        else:
            yield Ask(Register(partition=PARTITION, fields=FIELDS, num_samples=0, tasks=TASKS))
        for _ in range(random.randint(1, 3)):
            yield Ask(CheckConsumption(partition=PARTITION, tasks=random.choice([TASKS, TASKS[:1]])))
        yield from register(client, thread)

    return rounds(count, body)


def waiter(count: int) -> Make:
    """Waits for what nobody produces, again and again."""

    def body(client: Client, thread: Thread) -> Script:
        yield Ask(Claim(partition=PARTITION, task="train", fields=("nothing",), batch_size=1, timeout_s=20.0))

    return rounds(count, body)


def trainer(seed: int, count: int) -> Make:
    """Claims what is scored, reads it whole, clears it."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        reply = yield Ask(
            Claim(
                partition=PARTITION,
                task="train",
                fields=("tokens", "score") if random.random() < 0.7 else ("tokens",),
                batch_size=random.randint(1, 4),
                min_batch_size=1,
                timeout_s=5.0,
            )
        )
        samples = handles_of(reply.result)
        if len(samples):
            yield from get(client, samples, [f for f in ("tokens", "prompt") if f in reply.result.fields])
            yield Ask(Clear(partition=PARTITION, samples=samples))

    return rounds(count, body)


def reader(seed: int, count: int) -> Make:
    """Reads what is there, by ids or by handles."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        reply = yield Ask(List(partition=PARTITION))
        ids = reply.result.ids
        if not ids:
            return
        chosen = sorted(random.sample(range(len(ids)), random.randint(1, len(ids))))
        if random.random() < 0.5:
            samples = by_ids(ids[i] for i in chosen)
        else:
            samples = Samples(rows=reply.result.rows[chosen], generations=reply.result.generations[chosen])
        yield from get(client, samples, random.choice([["tokens"], ["prompt", "tokens"], ["score"]]))

    return rounds(count, body)


def cleaner(seed: int, count: int) -> Make:
    """Clears ids, whoever uses them."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        ids = random.sample([f"s{i}" for i in range(6)], random.randint(1, 5))
        yield Ask(Clear(partition=PARTITION, samples=by_ids(ids)))

    return rounds(count, body)


def register(client: Client, thread: Thread) -> Script:
    yield Ask(Register(partition=PARTITION, fields=FIELDS, num_samples=None, tasks=TASKS))


def drop(client: Client, thread: Thread) -> Script:
    for partition in (PARTITION, ALBUM):
        with contextlib.suppress(NotFoundError):  # nobody may have made it
            yield Ask(Clear(partition=partition, samples=None))


def claims_of(claimed: Claimed) -> Int64s:
    return np.full(len(claimed.rows), claimed.claim, np.int64)


def handles_of(claimed: Claimed) -> Samples:
    return Samples(rows=claimed.rows, generations=claimed.generations)


# --- A simulated client that drains a storage unit: finds what is there, copies it elsewhere, has it
# moved.


ON_FULL = [c.OnFull.REJECT, c.OnFull.WAIT, c.OnFull.WAIT]


def mover(seed: int, count: int) -> Make:
    """Drains one unit after another, never to the end, and lets each have new rows again."""
    random = Random(seed)

    def body(client: Client, thread: Thread) -> Script:
        unit = random.choice(sorted(client.units))
        yield Ask(c.Drain(unit=unit, force=True))
        try:
            for _ in range(random.randint(1, 4)):
                page = yield Ask(
                    c.FindCells(
                        unit=unit,
                        max_cells=random.choice([2, 99, 99]),
                        max_bytes=random.choice([150, 1 << 20]),
                        timeout_s=random.choice([0.0, 3.0]),
                    )
                )
                yield from move(client, thread, unit, page, random.choice(ON_FULL))
        except (Withdrawn, DataPlaneError):
            thread.shielded = True
            yield Post(c.Drain(unit=unit, undo=True))
            raise
        yield Ask(c.Drain(unit=unit, undo=True))

    return rounds(count, body)


def move(client: Client, thread: Thread, unit: int, page: Reply, on_full: c.OnFull) -> Script:
    """Copy a page and switch. However it ends, the page is not pinned any more."""
    try:
        if len(page.result.rows):
            yield from copy(client, thread, unit, page, on_full)
    except (Withdrawn, DataPlaneError):
        thread.shielded = True
        yield Post(c.Release(located=page.call_id))
        raise
    yield Post(c.Release(located=page.call_id))


def copy(client: Client, thread: Thread, unit: int, page: Reply, on_full: c.OnFull) -> Script:
    found = page.result
    sizes = found.lengths * found.spec.unit_bytes
    space = yield Ask(
        c.Allocate(
            partition=found.partition,
            columns=(c.ColumnSizes(name=found.field, sizes=sizes),),
            update=True,
            moving=True,
            on_full=on_full,
            timeout_s=5.0,
        )
    )
    grant = (client.session, space.call_id)
    (places,) = value_locations([sizes.tolist()], space.result)
    try:
        for k, (there, offset) in enumerate(places):
            if sizes[k]:
                data = yield Read(unit, int(found.offsets[k]), int(sizes[k]))
                client.world.record.check_read((client.session, page.call_id), found.field, k, data)
                for at in range(0, len(data), PIECE):
                    yield Write(there, offset + at, data[at : at + PIECE], grant)
        yield Drain()
        yield Ask(move_of(found, unit, located=page.call_id, reservation=space.call_id))
    except (Withdrawn, DataPlaneError):
        thread.shielded = True
        for place in sorted({placement.unit for placement in space.result.placements}):
            yield Stop(place, grant)
        yield Post(c.Abort(reservation=space.call_id))
        raise
