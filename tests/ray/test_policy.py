"""TQPolicy: real worker actors, the service as actors, and a driver that holds metas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
import torch

from dataplane import KVBatchMeta, build_data_plane_client, kv_first_write
from dataplane.errors import FieldNotProducedError, StaleSampleError
from tests.ray.standing import call_until_dead
from workers import (
    LaunchedService,
    NamedSharding,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    TQPolicy,
    launch_service,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
LEFT_S = 60.0
LENGTHS = [3, 1, 7, 5, 2, 2, 6, 4]
ROLLOUT = ["input_ids", "input_lengths", "token_mask", "generation_logprobs", "reward"]


@pytest.fixture(scope="module")
def service(ray_cluster: None) -> Iterator[LaunchedService]:
    with launch_service({"capacity_bytes": 16 << 20}, name="policy-service") as running:
        yield running


@pytest.fixture(scope="module")
def policy(service: LaunchedService) -> Iterator[TQPolicy]:
    sharding = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, RayWorkerBuilder("tests.ray.actors.Policy"), name_prefix="policy", sharding_annotations=sharding
        ) as group,
    ):
        cfg = {"train_global_batch_size": 8, "logprob_batch_size": 3}
        made = TQPolicy(group, dp_cfg=service.config, cfg=cfg)
        try:
            yield made
        finally:
            workers = group.workers
            assert made.shutdown("stop")
            assert made.shutdown("stop"), "twice is once"
        with build_data_plane_client(service.config, bootstrap=False) as client:
            deadline = time.monotonic() + LEFT_S
            while len(client.stats().sessions) > 1:
                assert time.monotonic() < deadline, f"the workers and the driver left: {client.stats().sessions}"
                time.sleep(0.05)
        with pytest.raises(ray.exceptions.RayActorError):
            call_until_dead(workers[0].what_was_seen)


def seen(policy: TQPolicy) -> list[dict[str, Any]]:
    return ray.get(policy.worker_group.run_all_workers_single_data("what_was_seen"))


def rollout(policy: TQPolicy, offset: int = 10) -> KVBatchMeta:
    width = max(LENGTHS)
    batch = {
        "input_ids": torch.arange(8)[:, None] + offset + torch.zeros(8, width, dtype=torch.int64),
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": torch.ones(8, width, dtype=torch.bool),
        "generation_logprobs": torch.zeros(8, width),
        "reward": torch.arange(8.0),
    }
    ids = [f"s{i}" for i in range(8)]
    return kv_first_write(batch, sample_ids=ids, dp_client=policy.dp_client, partition_id="train", pad_to_multiple=4)


def test_a_step(policy: TQPolicy) -> None:
    for step in range(2):
        policy.prepare_step(num_samples=8, group_size=2)
        meta = rollout(policy, offset=10 * (step + 1))
        policy.get_logprobs_from_meta(meta)
        assert seen(policy)[3] == {
            "fields": ["input_ids", "input_lengths", "token_mask"],
            "micro_batch_size": 3,
            "micro_batches": None,
        }
        policy.get_reference_policy_logprobs_from_meta(meta, micro_batch_size=1)
        columns = policy.read_from_dataplane(meta, select_fields=["reward", "prev_logprobs", "input_ids"])
        assert columns["prev_logprobs"].shape == (8, 8)
        assert columns["prev_logprobs"].equal(-columns["input_ids"].float())
        policy.write_to_dataplane(meta, {"advantages": columns["reward"][:, None].expand(8, 8)})
        trained = policy.train_from_meta(meta, "loss", mbs=2)
        assert trained["loss"] == sum(i * length for i, length in enumerate(LENGTHS))
        assert trained["all_mb_metrics"] == {"ids": [10 * (step + 1) + i for i in range(8)]}
        for worker in seen(policy):
            assert worker["fields"] == sorted([*ROLLOUT, "prev_logprobs", "reference_policy_logprobs", "advantages"])
            assert (worker["shape"], worker["gbs"], worker["mbs"]) == ([4, 8], 8, 2)
        policy.finish_step(meta)
        with pytest.raises(StaleSampleError):
            policy.write_to_dataplane(meta, {"advantages": torch.zeros(8, 8)})
        with pytest.raises(KeyError):
            policy.get_logprobs_from_meta(meta)


def test_global_batches_are_split_over_data_parallel_ranks(policy: TQPolicy) -> None:
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    policy.write_to_dataplane(meta, {"advantages": torch.ones(8, 8)})
    trained = policy.train_from_meta(meta, "loss", gbs=4)
    assert trained["all_mb_metrics"]["ids"] == [10, 11, 14, 15, 12, 13, 16, 17]
    with pytest.raises(ValueError, match="8 rows are not a multiple of the global batch size 3"):
        policy.train_from_meta(meta, "loss", gbs=3)
    policy.finish_step(meta)


def test_what_a_worker_raises_reaches_the_driver_and_the_group_works_on(policy: TQPolicy) -> None:
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    with pytest.raises(FieldNotProducedError, match="'advantages' has not been produced"):
        policy.train_from_meta(meta.with_fields([*ROLLOUT, "advantages"]), "loss")
    seen(policy)  # the driver learns of the first failure: now all ranks have failed, and none meets the field later
    policy.write_to_dataplane(meta, {"advantages": torch.ones(8, 8)})
    assert policy.train_from_meta(meta, "loss")["loss"] == sum(LENGTHS)
    policy.finish_step(meta)


def test_the_pad_target_is_that_of_the_samples(policy: TQPolicy) -> None:
    meta = KVBatchMeta("train", None, ["a", "b", "c"], sequence_lengths=[5, 9, 3], extra_info={"pad_to_multiple": 4})
    assert stamped(policy, meta) == 12
    assert stamped(policy, meta.drop(["b"])) == 8
    longer = KVBatchMeta("train", None, ["d"], sequence_lengths=[15], extra_info={"pad_to_multiple": 4})
    assert stamped(policy, KVBatchMeta.concat([meta, longer])) == 16
    assert stamped(policy, longer) == 16
    assert stamped(policy, KVBatchMeta.concat([longer, meta.drop(["b"])])) == 16
    assert stamped(policy, KVBatchMeta.concat([meta.subset([0]), meta.subset([2])])) == 8
    unknown = KVBatchMeta("train", None, ["a"])
    policy._stamp_pad_seqlen(unknown)
    assert unknown.extra_info == {}


def test_a_pad_target_that_somebody_else_set_stays(policy: TQPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = KVBatchMeta("train", None, ["a", "b"], sequence_lengths=[5, 9])
    assert stamped(policy, meta) == 9
    meta.extra_info["global_forward_pad_seqlen"] = 64
    assert stamped(policy, meta) == 64
    assert stamped(policy, meta.drop(["b"])) == 64
    monkeypatch.setattr(policy, "cfg", {"dynamic_batching": {"enabled": True, "sequence_length_round": 6}})
    assert stamped(policy, KVBatchMeta("train", None, ["a"], sequence_lengths=[9])) == 12


def stamped(policy: TQPolicy, meta: KVBatchMeta) -> int:
    policy._stamp_pad_seqlen(meta)
    return int(meta.extra_info["global_forward_pad_seqlen"])


def test_a_validation_partition(policy: TQPolicy) -> None:
    policy.prepare_val_partition(num_samples=2)
    meta = policy.dp_client.put_samples(["v0", "v1"], "val", {"input_ids": [torch.ones(2, dtype=torch.int64)] * 2})
    assert not policy.dp_client.check_consumption_status("val", ["val"])
    assert policy.dp_client.claim_meta("val", "val", ["input_ids"], 2).sample_ids == ["v0", "v1"]
    assert policy.dp_client.check_consumption_status("val", ["val"])
    policy.finish_step(meta)
    policy.prepare_val_partition(num_samples=1, partition_id="hard")
    assert policy.dp_client.claim_meta("hard", "hard", ["input_ids"], 1, blocking=False).size == 0


def test_discarding_some(policy: TQPolicy) -> None:
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    policy.discard_samples(["s0", "s3", "never there"], "train")
    assert policy.dp_client.list_samples("train").sample_ids == ["s1", "s2", "s4", "s5", "s6", "s7"]
    policy.finish_step(meta)
    assert policy.dp_client.list_samples("train").size == 0


def test_a_meta_has_to_name_its_fields(policy: TQPolicy) -> None:
    with pytest.raises(ValueError, match=r"use meta.with_fields"):
        policy.get_logprobs_from_meta(KVBatchMeta("train", None, ["a", "b"]))


def test_packing_needs_its_settings(policy: TQPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "cfg", {"sequence_packing": {"enabled": True}})
    with pytest.raises(ValueError, match="neither 'logprob_mb_tokens' nor 'max_tokens_per_microbatch'"):
        policy.get_logprobs_from_meta(KVBatchMeta("train", None, ["a", "b"], fields=["input_ids"]))


@pytest.mark.parametrize(
    ("packing", "told"),
    [
        ({"train_mb_tokens": 16, "algorithm": "best"}, "unknown packing algorithm 'best'; expected one of"),
        ({"logprob_mb_tokens": 0}, "'logprob_mb_tokens'.*1 or more, got 0"),
    ],
)
def test_settings_are_looked_at_before_any_stage(policy: TQPolicy, packing: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TQPolicy(policy.worker_group, dp_cfg={}, cfg={"sequence_packing": {"enabled": True, **packing}})


@pytest.mark.parametrize("number", [0, -1, 2.0, "2", True])
def test_sizes_of_batches_are_whole_numbers(
    policy: TQPolicy, monkeypatch: pytest.MonkeyPatch, batch: KVBatchMeta, number: Any
) -> None:
    for name in ("gbs", "mbs"):
        with pytest.raises(ValueError, match=f"{name}: expected an integer of 1 or more, or None, got {number!r}"):
            policy.train_from_meta(batch, "loss", **{name: number})
        with pytest.raises(ValueError, match=f"{name}: expected an integer of 1 or more"):
            policy.begin_train_step("loss", **{name: number})
    with pytest.raises(ValueError, match="micro_batch_size: expected an integer of 1 or more"):
        policy.get_logprobs_from_meta(batch, micro_batch_size=number)
    monkeypatch.setattr(policy, "cfg", {"train_global_batch_size": number})
    with pytest.raises(ValueError, match="cfg's train_global_batch_size: expected an integer of 1 or more"):
        policy.train_from_meta(batch, "loss")


@pytest.mark.parametrize("given", [None, ["s0"]])
def test_what_is_no_meta_is_told(policy: TQPolicy, given: Any) -> None:
    for call in (
        lambda: policy.get_logprobs_from_meta(given),
        lambda: policy.train_from_meta(given, "loss"),
        lambda: policy.read_from_dataplane(given, select_fields=["input_ids"]),
        lambda: policy.write_to_dataplane(given, {}),
        lambda: policy.finish_step(given),
    ):
        message = f"argument meta: {type(given).__name__} is not .* Pass a KVBatchMeta"
        with pytest.raises(TypeError, match=message):
            call()


def test_names_of_another_type_are_refused_by_name(policy: TQPolicy, batch: KVBatchMeta) -> None:
    wrong: Any = ["train"]
    group = policy.worker_group
    meta: Any = batch
    for argument, call in (
        ("tq_partition_id: list", lambda: TQPolicy(group, dp_cfg={}, cfg={}, tq_partition_id=wrong)),
        ("partition_id: list", lambda: policy.prepare_val_partition(2, partition_id=wrong)),
        ("partition_id: list", lambda: policy.discard_samples(["s0"], wrong)),
        ("sample_ids: KVBatchMeta", lambda: policy.discard_samples(meta, "train")),
    ):
        with pytest.raises(TypeError, match=f"argument {argument}.* is not supported here"):
            call()
    with pytest.raises(ValueError, match="sample_ids='s0': pass a list of names, not one string"):
        policy.discard_samples("s0", "train")
    with pytest.raises(ValueError, match="select_fields='reward': pass a list of names"):
        policy.read_from_dataplane(batch, select_fields="reward")
    with pytest.raises(TypeError, match="fields=5: pass a list of field names"):
        policy.get_logprobs_from_meta(batch, fields=5)  # type: ignore[arg-type]


BUDGETS = {"enabled": True, "train_mb_tokens": 8, "logprob_mb_tokens": 16}


@pytest.mark.parametrize(
    "cfg",
    [
        {"sequence_packing": BUDGETS},
        {"dynamic_batching": {**BUDGETS, "sequence_length_round": 2}},
    ],
    ids=["sequence packing", "dynamic batching"],
)
def test_each_stage_has_its_own_micro_batches(
    policy: TQPolicy, monkeypatch: pytest.MonkeyPatch, cfg: dict[str, Any]
) -> None:
    monkeypatch.setattr(policy, "cfg", cfg)
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    policy.get_logprobs_from_meta(meta)
    logprob = micro_batches(policy)
    stored = policy.read_from_dataplane(meta, select_fields=["prev_logprobs", "input_ids"])
    assert stored["prev_logprobs"].equal(-stored["input_ids"].float()), "each row was written to its own sample"
    policy.write_to_dataplane(meta, {"advantages": stored["prev_logprobs"]})
    policy.train_from_meta(meta, "loss", gbs=4)
    train = micro_batches(policy)
    policy.finish_step(meta)
    assert (len(logprob[0]), len(train[0])) == (1, 2), "a forward pass sees all at once, a step its global batch"
    assert sum(map(len, train[0])) > sum(map(len, logprob[0]))
    for batches, budget in ((logprob, 16), (train, 8)):
        shapes = [[len(parts) for parts in rank] for rank in batches]
        assert shapes[0] == shapes[1], "as many micro-batches on every data-parallel rank"
        parts = [part for rank in batches for batch in rank for part in batch]
        assert sorted(row for _, rows in parts for row in rows) == list(range(10, 18))
        for (rows_n, width), rows in parts:
            lengths = [LENGTHS[row - 10] for row in rows]
            tokens = sum(lengths) if "sequence_packing" in cfg else rows_n * width
            assert max(lengths) <= width
            assert tokens <= budget


def micro_batches(policy: TQPolicy) -> list[Any]:
    """What the leaders of both data-parallel ranks got; their siblings got the same."""
    got = [worker["micro_batches"] for worker in seen(policy)]
    assert (got[0], got[2]) == (got[1], got[3])
    return [got[0], got[2]]


def test_a_stage_reads_the_fields_it_needs(policy: TQPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    experts = torch.zeros(8, 8, 2, dtype=torch.uint8)
    extra = {"routed_experts": experts, "images": torch.ones(8, 2), "advantages": torch.ones(8, 8)}
    policy.write_to_dataplane(meta, extra)
    policy.write_to_dataplane(meta, {"text": ["a"] * 8})
    given = [*ROLLOUT, *extra, "text"]
    meta = meta.with_fields(given)
    needed = ["input_ids", "input_lengths", "token_mask"]

    def read() -> list[str]:
        fields = [worker["fields"] for worker in seen(policy)]
        assert all(each == fields[0] for each in fields)
        return list(fields[0])

    policy.get_logprobs_from_meta(meta)
    assert read() == needed
    policy.get_logprobs_from_meta(meta, fields=["input_ids", "images"])
    assert read() == ["images", "input_ids"]
    policy.get_reference_policy_logprobs_from_meta(meta)
    assert read() == needed
    monkeypatch.setitem(policy.cfg, "router_replay", {"enabled": True})
    policy.get_logprobs_from_meta(meta)
    assert read() == [*needed[:2], "routed_experts", "token_mask"]
    policy.get_reference_policy_logprobs_from_meta(meta)
    assert read() == needed
    train_fields = ["input_ids", "input_lengths", "token_mask", "advantages"]
    policy.train_from_meta(meta, "loss", train_fields=train_fields)
    assert read() == sorted(train_fields)
    policy.train_from_meta(meta, "loss")
    assert read() == sorted([*given, "prev_logprobs", "reference_policy_logprobs"])
    with pytest.raises(TypeError, match="train_fields='input_ids': pass a list"):
        policy.train_from_meta(meta, "loss", train_fields="input_ids")
    with pytest.raises(ValueError, match=r"is a default field of a forward pass.*fields=\[\.\.\.\]"):
        policy.get_logprobs_from_meta(meta.with_fields(["images"]))
    policy.finish_step(meta)


def test_any_method_of_the_workers_runs_on_metas(policy: TQPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    policy.write_to_dataplane(meta, {"advantages": torch.ones(8, 8)})
    ids, timer = ["input_ids", "input_lengths"], Labels()
    monkeypatch.setitem(policy.cfg, "dynamic_batching", {**BUDGETS, "sequence_length_round": 2})
    sizes = policy.run_from_meta(
        "value_presharded", meta, fields=ids, writes=["values"], task_name="critic", timer=timer, scale=2.0
    )
    assert sizes == [4, 4]
    assert timer.labels == [f"value_presharded/{part}" for part in ("shard_meta", "submit_futures", "wait")]
    for worker in seen(policy):
        assert (worker["fields"], worker["task"]) == (ids, "critic")
        assert worker["micro_batches"]
    monkeypatch.delitem(policy.cfg, "dynamic_batching")
    columns = policy.read_from_dataplane(meta, select_fields=["values", "input_ids"])
    assert columns["values"].equal(2.0 * columns["input_ids"])
    policy.train_from_meta(meta, "loss")
    assert "values" in seen(policy)[0]["fields"]
    assert policy.run_from_meta("value_presharded", meta, batch_size=4, scale=1.0) == [4, 4]
    assert seen(policy)[0]["fields"] == sorted(ROLLOUT)
    with pytest.raises(AttributeError, match="no_such_method"):
        policy.run_from_meta("no_such_method", meta)
    policy.finish_step(meta)


def test_timers_measure_every_stage(policy: TQPolicy) -> None:
    timer = Labels()
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    policy.write_to_dataplane(meta, {"advantages": torch.ones(8, 8)})
    policy.get_logprobs_from_meta(meta, timer=timer)
    policy.train_from_meta(meta, "loss", timer=timer)
    policy.finish_step(meta)
    assert timer.labels == [
        "get_logprobs/shard_meta",
        "get_logprobs/submit_futures",
        "get_logprobs/wait",
        "policy_training/shard_meta",
        "policy_training/submit_training_futures",
        "policy_training/wait",
    ]


class Labels:
    """A timer that remembers what it measured."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        yield
        self.labels.append(label)


