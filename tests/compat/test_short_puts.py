"""Puts that take the short way give and store the same as those that take the general way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import dataplane.compat.transfer_queue as tq
from dataplane.compat.transfer_queue import operations
from dataplane.compat.transfer_queue.columns import ENCODED
from tests.compat.runner import plain
from tests.restarts import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("service")]

Put = Callable[[str], Any]
"""Puts samples into a partition."""


def short_begins(sent: list[str], put: Callable[[int], Any]) -> None:
    """Put until puts take the short way: the service grants space only after the storage unit has
    reported that the client attached."""
    numbers = iter(range(1 << 20))

    def is_short() -> bool:
        sent.clear()
        put(next(numbers))
        return "PutRows" in sent

    wait_until(is_short, "no put took the short way")
    sent.clear()


USUAL: dict[str, Callable[[int], Any]] = {
    "x": lambda number: torch.arange(number % 5),
    "y": lambda number: torch.tensor(float(number)),
    "z": lambda number: f"text {number}",
}
VALUES: list[Callable[[int], Any]] = [
    *USUAL.values(),
    lambda number: torch.full((3,), float(number)),
    lambda number: torch.full((2, 3), float(number)),
    lambda number: torch.arange(4)[::2],
    lambda number: torch.ones(2, requires_grad=True),
    lambda number: torch.ones(2, dtype=torch.complex64),
    lambda number: number,
    lambda number: [number, "x"],
    lambda number: {"a": number, "b": None},
    lambda number: np.arange(number % 3),
    lambda number: None,
]
TAGS: list[Any] = [
    {},
    {"a": 1, "b": "x"},
    {"a": 2.5, "b": None},
    {"a": True},
    {"a": ENCODED + "no value"},
    {"a": [1, 2]},
    {"input_lengths": 3},
]


def one(choose: random.Random) -> Put:
    """Return a put of one sample by key."""
    key = f"k{choose.randrange(8)}"
    number = choose.randrange(100)
    names = choose.sample("xyz", choose.choice([1, 2]))
    make = {name: USUAL[name] if choose.random() < 0.97 else choose.choice(VALUES) for name in names}
    fields = {name: make[name](number) for name in names}
    tag = choose.choice(TAGS)
    return lambda partition: tq.kv_put(key, partition, fields, tag)


def several(choose: random.Random) -> Put:
    """Return a put of a few samples by key, as tensors, lists or stacks of objects."""
    count = choose.choice([1, 2, 3])
    keys = choose.sample([f"k{number}" for number in range(8)], count)
    number = choose.randrange(100)
    tags = choose.choice([None, [choose.choice(TAGS) for _ in keys], [TAGS[1] for _ in keys]])
    form = choose.randrange(5) if choose.random() < 0.2 else choose.randrange(3)
    if form == 0:
        fields: Any = TensorDict({"x": torch.full((count, 2), number), "y": torch.ones(count)}, count)
    elif form == 1:
        fields = {"x": [torch.full((row,), number) for row in range(count)]}
    elif form == 2:
        fields = TensorDict({"z": NonTensorStack(*[f"{number}.{row}" for row in range(count)])}, count)
    elif form == 3:
        fields = {"x": torch.full((count, 2), number), "z": [number] * count}
    else:
        fields = TensorDict({"x": torch.ones(count, 2, 2)}, count)
    return lambda partition: tq.kv_batch_put(keys, partition, fields, tags)


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or its error."""
    try:
        result = call()
    except Exception as error:
        return type(error).__name__
    if isinstance(result, tq.KVBatchMeta):
        return result.keys, result.tags, result.fields, result.extra_info
    return plain(result)


@pytest.mark.parametrize("seed", range(4))
def test_both_ways_store_the_same(seed: int, sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    short_begins(sent, lambda number: tq.kv_put(f"w{number}", "warm", {"x": torch.arange(3)}))
    used = 0
    for step in range(150):
        if step % 15 == 14:
            cleared = [f"k{number}" for number in range(choose.choice([3, 8]))]
            for partition in ("short", "general"):
                tq.kv_clear(cleared, partition)
        put = choose.choice([one, several])(choose)
        sent.clear()
        got = outcome(lambda put=put: put("short"))
        used += sent == ["PutRows"]
        with monkeypatch.context() as patch:
            patch.setattr(operations, "prepare", lambda *_, **__: None)
            assert got == outcome(lambda put=put: put("general")), step
    assert used > 20
    assert tq.kv_list("short")["short"] == tq.kv_list("general")["general"]
    for number in range(8):
        key = f"k{number}"
        short = outcome(lambda key=key: tq.kv_batch_get(key, "short"))
        assert short == outcome(lambda key=key: tq.kv_batch_get(key, "general")), key


def test_the_form_of_the_rows_does_not_matter(sent: list[str]) -> None:
    short_begins(sent, lambda number: tq.kv_put(f"w{number}", "p", {"x": torch.arange(3), "y": "a"}))
    tq.kv_put("a", "p", {"x": torch.arange(2), "y": "b"})
    tq.kv_batch_put(["b", "c"], "p", {"x": torch.ones(2, 4, dtype=torch.int64), "y": ["c", "d"]})
    stack = NonTensorStack("e", "f")
    tq.kv_batch_put(["d", "e"], "p", TensorDict({"x": torch.ones(2, 1, dtype=torch.int64), "y": stack}, 2))
    tq.kv_batch_put(["f", "g"], "p", {"x": [torch.arange(1), torch.arange(0)], "y": ["g", "h"]})
    assert sent == ["PutRows"] * 4
    read = tq.kv_batch_get(["a", "c", "d", "f", "g"], "p")
    assert [row.tolist() for row in read["x"].unbind()] == [[0, 1], [1, 1, 1, 1], [1], [0], []]
    assert list(read["y"]) == ["b", "d", "e", "g", "h"]


def test_puts_without_keys_take_the_short_way(sent: list[str]) -> None:
    client = tq.get_client()
    data = TensorDict({"x": torch.arange(6).view(2, 3), "y": torch.arange(2)}, 2)
    short_begins(sent, lambda _: client.put(data, partition_id="p"))
    meta = client.put(data, partition_id="p")
    assert sent == ["PutRows"]
    assert client.get_data(meta)["x"].unbind()[1].tolist() == [3, 4, 5]


def test_a_partition_that_was_dropped_is_created_again(sent: list[str]) -> None:
    fields = {"x": torch.arange(3)}
    short_begins(sent, lambda number: tq.kv_put(f"w{number}", "p", fields))
    tq.get_client().clear_partition("p")
    tq.kv_put("a", "p", fields)
    assert tq.kv_list("p") == {"p": {"a": {}}}


def test_a_cancelled_call_leaves_other_calls_alone() -> None:
    """The waiting claim of a cancelled call takes no sample."""
    client = tq.get_client()

    async def script() -> None:
        waiting = asyncio.create_task(client.async_get_meta(["x"], 1, "p", task_name="t"))
        while "p" not in await client.async_get_partition_list():
            assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.gather(*[tq.async_kv_put(f"k{n}", "p", {"x": torch.arange(n)}) for n in range(9)])

    asyncio.run(script())
    meta = client.get_meta(["x"], 9, "p", task_name="t")
    assert len(meta) == 9


def test_an_error_reaches_the_caller_in_each_loop() -> None:
    async def script() -> None:
        with pytest.raises(KeyError):
            await tq.async_kv_batch_get("a", "p")
        await tq.async_kv_put("b", "p", {"x": torch.arange(2)})

    asyncio.run(script())
    asyncio.run(script())
    assert list(tq.kv_list("p")["p"]) == ["b"]
