"""Clients that nobody closed: what they had goes back once nothing refers to them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import zmq

from dataplane import (
    AsyncDataPlaneClient,
    CallTimeoutError,
    ClientClosedError,
    DataPlaneClient,
    InvalidRequestError,
    KVBatchMeta,
    Server,
    ServiceUnavailableError,
    connect,
    connect_async,
    serve,
)
from dataplane.client import async_session, preallocated, unit_connections
from dataplane.client import session as sessions
from dataplane.client.operations import short_get, short_put
from dataplane.client.preallocated import PreallocatedBuffer
from dataplane.client.rpc import call_socket, channel, heartbeat
from dataplane.client.rpc.async_channel import AsyncChannel
from dataplane.client.rpc.pending_calls import Calls
from dataplane.client.unit_connections import UnitConnections
from dataplane.errors import CallTimeoutError, ReentrantCallError, SessionInterruptedError
from tests.controller.service import NEVER_S
from tests.restarts import WAIT_S, wait_until

pytestmark = pytest.mark.integration


SETTINGS = {"heartbeat_s": 0.2, "capacity_bytes": 16 << 20}
OTHERS: set[threading.Thread] = set()
"""Threads of clients that were there before the test."""


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    OTHERS.clear()
    OTHERS.update(client_threads())
    with serve(SETTINGS) as server, connect(server.address, heartbeat_s=0.2) as made:
        made.register_partition("p", ["x"], None, ["t"])
        made.put_samples(["a"], "p", {"x": torch.ones(1, 4)})
        made.get_samples(["a"], "p", ["x"])
        yield made


def client_threads() -> set[threading.Thread]:
    """Of all clients in this process."""
    return {thread for thread in threading.enumerate() if thread.name in ("tq-heartbeat", "tq-close")}


def held(client: DataPlaneClient) -> tuple[int, int]:
    """Sessions at the service, and threads of clients that this test made: those of others may end meanwhile."""
    return len(client.stats().sessions), len(client_threads() - OTHERS)


def test_what_dropped_clients_had_goes_back(client: DataPlaneClient) -> None:
    before, files = held(client), len(os.listdir("/proc/self/fd"))
    others = [pickle.loads(pickle.dumps(client)) for _ in range(5)]
    for other in others:
        assert torch.equal(other.get_samples(["a"], "p", ["x"])["x"], torch.ones(1, 4))
    assert held(client) == (before[0] + 5, before[1] + 5)
    del others, other
    gc.collect()
    wait_until(lambda: held(client) == before, "sessions and threads of dropped clients end")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files + 4, "their files are closed")


def test_a_view_outlives_its_dropped_client(client: DataPlaneClient) -> None:
    before = held(client)
    view = pickle.loads(pickle.dumps(client)).get_samples(["a"], "p", ["x"], copy=False)["x"]
    gc.collect()
    wait_until(lambda: held(client)[1] == before[1], "the dropped client ends")
    client.put_samples(["a"], "p", {"x": torch.zeros(1, 4)})
    client.put_samples(["b"], "p", {"x": torch.full((1, 4), 7.0)})
    assert torch.equal(view, torch.ones(1, 4))


def test_a_dropped_client_whose_view_lives_keeps_no_unused_space(
    client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client.preallocated.SOON_S", 1e9)
    monkeypatch.setattr(PreallocatedBuffer, "give_up_idle", lambda self: None)
    other = pickle.loads(pickle.dumps(client))

    def reserves(writer: DataPlaneClient) -> bool:
        writer.put_samples(["b"], "p", {"x": torch.zeros(1, 4)})
        return client.stats().units[0].reserved_bytes > 0

    # The service grants preallocated space once the unit has reported the client.
    wait_until(partial(reserves, other), "space is preallocated")
    view = other.get_samples(["a"], "p", ["x"], copy=False)["x"]
    del other
    gc.collect()
    wait_until(lambda: client.stats().units[0].reserved_bytes == 0, "its unused space is free")
    assert torch.equal(view, torch.ones(1, 4))


async def use(client: AsyncDataPlaneClient) -> None:
    got = await client.get_samples(["a"], "p", ["x"])
    assert torch.equal(got["x"], torch.ones(1, 4))


def test_a_dropped_async_client_ends_in_its_loop(client: DataPlaneClient) -> None:
    before = held(client)

    async def drop() -> None:
        other = connect_async(client._config.address, heartbeat_s=0.2)
        await use(other)
        del other
        gc.collect()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, lambda: held(client) == before, "the dropped client ends")

    asyncio.run(drop())


def test_an_async_client_whose_loop_is_closed_lets_go_of_what_it_had(client: DataPlaneClient) -> None:
    before = held(client)
    kept: list[AsyncDataPlaneClient] = []

    async def leave() -> None:
        kept.append(connect_async(client._config.address, heartbeat_s=0.2))
        await use(kept[0])

    asyncio.run(leave())
    kept.clear()
    gc.collect()
    wait_until(lambda: held(client) == before, "the dropped client ends")


# --- Interrupts, as of Ctrl-C, while a client opens its session or is in a call, and calls that
# interrupt others.


@pytest.fixture
def observer() -> Iterator[DataPlaneClient]:
    """A client of a service that no other client uses."""
    with serve({"capacity_bytes": 16 << 20}) as server, connect(server.address) as made:
        made.register_partition("p", ["x"], None, ["t"])
        yield made


def held_bytes(observer: DataPlaneClient) -> tuple[int, int, int]:
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
    at_first = held_bytes(observer)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted(getattr(owner, name), before=before))
        with pytest.raises(KeyboardInterrupt):
            connect(observer.config.address)
    wait_until(lambda: held_bytes(observer) == at_first, "the session, its thread and its files end")


def test_a_close_that_waited_in_vain_for_a_copy_can_be_repeated(observer: DataPlaneClient) -> None:
    at_first = held_bytes(observer)
    client = connect(observer.config.address, call_timeout_s=0.05, connect_timeout_s=0.05)
    copies = client._connections.get()._copies
    with (copy := threading.Lock()):
        copies.enter(copy)
        why = "1 call of other threads that copy rows did not end within 0.1 s. Wait until they"
        with pytest.raises(CallTimeoutError, match=why):
            client.close()
    client.close()
    wait_until(lambda: held_bytes(observer) == at_first, "the session, its thread and its files end")


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
    (sessions.Connection, "_resume"),
    (channel.ControllerChannel, "_leave"),
]


@pytest.mark.parametrize(("owner", "name"), POINTS)
def test_what_a_signal_handler_raises_in_a_call_ends_the_session(
    owner: Any, name: str, observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(number: int, frame: object) -> None:
        raise TimeoutError("of the handler")

    before = signal.signal(signal.SIGUSR1, handler)
    at_first = held_bytes(observer)
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
    wait_until(lambda: held_bytes(observer) == at_first, "the session, its thread and its files end")


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


# --- An async client belongs to one event loop, says so in others, and can be closed from anywhere.


NOBODY = "127.0.0.1:1"
META = KVBatchMeta("p", "train", ["a"], fields=["x"])
ARGUMENTS: dict[str, Any] = {
    "path": "nowhere",
    "meta": META,
    "sample_ids": ["a"],
    "sample_id": "a",
    "partition_id": "p",
    "fields": ["x"],
    "select_fields": ["x"],
    "required_fields": ["x"],
    "num_samples": 1,
    "consumer_tasks": ["train"],
    "task_name": "train",
    "task_names": ["train"],
    "batch_size": 1,
    "lease_s": 1.0,
    "tags": [{}],
    "unit": 1,
    "version": 1,
}
METHODS = [
    name
    for name, method in inspect.getmembers(AsyncDataPlaneClient, inspect.iscoroutinefunction)
    if not name.startswith("_") and name not in ("close", "perform")
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 << 20, "heartbeat_s": 0.2}) as running:
        yield running


@pytest.fixture(scope="module")
def looking(server: Server) -> Iterator[DataPlaneClient]:
    with connect(server.address) as opened:
        yield opened


def open_sessions(client: DataPlaneClient) -> int:
    return len(client.stats().sessions)


def calling(client: AsyncDataPlaneClient, name: str) -> Callable[[], Coroutine[Any, Any, Any]]:
    method = getattr(client, name)
    parameters = inspect.signature(method).parameters.values()
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return lambda: method(**{name: ARGUMENTS[name] for name in wanted})


async def refused(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    with pytest.raises(InvalidRequestError, match="is bound to another event loop"):
        await asyncio.wait_for(call(), 60)


def test_every_call_in_a_second_loop_is_refused(server: Server, looking: DataPlaneClient) -> None:
    before = open_sessions(looking)
    client = connect_async(server.address, heartbeat_s=0.2)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(connected(client))
    for name in METHODS:
        asyncio.run(refused(calling(client, name)))
    asyncio.run(client.close())
    loop.close()
    with pytest.raises(ClientClosedError, match=r"close\(\) was called"):
        asyncio.run(connected(client))
    wait_until(lambda: open_sessions(looking) == before, "no session of a client whose loop is gone")


def test_a_closed_loop_ends_the_session_and_the_next_call_opens_another_one(
    server: Server, looking: DataPlaneClient
) -> None:
    before = open_sessions(looking)
    client = connect_async(server.address, heartbeat_s=0.2)
    asyncio.run(connected(client))
    wait_until(lambda: open_sessions(looking) == before, "the session of the closed loop ends")
    asyncio.run(connected(client))
    asyncio.run(connected(client))
    asyncio.run(client.close())
    wait_until(lambda: open_sessions(looking) == before, "the last session ends")


def test_cancelling_while_it_opens_leaves_nothing(server: Server, looking: DataPlaneClient) -> None:
    before = open_sessions(looking)

    async def main() -> None:
        client = connect_async(server.address)
        opening = asyncio.create_task(client.connect())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await client.close()

    asyncio.run(main())
    assert open_sessions(looking) == before


async def connected(client: AsyncDataPlaneClient) -> None:
    await client.connect()


def test_beside_a_loop_that_runs_only_that_one_works(server: Server, looking: DataPlaneClient) -> None:
    before = open_sessions(looking)
    client = connect_async(server.address, heartbeat_s=0.2)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(60)

    try:
        there(client.connect())
        asyncio.run(refused(client.stats))
        assert there(client.stats()).sessions
        asyncio.run(client.close())
        wait_until(lambda: open_sessions(looking) == before, "the session ended in its own loop")
        there(others_end())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def others_end() -> None:
    """The tasks of this loop but this one, of which one may be closing a connection."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=60)


