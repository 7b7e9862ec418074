from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator

import pytest
import torch

from dataplane import DataPlaneClient, KVBatchMeta, connect, serve
from dataplane.core.types import Scalar
from dataplane.training.dynamic_sampling import DynamicSampler, split_by_spread

pytestmark = pytest.mark.integration


def meta_of(*samples: tuple[str, object, object]) -> KVBatchMeta:
    tags = [{"group": group, "reward": reward} for _, group, reward in samples]
    return KVBatchMeta(
        partition_id="p",
        task_name=None,
        sample_ids=[name for name, _, _ in samples],
        fields=None,
        sequence_lengths=None,
        tags=tags,
    )


def test_groups_without_spread_are_dropped() -> None:
    meta = meta_of(("a", 1, 0.0), ("b", 2, 1.0), ("c", 1, 1.0), ("d", 2, 1.0), ("e", 3, 0.5))
    kept, dropped = split_by_spread(meta)
    assert kept.sample_ids == ["a", "c"]
    assert dropped.sample_ids == ["b", "d", "e"]


def test_a_little_spread_can_be_too_little() -> None:
    meta = meta_of(("a", 1, 0.0), ("b", 1, 0.1), ("c", 2, 0.0), ("d", 2, 1.0))
    assert split_by_spread(meta, least=0.2)[0].sample_ids == ["c", "d"]


@pytest.mark.parametrize("tags", [None, [{"group": 1}], [{"reward": 1.0}], [{"group": 1, "reward": "high"}]])
def test_samples_without_group_or_reward_are_named(tags: object) -> None:
    meta = KVBatchMeta(
        partition_id="p", task_name=None, sample_ids=["lost"], fields=None, sequence_lengths=None, tags=tags
    )
    with pytest.raises(ValueError, match="'lost'"):
        split_by_spread(meta)


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with serve({"capacity_bytes": 16 << 20}) as server, connect(server.address) as client:
        client.register_partition("p", ["x"], None, [])
        yield client


def put(client: DataPlaneClient, first: int, rewards: dict[int, list[float]]) -> KVBatchMeta:
    tags = [{"group": group, "reward": reward} for group, values in rewards.items() for reward in values]
    names = [f"s{first + n}" for n in range(len(tags))]
    return client.put_samples(names, "p", {"x": torch.arange(len(names))}, tags=tags)


def test_rounds_add_up_and_what_is_not_used_is_cleared(client: DataPlaneClient) -> None:
    sampler = DynamicSampler(client, 4)
    assert sampler.add(put(client, 0, {1: [0.0, 1.0], 2: [1.0, 1.0]})) is None
    assert sampler.missing == 2
    assert client.list_samples("p").sample_ids == ["s0", "s1"]
    assert sampler.add(put(client, 4, {3: [0.0, 0.0]})) is None
    batch = sampler.add(put(client, 6, {4: [0.0, 1.0], 5: [1.0, 0.0], 6: [2.0, 2.0]}))
    assert batch is not None
    assert batch.sample_ids == ["s0", "s1", "s6", "s7"]
    assert sorted(client.list_samples("p").sample_ids) == sorted(batch.sample_ids)
    assert client.get_samples(batch, "p", ["x"])["x"].tolist() == [0, 1, 0, 1]
    assert (sampler.rounds, sampler.dropped) == (3, 8)
    assert sampler.missing == 4, "the next batch begins"


def test_groups_are_never_cut(client: DataPlaneClient) -> None:
    sampler = DynamicSampler(client, 5)
    assert sampler.add(put(client, 0, {1: [0.0, 1.0, 0.5], 2: [0.0, 1.0, 0.5]})) is None
    assert sampler.missing == 2
    batch = sampler.add(put(client, 6, {3: [0.0, 1.0, 1.0], 4: [1.0, 0.0]}))
    assert batch is not None
    assert batch.sample_ids == ["s0", "s1", "s2", "s9", "s10"]
    assert sorted(client.list_samples("p").sample_ids) == sorted(batch.sample_ids)


