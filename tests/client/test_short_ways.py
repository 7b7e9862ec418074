"""Small puts and reads that take the short way store, return and report what general ones do."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataplane import DataPlaneClient, KVBatchMeta, Server, connect, connect_async, serve
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import MIB
from dataplane.core import failpoints
from dataplane.errors import InvalidRequestError, UnsupportedValueError
from dataplane.ledger import commands as c
from tests.restarts import WAIT_S, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 64 * MIB}) as server:
        yield server


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many commands of each kind were sent."""
    counts: Counter[str] = Counter()
    call = ControllerChannel.call

    def counted(self: ControllerChannel, command: c.Command, **options: Any) -> Any:
        counts[type(command).__name__] += 1
        return call(self, command, **options)

    monkeypatch.setattr(ControllerChannel, "call", counted)
    return counts


def some_values(chance: random.Random, count: int) -> dict[str, Any]:
    """Fields of many forms, most of which can take the short way."""
    lengths = [chance.randrange(5) for _ in range(count)]
    width = chance.randrange(1, 4)
    base = torch.arange(64, dtype=torch.float32)
    forms: dict[str, Any] = {
        "dense": torch.rand(count, 3),
        "scalar": torch.randint(9, (count,), dtype=torch.int32),
        "flags": torch.rand(count, 2) > 0.5,
        "half": torch.rand(count, 2).to(torch.bfloat16),
        "rows": [torch.rand(length, 2) for length in lengths],
        "jagged": torch.nested.nested_tensor([torch.rand(length, 2) for length in lengths], layout=torch.jagged),
        "holes": torch.nested.narrow(
            torch.arange(12 * count).view(count, 12), 1, torch.arange(count) % 4, torch.tensor(lengths), torch.jagged
        ),
        "numbers": [torch.tensor(float(length)) for length in lengths],
        "tokens": torch.randint(9, (count, width)),
        "text": [f"text {length}" for length in lengths],
        "dicts": [{"length": length, "nested": [None, 1.5]} for length in lengths],
        "counts": lengths,
        "array": np.random.default_rng(width).random((count, 2)),
        "strided": base[: 2 * count].view(2, count).t(),
        "grad": torch.rand(count, 2, requires_grad=True),
        "negative": torch.complex(base[:count], base[:count]).conj().imag.reshape(count, 1),
        "empty": torch.zeros(count, 0),
        "parameter": torch.nn.Parameter(torch.rand(count, 1)),
    }
    if chance.random() < 0.2:
        forms["dense"] = torch.rand(count, chance.choice([2, 3]))
    if chance.random() < 0.2:
        forms["rows"] = [torch.rand(length, 2, dtype=torch.float64) for length in lengths]
    if chance.random() < 0.2:
        forms["scalar"] = forms["scalar"].tolist()
    return forms


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if one.is_nested:
            rows = zip(one.unbind(), other.unbind(), strict=True)
            return other.is_nested and one.dtype == other.dtype and all(torch.equal(a, b) for a, b in rows)
        return one.dtype == other.dtype and torch.equal(one, other)
    return repr(list(one)) == repr(list(other))


def same_data(one: TensorDict, other: TensorDict) -> None:
    assert one.batch_size == other.batch_size
    assert list(one.keys()) == list(other.keys())
    for name in one.keys():  # noqa: SIM118
        assert equal(one.get(name), other.get(name)), name


def batch_of(client: DataPlaneClient, meta: KVBatchMeta, chosen: list[str], options: dict[str, Any]) -> Any:
    """The batch, or the error."""
    try:
        return client.get_batch(meta, chosen, **options)
    except ValueError as error:
        return repr(error)


def same_batches(client: DataPlaneClient, meta: KVBatchMeta, chosen: list[str], chance: random.Random) -> None:
    """Both ways pad alike, and name the same columns that are not per token."""
    lengths = client.get_samples(meta, meta.partition_id, chosen[:1]).get(chosen[0])
    counts = [len(row) for row in lengths.unbind()] if getattr(lengths, "is_nested", False) else [1] * meta.size
    meta = dataclasses.replace(meta, sequence_lengths=chance.choice([None, counts, [7] * meta.size]))
    options = {
        "pad_to_seqlen": chance.choice([0, 0, 2, 9]),
        "pad_value_dict": chance.choice([None, {name: chance.choice([3, -1, 0.5]) for name in chosen}]),
    }
    client.get_batch(meta, chosen)  # remembers the plan
    short = batch_of(client, meta, chosen, options)
    forget(client, puts=False)
    general = batch_of(client, meta, chosen, options)
    if isinstance(short, str) or isinstance(general, str):
        assert short == general
        return
    assert short.not_per_token == general.not_per_token
    assert list(short) == list(general)
    for name in general:
        assert type(short[name]) is type(general[name]), name
        assert equal(short[name], general[name]), name


def same_meta(one: KVBatchMeta, other: KVBatchMeta) -> None:
    names = ("task_name", "sample_ids", "fields", "sequence_lengths", "extra_info", "tags")
    assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]


def forget(client: DataPlaneClient, *, puts: bool = True) -> None:
    """Let the next put or read take the general way."""
    state = client._connections.get().session_state
    state.read_plans.clear()
    if puts:
        state.put_plans.clear()


