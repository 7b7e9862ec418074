"""What a remote read costs, counted: requests, bytes on the wire, copies of values once they are received."""

import sys

import numpy as np
import pytest
import torch

from dataplane.client.unit_connections import UnitConnections
from dataplane.config import MIB, DataPlaneConfig
from dataplane.core.buffer_pool import BufferPool
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.columns import assemble, decode_batch
from dataplane.data.row_parts import row_parts
from dataplane.ledger import commands as c
from dataplane.storage.server import BulkServer
from dataplane.storage.transport.request_chunks import READ_BYTES
from tests.storage.unit_under_test import TOKEN, UNIT, Unit, noise

pytestmark = pytest.mark.integration

TOKENS = FieldSpec(FieldKind.JAGGED, "int64", ())
LOGPROBS = FieldSpec(FieldKind.DENSE, "float32", (6,))


@pytest.fixture
def unit():
    with Unit() as made:
        made.arena.data[: 16 * MIB] = noise(16 * MIB)
        yield made


@pytest.fixture
def memory():
    return BufferPool(64 * MIB)


@pytest.fixture
def unit_connections(unit, memory):
    config = DataPlaneConfig(address="nowhere:1", force_remote=True, token=TOKEN)
    unit_connections = UnitConnections(config, session=1, lock=None, memory=memory)
    unit_connections.learn([unit.info])
    yield unit_connections
    unit_connections.close()


@pytest.fixture
def replies(monkeypatch):
    """The bytes of each reply to a read, in order."""
    sent, original = [], BulkServer._read

    def counted(server, request):
        offer = original(server, request)
        sent.append(len(offer.data))
        return offer

    monkeypatch.setattr(BulkServer, "_read", counted)
    return sent


@pytest.fixture
def gathered(monkeypatch):
    """The bytes of each copy of values out of what was received."""
    copied = []
    decode = sys.modules["dataplane.data.columns.row_source"]

    def counting(copy):
        def counted(buffers, which, offsets, sizes, *more, **named):
            copied.append(int(sizes.sum()))
            copy(buffers, which, offsets, sizes, *more, **named)

        return counted

    for name in ("gather", "gather_padded"):
        monkeypatch.setattr(decode, name, counting(getattr(decode, name)))
    return copied


def located(name, spec, offsets, lengths):
    count = len(offsets)
    return c.FieldLocations(
        name=name,
        spec=spec,
        units=np.full(count, UNIT, np.int32),
        offsets=np.array(offsets, np.int64),
        lengths=np.array(lengths, np.int64),
    )


def jagged(name, start, lengths):
    """Rows of int64 one after another."""
    return located(name, TOKENS, start + 8 * (np.cumsum(lengths) - lengths), np.array(lengths))


def stored(unit, field):
    """The field's values as they are in the arena."""
    sizes = field.lengths * field.spec.unit_bytes
    rows = [unit.arena.data[at : at + size] for at, size in zip(field.offsets, sizes, strict=True)]
    return np.concatenate(rows).tobytes()


def values(column):
    return (column.values() if column.is_nested else column).contiguous().view(torch.uint8).numpy().tobytes()


def test_a_small_batch_is_one_request(unit, unit_connections, replies, gathered):
    fields = [
        jagged("a", 64, [3, 0, 700]),
        jagged("b", 8192, [5, 5, 5]),
        located("c", LOGPROBS, [500, 524, 548], [1] * 3),
    ]
    batch = assemble(unit_connections.gather(fields, {UNIT}))
    assert replies == [8 * 703 + 8 * 15 + 3 * 24]
    assert gathered == [8 * 703, 8 * 15, 3 * 24], "the one copy: out of the frame"
    for field in fields:
        assert values(batch[field.name]) == stored(unit, field)


