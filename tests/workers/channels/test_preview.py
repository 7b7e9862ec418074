# ruff: noqa: F401
"""What `str` of a channel says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.workers.channels.channels import broker, every_connection, every_wire, make
from workers.channels import Channel, ChannelBroker
from workers.channels.channel import SHOWN_CHARS, SHOWN_ITEMS

pytestmark = pytest.mark.integration


class Odd:
    def __repr__(self) -> str:
        raise KeyError("no name")


class Here:
    """Cannot be loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("not a number",)


@every_connection
def test_items_are_shown_and_stay(make: Callable[..., Channel]) -> None:
    channel = make()
    assert str(channel) == "[]"
    for item in ("first", 2, {"three": 3}):
        channel.put(item)
    channel.put("elsewhere", key="another")
    assert str(channel) == "['first', 2, {'three': 3}]"
    assert f"{channel}" == str(channel)
    assert [channel.get() for _ in range(3)] == ["first", 2, {"three": 3}]
    assert str(channel) == "[]"


@every_connection
def test_what_is_shown_is_bounded(make: Callable[..., Channel]) -> None:
    channel = make()
    for number in range(SHOWN_ITEMS + 5):
        channel.put(number)
    assert str(channel).endswith(f"{SHOWN_ITEMS - 1}, ... 5 more]")
    long = make()
    long.put("x" * 5000)
    assert len(str(long)) == SHOWN_CHARS + 2
    assert str(long).endswith("xxx...]")


@every_wire
def test_large_items_are_shown_by_their_tensors(make: Callable[..., Channel]) -> None:
    channel = make()
    channel.put({"ids": torch.zeros(4096, dtype=torch.int32), "why": "x"})
    channel.put(b"x" * 50_000)
    assert str(channel).startswith("[<int32 [4096], 16,")
    assert ", <50," in str(channel)
    assert channel.get()["ids"].shape == (4096,)


@every_connection
def test_items_that_cannot_be_shown_hide_no_others(make: Callable[..., Channel]) -> None:
    channel = make()
    channel.put(Odd())
    channel.put("next")
    assert str(channel) == "[<cannot be shown: KeyError: 'no name'>, 'next']"


@every_wire
def test_items_that_cannot_be_loaded_are_shown_as_such(make: Callable[..., Channel]) -> None:
    channel = make()
    channel.put(Here())
    assert "<cannot be shown: NotSerializableError" in str(channel)


@every_connection
def test_a_handle_that_let_go_says_so(make: Callable[..., Channel]) -> None:
    channel = make()
    channel.disconnect()
    assert "this handle was disconnected" in str(channel)
    assert repr(channel).startswith("Channel('c'")


def test_a_broker_that_is_gone_is_named(make: Callable[..., Channel], broker: ChannelBroker) -> None:
    channel = make()
    channel.put(1)
    broker.close()
    assert "was lost" in str(channel)
