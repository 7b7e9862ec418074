"""The worker mixin's micro-batches: those the driver shipped, and those a worker packs for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplane import BatchedDataDict, DataPlaneClient, KVBatchMeta, Server
from dataplane.core import schema
from tests.gloo import Ranks
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import alone, partition  # noqa: F401
from tests.workers.training.mixin_worker import LENGTHS, Worker, put, worker_on

pytestmark = pytest.mark.integration


def test_shipped_packing_metadata_is_trusted(alone: Worker) -> None:
    alone.cfg = {"sequence_packing": {"enabled": True}}
    info = {
        "micro_batch_indices": [[[0, 2], [2, 3]]],
        "micro_batch_lengths": [[10, 20]],
        "elem_counts_per_gb": [3],
    }
    meta = KVBatchMeta("train", "train", ["a", "b", "c"], extra_info=info)
    data = alone._attach_or_repack_pack_metadata(BatchedDataDict({"x": torch.ones(3)}), meta)
    assert data.micro_batch_indices == [[[0, 2], [2, 3]]]
    assert data.micro_batch_lengths == [[10, 20]]
    assert data.elem_counts_per_gb == [3]
    del meta.extra_info["micro_batch_lengths"]
    with pytest.raises(ValueError, match="lacks 'micro_batch_lengths'"):
        alone._attach_or_repack_pack_metadata(data, meta)


PACKED = {
    "sequence_packing": {
        "enabled": True,
        "algorithm": "first_fit_decreasing",
        "train_mb_tokens": 45,
        "logprob_mb_tokens": 100,
    }
}
DYNAMIC = {
    "dynamic_batching": {
        "enabled": True,
        "sequence_length_round": 4,
        "train_mb_tokens": 45,
        "logprob_mb_tokens": 160,
    }
}


def pack_locally(rank: int, address: str, meta: KVBatchMeta, cfg: dict[str, Any]) -> list[Any]:
    """The lengths of the micro-batches of each stage on this rank."""
    worker = worker_on(rank, "tp2", address)
    worker.cfg = cfg
    meta = meta.with_fields(["input_ids"])
    worker.get_logprobs_presharded(meta)
    worker.get_reference_policy_logprobs_presharded(meta)
    worker.train_presharded(meta, "loss")
    worker.begin_train_step_presharded("loss")
    worker.train_microbatch_presharded(meta)
    worker.close_data_plane()
    assert worker.forwarded is not None
    assert worker.referenced is not None
    assert worker.trained is not None
    batches = [worker.forwarded, worker.referenced, worker.trained[0], worker.step[1]]
    return [(batch.micro_batch_lengths, batch.micro_batch_indices, batch.elem_counts_per_gb) for batch in batches]


@pytest.mark.parametrize("cfg", [PACKED, DYNAMIC], ids=["packing", "dynamic"])
def test_what_the_driver_did_not_pack_a_worker_packs_with_the_budget_of_the_stage(
    cfg: dict[str, Any], pair: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    meta = put(client, partition)
    leader, sibling = pair.run(pack_locally, server.address, meta, cfg)
    if isinstance(leader, Exception):
        raise leader
    assert leader == sibling
    logprob, reference, train, in_parts = leader
    assert reference == logprob
    assert train == in_parts
    assert [len(lengths[0]) for lengths, _, _ in (logprob, train)] == ([1, 3] if cfg is PACKED else [2, 4])
    stored = client.get_batch(meta, ["input_ids", "prev_logprobs", "reference_policy_logprobs"], layout="jagged")
    ids = stored["input_ids"].values().float()
    assert stored["prev_logprobs"].values().equal(-ids), "each row to its own sample"
    assert stored["reference_policy_logprobs"].values().equal(ids), "each row to its own sample"


def test_packing_again_keeps_global_batches(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    alone.cfg = PACKED
    meta = put(client, partition).with_fields(["input_ids"])
    meta.extra_info[schema.ELEM_COUNTS_PER_GB] = [4, 4]
    alone.train_presharded(meta, "loss", gbs=4)
    assert alone.trained is not None
    data = alone.trained[0]
    assert data.elem_counts_per_gb == [4, 4]
    assert [sum(lengths) for lengths in data.micro_batch_lengths] == [sum(LENGTHS[:4]), sum(LENGTHS[4:])]
    first = data.get_batch(0).make_microbatch_iterator_for_packable_sequences()
    assert sum(len(part["input_ids"]) for part in first) == 4
    meta.extra_info[schema.ELEM_COUNTS_PER_GB] = [5, 3]
    with pytest.raises(ValueError, match="cannot be packed again"):
        alone.train_presharded(meta, "loss")


def test_lengths_that_the_meta_does_not_know_are_read_from_the_batch(
    alone: Worker, client: DataPlaneClient, partition: str
) -> None:
    alone.cfg = PACKED
    known = put(client, partition)
    client.put_samples(known, partition, {"input_lengths": torch.tensor(LENGTHS)})
    meta = KVBatchMeta(partition, "train", known.sample_ids, fields=["input_ids", "input_lengths"])
    alone.train_presharded(meta, "loss")
    assert alone.trained is not None
    assert sum(alone.trained[0].micro_batch_lengths[0]) == sum(LENGTHS)
    with pytest.raises(KeyError, match="'input_lengths'"):
        alone.train_presharded(meta.with_fields(["input_ids"]), "loss")
    with pytest.raises(ValueError, match="no sequence_lengths"):
        alone.get_logprobs_presharded(meta)


def test_repacking_a_batch(alone: Worker) -> None:
    data: BatchedDataDict[Any] = BatchedDataDict({"input_lengths": torch.tensor([40, 5, 30, 25])})
    alone.cfg = {}
    assert alone._apply_packing_prep(data) is data
    alone.cfg = PACKED
    assert alone._apply_packing_prep(data).micro_batch_lengths == [[45, 30, 25]]
    assert alone._apply_packing_prep(data, stage="logprob").micro_batch_lengths == [[100]]
    for task, bins in (("train", 3), ("prev_lp", 1), ("ref_lp", 1), (None, 3)):
        meta = KVBatchMeta("train", task, ["a", "b", "c", "d"])
        packed = alone._attach_or_repack_pack_metadata(data, meta)
        assert packed.get_microbatch_iterator_for_packable_sequences_len()[0] == bins
