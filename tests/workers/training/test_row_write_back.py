"""Siblings that write parts of rows: the leader stores the joined rows in one put, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dataplane import ContextParallel, DataPlaneClient, KVBatchMeta, Server
from tests.gloo import Ranks
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import partition  # noqa: F401
from tests.workers.training.mixin_worker import (
    LENGTHS,
    counted_puts,
    fingerprints,
    put,
    rows,
    unwrapped,
    worker_on,
)

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


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_no_samples(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str, kind: str, layout: str
) -> None:
    names = ["input_ids", "generation_logprobs", "routed_experts", "token_mask"]
    meta = put(client, partition).with_fields(names).slice(0, 0)
    assert len(unwrapped(four.run(round_trip, server.address, meta, kind, layout))) == 4


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


def round_trip_not_aligned(rank: int, address: str, meta: KVBatchMeta) -> torch.Size:
    worker = worker_on(rank, "tp2 cp2", address)
    cp = ContextParallel(rank=rank // 2, size=2)
    batch = worker._fetch(meta, dp_aligned_seq_len=False, tokens=cp)
    worker._write_back(meta, {"logprobs": batch["generation_logprobs"]}, dp_aligned_seq_len=False, tokens=cp)
    worker._write_back_result_field(
        meta, {"ids": batch["input_ids"]}, result_key="ids", tq_field="ids", dp_aligned_seq_len=False, tokens=cp
    )
    worker.close_data_plane()
    return batch["input_ids"].shape


def test_parts_of_a_fetch_that_is_not_aligned_are_the_rows(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    names = ["generation_logprobs", "input_ids"]
    meta = put(client, partition, pad_to=40).with_fields(names)  # cut at 40 tokens, the parts are as wide
    shapes = unwrapped(four.run(round_trip_not_aligned, server.address, meta))
    assert shapes == [(8, 20)] * 4
    original, stored = (client.get_batch(meta, each, layout="jagged") for each in (names, ["logprobs", "ids"]))
    assert list(fingerprints(stored).values()) == list(fingerprints(original).values())


def write_of_some_ranks(rank: int, address: str, meta: KVBatchMeta) -> list[int]:
    """Ranks 0 and 1, the leader among them, have no results: those of the last stage are on ranks 2 and 3."""
    worker = worker_on(rank, "tp2 cp2", address)
    puts = counted_puts(worker)
    parts = {"tokens": ContextParallel(rank=rank % 2, size=2), "inner": {"hidden": slice(0, 3)}}
    result = {"values": torch.ones(8, 32, 3)} if rank >= 2 else {}
    worker._write_back(meta, {"hidden": result["values"]} if result else {}, **parts)
    worker._write_back_result_field(meta, result, result_key="values", tq_field="hidden", **parts)
    worker._write_back(meta, {}, **parts)
    worker._write_back_result_field(meta, {}, result_key="values", tq_field="hidden", **parts)
    worker.close_data_plane()
    return len(puts)


def test_ranks_without_results(four: Ranks, server: Server, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    puts = unwrapped(four.run(write_of_some_ranks, server.address, meta))
    assert puts == [4, 0, 0, 0]
    hidden = client.get_batch(meta, ["hidden"], layout="jagged")["hidden"]
    assert hidden.offsets().diff().tolist() == LENGTHS
    assert hidden.values().equal(torch.ones(sum(LENGTHS), 3))


def wanted(meta: KVBatchMeta, rank: int, kind: str, layout: str) -> dict[str, Any]:
    """The arguments of `get_batch` for a part: padded batches are cut at the pad length."""
    parts = parts_of(rank, kind)
    tokens = parts.get("tokens")
    if isinstance(tokens, ContextParallel) and layout == "padded" and not tokens.pad_to:
        tokens = ContextParallel(rank=tokens.rank, size=tokens.size, zigzag=tokens.zigzag, pad_to=64)
    return {**parts, "tokens": tokens}


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