# --- a train step in parts ------------------------------------------------------------------------------------------


@pytest.fixture
def batch(policy: TQPolicy) -> Iterator[KVBatchMeta]:
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    policy.write_to_dataplane(meta, {"advantages": torch.arange(8.0)[:, None].expand(8, 8)})
    yield meta
    policy.abort_train_step()
    policy.finish_step(meta)


def test_a_step_in_parts_is_a_step(policy: TQPolicy, batch: KVBatchMeta) -> None:
    whole = policy.train_from_meta(batch, "loss")
    policy.begin_train_step("loss", mbs=2)
    assert [worker["gbs"] for worker in seen(policy)] == [8] * 4
    for part in (batch.slice(0, 4), batch.slice(4, 8)):
        policy.train_microbatches_from_meta(part)
    split = policy.finish_train_step()
    assert split["loss"] == split["global_loss"] == whole["loss"]
    assert sorted(split["all_mb_metrics"]["ids"]) == list(range(10, 18)), "of leaders only"
    assert set(split) == set(whole)


def test_one_step_at_a_time(policy: TQPolicy, batch: KVBatchMeta) -> None:
    for call in (lambda: policy.train_microbatches_from_meta(batch), policy.finish_train_step):
        with pytest.raises(RuntimeError, match="no train step is open"):
            call()
    policy.begin_train_step("loss")
    with pytest.raises(RuntimeError, match="a train step is already open"):
        policy.begin_train_step("loss")
    with pytest.raises(RuntimeError, match="a train step is open"):
        policy.train_from_meta(batch, "loss")
    with pytest.raises(ValueError, match="cannot be split evenly"):
        policy.train_microbatches_from_meta(batch.slice(0, 3))
    policy.train_microbatches_from_meta(batch)
    assert policy.finish_train_step()["loss"] == LOSS


