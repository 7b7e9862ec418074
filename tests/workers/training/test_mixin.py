"""The worker mixin: fetch under every policy on real Gloo ranks and a real service, write-back, entrypoints."""

from __future__ import annotations

import os
import signal
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from dataplane import BatchedDataDict, DataPlaneClient, FieldSpec, KVBatchMeta, Server
from dataplane.core import failpoints, schema
from dataplane.errors import FieldNotProducedError, InvalidRequestError, ServiceUnavailableError, StaleSampleError
from tests.gloo import RankDied, Ranks, counted_collectives
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import alone, partition  # noqa: F401
from tests.workers.training.mixin_worker import (
    FIELDS,
    LAYOUTS,
    LENGTHS,
    Worker,
    fingerprints,
    put,
    rows,
    shards,
    worker_on,
)
from workers.placement.sharding import REPLICATED_AXES
from workers.training.mixin import PolicyWorker, TQWorkerMixin
from workers.training.policy import FORWARD_FIELDS, forward_fields
from workers.training.replica_group import FetchPolicy, ReplicaGroupError, ReplicaLostError

pytestmark = pytest.mark.integration


# --- fetch ----------------------------------------------------------------------------------------------------


def fetch(rank: int, layout: str, address: str, metas: dict[int, KVBatchMeta], kwargs: dict[str, Any]) -> Any:
    worker = worker_on(rank, layout, address)
    batch = worker._fetch(metas[rank], **kwargs)
    worker.close_data_plane()
    return fingerprints(batch), list(batch["input_ids"].shape) if kwargs.get("layout") != "jagged" else None