def test_closing_after_a_failed_connection_raises_nothing() -> None:
    async def fail(*, wait: bool) -> None:
        client = connect_async(NOBODY, connect_timeout_s=0.5)
        if wait:
            with pytest.raises(ServiceUnavailableError):
                await client.connect()
        else:
            opening = asyncio.create_task(client.connect())
            await asyncio.sleep(0)
            opening.cancel()
            # The connection may be refused before the task is cancelled.
            with pytest.raises((asyncio.CancelledError, ServiceUnavailableError)):
                await opening
        await client.close()
        await client.close()

    asyncio.run(fail(wait=True))
    asyncio.run(fail(wait=False))


async def close_and_cancel(client: AsyncDataPlaneClient, patch: pytest.MonkeyPatch) -> None:
    """Cancel `close` while it waits for the copies in progress."""
    loop, waits, end_copies = asyncio.get_running_loop(), asyncio.Event(), async_session.end_copies

    def seen(*arguments: Any) -> None:
        loop.call_soon_threadsafe(waits.set)
        end_copies(*arguments)

    patch.setattr(async_session, "end_copies", seen)
    closing = asyncio.create_task(client.close())
    await asyncio.wait_for(waits.wait(), WAIT_S)
    patch.setattr(async_session, "end_copies", end_copies)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


