"""A simulated client that drains a storage unit: finds what is there, copies it elsewhere, has it moved."""

from __future__ import annotations

from random import Random

from dataplane.client.operations.drain_unit import move_of
from dataplane.errors import DataPlaneError
from dataplane.ledger import commands as c
from tests.ledger.values import value_places
from tests.simulation.client import Ask, Client, Drain, Post, Read, Reply, Script, Stop, Thread, Withdrawn, Write
from tests.simulation.scripts import PIECE, Make, rounds

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
        yield Post(c.Release(located=page.number))
        raise
    yield Post(c.Release(located=page.number))


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
    grant = (client.session, space.number)
    (places,) = value_places([sizes.tolist()], space.result)
    try:
        for k, (there, offset) in enumerate(places):
            if sizes[k]:
                data = yield Read(unit, int(found.offsets[k]), int(sizes[k]))
                client.world.record.check_read((client.session, page.number), found.field, k, data)
                for at in range(0, len(data), PIECE):
                    yield Write(there, offset + at, data[at : at + PIECE], grant)
        yield Drain()
        yield Ask(move_of(found, unit, located=page.number, reservation=space.number))
    except (Withdrawn, DataPlaneError):
        thread.shielded = True
        for place in sorted({placement.unit for placement in space.result.placements}):
            yield Stop(place, grant)
        yield Post(c.Abort(reservation=space.number))
        raise
