"""Several remote units: read from, and written to, at the same time."""

from __future__ import annotations

import dataclasses
import threading

import msgspec
import numpy as np
import pytest

from dataplane.client.unit_connections import UnitConnections
from dataplane.config import MIB, DataPlaneConfig
from dataplane.core.buffer_pool import BufferPool
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.columns import EncodedColumn, FlatValues, assemble
from dataplane.data.row_parts import ContextParallel, row_parts
from dataplane.errors import ServiceRestartedError, StorageUnitError
from dataplane.ledger import commands as c
from dataplane.storage.server import BulkServer
from dataplane.storage.session_lock import SessionLock
from tests.storage.unit_under_test import TOKEN, Unit, changed, noise

pytestmark = pytest.mark.integration

UNITS = 3
WAIT_S = 60.0
BYTES = FieldSpec(FieldKind.JAGGED, "uint8", ())


@pytest.fixture
def units():
    made = {unit_id: Unit(unit_id=unit_id) for unit_id in range(1, UNITS + 1)}
    for unit_id, unit in made.items():
        unit.arena.data[: 16 * MIB] = noise(16 * MIB, seed=unit_id)
    yield made
    for unit in made.values():
        unit.close()


@pytest.fixture
def unit_connections(units):
    config = DataPlaneConfig(address="nowhere:1", force_remote=True, token=TOKEN, call_timeout_s=WAIT_S)
    unit_connections = UnitConnections(config, session=1, lock=None, memory=BufferPool(64 * MIB))
    unit_connections.learn([changed(unit.info, unit=unit_id) for unit_id, unit in units.items()])
    yield unit_connections
    unit_connections.close()


@pytest.fixture
def meeting(monkeypatch):
    """Every read and write waits until as many units as there are have one."""
    barrier = threading.Barrier(UNITS)

    def waiting(original):
        def wrapped(server, *arguments):
            barrier.wait(WAIT_S)
            return original(server, *arguments)

        return wrapped

    for name in ("_read", "_write"):
        monkeypatch.setattr(BulkServer, name, waiting(getattr(BulkServer, name)))
    return barrier


def rows(count=9, size=5000, units=UNITS):
    """Rows dealt to the units in turn."""
    where = np.array([place % units + 1 for place in range(count)], np.int32)
    offsets = np.array([64 * (place + 1) * 100 for place in range(count)], np.int64)
    return c.FieldLocations(name="a", spec=BYTES, units=where, offsets=offsets, lengths=np.full(count, size))


def stored(units, field):
    return [
        units[unit].arena.data[at : at + size].tolist()
        for unit, at, size in zip(field.units.tolist(), field.offsets, field.lengths, strict=True)
    ]


def test_all_units_are_read_at_the_same_time(units, unit_connections, meeting):
    field = rows()
    batch = assemble(unit_connections.gather([field], {1, 2, 3}))
    assert [row.tolist() for row in batch["a"].unbind()] == stored(units, field)


def test_all_units_are_written_at_the_same_time(units, unit_connections, meeting):
    values = noise(3 * 1000, seed=9)
    sizes = np.full(3, 1000)
    column = EncodedColumn("a", BYTES, sizes, sizes, None, FlatValues(values, np.arange(3) * 1000, sizes))
    placements = [c.Placement(column=0, first=k, last=k + 1, unit=k + 1, offset=640) for k in range(3)]
    unfinished: set[int] = set()
    unit_connections.write(placements, [column], 5, unfinished)
    assert not unfinished
    for k in range(3):
        assert units[k + 1].arena.data[640:1640].tolist() == values[1000 * k : 1000 * (k + 1)].tolist()


def test_one_connection_to_each_unit_is_kept(units, unit_connections):
    field = rows()
    for _ in range(5):
        unit_connections.gather([field], {1, 2, 3})
    kept = [unit_connections.connection(unit) for unit in (1, 2, 3)]
    assert [len(connection._idle) for connection in kept] == [1, 1, 1]


def test_when_one_fails_the_others_have_ended_and_are_good_for_more(units, unit_connections):
    field = rows()
    unit_connections.gather([field], {1, 2, 3})
    units[2].server.stop()
    with pytest.raises((StorageUnitError, ServiceRestartedError)):
        unit_connections.gather([field], {1, 2, 3})
    assert all(not len(unit_connections.connection(unit)._in_flight) for unit in (1, 2, 3))
    assert unit_connections.unknown({1}), "whichever failed is asked about"
    rest = rows(units=1)
    assert [row.tolist() for row in assemble(unit_connections.gather([rest], {1}))["a"].unbind()] == stored(units, rest)


def test_writes_that_failed_are_named_and_no_others(units, unit_connections):
    unit_connections.gather([rows()], {1, 2, 3})
    units[2].server.stop()
    sizes = np.full(3, 1000)
    column = EncodedColumn("a", BYTES, sizes, sizes, None, FlatValues(noise(3000), np.arange(3) * 1000, sizes))
    placements = [c.Placement(column=0, first=k, last=k + 1, unit=k + 1, offset=640) for k in range(3)]
    unfinished: set[int] = set()
    with pytest.raises(StorageUnitError):
        unit_connections.write(placements, [column], 5, unfinished)
    assert unfinished == {2}


def test_parts_of_rows_from_local_and_remote_units_at_once(units):
    config = DataPlaneConfig(address="nowhere:1", token=TOKEN, call_timeout_s=WAIT_S)
    with SessionLock.create() as lock:
        connections = UnitConnections(config, session=1, lock=lock, memory=BufferPool(64 * MIB))
        listed = [changed(unit.info, unit=unit_id) for unit_id, unit in units.items()]
        connections.learn([changed(info, host="another") if info.unit == 2 else info for info in listed])
        try:
            spec = FieldSpec(FieldKind.JAGGED, "uint8", (5, 4))
            field = msgspec.structs.replace(rows(size=30), spec=spec)
            parts = row_parts(ContextParallel(rank=1, size=3), {"a": [slice(1, 4), slice(None, None, 2)]}, 9, ["a"])
            (part,) = parts.of([field], None)
            gathered = connections.gather([part.entries], {1, 2, 3}, parts={"a": part.inner})["a"]
            assert [connections.connection(unit).local for unit in (1, 2, 3)] == [True, False, True]
            batch = assemble({"a": dataclasses.replace(gathered, pieces=part.pieces)})["a"]
            for row, content in zip(batch.unbind(), stored_bytes(units, field), strict=True):
                whole = content.reshape(30, 5, 4)
                cut = np.concatenate([whole[5:10], whole[20:25]])
                assert np.array_equal(row.numpy(), cut[:, 1:4, ::2])
        finally:
            connections.close()


def stored_bytes(units, field):
    return [
        units[unit].arena.data[at : at + size * field.spec.unit_bytes]
        for unit, at, size in zip(field.units.tolist(), field.offsets, field.lengths, strict=True)
    ]
