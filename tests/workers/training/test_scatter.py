"""Siblings that need different parts of the rows: each gets its own part and nothing else, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataplane import ContextParallel, DataPlaneClient, KVBatchMeta, Server
from dataplane.data.row_parts import RowParts, row_parts
from dataplane.errors import InvalidRequestError, StorageUnitError
from tests.gloo import Ranks
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import partition  # noqa: F401
from tests.workers.training.mixin_worker import FIELDS, LENGTHS, fingerprints, put, worker_on
from workers.training.replica_fetch import FetchPolicy
from workers.training.row_fetch import arguments, encoded

pytestmark = pytest.mark.integration

STAGES = {0: slice(0, 1), 1: slice(1, None)}
PADDED = {"pad_value_dict": {"input_ids": 99}}


def parts_of(rank: int, kind: str) -> dict[str, Any]:
    """What rank 2 * context + pipeline stage needs."""
    context, stage = divmod(rank, 2)
    match kind:
        case "cp2 pp2":
            return {"tokens": ContextParallel(rank=context, size=2), "inner": {"routed_experts": STAGES[stage]}}
        case "contiguous":
            return {"tokens": ContextParallel(rank=context, size=2, zigzag=False)}
        case "stages":
            return {"inner": {"routed_experts": [slice(None), slice(stage, stage + 1)]}}
        case "ranges":
            return {"tokens": [(rank, rank + length) for length in range(len(LENGTHS))]}
        case "leader whole":
            return {} if rank == 0 else {"tokens": (0, 4)}
    return {"tokens": (1, 5)}  # the same for all


def validated(parts: dict[str, Any]) -> RowParts | None:
    return row_parts(parts.get("tokens"), parts.get("inner"), len(LENGTHS), FIELDS)


def fetch(rank: int, address: str, meta: KVBatchMeta, kind: str, kwargs: dict[str, Any]) -> Any:
    worker = worker_on(rank, "tp2 cp2", address)
    reads: list[Any] = []
    client = worker._require_dp_client()
    get_batch = client.get_batch

    def counted(*args: Any, **kwargs: Any) -> Any:
        reads.append(kwargs)
        return get_batch(*args, **kwargs)

    client.get_batch = counted  # type: ignore[method-assign]
    batch = worker._fetch(meta, **parts_of(rank, kind), **kwargs)
    received = worker._replicas.siblings.bytes["payload"] if worker._replicas is not None else 0
    worker.close_data_plane()
    return fingerprints(batch), len(reads), received


def expected_part(client: DataPlaneClient, meta: KVBatchMeta, rank: int, kind: str, layout: str) -> Any:
    parts = parts_of(rank, kind)
    if layout == "jagged":
        return client.get_batch(meta, layout="jagged", **parts)
    tokens = parts.get("tokens")
    if isinstance(tokens, ContextParallel):
        tokens = ContextParallel(rank=tokens.rank, size=tokens.size, zigzag=tokens.zigzag, pad_to=64)
    pad_to = 64 if tokens is None else 0
    return client.get_batch(meta, pad_to_seqlen=pad_to, **PADDED, **{**parts, "tokens": tokens})


@pytest.mark.parametrize("policy", ["auto", "leader_broadcast", "independent"])
@pytest.mark.parametrize("kind", ["cp2 pp2", "contiguous", "stages", "ranges", "leader whole", "same"])
def test_each_rank_gets_its_part(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str, kind: str, policy: FetchPolicy
) -> None:
    meta = put(client, partition)
    for layout in ("padded", "jagged"):
        got = four.run(fetch, server.address, meta, kind, {"fetch_policy": policy, "layout": layout})
        for rank, outcome in enumerate(got):
            if isinstance(outcome, Exception):
                raise outcome
            prints, reads, _ = outcome
            assert prints == fingerprints(expected_part(client, meta, rank, kind, layout)), (rank, layout)
            assert list(prints) == FIELDS
            different = {encoded(validated(parts_of(each, kind))) for each in range(4)}
            assert reads == (1 if policy == "independent" else len(different) if rank == 0 else 0)


def test_a_sibling_receives_only_the_bytes_of_its_part(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    meta = put(client, partition).with_fields(["routed_experts"])
    got = four.run(fetch, server.address, meta, "cp2 pp2", {"layout": "jagged"})
    sizes = []
    for rank in range(4):
        part = client.get_batch(meta, layout="jagged", **parts_of(rank, "cp2 pp2"))["routed_experts"]
        sizes.append(part.values().nbytes)
    assert [received for _, _, received in got[1:]] == sizes[1:]
    assert got[0][2] == sum(sizes[1:]), "what the leader sent"


def fail(rank: int, address: str, meta: KVBatchMeta, who: str) -> Any:
    worker = worker_on(rank, "tp2 cp2", address)
    parts = parts_of(rank, "cp2 pp2")
    if who == "sibling" and rank == 2:
        parts = {"inner": {"no_such_field": slice(1)}}
    if who == "leader" and rank == 0:
        client = worker._require_dp_client()
        get_batch, reads = client.get_batch, []

        def third_fails(*args: Any, **kwargs: Any) -> Any:
            reads.append(1)
            if len(reads) == 3:
                raise StorageUnitError(unit=7, endpoint="here", why="it was unplugged")
            return get_batch(*args, **kwargs)

        client.get_batch = third_fails  # type: ignore[method-assign]
    outcomes: list[Any] = []
    for wanted in (parts, parts_of(rank, "cp2 pp2")):  # the group is good for another fetch
        try:
            outcomes.append(fingerprints(worker._fetch(meta, layout="jagged", **wanted)))
        except Exception as error:
            outcomes.append(error)
        if rank == 0 and who == "leader":
            client.get_batch = get_batch  # type: ignore[method-assign]
    worker.close_data_plane()
    return outcomes


@pytest.mark.parametrize(
    ("who", "kind", "text"),
    [
        ("leader", StorageUnitError, "it was unplugged"),
        ("sibling", InvalidRequestError, "no_such_field"),
    ],
)
def test_if_one_part_fails_all_ranks_raise_and_can_fetch_again(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str, who: str, kind: type[Exception], text: str
) -> None:
    meta = put(client, partition)
    for rank, (first, second) in enumerate(four.run(fail, server.address, meta, who)):
        assert isinstance(first, kind), first
        assert text in str(first)
        assert second == fingerprints(client.get_batch(meta, layout="jagged", **parts_of(rank, "cp2 pp2")))


def test_what_a_rank_wants_survives_its_encoding() -> None:
    for tokens in (None, (2, 5), [(0, 1), (3, 4)], ContextParallel(rank=1, size=2, zigzag=False, pad_to=8)):
        for inner in ({}, {"x": slice(None, np.int64(4), 2), "a": [slice(1), slice(None)]}):
            parts = row_parts(tokens, inner, 2, ["a", "x"])
            again = arguments(encoded(parts))
            back = row_parts(again.get("tokens"), again.get("inner"), 2, ["a", "x"])
            assert encoded(back) == encoded(parts)
            assert (back is None) == (parts is None)


def test_lengths_of_parts() -> None:
    for tokens in (None, (2, 5), [(0, 1), (3, 40), (9, 9)], ContextParallel(rank=1, size=2)):
        parts = row_parts(tokens, {"x": slice(1)}, 3, ["x"])
        assert parts is not None
        rows = [torch.arange(length) for length in (3, 8, 20)]
        cut = parts.lengths([3, 8, 20])
        if tokens is None:
            assert cut == [3, 8, 20]
        elif isinstance(tokens, ContextParallel):
            assert cut == [2, 4, 10]  # padded to 4, 8 and 20
        else:
            ranges = [tokens] * 3 if isinstance(tokens, tuple) else tokens
            assert cut == [len(row[start:stop]) for row, (start, stop) in zip(rows, ranges, strict=True)]
