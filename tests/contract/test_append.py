"""Rows that grow: samples whose generation is interrupted and resumed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, Shared
from dataplane.errors import ClaimTimeoutError, RowsChangedError, StaleSampleError

pytestmark = pytest.mark.integration


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows(client: DataPlaneClient, partition: str, names: list[str], field: str = "input_ids") -> list[list[int]]:
    return [row.tolist() for row in client.get_samples(names, partition, [field])[field].unbind()]


@pytest.fixture
def partition(client: DataPlaneClient, partition: str) -> str:
    client.register_partition(partition, ["input_ids", "token_mask", "seen"], None, ["train"])
    return partition


def test_pieces_stand_one_behind_the_other(client: DataPlaneClient, partition: str) -> None:
    first = client.put_samples(["a"], partition, {"input_ids": [ints(1, 2)], "seen": ints(0)}, mode="append")
    assert first.sequence_lengths == [2]
    more = {"input_ids": [ints(3), ints(7, 8)], "seen": ints(1, 1)}
    second = client.put_samples(["a", "b"], partition, more, tags=[{"v": 1}, {"v": 1}], mode="append")
    assert second.sequence_lengths == [3, 2]
    third = client.put_samples(second, partition, {"input_ids": [ints(), ints(9)]}, mode="append")
    assert third.sequence_lengths == [3, 3]
    assert rows(client, partition, ["a", "b"]) == [[1, 2, 3], [7, 8, 9]]
    assert client.get_samples(["a", "b"], partition, ["seen"])["seen"].tolist() == [1, 1]
    assert client.get_data(second, ["input_ids"])["input_ids"].unbind()[1].tolist() == [7, 8, 9]


def test_a_field_that_is_new_to_some_rows(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["a"], partition, {"input_ids": [ints(1)], "token_mask": [ints(1)]})
    client.put_samples(["b"], partition, {"input_ids": [ints(2)]})
    shared = Shared([ints(5, 6)], [0, 0])
    more = {"input_ids": shared, "token_mask": [ints(0, 0), ints(1)], "fresh": [ints(4), ints(4)]}
    client.put_samples(["a", "b"], partition, more, mode="append")
    assert rows(client, partition, ["a", "b"]) == [[1, 5, 6], [2, 5, 6]]
    assert rows(client, partition, ["b", "a"], "token_mask") == [[1], [1, 0, 0]]


def test_finished_is_a_tag_that_predicates_see_with_the_last_piece(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["a", "b"], partition, {"input_ids": [ints(1), ints(2)]}, tags=[{"finished": False}] * 2)
    done = [("finished", "==", True)]
    with pytest.raises(ClaimTimeoutError) as caught:
        client.claim_meta(partition, "train", ["input_ids"], 1, timeout_s=0.1, where=done)
    assert caught.value.filtered == {"finished == True": 2}
    client.put_samples(["b"], partition, {"input_ids": [ints(3)]}, tags=[{"finished": True}], mode="append")
    meta = client.claim_meta(partition, "train", ["input_ids"], 1, where=done)
    assert meta.sample_ids == ["b"]
    assert client.get_data(meta)["input_ids"].unbind()[0].tolist() == [2, 3]


def test_tags_alone_and_dense_fields_alone(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["a"], partition, {"input_ids": [ints(1)]}, mode="append")
    client.put_samples(["a"], partition, tags=[{"n": 2}], mode="append")
    client.put_samples(["a"], partition, {"seen": ints(4)}, mode="append")
    assert client.list_samples(partition).tags == [{"n": 2}]
    assert rows(client, partition, ["a"]) == [[1]]


def test_through_a_stale_meta_nothing_is_appended(client: DataPlaneClient, partition: str) -> None:
    meta = client.put_samples(["a"], partition, {"input_ids": [ints(1)]})
    client.clear_samples(["a"], partition)
    client.put_samples(["a"], partition, {"input_ids": [ints(5)]})
    with pytest.raises(StaleSampleError, match="'a'"):
        client.put_samples(meta, partition, {"input_ids": [ints(2)]}, mode="append")
    assert rows(client, partition, ["a"]) == [[5]]


def test_a_wrong_dtype_is_an_error_and_leaves_the_row(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["a"], partition, {"input_ids": [ints(1)]})
    with pytest.raises(ValueError, match="input_ids"):
        client.put_samples(["a"], partition, {"input_ids": [torch.ones(2)]}, mode="append")
    with pytest.raises(ValueError, match="append"):
        client.put_samples(["a"], partition, {"input_ids": [ints(1)]}, mode="appendix")
    assert rows(client, partition, ["a"]) == [[1]]


def test_appends_of_two_clients_are_whole_and_each_in_its_order(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    def work(who: int) -> None:
        mine = open_client()
        for turn in range(10):
            piece = [ints(who, turn, who), ints(who)]
            while True:
                try:
                    mine.put_samples(["a", "b"], partition, {"input_ids": piece}, mode="append")
                    break
                except RowsChangedError:
                    continue

    threads = [threading.Thread(target=work, args=(who,)) for who in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    long, short = rows(client, partition, ["a", "b"])
    pieces = [tuple(long[i : i + 3]) for i in range(0, len(long), 3)]
    assert all(piece[0] == piece[2] for piece in pieces)
    assert short == [piece[0] for piece in pieces]
    for who in (1, 2):
        assert [turn for one, turn, _ in pieces if one == who] == list(range(10))


def test_old_views_stay_as_they_were_and_no_bytes_are_lost(client: DataPlaneClient, partition: str) -> None:
    def live() -> Any:
        return sum(part.live_bytes for part in client.stats().partitions if part.partition == partition)

    client.put_samples(["a"], partition, {"input_ids": [torch.arange(1000)]})
    before = live()
    view = client.get_samples(["a"], partition, ["input_ids"], copy=False)["input_ids"].unbind()[0]
    for _ in range(5):
        client.put_samples(["a"], partition, {"input_ids": [torch.arange(1000)]}, mode="append")
    assert torch.equal(view, torch.arange(1000))
    assert rows(client, partition, ["a"]) == [torch.arange(1000).repeat(6).tolist()]
    assert live() <= 7 * before


def test_rows_of_no_bytes_grow_too(client: DataPlaneClient, partition: str) -> None:
    for count in (3, 0, 2):
        client.put_samples(["a"], partition, {"empty": [torch.zeros(count, 0)]}, mode="append")
    assert list(client.get_samples(["a"], partition, ["empty"])["empty"].unbind()[0].shape) == [5, 0]
