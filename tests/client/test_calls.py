"""Reads and calls against real services: other places, append order, timeouts, names of fields, heartbeats."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import (
    AsyncDataPlaneClient,
    DataPlaneClient,
    DataPlaneConfig,
    SampleNotFoundError,
    SchemaError,
    Server,
    StreamingDataLoader,
    connect,
    connect_async,
    serve,
)
from dataplane.client.operations import drain_unit
from dataplane.client.session_state import Schema, Warned
from dataplane.controller.controller import Controller
from dataplane.core import failpoints
from dataplane.core.types import FieldSpec
from dataplane.errors import (
    ClientClosedError,
    FieldNotFoundError,
    PartitionDroppedError,
    PartitionNotFoundError,
    SchemaError,
    ServiceUnavailableError,
    SessionExpiredError,
    StorageUnitError,
)
from dataplane.ledger.commands import FenceSession
from tests.controller.service import NEVER_S, Open, ScriptedLedger, ledger, open_channel, scripted  # noqa: F401
from tests.restarts import WAIT_S, RestartableService, one_unit, wait_until
from tests.service import client, server  # noqa: F401

pytestmark = pytest.mark.integration


# --- A reader that outlives its pins discards what it read.


MIB = 1 << 20
ROWS = 8
FIRST, SECOND = torch.full((ROWS, MIB // 8), 1), torch.full((ROWS, MIB // 8), 2)
IDS = [f"s{i}" for i in range(ROWS)]
READS: dict[str, Callable[[DataPlaneClient], object]] = {
    "get_samples": lambda client: client.get_samples(IDS, "p", ["x"]),
    "views": lambda client: client.get_samples(IDS, "p", ["x"], copy=False),
}


@pytest.fixture
def reading_server() -> Iterator[Server]:
    """So small that a second batch lies where the first did."""
    with serve({"capacity_bytes": 12 * MIB, "reserve_fraction": 0.0, "put_timeout_s": 60.0}) as running:
        yield running


@pytest.fixture
def other(reading_server: Server) -> Iterator[DataPlaneClient]:
    with connect(reading_server.address, client_name="other") as client:
        client.register_partition("p", ["x"], None, ["task"])
        client.put_samples(IDS, "p", {"x": FIRST})
        yield client


def overwrite(other: DataPlaneClient) -> None:
    """Put another batch where the first one lay: it waits for that space until nobody may read there any more."""
    other.clear_samples(None, "p")
    other.register_partition("p", ["x"], None, ["task"])
    other.put_samples(IDS, "p", {"x": SECOND})


def lose_lock(client: DataPlaneClient) -> None:
    """What a library that closes all descriptors does."""
    lock = client._connections.get().session_state._lock
    assert lock is not None
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, lock._fd)
    os.close(nothing)


@pytest.mark.parametrize("how", READS)
def test_without_its_lock_a_local_reader_returns_nothing_that_was_overwritten(reading_server, other, how) -> None:
    with connect(reading_server.address) as reader:
        READS[how](reader)

        def meanwhile() -> None:
            failpoints.disarm()
            lose_lock(reader)
            with connect(reading_server.address) as another:
                another.get_samples(IDS, "p", ["x"])  # the unit looks who is gone when somebody attaches
            overwrite(other)

        failpoints.arm("get.mid_copy", meanwhile)
        with pytest.raises(SessionExpiredError):
            READS[how](reader)


def test_without_its_lock_a_reader_whose_session_lives_goes_on(reading_server, other) -> None:
    with connect(reading_server.address) as reader:
        path = reader._connections.get().session_state._lock.path
        failpoints.arm("get.mid_copy", lambda: (failpoints.disarm(), path.unlink()))
        assert torch.equal(reader.get_samples(IDS, "p", ["x"])["x"], FIRST)


def test_a_remote_reader_that_was_fenced_returns_nothing(reading_server, other) -> None:
    with connect(reading_server.address, force_remote=True, client_name="slow") as reader:
        READS["get_samples"](reader)
        session = reader._connections.get().session_state.session

        def meanwhile() -> None:
            failpoints.disarm()
            reading_server._units[0]._execute_order(FenceSession(unit=1, session=session))
            overwrite(other)

        failpoints.arm("get.mid_copy", meanwhile)
        with pytest.raises(SessionExpiredError):
            READS["get_samples"](reader)
    assert torch.equal(other.get_samples(IDS, "p", ["x"])["x"], SECOND)


# --- Reads whose storage unit goes under them, because what was there was moved away.


MOVED_ROWS = [torch.arange(100), torch.arange(7)]


@pytest.fixture
def moving_service(tmp_path: Path) -> Iterator[RestartableService]:
    """A service with two storage units, whose rows are all in the first."""
    with one_unit(tmp_path / "state") as restartable:
        with connect(restartable.address) as elsewhere:
            elsewhere.register_partition("p", ["x"], None, ["train"])
            elsewhere.put_samples(["a", "b"], "p", {"x": MOVED_ROWS})
        restartable.unit()
        yield restartable


@pytest.fixture
def elsewhere(moving_service: RestartableService) -> Iterator[DataPlaneClient]:
    with connect(moving_service.address, force_remote=True) as made:
        yield made


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Nothing that refers to itself goes in this test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("copy", [True, False])
def test_rows_that_were_moved_are_read_where_they_are_now(
    moving_service: RestartableService,
    elsewhere: DataPlaneClient,
    monkeypatch: pytest.MonkeyPatch,
    copy: bool,
) -> None:
    monkeypatch.setattr(drain_unit, "LOOK_S", 0.1)  # for a reader, who does not end before
    acts = [lambda: leave(moving_service)]
    failpoints.arm("get.mid_copy", lambda: acts.pop()() if acts else None)
    got = elsewhere.get_samples(["b", "a"], "p", ["x"], copy=copy)
    assert [row.tolist() for row in got["x"].unbind()] == [
        MOVED_ROWS[1].tolist(),
        MOVED_ROWS[0].tolist(),
    ]
    assert not acts
    del got
    wait_until(lambda: all(unit.pinned_bytes == 0 for unit in elsewhere.stats().units))


def leave(moving_service: RestartableService) -> None:
    """The first unit is emptied, and ends, though somebody reads."""
    with connect(moving_service.address) as other:
        other.drain(1, timeout_s=300)
    moving_service.units[0].stop()


def test_rows_that_are_gone_with_their_unit_are_told_of(
    moving_service: RestartableService, elsewhere: DataPlaneClient
) -> None:
    def die() -> None:
        moving_service.units[0].stop()
        with connect(moving_service.address) as other:
            wait_until(lambda: not other.stats().units[0].connected)
            other.drop_unit(1, force=True)

    acts = [die]
    failpoints.arm("get.mid_copy", lambda: acts.pop()() if acts else None)
    with pytest.raises(SampleNotFoundError, match=r"2 of them were lost with storage unit 1 \("):
        elsewhere.get_samples(["a", "b"], "p", ["x"])


def test_a_unit_that_still_has_the_rows_is_asked_once(
    moving_service: RestartableService, elsewhere: DataPlaneClient
) -> None:
    copies = []
    failpoints.arm("get.mid_copy", lambda: copies.append(1))
    moving_service.units[0].stop()
    with pytest.raises(StorageUnitError, match="storage unit 1"):
        elsewhere.get_samples(["a", "b"], "p", ["x"])
    assert copies == [1]
    wait_until(lambda: all(unit.pinned_bytes == 0 for unit in elsewhere.stats().units))


# --- How long puts wait for space: as the service says, unless the client says otherwise.


@pytest.fixture(scope="module")
def full_server() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 * MIB, "put_timeout_s": 300.0}) as running:
        yield running


def blocking(address: str, **settings: Any) -> None:
    with connect(address, **settings) as client:
        client.put_samples(["late"], "p", {"x": torch.zeros(1, MIB)})


def awaiting(address: str, **settings: Any) -> None:
    async def put() -> None:
        async with connect_async(address, **settings) as client:
            await client.put_samples(["late"], "p", {"x": torch.zeros(1, MIB)})

    asyncio.run(put())


@pytest.mark.parametrize("put", [blocking, awaiting])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 300.0), ({"put_timeout_s": 200.0}, 200.0), ({"put_timeout_s": math.inf}, math.inf)],
)
def test_the_service_says_unless_the_client_does(
    full_server: Server, put: Callable[..., None], settings: dict[str, float], expected: float
) -> None:
    with connect(full_server.address) as client:
        client.register_partition("p", ["x"], None, ["train"])
        client.put_samples(["full"], "p", {"x": torch.zeros(1, MIB)})
        waiter = threading.Thread(target=put, args=(full_server.address,), kwargs=settings)
        waiter.start()
        wait_until(lambda: len(client.waits().waits) == 1)
        (wait,) = client.waits().waits
        assert wait.until - wait.since == pytest.approx(expected)
        client.clear_samples(["full"], "p")
        waiter.join(WAIT_S)
        assert not waiter.is_alive()
        client.clear_samples(None, "p")


def test_nobody_says() -> None:
    assert DataPlaneConfig().put_timeout_s is None
    with (
        serve({"capacity_bytes": 8 * MIB, "units": 0}) as full_server,
        connect(full_server.address) as client,
    ):
        assert client._connections.get().session_state.put_timeout_s == 60.0


# --- Concurrent appends of one client to a sample: one after another, in the order of their calls.


def piece(number: int, *samples: str) -> dict[str, Any]:
    return {
        "sample_ids": list(samples),
        "partition_id": "train",
        "fields": {"x": [torch.tensor([number])] * len(samples)},
        "tags": [{"last": number}] * len(samples),
        "mode": "append",
    }


@pytest.fixture
def rows(server: Server, client: DataPlaneClient) -> Iterator[Any]:
    client.register_partition("train", ["x"], None, [])
    yield lambda name: client.get_samples([name], "train", ["x"])["x"][0].tolist()
    client.clear_samples(None, "train")


@pytest.mark.parametrize("count", [2, 60])
def test_coroutines(server: Server, client: DataPlaneClient, rows: Any, count: int) -> None:
    async def main() -> None:
        async with connect_async(server.address) as mine:
            appends = [mine.put_samples(**piece(number, "a", f"{number % 2}")) for number in range(count)]
            tags = mine.put_samples(["a"], "train", tags=[{"last": "done"}], mode="append")
            await asyncio.gather(*appends, tags)
            await mine.put_samples(**piece(count, "a"))

    asyncio.run(main())
    assert rows("a") == [*range(count + 1)]
    assert rows("0") == [*range(0, count, 2)]
    assert rows("1") == [*range(1, count, 2)]


def test_calls_that_fail_or_are_cancelled_let_the_next_one_go(
    server: Server, client: DataPlaneClient, rows: Any
) -> None:
    async def main(mine: AsyncDataPlaneClient) -> list[Any]:
        wrong = piece(2, "a") | {"fields": {"x": [torch.ones(1)]}}
        calls = [piece(0, "a"), piece(1, "a"), wrong, piece(3, "a"), piece(4, "a", "b"), piece(5, "b")]
        tasks = [asyncio.create_task(mine.put_samples(**call)) for call in calls]
        await asyncio.sleep(0)  # each has taken its turn
        tasks[1].cancel()  # waits for 0
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def connected() -> list[Any]:
        async with connect_async(server.address) as mine:
            await mine.connect()
            return await main(mine)

    outcomes = asyncio.run(connected())
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]
    assert isinstance(outcomes[2], SchemaError)
    assert rows("a") == [0, 4]
    assert rows("b") == [4, 5]


def test_threads(client: DataPlaneClient, rows: Any) -> None:
    def work(who: int) -> None:
        for number in range(20):
            client.put_samples(**piece(who * 100 + number, "a"))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    for who in range(6):
        assert [each % 100 for each in rows("a") if each // 100 == who] == [*range(20)]


# --- Calls without a timeout wait until they succeed, or until service, session or partition end.


Submit = Callable[..., "Future[Any]"]


@pytest.fixture
def quiet_server() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 * MIB, "put_timeout_s": math.inf}) as running:
        yield running


@pytest.fixture
def observer(quiet_server: Server) -> Iterator[DataPlaneClient]:
    with connect(quiet_server.address) as client:
        client.register_partition("p", ["x"], None, ["train"])
        yield client


@pytest.fixture
def submit() -> Iterator[Submit]:
    with ThreadPoolExecutor(4) as threads:
        yield threads.submit


def claim(client: DataPlaneClient, timeout_s: float | None = None) -> list[str]:
    return client.claim_meta("p", "train", ["x"], 1, timeout_s=timeout_s).sample_ids


def stream(client: DataPlaneClient, prefetch: int = 0, timeout_s: float | None = None) -> list[str]:
    options: dict[str, Any] = {"batch_size": 1, "prefetch": prefetch, "timeout_s": timeout_s}
    with StreamingDataLoader(client, "p", "train", ["x"], **options) as loader:
        return next(iter(loader)).meta.sample_ids


def prefetch(client: DataPlaneClient) -> list[str]:
    return stream(client, prefetch=1, timeout_s=math.inf)


def claim_infinitely(client: DataPlaneClient) -> list[str]:
    return claim(client, math.inf)


def claim_in_async_code(client: DataPlaneClient) -> list[str]:
    async def call() -> list[str]:
        async with connect_async(client.config.address or "") as other:
            return (await other.claim_meta("p", "train", ["x"], 1, timeout_s=None)).sample_ids

    return asyncio.run(call())


def put(client: DataPlaneClient) -> list[str]:
    """Waits for space: the partition is full."""
    return client.put_samples(["late"], "p", {"x": torch.zeros(1, MIB)}).sample_ids


CALLS = [claim, claim_infinitely, claim_in_async_code, stream, prefetch, put]


def parked(
    call: Callable[[DataPlaneClient], list[str]], client: DataPlaneClient, observer: DataPlaneClient, submit: Submit
) -> Future[list[str]]:
    """The call, which waits now."""
    if call is put:
        observer.put_samples(["full"], "p", {"x": torch.zeros(1, MIB)})
    waiting = submit(call, client)
    wait_until(lambda: len(observer.waits().waits) == 1)
    if call is not prefetch:  # its thread claims for a short time, again and again
        assert observer.waits().waits[0].until == math.inf
    assert not waiting.done()
    return waiting


@pytest.mark.parametrize("call", CALLS)
def test_the_wait_ends_when_the_call_succeeds(
    call: Callable[[DataPlaneClient], list[str]],
    quiet_server: Server,
    observer: DataPlaneClient,
    submit: Submit,
) -> None:
    with connect(quiet_server.address) as client:
        waiting = parked(call, client, observer, submit)
        if call is put:
            observer.clear_samples(["full"], "p")
        else:
            observer.put_samples(["late"], "p", {"x": torch.zeros(1, 1)})
        assert waiting.result(WAIT_S) == ["late"]


@pytest.mark.parametrize(
    ("call", "ended"),
    [(call, "service") for call in CALLS] + [(call, "session") for call in (claim, stream, prefetch, put)],
)
def test_the_end_of_the_service_or_of_the_session_ends_the_wait(
    call: Callable[[DataPlaneClient], list[str]],
    ended: str,
    quiet_server: Server,
    observer: DataPlaneClient,
    submit: Submit,
) -> None:
    client = connect(quiet_server.address)
    waiting = parked(call, client, observer, submit)
    if ended == "service":
        quiet_server.close()
    else:
        client.close()
    with pytest.raises(ServiceUnavailableError if ended == "service" else ClientClosedError):
        waiting.result(WAIT_S)
    client.close()


@pytest.mark.parametrize("call", CALLS)
def test_the_end_of_the_partition_ends_the_wait(
    call: Callable[[DataPlaneClient], list[str]],
    quiet_server: Server,
    observer: DataPlaneClient,
    submit: Submit,
) -> None:
    with connect(quiet_server.address) as client:
        waiting = parked(call, client, observer, submit)
        observer.clear_samples(None, "p")
        with pytest.raises(PartitionDroppedError):
            waiting.result(WAIT_S)


# --- The thread that keeps a session alive.


def test_a_service_with_many_sessions_gets_fewer_heartbeats(
    scripted: Controller, ledger: ScriptedLedger, open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else that a client does with each heartbeat is done as often as before."""
    ledger.min_heartbeat_s = NEVER_S
    heartbeat = open_channel(scripted)._heartbeat
    wait_until(lambda: heartbeat._min_heartbeat_s == NEVER_S, "the service's answer to a heartbeat")
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(heartbeat, "_maintain", lambda: done.put("maintained"))
    monkeypatch.setattr(heartbeat, "_send_beat", lambda: done.put("sent"))
    assert {done.get(timeout=WAIT_S) for _ in range(5)} == {"maintained"}
    heartbeat.check()
    while done.get(timeout=WAIT_S) != "sent":
        pass


