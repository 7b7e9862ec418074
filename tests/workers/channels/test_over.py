# ruff: noqa: F401
"""What becomes of a channel over several nodes when it is closed, or some of its brokers end, or both."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from tests.directories import client, directory
from tests.workers.channels.channels import hosted
from workers.channels import Channel, ChannelClosedError, ChannelLostError, EndOfChannelError
from workers.channels.broker import ChannelBroker
from workers.directory import DirectoryClient

pytestmark = pytest.mark.integration


@pytest.fixture
def brokers(client: DirectoryClient) -> Iterator[list[ChannelBroker]]:
    with hosted(client, range(3)) as running:
        yield running


@pytest.fixture
def at_each(client: DirectoryClient, brokers: list[ChannelBroker]) -> Iterator[list[Channel]]:
    """One channel, used from each node; under key r is an item on node r."""
    Channel.create("c", distributed=True, directory=client, here=0).disconnect()
    handles = [Channel.connect("c", directory=client, here=rank) for rank in range(3)]
    for rank, each in enumerate(handles):
        each.put(f"left on {rank}", key=rank)
    yield handles
    for each in handles:
        each.disconnect()


def test_what_is_left_in_one_part_is_found_though_others_are_over_or_gone(
    at_each: list[Channel], brokers: list[ChannelBroker]
) -> None:
    late = [pickle.dumps(at_each[0]) for _ in range(2)]
    assert at_each[0].get(key=0) == "left on 0"
    at_each[0].close()
    knows_none: Channel = pickle.loads(late[0])
    with pytest.raises(EndOfChannelError):
        knows_none.get(key="none")
    with pytest.raises(ChannelClosedError):
        knows_none.put(1, key="another")
    brokers[1].close()
    knows_none = pickle.loads(late[1])
    assert knows_none.get(key=2) == "left on 2"
    with pytest.raises(ChannelLostError):
        knows_none.get(key=1)


def test_keys_of_other_parts_go_on_when_one_is_gone(at_each: list[Channel], brokers: list[ChannelBroker]) -> None:
    waits = at_each[0].get(key=1, async_op=True)
    assert waits.wait() == "left on 1"
    waits = at_each[0].get(key=1, async_op=True)
    brokers[1].close()
    with pytest.raises(ChannelLostError, match="key 1"):
        waits.wait()
    assert at_each[0].get(key=2) == "left on 2"
    assert at_each[1].get(key=0) == "left on 0"


def test_keys_in_use_go_on_for_new_handles_when_the_first_part_is_gone(
    at_each: list[Channel], brokers: list[ChannelBroker]
) -> None:
    assert at_each[0].get(key=1) == "left on 1"
    late: Channel = pickle.loads(pickle.dumps(at_each[0]))
    brokers[0].close()
    assert late.get(key=2) == "left on 2"
    late.put("put later", key=1)
    assert at_each[1].get(key=1) == "put later"
    for key in (0, "new"):
        with pytest.raises(ChannelLostError, match=f"key {key!r}"):
            late.get(key=key)
    late.disconnect()


def test_what_to_do_about_one_that_is_gone_in_part_is_said(
    at_each: list[Channel], brokers: list[ChannelBroker], client: DirectoryClient
) -> None:
    brokers[1].close()
    with pytest.raises(ChannelLostError, match="creation of channel 'c'") as raised:
        Channel.create("c", distributed=True, directory=client, here=0)
    assert raised.value.__notes__ == [
        "Other branches of Channel('c', maxsize=0, distributed over nodes [0, 1, 2]) are alive; to replace the "
        "channel, `connect` to it and `close` it"
    ]
    Channel.connect("c", directory=client).close()
    made = Channel.create("c", distributed=True, directory=client, here=0)
    made.put(1, key=1)
    assert made.get(key=1) == 1
    made.close()
    made.disconnect()
