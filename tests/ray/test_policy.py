"""TQPolicy: real worker actors, the service as actors, and a driver that holds metas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from dataplane import KVBatchMeta, kv_first_write
from dataplane.errors import FieldNotProducedError, StaleSampleError
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
        with TQPolicy(group, dp_cfg=service.config, cfg=cfg) as made:
            yield made
        assert group.shutdown("stop")


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
            "fields": ["input_ids", "input_lengths", "reward", "token_mask"],
            "micro_batch_size": 3,
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
    with pytest.raises(ValueError, match="8 rows are no multiple of the global batch of 3"):
        policy.train_from_meta(meta, "loss", gbs=3)
    policy.finish_step(meta)


def test_what_a_worker_raises_reaches_the_driver_and_the_group_works_on(policy: TQPolicy) -> None:
    policy.prepare_step(num_samples=8)
    meta = rollout(policy)
    with pytest.raises(FieldNotProducedError, match="'advantages' has not been produced"):
        policy.train_from_meta(meta.with_fields([*ROLLOUT, "advantages"]), "loss")
    policy.write_to_dataplane(meta, {"advantages": torch.ones(8, 8)})
    assert policy.train_from_meta(meta, "loss")["loss"] == sum(LENGTHS)
    policy.finish_step(meta)


def test_stamping(policy: TQPolicy) -> None:
    meta = KVBatchMeta("train", None, ["a", "b"], sequence_lengths=[5, 9], extra_info={"pad_to_multiple": 4})
    policy._stamp_pad_seqlen(meta)
    assert meta.extra_info["global_forward_pad_seqlen"] == 12
    meta.extra_info["global_forward_pad_seqlen"] = 64
    policy._stamp_pad_seqlen(meta)
    assert meta.extra_info["global_forward_pad_seqlen"] == 64
    unknown = KVBatchMeta("train", None, ["a"])
    policy._stamp_pad_seqlen(unknown)
    assert unknown.extra_info == {}


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


def test_packing_is_for_a_later_release(policy: TQPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "cfg", {"sequence_packing": {"enabled": True}})
    with pytest.raises(ValueError, match="sequence_packing_args is not supported"):
        policy.get_logprobs_from_meta(KVBatchMeta("train", None, ["a", "b"], fields=["input_ids"]))


def test_workers_share_the_drivers_settings(policy: TQPolicy, service: LaunchedService) -> None:
    configs = ray.get(policy.worker_group.run_all_workers_single_data("client_config"))
    assert {config.address for config in configs} == {service.address}


def test_a_policy_needs_named_axes(service: LaunchedService) -> None:
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder("tests.ray.actors.Echo")) as group,
        pytest.raises(ValueError, match="give the worker group sharding_annotations"),
    ):
        TQPolicy(group, dp_cfg=service.config, cfg={})