# --- What is probably misspelled is said at once, and once, in the log of the client.


_names = itertools.count()


@pytest.fixture(scope="module")
def warning_server() -> Iterator[Server]:
    with serve({"capacity_bytes": 16 << 20}) as running:
        yield running


@pytest.fixture
def warned_client(warning_server: Server, caplog: pytest.LogCaptureFixture) -> Iterator[DataPlaneClient]:
    caplog.set_level(logging.WARNING, "dataplane.client.operations.field_names")
    with connect(warning_server.address) as warned_client:
        yield warned_client


@pytest.fixture
def partition(warned_client: DataPlaneClient) -> Iterator[str]:
    name = f"p{next(_names)}"
    warned_client.register_partition(name, ["reward", "margin"], None, ["train"])
    yield name
    warned_client.clear_samples(None, name)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "dataplane.client.operations.field_names"
    ]


def test_a_put_of_an_undeclared_field_is_told_of_once(
    warned_client: DataPlaneClient,
    warning_server: Server,
    partition: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("a", "b"):
        warned_client.put_samples([name], partition, {"reward": torch.zeros(1), "rewrd": torch.zeros(1)})
    (told,) = said(caplog)
    assert told == (
        f"put: field 'rewrd' is not declared in partition {partition!r}; it is stored anyway. Did you mean 'reward'?"
    )
    warned_client.put_samples(["a"], partition, {"xyz": torch.zeros(1)}, mode="append")
    assert said(caplog)[1:] == [
        f"put: field 'xyz' is not declared in partition {partition!r}; it is stored anyway. "
        "Known fields: 'reward', 'margin'"
    ]
    with connect(warning_server.address) as other:
        other.put_samples(["c"], partition, {"rewrd": torch.zeros(1)})
    assert said(caplog)[2:] == [told], "every client says so, also of what another has put before"


def test_a_field_declared_since_is_as_good_as_any(
    warned_client: DataPlaneClient,
    warning_server: Server,
    partition: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warned_client.put_samples(["a"], partition, {"reward": torch.zeros(1)})
    with connect(warning_server.address) as other:
        other.register_partition(partition, ["reward", "score"], None, ["train"])
    warned_client.put_samples(["a"], partition, {"score": torch.zeros(1)})
    assert said(caplog) == []


def test_where_nothing_is_declared_nothing_is_odd(
    warned_client: DataPlaneClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    warned_client.register_partition(partition, [], None, ["train"])
    warned_client.put_samples(["a"], partition, {"x": torch.zeros(1)})
    warned_client.put_samples(["a"], partition, {"y": torch.zeros(1)})
    assert warned_client.claim_meta(partition, "train", ["x", "y"], 1).size == 1
    assert said(caplog) == []


def test_a_strict_schema_refuses_instead(
    warned_client: DataPlaneClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    warned_client.register_partition(partition, ["reward"], None, ["train"], strict=True)
    with pytest.raises((SchemaError, FieldNotFoundError), match="rewrd"):
        warned_client.put_samples(["a"], partition, {"rewrd": torch.zeros(1)})
    with pytest.raises(FieldNotFoundError, match="rewrd"):
        warned_client.claim_meta(partition, "train", ["rewrd"], 1)
    assert said(caplog) == []


def test_a_claim_of_what_nobody_declared_or_produced_says_so_before_it_waits(
    warned_client: DataPlaneClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    warned_client.put_samples(["a"], partition, {"reward": torch.zeros(1), "extra": torch.zeros(1)})
    caplog.clear()
    waiter = threading.Thread(
        target=warned_client.claim_meta,
        args=(partition, "train", ["reward", "extra", "rewrd"], 1),
        kwargs={"timeout_s": WAIT_S},
    )
    waiter.start()
    wait_until(lambda: len(warned_client.waits().waits) == 1)
    assert said(caplog) == [
        f"claim of task 'train': field 'rewrd' of partition {partition!r} is not declared, and no live sample has it; "
        "the claim waits until it is produced. Did you mean 'reward'?"
    ]
    warned_client.put_samples(["a"], partition, {"rewrd": torch.zeros(1)})
    waiter.join(WAIT_S)
    assert not waiter.is_alive()


def test_a_claim_that_does_not_wait_says_so_too_and_once(
    warned_client: DataPlaneClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert warned_client.claim_meta(partition, "train", ["zz"], 1, blocking=False).size == 0
    (told,) = said(caplog)
    assert told.endswith("no sample is ready until it is produced. Known fields: 'reward', 'margin'")
    warned_client.claim_meta(partition, "train", ["reward"], 1, blocking=False)
    assert len(said(caplog)) == 1
    with pytest.raises(PartitionNotFoundError):
        warned_client.claim_meta("nowhere", "train", ["zz"], 1)


def test_asyncio_code_is_told_too(warning_server: Server, partition: str, caplog: pytest.LogCaptureFixture) -> None:
    async def both() -> None:
        async with connect_async(warning_server.address) as warned_client:
            await warned_client.put_samples(["a"], partition, {"rewrd": torch.zeros(1)})
            await warned_client.claim_meta(partition, "train", ["margins"], 1, blocking=False)

    asyncio.run(both())
    assert [told.rsplit(". ", 1)[1] for told in said(caplog)] == [
        "Did you mean 'reward'?",
        "Did you mean 'margin'?",
    ]


def test_what_was_warned_of_is_bounded() -> None:
    warned = Warned(2)
    assert warned.filter_new("put", "p", ["a", "b", "a"]) == ["a", "b"]
    assert warned.filter_new("put", "p", ["a", "b"]) == []
    assert warned.filter_new("claim", "p", ["b"]) == ["b"]
    assert warned.filter_new("put", "q", ["b"]) == ["b"]
    assert warned.filter_new("put", "p", ["a"]) == ["a"]


def test_a_schema_knows_what_was_declared() -> None:
    schema = Schema({"a": FieldSpec(), "b": FieldSpec()}, undeclared=("b",))
    assert schema.declared == ["a"]
    assert schema == {"a": FieldSpec(), "b": FieldSpec()}
    assert Schema().declared == []
