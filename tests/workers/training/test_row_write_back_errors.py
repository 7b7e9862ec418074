"""Parts that cannot be written back: all ranks raise, nothing is stored, and the group makes the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataplane import ContextParallel, DataPlaneClient, KVBatchMeta, Server
from dataplane.errors import CallTimeoutError, InvalidRequestError, SchemaError, StaleSampleError
from tests.gloo import Ranks
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import partition  # noqa: F401
from tests.workers.training.mixin_worker import (
    LENGTHS,
    NEVER_S,
    counted_puts,
    fingerprints,
    put,
    unwrapped,
    worker_on,
)
from workers.training.row_join import JoinedField

pytestmark = pytest.mark.integration

Columns = dict[str, torch.Tensor]


def half(rank: int, size: int = 2) -> ContextParallel:
    return ContextParallel(rank=rank // (4 // size), size=size, zigzag=False, pad_to=40)


def good(rank: int) -> tuple[Columns, dict[str, Any]]:
    """Ranks 0 and 1 have the first 20 tokens of each row, ranks 2 and 3 the rest."""
    return {"kl": torch.full((len(LENGTHS), 20), 1.0 + rank // 2)}, {"tokens": half(rank)}


def bad(rank: int, how: str) -> tuple[Columns, dict[str, Any]]:
    columns, parts = good(rank)
    second = rank >= 2
    match how:
        case "missing rank":
            return ({} if second else columns), parts
        case "missing tokens":
            width = 18 if second else 20
            return {"kl": torch.zeros(8, width)}, {"tokens": (22, 40) if second else (0, 20)}
        case "missing layer":
            layers = slice(2, 3) if rank % 2 else slice(0, 1)
            return {"kl": torch.zeros(8, 20, 1)}, {**parts, "inner": {"kl": layers}}
        case "overlap":
            return {"kl": torch.zeros(8, 20)}, {"tokens": (rank, rank + 20)}
        case "overlap of layers":
            layers = [slice(None), slice(rank % 2, rank % 2 + 2)]
            return {"kl": torch.zeros(8, 20, 5, 2)}, {**parts, "inner": {"kl": layers}}
        case "dtype":
            return {"kl": columns["kl"].double() if rank == 3 else columns["kl"]}, parts
        case "shape":
            return {"kl": torch.zeros(8, 20, 3 if second else 2)}, parts
        case "shape of a copy":
            return {"kl": torch.zeros(8, 20, 3 if rank == 3 else 2)}, parts
        case "width":
            return {"kl": torch.zeros(8, 19 if rank == 1 else 20)}, parts
        case "rows":
            return {"kl": torch.zeros(7 if rank == 3 else 8, 20)}, parts
        case "type":
            return {"kl": [1.0] if rank == 2 else columns["kl"]}, parts  # type: ignore[dict-item]
        case "nested":
            given = [torch.zeros(1)] * 8
            return {"kl": torch.nested.nested_tensor(given, layout=torch.jagged) if second else columns["kl"]}, parts
        case "pad_to":
            return columns, {"tokens": ContextParallel(rank=rank // 2, size=2, zigzag=False, pad_to=38)}
        case "negative":
            return {"kl": torch.zeros(8, 20, 1)}, {**parts, "inner": {"kl": slice(-1, None)}}
        case "slices":
            return columns, {**parts, "inner": {"kl": slice(1)}}
        case "list":
            return [columns["kl"]] if rank == 3 else columns, parts  # type: ignore[return-value]
        case "number as a name":
            return {rank % 2 or "kl": columns["kl"]}, parts  # type: ignore[dict-item]
        case "meta device":
            return {"kl": columns["kl"].to("meta") if rank == 2 else columns["kl"]}, parts
        case "declared size":  # the last slice has a value too few
            low = rank % 2
            return {"declared": torch.zeros(8, 20, 3 - low)}, {
                **parts,
                "inner": {"declared": slice(low * 3, low * 3 + 3)},
            }
        case "other field":
            return columns, {**parts, "inner": {"no_such_field": slice(1)}}
    return columns, {**parts, "inner": {}, "tokens": parts["tokens"] if rank else None}  # "whole" on the leader


def fail(rank: int, address: str, meta: KVBatchMeta, how: str) -> Any:
    worker = worker_on(rank, "tp2 cp2", address)
    puts = counted_puts(worker)
    columns, parts = bad(rank, how)
    try:
        worker._write_back(meta, columns, **parts)
        outcome: Any = None
    except Exception as error:
        outcome = error
    stored = len(puts)
    columns, parts = good(rank)
    worker._write_back(meta, columns, **parts)  # the group is good for another call
    fetched = fingerprints(worker._fetch(meta.with_fields(["kl"])))
    worker.close_data_plane()
    return outcome, stored, fetched


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("missing rank", ValueError, "'kl': no rank has token 20 of sample 's2'"),
        ("missing tokens", ValueError, "'kl': no rank has token 20 of sample 's2'"),
        ("missing layer", ValueError, r"'kl': no rank has token 0 at inner index \[1\] of sample 's0'"),
        ("overlap", ValueError, "'kl': ranks 0 and 1 both have token 1 of sample 's0'"),
        ("overlap of layers", ValueError, r"ranks 0 and 1 both have token 0 at inner index \[0, 1\] of sample 's0'"),
        ("dtype", ValueError, "'kl': rank 3 has float64 jagged .* but rank 0 has float32 jagged"),
        ("shape", ValueError, r"'kl': rank 0 has elements of shape \[2\], but its part of elements of shape \[3\]"),
        ("shape of a copy", ValueError, r"ranks 2 and 3 have the same part, but elements of \[2\] and \[3\]"),
        ("width", ValueError, r"'kl': the parts of 8 samples are padded to 20 tokens, got shape \[8, 19\]"),
        ("rows", ValueError, r"'kl': expected 8 rows, one per sample of the meta, got shape \[7, 20\]"),
        ("type", TypeError, "'kl': expected a tensor, got list"),
        ("nested", ValueError, "'kl': the part of sample 's0' has 0 tokens, got a row of 1"),
        ("pad_to", InvalidRequestError, "sample 2 has 40 tokens, more than pad_to"),
        ("negative", InvalidRequestError, "'kl': inner=.*bounds of at least 0"),
        ("slices", InvalidRequestError, r"'kl': inner=.*for elements of shape \[\]: expected at most 0 slices"),
        ("list", TypeError, "list is not supported here. Pass a TensorDict or a mapping of field names"),
        ("number as a name", ValueError, "field names must be non-empty strings, got 1"),
        ("meta device", TypeError, r"'kl': a torch.Tensor \(float32, on meta\) cannot be stored"),
        ("declared size", SchemaError, r"'declared'.*got .* inner shape \[5\], expected .* inner shape \[6\]"),
        ("other field", InvalidRequestError, "no_such_field"),
        ("whole", ValueError, "'kl': rank 1 has float32 jagged .*, but rank 0 has float32 dense"),
    ],
)
def test_parts_that_do_not_fit_are_refused_on_all_ranks(
    four: Ranks,
    server: Server,
    client: DataPlaneClient,
    partition: str,
    how: str,
    kind: type[Exception],
    text: str,
) -> None:
    meta = put(client, partition)
    got = unwrapped(four.run(fail, server.address, meta, how))
    for outcome, puts, _ in got:
        with pytest.raises(kind, match=text):
            raise outcome or AssertionError("nothing was raised")
        assert puts == 0
    assert len({str(fetched) for _, _, fetched in got}) == 1
    kl = client.get_samples(meta, partition, ["kl"])["kl"].unbind()
    assert [row.tolist() for row in kl] == [([1.0] * 20 + [2.0] * 20)[:length] for length in LENGTHS]


def write_stale(rank: int, address: str, stale: KVBatchMeta, fresh: KVBatchMeta) -> Exception | None:
    worker = worker_on(rank, "tp2 cp2", address)
    columns, parts = good(rank)
    raised = None
    try:
        worker._write_back_result_field(stale, {"kl": columns["kl"]}, result_key="kl", tq_field="kl", **parts)
    except Exception as error:
        raised = error
    worker._write_back_result_field(fresh, {"kl": columns["kl"]}, result_key="kl", tq_field="kl", **parts)
    worker.close_data_plane()
    return raised


def test_a_stale_sample_is_raised_on_all_ranks(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    stale = put(client, partition)
    client.clear_samples(stale.sample_ids, partition)
    fresh = put(client, partition)
    for raised in four.run(write_stale, server.address, stale, fresh):
        assert isinstance(raised, StaleSampleError), raised
    assert client.get_batch(fresh, ["kl"])["kl"].shape == (8, 40)


def come_late(rank: int, address: str, meta: KVBatchMeta, late: int) -> Exception | None:
    worker = worker_on(rank, "tp2 cp2", address)
    store = dist.distributed_c10d._get_default_store()
    columns, parts = good(rank)
    if rank == late:
        store.wait([f"{other} gave up" for other in range(4) if other != late])
    else:
        worker.fetch_timeout_s = 0.5
    raised = None
    try:
        worker._write_back(meta, columns, **parts)
    except Exception as error:
        raised = error
        store.set(f"{rank} gave up", "yes")
    worker.fetch_timeout_s = NEVER_S
    worker._write_back(meta, columns, **parts)
    worker._fetch(meta.with_fields(["kl"]), **parts)
    worker.close_data_plane()
    return raised


@pytest.mark.parametrize("late", [0, 3], ids=["leader", "sibling"])
def test_a_rank_that_comes_late(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str, late: int
) -> None:
    meta = put(client, partition)
    raised = four.run(come_late, server.address, meta, late)
    assert [type(error) for error in raised] == [CallTimeoutError] * 4, raised
    assert all("write-back through a replica group" in str(error) for error in raised)
    assert client.get_batch(meta, ["kl"])["kl"].shape == (8, 40)


def mix(rank: int, address: str, meta: KVBatchMeta, before: str) -> Any:
    """Rank 1 fetches while the others write back. before: it first makes a call in which it has no part."""
    worker = worker_on(rank, "tp2 cp2", address)
    columns, parts = good(rank)
    call: Callable[[], Any] = lambda: worker._write_back(meta, columns, **parts)  # noqa: E731
    if rank == 1:
        if before:
            worker._write_back(meta, columns)
        call = lambda: worker._fetch(meta)  # noqa: E731
    try:
        call()
    except Exception as error:
        worker._write_back(meta, columns, **parts)
        worker.close_data_plane()
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("before", ["", "write-back without parts"])
def test_a_fetch_of_one_rank_does_not_meet_a_write_back_of_the_others(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str, before: str
) -> None:
    for error in four.run(mix, server.address, put(client, partition), before):
        assert "make different calls" in str(error)


def break_a_part(rank: int, address: str, meta: KVBatchMeta) -> Any:
    """Placing the first part fails on the leader."""
    worker = worker_on(rank, "tp2 cp2", address)
    columns, parts = good(rank)
    if rank == 0:
        empty, JoinedField.empty = JoinedField.empty, out_of_memory  # type: ignore[method-assign]
    try:
        worker._write_back(meta, columns, **parts)
    except Exception as error:
        if rank == 0:
            JoinedField.empty = empty  # type: ignore[method-assign]
        worker._write_back(meta, columns, **parts)
        worker.close_data_plane()
        return error
    raise AssertionError("nothing was raised")


def out_of_memory(field: Any) -> torch.Tensor:
    raise MemoryError("no memory for the joined rows")


def test_a_leader_that_cannot_join_the_rows_keeps_no_sibling_waiting(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    for error in four.run(break_a_part, server.address, put(client, partition)):
        assert isinstance(error, MemoryError)
        assert "no memory for the joined rows" in str(error)