@pytest.mark.parametrize("policy", ["auto", "independent", "leader_broadcast"])
@pytest.mark.parametrize("layout", ["tp2", "dp2 tp2", "tp2 cp2", "pp2 dp1 tp2"])
def test_all_siblings_end_bit_equal(
    layout: str, policy: FetchPolicy, four: Ranks, pair: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    metas = shards(put(client, partition), layout)
    ranks = pair if len(metas) == 2 else four
    got = ranks.run(fetch, layout, server.address, metas, {"fetch_policy": policy})
    for rank, outcome in enumerate(got):
        if isinstance(outcome, Exception):
            raise outcome
        prints, shape = outcome
        expected = client.get_batch(metas[rank], pad_value_dict={"input_ids": 99}, pad_to_seqlen=64)
        assert prints == fingerprints(expected)
        assert list(prints) == FIELDS
        assert shape == [metas[rank].size, 64]


@pytest.mark.parametrize(
    ("kwargs", "arguments"),
    [
        ({"dp_aligned_seq_len": False}, {"pad_to_seqlen": 0, "pad_value_dict": {"input_ids": 99}}),
        ({"layout": "jagged"}, {"layout": "jagged"}),
    ],
    ids=["local padding", "jagged"],
)
def test_other_shapes(
    kwargs: dict[str, Any],
    arguments: dict[str, Any],
    four: Ranks,
    server: Server,
    client: DataPlaneClient,
    partition: str,
) -> None:
    metas = shards(put(client, partition), "dp2 tp2")
    for rank, (prints, _) in enumerate(four.run(fetch, "dp2 tp2", server.address, metas, kwargs)):
        assert prints == fingerprints(client.get_batch(metas[rank], **arguments))


def fetch_patches(rank: int, address: str, meta: KVBatchMeta) -> list[int]:
    worker = worker_on(rank, "tp2", address)
    batch = worker._fetch(meta)
    worker.close_data_plane()
    return list(batch["patches"].shape)


def test_images_without_a_per_token_column_are_padded_to_their_own_longest_row(
    pair: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    meta = put(client, partition).with_fields(["patches"])
    assert pair.run(fetch_patches, server.address, meta) == [[8, 72, 4]] * 2


def fetch_alone(rank: int, address: str, meta: KVBatchMeta) -> list[str]:
    """A group of one rank is no group, and no collective runs."""
    worker = worker_on(rank, "dp2", address)
    worker.group = [dist.new_group([0]), dist.new_group([1])][rank]
    together = [worker._fetch(meta, fetch_policy=policy) for policy in ("auto", "leader_broadcast", "independent")]
    assert fingerprints(together[0]) == fingerprints(together[1]) == fingerprints(together[2])
    worker.group = None
    worker._fetch(meta, fetch_policy="independent")
    try:
        worker._fetch(meta, fetch_policy="leader_broadcast")
    except ValueError as error:
        worker.close_data_plane()
        return [str(error)]
    raise AssertionError("a broadcast without siblings")


def test_no_siblings(pair: Ranks, server: Server, client: DataPlaneClient, partition: str) -> None:
    for messages in pair.run(fetch_alone, server.address, put(client, partition)):
        assert "needs a replica group" in messages[0]


def count_reads(rank: int, address: str, meta: KVBatchMeta) -> tuple[int, int]:
    worker = worker_on(rank, "tp2", address)
    client = worker._require_dp_client()
    reads = []
    original = client.get_batch
    client.get_batch = lambda *args, **kwargs: reads.append(1) or original(*args, **kwargs)  # type: ignore[method-assign, func-returns-value]
    with counted_collectives() as counts:
        for _ in range(3):
            worker._fetch(meta, preprocess=lambda worker, batch: BatchedDataDict({**batch, "who": batch["dense"] + 1}))
    worker.close_data_plane()
    return len(reads), counts.broadcasts


def test_only_the_leader_reads(pair: Ranks, server: Server, client: DataPlaneClient, partition: str) -> None:
    assert pair.run(count_reads, server.address, put(client, partition)) == [(3, 3), (0, 3)]


def broadcast_bytes(rank: int, address: str, meta: KVBatchMeta) -> int:
    worker = worker_on(rank, "tp2", address)
    with counted_collectives() as counts:
        worker._fetch(meta)
    worker.close_data_plane()
    return counts.nbytes


def test_bytes_broadcast_are_hardly_more_than_the_jagged_ones(
    pair: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    lengths = [3000, 10, 4096, 700]
    fields = {
        "input_ids": rows(lengths, torch.int64),
        "generation_logprobs": rows(lengths, torch.float32),
        "token_mask": rows(lengths, torch.bool),
    }
    meta = client.put_samples([f"b{i}" for i in range(4)], partition, fields)
    meta.extra_info[schema.GLOBAL_FORWARD_PAD_SEQLEN] = 8192
    assert all(size <= 1.02 * sum(lengths) * 13 for size in pair.run(broadcast_bytes, server.address, meta))


# --- failures -------------------------------------------------------------------------------------------------


def fail(rank: int, layout: str, address: str, metas: dict[int, KVBatchMeta], how: str) -> Exception:
    """What this rank raises, promptly, when one rank of the group misbehaves; afterwards all fetch well."""
    worker = worker_on(rank, layout, address)
    last = len(metas) - 1
    kwargs: dict[str, Any] = {}
    meta = metas[rank]
    if how == "missing field":
        meta = meta.with_fields([*FIELDS, "prev_logprobs"])
    elif how == "other meta" and rank == last:
        meta = meta.subset([0])
    elif how == "other padding" and rank == last:
        kwargs["dp_aligned_seq_len"] = False
    elif how == "policy" and rank == last:
        kwargs["fetch_policy"] = "independent"
    elif how == "two leaders":
        worker.coords = {}
    elif how == "no leader":
        worker.coords = {"tensor_parallel": 1}
    elif how == "forgot coords" and rank == last:
        worker._local_coords = lambda: TQWorkerMixin._local_coords(worker)  # type: ignore[method-assign]
    elif how == "preprocess" and rank == last:
        kwargs["preprocess"] = lambda worker, batch: batch["no such column"]
    elif how == "too narrow":
        meta.extra_info[schema.GLOBAL_FORWARD_PAD_SEQLEN] = 7
    try:
        worker._fetch(meta, **kwargs)
    except Exception as error:
        if how in ("missing field", "forgot coords"):
            recovered = worker_on(rank, layout, address)
            recovered._fetch(metas[rank])
            recovered.close_data_plane()
        worker.close_data_plane()
        return error
    raise AssertionError(f"rank {rank} did not raise")


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("missing field", FieldNotProducedError, "'prev_logprobs' has not been produced"),
        ("other meta", ReplicaGroupError, "that differs from the meta of the leader"),
        ("other padding", ReplicaGroupError, "that differs from the meta of the leader"),
        ("policy", ReplicaGroupError, "different policies"),
        ("two leaders", ReplicaGroupError, "exactly one leader"),
        ("no leader", ReplicaGroupError, "exactly one leader"),
        ("forgot coords", NotImplementedError, "must override _local_coords"),
        ("preprocess", KeyError, "no such column"),
        ("too narrow", ValueError, "cannot pad to length 7"),
    ],
)
@pytest.mark.parametrize("layout", ["tp2", "tp2 cp2"])
def test_every_sibling_raises_the_same(
    layout: str,
    how: str,
    kind: type[Exception],
    text: str,
    pair: Ranks,
    four: Ranks,
    server: Server,
    client: DataPlaneClient,
    partition: str,
) -> None:
    metas = shards(put(client, partition), layout)
    ranks = pair if len(metas) == 2 else four
    for error in ranks.run(fail, layout, server.address, metas, how):
        assert isinstance(error, kind), error
        assert text in str(error)


def leader_dies(rank: int, address: str, metas: dict[int, KVBatchMeta]) -> Exception:
    worker = worker_on(rank, "tp2 cp2", address)
    if rank == 0:
        failpoints.arm("fetch.between_header_and_payload", lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        worker._fetch(metas[rank])
    except Exception as error:
        worker.close_data_plane()
        return error
    raise AssertionError("nobody raised")


def test_a_leader_killed_in_the_middle(four: Ranks, server: Server, client: DataPlaneClient, partition: str) -> None:
    leader, *siblings = four.run(leader_dies, server.address, shards(put(client, partition), "tp2 cp2"))
    assert isinstance(leader, RankDied)
    assert all(isinstance(error, ReplicaLostError) for error in siblings)


# --- entrypoints and write-back -------------------------------------------------------------------------------


def run_steps(rank: int, layout: str, address: str, metas: dict[int, KVBatchMeta]) -> tuple[int, Any]:
    worker = worker_on(rank, layout, address)
    client = worker._require_dp_client()
    puts = []
    original = client.put_samples
    client.put_samples = lambda *args, **kwargs: puts.append(1) or original(*args, **kwargs)  # type: ignore[method-assign, func-returns-value]
    meta = metas[rank].with_fields(["input_ids", "token_mask"])
    assert worker.get_logprobs_presharded(meta) is None
    assert worker.get_reference_policy_logprobs_presharded(meta, micro_batch_size=2) is None
    if worker.group is not None:
        dist.barrier(worker.group)
    trained = worker.train_presharded(
        meta.with_fields(["input_ids", "prev_logprobs"]), "loss", eval_mode=True, gbs=8, mbs=2
    )
    assert worker.trained is not None
    data, *arguments = worker.trained
    assert arguments == ["loss", True, 8, 2]
    assert data["prev_logprobs"].shape == (meta.size, 64)
    worker.close_data_plane()
    return len(puts), trained


@pytest.mark.parametrize("layout", ["dp2 tp2", "dp4"])
def test_entrypoints_write_back_once_per_data_parallel_rank(
    layout: str, four: Ranks, server: Server, client: DataPlaneClient, partition: str
) -> None:
    meta = put(client, partition)
    got = four.run(run_steps, layout, server.address, shards(meta, layout))
    for outcome in got:
        if isinstance(outcome, Exception):
            raise outcome
    sharding = LAYOUTS[layout]
    leaders = [sharding.is_axis_zero(sharding.get_worker_coords(rank), REPLICATED_AXES) for rank in range(4)]
    assert [puts for puts, _ in got] == [2 if leads else 0 for leads in leaders]
    stored = client.get_batch(meta, ["input_ids", "prev_logprobs", "reference_policy_logprobs"], layout="jagged")
    ids = stored["input_ids"]
    for name, factor in (("prev_logprobs", -1.0), ("reference_policy_logprobs", 0.5)):
        assert stored[name].offsets().equal(ids.offsets())
        assert stored[name].values().equal(ids.values().float() * factor)


def test_a_late_write_back_is_refused_and_the_new_rows_are_untouched(
    alone: Worker, client: DataPlaneClient, partition: str
) -> None:
    for step in range(3):
        meta = put(client, partition)
        alone._write_back(meta, {"prev_logprobs": torch.full((meta.size, 64), float(step))})
        client.clear_samples(meta.sample_ids, partition)
        fresh = put(client, partition)
        with pytest.raises(StaleSampleError, match="was cleared after this meta was made"):
            alone._write_back(meta, {"prev_logprobs": torch.zeros(meta.size, 64)})
        with pytest.raises(KeyError):
            client.get_batch(fresh, ["prev_logprobs"])
        client.clear_samples(fresh.sample_ids, partition)
        with pytest.raises(KeyError):
            alone._write_back(fresh, {"prev_logprobs": torch.zeros(meta.size, 64)})
    assert client.list_samples(partition).size == 0


def test_siblings_do_not_write(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    alone.coords = {"tensor_parallel": 1}
    alone._write_back(meta, {"prev_logprobs": torch.zeros(meta.size, 64)})
    alone._write_back_result_field(meta, None, result_key="logprobs", tq_field="prev_logprobs")
    with pytest.raises(FieldNotProducedError):
        client.get_batch(meta, ["prev_logprobs"])


@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        (torch.zeros(8, 64), TypeError, "the method must return a mapping with 'logprobs', got Tensor"),
        (None, TypeError, "got NoneType"),
        ({"loss": 1, "other": 2}, KeyError, "has no 'logprobs'; it has loss, other"),
        ({"logprobs": [1.0]}, TypeError, r"result\['logprobs'\] \(for 'prev_logprobs'\): expected a tensor, got list"),
        ({"logprobs": torch.zeros(8)}, ValueError, r"expected a per-token tensor \[8, S\], got shape \[8\]"),
        ({"logprobs": torch.zeros(7, 64)}, ValueError, r"'prev_logprobs': expected 8 rows.*got shape \[7, 64\]"),
        ({"logprobs": torch.zeros(8, 39)}, ValueError, "'prev_logprobs': rows have width 39.*longest sample has 40"),
    ],
)
def test_results_that_cannot_be_written_back(
    alone: Worker, client: DataPlaneClient, partition: str, result: Any, kind: type[Exception], message: str
) -> None:
    meta = put(client, partition)
    with pytest.raises(kind, match=message):
        alone._write_back_result_field(meta, result, result_key="logprobs", tq_field="prev_logprobs")
    with pytest.raises(FieldNotProducedError):
        client.get_batch(meta, ["prev_logprobs"])


def test_write_back_recognises_per_token_results_by_their_shape(
    alone: Worker, client: DataPlaneClient, partition: str
) -> None:
    """The batch was padded to 64; no name is one that anybody knows."""
    client.register_partition(partition, {"fixed": FieldSpec("dense"), "input_ids": None}, None, ["train"])
    meta = put(client, partition)
    wide = torch.randn(meta.size, 64)
    results = {"kl": wide, "hidden": wide[..., None].expand(-1, -1, 3), "logits": wide[:, :5], "fixed": wide}
    alone._write_back(meta, {**results, "score": wide[:, 0], "values": wide[:, 0]})
    stored = client.get_samples(meta.sample_ids, partition, ["kl", "hidden", "logits", "fixed", "score", "values"])
    for name in ("kl", "hidden"):
        for row, length, result in zip(stored[name].unbind(), LENGTHS, results[name], strict=True):
            assert row.equal(result[:length]), name
    for name in ("logits", "fixed"):
        assert stored[name].equal(results[name]), name
    for name in ("score", "values"):
        assert stored[name].equal(wide[:, 0]), name


def test_write_back_without_a_common_length_goes_by_the_longest_sample(
    alone: Worker, client: DataPlaneClient, partition: str
) -> None:
    meta = put(client, partition, pad_to=None)
    alone._write_back(meta, {"kl": torch.ones(meta.size, 40), "logits": torch.ones(meta.size, 64)})
    stored = client.get_samples(meta.sample_ids, partition, ["kl", "logits"])
    assert list(map(len, stored["kl"].unbind())) == LENGTHS
    assert stored["logits"].shape == (8, 64)


def test_write_back_takes_tensors_only(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    with pytest.raises(TypeError, match="'prev_logprobs': expected a tensor, got ndarray"):
        alone._write_back(put(client, partition), {"prev_logprobs": np.zeros((8, 64))})  # type: ignore[dict-item]


def test_forgotten_coords(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    class Forgetful(TQWorkerMixin):
        pass

    worker = Forgetful()
    with pytest.raises(NotImplementedError, match="Forgetful must override _local_coords"):
        worker._is_replica_leader()
    with pytest.raises(NotImplementedError, match="every rank would write back"):
        worker._write_back(put(client, partition), {})


# --- a step in parts ------------------------------------------------------------------------------------------


def test_a_step_in_parts(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition).with_fields(["input_ids"])
    alone.begin_train_step_presharded("loss", gbs=8, mbs=2)
    for part in (meta.slice(0, 4), meta.slice(4, 8)):
        assert alone.train_microbatch_presharded(part) is None
    assert alone.step[0] == ("loss", 8, 2)
    assert [len(data["input_ids"]) for data in alone.step[1:]] == [4, 4]
    assert alone.finish_train_step_presharded() == {"loss": 2.0, "is_replica_leader": True}
    alone.coords = {"tensor_parallel": 1}
    assert alone.finish_train_step_presharded()["is_replica_leader"] is False
    alone.abort_train_step_presharded()
    assert alone.step == []


def test_a_step_must_end_in_a_mapping(alone: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "finish_train_step", lambda: 3.0)
    with pytest.raises(TypeError, match="must return a mapping of results, got float"):
        alone.finish_train_step_presharded()


# --- set-up ---------------------------------------------------------------------------------------------------


def test_setup_attaches_once(server: Server) -> None:
    worker: PolicyWorker = Worker(LAYOUTS["dp2"], 0)
    assert isinstance(worker, Worker)
    with pytest.raises(RuntimeError, match="Worker has no data plane client"):
        worker._require_dp_client()
    worker.setup_data_plane({"address": server.address})
    client = worker._require_dp_client()
    worker.setup_data_plane({"address": "127.0.0.1:1"})
    assert worker._require_dp_client() is client
    worker.close_data_plane()
    worker.close_data_plane()


def test_setup_never_starts_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    worker = Worker(LAYOUTS["dp2"], 0)
    with pytest.raises(ValueError, match="address"):
        worker.setup_data_plane({})
    with pytest.raises(ServiceUnavailableError):
        worker.setup_data_plane({"address": "127.0.0.1:1", "connect_timeout_s": 0.5})


def test_unknown_policy(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    with pytest.raises(ValueError, match="fetch_policy must be one of auto, independent, leader_broadcast"):
        alone._fetch(put(client, partition), fetch_policy="eager")  # type: ignore[arg-type]


class Tokenizing(TQWorkerMixin):
    """A host with a tokenizer and nothing else."""

    def __init__(self, pad_token_id: int | None) -> None:
        self.tokenizer = types.SimpleNamespace(pad_token_id=pad_token_id)

    def _local_coords(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(("pad_token_id", "filled"), [(151_643, 151_643), (0, 0), (None, 0)])
def test_token_ids_are_padded_with_the_tokenizers_pad_id(
    pad_token_id: int | None, filled: int, server: Server, client: DataPlaneClient, partition: str
) -> None:
    worker = Tokenizing(pad_token_id)
    worker.setup_data_plane({"address": server.address})
    batch = worker._fetch(put(client, partition))
    worker.close_data_plane()
    assert batch["input_ids"][0, 5:].unique().tolist() == [filled]
    assert batch["token_mask"][0, 5:].unique().tolist() == [False]


def test_without_a_tokenizer_everything_is_padded_with_0() -> None:
    assert Silent()._pad_value_dict() == {}


# --- hosts that lack something ---------------------------------------------------------------------------------


class Silent(TQWorkerMixin):
    """Names no axis, and makes no steps in parts."""

    def _local_coords(self) -> dict[str, int]:
        return {}

    def begin_train_step(self, **_: object) -> None:
        raise AssertionError("a host that cannot abort begins no step")


def test_a_share_of_a_stream_needs_the_place_among_data_parallel_ranks() -> None:
    with pytest.raises(ValueError, match=r"Silent\._local_coords\(\) returned no 'data_parallel'.*dp_world=2"):
        Silent().stream("val", "val", ["input_ids"], batch_size=2, dp_world=2)


def test_a_step_in_parts_needs_all_its_methods() -> None:
    worker = Silent()
    with pytest.raises(TypeError, match="Silent lacks train_microbatch, finish_train_step, abort_train_step: "):
        worker.begin_train_step_presharded("loss")  # type: ignore[misc]
    worker.abort_train_step_presharded()  # type: ignore[misc]


# --- The worker mixin's micro-batches: those the driver shipped, and those a worker packs for itself.


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


# --- A worker that reads a field that its stage did not fetch.


class ImageWorker(Worker):
    """Its model reads images."""

    def get_logprobs(
        self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> dict[str, torch.Tensor]:
        images = data["pixel_values"].sum((1, 2))  # [N, patches, 6] to [N]
        return {"logprobs": -data["input_ids"] * images[:, None]}

    def get_reference_policy_logprobs(
        self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> dict[str, torch.Tensor]:
        return {"reference_logprobs": self.get_logprobs(data=data)["logprobs"]}

    def train(self, data: BatchedDataDict[Any], **_: Any) -> dict[str, float]:
        return {"loss": float(data["pixel_values"].sum())}


@pytest.fixture
def meta(client: DataPlaneClient) -> KVBatchMeta:
    """Two samples of 3 and 5 tokens with images of 8 and 4 patches."""
    client.register_partition("images", ["input_ids", "pixel_values"], 2, ["train"])
    fields = {
        "input_ids": [torch.ones(3, dtype=torch.int64), torch.ones(5, dtype=torch.int64)],
        "pixel_values": [torch.ones(8, 6), torch.ones(4, 6)],
    }
    tags = [{"input_lengths": 3}, {"input_lengths": 5}]
    client.put_samples(["a", "b"], "images", fields, tags=tags)
    return client.list_samples("images").with_fields(list(fields))


def test_a_field_that_a_stage_did_not_fetch_is_named_with_the_argument(
    server: Server,
    client: DataPlaneClient,
    meta: KVBatchMeta,
) -> None:
    worker = ImageWorker(LAYOUTS["dp2"], 0)
    worker.setup_data_plane({"address": server.address})
    default = meta.with_fields(forward_fields(meta, None, FORWARD_FIELDS))
    stages = [
        lambda part: worker.get_logprobs_presharded(part),
        lambda part: worker.get_reference_policy_logprobs_presharded(part),
        lambda part: worker.train_presharded(part, "loss"),
    ]
    for stage in stages:
        with pytest.raises(KeyError, match=r"no column 'pixel_values'; it has input_ids.*`fields=`"):
            stage(default)
        stage(meta)
    got = client.get_samples(["a", "b"], "images", ["prev_logprobs"])["prev_logprobs"]
    assert [row.tolist() for row in got.unbind()] == [[-48.0] * 3, [-24.0] * 5]
    worker.close_data_plane()
    client.clear_samples(None, "images")


# --- The write-back of a rank, and what it refuses.


def test_per_token_columns_of_a_fetch_that_is_not_aligned(
    alone: Worker, client: DataPlaneClient, partition: str
) -> None:
    meta = put(client, partition, pad_to=64)
    fetched = alone._fetch(meta.with_fields(["generation_logprobs"]), dp_aligned_seq_len=False)
    kl = fetched["generation_logprobs"]
    assert kl.shape[1] == 40
    alone._write_back(meta, {"kl": kl}, dp_aligned_seq_len=False)
    result = {"logprobs": kl}
    alone._write_back_result_field(meta, result, result_key="logprobs", tq_field="other", dp_aligned_seq_len=False)
    stored = client.get_batch(meta, ["kl", "other"], layout="jagged")
    assert all(column.offsets().diff().tolist() == LENGTHS for column in stored.values())


def test_only_a_leader_writes(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    alone.coords = {"tensor_parallel": 1}
    alone._write_back(meta, {"score": torch.zeros(8)})
    alone._write_back_result_field(meta, None, result_key="scores", tq_field="score")
    with pytest.raises(KeyError, match="score"):
        client.get_batch(meta, ["score"])


NESTED = torch.nested.nested_tensor([torch.zeros(length) for length in LENGTHS], layout=torch.jagged)
NOT_A_MAPPING = "is not supported here. Pass a TensorDict or a mapping of field names"


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ([torch.zeros(8, 40)], TypeError, f"list {NOT_A_MAPPING}"),
        (None, TypeError, f"NoneType {NOT_A_MAPPING}"),
        ({0: torch.zeros(8, 40)}, InvalidRequestError, "must be non-empty strings, got 0"),
        ({"": torch.zeros(8, 40)}, InvalidRequestError, "must be non-empty strings, got ''"),
        (
            {"kl": torch.zeros(8, 40, device="meta")},
            TypeError,
            r"'kl': a torch.Tensor \(float32, on meta\) cannot be",
        ),
        ({"kl": NESTED.to("meta")}, TypeError, "'kl': .* on meta.* cannot be stored"),
        ({"kl": torch.zeros(8, 40).to_sparse()}, TypeError, "'kl': .*layout sparse_coo.* cannot"),
    ],
)
def test_fields_that_cannot_be_stored(
    alone: Worker,
    client: DataPlaneClient,
    partition: str,
    fields: Any,
    kind: type[Exception],
    why: str,
) -> None:
    with pytest.raises(kind, match=why):
        alone._write_back(put(client, partition), fields)


def test_fields_of_a_tensordict(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition, pad_to=40)
    fields = TensorDict({"a": torch.ones(8, 40)}, [8])
    alone._write_back(meta, fields)
    alone._write_back_result_field(meta, fields, result_key="a", tq_field="b")
    stored = client.get_batch(meta, ["a", "b"], layout="jagged")
    assert stored["b"].values().equal(torch.ones(sum(LENGTHS)))
