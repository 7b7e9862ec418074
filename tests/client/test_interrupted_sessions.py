"""Interrupts, as of Ctrl-C, while a client opens its session or is in a call, and calls that interrupt others."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import zmq

from dataplane import DataPlaneClient, connect, connect_async, serve
from dataplane.client import session as sessions
from dataplane.client import session_state, unit_connections
from dataplane.client.rpc import call_socket, channel, heartbeat
from dataplane.client.rpc.pending_calls import Calls
from dataplane.errors import CallTimeoutError, ReentrantCallError, SessionInterruptedError
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


def test_a_close_that_waited_in_vain_for_a_copy_can_be_repeated(observer: DataPlaneClient) -> None:
    at_first = held(observer)
    client = connect(observer.config.address, call_timeout_s=0.05, connect_timeout_s=0.05)
    copies = client._connections.get()._copies
    with (copy := threading.Lock()):
        copies.enter(copy)
        why = "1 call of other threads that copy rows did not end within 0.1 s. Wait until they"
        with pytest.raises(CallTimeoutError, match=why):
            client.close()
    client.close()
    wait_until(lambda: held(observer) == at_first, "the session, its thread and its files end")


def signalled(real: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in which a signal arrives if the main thread calls it."""

    def replacement(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        return real(*arguments, **options)

    return replacement


POINTS = [
    (call_socket.CallSocket, "exchange"),  # while it holds the socket of all threads
    (unit_connections.UnitConnections, "write"),  # while it copies
    (session_state.SessionState, "leftovers"),
    (channel.ControllerChannel, "_leave"),
]


@pytest.mark.parametrize(("owner", "name"), POINTS)
def test_what_a_signal_handler_raises_in_a_call_ends_the_session(
    owner: Any, name: str, observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(number: int, frame: object) -> None:
        raise TimeoutError("of the handler")

    before = signal.signal(signal.SIGUSR1, handler)
    at_first = held(observer)
    client = connect(observer.config.address)
    first = client._connections.get()
    with ThreadPoolExecutor() as threads:
        claim = threads.submit(client.claim_meta, "p", "t", ["x"], 1, timeout_s=NEVER_S)
        wait_until(lambda: first._channel._socket.waiting, "the claim waits")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, signalled(getattr(owner, name)))
            with pytest.raises(TimeoutError, match="of the handler"):
                client.put_samples(["a"], "p", {"x": torch.ones(1, 40_000)})
            signal.signal(signal.SIGUSR1, before)
        assert isinstance(claim.exception(WAIT_S), SessionInterruptedError)
    client.put_samples(["a"], "p", {"x": torch.ones(1, 40_000)})
    assert client._connections.get() is not first
    wait_until(lambda: "closed" in repr(first), "the interrupted session is closed")
    assert len(observer.stats().sessions) == at_first[0] + 1
    client.close()
    wait_until(lambda: held(observer) == at_first, "the session, its thread and its files end")


def test_an_ordinary_error_of_a_call_ends_no_session(observer: DataPlaneClient) -> None:
    with connect(observer.config.address) as client:
        first = client._connections.get()
        with pytest.raises(KeyError):
            client.get_samples(["none"], "p", ["x"])
        with pytest.raises(TypeError):
            client.put_samples(["a"], "p", {"x": [object()]})
        assert client._connections.get() is first


@pytest.mark.parametrize(("owner", "name"), POINTS)
def test_a_call_that_interrupts_another_one_of_its_thread_is_refused(
    owner: Any, name: str, observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[BaseException] = []
    real = getattr(owner, name)
    client = connect(observer.config.address)

    def finalizer() -> None:
        monkeypatch.setattr(owner, name, real)
        for call in (client.stats, client.close):
            try:
                call()
            except ReentrantCallError as error:
                refused.append(error)

    def replacement(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == mine and not refused:
            finalizer()
        return real(*arguments, **options)

    mine = threading.get_ident()
    monkeypatch.setattr(owner, name, replacement)
    client.put_samples(["a"], "p", {"x": torch.ones(1, 40_000)})
    assert len(refused) == 2
    assert client.list_samples("p").sample_ids == ["a"]
    client.close()


def test_bytes_of_an_interrupted_session_stay_until_its_copies_and_views_end(observer: DataPlaneClient) -> None:
    client = connect(observer.config.address)
    client.put_samples(["a"], "p", {"x": torch.ones(1, 40_000)})
    view = client.get_samples(["a"], "p", ["x"], copy=False)["x"]
    session = client._connections.get()
    with (copy := threading.Lock()):
        session._copies.enter(copy)
        session._interrupt()
        client.put_samples(["a"], "p", {"x": torch.zeros(1, 40_000)})
        assert "interrupted" in repr(session)
        assert len(observer.stats().sessions) == 3
    wait_until(lambda: "closed" in repr(session), "the copy has ended")
    assert (view == 1).all()
    assert observer.stats().units[0].retired_bytes > 0
    del view
    gc.collect()
    wait_until(lambda: not observer.stats().units[0].retired_bytes, "the bytes under the view are free")
    client.close()


def test_a_claim_that_an_interrupted_call_did_not_return_comes_again(
    observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer.put_samples(["a"], "p", {"x": torch.ones(1)})
    real = Calls.settle

    def settle(self: Calls, outgoing: Any, reply: Any) -> Any:
        result = real(self, outgoing, reply)
        if outgoing.method == "Claim":
            raise KeyboardInterrupt
        return result

    with connect(observer.config.address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Calls, "settle", settle)
            with pytest.raises(KeyboardInterrupt):
                client.claim_meta("p", "t", ["x"], 1)
        again = client.claim_meta("p", "t", ["x"], 1, timeout_s=WAIT_S)
    assert again.sample_ids == ["a"]


def test_a_destroyed_coroutine_ends_the_session(observer: DataPlaneClient) -> None:
    """An interrupt in asyncio lost the callback that would have woken it."""

    async def main() -> None:
        client = await connect_async(observer.config.address).connect()
        first = await client._connection()
        call = client.claim_meta("p", "t", ["x"], 1, timeout_s=NEVER_S)
        call.send(None)
        other = asyncio.create_task(client.claim_meta("p", "t", ["x"], 1, timeout_s=NEVER_S))
        await client.stats()
        del call
        gc.collect()
        with pytest.raises(SessionInterruptedError):
            await other
        assert await client._connection() is not first
        await client.close()

    at_first = held(observer)
    asyncio.run(main())
    wait_until(lambda: held(observer)[:2] == at_first[:2], "the sessions and their threads end")