def test_a_batch_has_samples(client: DataPlaneClient) -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        DynamicSampler(client, 0)


@pytest.mark.parametrize("reward", [0.1, 0.3, 1e-300, 1 / 3, 1e300, -0.7, 5])
@pytest.mark.parametrize("count", [2, 3, 8, 11])
def test_equal_rewards_have_no_spread(reward: float, count: int) -> None:
    meta = meta_of(*[(f"s{number}", 1, reward) for number in range(count)])
    assert split_by_spread(meta)[0].size == 0


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_named_and_nothing_cleared(client: DataPlaneClient, reward: float) -> None:
    sampler = DynamicSampler(client, 4)
    with pytest.raises(ValueError, match=r"'s1' has .*finite number"):
        sampler.add(put(client, 0, {1: [1.0, reward], 2: [1.0, 1.0]}))
    assert client.list_samples("p").size == 4


def test_rewards_as_large_as_numbers_are(client: DataPlaneClient) -> None:
    most = sys.float_info.max
    kept, dropped = split_by_spread(put(client, 0, {1: [most, -most], 2: [most, most]}), least=1.0)
    assert (kept.sample_ids, dropped.sample_ids) == (["s0", "s1"], ["s2", "s3"])


def test_a_sample_is_added_once(client: DataPlaneClient) -> None:
    sampler = DynamicSampler(client, 4)
    meta = put(client, 0, {1: spread(2)})
    assert sampler.add(meta) is None
    with pytest.raises(ValueError, match="samples 's0', 's1' were added before"):
        sampler.add(meta)
    assert (sampler.missing, client.list_samples("p").size) == (2, 2)


def spread(count: int) -> list[float]:
    return [float(number) for number in range(count)]


def test_groups_that_fit_together_are_found(client: DataPlaneClient) -> None:
    sampler = DynamicSampler(client, 8)
    assert sampler.add(put(client, 0, {1: spread(4), 2: spread(3)})) is None
    batch = sampler.add(put(client, 7, {3: spread(4), 4: spread(4)}))
    assert batch is not None
    assert [tags["group"] for tags in batch.tags or ()] == [1] * 4 + [3] * 4, "the oldest that fit"
    assert sorted(client.list_samples("p").sample_ids) == sorted(batch.sample_ids)
    assert sampler.missing == 8


def test_every_set_that_fits_is_found(client: DataPlaneClient) -> None:
    sampler = DynamicSampler(client, 12)
    for sizes in itertools.product(range(1, 8), repeat=4):
        groups: dict[Scalar, int] = dict(enumerate(sizes))
        sums = [sum(some) for count in range(5) for some in itertools.combinations(sizes, count)]
        assert sum(sampler._best_combination(groups).values()) == max(total for total in sums if total <= 12)


def test_groups_that_never_make_a_batch_are_not_kept_for_ever(
    client: DataPlaneClient, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = DynamicSampler(client, 8)
    for turn in range(6):
        assert sampler.add(put(client, 3 * turn, {turn: spread(3)})) is None
    assert len(client.list_samples("p").sample_ids) == 6
    assert (sampler.missing, sampler.dropped) == (2, 12)
    assert "Groups of 3 samples do not add up to a batch of 8" in caplog.text
    batch = sampler.add(put(client, 100, {100: spread(2)}))
    assert batch is not None
    assert batch.size == 8


def test_a_group_larger_than_a_batch_is_an_error(client: DataPlaneClient) -> None:
    sampler = DynamicSampler(client, 3)
    with pytest.raises(ValueError, match="group 7 has 4 samples, more than batch_size=3"):
        sampler.add(put(client, 0, {7: spread(4), 8: [1.0, 1.0]}))
    assert client.list_samples("p").size == 6
    assert sampler.rounds == sampler.dropped == 0
