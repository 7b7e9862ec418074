"""What reads and puts on one host cost, counted: copies of values, memory beside the result, commands."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataplane import DataPlaneClient, KVBatchMeta, connect, serve
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.core import row_copy
from dataplane.data.columns import parallel_copy
from dataplane.ledger.commands import Abort
from tests.children import Child
from tests.data.columns_helpers import nested_of
from tests.restarts import NO_HEARTBEATS

pytestmark = pytest.mark.integration

MIB = 1 << 20
ROWS = 64
NAMES = itertools.count()


@pytest.fixture(scope="module")
def client() -> Iterator[DataPlaneClient]:
    """Without heartbeats: what one of them posted, or allocated, would be counted as a test's own."""
    settings = {"capacity_bytes": 128 * MIB, **NO_HEARTBEATS}
    with serve(settings) as server, connect(server.address, copy_threads=2, **NO_HEARTBEATS) as client:
        get(client, put(client, fields()))  # a process's first read looks into what torch can do
        yield client


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy of values that `rowcopy` makes or asks for, in order."""
    copied: list[int] = []
    place, scatter = row_copy._copy_ranges, row_copy._copy_short_rows

    def placed(buffers: Any, runs: Any, *more: Any, **padded: Any) -> None:
        runs = list(runs)
        copied.extend(stop - start for _, start, stop in runs)
        place(buffers, runs, *more, **padded)

    def scattered(buffers: Any, which: Any, offsets: Any, sizes: Any, *more: Any) -> None:
        copied.append(int(sizes.sum()))
        scatter(buffers, which, offsets, sizes, *more)

    monkeypatch.setattr(row_copy, "_copy_ranges", placed)
    monkeypatch.setattr(row_copy, "_copy_short_rows", scattered)
    return copied


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many long copies each call of a copier shared among threads."""
    shared: list[int] = []
    pieces = parallel_copy._pieces

    def counted(runs: list[row_copy.Run]) -> Any:
        shared.append(len(runs))
        return pieces(runs)

    monkeypatch.setattr(parallel_copy, "_pieces", counted)
    return shared


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands sent, in order; not those by which preallocated space of small puts goes back with a heartbeat."""
    sent: list[str] = []

    def counted(send: Callable[..., Any]) -> Callable[..., Any]:
        def counting(channel: ControllerChannel, command: Any, **more: Any) -> Any:
            if not isinstance(command, Abort):
                sent.append(type(command).__name__)
            return send(channel, command, **more)

        return counting

    monkeypatch.setattr(ControllerChannel, "call", counted(ControllerChannel.call))
    monkeypatch.setattr(ControllerChannel, "post", counted(ControllerChannel.post))
    return sent


class TorchCopies(TorchDispatchMode):
    """Names of torch's operators that ran and made 1 KiB of new memory or more."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {storage for tensor in args for storage in self._storages(tensor)}
        if any(storage not in inputs for storage in self._storages(out)):
            self.made.append(str(func))
        return out

    @staticmethod
    def _storages(value: Any) -> list[int]:
        plain = isinstance(value, torch.Tensor) and not value.is_nested and value.nbytes >= 1024
        return [value.untyped_storage().data_ptr()] if plain else []


def fields(rows: int = ROWS, length: int = 1000) -> dict[str, torch.Tensor]:
    """Two jagged columns of the same lengths and a dense one, rows of some KB each."""
    lengths = [length + row % 7 for row in range(rows)]
    return {
        "input_ids": nested_of([torch.arange(n) for n in lengths]),
        "generation_logprobs": nested_of([torch.arange(n, dtype=torch.float32) for n in lengths]),
        "hidden": torch.rand(rows, length),
    }


def nbytes(columns: dict[str, torch.Tensor]) -> list[int]:
    return [(column.values() if column.is_nested else column).nbytes for column in columns.values()]


def put(client: DataPlaneClient, columns: dict[str, torch.Tensor]) -> KVBatchMeta:
    partition = f"copies-{next(NAMES)}"
    ids = [f"s{row}" for row in range(len(columns["hidden"]))]
    client.register_partition(partition, list(columns), len(ids), [])
    return client.put_samples(ids, partition, columns)


def get(client: DataPlaneClient, meta: KVBatchMeta, *, copy: bool = True) -> Any:
    return client.get_samples(meta, meta.partition_id, list(meta.fields or ()), copy=copy)


def test_the_instrument_sees_copies() -> None:
    with TorchCopies() as torch_copies:
        torch.ones(1000).clone()[100:].view(900, 1)
        torch.arange(1000).min()
    assert torch_copies.made == ["aten.ones.default", "aten.clone.default", "aten.arange.default"]


