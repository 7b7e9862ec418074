# ruff: noqa: F401
"""Items that take long on their way between hosts, come in many parts, or find no memory at their end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.restarts import Proxy, wait_until
from tests.workers.channels.channels import broker
from tests.workers.channels.far_channels import near_and_far, proxy
from workers.channels import Channel, background, connection
from workers.channels.connection import ArrivedItems

pytestmark = pytest.mark.integration


def test_a_confirmation_that_comes_behind_other_items_is_waited_for(
    near_and_far: tuple[Channel, Channel], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CONFIRM_S", 0.1)
    near, far = near_and_far
    copied, real = threading.Event(), ArrivedItems._unpack

    def pause(arrived: ArrivedItems) -> Any:
        found = real(arrived)
        proxy.pause()
        of_far: Any = far._links[0]._pump  # type: ignore[union-attr]
        of_far._last_payload_at = time.monotonic() + 600.0
        copied.set()
        return found

    monkeypatch.setattr(ArrivedItems, "_unpack", pause)
    near.put("a")
    work = far.get(async_op=True)
    healing = threading.Timer(1.0, proxy.heal)
    healing.start()
    assert work.wait(60) == "a"
    healing.join()


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There is none for the next item that comes from another host; emptied then."""
    left, real = ["none left"], connection.pickling.fresh

    def fresh(*args: Any) -> Any:
        if left:
            raise MemoryError(left.pop())
        return real(*args)

    monkeypatch.setattr(connection.pickling, "fresh", fresh)
    return left


def test_an_item_without_memory_goes_back_and_others_are_got(
    near_and_far: tuple[Channel, Channel], no_memory: list[str]
) -> None:
    near, far = near_and_far
    first, other = far.get(async_op=True), far.get(key="other", async_op=True)
    near.put(torch.arange(50_000))
    with pytest.raises(MemoryError, match="none left"):
        first.wait(60)
    assert torch.equal(near.get(timeout_s=60), torch.arange(50_000))
    near.put(torch.arange(60_000), key="other")
    assert torch.equal(other.wait(60), torch.arange(60_000))
    assert not no_memory


def test_a_get_without_memory_leaves_the_item(near_and_far: tuple[Channel, Channel], no_memory: list[str]) -> None:
    near, far = near_and_far
    near.put(torch.arange(50_000))
    with pytest.raises(MemoryError, match="none left"):
        far.get()
    assert torch.equal(far.get(timeout_s=60), torch.arange(50_000))
    assert not no_memory


def test_an_item_of_more_parts_than_the_kernel_takes_at_once(near_and_far: tuple[Channel, Channel]) -> None:
    near, far = near_and_far
    sent = [torch.full((20,), number) for number in range(1500)]
    far.put(sent)
    assert all(torch.equal(came, part) for came, part in zip(near.get(timeout_s=60), sent, strict=True))
