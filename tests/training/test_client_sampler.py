"""Selection strategies of a program's own, over a running service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dataplane import ClientSampler, DataPlaneClient, KVBatchMeta, connect, serve

pytestmark = pytest.mark.integration
REWARDS = {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.7}


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with serve({"capacity_bytes": 8 << 20}) as server, connect(server.address) as opened:
        opened.register_partition("p", ["x"], None, ["train"])
        opened.put_samples(list(REWARDS), "p", tags=[{"reward": reward} for reward in REWARDS.values()])
        yield opened


class BestFirst(ClientSampler):
    def select(self, pool: KVBatchMeta, batch_size: int) -> Sequence[int]:
        assert pool.tags is not None
        rewards = [float(tags["reward"]) for tags in pool.tags]
        return sorted(range(pool.size), key=lambda row: -rewards[row])[:batch_size]


class Fixed(ClientSampler):
    rows: Sequence[int] = ()

    def select(self, pool: KVBatchMeta, batch_size: int) -> Sequence[int]:
        return self.rows


def test_a_strategy_chooses_from_the_pool_and_the_rest_goes_back(client: DataPlaneClient) -> None:
    best = BestFirst(client, "p", "train", [], pool_size=4)
    assert best.claim(2).sample_ids == ["b", "d"]
    assert client.claim_meta("p", "train", [], 4, blocking=False).sample_ids == ["a", "c"]


def test_only_the_pool_is_looked_at(client: DataPlaneClient) -> None:
    assert BestFirst(client, "p", "train", [], pool_size=1).claim(1).sample_ids == ["a"]


def test_options_are_those_of_a_claim(client: DataPlaneClient) -> None:
    best = BestFirst(client, "p", "train", [], pool_size=4, where="reward < 0.8", lease_s=60.0, min_batch_size=1)
    kept = best.claim(2)
    assert kept.sample_ids == ["d", "c"]
    client.seal("p")
    assert not client.check_consumption_status("p", ["train"])
    assert client.nack(kept) == []
    with pytest.raises(TypeError, match="group_sise"):
        BestFirst(client, "p", "train", [], pool_size=4, group_sise=2)  # type: ignore[call-arg]


def test_a_complete_partition_ends_in_an_empty_meta(client: DataPlaneClient) -> None:
    client.seal("p")
    best = BestFirst(client, "p", "train", [], pool_size=4)
    assert [best.claim(3).size for _ in range(3)] == [3, 1, 0]


@pytest.mark.parametrize("rows", [[0, 0], [4], [-1], [0, 1, 2], [0.0], [True, False], None, ["0"]])
def test_rows_that_are_none_are_refused_and_the_pool_goes_back(client: DataPlaneClient, rows: Any) -> None:
    fixed = Fixed(client, "p", "train", [], pool_size=4)
    fixed.rows = rows
    with pytest.raises(ValueError, match=r"Fixed\.select"):
        fixed.claim(2)
    fixed.rows = []
    assert fixed.claim(2).size == 0
    assert client.claim_meta("p", "train", [], 4, blocking=False).size == 4


def test_a_client_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="client: expected a DataPlaneClient, got object"):
        BestFirst(object(), "p", "train", [], pool_size=4)  # type: ignore[arg-type]


def test_rows_may_be_a_tensor(client: DataPlaneClient) -> None:
    fixed = Fixed(client, "p", "train", [], pool_size=4)
    fixed.rows = torch.tensor([2, 0])  # type: ignore[assignment]
    assert fixed.claim(2).sample_ids == ["c", "a"]


@pytest.mark.parametrize("pool_size", [0, -1, "4", None, True])
def test_the_size_of_a_pool_is_checked(client: DataPlaneClient, pool_size: Any) -> None:
    with pytest.raises(ValueError, match="pool_size="):
        BestFirst(client, "p", "train", [], pool_size=pool_size)
