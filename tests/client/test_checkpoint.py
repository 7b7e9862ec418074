"""Checkpoints beyond the contract: pieces and pages, other units, too little space, processes at work meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dataplane import (
    CapacityTimeoutError,
    DataPlaneClient,
    DataPlaneError,
    RequestTooLargeError,
    Shared,
    StorageUnitError,
    connect,
    connect_async,
    serve,
)
from dataplane.client.checkpoint import manifest, save
from dataplane.client.unit_connections import UnitConnections
from dataplane.core import failpoints
from dataplane.protocol import zmq_frames
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with serve({"capacity_bytes": 32 * MIB}) as server, connect(server.address) as opened:
        yield opened


def another(**settings: Any) -> Iterator[DataPlaneClient]:
    with serve({"capacity_bytes": 8 * MIB, **settings}) as server, connect(server.address) as opened:
        yield opened


def rows_of(count: int, length: int = 3) -> torch.Tensor:
    return torch.arange(count * length).reshape(count, length)


def ids_of(count: int) -> list[str]:
    return [f"s{number:04}" for number in range(count)]


def contents(client: DataPlaneClient, partition: str, fields: list[str]) -> tuple[Any, ...]:
    """All that a partition of tensors holds, as plain values."""
    meta = client.list_samples(partition)
    found = client.get_data(meta, fields)
    return meta.sample_ids, meta.tags, {name: [row.tolist() for row in found[name].unbind()] for name in fields}


def pinned(client: DataPlaneClient) -> int:
    return sum(unit.pinned_bytes for unit in client.stats().units)


def await_unpinned(client: DataPlaneClient) -> None:
    """A client gives back what it pinned without waiting for the answer."""
    wait_until(lambda: not pinned(client), "nothing pinned")


def nothing_there(client: DataPlaneClient) -> bool:
    """Neither samples nor bytes, nor anybody who holds some."""
    stats = client.stats()
    used = [unit.live_bytes + unit.reserved_bytes + unit.retired_bytes for unit in stats.units]
    return not stats.partitions and not any(used)


def test_what_was_claimed_is_saved_as_claimed_whatever_else_its_client_waits_for(
    client: DataPlaneClient, tmp_path: Path
) -> None:
    """A claim is final as soon as its client makes another call, also while one of its calls waits."""
    for name in ("p", "empty"):
        client.register_partition(name, ["x"], None, ["train"])
    client.put_samples(ids_of(4), "p", {"x": rows_of(4)})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.claim_meta, "empty", "train", ["x"], 1)
        wait_until(lambda: any(session.parked for session in client.stats().sessions), "the claim waits")
        assert client.claim_meta("p", "train", ["x"], 3).size == 3
        client.checkpoint(tmp_path / "saved", ["p"])
        client.put_samples(["last"], "empty", {"x": rows_of(1)})
        assert waiting.result(60).sample_ids == ["last"]
    client.restore(tmp_path / "saved", replace=True)
    assert client.claim_meta("p", "train", ["x"], 9, blocking=False).sample_ids == ids_of(4)[3:]


def test_in_many_pieces_and_pages(client: DataPlaneClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "FILE_BYTES", 4096)
    monkeypatch.setattr(save, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(save, "NAMES_PER_READ", 23)
    monkeypatch.setattr(save, "CELLS_PER_READ", 60)
    ids = ids_of(200)
    client.register_partition("p", ["x"], 200, ["train"])
    client.put_samples(ids, "p", {"x": rows_of(200)}, [{"n": n} if n % 3 else {} for n in range(200)])
    client.put_samples(ids[::2], "p", {"jagged": [torch.arange(n % 7) for n in range(100)]})
    index = np.random.default_rng(3).integers(0, 9, 200)
    client.put_samples(ids, "p", {"shared": Shared(rows_of(9, 40), index)})
    client.put_samples(ids[:2], "p", {"large": torch.arange(3000).reshape(2, 1500)})
    client.claim_meta("p", "train", [], 99)
    before = contents(client, "p", ["x", "shared"])
    done = client.checkpoint(tmp_path / "c")
    entry = manifest.read(tmp_path / "c").partitions[0]
    assert done.files == 9
    assert len(entry.names) == 9
    pieces = {name: [cells for cells in entry.cells if cells.field == name] for name in ("x", "shared", "large")}
    assert [cells.nbytes for cells in pieces["x"]] == [60 * 24] * 3 + [20 * 24]
    # Each page has each of its values once; the samples of the last page have 8 of the 9.
    assert [cells.nbytes for cells in pieces["shared"]] == [9 * 320] * 3 + [8 * 320]
    assert [cells.nbytes for cells in pieces["large"]] == [12_000, 12_000]
    client.restore(tmp_path / "c", replace=True)
    assert contents(client, "p", ["x", "shared"]) == before
    jagged = client.get_samples(ids[::2], "p", ["jagged"])["jagged"].unbind()
    assert [row.tolist() for row in jagged] == [list(range(n % 7)) for n in range(100)]
    assert client.get_samples(ids[:2], "p", ["large"])["large"].tolist() == torch.arange(3000).reshape(2, 1500).tolist()
    assert client.claim_meta("p", "train", [], 999, blocking=False).sample_ids == ids[99:]


def test_answers_too_large_are_asked_for_in_parts(
    client: DataPlaneClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = [{"text": "x" * 1000} for _ in range(40)]
    client.register_partition("p", ["x"], 40, ["train"])
    client.put_samples(ids_of(40), "p", {"x": rows_of(40)}, tags)
    monkeypatch.setattr(zmq_frames, "MAX_MESSAGE_BYTES", 20_000)
    client.checkpoint(tmp_path / "c")
    monkeypatch.undo()
    assert len(manifest.read(tmp_path / "c").partitions[0].names) == 3
    client.restore(tmp_path / "c", replace=True)
    assert client.list_samples("p").tags == tags


def test_an_answer_too_large_in_any_parts_pins_nothing(
    client: DataPlaneClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.register_partition("p", ["x"], 1, ["task" * 100])
    client.put_samples(["a"], "p", {"x": rows_of(1)})
    monkeypatch.setattr(zmq_frames, "MAX_MESSAGE_BYTES", 300)
    with pytest.raises(RequestTooLargeError, match="the answer"):
        client.checkpoint(tmp_path / "c")
    monkeypatch.undo()
    await_unpinned(client)
    assert not list(tmp_path.iterdir())


def test_other_tools_read_the_files(client: DataPlaneClient, tmp_path: Path) -> None:
    client.register_partition("p", ["ids"], 3, ["train"])
    values = torch.arange(6, dtype=torch.float16).reshape(3, 2)
    raw = values.bfloat16()
    jagged = [torch.arange(4), torch.arange(0), torch.arange(2)]
    fields = {"dense": values, "raw": raw, "jagged": jagged, "shared": Shared(values[:1], [0, 0, 0])}
    client.put_samples(ids_of(3), "p", fields)
    client.checkpoint(tmp_path / "c")
    (file,) = (tmp_path / "c").glob("data-*.safetensors")
    found = {name.split("/", 1)[1]: tensor for name, tensor in load_file(file).items()}
    assert found["p/dense/values"].equal(values)
    assert found["p/raw/values"].view(torch.bfloat16).equal(raw)
    assert found["p/jagged/values"].equal(torch.cat(jagged))
    assert found["p/jagged/lengths"].tolist() == [4, 0, 2]
    assert found["p/shared/values"].equal(values[:1])
    assert found["p/shared/index"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("units", "capacity"), [(1, 32 * MIB), (5, 1 * MIB)])
def test_into_fewer_and_more_and_smaller_units(
    client: DataPlaneClient, tmp_path: Path, units: int, capacity: int
) -> None:
    """Also filled beyond what new rows may take: it was full of them once."""
    ids = ids_of(47)
    client.register_partition("p", ["x"], 47, ["train"])
    client.put_samples(ids, "p", {"x": torch.arange(47 * 25_000, dtype=torch.int32).reshape(47, -1)})
    client.checkpoint(tmp_path / "c")
    before = contents(client, "p", ["x"])
    for other in another(units=units, capacity_bytes=capacity):
        other.restore(tmp_path / "c")
        assert contents(other, "p", ["x"]) == before
        assert sum(unit.live_bytes > 0 for unit in other.stats().units) == units


def test_too_little_space_leaves_nothing(client: DataPlaneClient, tmp_path: Path) -> None:
    client.register_partition("p", ["x"], 2, ["train"])
    client.put_samples(["small"], "p", {"y": rows_of(1)})
    client.put_samples(["a", "b"], "p", {"x": torch.zeros(2, 3 * MIB, dtype=torch.uint8)})
    client.checkpoint(tmp_path / "c")
    for other in another(capacity_bytes=4 * MIB):
        with pytest.raises(RequestTooLargeError, match="this checkpoint"):
            other.restore(tmp_path / "c")
        assert nothing_there(other)
    for other in another(capacity_bytes=2 * MIB, units=5):
        with pytest.raises(RequestTooLargeError, match="the largest value"):
            other.restore(tmp_path / "c")
        assert nothing_there(other)
    for other in another(capacity_bytes=8 * MIB):
        other.register_partition("q", ["x"], 1, ["train"])
        other.put_samples(["a"], "q", {"x": torch.zeros(1, 3 * MIB, dtype=torch.uint8)})
        with pytest.raises(CapacityTimeoutError, match="partition 'q' holds 3,145,728"):
            other.restore(tmp_path / "c")
        assert [found.partition for found in other.stats().partitions] == ["q"]
    for other in another(units=0):
        with pytest.raises(CapacityTimeoutError):
            other.restore(tmp_path / "c")
        assert nothing_there(other)


def test_an_empty_service_and_empty_partitions(client: DataPlaneClient, tmp_path: Path) -> None:
    assert client.checkpoint(tmp_path / "none").partitions == {}
    assert client.restore(tmp_path / "none").partitions == {}
    client.register_partition("p", ["x"], None, ["train"], strict=True)
    client.seal("p")
    client.checkpoint(tmp_path / "empty")
    client.restore(tmp_path / "empty", replace=True)
    assert client.check_consumption_status("p", ["train"])
    with pytest.raises(DataPlaneError, match="sealed"):
        client.put_samples(["a"], "p")


def test_writers_at_work_never_tear_a_checkpoint(client: DataPlaneClient, tmp_path: Path) -> None:
    """One writes all rows of two fields again and again, another clears and puts: every checkpoint is of one instant,
    at which the two fields, put together, agree, and so do all rows of one put."""
    ids = ids_of(64)
    stop = threading.Event()
    wrote = {0: 0, 32: 0}  # how often, by the first row
    failed: list[BaseException] = []

    def write(first: int) -> None:
        try:
            with connect(client.config.address) as writer:
                version = 0
                while not stop.is_set():
                    version += 1
                    rows = torch.full((32, 500), version)
                    if first and version % 3 == 0:
                        writer.clear_samples(ids[first:], "p")
                    fields = {"x": rows, "y": [torch.full((version % 5 + 1,), version)] * 32}
                    writer.put_samples(ids[first : first + 32], "p", fields, [{"version": version}] * 32)
                    wrote[first] = version
        except BaseException as error:
            failed.append(error)

    def await_put() -> None:
        before = wrote[0]
        wait_until(lambda: failed or wrote[0] > before, "another put of the first half")

    client.register_partition("p", ["x"], None, ["train"])
    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 32)]
    for thread in writers:
        thread.start()
    try:
        for turn in range(6):
            await_put()
            client.checkpoint(tmp_path / f"c{turn}")
    finally:
        stop.set()
        for thread in writers:
            thread.join()
    assert not failed
    versions: set[tuple[int, ...]] = set()
    for turn in range(6):
        for other in another():
            other.restore(tmp_path / f"c{turn}")
            meta = other.list_samples("p")
            found = other.get_data(meta, ["x", "y"]) if meta.size else {"x": torch.zeros(0, 1), "y": torch.zeros(0, 1)}
            seen: dict[bool, set[int]] = {True: set(), False: set()}
            for name, tags, x, y in zip(meta.sample_ids, meta.tags or [], found["x"], found["y"].unbind(), strict=True):
                assert set(x.tolist()) == set(y.tolist()) == {tags["version"]}
                seen[name in ids[:32]].add(tags["version"])
            assert all(len(found) <= 1 for found in seen.values())
            versions.add(tuple(sorted(max(found, default=0) for found in seen.values())))
    assert len(versions) > 1


def test_a_unit_that_comes_back_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where units come back with what they held, saving and restoring begin anew until they are there."""
    calls: list[str] = []

    def at_first_gone(name: str) -> None:
        honest = getattr(UnitConnections, name)

        def once(self: UnitConnections, *arguments: Any, **more: Any) -> Any:
            calls.append(name)
            if calls.count(name) == 1:
                raise StorageUnitError(unit=1, endpoint="ipc://gone", why="it is being restarted")
            return honest(self, *arguments, **more)

        monkeypatch.setattr(UnitConnections, name, once)

    for name in ("state", "arenas", "saved"):
        (tmp_path / name).mkdir()
    for other in another(state_dir=str(tmp_path / "state"), arena_dir=str(tmp_path / "arenas")):
        other.register_partition("p", ["x"], 1, ["train"])
        other.put_samples(ids_of(9), "p", {"x": rows_of(9)})
        before = contents(other, "p", ["x"])
        at_first_gone("gather")
        other.checkpoint(tmp_path / "saved" / "c")
        at_first_gone("write")
        other.restore(tmp_path / "saved" / "c", replace=True)
        assert (calls.count("gather"), calls.count("write")) == (2, 2)
        assert contents(other, "p", ["x"]) == before
        await_unpinned(other)
        assert [found.partition for found in other.stats().partitions] == ["p"]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["c"]


def test_a_cancelled_checkpoint_leaves_nothing(client: DataPlaneClient, tmp_path: Path) -> None:
    client.register_partition("p", ["x"], 1, ["train"])
    client.put_samples(["a"], "p", {"x": rows_of(1)})
    reached, go_on = threading.Event(), threading.Event()

    def stop_there() -> None:
        failpoints.disarm()
        reached.set()
        assert go_on.wait(60)

    async def cancelled() -> None:
        async with connect_async(client.config.address) as other:
            call = asyncio.create_task(other.checkpoint(tmp_path / "c"))
            await asyncio.to_thread(reached.wait, 60)
            assert pinned(client) == 64
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert list(tmp_path.iterdir())
            go_on.set()

    failpoints.arm("checkpoint.file_written", stop_there)
    asyncio.run(cancelled())
    assert not list(tmp_path.iterdir())
    await_unpinned(client)
