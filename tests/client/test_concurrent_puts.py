"""Small puts that the coroutines of one event loop make at once: each has its own outcome."""

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
    DataPlaneClient,
    SampleExistsError,
    Server,
    connect_async,
)
from dataplane.client.operations import put
from dataplane.client.preallocated import PreallocatedBuffer
from dataplane.core.in_flight import InFlight
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.service import client, server  # noqa: F401

pytestmark = pytest.mark.integration

WAIT_S = 60.0
Put = dict[str, Any]


class Seen:
    """What the service is given: `commands` are names of commands, of small puts with their sample.
    It executes no small put until `released` is set."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.released = threading.Event()
        self.released.set()
        self._changed = threading.Condition()
        self._attached: set[int] = set()
        self._calls: set[tuple[int, int]] = set()

    def note(self, item: c.Input) -> None:
        """Note an input that the service executes after this call."""
        with self._changed:
            if isinstance(item, c.SessionAttached):
                self._attached.add(item.session)
            elif isinstance(item, c.Call) and (item.session, item.call_id) not in self._calls:
                # A call that is sent again has the same id.
                self._calls.add((item.session, item.call_id))
                name = type(item.command).__name__
                ids = item.command.ids if isinstance(item.command, c.PutRows) else ()
                self.commands.append(" ".join([name, *ids]))
            self._changed.notify_all()
        if isinstance(item, c.Call) and isinstance(item.command, c.PutRows):
            assert self.released.wait(WAIT_S)

    async def wait_for_attached(self, session: int) -> None:
        """Wait until a unit has reported that the session maps its arena: only then is space
        preallocated."""
        await self._wait_for(lambda: session in self._attached)

    async def wait_for_put(self) -> None:
        await self._wait_for(lambda: bool(self.puts))

    async def _wait_for(self, true: Callable[[], bool]) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(true, WAIT_S)

        assert await asyncio.to_thread(wait)

    @property
    def puts(self) -> list[str]:
        """The samples of the puts that came the short way."""
        puts = [each for each in self.commands if each.startswith("PutRows")]
        return [each.removeprefix("PutRows ") for each in puts]


@pytest.fixture(scope="module", autouse=True)
def seen(server: Server) -> Iterator[Seen]:
    """Also lets puts always follow each other soon enough for preallocated space, which no pause
    gives back."""
    noting = Seen()
    honest = Ledger.apply

    def apply(self: Ledger, item: c.Input) -> list[c.Output]:
        noting.note(item)
        return honest(self, item)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ledger, "apply", apply)
        patched.setattr("dataplane.client.preallocated.SOON_S", 1e9)
        patched.setattr(PreallocatedBuffer, "give_up_idle", lambda self: None)
        yield noting


def register(client: DataPlaneClient, partition: str, **options: Any) -> None:
    client.register_partition(partition, ["x", "n"], None, ["train"], **options)


def run(server: Server, use: Callable[[AsyncDataPlaneClient], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with connect_async(server.address) as connected:
            return await use(connected)

    return asyncio.run(main())


async def together(client: AsyncDataPlaneClient, puts: list[Put]) -> list[Any]:
    """Return the meta or the error of each put; all of them begin in the same turn of the loop."""
    calls = [client.put_samples(**put) for put in puts]
    return await asyncio.gather(*calls, return_exceptions=True)


def one(name: str, partition: str, value: int = 0, **options: Any) -> Put:
    """A put of one sample with a jagged row of `value`s, as long as `value` + 1, and a number."""
    fields = {"x": [torch.full((value + 1,), value)], "n": torch.tensor([value])}
    return {"sample_ids": [name], "partition_id": partition, "fields": fields, **options}


async def ready(seen: Seen, client: AsyncDataPlaneClient, partition: str) -> None:
    """Put a sample until the client takes the short way: it has space, and knows the fields. Forget
    these commands."""
    await client.put_samples(**one("first", partition))
    await seen.wait_for_attached((await client._connection()).session_state.session)
    for _ in range(2):
        await client.put_samples(**one("first", partition))
    assert seen.commands.pop() == "PutRows first"
    seen.commands.clear()


def numbers(client: DataPlaneClient, partition: str) -> dict[str, int]:
    """Return n of each sample of the partition."""
    names = client.list_samples(partition).sample_ids
    return dict(zip(names, client.get_samples(names, partition, ["n"])["n"].tolist(), strict=True))


def test_each_put_has_its_own_result(server: Server, client: DataPlaneClient, seen: Seen) -> None:
    register(client, "one")

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await ready(seen, connected, "one")
        puts = [one(f"s{i}", "one", i, tags=[{"i": i}]) for i in range(20)]
        return await together(connected, puts)

    metas = run(server, use)
    assert seen.puts == [f"s{i}" for i in range(20)]
    for i, meta in enumerate(metas):
        assert meta.sample_ids == [f"s{i}"]
        assert meta.sequence_lengths == [i + 1]
        assert meta.tags == [{"i": i}]
        got = client.get_batch(meta, ["x", "n"])
        assert got["x"].unbind()[0].tolist() == [i] * (i + 1)
        assert got["n"].tolist() == [i]


def test_a_listing_is_of_its_put(server: Server, client: DataPlaneClient, seen: Seen) -> None:
    register(client, "list")
    client.put_samples(["b"], "list", {"m": torch.tensor([1])}, tags=[{"old": 1}])
    client.put_samples(["c", "d"], "list", tags=[{"old": 2}, {"new": 2}])
    groups = [["a"], ["b"], ["c", "d"]]

    def listed(ids: list[str]) -> tuple[Any, ...]:
        fields = {"n": torch.zeros(len(ids), dtype=torch.int64)}
        tags = (c.TagColumn(name="put", values=tuple(ids)),)
        return ids, ids, "list", fields, tags, "upsert"

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await ready(seen, connected, "list")
        calls = [connected.perform(put.put_rows, *listed(ids), listed=True) for ids in groups]
        return await asyncio.gather(*calls)

    for ids, (_, committed) in zip(groups, run(server, use), strict=True):
        _, alone = client.perform(put.put_rows, *listed(ids), listed=True)
        assert committed.rows.tolist() == alone.rows.tolist()
        assert committed.fields == alone.fields
        assert list(map(facts_of_tag, committed.tags)) == list(map(facts_of_tag, alone.tags))


def facts_of_tag(tag: c.TagColumn) -> tuple[Any, ...]:
    return tag.name, tag.values, None if tag.positions is None else tag.positions.tolist()


def test_a_rejected_put_fails_alone(server: Server, client: DataPlaneClient, seen: Seen) -> None:
    register(client, "reject")
    client.put_samples(**one("old", "reject", 1))
    puts = [one(name, "reject", 2, mode="create") for name in ("a", "old", "b")]

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await ready(seen, connected, "reject")
        return await together(connected, puts)

    outcomes = run(server, use)
    assert seen.puts == ["a", "old", "b"]
    assert isinstance(outcomes[1], SampleExistsError)
    assert [outcomes[0].sample_ids, outcomes[2].sample_ids] == [["a"], ["b"]]
    assert numbers(client, "reject") == {"first": 0, "old": 1, "a": 2, "b": 2}


def test_a_full_partition_rejects_only_the_puts_that_do_not_fit(
    server: Server, client: DataPlaneClient, seen: Seen
) -> None:
    value_bytes = 8 << 10  # three fit beside the reserve for updates
    register(client, "full", budget_bytes=4 * value_bytes, when_full="reject")

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await ready(seen, connected, "full")
        puts = [one(f"s{i}", "full", value_bytes // 8 - 1) for i in range(6)]
        return await together(connected, puts)

    outcomes = run(server, use)
    assert seen.puts == [f"s{i}" for i in range(6)]
    failed = [each for each in outcomes if isinstance(each, Exception)]
    assert [type(each) for each in failed] == [CapacityTimeoutError] * 3
    stored_ids = [each.sample_ids[0] for each in outcomes if not isinstance(each, Exception)]
    assert list(numbers(client, "full")) == ["first", *stored_ids]


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_cancelled_put_disturbs_no_other_and_is_before_the_next_command_of_its_caller(
    server: Server, client: DataPlaneClient, seen: Seen, *, is_sent: bool
) -> None:
    """It is not stored, or stored before the next command: it is never seen after a clear."""
    partition = f"cancelled, sent: {is_sent}"
    register(client, partition)

    async def use(connected: AsyncDataPlaneClient) -> list[Any]:
        await ready(seen, connected, partition)
        puts = [one(f"s{i}", partition, i) for i in range(3)]
        tasks = [asyncio.create_task(connected.put_samples(**each)) for each in puts]
        if is_sent:
            await asyncio.sleep(0)  # each has sent its command, and waits for the answer
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        await connected.clear_samples(["s1"], partition)
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, cancelled, last = run(server, use)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [first.sample_ids, last.sample_ids] == [["s0"], ["s2"]]
    before_clear = seen.commands[: seen.commands.index("Clear")]
    assert ("PutRows s1" in seen.commands) == ("PutRows s1" in before_clear) == is_sent
    assert numbers(client, partition) == {"first": 0, "s0": 0, "s2": 2}


def test_closing_waits_for_puts_in_flight(
    server: Server, client: DataPlaneClient, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(client, "close")
    wait = InFlight.wait

    def releasing(self: InFlight, limit_s: float) -> int:
        if len(self):  # these are the puts
            seen.released.set()
        return wait(self, limit_s)

    async def main() -> list[Any]:
        connected = connect_async(server.address)
        await ready(seen, connected, "close")
        seen.released.clear()
        monkeypatch.setattr(InFlight, "wait", releasing)
        puts = [one(f"s{i}", "close") for i in range(3)]
        tasks = [asyncio.create_task(connected.put_samples(**each)) for each in puts]
        await seen.wait_for_put()
        await connected.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    try:
        outcomes = asyncio.run(main())
    finally:
        seen.released.set()
    assert [outcome.sample_ids for outcome in outcomes] == [["s0"], ["s1"], ["s2"]]
    assert list(numbers(client, "close")) == ["first", "s0", "s1", "s2"]


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
    names = drawn["names"]
    value = drawn["value"]
    fields = {
        "x": [torch.full((value + row,), value) for row in range(len(names))],
        "n": torch.full((len(names), 1) if drawn["fault"] == "shape" else (len(names),), value),
    }
    tags = None
    if drawn["tags"] is not None:
        tagged = len(names) if drawn["tags"] == "all" else 1
        tags = [{"t": value} if row < tagged else {} for row in range(len(names))]
    partition = "nowhere" if drawn["fault"] == "unknown" else drawn["partition"]
    return {
        "sample_ids": names,
        "partition_id": f"{prefix}/{partition}",
        "fields": fields,
        "tags": tags,
        "mode": drawn["mode"],
    }


def facts_of(outcome: Any, drawn: Put) -> Any:
    """What a caller learns, without the handles, which differ between partitions. Of a put with two
    faults, the cached schema of a client decides which one is named."""
    if isinstance(outcome, BaseException):
        return "rejected" if drawn["fault"] == "shape" else type(outcome)
    return outcome.sample_ids, outcome.fields, outcome.sequence_lengths, outcome.tags


def contents(client: DataPlaneClient, partition: str) -> dict[str, tuple[list[int], int, Any]]:
    """Return x, n and the tags of each sample of the partition."""
    meta = client.list_samples(partition)
    got = client.get_samples(meta.sample_ids, partition, ["x", "n"])
    rows = zip(got["x"].unbind(), got["n"].tolist(), meta.tags or [{}] * meta.size, strict=True)
    named = zip(meta.sample_ids, rows, strict=True)
    return {name: (x.tolist(), n, tags) for name, (x, n, tags) in named}


def apart(puts: list[Put]) -> list[Put]:
    """Return the puts that name no sample of an earlier one: their order does not matter."""
    named: set[tuple[str, str]] = set()
    chosen = []
    for each in puts:
        samples = {(each["partition"], name) for name in each["names"]}
        if samples.isdisjoint(named):
            chosen.append(each)
            named |= samples
    return chosen


async def attempt(client: AsyncDataPlaneClient, put: Put) -> Any:
    (outcome,) = await together(client, [put])
    return outcome


def test_puts_equal_single_puts(server: Server, client: DataPlaneClient, seen: Seen) -> None:
    """Outcomes and samples are those of the same puts one after another."""
    loop = asyncio.new_event_loop()
    connected = connect_async(server.address)
    register(client, "space")
    loop.run_until_complete(ready(seen, connected, "space"))
    prefixes = map(str, range(1 << 30))

    def outcomes_of(before: list[Put], puts: list[Put], *, at_once: bool) -> Any:
        prefix = next(prefixes)
        partitions = [f"{prefix}/left", f"{prefix}/right"]
        for name in partitions:
            register(client, name)
            # Fixes the kinds of the fields: the client knows them from now on.
            loop.run_until_complete(connected.put_samples(**one("first", name)))
        for each in before:
            loop.run_until_complete(attempt(connected, put_of(each, prefix)))
        made = [put_of(each, prefix) for each in puts]
        if at_once:
            results = loop.run_until_complete(together(connected, made))
        else:
            results = [loop.run_until_complete(attempt(connected, each)) for each in made]
        samples = [contents(client, name) for name in partitions]
        for result in results:
            if not isinstance(result, BaseException):
                client.get_batch(result, ["x", "n"])  # its handles name the samples
        for name in partitions:
            client.clear_samples(None, name)
        return [facts_of(result, each) for result, each in zip(results, puts, strict=True)], samples

    several = st.lists(PUTS, min_size=2, max_size=8)

    @given(before=st.lists(PUTS, max_size=3), puts=several.map(apart))
    @settings(max_examples=60, deadline=None)
    def equal(before: list[Put], puts: list[Put]) -> None:
        assert outcomes_of(before, puts, at_once=True) == outcomes_of(before, puts, at_once=False)

    equal()
    assert len(seen.puts) > 60, "hardly any put took the short way"
    loop.run_until_complete(connected.close())
    loop.close()
