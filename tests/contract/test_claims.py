"""Cursors: each sample once per task, tails come out, waits end with reasons."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dataplane import DataPlaneClient, KVBatchMeta
from dataplane.errors import (
    ClaimTimeoutError,
    PartitionNotFoundError,
    ShareConflictError,
    StaleSampleError,
    TaskNotFoundError,
)
from tests.restarts import wait_until

pytestmark = pytest.mark.integration


def put(client: DataPlaneClient, partition: str, first: int, last: int, field: str = "x") -> None:
    names = [f"s{n}" for n in range(first, last)]
    client.put_samples(names, partition, {field: torch.arange(first, last)}, tags=[{"input_lengths": 5}] * len(names))


def register(client: DataPlaneClient, partition: str, size: int | None = 8) -> None:
    client.register_partition(partition, ["x", "y"], size, ["train", "ref"])


def test_oldest_first_once_each(client: DataPlaneClient, partition: str) -> None:
    register(client, partition)
    put(client, partition, 0, 6)
    first = client.claim_meta(partition, "train", ["x"], 4)
    assert first.sample_ids == ["s0", "s1", "s2", "s3"]
    assert first.sequence_lengths == [5] * 4
    assert first.tags == [{"input_lengths": 5}] * 4
    assert client.get_data(first)["x"].tolist() == [0, 1, 2, 3]
    assert client.claim_meta(partition, "ref", ["x"], 2).sample_ids == ["s0", "s1"]
    assert client.claim_meta(partition, "train", ["x"], 4, blocking=False).sample_ids == ["s4", "s5"]
    assert client.claim_meta(partition, "train", ["x"], 4, blocking=False).size == 0


def test_the_tail_comes_out_then_nothing(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, 6)
    put(client, partition, 0, 6)
    assert client.claim_meta(partition, "train", [], 4).size == 4
    assert client.claim_meta(partition, "train", ["x"], 4).sample_ids == ["s4", "s5"]
    assert client.claim_meta(partition, "train", ["x"], 4).size == 0


def test_a_tail_waits_until_all_of_it_is_ready(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    register(client, partition, 3)
    put(client, partition, 0, 3)
    put(client, partition, 0, 2, field="y")
    other = open_client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.claim_meta, partition, "train", ["y"], 8, timeout_s=60.0)
        put(client, partition, 2, 3, field="y")
        assert waiting.result(60).sample_ids == ["s0", "s1", "s2"]


def test_a_waiting_claim_is_woken_by_the_put(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    register(client, partition, None)
    other = open_client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.claim_meta, partition, "train", ["x"], 4, timeout_s=60.0)
        put(client, partition, 0, 2)
        put(client, partition, 2, 4)
        assert waiting.result(60).sample_ids == ["s0", "s1", "s2", "s3"]


def test_seal_lets_the_tail_out(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, None)
    put(client, partition, 0, 3)
    with pytest.raises(TimeoutError):
        client.claim_meta(partition, "train", ["x"], 8, timeout_s=0.2)
    client.seal(partition)
    assert client.claim_meta(partition, "train", ["x"], 8).size == 3
    with pytest.raises(ValueError, match="sealed"):
        put(client, partition, 3, 4)
    put(client, partition, 0, 3, field="y")


def test_min_batch_size(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, None)
    put(client, partition, 0, 3)
    assert client.claim_meta(partition, "train", ["x"], 8, min_batch_size=2).size == 3


def test_a_timeout_says_what_is_missing_and_claims_nothing(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, None)
    put(client, partition, 0, 3)
    with pytest.raises(ClaimTimeoutError, match="ghost") as caught:
        client.claim_meta(partition, "train", ["x", "ghost"], 2, timeout_s=0.2)
    assert caught.value.ready == 0
    assert client.claim_meta(partition, "train", ["x"], 3).size == 3


def test_unknown_names_are_errors_at_once(client: DataPlaneClient, partition: str) -> None:
    register(client, partition)
    with pytest.raises(PartitionNotFoundError):
        client.claim_meta("nowhere", "train", ["x"], 1)
    with pytest.raises(TaskNotFoundError, match="eval"):
        client.claim_meta(partition, "eval", ["x"], 1)
    with pytest.raises(KeyError):
        client.check_consumption_status(partition, ["train", "eval"])
    with pytest.raises(KeyError):
        client.put_samples(["a"], "nowhere", {"x": torch.arange(1)})
    with pytest.raises(KeyError):
        client.seal("nowhere")


def test_consumption(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, 4)
    put(client, partition, 0, 2)
    client.claim_meta(partition, "train", ["x"], 2)
    assert not client.check_consumption_status(partition, ["train"])
    put(client, partition, 2, 4)
    assert not client.check_consumption_status(partition, ["train"])
    client.claim_meta(partition, "train", ["x"], 2)
    assert client.check_consumption_status(partition, ["train"])
    assert not client.check_consumption_status(partition, ["train", "ref"])
    client.clear_samples([f"s{n}" for n in range(4)], partition)
    assert client.check_consumption_status(partition, ["train", "ref"])


def test_predicates_groups_and_order(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, None)
    tags = [{"group": n // 2, "std": float(n % 3)} for n in range(8)]
    client.put_samples([f"s{n}" for n in range(8)], partition, {"x": torch.arange(8)}, tags=tags)
    ready = client.claim_meta(partition, "train", ["x"], 8, blocking=False, where=[("std", ">", 0.0)])
    assert ready.sample_ids == ["s1", "s2", "s4", "s5", "s7"]
    assert client.claim_meta(partition, "ref", ["x"], 2, order="freshest").sample_ids == ["s7", "s6"]
    groups = client.claim_meta(partition, "ref", ["x"], 5, blocking=False, group_size=2)
    assert groups.sample_ids == ["s0", "s1", "s2", "s3"]
    with pytest.raises(ValueError, match="where"):
        client.claim_meta(partition, "ref", ["x"], 1, where=[("std", "~", 0.0)])
    for operator, value in ((">", math.nan), ("!=", np.float32("nan")), ("in", [0.0, math.nan])):
        with pytest.raises(ValueError, match=f"where: 'std' {operator} NaN: NaN equals no value"):
            client.claim_meta(partition, "ref", ["x"], 1, where=[("std", operator, value)])
    infinite = [("std", ">", math.inf)]
    assert client.claim_meta(partition, "ref", ["x"], 8, blocking=False, where=infinite).size == 0


def test_conditions_may_be_texts(client: DataPlaneClient, partition: str) -> None:
    register(client, partition)
    put(client, partition, 0, 4)
    client.set_tags(
        [f"s{n}" for n in range(4)],
        partition,
        [{"std": n / 2, "source": "math" if n % 2 else "code"} for n in range(4)],
    )
    found = client.why_blocked(partition, "ref", ["x"], where=["std > 0", ("source", "==", "math")])
    assert found.matching == 2
    only = client.claim_meta(partition, "ref", ["x"], 8, blocking=False, where="source == 'code'")
    assert only.sample_ids == ["s0", "s2"]
    both = client.claim_meta(partition, "train", ["x"], 8, blocking=False, where=["std > 0", 'source in ["math"]'])
    assert both.sample_ids == ["s1", "s3"]
    with pytest.raises(ValueError, match="'std': expected TAG OPERATOR VALUE"):
        client.claim_meta(partition, "ref", ["x"], 1, where="std")


def test_a_claim_with_a_lag_follows_the_trainer(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    register(client, partition, None)
    tags = [{"weight_version": n} for n in range(6)]
    client.put_samples([f"s{n}" for n in range(6)], partition, {"x": torch.arange(6)}, tags=tags)
    client.set_version(partition, 5)
    assert client.claim_meta(partition, "ref", ["x"], 9, blocking=False, max_lag=1).sample_ids == ["s4", "s5"]
    client.seal(partition)
    client.set_version(partition, 3)
    assert client.claim_meta(partition, "train", ["x"], 9, max_lag=1).sample_ids == ["s2", "s3", "s4", "s5"]
    with pytest.raises(KeyError):
        client.set_version("nowhere", 1)


def test_partial_groups_are_released_or_dropped_in_time(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, 3)
    tags = [{"group": group} for group in "aab"]
    client.put_samples(["a0", "a1", "b0"], partition, {"x": torch.arange(3)}, tags=tags)
    released = client.claim_meta(partition, "ref", ["x"], 4, group_size=2, partial_after_s=0.2, timeout_s=30.0)
    assert released.sample_ids == ["a0", "a1", "b0"]
    kept = client.claim_meta(
        partition, "train", ["x"], 4, group_size=2, partial_after_s=0.2, partial="drop", timeout_s=30.0
    )
    assert kept.sample_ids == ["a0", "a1"]
    assert kept.extra_info["dropped_samples"] == ["b0"]
    assert client.list_samples(partition).sample_ids == ["a0", "a1"]
    assert [part.dropped for part in client.stats().partitions if part.partition == partition] == [1]
    with pytest.raises(ValueError, match="partial='keep'"):
        client.claim_meta(partition, "train", ["x"], 4, group_size=2, partial_after_s=1.0, partial="keep")


def test_leases_end_are_acknowledged_or_given_back(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, None)
    put(client, partition, 0, 4)
    kept = client.claim_meta(partition, "train", ["x"], 2, lease_s=60.0)
    lost = client.claim_meta(partition, "train", ["x"], 2, lease_s=0.2)
    client.ack(kept)
    again = client.claim_meta(partition, "train", ["x"], 2, timeout_s=30.0)
    assert again.sample_ids == lost.sample_ids
    with pytest.raises(KeyError):
        client.ack(lost)
    client.nack(again)
    assert client.claim_meta(partition, "train", ["x"], 2).sample_ids == lost.sample_ids


def test_a_lease_belongs_to_one_claim_and_is_settled_by_the_sample(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    register(client, partition, 4)
    put(client, partition, 0, 4)
    late = client.claim_meta(partition, "train", ["x"], 4, lease_s=60.0)
    client.nack(late.slice(0, 2))
    rightful = client.claim_meta(partition, "train", ["x"], 2, lease_s=60.0)
    client.clear_samples(["s3"], partition)
    assert client.extend(rightful, 60.0) == []
    assert not client.check_consumption_status(partition, ["train"])
    with pytest.raises(StaleSampleError, match=r"'s0', 's1'.*lease ended") as caught:
        client.ack(late)
    assert caught.value.samples == ["s0", "s1"]
    assert open_client().ack(KVBatchMeta.concat([rightful, late.slice(3, 4)])) == ["s3"]
    assert client.check_consumption_status(partition, ["train"]), "and s2 was acknowledged with the others"
    with pytest.raises(StaleSampleError):
        client.nack(late)
    assert client.claim_meta(partition, "train", ["x"], 4, blocking=False).size == 0
    with pytest.raises(ValueError, match="meta has no claim"):
        client.ack(client.list_samples(partition))


def test_all_samples_that_are_anothers_now_are_named(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, None)
    put(client, partition, 0, 20)
    late = client.claim_meta(partition, "train", ["x"], 20, lease_s=60.0)
    back = late.subset(range(1, 20, 2))
    client.nack(back)
    with pytest.raises(StaleSampleError, match="and 5 more") as caught:
        client.ack(late)
    assert caught.value.samples == back.sample_ids
    again = client.claim_meta(partition, "train", ["x"], 20, blocking=False, min_batch_size=1)
    assert again.sample_ids == back.sample_ids


def test_the_text_about_a_claim_has_a_few_of_many_values(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, None)
    put(client, partition, 0, 1)
    names = [str(number) for number in range(20_000)]
    with pytest.raises(ClaimTimeoutError, match=r"k in \('0', .*and 19995 more\)") as caught:
        client.claim_meta(partition, "train", ["x"], 1, where=[("k", "in", names)], timeout_s=0.01)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("length", [float("nan"), float("inf"), -1, 2**60])
def test_a_tag_that_is_no_number_of_tokens_is_refused(client: DataPlaneClient, partition: str, length: float) -> None:
    register(client, partition, 4)
    with pytest.raises(ValueError, match="not a number of tokens"):
        client.put_samples(["bad"], partition, {"x": torch.zeros(1)}, tags=[{"input_lengths": length}])
    put(client, partition, 0, 4)
    with pytest.raises(ValueError, match="not a number of tokens"):
        client.set_tags(["s0"], partition, [{"input_lengths": length}])
    assert client.claim_meta(partition, "train", ["x"], 4).sequence_lengths == [5] * 4


def test_the_ranks_of_a_step_share_one_selection(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    register(client, partition, None)
    other = open_client()

    def share(who: DataPlaneClient, rank: int, step: int = 1, **more: object) -> list[str]:
        meta = who.claim_meta(partition, "train", ["x"], 4, rank, dp_world=2, step=step, **more)  # type: ignore[arg-type]
        assert meta.extra_info["dp_rank"] == rank
        return list(meta.sample_ids)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(share, other, 1, timeout_s=60.0)
        tags = [{"input_lengths": length} for length in (9, 1, 1, 1, 1, 7, 3, 3)]
        client.put_samples([f"s{n}" for n in range(8)], partition, {"x": torch.arange(8)}, tags=tags)
        assert waiting.result(60) == ["s1", "s2"]
    assert client.claim_meta(partition, "train", ["x"], 8, blocking=False).sample_ids == ["s4", "s5", "s6", "s7"]
    assert share(client, 0) == ["s0", "s3"]
    with pytest.raises(ValueError, match="already got its share of step 1"):
        share(other, 0)
    with pytest.raises(ValueError, match="fixed with sampler=length-balanced; this claim has sampler=sequential"):
        share(client, 0, sampler="sequential")
    with pytest.raises(ValueError, match="all three"):
        client.claim_meta(partition, "train", ["x"], 4, step=3)


def test_a_share_that_went_back_is_handed_out_again_unless_another_took_it(
    client: DataPlaneClient, partition: str
) -> None:
    register(client, partition, 4)
    put(client, partition, 0, 4)
    first = client.claim_meta(partition, "train", ["x"], 4, 0, dp_world=2, step=0, sampler="rank-aware")
    assert first.sample_ids == ["s0", "s2"]
    client.nack(first)
    again = client.claim_meta(partition, "train", ["x"], 4, 0, dp_world=2, step=0, sampler="rank-aware")
    assert again.sample_ids == first.sample_ids
    client.nack(again)
    client.claim_meta(partition, "train", ["x"], 1)
    with pytest.raises(ShareConflictError, match="'s0'") as caught:
        client.claim_meta(partition, "train", ["x"], 4, 0, dp_world=2, step=0, sampler="rank-aware")
    assert (caught.value.samples, caught.value.step) == (["s0"], 0)


def test_registering_again_keeps_rows_and_cursors(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, 4)
    put(client, partition, 0, 4)
    client.claim_meta(partition, "train", ["x"], 2)
    client.register_partition(partition, ["x"], 6, ["train", "new"])
    assert client.list_samples(partition).size == 4
    assert client.claim_meta(partition, "train", ["x"], 2).sample_ids == ["s2", "s3"]
    assert client.claim_meta(partition, "new", ["x"], 4).size == 4
    with pytest.raises(TaskNotFoundError):
        client.claim_meta(partition, "ref", ["x"], 1)
    put(client, partition, 4, 6)
    assert client.claim_meta(partition, "train", ["x"], 8).sample_ids == ["s4", "s5"]


def test_strict_partitions_refuse_undeclared_fields(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"], strict=True)
    with pytest.raises(ValueError, match="'y'"):
        put(client, partition, 0, 2, field="y")
    assert client.list_samples(partition).size == 0
    put(client, partition, 0, 2)


def test_clear(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, None)
    put(client, partition, 0, 4)
    client.clear_samples(["s1", "nobody"], partition)
    client.clear_samples(["s1"], partition)
    assert client.list_samples(partition).sample_ids == ["s0", "s2", "s3"]
    client.clear_samples(None, partition)
    client.clear_samples(None, partition)
    with pytest.raises(PartitionNotFoundError):
        client.list_samples(partition)


def test_many_claimers_share_without_overlap(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    register(client, partition, 64)
    taken: list[str] = []
    guard = threading.Lock()

    def drain() -> None:
        mine = open_client()
        while (meta := mine.claim_meta(partition, "train", ["x"], 4, timeout_s=60.0)).size:
            assert mine.get_data(meta)["x"].tolist() == [int(name[1:]) for name in meta.sample_ids]
            with guard:
                taken.extend(meta.sample_ids)

    threads = [threading.Thread(target=drain) for _ in range(3)]
    for thread in threads:
        thread.start()
    for first in range(0, 64, 8):
        put(client, partition, first, first + 8)
    for thread in threads:
        thread.join(120)
    assert sorted(taken) == sorted(f"s{n}" for n in range(64))


def test_two_ranks_and_four_producers_share_without_overlap(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    register(client, partition, 36)
    shares: dict[tuple[int, int], list[str]] = {}

    def produce(who: int) -> None:
        mine = open_client()
        for first in range(9 * who, 9 * who + 9, 3):
            put(mine, partition, first, first + 3)

    def train(rank: int) -> None:
        mine = open_client()
        for step in range(99):
            meta = mine.claim_meta(partition, "train", ["x"], 8, rank, timeout_s=60.0, dp_world=2, step=step)
            shares[rank, step] = list(meta.sample_ids)
            if not meta.size:
                return

    threads = [threading.Thread(target=produce, args=(who,)) for who in range(4)]
    threads += [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [len(shares[0, step]) for step in range(6)] == [len(shares[1, step]) for step in range(6)]
    assert [len(shares[0, step]) for step in range(6)] == [4, 4, 4, 4, 2, 0]
    assert sorted(name for one in shares.values() for name in one) == sorted(f"s{n}" for n in range(36))


def test_dropping_the_partition_ends_waiting_claims(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    register(client, partition, None)
    other = open_client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.claim_meta, partition, "train", ["x"], 4, timeout_s=60.0)
        wait_until(lambda: any(p.waiting_claims for p in client.stats().partitions if p.partition == partition))
        client.clear_samples(None, partition)
        with pytest.raises(ValueError, match="was cleared or replaced while a claim of task 'train'"):
            waiting.result(60)


def test_why_blocked(client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]) -> None:
    register(client, partition, 8)
    tags = [{"group": n // 3, "weight_version": n} for n in range(4)]
    client.put_samples([f"s{n}" for n in range(4)], partition, {"x": torch.arange(4)}, tags=tags)
    put(open_client(client_name="reward"), partition, 0, 3, field="y")
    client.set_version(partition, 2)
    terms = {"where": [("group", "==", 0)], "group_size": 2, "max_lag": 1}
    blocked = client.why_blocked(partition, "train", ["x", "y"], **terms)
    with pytest.raises(ClaimTimeoutError) as caught:
        client.claim_meta(partition, "train", ["x", "y"], 4, timeout_s=0.2, **terms)
    error = caught.value
    for facts in (blocked, error):
        assert (facts.unclaimed, facts.matching, facts.claimed, facts.born, facts.expected) == (4, 2, 0, 4, 8)
        assert facts.lacking == {"x": 0, "y": 1}
        assert facts.filtered == {"group == 0": 0, "weight_version >= 1": 1}
        assert (facts.groups, facts.partial_groups, facts.partial, facts.version) == (1, 1, {"1": 0}, 2)
        assert "1 fail weight_version >= 1" in facts.why
        assert "4 of 8 samples have been put" in facts.why
    assert [(writer.name, writer.fields, writer.live) for writer in blocked.writers][:1] == [("reward", ("y",), True)]
    assert error.writers[0]["name"] == "reward"
    assert 0 <= error.writers[0]["ago_s"] < 60
    assert "'reward'" in str(error)
