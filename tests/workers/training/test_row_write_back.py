"""Siblings that write parts of rows: the leader stores the joined rows in one put, bit for bit, or all ranks raise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataplane import ContextParallel, DataPlaneClient, KVBatchMeta, Server
from dataplane.data.row_parts import row_parts
from dataplane.errors import CallTimeoutError, InvalidRequestError, StaleSampleError
from tests.gloo import Ranks
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import alone, partition  # noqa: F401
from tests.workers.training.mixin_worker import LENGTHS, NEVER_S, Worker, fingerprints, put, rows, worker_on
from workers.training.row_fetch import encoded
from workers.training.row_join import FieldPart, JoinedField, join_plan

pytestmark = pytest.mark.integration

STAGES = {0: slice(0, 1), 1: slice(1, None)}


def parts_of(rank: int, kind: str) -> dict[str, Any]:
    """What each of 4 ranks has of "logprobs" [tokens] and "routed_experts" [tokens, 2, 3]."""
    high, low = divmod(rank, 2)
    match kind:
        case "cp2 tp2":
            return {"tokens": ContextParallel(rank=high, size=2)}
        case "cp2 pp2":
            return {"tokens": ContextParallel(rank=high, size=2), "inner": {"routed_experts": STAGES[low]}}
        case "cp2 contiguous, steps":
            slices = {"routed_experts": [slice(None), slice(low, None, 2)]}
            return {"tokens": ContextParallel(rank=high, size=2, zigzag=False), "inner": slices}
        case "cp4":
            return {"tokens": ContextParallel(rank=rank, size=4)}
        case "cp4 pad_to":
            return {"tokens": ContextParallel(rank=rank, size=4, pad_to=80)}
        case "ranges":
            bounds = [0, 2, 7, 20, 100]
            return {"tokens": (bounds[rank], bounds[rank + 1])}
        case "stages":
            return {"inner": {"routed_experts": [slice(high, high + 1), slice(low * 2, low * 2 + 2)]}}
    return {"tokens": [(0, length) for length in LENGTHS]}  # all ranks have all


KINDS = ["cp2 tp2", "cp2 pp2", "cp2 contiguous, steps", "cp4", "cp4 pad_to", "ranges", "stages", "copies"]


def round_trip(rank: int, address: str, meta: KVBatchMeta, kind: str, layout: Any) -> tuple[int, int]:
    """Fetch a part and write it back under other names. Return the puts and the bytes of the transfer."""
    worker = worker_on(rank, "tp2 cp2", address)
    puts = counted_puts(worker)
    parts = parts_of(rank, kind)
    names = {"input_ids": "ids", "generation_logprobs": "logprobs", "routed_experts": "experts", "token_mask": "mask"}
    batch = worker._fetch(meta, layout=layout, **parts)
    assert worker._replicas is not None
    before = worker._replicas.siblings.bytes["payload"]
    inner = {names[name]: slices for name, slices in parts.get("inner", {}).items()}
    columns = {new: batch[name] for name, new in names.items()}
    worker._write_back(meta, columns, tokens=parts.get("tokens"), inner=inner)
    worker.close_data_plane()
    return len(puts), worker._replicas.siblings.bytes["payload"] - before


def counted_puts(worker: Worker) -> list[Any]:
    """Return a list to which each put of the worker adds an entry."""
    client, puts = worker._require_dp_client(), list[Any]()
    put_samples = client.put_samples

    def counted(*args: Any, **kwargs: Any) -> Any:
        puts.append(kwargs)
        return put_samples(*args, **kwargs)

    client.put_samples = counted  # type: ignore[method-assign]
    return puts


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_fetched_and_written_back_are_the_rows(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str, kind: str, layout: str
) -> None:
    names = ["input_ids", "generation_logprobs", "routed_experts", "token_mask"]
    meta = put(client, partition).with_fields(names)
    got = unwrapped(four.run(round_trip, server.address, meta, kind, layout))
    assert [puts for puts, _ in got] == [1, 0, 0, 0], "only the leader writes, in one put"
    original = client.get_batch(meta, layout="jagged")
    stored = client.get_batch(meta, ["ids", "logprobs", "experts", "mask"], layout="jagged")
    assert list(fingerprints(stored).values()) == [fingerprints(original)[name] for name in names]
    own = client.get_batch(meta, layout="jagged", **wanted(meta, 0, kind, layout))
    total, of_leader = (sum(batch[name].values().nbytes for name in names) for batch in (original, own))
    assert got[0][1] == total - of_leader, "each part but the leader's crosses once"
    assert sum(sent for _, sent in got[1:]) == got[0][1]


def wanted(meta: KVBatchMeta, rank: int, kind: str, layout: str) -> dict[str, Any]:
    """The arguments of `get_batch` for a part: padded batches are cut at the pad length."""
    parts = parts_of(rank, kind)
    tokens = parts.get("tokens")
    if isinstance(tokens, ContextParallel) and layout == "padded" and not tokens.pad_to:
        tokens = ContextParallel(rank=tokens.rank, size=tokens.size, zigzag=tokens.zigzag, pad_to=64)
    return {**parts, "tokens": tokens}


def unwrapped(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


# --- random parts ---------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint8, torch.float16]


def random_case(seed: int) -> tuple[list[int], list[dict[str, Any]], dict[str, list[torch.Tensor]]]:
    """Lengths, the parts of each of 4 ranks, and whole rows of "flat" [tokens] and "deep" [tokens, a, b]."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [chance.choice([0, 1, 2, 3, 7, 8, 9, 40]) for _ in range(chance.randint(1, 6))]
    first, second = chance.randint(1, 5), chance.randint(1, 4)
    size = chance.choice([1, 2, 4])
    zigzag, pad_to = chance.random() < 0.5, chance.choice([0, 48])
    stages = chance.choice([each for each in (1, 2, 4) if each * size <= 4])
    if first < stages:
        stages = 1
    step = chance.random() < 0.5
    parts = []
    for rank in range(4):
        context, stage = rank // stages % size, rank % stages
        bounds = [first * each // stages for each in range(stages + 1)]
        taken = slice(stage, first, stages) if step else slice(bounds[stage], bounds[stage + 1])
        tokens = ContextParallel(rank=context, size=size, zigzag=zigzag, pad_to=pad_to)
        parts.append({"tokens": tokens, "inner": {"deep": taken} if stages > 1 else None})
    columns = {
        "flat": rows(lengths, chance.choice(DTYPES)),
        "deep": rows(lengths, chance.choice(DTYPES), first, second),
    }
    return lengths, parts, columns


def cut(row: torch.Tensor, tokens: ContextParallel) -> torch.Tensor:
    """The tokens of a rank, the plain way."""
    chunk = tokens.pad_to // tokens.chunks or -(-len(row) // tokens.chunks)
    numbers = [tokens.rank, tokens.chunks - 1 - tokens.rank] if tokens.zigzag else [tokens.rank]
    return torch.cat([row[number * chunk : (number + 1) * chunk] for number in numbers])


def write_random(rank: int, address: str, metas: list[KVBatchMeta], seeds: range) -> int:
    worker = worker_on(rank, "tp2 cp2", address)
    puts = counted_puts(worker)
    for meta, seed in zip(metas, seeds, strict=True):
        _, parts, columns = random_case(seed)
        tokens, inner = parts[rank]["tokens"], parts[rank]["inner"]
        taken = {"deep": inner["deep"] if inner else slice(None), "flat": None}
        fields: dict[str, torch.Tensor] = {}
        for name, whole in columns.items():
            mine = [cut(row, tokens) for row in whole]
            mine = [row[:, taken[name]] if taken[name] else row for row in mine]
            width = tokens.pad_to // tokens.size or max(map(len, mine))
            nested = torch.nested.nested_tensor(mine, layout=torch.jagged)
            if seed % 2:
                fields[name] = nested
                continue
            fields[name] = torch.ones(len(mine), width, *mine[0].shape[1:]).to(mine[0].dtype)
            for number, row in enumerate(mine):
                fields[name][number, : len(row)] = row
        fields["score"] = torch.arange(meta.size)  # whole, and equal on all ranks
        worker._write_back(meta, fields, tokens=tokens, inner=inner)
    worker.close_data_plane()
    return len(puts)


def test_random_parts_equal_a_write_of_whole_rows(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    seeds = range(60)
    metas = []
    for seed in seeds:
        lengths, _, _ = random_case(seed)
        name = f"{partition}-{seed}"
        client.register_partition(name, ["id"], None, [])
        ids = [f"s{number}" for number in range(len(lengths))]
        meta = client.put_samples(ids, name, {"id": torch.arange(len(lengths))})
        metas.append(
            KVBatchMeta(name, "train", ids, ["id"], sequence_lengths=lengths).with_handles(*(meta.handles or ()))
        )
    assert unwrapped(four.run(write_random, server.address, metas, seeds)) == [len(seeds), 0, 0, 0]
    for meta, seed in zip(metas, seeds, strict=True):
        _, _, columns = random_case(seed)
        stored = client.get_batch(meta, ["flat", "deep", "score"], layout="jagged")
        for name, whole in columns.items():
            values = torch.cat(whole)
            assert stored[name].dtype == values.dtype
            assert stored[name].offsets().diff().tolist() == meta.sequence_lengths
            assert stored[name].values().contiguous().view(torch.uint8).equal(values.view(torch.uint8)), (seed, name)
        assert stored["score"].tolist() == list(range(meta.size))
        client.clear_samples(None, meta.partition_id)


# --- failures -------------------------------------------------------------------------------------------------

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


def mix(rank: int, address: str, meta: KVBatchMeta) -> Any:
    """Rank 1 fetches while the others write back."""
    worker = worker_on(rank, "tp2 cp2", address)
    columns, parts = good(rank)
    call: Callable[[], Any] = lambda: worker._write_back(meta, columns, **parts)  # noqa: E731
    if rank == 1:
        call = lambda: worker._fetch(meta)  # noqa: E731
    try:
        call()
    except Exception as error:
        worker._write_back(meta, columns, **parts)
        worker.close_data_plane()
        return error
    raise AssertionError("nothing was raised")


def test_a_fetch_of_one_rank_does_not_meet_a_write_back_of_the_others(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    for error in four.run(mix, server.address, put(client, partition)):
        assert "make different calls" in str(error)


# --- one rank -------------------------------------------------------------------------------------------------


def test_a_rank_without_siblings_must_have_whole_rows(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    whole = ContextParallel(rank=0, size=1)
    batch = alone._fetch(meta.with_fields(["generation_logprobs", "routed_experts"]), tokens=whole)
    columns = {"logprobs": batch["generation_logprobs"], "experts": batch["routed_experts"]}
    alone._write_back(meta, columns, tokens=whole, inner={"experts": slice(0, 2)})
    stored = client.get_batch(meta, ["logprobs", "experts", "generation_logprobs", "routed_experts"], layout="jagged")
    prints = list(fingerprints(stored).values())
    assert prints[:2] == prints[2:]
    with pytest.raises(ValueError, match="'logprobs': no rank has token 3 of sample 's0'"):
        alone._write_back(meta, {"logprobs": batch["generation_logprobs"][:, :3]}, tokens=(0, 3))
    alone.coords = {"tensor_parallel": 1}
    alone._write_back(meta, {"logprobs": batch["generation_logprobs"][:, :3]}, tokens=(0, 3))  # does not write


def test_tokens_need_lengths(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    unknown = KVBatchMeta(partition, "train", meta.sample_ids, fields=meta.fields)
    with pytest.raises(InvalidRequestError, match="'kl': tokens need a meta with sequence_lengths"):
        alone._write_back(unknown, {"kl": torch.zeros(8, 40)}, tokens=(0, 40))


def test_slices_of_dense_fields(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    hidden = torch.randn(8, 5)
    alone._write_back(meta, {"hidden": hidden}, inner={"hidden": slice(None)})
    assert client.get_batch(meta, ["hidden"])["hidden"].equal(hidden)
    with pytest.raises(ValueError, match=r"'hidden': no rank has inner index \[0\] of sample 's0'"):
        alone._write_back(meta, {"hidden": hidden}, inner={"hidden": slice(1, None)})


def test_copies_are_taken_from_the_leader_wherever_it_is() -> None:
    meta = KVBatchMeta("p", "train", ["a"], sequence_lengths=[4])
    for leader, senders in ((0, [0, 2]), (1, [1, 2]), (3, [3, 0])):
        ranges = [(0, 2), (0, 2), (2, 4), (2, 4)]
        described = [
            [FieldPart("x", encoded(row_parts(bounds, None, 1, ["x"])), "int64", (), b"")] for bounds in ranges
        ]
        (field,) = join_plan(described, leader, meta)
        assert [placed.rank for placed in field.parts] == senders


def test_no_samples(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition).slice(0, 0)
    alone._write_back(meta, {"kl": torch.zeros(0, 0), "score": torch.zeros(0)}, tokens=(0, 3))


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