def test_a_large_column_is_the_buffer_it_was_received_into(unit, unit_connections, replies, gathered):
    fields = [jagged("a", 64, [200_000] * 5), jagged("b", 64 + 8_000_000, [100_000] * 5)]
    batch = assemble(unit_connections.gather(fields, {UNIT}))
    assert sum(replies) == 12_000_000
    assert len(replies) == -(-12_000_000 // READ_BYTES)
    assert gathered == []
    for field in fields:
        assert values(batch[field.name]) == stored(unit, field)
    batch["a"].values()[:] = 1
    assert values(batch["b"]) == stored(unit, fields[1]), "no column is written by writing another"


def test_shared_rows_travel_once_and_are_spread_by_one_copy(unit, unit_connections, replies, gathered):
    start, length = 4096, 50_000
    field = located("prompt", TOKENS, [start, start, start + 8 * length, start], [length] * 4)
    batch = assemble(unit_connections.gather([field], {UNIT}))
    assert replies == [2 * 8 * length]
    assert gathered == [4 * 8 * length]
    assert values(batch["prompt"]) == stored(unit, field)
    batch["prompt"].values()[:length] = 1
    assert values(batch["prompt"])[8 * length : 16 * length] == stored(unit, field)[8 * length : 16 * length]


def test_every_second_row_lies_together_once_received(unit, unit_connections, replies, gathered):
    field = located("rows", FieldSpec(FieldKind.DENSE, "float32", (10_000,)), range(0, 15_200_000, 80_000), [1] * 190)
    batch = assemble(unit_connections.gather([field], {UNIT}))
    assert sum(replies) == 190 * 40_000
    assert gathered == []
    assert values(batch["rows"]) == stored(unit, field)


def test_rows_in_another_order_are_gathered_by_one_copy(unit, unit_connections, replies, gathered):
    field = located("a", TOKENS, [90_000, 10_000, 50_000], [1000, 2000, 3000])
    batch = assemble(unit_connections.gather([field], {UNIT}))
    assert replies == [6000 * 8]
    assert gathered == [6000 * 8]
    assert values(batch["a"]) == stored(unit, field)


def test_padded_rows_are_copied_once(unit, unit_connections, replies, gathered):
    field = jagged("a", 64, [1000, 10, 500])
    batch = decode_batch(unit_connections.gather([field], {UNIT}))
    assert replies == gathered == [8 * 1510]
    assert batch["a"].shape == (3, 1000)
    assert values(batch["a"][1, :10]) == stored(unit, field)[8000:8080]


def test_what_is_received_is_warm_again_when_the_result_is_gone(unit, unit_connections, memory):
    fields = [jagged("a", 64, [200_000] * 5)]
    batch = assemble(unit_connections.gather(fields, {UNIT}))
    view = batch["a"].values()[5:]
    del batch
    assert memory.idle_bytes == 0
    assert view.contiguous().numpy().tobytes() == stored(unit, fields[0])[40:]
    del view
    assert memory.idle_bytes >= 8_000_000


def test_only_the_selected_part_of_each_token_leaves_the_unit(unit, unit_connections, replies):
    spec = FieldSpec(FieldKind.JAGGED, "int16", (47, 4))
    lengths = np.array([300, 0, 5, 900], np.int64)
    ends = np.cumsum(lengths * spec.unit_bytes) + 128
    units = np.full(4, UNIT, np.int32)
    field = c.FieldLocations(
        name="experts", spec=spec, units=units, offsets=ends - lengths * spec.unit_bytes, lengths=lengths
    )
    other = c.FieldLocations(name="ids", spec=TOKENS, units=units, offsets=np.full(4, 64), lengths=np.full(4, 2))
    parts = row_parts([(10, 200), (0, 9), (0, 9), (100, 600)], {"experts": slice(12, 24)}, 4, ["experts", "ids"])
    experts, ids = parts.of([field, other], lengths.tolist())
    read = unit_connections.gather([experts.entries, ids.entries], {UNIT}, parts={"experts": experts.inner})
    # 190 + 5 + 500 tokens of 12 x 4 int16; the two tokens of the other field, which all its rows share.
    assert sum(replies) == 695 * 12 * 4 * 2 + 2 * 8
    rows = assemble(read)["experts"].unbind()
    for row, begin, count, (start, stop) in zip(
        rows, field.offsets, lengths, [(10, 200), (0, 0), (0, 5), (100, 600)], strict=True
    ):
        stored = unit.arena.data[begin : begin + count * spec.unit_bytes].view(np.int16).reshape(count, 47, 4)
        assert np.array_equal(row.numpy(), stored[start:stop, 12:24])