def test_a_close_that_was_cancelled_can_be_repeated(
    server: Server, looking: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_sessions(looking)

    async def main() -> None:
        client = connect_async(server.address)
        await client.connect()
        connection = await client._connection()
        with (copy := threading.Lock()):  # for which `close` waits
            connection._copies.enter(copy)
            await close_and_cancel(client, monkeypatch)
        await client.close()
        await client.close()
        assert connection._channel._context.closed

    asyncio.run(main())
    assert open_sessions(looking) == before


def test_an_async_close_that_waited_in_vain_for_a_copy_can_be_repeated(server: Server) -> None:
    async def main() -> None:
        client = connect_async(server.address, call_timeout_s=0.05)
        connection = await client._connection()
        connection._config = replace(connection._config, connect_timeout_s=0.05)
        with (copy := threading.Lock()):
            connection._copies.enter(copy)
            with pytest.raises(CallTimeoutError):
                await client.close()
        await client.close()
        assert connection._channel._context.closed

    asyncio.run(main())


def test_a_client_whose_close_was_cancelled_ends_when_it_is_dropped(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> tuple[AsyncDataPlaneClient, AsyncChannel]:
        client = connect_async(server.address)
        connection = await client._connection()
        with (copy := threading.Lock()):
            connection._copies.enter(copy)
            await close_and_cancel(client, monkeypatch)
        return client, connection._channel

    client, channel = asyncio.run(main())
    del client
    gc.collect()
    wait_until(lambda: channel._context.closed, "the thread and the sockets of the dropped client end")


def test_a_connection_that_failed_in_one_loop_is_tried_again_in_another(server: Server) -> None:
    client = connect_async(NOBODY, connect_timeout_s=0.5)

    async def fails() -> None:
        with pytest.raises(ServiceUnavailableError):
            await client.connect()

    asyncio.run(fails())
    asyncio.run(fails())
    asyncio.run(client.close())


def test_small_copies_are_made_on_the_loop_and_large_ones_elsewhere(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hand a few kilobytes to another thread takes longer than to copy them; more would hold up the loop."""
    copied_by: dict[str, int] = {}
    read_by: dict[str, int] = {}
    write = UnitConnections._write
    copy = short_put._copy
    read = short_get._copy

    def seen(self: UnitConnections, placements: Any, columns: Any, *more: Any) -> None:
        copied_by[columns[0].name] = threading.get_ident()
        write(self, placements, columns, *more)

    def seen_short(*arguments: Any, **options: Any) -> Any:
        copied_by["small"] = threading.get_ident()
        return copy(*arguments, **options)

    def seen_reading(session_state: Any, plan: Any, *more: Any) -> Any:
        read_by[plan.columns[0].name] = threading.get_ident()
        return read(session_state, plan, *more)

    monkeypatch.setattr(UnitConnections, "_write", seen)
    monkeypatch.setattr(short_get, "_copy", seen_reading)
    monkeypatch.setattr(short_put, "_copy", seen_short)
    # On a busy machine puts count as soon after one another, too, and those ask again who ask before the service knows
    # that this client is on the unit's host.
    monkeypatch.setattr(preallocated, "SOON_S", 600.0)
    monkeypatch.setattr(preallocated.PreallocatedBuffer, "record_rejection", lambda self: None)

    async def puts() -> None:
        async with connect_async(server.address) as client:
            await client.register_partition("copies", ["small", "large"], None, [])
            for _ in range(600):  # until there is preallocated space
                await client.put_samples(["s0"], "copies", {"small": torch.zeros(1, 100)})
                if copied_by["small"] == threading.get_ident():
                    break
                await asyncio.sleep(0.1)
            await client.put_samples(["s0"], "copies", {"large": torch.zeros(1, 100_000)})
            for name in ("small", "large") * 2:  # the first read of a field is a general one
                await client.get_samples(["s0"], "copies", [name])
            await client.clear_samples(None, "copies")

    asyncio.run(puts())
    assert copied_by["small"] == threading.get_ident()
    assert copied_by["large"] != threading.get_ident()
    assert read_by["small"] == threading.get_ident()
    assert read_by["large"] != threading.get_ident()


def test_a_claim_that_an_interrupted_call_did_not_return_comes_again(
    observer: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer.put_samples(["a"], "p", {"x": torch.ones(1)})
    real = Calls.settle

    def settle(self: Calls, outgoing: Any, reply: Any) -> Any:
        result = real(self, outgoing, reply)
        if outgoing.command.__name__ == "Claim":
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