def test_rows_that_lie_together_are_one_copy_for_each_column(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields()
    meta = put(client, columns)
    for read in (get, lambda client, meta: client.get_batch(meta, layout="jagged")):
        copies.clear()
        with TorchCopies() as torch_copies:
            read(client, meta)
        assert copies == nbytes(columns)
        assert torch_copies.made == []


def test_padded_rows_are_copied_once_to_their_place(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields()
    meta = put(client, columns)
    copies.clear()
    with TorchCopies() as torch_copies:
        batch = client.get_batch(meta, pad_to_seqlen=2048)
    assert batch["input_ids"].shape == (ROWS, 2048)
    assert len(copies) == ROWS + ROWS + 1
    assert sum(copies) == sum(nbytes(columns))
    assert torch_copies.made == []


def test_rows_in_another_order_are_copied_once(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields()
    meta = put(client, columns).subset(list(range(ROWS - 1, -1, -1)))
    copies.clear()
    get(client, meta)
    assert len(copies) == 3 * ROWS
    assert sum(copies) == sum(nbytes(columns))


def test_many_short_rows_are_copied_together(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields(rows=512, length=2)
    meta = put(client, columns).subset([*range(0, 512, 2), *range(1, 512, 2)])
    copies.clear()
    get(client, meta)
    assert copies == nbytes(columns)


def test_views_are_no_copies(client: DataPlaneClient, copies: list[int]) -> None:
    meta = put(client, fields())
    copies.clear()
    with TorchCopies() as torch_copies:
        views = get(client, meta, copy=False)
    assert copies == []
    assert torch_copies.made == []
    assert views["input_ids"].offsets() is views["generation_logprobs"].offsets()


def test_long_columns_are_copied_by_one_call_of_the_copier(
    client: DataPlaneClient, copies: list[int], together: list[int]
) -> None:
    columns = fields(length=10_000)
    meta = put(client, columns)
    assert together == [3]
    get(client, meta)
    assert together == [3, 3]
    assert sum(copies) == 2 * sum(nbytes(columns))


def test_a_put_copies_every_byte_once(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields()
    with TorchCopies() as torch_copies:
        meta = put(client, columns)
    assert copies == nbytes(columns)
    assert torch_copies.made == []

    copies.clear()
    padded = {"input_ids": torch.ones(ROWS, 2048, dtype=torch.int64), "hidden": columns["hidden"]}
    with TorchCopies() as torch_copies:
        client.put_samples(meta, meta.partition_id, padded)
    assert copies == [row.nbytes for row in columns["input_ids"].unbind()] + [columns["hidden"].nbytes]
    assert torch_copies.made == []


@pytest.mark.parametrize("read", ["get", "batch", "views"])
def test_memory_beside_the_result(client: DataPlaneClient, read: str) -> None:
    """No second copy by numpy or Python either (results of this size lie in mappings, which are not traced)."""
    columns = fields(length=10_000)
    meta = put(client, columns)
    reads: dict[str, Callable[[], Any]] = {
        "get": lambda: get(client, meta),
        "batch": lambda: client.get_batch(meta),
        "views": lambda: get(client, meta, copy=False),
    }
    reads[read]()
    tracemalloc.start()
    try:
        result = reads[read]()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(result["hidden"]) == ROWS
    assert peak < sum(nbytes(columns)) / 20


def test_memory_beside_a_put(client: DataPlaneClient) -> None:
    columns = fields(length=10_000)
    meta = put(client, columns)
    tracemalloc.start()
    try:
        client.put_samples(meta, meta.partition_id, columns)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(nbytes(columns)) / 20


def test_a_read_is_two_commands(client: DataPlaneClient, commands: list[str]) -> None:
    meta = put(client, fields())
    for read in (get, lambda client, meta: client.get_batch(meta)):
        commands.clear()
        read(client, meta)
        assert commands == ["Locate", "Release"]


def test_views_are_released_when_the_last_is_gone(client: DataPlaneClient, commands: list[str]) -> None:
    meta = put(client, fields())
    commands.clear()
    views = get(client, meta, copy=False)
    one = views["input_ids"].values()[5:7]
    del views
    gc.collect()
    client.check_consumption_status(meta.partition_id, [])
    assert commands == ["Locate", "CheckConsumption"]
    assert one.tolist() == [5, 6]
    commands.clear()
    del one
    gc.collect()
    client.check_consumption_status(meta.partition_id, [])
    assert sorted(commands) == ["CheckConsumption", "Release"]


WRITES_TO_A_VIEW = """
import resource, sys, torch
from dataplane import connect
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file
client = connect(sys.argv[1])
client.register_partition("written", ["x"], None, [])
client.put_samples(["a"], "written", {"x": torch.ones(1)})
view = client.get_samples(["a"], "written", ["x"], copy=False)["x"]
own = view.clone()
own += 1
print(view.item(), own.item(), flush=True)
view += 1
"""


def test_a_write_to_a_view_ends_the_process_and_changes_no_row() -> None:
    with serve({"capacity_bytes": MIB}) as server, connect(server.address) as client:
        with Child([sys.executable, "-c", WRITES_TO_A_VIEW, server.address]) as child:
            assert child.line() == "1.0 2.0"
            assert child.finish()[0] == -signal.SIGSEGV
        assert client.get_samples(["a"], "written", ["x"])["x"].tolist() == [1.0]
