"""Puts by key: what they give back, and what they ask the service for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import dataplane.compat.transfer_queue as tq
from dataplane import connect
from dataplane.client.rpc.pending_calls import Calls
from dataplane.compat.transfer_queue.columns import ENCODED
from dataplane.errors import InvalidRequestError, UnsupportedValueError

pytestmark = pytest.mark.integration


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    """Of a service of its own."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init({"dataplane": {"capacity_bytes": 32 << 20}})
    yield tq.get_client()
    tq.close()


def values(count: int) -> TensorDict:
    return TensorDict({"v": torch.arange(count)}, batch_size=count)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the commands that clients send from now on."""
    names: list[str] = []
    begin = Calls.begin

    def seen(self: Calls, command: Any, timeout_s: float | None = None) -> Any:
        names.append(type(command).__name__)
        return begin(self, command, timeout_s)

    monkeypatch.setattr(Calls, "begin", seen)
    return names


def test_the_answer_to_a_put_says_what_the_samples_have(client: tq.TransferQueueClient, sent: list[str]) -> None:
    made = tq.kv_put("a", "p", {"v": torch.tensor(1), "w": torch.arange(3)}, {"n": 1})
    assert (made.keys, made.tags, made.fields, made.partition_id) == (["a"], [{"n": 1}], ["v", "w"], "p")
    tags = tq.kv_put("b", "p", tag={"n": 2})
    assert (tags.tags, tags.fields) == ([{"n": 2}], [])
    assert tq.kv_batch_put(["c", "d"], "p", values(2)).tags == [{}, {}]
    again = tq.kv_put("a", "p", {"x": torch.tensor(1)}, {"m": None})
    assert (again.tags, again.fields) == ([{"n": 1, "m": None}], ["v", "w", "x"])
    some = tq.kv_batch_put(["a", "e"], "p", values(2), [{}, {"n": 5}])
    assert (some.tags, some.fields) == ([{"n": 1, "m": None}, {"n": 5}], ["v"])
    assert "List" not in sent


def test_tags_come_back_as_the_service_has_them_and_are_the_callers_own(client: tq.TransferQueueClient) -> None:
    items = [1]
    tag = {"real": np.float64(0.5), "count": torch.tensor(3), "flag": np.bool_(True), "none": None, "items": items}
    made = tq.kv_batch_put(["a", "b"], "p", tags=[tag, {"text": "x"}])
    assert made.tags == list(tq.kv_list("p")["p"].values())
    assert [type(value) for value in made.tags[0].values()] == [float, int, bool, type(None), list]
    assert made.tags[1] == {"text": "x"}
    made.tags[0]["items"].append(2)
    made.tags[0]["new"] = 1
    assert items == [1]
    assert "new" not in tag


def test_a_text_of_a_native_client_that_looks_like_a_value_is_that_text(client: tq.TransferQueueClient) -> None:
    texts = [f"{ENCODED}{rest}" for rest in ("zzz", "", "kgE=", "\u00e4", "wQ==")]
    with connect(client.config.address or "") as native:
        native.register_partition("p", ["x"], None, [])
        native.put_samples(list("abcde"), "p", {"x": torch.ones(5)}, tags=[{"v": text} for text in texts])
    assert [tag["v"] for tag in tq.kv_list("p")["p"].values()] == texts
    assert [tag["v"] for tag in client.get_meta(["x"], 5, "p", task_name="t").custom_meta] == texts
    tq.kv_put("f", "p", tag={"v": texts[0]})
    assert tq.kv_list("p")["p"]["f"] == {"v": texts[0]}


def test_a_tag_that_is_refused_says_what_tags_are(client: tq.TransferQueueClient) -> None:
    with pytest.raises(UnsupportedValueError, match=r"tag v, row 1: .*complex.*Tags are scalars, and lists and dicts"):
        tq.kv_batch_put(["a", "b"], "p", tags=[{}, {"v": 1j}])


def test_a_partition_that_is_no_text_is_named(client: tq.TransferQueueClient) -> None:
    with pytest.raises(InvalidRequestError, match="partition=3: expected a string, got int"):
        tq.kv_put("a", 3, {"x": torch.tensor(1)})  # type: ignore[arg-type]


def test_one_row_of_any_kind_is_a_row_like_others(client: tq.TransferQueueClient) -> None:
    first = {"ids": torch.arange(3), "wide": torch.ones(2, 2), "reward": torch.tensor(0.5), "text": "x"}
    tq.kv_put("a", "p", first)
    tq.kv_batch_put(["b"], "p", TensorDict({"ids": torch.arange(5).reshape(1, 5)}, batch_size=1))
    tq.kv_batch_put(["c", "d"], "p", TensorDict({"ids": torch.zeros(2, 4, dtype=torch.int64)}, batch_size=2))
    tq.kv_put("e", "p", {"ids": torch.zeros(0, dtype=torch.int64)})
    rows = tq.kv_batch_get(["a", "b", "c", "e"], "p", ["ids"])["ids"]
    assert rows.layout == torch.jagged
    assert [row.tolist() for row in rows.unbind()] == [[0, 1, 2], [0, 1, 2, 3, 4], [0] * 4, []]
    whole = tq.kv_batch_get("a", "p")
    assert sorted(whole.keys()) == sorted(first)
    assert whole["wide"].unbind()[0].tolist() == [[1, 1], [1, 1]]
    assert whole["reward"].tolist() == [0.5]
    assert whole.get("text").tolist() == ["x"]


def test_samples_without_keys_are_not_among_the_keys(client: tq.TransferQueueClient) -> None:
    client.put(values(2), partition_id="p")
    assert tq.kv_list("p") == {"p": {}}
    tq.kv_put("_unnamed", "p", tag={"n": 1})
    tq.kv_put("a", "q", tag={"n": 2})
    assert tq.kv_list() == {"p": {"_unnamed": {"n": 1}}, "q": {"a": {"n": 2}}}