LOSS = sum(i * length for i, length in enumerate(LENGTHS))


@pytest.mark.parametrize("where", ["fetch", "train", "finish"])
def test_a_step_that_failed_can_only_be_aborted(policy: TQPolicy, batch: KVBatchMeta, where: str) -> None:
    ranks = [0, 1, 2, 3] if where == "finish" else [2]
    policy.begin_train_step(("fail", where, ranks))
    if where == "fetch":
        missing = batch.with_fields([*ROLLOUT, "returns"])
        with pytest.raises(KeyError, match="'returns'"):
            policy.train_microbatches_from_meta(missing)
    elif where == "train":
        with pytest.raises(ArithmeticError, match="told to fail in train"):
            policy.train_microbatches_from_meta(batch)
    else:
        policy.train_microbatches_from_meta(batch)
        with pytest.raises(ArithmeticError, match="told to fail in finish"):
            policy.finish_train_step()
    with pytest.raises(RuntimeError, match="failed in this train step"):
        policy.train_microbatches_from_meta(batch)
    with pytest.raises(RuntimeError, match="failed in this train step"):
        policy.finish_train_step()
    policy.abort_train_step()
    policy.begin_train_step("loss")
    policy.train_microbatches_from_meta(batch)
    assert policy.finish_train_step()["loss"] == LOSS, "nothing was left of the step before"


