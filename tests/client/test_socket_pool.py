"""The sockets that the threads of a client share: few, served while they are idle, closed when nobody needs them."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

from dataplane.client.rpc import channel as sync_channel
from dataplane.client.rpc import handshake, heartbeat, socket_pool
from dataplane.controller.controller import Controller
from dataplane.errors import ServiceUnavailableError
from dataplane.ledger import commands as c
from tests.controller.service import Open, ScriptedLedger, ledger, open_channel, scripted  # noqa: F401
from tests.open_files import exhausted
from tests.restarts import wait_until

pytestmark = pytest.mark.integration


def counted_sockets(monkeypatch: pytest.MonkeyPatch) -> list[zmq.Socket[bytes]]:
    """The sockets that endpoints open from now on."""
    opened: list[zmq.Socket[bytes]] = []

    def counted(*arguments: Any) -> zmq.Socket[bytes]:
        opened.append(handshake.dealer_socket(*arguments))
        return opened[-1]

    monkeypatch.setattr(socket_pool, "dealer_socket", counted)
    return opened


def used(shared: socket_pool.SocketPool, number: int) -> list[zmq.Socket[bytes]]:
    """Sockets of as many calls at the same time, which have ended."""
    calls = [threading.Lock() for _ in range(number)]
    taken = [dealer for call in calls if (dealer := shared.take(call)) is not None]
    for dealer, call in zip(taken, calls, strict=True):
        shared.put_back(dealer, call, sound=True)
    return taken


def test_idle_sockets_are_served_one_at_a_time(scripted: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = counted_sockets(monkeypatch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    shared = socket_pool.SocketPool(context, f"tcp://{handshake.zmq_address_of(scripted.address)}", handshake.OPEN)

    used(shared, 4)
    served: list[zmq.Socket[bytes]] = []

    def serve(dealer: zmq.Socket[bytes]) -> None:
        """Meanwhile others make calls."""
        served.append(dealer)
        assert dealer not in used(shared, 3)

    shared.serve_idle(serve)
    assert len(opened) == 4
    assert served
    shared.close()
    assert shared.wait(0.0) == 0
    context.destroy(linger=0)


def test_sockets_that_nobody_needs_any_more_are_closed(scripted: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = counted_sockets(monkeypatch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    shared = socket_pool.SocketPool(context, f"tcp://{handshake.zmq_address_of(scripted.address)}", handshake.OPEN)
    used(shared, 4)
    shared.serve_idle(lambda dealer: None)
    assert not any(dealer.closed for dealer in opened)
    shared.serve_idle(lambda dealer: None, idle_s=0.0)
    assert [dealer.closed for dealer in opened] == [True, True, True, False]
    assert used(shared, 1) == [opened[3]]
    shared.close()
    context.destroy(linger=0)


def test_threads_that_call_while_heartbeats_come_share_few_sockets(scripted: Controller, open_channel: Open) -> None:
    channel = open_channel(scripted, heartbeat_s=30.0)

    def call() -> None:
        for _ in range(50):
            channel.call(c.Seal(partition="p"))

    with ThreadPoolExecutor(8) as pool:
        in_flight = [pool.submit(call) for _ in range(8)]
        while not all(each.done() for each in in_flight):
            channel._maintain()
            shared = channel._pool
            # One for each thread, one that is being served, and one that its keeper may be serving.
            assert len(shared) <= 10
        for each in in_flight:
            each.result()


def test_too_few_open_files_are_a_named_error_and_lose_no_post(
    scripted: Controller, open_channel: Open, ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = open_channel(scripted)
    with exhausted(monkeypatch, socket_pool, "dealer_socket", zmq.ZMQError):
        with pytest.raises(ServiceUnavailableError, match="cannot open more files"):
            channel.call(c.Seal(partition="p"))
        channel.post(c.Release(located=1))
        assert channel._calls._numbering.unanswered == 1
        assert not channel._pool._using._calls
    channel.call(c.Seal(partition="p"))
    for outgoing in channel._calls.due(all_of_them=True):
        channel._send_once(outgoing)
    wait_until(lambda: channel._maintain() or channel._calls._numbering.unanswered == 0, "the release is answered")


def test_too_few_open_files_when_the_session_moved_or_to_say_goodbye(
    scripted: Controller, open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = open_channel(scripted)
    channel.call(c.Seal(partition="p"))
    with exhausted(monkeypatch, socket_pool, "Waker"):
        channel._replace_pool()
        with pytest.raises(ServiceUnavailableError, match="cannot open more files"):
            channel.call(c.Seal(partition="p"))
    channel.call(c.Seal(partition="p"))
    with exhausted(monkeypatch, sync_channel, "dealer_socket"):
        channel.close()


def test_too_few_open_files_to_look_for_the_service(
    scripted: Controller, open_channel: Open, monkeypatch: pytest.MonkeyPatch, ledger: ScriptedLedger
) -> None:
    """It is looked for again; calls go on, as they have their sockets."""
    channel = open_channel(scripted)
    asked = threading.Event()
    real = heartbeat.resume_session
    left = [2]

    def none_left_at_first(*arguments: Any) -> Any:
        asked.set()
        if left[0]:
            left[0] -= 1
            raise zmq.ZMQError(errno.EMFILE)
        return real(*arguments)

    monkeypatch.setattr(heartbeat, "resume_session", none_left_at_first)
    channel._heartbeat.check()
    assert asked.wait(60)
    channel.call(c.Seal(partition="p"))
    channel._heartbeat.check()
    wait_until(lambda: not left[0], "it was looked for again")
    channel.call(c.Seal(partition="p"))
