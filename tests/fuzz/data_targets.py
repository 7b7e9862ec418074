"""Values: objects of msgpack, columns that lie wherever a plan says, metas of what a service answers, frames."""

from __future__ import annotations

import numpy as np
import torch

from dataplane.client.operations.sample_names import meta_of
from dataplane.core.types import DTYPE_BYTES, FieldKind, FieldSpec
from dataplane.data.columns import RowSource, assemble, decode_batch, decode_padded
from dataplane.data.meta import KVBatchMeta
from dataplane.data.object_codec import decode_object, encode_object
from dataplane.errors import DataPlaneError, InvalidRequestError, UnsupportedValueError
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.storage.transport.read_plans import plan_read
from tests.data.columns_helpers import encode_one, store
from tests.fuzz.target import Feed, FindingError, Target, piece

KINDS = list(FieldKind)
DTYPES = [None, *DTYPE_BYTES]


# --- objects ------------------------------------------------------------------------------------------------------


def objects(data: bytes) -> None:
    """A row of an object column. What is read can be written and read again."""
    value = decode_object(data)
    try:
        again = encode_object(value)
    except UnsupportedValueError:
        return
    if encode_object(decode_object(again)) != again:
        raise FindingError(f"{value!r} is another value once written and read")


def object_seeds() -> list[bytes]:
    values = [
        None,
        {"role": "user", "turns": [1, -2, 1 << 70, 2.5, (True, b"raw")], 7: "seven"},
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8", (2,))]),
        np.float32(3.5),
        torch.arange(4, dtype=torch.bfloat16).reshape(2, 2),
        [torch.zeros(0, 3), np.datetime64("2026-01-01"), ()],
    ]
    return [encode_object(value) for value in values]


# --- columns ------------------------------------------------------------------------------------------------------


def columns(data: bytes) -> None:
    """Rows of a column, wherever a plan says that they are: read in all ways there are."""
    feed = Feed(data)
    source = _source(feed)
    failed: DataPlaneError | None = None
    for read in (_assemble, _views, _padded, _batch):
        try:
            read(source)
        except DataPlaneError as error:
            failed = error
    if failed is not None:
        raise failed


def _source(feed: Feed) -> RowSource:
    inner = tuple(int(size) for size in np.frombuffer(feed.take(8 * feed.number(4)).ljust(32, b"\1")[:24], "<i8"))
    shape = tuple(map(abs, inner[: feed.number(3)]))
    try:
        spec = FieldSpec(KINDS[feed.number(4)], DTYPES[feed.number(len(DTYPES))], shape)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if not spec.settled:
        spec = FieldSpec(spec.kind, "uint8", spec.inner)
    count = feed.number(100)
    lengths, offsets = (_integers(feed.take(8 * count), count) for _ in range(2))
    holders = np.frombuffer(feed.take(count).ljust(count, b"\0"), np.uint8).astype(np.int32) % 2
    which = None if feed.number(2) else holders
    buffers = [np.frombuffer(bytearray(feed.piece()), np.uint8), np.frombuffer(bytearray(feed.rest()), np.uint8)]
    return RowSource(spec, buffers, which, offsets, lengths, ours=bool(count % 2))


def _integers(content: bytes, count: int) -> c.Int64s:
    return np.frombuffer(content.ljust(8 * count, b"\0")[: 8 * count], "<i8")


def _assemble(source: RowSource) -> None:
    _looked_at(assemble({"x": source})["x"])


def _views(source: RowSource) -> None:
    _looked_at(assemble({"x": source}, copy=False)["x"])


def _padded(source: RowSource) -> None:
    _looked_at(decode_padded(source))


def _batch(source: RowSource) -> None:
    _looked_at(decode_batch({"x": source}, pad_to_seqlen=64)["x"])


def _looked_at(column: object) -> None:
    """Every byte of what was made can be read."""
    if isinstance(column, torch.Tensor):
        (column.values() if column.is_nested else column).contiguous().view(-1).view(torch.uint8).sum()


