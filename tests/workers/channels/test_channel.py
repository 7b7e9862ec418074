# ruff: noqa: F401
"""Channels between threads of one process, without Ray: what is put and got, and in which order."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.channels.channels import (
    CAPACITY,
    MIB,
    Sample,
    alongside,
    broker,
    elsewhere,
    every_connection,
    every_wire,
    finished,
    make,
    waiting,
)
from workers.channels import Channel, ChannelBroker, ItemTooLargeError, LocalChannelError, items
from workers.channels import background as pump_module
from workers.channels.discovery import ChannelSettings
from workers.errors import MessageTimeoutError, NotSerializableError

pytestmark = pytest.mark.integration

# --- items -----------------------------------------------------------------------------------------------------------


@every_connection
def test_what_is_put_is_got_in_order(make: Callable[..., Channel]) -> None:
    channel = make()
    for number in range(5):
        channel.put(number)
    assert [channel.get() for _ in range(5)] == list(range(5))


@every_wire
@pytest.mark.parametrize("size", [0, 1, 100, 20_000, 2 * MIB + 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_come_back_bit_for_bit(make: Callable[..., Channel], size: int, dtype: torch.dtype) -> None:
    channel = make()
    values = torch.randint(0, 2, (size // 2, 2)).to(dtype)
    channel.put(values)
    got = channel.get()
    assert got.dtype == dtype
    assert torch.equal(got, values)


@every_wire
def test_objects_come_back_whole_with_tensors_of_all_sizes(make: Callable[..., Channel]) -> None:
    channel = make()
    item = {
        "sample": Sample("a", torch.arange(10_000)),
        "array": np.arange(50_000).reshape(100, 500),
        "many": [torch.full((count,), count) for count in range(0, 3000, 300)],
        "scalar": torch.tensor(3.5),
        "text": "x" * 100_000,
        "function": lambda x: x + 1,
    }
    channel.put(item)
    got = channel.get()
    assert got["sample"].name == "a"
    assert torch.equal(got["sample"].tokens, item["sample"].tokens)
    assert np.array_equal(got["array"], item["array"])
    assert all(torch.equal(a, b) for a, b in zip(got["many"], item["many"], strict=True))
    assert got["scalar"] == 3.5
    assert got["text"] == item["text"]
    assert got["function"](1) == 2


@every_wire
@pytest.mark.parametrize("size", [50, 2000])
def test_tensors_that_are_not_contiguous_are_put_right(make: Callable[..., Channel], size: int) -> None:
    channel = make()
    base = torch.arange(size * size, dtype=torch.float64).reshape(size, size)
    for view in (base.t(), base[::2, 1::3], base[0].expand(5, size), base.to(torch.complex64).conj()):
        channel.put(view)
        assert torch.equal(channel.get(), view)


@every_wire
@pytest.mark.parametrize("size", [10, 300_000])
def test_what_is_got_is_the_getters_own(make: Callable[..., Channel], size: int) -> None:
    channel = make()
    for _ in range(2):
        channel.put(torch.ones(size))
    first, second = channel.get(), channel.get()
    first.zero_()
    channel.put(torch.full((size,), 2.0))
    assert torch.equal(second, torch.ones(size))
    assert torch.equal(channel.get(), torch.full((size,), 2.0))
    assert torch.equal(first, torch.zeros(size))


@every_wire
@pytest.mark.parametrize("size", [10, 300_000])
def test_an_asynchronous_put_is_of_the_values_at_the_call(make: Callable[..., Channel], size: int) -> None:
    channel = make()
    works = []
    values = torch.zeros(size)
    for number in range(10):
        values.fill_(number)
        works.append(channel.put(values, async_op=True))
    values.fill_(-1)
    for work in works:
        assert work.wait() is None
    assert [int(channel.get()[-1]) for _ in range(10)] == list(range(10))


@every_wire
def test_an_item_that_cannot_be_pickled_is_refused_and_the_channel_goes_on(make: Callable[..., Channel]) -> None:
    channel = make()
    for async_op in (False, True):
        with pytest.raises(NotSerializableError, match="put of channel 'c'"):
            channel.put(threading.Lock(), async_op=async_op)
    channel.put(1)
    assert channel.get() == 1


def _cannot_be_built() -> None:
    raise RuntimeError("no")


class Broken:
    def __reduce__(self) -> tuple[Any, ...]:
        return _cannot_be_built, ()


@every_wire
def test_an_item_that_cannot_be_built_is_the_getters_error_once(make: Callable[..., Channel]) -> None:
    channel = make()
    channel.put(Broken())
    channel.put(1)
    with pytest.raises(NotSerializableError, match="RuntimeError: no") as alone:
        channel.get()
    assert not hasattr(alone.value, "__notes__")
    assert channel.get() == 1


@every_wire
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [10, 300_000])
def test_an_item_that_cannot_be_built_takes_no_others_with_it(
    make: Callable[..., Channel], async_op: bool, size: int
) -> None:
    channel = make()
    for item in (1, [Broken(), torch.ones(size)], torch.full((size,), 2), Broken(), 5):
        channel.put(item, weight=1)
    with pytest.raises(NotSerializableError, match="RuntimeError: no") as caught:
        finished(channel.get_batch(4, async_op=async_op))
    assert caught.value.__notes__ == ["Items of this batch lost: 2; returned to the channel: 2"]
    one, twos, five = finished(channel.get_batch(3, async_op=async_op, timeout_s=60.0))
    assert (one, int(twos.sum()), five) == (1, 2 * size, 5)
    assert channel.empty()


@every_wire
def test_what_follows_an_item_that_cannot_be_built_is_not_called(make: Callable[..., Channel]) -> None:
    channel = make()
    channel.put(Broken())
    with pytest.raises(NotSerializableError, match="RuntimeError: no"):
        channel.get(async_op=True).then(pytest.fail, "called after an error").wait()


@every_wire
def test_what_is_pickled_counts_as_bytes_too(make: Callable[..., Channel]) -> None:
    channel = make()
    text = "x" * (CAPACITY // 4 * 3)
    channel.put([text, torch.ones(3)])
    with pytest.raises(asyncio.QueueFull):
        channel.put_nowait(text)
    got, ones = channel.get()
    assert got == text
    assert torch.equal(ones, torch.ones(3))


@every_wire
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("item", [torch.zeros(CAPACITY + MIB, dtype=torch.uint8), b"x" * (CAPACITY + MIB)])
def test_an_item_larger_than_all_memory_is_refused(make: Callable[..., Channel], item: Any, async_op: bool) -> None:
    channel = make()
    with pytest.raises(ItemTooLargeError, match="memory for"):
        finished(channel.put(item, async_op=async_op))
    channel.put(1)
    assert channel.get() == 1


def test_local_channels_hand_over_the_object_itself() -> None:
    channel = Channel.create("l", local=True)
    item = object()
    channel.put(item)
    assert channel.get() is item


# --- queues ----------------------------------------------------------------------------------------------------------


@every_connection
def test_keys_do_not_cross_synchronous_or_not(make: Callable[..., Channel]) -> None:
    channel = make()
    first = channel.get(key="a", async_op=True)
    second = channel.get(key=("b", 1), async_op=True)
    channel.put("for b", key=("b", 1))
    channel.put("for c", key=3)
    channel.put("for a", key="a")
    assert channel.get(key=3) == "for c"
    assert first.wait() == "for a"
    assert second.wait() == "for b"


@every_connection
def test_nowait_raises_what_asyncio_raises(make: Callable[..., Channel]) -> None:
    channel = make(maxsize=1)
    with pytest.raises(asyncio.QueueEmpty):
        channel.get_nowait()
    channel.put_nowait("a")
    with pytest.raises(asyncio.QueueFull):
        channel.put_nowait("b")
    assert channel.get_nowait() == "a"


@every_wire
def test_put_nowait_is_full_too_when_there_is_no_memory(make: Callable[..., Channel]) -> None:
    channel = make()
    item = torch.zeros(CAPACITY // 4 * 3, dtype=torch.uint8)
    channel.put(item)
    with pytest.raises(asyncio.QueueFull):
        channel.put_nowait(item)
    waits = channel.put(item, async_op=True)
    for behind in (item, "small"):
        with pytest.raises(asyncio.QueueFull):
            channel.put_nowait(behind)
    channel.get()
    finished(waits)
    assert channel.get().numel() == item.numel()
    channel.put_nowait(item)


@every_connection
def test_sizes(make: Callable[..., Channel]) -> None:
    channel = make(maxsize=2)
    assert (channel.qsize(), channel.empty(), channel.full()) == (0, True, False)
    channel.put(1)
    channel.put(1, key="other")
    assert (channel.qsize(), channel.empty(), channel.full()) == (1, False, False)
    channel.put(2)
    assert (channel.qsize(), channel.empty(), channel.full()) == (2, False, True)
    assert channel.qsize("other") == 1


@every_connection
def test_a_put_waits_for_a_place_and_a_get_for_an_item(make: Callable[..., Channel]) -> None:
    channel = make(maxsize=1)
    channel.put(0)
    with alongside(lambda: channel.put(1)) as outcome:
        waiting(channel, puts=1)
        assert channel.get() == 0
    assert outcome == [None]
    assert channel.get() == 1
    with alongside(channel.get) as outcome:
        waiting(channel, gets=1)
        channel.put(2)
    assert outcome == [2]


@every_connection
def test_batches(make: Callable[..., Channel]) -> None:
    channel = make(maxsize=3)
    first, second = channel.get_batch(4, async_op=True), channel.get_batch(4, async_op=True)
    for number in range(8):
        channel.put(number, weight=1)
    assert first.wait() == [0, 1, 2, 3]
    assert second.wait() == [4, 5, 6, 7]
    channel.put("heavy", weight=9)
    channel.put("next", weight=1)
    assert channel.get_batch(4) == ["heavy"]
    assert channel.get() == "next"


@pytest.mark.parametrize("at", [str, elsewhere])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_batch_of_small_items_may_have_more_bytes_than_a_request(
    at: Callable[[str], str], async_op: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "CARRIED_BYTES", 4 * MIB)
    with ChannelBroker(capacity_bytes=4 * CAPACITY) as large:
        settings = ChannelSettings(
            name="c", ident="c", maxsize=0, distributed=False, nodes=(0,), endpoints=(at(large.endpoint),)
        )
        channel = Channel(settings)
        channel._create()
        for number in range(23):
            channel.put(bytes([number]) * (3 * MIB), weight=1)
        got = finished(channel.get_batch(23, async_op=async_op))
        assert [each[-1] for each in got] == [*range(23)]
        channel.disconnect()


@every_wire
def test_a_batch_of_large_items(make: Callable[..., Channel]) -> None:
    channel = make()
    for number in range(3):
        channel.put(torch.full((MIB,), number, dtype=torch.uint8), weight=2)
    got = channel.get_batch(6)
    assert [int(each[-1]) for each in got] == [0, 1, 2]
    assert [each.numel() for each in got] == [MIB] * 3


@every_wire
def test_asynchronous_puts_keep_their_order_though_some_wait_for_space(make: Callable[..., Channel]) -> None:
    channel = make()
    works = []
    for number in range(12):
        size = 8 * MIB if number % 3 == 0 else 10
        works.append(channel.put(torch.full((size,), number, dtype=torch.uint8), async_op=True))
    with alongside(lambda: channel.put(torch.tensor([12]))):
        got = [int(channel.get()[-1]) for _ in range(13)]
    assert got == list(range(13))
    for work in works:
        work.wait()


@every_wire
def test_asynchronous_puts_that_wait_for_space_are_bounded(
    make: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump_module, "LATER_BYTES", 40 * MIB)
    channel = make()
    item = torch.zeros(20 * MIB, dtype=torch.uint8)
    works = [channel.put(item, async_op=True) for _ in range(2)]
    works[0].wait()
    works.append(channel.put(item, async_op=True))
    with pytest.raises(MemoryError, match="bytes of earlier puts already wait for space"):
        channel.put(item, async_op=True)
    for _ in range(3):
        channel.get()
    for work in works:
        work.wait()


def test_many_threads_share_a_handle(make: Callable[..., Channel]) -> None:
    channel = make(maxsize=4)
    got: list[list[int]] = [[] for _ in range(3)]

    def produce(first: int) -> None:
        for number in range(first, first + 50):
            channel.put(torch.full((3000,), number))

    def consume(mine: list[int]) -> None:
        for _ in range(50):
            mine.append(int(channel.get()[0]))

    threads = [threading.Thread(target=produce, args=(1000 * n,)) for n in range(3)]
    threads += [threading.Thread(target=consume, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(number for mine in got for number in mine) == [1000 * n + k for n in range(3) for k in range(50)]
    for mine in got:
        for n in range(3):
            of_one = [number for number in mine if number // 1000 == n]
            assert of_one == sorted(of_one)


@every_connection
def test_a_handles_own_timeout_leaves_the_call_under_way(make: Callable[..., Channel]) -> None:
    channel = make()
    work = channel.get(async_op=True)
    with pytest.raises(MessageTimeoutError, match="get of channel 'c'"):
        work.wait(timeout=0.0)
    channel.put(1)
    assert work.wait() == 1


@every_connection
def test_weights_may_be_numbers_of_any_type(make: Callable[..., Channel]) -> None:
    channel = make()
    for weight in (np.int64(2), np.float32(1.5), np.float64(0.5), 2**70):
        channel.put(1, weight=weight)
    assert channel.get_batch(np.int64(4)) == [1, 1, 1]
    assert channel.get_batch(2**70) == [1]


def test_a_local_channel_cannot_leave_its_process() -> None:
    channel = Channel.create("l", local=True)
    assert channel.is_local
    with pytest.raises(LocalChannelError, match="'l' is local"):
        pickle.dumps(channel)
