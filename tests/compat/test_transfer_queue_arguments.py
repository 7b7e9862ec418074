"""Unusual arguments of calls of the low-level client and of reads by key: the results are those of
the package, as `scripts/arguments.py` shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import dataplane.compat.transfer_queue as tq
from dataplane.compat.transfer_queue import operations

pytestmark = pytest.mark.integration


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    """Of a service of its own, which answers at once."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init({"controller": {"polling_mode": True}, "dataplane": {"capacity_bytes": 32 << 20}})
    yield tq.get_client()
    tq.close()


def test_get_meta_does_not_make_a_partition(client: tq.TransferQueueClient) -> None:
    for count in (0, 2):
        assert client.get_meta(["v"], count, "p", task_name="t").size == 0
    with pytest.raises(RuntimeError, match="partition 'p'"):
        client.get_meta(["v"], 2, "p", mode="force_fetch")
    assert client.get_consumption_status("t", "p") == (None, None)
    assert tq.kv_list() == {}
    assert client.get_partition_list() == []


@pytest.mark.parametrize("sampler", [tq.GRPOGroupNSampler(2), tq.SeqlenBalancedSampler(1, 2)])
def test_no_sampler_makes_a_partition(monkeypatch: pytest.MonkeyPatch, sampler: Any) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    settings = {"sampler": sampler, "polling_mode": True}
    tq.init({"controller": settings, "dataplane": {"capacity_bytes": 32 << 20}})
    try:
        client = tq.get_client()
        rank = {"dp_rank": 0}
        assert client.get_meta(["v"], 2, "p", task_name="t", sampling_config=rank).size == 0
        assert client.get_partition_list() == []
    finally:
        tq.close()


@pytest.mark.parametrize("count", [0, -1])
def test_an_insert_of_nothing_makes_a_partition(client: tq.TransferQueueClient, count: int) -> None:
    made = client.get_meta(["v"], count, "p", mode="insert")
    assert (made.size, made.field_names, made.is_ready) == (0, ["v"], False)
    assert client.get_partition_list() == ["p"]
    with pytest.raises(ValueError, match="no rows"):
        client.put(TensorDict({}, batch_size=0), partition_id="p")


@pytest.mark.parametrize("mode", ["insert", "fetch"])
def test_get_meta_without_fields_or_samples(client: tq.TransferQueueClient, mode: str) -> None:
    with pytest.raises(RuntimeError, match="data_fields is None"):
        client.get_meta(None, 2, "p", mode=mode, task_name="t")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="batch_size=None: expected an int"):
        client.get_meta(["v"], None, "p", mode=mode, task_name="t")  # type: ignore[arg-type]


def test_a_production_status_has_the_order_of_the_partition(client: tq.TransferQueueClient) -> None:
    whole: dict[str, Any] = {"z": torch.tensor(1), "t": "text", "a": torch.zeros(2, 2)}
    whole |= {"o": np.zeros(2), "m": torch.zeros(3)}
    tq.kv_put("all", "p", whole)
    for name, value in whole.items():
        tq.kv_put(name, "p", {name: value})
    last = {"b": NonTensorStack(1), "a": torch.ones(1, 1, 2)}
    tq.kv_batch_put(["b"], "p", TensorDict(last, batch_size=1))

    def columns(*names: str) -> list[list[int]]:
        """Per column: of "all" and of the keys that have one field."""
        _, status = client.get_production_status(list(names), "p")
        assert status is not None
        return status.T.tolist()

    lone = {name: [1, *(int(name == other) for other in whole), 0] for name in whole}
    lone["a"][-1] = 1
    assert columns(*whole) == columns(*reversed(whole)) == list(lone.values())
    assert columns("m", "z", "m") == [lone["z"], lone["m"]]
    assert columns("b", "b") == [[0] * 6 + [1]]


