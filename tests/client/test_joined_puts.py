"""Small puts of one event loop that are ready at the same moment are stored together, with results of single ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane import (
    AsyncDataPlaneClient,
    CapacityTimeoutError,
    ClientClosedError,
    DataPlaneClient,
    SampleExistsError,
    SchemaError,
    Server,
    StaleSampleError,
    connect,
    connect_async,
    serve,
)
from dataplane.client.operations import joined_puts, put
from dataplane.client.operations.joined_puts import joined_positions
from dataplane.client.operations.steps import Operation, Send
from dataplane.data.columns.values import ListValues
from dataplane.ledger import commands as c
from tests.service import client, server  # noqa: F401

pytestmark = pytest.mark.integration

Put = dict[str, Any]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of puts that were stored together, one for each commit."""
    seen: list[int] = []
    store_joined = put.store_joined

    def counts(session_state: Any, puts: Any, wanted: Any) -> Any:
        seen.append(len(puts))
        return store_joined(session_state, puts, wanted)

    monkeypatch.setattr("dataplane.client.async_session.store_joined", counts)
    return seen


def register(client: DataPlaneClient, partition: str, **options: Any) -> None:
    client.register_partition(partition, ["x", "n"], None, ["train"], **options)


def run(server: Server, use: Callable[[AsyncDataPlaneClient], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with connect_async(server.address) as connected:
            return await use(connected)

    return asyncio.run(main())


async def together(client: AsyncDataPlaneClient, puts: list[Put]) -> list[Any]:
    """Return the meta or the error of each put; all of them begin in the same turn of the loop."""
    return await asyncio.gather(*(client.put_samples(**put) for put in puts), return_exceptions=True)


def one(name: str, partition: str, value: int = 0, **options: Any) -> Put:
    """A put of one sample with a jagged row of `value`s, as long as `value` + 1, and a number."""
    fields = {"x": [torch.full((value + 1,), value)], "n": torch.tensor([value])}
    return {"sample_ids": [name], "partition_id": partition, "fields": fields, **options}


async def wait_in_loop(event: threading.Event) -> None:
    """Wait, for at most 60 s, until the event is set."""
    async with asyncio.timeout(60):
        while not event.is_set():
            await asyncio.sleep(0.001)


async def preallocated(client: AsyncDataPlaneClient, partition: str) -> None:
    """Put a sample until the client has preallocated space. The service refuses it to a session that it does not know
    to have mapped the arena."""
    buffer = (await client._connection()).session_state.preallocated
    async with asyncio.timeout(60):
        while not buffer._open:
            await client.put_samples(**one("first", partition))
            await asyncio.sleep(0.02)


def stored(client: DataPlaneClient, partition: str) -> dict[str, tuple[list[int], int, Any]]:
    """Return x, n and the tags of each sample of the partition."""
    meta = client.list_samples(partition)
    if not meta.sample_ids:
        return {}
    got = client.get_samples(meta.sample_ids, partition, ["x", "n"])
    rows = zip(got["x"].unbind(), got["n"].tolist(), meta.tags or [{}] * meta.size, strict=True)
    return {name: (x.tolist(), n, tags) for name, (x, n, tags) in zip(meta.sample_ids, rows, strict=True)}


def test_puts_of_one_moment_are_stored_with_one_commit(
    server: Server, client: DataPlaneClient, joined: list[int]
) -> None:
    register(client, "one")

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await connected.put_samples(**one("first", "one"))  # alone: it waits for no others
        return await together(connected, [one(f"s{i}", "one", i, tags=[{"i": i}]) for i in range(20)])

    metas = run(server, use)
    assert joined == [20]
    for i, meta in enumerate(metas):
        assert meta.sample_ids == [f"s{i}"]
        assert meta.sequence_lengths == [i + 1]
        assert meta.tags == [{"i": i}]
        got = client.get_batch(meta, ["x", "n"])
        assert got["x"].unbind()[0].tolist() == [i] * (i + 1)
        assert got["n"].tolist() == [i]


def test_write_backs_by_handles_are_joined_too(server: Server, client: DataPlaneClient, joined: list[int]) -> None:
    register(client, "back")
    metas = [client.put_samples(**one(f"s{i}", "back", i)) for i in range(4)]
    client.clear_samples(["s2"], "back")

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await connected.put_samples(["s0"], "back", {"n": torch.tensor([0])})  # fetches the schema
        puts = [{"sample_ids": meta, "partition_id": "back", "fields": {"n": torch.tensor([9])}} for meta in metas]
        return await together(connected, puts)

    outcomes = run(server, use)
    assert joined == [4]
    assert isinstance(outcomes.pop(2), StaleSampleError)  # the others are stored nevertheless
    assert all(outcome.sample_ids for outcome in outcomes)
    assert {name: n for name, (_, n, _) in stored(client, "back").items()} == {"s0": 9, "s1": 9, "s3": 9}


def test_listings_are_those_of_each_put(server: Server, client: DataPlaneClient, joined: list[int]) -> None:
    register(client, "list")
    client.put_samples(["b"], "list", {"m": torch.tensor([1])}, tags=[{"old": 1}])
    client.put_samples(["c", "d"], "list", tags=[{"old": 2}, {"new": 2}])
    groups = [["a"], ["b"], ["c", "d"]]

    async def use(connected: AsyncDataPlaneClient) -> list[c.Committed]:
        await connected.put_samples(**one("first", "list"))  # fetches the schema
        calls = []
        for ids in groups:
            fields, tags = (
                {"n": torch.zeros(len(ids), dtype=torch.int64)},
                (c.TagColumn(name="put", values=tuple(ids)),),
            )
            calls.append(connected.perform(put.put_rows, ids, ids, "list", fields, tags, "upsert", listed=True))
        return [committed for _, committed in await asyncio.gather(*calls)]

    got = run(server, use)
    assert joined == [3]
    for ids, committed in zip(groups, got, strict=True):
        alone = client.perform(
            put.put_rows, ids, ids, "list", {"n": torch.zeros(len(ids), dtype=torch.int64)}, (), "upsert", listed=True
        )[1]
        assert committed.rows.tolist() == alone.rows.tolist()
        assert committed.fields == alone.fields
        assert [(tag.name, tag.values, positions_of(tag)) for tag in committed.tags] == [
            (tag.name, tag.values, positions_of(tag)) for tag in alone.tags
        ]


def positions_of(tag: c.TagColumn) -> list[int] | None:
    return None if tag.positions is None else tag.positions.tolist()


def test_a_put_that_is_rejected_fails_alone(server: Server, client: DataPlaneClient, joined: list[int]) -> None:
    register(client, "reject")
    client.put_samples(**one("old", "reject", 1))
    puts = [one(name, "reject", 2, mode="create") for name in ("a", "old", "b")]

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await connected.put_samples(**one("first", "reject"))  # fetches the schema
        return await together(connected, puts)

    metas = run(server, use)
    assert joined == [3]
    assert isinstance(metas[1], SampleExistsError)
    assert metas[0].sample_ids == ["a"]
    assert metas[2].sample_ids == ["b"]
    assert {name: n for name, (_, n, _) in stored(client, "reject").items()} == {
        "first": 0,
        "old": 1,
        "a": 2,
        "b": 2,
    }


def test_what_does_not_fit_together_is_stored_apart(server: Server, client: DataPlaneClient, joined: list[int]) -> None:
    for name in ("left", "right"):
        register(client, name)
    large = {"x": [torch.zeros(joined_puts.PUT_BYTES, dtype=torch.int64)], "n": torch.tensor([0])}
    puts = [
        one("a", "left", 1),
        one("a", "left", 2),  # the same sample
        one("b", "right", 3),
        one("c", "right", 4, tags=[{"t": 1}]),
        one("d", "right", 5, mode="create"),
        {"sample_ids": ["e"], "partition_id": "right", "fields": {"n": torch.tensor([6])}},
        {"sample_ids": ["f"], "partition_id": "right", "fields": large},
        {"sample_ids": ["g"], "partition_id": "right", "fields": {"n": torch.tensor([1.0])}},
    ]
    outcomes = run(server, lambda connected: together(connected, puts))
    assert joined == []
    assert isinstance(outcomes[-1], SchemaError)
    assert all(outcome.sample_ids for outcome in outcomes[:-1])
    assert stored(client, "left")["a"][1] in (1, 2)
    assert sorted(client.list_samples("right").sample_ids) == ["b", "c", "d", "e", "f"]


def test_groups_have_at_most_their_bytes_and_puts() -> None:
    def small(name: str, nbytes: int, key: str = "k") -> joined_puts.SmallPut:
        commit = c.Commit(partition="p", samples=c.Samples(ids=(name,)), mode=c.Mode.UPSERT)
        return joined_puts.SmallPut(commit, [name], [], nbytes, key)

    half = joined_puts.JOINED_BYTES // 2
    assert joined_positions([]) == []
    assert joined_positions([small("a", half), small("b", half), small("c", 1), small("d", 1, "other")]) == [
        [0, 1],
        [2],
        [3],
    ]
    assert joined_positions([small("a", 1), small("a", 1), small("b", 1)]) == [[0], [1, 2]]
    many = [small(str(i), 0) for i in range(joined_puts.JOINED_PUTS + 1)]
    assert [len(group) for group in joined_positions(many)] == [joined_puts.JOINED_PUTS, 1]


def test_a_cancelled_put_does_not_disturb_the_others(server: Server, client: DataPlaneClient) -> None:
    register(client, "cancel")
    values = torch.full((3,), 7)

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await connected.connect()
        tasks = [
            asyncio.create_task(
                connected.put_samples([f"s{i}"], "cancel", {"x": [values.clone()], "n": torch.tensor([i])})
            )
            for i in range(4)
        ]
        await asyncio.sleep(0)  # they have offered their puts
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = run(server, use)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert [outcome.sample_ids for outcome in (outcomes[0], *outcomes[2:])] == [["s0"], ["s2"], ["s3"]]
    assert {"s0", "s2", "s3"} <= stored(client, "cancel").keys()


@pytest.mark.parametrize("reached", ["copied", "answered"])
def test_a_cancelled_put_is_before_the_next_command_of_its_caller(
    server: Server, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, reached: str
) -> None:
    """It is not stored, or stored before the next command: here it is never seen after a clear."""
    partition = f"cancelled when {reached}"
    register(client, partition)
    tasks: list[asyncio.Task[Any]] = []

    def cancel() -> None:
        tasks[1].cancel()

    write, commit = put._write_preallocated, joined_puts.joined_commit

    def written(*args: Any) -> Any:
        result = yield from write(*args)
        if reached == "copied" and tasks:
            cancel()
            yield Send(c.Describe(partition=partition))  # lets the caller continue
        return result

    def committing(puts: Any) -> Any:
        if reached == "answered":
            asyncio.get_running_loop().call_later(0, cancel)
        return commit(puts)

    monkeypatch.setattr(put, "_write_preallocated", written)
    monkeypatch.setattr("dataplane.client.operations.put.joined_commit", committing)

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await preallocated(connected, partition)
        tasks.extend(asyncio.create_task(connected.put_samples(**one(f"s{i}", partition, i))) for i in range(3))
        await asyncio.wait(tasks[1:2])
        await connected.clear_samples(["s1"], partition)
        return [tasks[1].cancelled(), *await asyncio.gather(tasks[0], tasks[2])]

    is_cancelled, *metas = run(server, use)
    assert is_cancelled
    assert [meta.sample_ids for meta in metas] == [["s0"], ["s2"]]
    assert "s1" not in client.list_samples(partition).sample_ids


def test_a_defect_in_the_values_of_one_put_fails_only_that(
    server: Server, client: DataPlaneClient, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(client, "defect")
    write = ListValues.write

    def fails(self: ListValues, *args: Any) -> None:
        if 7 in self.tensors[0].tolist():
            raise RuntimeError("a defect")
        write(self, *args)

    monkeypatch.setattr(ListValues, "write", fails)

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await connected.put_samples(**one("first", "defect"))
        return await together(connected, [one(f"s{i}", "defect", i) for i in (6, 7, 8)])

    outcomes = run(server, use)
    assert joined == [3]
    assert isinstance(outcomes[1], RuntimeError)
    assert {name: n for name, (_, n, _) in stored(client, "defect").items()} == {"first": 0, "s6": 6, "s8": 8}


@pytest.mark.parametrize("kind", ["single", "joined"])
def test_joined_puts_use_and_free_the_space_of_single_ones(
    server: Server, client: DataPlaneClient, joined: list[int], kind: str
) -> None:
    row, size = torch.zeros(10 << 10, dtype=torch.uint8), 10 << 10
    partition = f"space of {kind}"
    register(client, partition, budget_bytes=12 * (size + 64), when_full="reject")
    puts: list[Put] = [
        {"sample_ids": [f"s{i}"], "partition_id": partition, "fields": {"x": [row], "n": torch.tensor([i])}}
        for i in range(10)
    ]

    async def use(connected: AsyncDataPlaneClient) -> None:
        await preallocated(connected, partition)
        await connected.clear_samples(["first"], partition)
        if kind == "joined":
            await together(connected, puts)
        for each in puts if kind == "single" else ():
            await connected.put_samples(**each)

    run(server, use)
    assert sum(joined) == (len(puts) if kind == "joined" else 0)
    used = used_bytes(client, partition)
    assert used == 10 * (size + 64)
    for number in range(10):
        client.clear_samples([f"s{number}"], partition)
        assert used_bytes(client, partition) == used - (number + 1) * (size + 64)


def used_bytes(client: DataPlaneClient, partition: str) -> int:
    (found,) = [each for each in client.stats().partitions if each.partition == partition]
    return found.used_bytes


def test_a_full_partition_makes_each_put_wait_by_itself() -> None:
    with serve({"capacity_bytes": 1 << 20, "put_timeout_s": 0.2}) as running, connect(running.address) as client:
        register(client, "full")
        client.put_samples(["big"], "full", {"x": [torch.zeros(700 << 10, dtype=torch.uint8)], "n": torch.tensor([0])})
        row = torch.zeros(50 << 10, dtype=torch.uint8)
        puts = [
            {"sample_ids": [f"s{i}"], "partition_id": "full", "fields": {"x": [row], "n": torch.tensor([i])}}
            for i in range(6)
        ]
        outcomes = run(running, lambda connected: together(connected, puts))
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert failed
        assert len(failed) < len(puts)
        assert all(isinstance(error, CapacityTimeoutError) for error in failed)
        assert len(client.list_samples("full").sample_ids) == 1 + len(puts) - len(failed)


def test_closing_ends_puts_that_are_being_stored_together(
    server: Server, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(client, "close")
    reached = threading.Event()

    async def waits(self: Any, puts: Any, wanted: Any) -> None:
        reached.set()
        await self.run(_waits())

    def _waits() -> Operation[None]:
        yield Send(c.Claim(partition="close", task="train", fields=("x",), batch_size=100))

    monkeypatch.setattr("dataplane.client.async_session.AsyncConnection._store_joined", waits)

    async def main() -> list[Any]:
        connected = connect_async(server.address)
        await connected.put_samples(**one("first", "close"))  # fetches the schema
        puts = [asyncio.create_task(connected.put_samples(**one(f"s{i}", "close"))) for i in range(3)]
        await wait_in_loop(reached)
        await connected.close()
        return await asyncio.gather(*puts, return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(main())] == [ClientClosedError] * 3
    assert client.list_samples("close").sample_ids == ["first"]


# --- the same as one by one

NAMES = st.sampled_from("abcdef")
PUTS = st.fixed_dictionaries(
    {
        "names": st.lists(NAMES, min_size=1, max_size=3, unique=True),
        "partition": st.sampled_from(["left", "right"]),
        "mode": st.sampled_from(["upsert", "create", "update", "append"]),
        "value": st.integers(0, 5),
        "tags": st.sampled_from([None, "all", "some"]),
        "fault": st.sampled_from([None, None, None, "shape", "unknown"]),
    }
)


def put_of(drawn: Put, prefix: str) -> Put:
    names, value = drawn["names"], drawn["value"]
    fields = {
        "x": [torch.full((value + row,), value) for row in range(len(names))],
        "n": torch.full((len(names), 1) if drawn["fault"] == "shape" else (len(names),), value),
    }
    tags = None
    if drawn["tags"] is not None:
        tags = [{"t": value} if drawn["tags"] == "all" or not row else {} for row in range(len(names))]
    partition = f"{prefix}/{'nowhere' if drawn['fault'] == 'unknown' else drawn['partition']}"
    return {"sample_ids": names, "partition_id": partition, "fields": fields, "tags": tags, "mode": drawn["mode"]}


def facts_of(outcome: Any, drawn: Put) -> Any:
    """What a caller learns, without the handles, which differ between partitions. Of a put with two faults, the cached
    schema of a client decides which one is named."""
    if isinstance(outcome, BaseException):
        return "rejected" if drawn["fault"] == "shape" else type(outcome)
    return outcome.sample_ids, outcome.fields, outcome.sequence_lengths, outcome.tags


@pytest.fixture(scope="module")
def driven(server: Server) -> Iterator[Callable[[Callable[[AsyncDataPlaneClient], Any]], Any]]:
    """Runs a coroutine function with an async client, in one loop for all of them."""
    loop = asyncio.new_event_loop()
    connected = connect_async(server.address)
    yield lambda use: loop.run_until_complete(use(connected))
    loop.run_until_complete(connected.close())
    loop.close()


_runs = iter(range(1 << 30))


@given(before=st.lists(PUTS, max_size=3), puts=st.lists(PUTS, min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_joined_puts_equal_some_order_of_single_puts(
    client: DataPlaneClient, driven: Callable[..., Any], before: list[Put], puts: list[Put]
) -> None:
    """Without a sample that two puts name, the order does not matter: outcomes and samples are those of single puts."""
    seen: set[tuple[str, str]] = set()
    apart = []
    for each in puts:
        samples = {(each["partition"], name) for name in each["names"]}
        if samples.isdisjoint(seen):
            apart.append(each)
            seen |= samples
    run_number = next(_runs)
    outcomes, samples_of = [], []
    for kind in ("single", "joined"):
        prefix = f"{run_number}/{kind}"
        for name in ("left", "right"):
            register(client, f"{prefix}/{name}")
            client.put_samples(**one("first", f"{prefix}/{name}"))  # fixes the kinds of the fields
        for each in before:
            _attempt(client, put_of(each, prefix))
        if kind == "single":
            results = [_attempt(client, put_of(each, prefix)) for each in apart]
        else:
            results = driven(lambda connected: together(connected, [put_of(each, prefix) for each in apart]))  # noqa: B023
        outcomes.append([facts_of(result, each) for result, each in zip(results, apart, strict=True)])
        samples_of.append([stored(client, f"{prefix}/{name}") for name in ("left", "right")])
        for result in results:
            if not isinstance(result, BaseException):
                client.get_batch(result, ["x", "n"])  # its handles name the samples
        for name in ("left", "right"):
            client.clear_samples(None, f"{prefix}/{name}")
    assert outcomes[0] == outcomes[1]
    assert samples_of[0] == samples_of[1]


def _attempt(client: DataPlaneClient, put: Put) -> Any:
    try:
        return client.put_samples(**put)
    except Exception as error:
        return error
