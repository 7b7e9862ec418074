"""Every limit of the service, met through the service itself: an error that says how many, how many are taken, and what
to do; and the service goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from dataplane import DataPlaneConfig, LimitError, connect
from dataplane.config import MIB
from dataplane.controller.controller import Controller
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import RequestTooLargeError
from dataplane.ledger import Ledger, Limits
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.pb import control_pb2_grpc
from dataplane.storage.unit import StorageUnit
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

CONFIG = DataPlaneConfig(capacity_bytes=MIB)
LIMITS = Limits(
    in_flight=8,
    parked=1,
    sessions=3,
    partitions=2,
    units=1,
    samples=8,
    columns=4,
    id_bytes=64,
    tag_bytes=10,
    path_bytes=128,
    saves=1,
)
LONG = "ü" * 33
WAIT_S = 60.0


@pytest.fixture
def controller() -> Iterator[Controller]:
    """Of a service with small limits: a partition "p" of a field and a task."""
    with (
        Controller(replace(CONFIG, grpc_port=0), ledger=Ledger(1, limits=LIMITS), epoch=1) as controller,
        StorageUnit(CONFIG, controller.address, name="unit"),
        connect(controller.address) as client,
    ):
        client.register_partition("p", ["x"], None, ["t"])
        yield controller


@pytest.fixture
def address(controller: Controller) -> str:
    return controller.address


def channel(client: Any) -> Any:
    client.stats()
    return client._connections.get()._channel


def ones(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(rows, 2)}


def columns(names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(1) for name in names}


def ids(count: int) -> list[str]:
    return [f"s{number}" for number in range(count)]


def wait_twice(client: Any) -> None:
    with ThreadPoolExecutor(1) as pool, contextlib.closing(connect(channel(client).address)) as other:
        first = pool.submit(other.claim_meta, "p", "t", ["x"], 1)
        wait_until(lambda: client.stats().partitions[0].waiting_claims)
        try:
            client.claim_meta("p", "t", ["x"], 1)
        finally:
            client.put_samples(["one"], "p", ones(1))
            assert first.result().sample_ids == ["one"]


def open_many(client: Any) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(connect(channel(client).address)).stats()


def save_twice(client: Any) -> None:
    for _ in range(2):
        channel(client).call(c.Save())


def register_three(client: Any) -> None:
    for name in ("q", "r"):
        client.register_partition(name, ["x"], None, ["t"])


def put_tags(client: Any, **tags: Any) -> None:
    client.put_samples(["a"], "p", ones(1), tags=[tags])


CASES: list[tuple[str, int, int, Callable[[Any], object]]] = [
    ("bytes of sample id", 66, 64, lambda client: client.put_samples([LONG], "p", ones(1))),
    ("bytes of partition", 66, 64, lambda client: client.register_partition(LONG, ["x"], None, ["t"])),
    ("bytes of field", 66, 64, lambda client: client.put_samples(["a"], "p", {LONG: torch.ones(1, 2)})),
    ("bytes of task", 66, 64, lambda client: client.register_partition("q", ["x"], None, [LONG])),
    ("bytes of tag", 66, 64, lambda client: put_tags(client, **{LONG: 1})),
    ("characters of one value of tag 'a'", 11, 10, lambda client: put_tags(client, a="x" * 11)),
    ("tags of partition 'p'", 5, 4, lambda client: put_tags(client, **dict.fromkeys("abcde", 1))),
    ("values of column 'x'", 9, 8, lambda client: client.put_samples(ids(9), "p", ones(9))),
    ("samples in one command", 9, 8, lambda client: client.clear_samples(ids(9), "p")),
    ("columns of one put", 5, 4, lambda client: client.put_samples(["a"], "p", columns("abcde"))),
    (
        "fields of partition 'p'",
        5,
        4,
        lambda client: client.put_samples(["a"], "p", dict.fromkeys("abcd", torch.ones(1))),
    ),
    ("fields of partition 'q'", 5, 4, lambda client: client.register_partition("q", list("abcde"), None, ["t"])),
    ("tasks of partition 'q'", 5, 4, lambda client: client.register_partition("q", ["x"], None, list("abcde"))),
    (
        "enumerations of partition 'q'",
        5,
        4,
        lambda client: client.register_partition("q", ["x"], None, ["t"], enums={name: ["v"] for name in "abcde"}),
    ),
    ("partitions", 3, 2, register_three),
    ("samples of one claim", 9, 8, lambda client: client.claim_meta("p", "t", ["x"], 9)),
    ("fields of one claim", 5, 4, lambda client: client.claim_meta("p", "t", list("abcde"), 1)),
    ("fields in one command", 5, 4, lambda client: client.get_samples(["a"], "p", list("abcde"))),
    ("waiting calls", 2, 1, wait_twice),
    ("open sessions", 4, 3, open_many),
    ("storage units", 2, 1, lambda client: StorageUnit(CONFIG, channel(client).address).start()),
    ("saves held by one session", 2, 1, save_twice),
    (
        "characters of a client's name",
        65,
        64,
        lambda client: connect(channel(client).address, client_name="n" * 65),
    ),
]


@pytest.mark.parametrize(
    ("what", "got", "limit", "go_beyond"), CASES, ids=[case[0].replace(" ", "-") for case in CASES]
)
def test_what_is_beyond_a_limit_is_refused_and_the_service_goes_on(
    address: str, what: str, got: int, limit: int, go_beyond: Callable[[Any], object]
) -> None:
    with connect(address) as client:
        if what.startswith("fields of partition 'p'"):
            client.put_samples(["b"], "p", ones(1))
        with pytest.raises(LimitError, match=rf"{got}, and the limit is {limit}\. [A-Z].*\.$") as refused:
            go_beyond(client)
        assert refused.value.what.startswith(what)
        assert (refused.value.got, refused.value.limit) == (got, limit)
        client.put_samples(["after"], "p", ones(1))
        assert torch.equal(client.get_samples(["after"], "p", ["x"])["x"], torch.ones(1, 2))


def test_calls_in_flight(controller: Controller) -> None:
    """A client of ours never has so many; another may."""
    opening = pb.OpenSessionRequest(nonce="n", host="h", name="n", protocol_version=PROTOCOL_VERSION)
    with grpc.insecure_channel(controller.grpc_address) as there:
        control = control_pb2_grpc.ControlStub(there)  # type: ignore[no-untyped-call]
        session = control.OpenSession(opening, timeout=WAIT_S).opened.session
        for call_id in range(1, 9):
            call = pb.UnitsRequest(header=pb.Header(session=session, call_id=call_id, watermark=1))
            assert len(control.Units(call, timeout=WAIT_S).units) == 1
        call.header.call_id = 9
        with pytest.raises(grpc.RpcError, match=r"calls in flight: 9, and the limit is 8\. Wait for answers"):
            control.Units(call, timeout=WAIT_S)
        named = pb.UnitsRequest(header=pb.Header(session=session, call_id=10, watermark=1, confirmed=[4, 5, 9, 9]))
        assert len(control.Units(named, timeout=WAIT_S).units) == 1


def test_messages(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_frames, "MAX_MESSAGE_BYTES", 8000)
    with connect(address) as client:
        with pytest.raises(RequestTooLargeError) as refused:
            client.register_partition("q", [], None, ["t"], enums={"tag": ["v" * 8000]})
        assert refused.value.limit_bytes == 8000
        client.stats()
