# ruff: noqa: F401
"""A get from another host's broker that is cancelled, or whose function waits, while that broker's word is awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.restarts import Proxy, wait_until
from tests.workers.channels.channels import broker
from tests.workers.channels.far_channels import near_and_far, proxy
from workers.channels import Channel, ChannelLostError
from workers.channels.connection import ArrivedItems

pytestmark = pytest.mark.integration


@pytest.fixture
def held(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once an item has been copied here; from then on the broker hears and says nothing."""
    copied, real = threading.Event(), ArrivedItems._unpack

    def pause(arrived: ArrivedItems) -> Any:
        found = real(arrived)
        if arrived.remote and not copied.is_set():
            proxy.pause()
            copied.set()
        return found

    monkeypatch.setattr(ArrivedItems, "_unpack", pause)
    return copied


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def _confirming(channel: Channel) -> bool:
    pump: Any = channel._links[0]._pump  # type: ignore[union-attr]
    return pump is not None and bool(pump._confirming)


def _is_empty(channel: Channel) -> bool:
    """Whether others can get nothing, once nobody has anything that may come back."""
    wait_until(lambda: channel._count("default_queue").leased == 0, "nothing is held")
    return channel.qsize() == 0


def test_what_is_cancelled_too_late_is_had_and_its_task_is_cancelled_next(
    near_and_far: tuple[Channel, Channel], proxy: Proxy, held: threading.Event
) -> None:
    near, far = near_and_far
    for item in "ab":
        near.put(item)
    had: list[str] = []

    async def consume() -> None:
        while True:
            had.append(await far.get(async_op=True).async_wait())

    async def cancel() -> None:
        consuming = asyncio.ensure_future(consume())
        await _until(lambda: held.is_set() and _confirming(far))
        for _ in range(2):
            consuming.cancel()
            await asyncio.sleep(0)
        assert not consuming.done()
        proxy.heal()
        await asyncio.wait([consuming], timeout=60)
        assert consuming.cancelled()

    asyncio.run(cancel())
    assert had == ["a"]
    assert near.get(timeout_s=60) == "b"  # the other get may have it still, or ask for it only now: it comes back
    assert _is_empty(near)


@pytest.mark.parametrize("by", ["timeout", "task"])
def test_who_cancels_too_late_has_the_item(
    near_and_far: tuple[Channel, Channel], proxy: Proxy, held: threading.Event, by: str
) -> None:
    """And nothing cancels what is done afterwards."""
    near, far = near_and_far
    near.put("a")

    async def get() -> Any:
        return await far.get(async_op=True).async_wait()

    async def under_a_timeout() -> Any:
        async with asyncio.timeout(3600) as limit:
            expiring = asyncio.ensure_future(too_late(lambda: limit.reschedule(0)))
            item = await get()
        await expiring
        return item

    async def as_a_task() -> Any:
        task = asyncio.ensure_future(get())
        await too_late(task.cancel)
        return await task

    async def too_late(cancel: Callable[[], Any]) -> None:
        await _until(lambda: _confirming(far))
        cancel()
        await asyncio.sleep(0.01)
        proxy.heal()

    async def whole() -> Any:
        item = await (under_a_timeout() if by == "timeout" else as_a_task())
        for _ in range(10):
            await asyncio.sleep(0)
        return item

    assert asyncio.run(whole()) == "a"
    assert _is_empty(near)


def test_what_is_cancelled_before_it_is_taken_goes_to_the_next(near_and_far: tuple[Channel, Channel]) -> None:
    near, far = near_and_far

    async def give_up() -> None:
        getting = asyncio.ensure_future(far.get(async_op=True).async_wait())
        await _until(lambda: near._count("default_queue").gets == 1)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting

    asyncio.run(give_up())
    near.put("a")
    assert near.get(timeout_s=60) == "a"


def test_what_is_cancelled_and_not_confirmed_is_cancelled(
    near_and_far: tuple[Channel, Channel], proxy: Proxy, held: threading.Event
) -> None:
    near, far = near_and_far
    near.put("a")

    async def give_up() -> None:
        getting = asyncio.ensure_future(far.get(async_op=True).async_wait())
        await _until(lambda: held.is_set() and _confirming(far))
        getting.cancel()
        await asyncio.sleep(0)
        proxy.cut()
        await asyncio.wait([getting], timeout=60)
        assert getting.cancelled()

    asyncio.run(give_up())
    assert near.get(timeout_s=60) == "a"


def test_a_function_may_wait_for_what_comes_from_another_host(
    near_and_far: tuple[Channel, Channel],
) -> None:
    near, far = near_and_far
    second = far.get(async_op=True)
    work = far.get(async_op=True)
    waits = work.then(second.wait)
    puts = work.then(far.put, "c")
    for item in "ab":
        near.put(item)
    assert {waits.wait(60), work.wait(60)} == {"a", "b"}
    assert puts.wait(60) is None
    assert near.get(timeout_s=60) == "c"


def test_what_is_never_confirmed_ends(
    near_and_far: tuple[Channel, Channel], held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.channels.background.CONFIRM_S", 0.05)
    near, far = near_and_far
    near.put("a")
    work = far.get(async_op=True)
    following = work.then(pytest.fail, "called after an error")
    for each in (following, work):
        with pytest.raises(ChannelLostError, match="the broker did not confirm"):
            each.wait(60)