def test_a_partition_keeps_fields_whose_values_were_all_cleared(
    client: tq.TransferQueueClient,
) -> None:
    tq.kv_put("a", "p", {"v": torch.tensor(1), "w": torch.zeros(2, 2), "o": "text"})
    tq.kv_put("b", "p", {"v": torch.tensor(1)})

    def columns() -> list[list[int]]:
        _, status = client.get_production_status(["o", "w", "v"], "p")
        assert status is not None
        return status.T.tolist()

    tq.kv_clear("a", "p")
    assert columns() == [[1], [0], [0]]
    assert not client.check_production_status(["w"], "p")
    tq.kv_clear("b", "p")
    assert columns() == [[], [], []]
    assert client.check_production_status(["w"], "p")
    tq.kv_put("c", "p", {"w": torch.zeros(3, 1)})
    assert columns() == [[0], [1], [0]]


def test_fields_are_declared_once(client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = []
    extend = operations.extend_partition

    def spy(session_state: Any, partition: str, **options: Any) -> Any:
        declared.append(sorted(options.get("fields") or {}))
        return extend(session_state, partition, **options)

    monkeypatch.setattr(operations, "extend_partition", spy)
    for number in range(3):
        tq.kv_put(f"k{number}", "p", {"v": torch.tensor(1), "w": torch.zeros(2, 2)}, {"n": 1})
        tq.kv_put(f"k{number}", "p", {"x": "text"})
        tq.kv_put(f"k{number}", "p", tag={"n": 2})
    assert declared == [["v", "w"], ["x"]]


def test_sizes_of_batches(client: tq.TransferQueueClient) -> None:
    client.put(TensorDict({"v": torch.arange(3)}, batch_size=3), partition_id="p")
    assert client.get_meta(["v"], True, "p", task_name="t").size == 1
    assert client.get_meta(["v"], np.int64(1), "p", task_name="t").size == 1  # type: ignore[arg-type]
    assert client.get_meta(["v"], False, "p", mode="insert").size == 0
    for size in (1.0, -1, "1"):
        with pytest.raises(RuntimeError, match=f"batch_size={size!r}: expected"):
            client.get_meta(["v"], size, "p", task_name="t")  # type: ignore[arg-type]
        if size != -1:
            with pytest.raises(RuntimeError, match=f"batch_size={size!r}: expected"):
                client.get_meta(["v"], size, "q", mode="insert")  # type: ignore[arg-type]
        assert client.get_meta(["v"], size, "p", mode="force_fetch").size == 3  # type: ignore[arg-type]
    assert client.get_partition_list() == ["p"]


def test_repeated_keys_are_created_once(client: tq.TransferQueueClient) -> None:
    meta = client.kv_retrieve_meta(["x", "y", "x"], "p", create=True)
    assert meta.size == 3
    assert client.kv_retrieve_keys(meta.global_indexes, "p") == ["x", "y", "x"]
    assert tq.kv_list("p") == {"p": {"x": {}, "y": {}}}


def test_a_read_has_its_fields_in_the_order_of_their_names(client: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "p", {"z": torch.tensor(1), "a": torch.zeros(2, 2), "m": "text"})
    names: list[Any] = [None, ["z", "m", "a", "z"]]
    for fields in names:
        assert list(tq.kv_batch_get("k", "p", fields).keys()) == ["a", "m", "z"]


def test_a_read_of_missing_keys_says_what_the_package_says(client: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["late"], "p", tags=[{}])
    for partition in ("p", "nowhere"):
        for fields in (None, ["v"]):
            text = f"keys or partition were not found: .*{partition!r}.*'x', 'y'"
            with pytest.raises(ValueError, match=text):
                tq.kv_batch_get(["x", "y"], partition, fields)
    text = "Some fields are not ready in all the requested keys: 'late'"
    with pytest.raises(ValueError, match=text):
        tq.kv_batch_get("late", "p", ["v"])


@pytest.mark.parametrize("values", [["a", "b"], ("a", "b")])
def test_a_list_of_non_tensors_is_rows(client: tq.TransferQueueClient, values: Any) -> None:
    """NeMo-RL's adapter refuses it, TransferQueue stores it."""
    tq.kv_batch_put(["k", "l"], "p", TensorDict({"x": NonTensorData(values)}, batch_size=2))
    assert tq.kv_batch_get(["l", "k"], "p").get("x").tolist() == ["b", "a"]
