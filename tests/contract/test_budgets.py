"""Budgets of partitions, through the whole service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient
from dataplane.errors import CapacityTimeoutError, InvalidRequestError, RequestTooLargeError

pytestmark = pytest.mark.integration

KIB = 1024
WIDTH = 256


def rows(*numbers: int) -> dict[str, Any]:
    """A KiB for each."""
    return {"x": torch.stack([torch.full((WIDTH,), number, dtype=torch.int32) for number in numbers])}


def put(client: DataPlaneClient, partition: str, *numbers: int) -> Any:
    return client.put_samples([f"s{number}" for number in numbers], partition, rows(*numbers))


def held(client: DataPlaneClient, partition: str) -> Any:
    return next(found for found in client.stats().partitions if found.partition == partition)


def register(client: DataPlaneClient, partition: str, budget: int, policy: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"], budget_bytes=budget, when_full=policy)


def test_a_put_waits_for_the_budget_until_there_is_space(
    open_client: Callable[..., Any], client: DataPlaneClient, partition: str
) -> None:
    register(client, partition, 10 * KIB, "wait")  # 8.5 KiB of it for new rows
    put(client, partition, *range(8))
    other = open_client()
    putting = threading.Thread(target=put, args=(other, partition, 8))
    putting.start()
    try:
        while not held(client, partition).waiting_puts:
            assert putting.is_alive()
    finally:
        client.clear_samples(["s0", "s1", "s2", "s3", "s4"], partition)
        putting.join()
    assert held(client, partition).live == 4
    assert held(client, partition).used_bytes <= 10 * KIB
    assert client.get_samples(["s8"], partition, ["x"])["x"].tolist() == rows(8)["x"].tolist()


def test_the_wait_ends_with_an_error_that_says_who_holds_the_budget(
    open_client: Callable[..., Any], client: DataPlaneClient, partition: str
) -> None:
    register(client, partition, 4 * KIB, "wait")
    put(client, partition, 0, 1, 2)
    with pytest.raises(CapacityTimeoutError, match=f"budget of partition '{partition}'.*not claimed by 'train'"):
        put(open_client(put_timeout_s=0.01), partition, 3)
    with pytest.raises(RequestTooLargeError, match="larger budget_bytes"):
        put(client, partition, *range(4))
    client.put_samples(["s0"], partition, {"y": torch.zeros(1, 64)}, mode="update")


def test_rejecting(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, 4 * KIB, "reject")
    put(client, partition, 0, 1, 2)
    with pytest.raises(CapacityTimeoutError):
        put(client, partition, 3)
    assert held(client, partition).waiting_puts == 0
    with pytest.raises(InvalidRequestError, match="when_full='maybe': expected one of wait, reject"):
        register(client, partition, 4 * KIB, "maybe")


def test_a_ring_of_consumed_samples(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, 10 * KIB, "evict")
    for number in range(40):
        meta = put(client, partition, number)
        assert "evicted_samples" not in meta.extra_info
        claimed = client.claim_meta(partition, "train", ["x"], 1, lease_s=600.0)
        assert claimed.sample_ids == [f"s{number}"]
        assert client.get_data(claimed)["x"].tolist() == rows(number)["x"].tolist()
        client.ack(claimed)
    stats = held(client, partition)
    assert (stats.evicted, stats.evicted_unconsumed) == (32, 0)
    assert stats.peak_used_bytes <= 10 * KIB


def test_unconsumed_samples_that_had_to_go_are_told_of(client: DataPlaneClient, partition: str) -> None:
    register(client, partition, 10 * KIB, "evict_oldest")
    metas = [put(client, partition, number) for number in range(20)]
    gone = [name for meta in metas for name in meta.extra_info.get("evicted_samples", [])]
    assert gone == [f"s{number}" for number in range(12)]
    assert held(client, partition).evicted_unconsumed == 12
    for names in (metas[0], ["s0"]):
        with pytest.raises(KeyError, match="1 of them were evicted") as caught:
            client.get_samples(names, partition, ["x"])
        assert caught.value.evicted == 1  # type: ignore[attr-defined]
    assert client.list_samples(partition).sample_ids == [f"s{number}" for number in range(12, 20)]


@pytest.mark.parametrize("policy", ["evict", "evict_oldest"])
def test_a_write_back_by_ids_into_a_full_partition_keeps_the_samples_that_it_writes(
    client: DataPlaneClient, partition: str, policy: str
) -> None:
    register(client, partition, 4 * KIB, policy)
    more = torch.full((1, 2 * WIDTH), 7, dtype=torch.int32)
    for number in range(3):
        put(client, partition, number)
    assert client.claim_meta(partition, "train", ["x"], 3).size == 3
    client.list_samples(partition)
    written = client.put_samples(["s0"], partition, {"y": more})
    assert "evicted_samples" not in written.extra_info
    left = client.list_samples(partition).sample_ids
    assert left[0] == "s0"
    assert "s1" not in left
    assert client.get_samples(["s0"], partition, ["x"])["x"].tolist() == rows(0)["x"].tolist()
    assert client.get_samples(["s0"], partition, ["y"])["y"].tolist() == more.tolist()
    assert client.claim_meta(partition, "train", ["x"], 1, blocking=False).size == 0
