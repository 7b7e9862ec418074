# ruff: noqa: F401
"""A defect in a broker ends the connection that met it and nothing else."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.channels.channels import alongside, broker, every_wire, make, waiting
from workers.channels import Channel, ChannelBroker, ChannelLostError
from workers.channels import broker as broker_module
from workers.channels.queues import Broker
from workers.transport import stream_server

pytestmark = pytest.mark.integration


def _another(channel: Channel) -> Channel:
    copy: Channel = pickle.loads(pickle.dumps(channel))
    return copy


@every_wire
def test_a_connection_that_cannot_be_served_is_only_that_one(
    make: Callable[..., Channel], broker: ChannelBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make()
    refused = _another(channel)
    with monkeypatch.context() as patched:

        def tune(_: object) -> None:
            patched.undo()
            raise OSError(errno.EINVAL, "reset meanwhile")

        patched.setattr(stream_server, "tune", tune)
        with pytest.raises(ChannelLostError):
            refused.put(1)
    refused.put(2)
    assert channel.get() == 2
    assert broker.alive
    refused.disconnect()


@every_wire
def test_an_answer_that_cannot_be_written_is_the_getter_s_and_not_the_putter_s(
    make: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make()
    putter, second = _another(channel), _another(channel)
    putter.put(0)
    assert putter.get() == 0, "it is connected"
    real = broker_module.wire.encode

    def encode(message: Any, **options: Any) -> bytes:
        if isinstance(message, broker_module.wire.Items):
            monkeypatch.setattr(broker_module.wire, "encode", real)
            raise ZeroDivisionError("a defect")
        return real(message, **options)

    with alongside(lambda: channel.get(timeout_s=60)) as outcome:
        waiting(second, gets=1)
        monkeypatch.setattr(broker_module.wire, "encode", encode)
        putter.put("an item", timeout_s=60)
        assert second.get(timeout_s=60) == "an item"
    assert isinstance(outcome[0], ChannelLostError)
    for each in (putter, second):
        each.disconnect()


@every_wire
def test_a_defect_at_the_end_of_a_client_leaves_the_others(
    make: Callable[..., Channel], broker: ChannelBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make()
    leaving = _another(channel)
    leaving.put(1)
    real = Broker.leave
    left = []

    def leave(state: Broker, client: int) -> Any:
        effects = real(state, client)
        if not left:
            left.append(client)
            raise ZeroDivisionError("a defect")
        return effects

    monkeypatch.setattr(Broker, "leave", leave)
    leaving.disconnect()
    assert channel.get(timeout_s=60) == 1
    channel.put(2)
    assert channel.get() == 2
    assert broker.alive
