# ruff: noqa: F401
"""How waits for channels end, and how channels do; without Ray."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from dataplane.core.durations import LONGEST_S
from tests.alone import alone
from tests.logs import logged
from tests.processor import costs_little
from tests.restarts import wait_until
from tests.workers.channels.channels import (
    CAPACITY,
    MIB,
    alongside,
    broker,
    every_connection,
    every_wire,
    finished,
    make,
    peer,
    waiting,
)
from tests.workers.channels.peer import Peer
from workers.channels import (
    Channel,
    ChannelBroker,
    ChannelClosedError,
    ChannelLostError,
    ChannelTimeoutError,
    EndOfChannelError,
)
from workers.channels.background import LARGER_THAN_ANY, Pump
from workers.channels.connection import BrokerConnection
from workers.channels.discovery import ChannelSettings
from workers.channels.items import Parcel
from workers.transport import waiting as waiting_module
from workers.transport.stream import StreamLostError

pytestmark = pytest.mark.integration

# --- handles ---------------------------------------------------------------------------------------------------------


@every_connection
def test_async_code_puts_and_gets(make: Callable[..., Channel]) -> None:
    channel = make(maxsize=2)

    async def produce() -> None:
        for number in range(20):
            await channel.put(torch.full((10_000,), number), async_op=True).async_wait()

    async def consume() -> list[int]:
        return [int((await channel.get(async_op=True).async_wait())[0]) for _ in range(20)]

    async def both() -> list[int]:
        _, got = await asyncio.gather(produce(), consume())
        return got

    assert asyncio.run(both()) == list(range(20))


@every_connection
def test_a_cancelled_wait_leaves_its_get_under_way(make: Callable[..., Channel]) -> None:
    channel = make()

    async def give_up() -> Any:
        work = channel.get(async_op=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(work.async_wait(), 0.01)
        return work

    work = asyncio.run(give_up())
    assert not work.done()
    channel.put("a")
    assert work.wait() == "a"
    assert work.wait() == "a"


@every_connection
def test_a_get_that_nobody_has_a_handle_of_takes_nothing(make: Callable[..., Channel]) -> None:
    channel = make()
    works = [channel.get(async_op=True) for _ in range(2)]
    waiting(channel, gets=2)
    channel.put("a")
    while not works[0].done():
        threading.Event().wait(0.005)
    del works
    gc.collect()
    assert channel.get(timeout_s=30) == "a"
    channel.put("b")
    assert channel.get(timeout_s=30) == "b"


@every_connection
def test_waits_end_at_their_timeouts(make: Callable[..., Channel]) -> None:
    channel = make(maxsize=1, timeout_s=0.05)
    with pytest.raises(ChannelTimeoutError, match="get of channel 'c'"):
        channel.get()
    with pytest.raises(ChannelTimeoutError, match="get_batch of channel 'c', key 'k'"):
        channel.get_batch(3, key="k", async_op=True).wait()
    channel.put(1)
    with pytest.raises(ChannelTimeoutError, match="put of channel 'c'"):
        channel.put(2)
    with pytest.raises(ChannelTimeoutError, match="put of channel 'c'"):
        channel.put(2, async_op=True, timeout_s=0.01).wait()
    assert channel.get() == 1
    with pytest.raises(asyncio.QueueEmpty):
        channel.get_nowait()


def test_a_broker_that_is_lost_while_space_is_returned_to_it_is_a_named_error(
    make: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that needs more than the preallocated space returns that, with a message of its own."""
    channel, lost = make(), StreamLostError("gone")

    def fail(self: BrokerConnection, nbytes: int) -> int:
        raise lost

    item = torch.zeros(MIB // 2, dtype=torch.uint8)
    channel.put(item, async_op=True).wait()
    monkeypatch.setattr(BrokerConnection, "take_preallocated", fail)
    with pytest.raises(ChannelLostError) as caught:
        channel.put(item, async_op=True).wait()
    assert caught.value.__cause__ is lost


def test_an_answered_put_is_done_though_the_broker_is_lost_while_space_is_returned_to_it(
    make: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that receives the answer returns the preallocated space which the answer replaces."""
    channel, lost = make(), StreamLostError("gone")
    item, take = torch.zeros(MIB // 2, dtype=torch.uint8), BrokerConnection.take_preallocated

    def fail(self: BrokerConnection, nbytes: int) -> int:
        if nbytes == LARGER_THAN_ANY:
            raise lost
        return take(self, nbytes)

    monkeypatch.setattr(BrokerConnection, "take_preallocated", fail)
    channel.put(item, async_op=True).wait(30)
    monkeypatch.undo()
    channel.put(item, async_op=True).wait(30)
    assert channel.qsize() == 2


@every_connection
def test_a_defect_in_the_receiving_thread_leaves_no_answered_request_waiting(
    make: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, complete = make(), Pump._complete

    def completes_and_fails(self: Pump, *args: Any) -> None:
        complete(self, *args)
        raise ValueError("a defect")

    monkeypatch.setattr(Pump, "_complete", completes_and_fails)
    channel.put("a", async_op=True).wait(30)
    monkeypatch.undo()
    assert channel.get(timeout_s=30) == "a"


@every_wire
@pytest.mark.parametrize("async_op", [False, True])
def test_a_wait_for_memory_ends_at_its_timeout(make: Callable[..., Channel], async_op: bool) -> None:
    channel = make()
    item = torch.zeros(CAPACITY // 4 * 3, dtype=torch.uint8)
    channel.put(item)
    with pytest.raises(ChannelTimeoutError, match="put of channel"):
        finished(channel.put(item, async_op=async_op, timeout_s=0.05))
    channel.get()
    channel.put(item)
    assert channel.qsize() == 1


@every_connection
@pytest.mark.parametrize("async_op", [False, True])
def test_the_log_says_what_is_waited_for(
    make: Callable[..., Channel], async_op: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_module, "LOG_EVERY_S", 0.02)
    channel = make()
    with alongside(lambda: finished(channel.get(key="k", async_op=async_op))) as outcome:
        with logged("get of channel 'c', key 'k'"):
            pass
        channel.put(1, key="k")
    assert outcome == [1]


def _get(channel: Channel) -> Any:
    return channel.get()


@pytest.mark.slow
def test_waiting_takes_no_processor_time(make: Callable[..., Channel], peer: Peer) -> None:
    channel = make()
    work = channel.get(key="a", async_op=True)
    peer.begin(_get, channel)
    waiting(channel, gets=1)
    assert costs_little(lambda: time.sleep(1.0))
    channel.put("b")
    channel.put("a", key="a")
    assert peer.end() == "b"
    assert work.wait() == "a"


# --- the end ---------------------------------------------------------------------------------------------------------


@every_wire
@pytest.mark.parametrize("async_op", [False, True])
def test_a_put_that_waits_for_memory_holds_up_no_other_queue(make: Callable[..., Channel], async_op: bool) -> None:
    """Of two channels that each wait for what the other's getter takes next, none may wait for the other's memory."""
    first, second = make(), make()
    large, small = torch.ones(5 * CAPACITY // 8, dtype=torch.uint8), torch.ones(MIB, dtype=torch.uint8)
    first.put(large)
    with alongside(lambda: finished(first.put(large, async_op=async_op))) as outcome:
        waiting(first, puts=1)
        for channel, key in ((second, "default_queue"), (first, "other")):
            finished(channel.put(small, key=key, async_op=async_op, timeout_s=20))
            assert torch.equal(channel.get(key=key), small)
        assert not outcome
        assert torch.equal(first.get(), large)
    assert outcome == [None]
    assert torch.equal(first.get(), large)


@every_connection
def test_a_closed_channel_is_drained_and_ends(make: Callable[..., Channel]) -> None:
    channel = make(maxsize=2)
    channel.put("a")
    channel.put("b")
    waits = channel.put("c", async_op=True)
    waiting(channel, puts=1)
    channel.close()
    with pytest.raises(ChannelClosedError):
        waits.wait()
    with pytest.raises(ChannelClosedError):
        channel.put("d")
    assert [channel.get(), channel.get_nowait()] == ["a", "b"]
    for get in (channel.get, channel.get_nowait, channel.get(async_op=True).wait, channel.get_batch):
        with pytest.raises(EndOfChannelError, match="'c' was closed"):
            get()
    assert channel.qsize() == 0
    channel.close()


@every_connection
def test_closing_comes_after_the_puts_before_it(make: Callable[..., Channel]) -> None:
    for _ in range(10):
        channel = make()
        works = [channel.put(number, async_op=True) for number in range(20)]
        channel.close()
        for work in works:
            work.wait()
        assert [channel.get() for _ in range(20)] == list(range(20))


@every_connection
def test_closing_wakes_who_waits(make: Callable[..., Channel]) -> None:
    channel = make()
    work = channel.get(key="k", async_op=True)
    with alongside(channel.get) as outcome:
        waiting(channel, gets=1)
        channel.close()
    assert isinstance(outcome[0], EndOfChannelError)
    with pytest.raises(EndOfChannelError):
        work.wait()


@every_connection
def test_disconnecting_wakes_who_waits(make: Callable[..., Channel]) -> None:
    channel = make()
    work = channel.get(key="k", async_op=True)
    with alongside(channel.get) as outcome:
        waiting(channel, gets=1)
        channel.disconnect()
    assert isinstance(outcome[0], ChannelClosedError)
    with pytest.raises(ChannelClosedError):
        work.wait()
    with pytest.raises(ChannelClosedError, match="disconnected"):
        channel.get()


def test_letting_go_waits_for_a_copy_into_the_brokers_memory(
    make: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make()
    writing, go_on = threading.Event(), threading.Event()
    write = Parcel.write

    def held(parcel: Parcel, target: Any) -> None:
        writing.set()
        assert go_on.wait(30)
        write(parcel, target)

    monkeypatch.setattr(Parcel, "write", held)
    with alongside(lambda: channel.put(torch.zeros(MIB))) as put:
        assert writing.wait(30)
        with alongside(channel.disconnect) as ended:
            threading.Event().wait(0.1)
            assert not ended
            go_on.set()
    assert ended == [None]
    # Which of the two the broker heard of first is not what this is about.
    assert put[0] is None or isinstance(put[0], ChannelClosedError)


@every_wire
@pytest.mark.parametrize("size", [10, 300_000])
def test_an_item_not_taken_when_its_handle_let_go_is_the_next_getters(make: Callable[..., Channel], size: int) -> None:
    channel = make()
    other = pickle.loads(pickle.dumps(channel))
    channel.put(torch.ones(size))
    work = channel.get(async_op=True)
    while not work.done():
        threading.Event().wait(0.005)
    channel.disconnect()
    with pytest.raises(ChannelClosedError, match="disconnected"):
        work.wait()
    assert torch.equal(other.get(timeout_s=30), torch.ones(size))
    other.disconnect()


@pytest.mark.parametrize("end", ["close", "disconnect", "garbage"])
def test_nothing_is_left_at_the_end(end: str) -> None:
    alone(_use_and_end, end)


def _use_and_end(end: str) -> None:
    process = psutil.Process()
    threads, descriptors = threading.active_count(), process.num_fds()
    with ChannelBroker(capacity_bytes=CAPACITY) as broker:
        with_broker = threading.active_count()
        settings = ChannelSettings(
            name="c", ident="c", maxsize=0, distributed=False, nodes=(0,), endpoints=(broker.endpoint,)
        )
        channel = Channel(settings)
        channel._create()
        channel.put(torch.zeros(MIB))
        channel.put(1, async_op=True).wait()
        assert channel.get().numel() == MIB
        assert channel.get(async_op=True).wait() == 1
        assert threading.active_count() == with_broker + 1
        if end == "garbage":
            del channel
        else:
            getattr(channel, end)()
        for thread in [each for each in threading.enumerate() if each.name == "tq-channel"]:
            thread.join(60)
        assert threading.active_count() == with_broker
    assert threading.active_count() == threads
    gc.collect()
    wait_until(lambda: process.num_fds() <= descriptors, "no more descriptors than before")


@every_connection
@pytest.mark.parametrize("timeout_s", [-math.inf, math.nan, -1.0])
def test_a_negative_timeout_is_refused(make: Any, timeout_s: float) -> None:
    channel = make()
    for operation in (channel.get, lambda **how: channel.put(1, **how), lambda **how: channel.get_batch(1, **how)):
        with pytest.raises(ValueError, match=r"timeout_s=.*: expected seconds, 0 or more, or None"):
            operation(timeout_s=timeout_s)
    with pytest.raises(ValueError, match=r"timeout_s=.*: expected seconds, 0 or more, or None"):
        make(timeout_s=timeout_s)


@every_connection
@pytest.mark.parametrize("timeout_s", [1e18, math.inf, None])
def test_a_wait_without_a_timeout_lasts(make: Any, timeout_s: float | None) -> None:
    channel = make()
    waiting = channel.get(async_op=True, timeout_s=timeout_s)
    channel.put("late", timeout_s=timeout_s)
    assert waiting.wait() == "late"
    with ThreadPoolExecutor(1) as threads:
        blocking = threads.submit(channel.get, timeout_s=timeout_s)
        channel.put("later")
        assert blocking.result(60) == "later"
        blocking = threads.submit(channel.get, timeout_s=timeout_s)
        waiting = channel.get(async_op=True, timeout_s=timeout_s)
        channel.close()
        for end in (blocking.result, waiting.wait):
            with pytest.raises(EndOfChannelError):
                end(60)


def test_no_timeout_of_a_handle_and_of_a_call_differ(make: Any) -> None:
    """A handle without a timeout, and a call that has one."""
    channel = make(timeout_s=None)
    with pytest.raises(ChannelTimeoutError):
        channel.get(timeout_s=0.01)
    assert pickle.loads(pickle.dumps(channel))._timeout_s == channel._timeout_s == LONGEST_S