@pytest.mark.parametrize("seed", range(6))
def test_both_ways_store_and_return_the_same(server: Server, sent: Counter[str], seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    with connect(server.address) as client:
        kinds = {"tokens": "jagged"} if chance.random() < 0.5 else {}
        names = chance.sample(sorted(some_values(chance, 1)), chance.choice([1, 3, 5, 8]))
        fields = {name: {"kind": kinds[name]} if name in kinds else None for name in names}
        for partition in ("short", "general"):
            client.register_partition(partition, fields, None, ["t"])
        for _ in range(25):
            count = chance.choice([1, 1, 2, 5])
            ids = [f"s{chance.randrange(20)}-{number}" for number in range(count)]
            values = {name: value for name, value in some_values(chance, count).items() if name in names}
            if chance.random() < 0.3:
                tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
                values = TensorDict(tensors, batch_size=[count]) if tensors else values
            tags = chance.choice([None, [{"n": number, "score": 0.5} for number in range(count)], [{"a": "b"}] * count])
            put: dict[str, KVBatchMeta | Exception] = {}
            for partition in ("short", "general"):
                if partition == "general":
                    kept = dict(client._connections.get().session_state.put_plans)
                    forget(client)
                try:
                    put[partition] = client.put_samples(ids, partition, values, tags=tags)
                except Exception as error:
                    put[partition] = error
            client._connections.get().session_state.put_plans.update(kept)
            one, other = put["short"], put["general"]
            if isinstance(one, Exception) or isinstance(other, Exception):
                assert type(one) is type(other), (one, other)
                continue
            same_meta(one, other)
            if chance.random() < 0.5:  # by row handles
                again = {name: values[name] for name in list(values.keys())[:1]}
                same_meta(client.put_samples(one, "short", again), client.put_samples(other, "general", again))
            chosen = list(values.keys())[: chance.randrange(1, 4)]
            reads = []
            for partition, meta in (("short", one), ("general", other)):
                for use in (ids, meta):
                    client.get_samples(use, partition, chosen)
                    short = client.get_samples(use, partition, chosen)
                    forget(client, puts=False)
                    general = client.get_samples(use, partition, chosen)
                    same_data(short, general)
                    reads.append(general)
                same_batches(client, meta, chosen, chance)
            same_data(reads[0], reads[2])
        for partition in ("short", "general"):
            client.clear_samples(None, partition)
    assert sent["LocateRows"] > 20, sent


@pytest.mark.parametrize("names", [[["a"]], [1], ["a", "a"]])
def test_other_names_are_refused_as_ever(server: Server, names: Any) -> None:
    with connect(server.address) as client:
        client.register_partition("p", ["x"], None, [])
        for _ in range(3):
            client.put_samples(["a"], "p", {"x": torch.zeros(1)})
            client.get_samples(["a"], "p", ["x"])
        with pytest.raises((InvalidRequestError, UnsupportedValueError)):
            client.get_samples(names, "p", ["x"])
        with pytest.raises((InvalidRequestError, UnsupportedValueError)):
            client.put_samples(names, "p", {"x": torch.zeros(len(names))})
        client.clear_samples(None, "p")


def test_rows_on_several_units_are_not_tried_again(sent: Counter[str]) -> None:
    with serve({"capacity_bytes": 8 * MIB, "units": 2}) as server, connect(server.address) as client:
        client.register_partition("p", ["x"], None, [])
        # The two halves do not fit into one unit.
        for name in ("a", "b"):
            client.put_samples([name], "p", {"x": [torch.full((5 * MIB,), ord(name), dtype=torch.uint8)]})
        for _ in range(2):
            client.get_samples(["a"], "p", ["x"])
        assert sent["LocateRows"] == 1
        for _ in range(3):
            both = client.get_samples(["a", "b"], "p", ["x"])["x"].unbind()
            assert [int(row[0]) for row in both] == [ord("a"), ord("b")]
        assert sent["LocateRows"] == 2


def pinned(client: DataPlaneClient) -> int:
    return sum(unit.pinned_bytes for unit in client.stats().units)


NEVER_S = 86_400.0


@pytest.fixture
def reader() -> Iterator[tuple[DataPlaneClient, DataPlaneClient]]:
    """A client that has made a general read of sample "a" in partition "p", and another client.
    They send no heartbeats."""
    settings = {"capacity_bytes": 64 * MIB, "heartbeat_s": NEVER_S, "session_timeout_s": NEVER_S}
    with serve(settings) as server, connect(server.address) as client, connect(server.address) as other:
        client.register_partition("p", ["x"], None, ["task"])
        client.put_samples(["a"], "p", {"x": torch.ones(1, 100)})
        client.get_samples(["a"], "p", ["x"])
        wait_until(lambda: not pinned(other))
        yield client, other


def test_a_read_is_pinned_until_it_ends(reader: Any, sent: Counter[str]) -> None:
    """Other calls of the same client do not confirm it before."""
    client, other = reader
    seen = []

    def meanwhile() -> None:
        failpoints.disarm()
        calling = threading.Thread(target=lambda: seen.append(client.list_samples("p")))
        calling.start()
        calling.join()
        seen.append(pinned(other))

    failpoints.arm("get.mid_copy", meanwhile)
    client.get_samples(["a"], "p", ["x"])
    assert sent["LocateRows"] == 1
    assert seen[1] > 0
    client.list_samples("p")
    assert pinned(other) == 0


def test_a_read_that_no_call_follows_is_confirmed_soon(reader: Any, sent: Counter[str]) -> None:
    client, other = reader
    for _ in range(2):
        client.get_samples(["a"], "p", ["x"])
        wait_until(lambda: not pinned(other))
    assert sent["LocateRows"] == 2


def test_a_read_of_a_coroutine_that_no_call_follows_is_confirmed_soon(reader: Any) -> None:
    client, other = reader

    async def read() -> None:
        async with connect_async(client.config.address) as third:
            for _ in range(3):
                await third.get_samples(["a"], "p", ["x"])
                while await asyncio.to_thread(pinned, other):
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(read(), WAIT_S))
