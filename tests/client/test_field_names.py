"""What is probably misspelled is said at once, and once, in the log of the client."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from dataplane import DataPlaneClient, Server, connect, connect_async, serve
from dataplane.client.session_state import Schema, Warned
from dataplane.core.types import FieldSpec
from dataplane.errors import FieldNotFoundError, PartitionNotFoundError, SchemaError
from tests.restarts import WAIT_S, wait_until

pytestmark = pytest.mark.integration

_names = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 16 << 20}) as running:
        yield running


@pytest.fixture
def client(server: Server, caplog: pytest.LogCaptureFixture) -> Iterator[DataPlaneClient]:
    caplog.set_level(logging.WARNING, "dataplane.client.operations.field_names")
    with connect(server.address) as client:
        yield client


@pytest.fixture
def partition(client: DataPlaneClient) -> Iterator[str]:
    name = f"p{next(_names)}"
    client.register_partition(name, ["reward", "margin"], None, ["train"])
    yield name
    client.clear_samples(None, name)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "dataplane.client.operations.field_names"
    ]


def test_a_put_of_an_undeclared_field_is_told_of_once(
    client: DataPlaneClient, server: Server, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        client.put_samples([name], partition, {"reward": torch.zeros(1), "rewrd": torch.zeros(1)})
    (told,) = said(caplog)
    assert told == (
        f"put: field 'rewrd' is not declared in partition {partition!r}; it is stored anyway. Did you mean 'reward'?"
    )
    client.put_samples(["a"], partition, {"xyz": torch.zeros(1)}, mode="append")
    assert said(caplog)[1:] == [
        f"put: field 'xyz' is not declared in partition {partition!r}; it is stored anyway. "
        "Known fields: 'reward', 'margin'"
    ]
    with connect(server.address) as other:
        other.put_samples(["c"], partition, {"rewrd": torch.zeros(1)})
    assert said(caplog)[2:] == [told], "every client says so, also of what another has put before"


def test_a_field_declared_since_is_as_good_as_any(
    client: DataPlaneClient, server: Server, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.put_samples(["a"], partition, {"reward": torch.zeros(1)})
    with connect(server.address) as other:
        other.register_partition(partition, ["reward", "score"], None, ["train"])
    client.put_samples(["a"], partition, {"score": torch.zeros(1)})
    assert said(caplog) == []


def test_where_nothing_is_declared_nothing_is_odd(
    client: DataPlaneClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.register_partition(partition, [], None, ["train"])
    client.put_samples(["a"], partition, {"x": torch.zeros(1)})
    client.put_samples(["a"], partition, {"y": torch.zeros(1)})
    assert client.claim_meta(partition, "train", ["x", "y"], 1).size == 1
    assert said(caplog) == []


def test_a_strict_schema_refuses_instead(
    client: DataPlaneClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.register_partition(partition, ["reward"], None, ["train"], strict=True)
    with pytest.raises((SchemaError, FieldNotFoundError), match="rewrd"):
        client.put_samples(["a"], partition, {"rewrd": torch.zeros(1)})
    with pytest.raises(FieldNotFoundError, match="rewrd"):
        client.claim_meta(partition, "train", ["rewrd"], 1)
    assert said(caplog) == []


def test_a_claim_of_what_nobody_declared_or_produced_says_so_before_it_waits(
    client: DataPlaneClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.put_samples(["a"], partition, {"reward": torch.zeros(1), "extra": torch.zeros(1)})
    caplog.clear()
    waiter = threading.Thread(
        target=client.claim_meta,
        args=(partition, "train", ["reward", "extra", "rewrd"], 1),
        kwargs={"timeout_s": WAIT_S},
    )
    waiter.start()
    wait_until(lambda: len(client.waits().waits) == 1)
    assert said(caplog) == [
        f"claim of task 'train': field 'rewrd' of partition {partition!r} is not declared, and no live sample has it; "
        "the claim waits until it is produced. Did you mean 'reward'?"
    ]
    client.put_samples(["a"], partition, {"rewrd": torch.zeros(1)})
    waiter.join(WAIT_S)
    assert not waiter.is_alive()


def test_a_claim_that_does_not_wait_says_so_too_and_once(
    client: DataPlaneClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert client.claim_meta(partition, "train", ["zz"], 1, blocking=False).size == 0
    (told,) = said(caplog)
    assert told.endswith("no sample is ready until it is produced. Known fields: 'reward', 'margin'")
    client.claim_meta(partition, "train", ["reward"], 1, blocking=False)
    assert len(said(caplog)) == 1
    with pytest.raises(PartitionNotFoundError):
        client.claim_meta("nowhere", "train", ["zz"], 1)


def test_asyncio_code_is_told_too(server: Server, partition: str, caplog: pytest.LogCaptureFixture) -> None:
    async def both() -> None:
        async with connect_async(server.address) as client:
            await client.put_samples(["a"], partition, {"rewrd": torch.zeros(1)})
            await client.claim_meta(partition, "train", ["margins"], 1, blocking=False)

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
