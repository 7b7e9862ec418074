# ruff: noqa: F401
"""An item that comes from another host is its getter's once the broker knows: no network that fails gives it to two."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.restarts import Proxy, wait_until
from tests.workers.channels.channels import broker
from tests.workers.channels.far_channels import near_and_far, proxy
from workers.channels import Channel, ChannelLostError
from workers.channels.connection import ArrivedItems

pytestmark = pytest.mark.integration


def _at_once(channel: Channel) -> Any:
    return channel.get()


def _batch(channel: Channel) -> Any:
    return channel.get_batch(2)[0]


def _by_handle(channel: Channel) -> Any:
    return channel.get(async_op=True).wait()


def _awaited(channel: Channel) -> Any:
    async def get() -> Any:
        return await channel.get(async_op=True).async_wait()

    return asyncio.run(get())


def _by_function(channel: Channel) -> Any:
    work = channel.get(async_op=True)
    following = work.then(lambda: "called")
    item = work.wait()
    assert following.wait() == "called"
    return item


every_way = pytest.mark.parametrize("get", [_at_once, _batch, _by_handle, _awaited, _by_function])


@every_way
def test_what_cannot_be_acknowledged_is_not_had_by_two(
    near_and_far: tuple[Channel, Channel],
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    get: Callable[[Channel], Any],
) -> None:
    near, far = near_and_far
    real = ArrivedItems._unpack

    def cut(arrived: ArrivedItems) -> Any:
        found = real(arrived)
        if not arrived._connection.local:
            proxy.cut()
        return found

    monkeypatch.setattr(ArrivedItems, "_unpack", cut)
    for item in ("a", "b"):
        near.put(item, weight=1)
    with pytest.raises(ChannelLostError, match="that holds the channel's items"):
        get(far)
    assert [near.get(timeout_s=60), near.get()] == ["a", "b"]


@every_way
def test_what_comes_from_another_host_is_had_once(
    near_and_far: tuple[Channel, Channel], get: Callable[[Channel], Any]
) -> None:
    near, far = near_and_far
    for number in range(2):
        near.put(torch.full((20_000,), number), weight=1)
    assert int(get(far)[0]) == 0
    if get is not _batch:
        assert int(near.get()[0]) == 1
    wait_until(lambda: near._count("default_queue").leased == 0, "nothing is with anybody")
    assert near.empty()


def test_an_event_loop_goes_on_while_the_broker_s_word_is_awaited(
    near_and_far: tuple[Channel, Channel], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = near_and_far
    near.put("a")
    held, real = threading.Event(), ArrivedItems._unpack

    def pause(arrived: ArrivedItems) -> Any:
        found = real(arrived)
        proxy.pause()
        held.set()
        return found

    monkeypatch.setattr(ArrivedItems, "_unpack", pause)

    async def get() -> Any:
        getting = asyncio.ensure_future(far.get(async_op=True).async_wait())
        while not held.is_set():
            await asyncio.sleep(0.01)
        proxy.heal()
        return await getting

    assert asyncio.run(get()) == "a"