def column_seeds() -> list[bytes]:
    columns = [
        encode_one(torch.arange(6).reshape(3, 2), 3),
        encode_one([torch.arange(3), torch.arange(2)], 2, FieldSpec(FieldKind.JAGGED)),
        encode_one([torch.ones(2, 2), torch.ones(1, 5)], 2, FieldSpec(FieldKind.RAGGED)),
        encode_one(["text", {"a": 1}], 2),
        encode_one([torch.arange(n % 5) for n in range(60)], 60, FieldSpec(FieldKind.JAGGED)),
    ]
    return [_column_seed(store(column)) for column in columns]


def _column_seed(source: RowSource) -> bytes:
    inner = source.spec.inner or ()
    shape = np.array(inner, "<i8").tobytes()
    count = len(source)
    which = np.zeros(count, np.int8) if source.which is None else source.which.astype(np.int8)
    head = bytes([len(inner)]) + shape + bytes([len(inner), KINDS.index(source.spec.kind), _dtype(source.spec), count])
    places = source.lengths.astype("<i8").tobytes() + source.offsets.astype("<i8").tobytes() + which.tobytes() + b"\0"
    rest = b"".join(buffer.tobytes() for buffer in source.buffers[1:])
    return head + places + piece(source.buffers[0].tobytes()) + rest


def _dtype(spec: FieldSpec) -> int:
    return DTYPES.index(spec.dtype)


# --- metas and plans ----------------------------------------------------------------------------------------------


def metas(data: bytes) -> None:
    """The meta that a client makes of a claim's or a list's answer."""
    feed = Feed(data)
    kind = (c.Claim, c.List)[feed.number(2)]
    result = messages.decode_result(kind, feed.rest())
    assert isinstance(result, c.Claimed | c.Listed)
    meta = meta_of(result, "p", task="t")
    if meta.size:
        halves = [meta.slice(0, 1), meta.slice(1, meta.size)]
        if KVBatchMeta.concat(halves).sample_ids != meta.sample_ids:
            raise FindingError(f"{meta} in two halves is another")


def meta_seeds() -> list[bytes]:
    rows = np.arange(3)
    lengths = c.TagColumn(name="input_lengths", values=(3, 4, 5))
    tags = (lengths, c.TagColumn(name="t", values=(1.5,), positions=rows[:1]))
    claimed = c.Claimed(ids=("a", "b", "c"), rows=rows, generations=rows + 1, tags=tags, fields=("x",))
    return [b"\0" + messages.encode(claimed), b"\1" + messages.encode(_listed(tags))]


def _listed(tags: tuple[c.TagColumn, ...]) -> c.Listed:
    rows = np.arange(3)
    return c.Listed(ids=("a", "b", "c"), rows=rows, generations=rows, tags=tags, fields=("x", "y"))


def read_plans(data: bytes) -> None:
    """Ranges to be read from a storage unit, cut into requests."""
    feed = Feed(data)
    ranges = np.frombuffer(feed.rest()[: 16 * 1000], np.uint8)
    ranges = ranges[: len(ranges) // 16 * 16].view("<i8").reshape(-1, 2)
    offsets, sizes = ranges[:, 0].copy(), ranges[:, 1].copy()
    columns = [len(offsets) // 3, len(offsets) - len(offsets) // 3]
    plan = plan_read(offsets, sizes, within=1 << 24, columns=columns, chunk_bytes=1 << 16)
    if sum(request.nbytes for request in plan.requests) != sum(plan.buffers):
        raise FindingError("the requests do not fill the buffers")
    ends = plan.offsets + sizes
    if len(ends) and (ends > np.array(plan.buffers)[plan.which]).any():
        raise FindingError("a range ends beyond its buffer")


def plan_seeds() -> list[bytes]:
    some = [(0, 10), (10, 5), (1 << 20, 100_000), (64, 0), (5, 10), (0, 200_000)]
    return [np.array(some[:count], "<i8").tobytes() for count in (1, 2, 6)]


TARGETS = [
    Target(name="objects", run=objects, seeds=object_seeds, examples=600),
    Target(name="columns", run=columns, seeds=column_seeds, examples=400),
    Target(name="metas", run=metas, seeds=meta_seeds),
    Target(name="read-plans", run=read_plans, seeds=plan_seeds),
]
