"""Interrupts, as of Ctrl-C, while a client opens or closes its session, and clients that a signal handler closes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import zmq

from dataplane import DataPlaneClient, connect, serve
from dataplane.client import preallocated, session_state, unit_connections
from dataplane.client import session as sessions
from dataplane.client.rpc import call_socket, channel, heartbeat
from dataplane.errors import CallTimeoutError, ClientClosedError
from dataplane.storage import client as unit_client
from tests.controller.service import NEVER_S
from tests.restarts import WAIT_S, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def observer() -> Iterator[DataPlaneClient]:
    """A client of a service that no other client uses."""
    with serve({"capacity_bytes": 16 << 20}) as server, connect(server.address) as made:
        made.register_partition("p", ["x"], None, ["t"])
        yield made


def held(observer: DataPlaneClient) -> tuple[int, int, int]:
    """Sessions at the service; threads of clients and open files of this process."""
    gc.collect()
    threads = [each for each in threading.enumerate() if each.name in ("tq-heartbeat", "tq-close")]
    return len(observer.stats().sessions), len(threads), len(os.listdir("/proc/self/fd"))


def interrupted(function: Callable[..., Any], *, before: bool = False) -> Callable[..., Any]:
    """The function, which a Ctrl-C interrupts before its first statement or after its last."""

    def replacement(*arguments: Any, **options: Any) -> Any:
        if not before:
            function(*arguments, **options)
        raise KeyboardInterrupt

    return replacement


@pytest.mark.filterwarnings("ignore:Unclosed socket:ResourceWarning")
@pytest.mark.parametrize(
    ("owner", "name", "before"),
    [
        (heartbeat.threading.Thread, "start", True),
        (heartbeat.threading.Thread, "start", False),
        (zmq.Context, "_add_socket", True),
        (sessions, "session_states", True),
        (sessions.weakref, "finalize", False),
    ],
)
def test_an_interrupted_connect_leaves_nothing(
    owner: Any, name: str, before: bool, observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_first = held(observer)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted(getattr(owner, name), before=before))
        with pytest.raises(KeyboardInterrupt):
            connect(observer.config.address)
    wait_until(lambda: held(observer) == at_first, "the session, its thread and its files end")


@pytest.mark.parametrize(
    ("owner", "name", "before"),
    [
        (sessions, "end_copies", False),
        (preallocated.PreallocatedBuffer, "give_up_all", False),
        (session_state.SessionState, "close", True),
        (unit_connections.UnitConnections, "close", False),
        (unit_client.UnitConnection, "close", True),
        (unit_client.InFlight, "wait", True),
        (channel.ControllerChannel, "close", True),
        (channel.ControllerChannel, "_resend_all", True),
        (channel.ControllerChannel, "_send_bye", True),
        (channel.ControllerChannel, "_send_bye", False),
        (heartbeat.HeartbeatThread, "close", True),
        (heartbeat.HeartbeatThread, "close", False),
        (zmq.Context, "destroy", True),
    ],
)
def test_an_interrupted_close_can_be_repeated(
    owner: Any, name: str, before: bool, observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_first = held(observer)
    client = connect(observer.config.address)
    client.put_samples(["a"], "p", {"x": torch.ones(1, 4)})
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted(getattr(owner, name), before=before))
        with pytest.raises(KeyboardInterrupt):
            client.close()
    client.close()
    client.close()
    wait_until(lambda: held(observer) == at_first, "the session, its thread and its files end")


def test_a_close_that_waited_in_vain_for_a_copy_can_be_repeated(observer: DataPlaneClient) -> None:
    at_first = held(observer)
    client = connect(observer.config.address, call_timeout_s=0.05, connect_timeout_s=0.05)
    copies = client._connections.get()._copies
    with (copy := threading.Lock()):
        copies.enter(copy)
        with pytest.raises(CallTimeoutError):
            client.close()
    client.close()
    wait_until(lambda: held(observer) == at_first, "the session, its thread and its files end")


def close_in_a_put(
    owner: Any, name: str, closes_again: bool, observer: DataPlaneClient, patch: pytest.MonkeyPatch
) -> None:
    client = connect(observer.config.address)
    mine, real = threading.get_ident(), getattr(owner, name)

    def interrupted_once(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == mine and getattr(owner, name) is not real:
            patch.setattr(owner, name, real)
            client.close()
        return real(*arguments, **options)

    with ThreadPoolExecutor() as threads:
        claim = threads.submit(client.claim_meta, "p", "t", ["x"], 1, timeout_s=NEVER_S)
        waiting = client._connections.get()._channel._socket.waiting
        wait_until(lambda: waiting, "the claim waits")
        patch.setattr(channel, "CLOSE_S", NEVER_S)
        patch.setattr(owner, name, interrupted_once)
        with pytest.raises(ClientClosedError):
            client.put_samples(["a"], "p", {"x": torch.ones(1, 40_000)})
        assert isinstance(claim.exception(WAIT_S), ClientClosedError)
    if closes_again:
        client.close()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (call_socket.CallSocket, "exchange"),  # while it holds the socket of all threads
        (unit_connections.UnitConnections, "write"),  # while it copies
        (session_state.SessionState, "leftovers"),
        (channel.ControllerChannel, "_leave"),
    ],
)
@pytest.mark.parametrize("closes_again", [True, False])
def test_a_signal_handler_may_close_the_client_whose_call_it_interrupts(
    owner: Any, name: str, closes_again: bool, observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_first = held(observer)
    with monkeypatch.context() as patch:  # whose replacement refers to the client
        close_in_a_put(owner, name, closes_again, observer, patch)
    gc.collect()
    wait_until(lambda: held(observer) == at_first, "the session, its thread and its files end")


def test_a_signal_handler_may_close_the_client_that_connects(
    observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_first = held(observer)
    client = DataPlaneClient(observer.config)
    finalize = sessions.weakref.finalize

    def interrupted_once(*arguments: Any) -> Any:
        monkeypatch.setattr(sessions.weakref, "finalize", finalize)
        client.close()
        return finalize(*arguments)

    monkeypatch.setattr(sessions.weakref, "finalize", interrupted_once)
    with pytest.raises(ClientClosedError):
        client.stats()
    wait_until(lambda: held(observer) == at_first, "the session, its thread and its files end")
