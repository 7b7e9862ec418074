"""Siblings that need different parts of the rows: each reads its own part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplane import ContextParallel, DataPlaneClient, KVBatchMeta, Server, connect, serve
from dataplane.errors import InvalidRequestError
from tests.gloo import Ranks
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import alone, partition  # noqa: F401
from tests.workers.training.mixin_worker import FIELDS, LENGTHS, Worker, fingerprints, put, worker_on
from workers.training.replica_group import FetchPolicy, ReplicaGroupError

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
    return {"tokens": (1, 5)}  # the same for all


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
    worker.close_data_plane()
    return fingerprints(batch), len(reads)


def expected_part(client: DataPlaneClient, meta: KVBatchMeta, rank: int, kind: str, layout: str) -> Any:
    parts = parts_of(rank, kind)
    if layout == "jagged":
        return client.get_batch(meta, layout="jagged", **parts)
    tokens = parts.get("tokens")
    if isinstance(tokens, ContextParallel):
        tokens = ContextParallel(rank=tokens.rank, size=tokens.size, zigzag=tokens.zigzag, pad_to=64)
    pad_to = 64 if tokens is None else 0
    return client.get_batch(meta, pad_to_seqlen=pad_to, **PADDED, **{**parts, "tokens": tokens})


@pytest.mark.parametrize("policy", ["auto", "independent"])
@pytest.mark.parametrize("kind", ["cp2 pp2", "contiguous", "stages", "ranges", "same"])
def test_each_rank_gets_its_part(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str, kind: str, policy: FetchPolicy
) -> None:
    meta = put(client, partition)
    for layout in ("padded", "jagged"):
        got = four.run(fetch, server.address, meta, kind, {"fetch_policy": policy, "layout": layout})
        for rank, outcome in enumerate(got):
            if isinstance(outcome, Exception):
                raise outcome
            prints, reads = outcome
            assert prints == fingerprints(expected_part(client, meta, rank, kind, layout)), (rank, layout)
            assert list(prints) == FIELDS
            assert reads == 1


@pytest.mark.parametrize("remote", [False, True], ids=["shared memory", "remote"])
def test_only_the_bytes_of_a_part_leave_a_unit(remote: bool) -> None:
    """A part of a row is a hundredth of it. Over shared memory the unit sends nothing."""
    with (
        serve({"capacity_bytes": 64 << 20}) as server,
        connect(server.address, force_remote=remote) as client,
    ):
        client.register_partition("train", ["experts"], None, [])
        rows = [torch.arange(10_000 * 47).to(torch.int16).reshape(10_000, 47) for _ in range(2)]
        meta = client.put_samples(["a", "b"], "train", {"experts": rows})
        sent = server._units[0]._counts
        before = sent.read_bytes
        part = client.get_batch(meta, ["experts"], layout="jagged", tokens=(5, 105))["experts"]
        assert sent.read_bytes - before == (part.values().nbytes if remote else 0)
        assert part.unbind()[1].equal(rows[1][5:105])


def fetch_whole_and_part(rank: int, address: str, meta: KVBatchMeta) -> Exception:
    worker = worker_on(rank, "tp2 cp2", address)
    try:
        worker._fetch(meta, tokens=None if rank == 0 else (0, 4))
    except Exception as error:
        return error
    finally:
        worker.close_data_plane()
    raise AssertionError("the ranks disagreed and nobody noticed")


def test_whole_rows_for_one_rank_and_parts_for_others_are_refused_on_all(
    four: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    for error in four.run(fetch_whole_and_part, server.address, put(client, partition)):
        assert isinstance(error, ReplicaGroupError), error
        assert "different policies" in str(error)


def test_parts_are_not_broadcast(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    with pytest.raises(ValueError, match="fetch_policy='leader_broadcast' sends whole rows"):
        alone._fetch(put(client, partition), fetch_policy="leader_broadcast", tokens=(0, 4))


@pytest.mark.parametrize(("pad_to", "why"), [(66, "multiple of the 4 chunks"), (36, "sample 2 has 40 tokens")])
def test_a_pad_length_of_the_driver_that_does_not_fit_is_named(
    alone: Worker, client: DataPlaneClient, partition: str, pad_to: int, why: str
) -> None:
    meta = put(client, partition, pad_to=pad_to).with_fields(["input_ids"])
    cp = ContextParallel(rank=0, size=2)
    message = f"global_forward_pad_seqlen={pad_to}, which the driver has set .*{why}.*pad_to_multiple"
    with pytest.raises(InvalidRequestError, match=message):
        alone._fetch(meta, tokens=cp)
    assert alone._fetch(meta, tokens=cp, dp_aligned_seq_len=False)["input_ids"].shape == (8, 20)
    assert alone._fetch(meta, tokens=ContextParallel(rank=0, size=2, pad_to=48))["input_ids"].shape == (8, 24)


def test_slices_are_cut_like_those_of_python(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition).with_fields(["routed_experts"])
    for slices, layers in ((slice(0, 10**30), 2), (slice(1, None, 1), 1), (slice(10**30, None), 0)):
        experts = alone._fetch(meta, inner={"routed_experts": slices})["routed_experts"]
        assert experts.shape == (8, 64, layers, 3)