def test_where_one_worker_cannot_begin_none_has_begun(policy: TQPolicy, batch: KVBatchMeta) -> None:
    with pytest.raises(ArithmeticError, match="told to fail in begin"):
        policy.begin_train_step(("fail", "begin", [3]))
    assert policy.train_from_meta(batch, "loss")["loss"] == LOSS
    policy.begin_train_step("loss")


def test_what_a_worker_raises_as_it_aborts_arrives_as_itself(policy: TQPolicy, batch: KVBatchMeta) -> None:
    policy.begin_train_step(("fail", "abort", [2]))
    with pytest.raises(ArithmeticError, match="told to fail in abort") as caught:
        policy.abort_train_step()
    assert type(caught.value) is ArithmeticError
    assert caught.value.__notes__ == ["raised by worker policy-0-2"]
    policy.abort_train_step()
    assert policy.train_from_meta(batch, "loss")["loss"] == LOSS


def test_workers_share_the_drivers_settings(policy: TQPolicy, service: LaunchedService) -> None:
    configs = ray.get(policy.worker_group.run_all_workers_single_data("client_config"))
    assert {config.address for config in configs} == {service.address}


def test_a_policy_needs_named_axes(service: LaunchedService) -> None:
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder("tests.ray.actors.Starter")) as group,
        pytest.raises(ValueError, match="has no sharding_annotations"),
    ):
        TQPolicy(group, dp_cfg=service.config, cfg={})
