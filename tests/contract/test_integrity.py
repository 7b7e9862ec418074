"""Rows that are damaged after they were written: readers notice, and say which."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dataplane import Server, Shared, connect, serve
from dataplane.client.client import DataPlaneClient
from dataplane.errors import ChecksumError
from dataplane.ledger import commands as c
from dataplane.storage.client import UnitConnection
from tests.contract.conftest import MIB, Blocking, unit_transport
from tests.contract.values import same_rows
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

GROWN = "grown"

VALUES: dict[str, Callable[[], Any]] = {
    "dense": lambda: torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "scalar": lambda: torch.arange(4.0) + 1,
    "flag": lambda: torch.tensor([True, False, True, True]),
    "jagged": lambda: torch.nested.nested_tensor([torch.arange(n) + 1 for n in (3, 0, 5, 700)], layout=torch.jagged),
    "list": lambda: [torch.arange(n) + 1 for n in (3, 1, 5, 2)],
    "ragged": lambda: [torch.ones(2, 3), torch.ones(5), torch.ones(1, 1, 2), torch.ones(4)],
    "object": lambda: ["a text", {"n": 1}, [1, 2, 3], b"bytes"],
    "shared": lambda: Shared(torch.arange(6).reshape(2, 3) + 1, [0, 1, 1, 0]),
    "strided": lambda: torch.arange(24).reshape(4, 6)[:, ::2] + 0,
    "columns": lambda: torch.arange(12).reshape(3, 4).t(),
    "large": lambda: torch.arange(4 * 200_000).reshape(4, 200_000),
    GROWN: lambda: [torch.arange(n) + 1 for n in (3, 1, 5, 2)],
}
IDS = ["a", "b", "c", "d"]
HURT = 2
"""The place of the sample that gets damaged."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that always has checksums, so that local readers compare them too."""
    settings = {"capacity_bytes": 64 * MIB, "heartbeat_s": 0.5, "checksums": "always"}
    with serve({**settings, "bulk_transport": unit_transport()}) as running:
        yield running


@pytest.fixture
def cell(server: Server) -> Iterator[Callable[[str, str, str], np.ndarray]]:
    """The bytes of a stored cell, to be changed under everybody."""
    looking = connect(server.address)

    def find(partition: str, sample: str, field: str) -> np.ndarray:
        connection = looking._connections.get()
        locate = c.Locate(partition=partition, samples=c.Samples(ids=(sample,)), fields=(field,))
        number, located = connection._channel.call(locate)
        (found,) = located.fields
        connection._channel.post(c.Release(located=number))
        connection.session_state.connections.learn(connection._channel.call(c.Units())[1].units)
        arena = connection.session_state.connections.connection(int(found.units[0])).arena
        return arena.writable(int(found.offsets[0]), int(found.lengths[0]) * found.spec.unit_bytes)

    yield find
    looking.close()


def put(client: DataPlaneClient, partition: str, kind: str) -> Any:
    client.register_partition(partition, ["f"], None, ["task"])
    meta = client.put_samples(IDS, partition, {"f": VALUES[kind]()})
    if kind == GROWN:
        meta = client.put_samples(IDS, partition, {"f": [torch.full((2,), 9)] * 4}, mode="append")
    return meta


def reads(client: DataPlaneClient, meta: Any, partition: str) -> dict[str, Callable[[], Any]]:
    return {
        "get_samples": lambda: client.get_samples(IDS, partition, ["f"]),
        "views": lambda: client.get_samples(IDS, partition, ["f"], copy=False),
        "get_data": lambda: client.get_data(meta, ["f"]),
        "padded": lambda: client.get_batch(meta, ["f"]),
        "jagged": lambda: client.get_batch(meta, ["f"], layout="jagged"),
    }


@pytest.mark.parametrize("kind", VALUES)
def test_a_damaged_row_is_an_error_that_names_it(client, partition, cell, kind) -> None:
    meta = put(client, partition, kind)
    whole = {name: read() for name, read in reads(client, meta, partition).items()}
    stored = cell(partition, IDS[HURT], "f")
    stored[-1] ^= 1
    for name, read in reads(client, meta, partition).items():
        with pytest.raises(ChecksumError) as raised:
            read()
        error = raised.value
        shared = kind == "shared"
        found = (error.partition, error.sample, error.field, error.unit, error.total)
        assert found == (partition, IDS[1] if shared else IDS[HURT], "f", 1, 2 if shared else 1), name
        assert error.got != error.expected
        assert pickle.loads(pickle.dumps(error)).facts == error.facts
    stored[-1] ^= 1
    assert same_or_equal(reads(client, meta, partition)["padded"]()["f"], whole["padded"]["f"])


def same_or_equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.tolist() == right.tolist()
    return same_rows(left, right)


@pytest.mark.parametrize("kind", ["dense", "jagged"])
def test_other_samples_and_fields_are_read_all_the_same(client, partition, cell, kind) -> None:
    put(client, partition, kind)
    client.put_samples(IDS, partition, {"g": torch.arange(4)})
    cell(partition, IDS[HURT], "f")[0] ^= 0x80
    others = [name for name in IDS if name != IDS[HURT]]
    assert client.get_samples(others, partition, ["f", "g"]).batch_size[0] == 3
    assert client.get_samples(IDS, partition, ["g"])["g"].tolist() == [0, 1, 2, 3]


def test_nothing_is_appended_to_a_damaged_row(client, partition, cell) -> None:
    put(client, partition, GROWN)
    cell(partition, IDS[HURT], "f")[0] ^= 1
    more = {"f": [torch.full((2,), 7)] * 4}
    with pytest.raises(ChecksumError, match=f"sample '{IDS[HURT]}'"):
        client.put_samples(IDS, partition, more, mode="append")
    cell(partition, IDS[HURT], "f")[0] ^= 1
    client.put_samples(IDS, partition, more, mode="append")
    assert [len(row) for row in client.get_samples(IDS, partition, ["f"])["f"].unbind()] == [7, 5, 9, 6]


def test_a_row_that_is_written_again_is_whole_again(client, partition, cell) -> None:
    meta = put(client, partition, "jagged")
    cell(partition, IDS[HURT], "f")[0] ^= 1
    client.put_samples([IDS[HURT]], partition, {"f": [torch.arange(9)]})
    assert len(client.get_data(meta, ["f"])["f"].unbind()[HURT]) == 9


@pytest.mark.parametrize("kind", ["dense", "jagged", "object", "shared"])
def test_a_checkpoint_of_a_damaged_row_is_refused(client, partition, cell, kind, tmp_path) -> None:
    put(client, partition, kind)
    stored = cell(partition, IDS[HURT], "f")
    stored[-1] ^= 1
    with pytest.raises(ChecksumError) as raised:
        client.checkpoint(tmp_path / "saved", [partition])
    assert (raised.value.sample, raised.value.field) == (IDS[1] if kind == "shared" else IDS[HURT], "f")
    assert not (tmp_path / "saved").exists()
    stored[-1] ^= 1
    client.checkpoint(tmp_path / "saved", [partition])


def test_restored_rows_have_checksums(client, partition, cell, tmp_path) -> None:
    put(client, partition, "jagged")
    client.checkpoint(tmp_path / "saved", [partition])
    client.restore(tmp_path / "saved", [partition], replace=True)
    cell(partition, IDS[HURT], "f")[0] ^= 1
    with pytest.raises(ChecksumError):
        client.get_samples(IDS, partition, ["f"])


def test_small_puts_into_preallocated_space_have_checksums(client, partition, cell) -> None:
    client.register_partition(partition, ["f"], None, ["task"])
    for name in IDS:
        client.put_samples([name], partition, {"f": torch.arange(5).reshape(1, 5)})
    for name in IDS:
        cell(partition, name, "f")[0] ^= 1
    with pytest.raises(ChecksumError) as raised:
        client.get_samples(IDS, partition, ["f"])
    assert raised.value.total == 4


# --- by default ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with serve({"capacity_bytes": 64 * MIB}) as running:
        yield running


def checksums(client: Any, partition: str) -> Any:
    """Those the service would have this client compare."""
    inner = client._client if isinstance(client, Blocking) else client
    locate = c.Locate(partition=partition, samples=c.Samples(ids=tuple(IDS)), fields=("f",))
    return inner._connections.get()._channel.call(locate)[1].fields[0].checksums


@pytest.fixture
def local(plain: Server) -> Iterator[DataPlaneClient]:
    with connect(plain.address) as client:
        yield client


@pytest.fixture
def remote(plain: Server) -> Iterator[DataPlaneClient]:
    with connect(plain.address, force_remote=True) as client:
        yield client


def test_on_one_host_rows_have_none_unless_they_travel(local, remote) -> None:
    put(local, "here", "jagged")
    local.get_samples(IDS, "here", ["f"])
    assert checksums(local, "here") is None
    assert checksums(remote, "here") is None
    put(remote, "there", "jagged")
    assert (checksums(remote, "there") > 0).all()
    wait_until(lambda: checksums(local, "there") is None, "who maps the memory does not compare")


def test_a_local_put_over_a_travelled_one_takes_its_checksum_away(local, remote) -> None:
    put(remote, "mixed", "jagged")
    local.put_samples(["b"], "mixed", {"f": [torch.arange(4)]})
    assert (checksums(remote, "mixed") > 0).tolist() == [True, False, True, True]
    assert remote.get_samples(IDS, "mixed", ["f"]).batch_size[0] == 4


def test_the_unit_that_holds_the_row_is_named() -> None:
    with (
        serve({"capacity_bytes": 8 * MIB, "units": 2, "checksums": "always"}) as server,
        connect(server.address) as client,
    ):
        client.register_partition("p", ["f"], None, ["task"])
        for name in IDS[:2]:
            client.put_samples([name], "p", {"f": torch.ones(1, MIB // 2)})
            client.put_samples([f"more of {name}"], "p", {"f": torch.ones(1, MIB // 2)})
        inner = client._connections.get()
        locate = c.Locate(partition="p", samples=c.Samples(ids=("a", "more of a", "b", "more of b")), fields=("f",))
        (found,) = inner._channel.call(locate)[1].fields
        assert set(found.units.tolist()) == {1, 2}
        for place, unit in enumerate(found.units.tolist()):
            row = inner.session_state.connections.connection(unit).arena.writable(int(found.offsets[place]), 16)
            row[7] ^= 1
            with pytest.raises(ChecksumError) as raised:
                client.get_samples(locate.samples.ids, "p", ["f"])
            assert (raised.value.unit, raised.value.sample) == (unit, locate.samples.ids[place])
            row[7] ^= 1
        assert client.get_samples(locate.samples.ids, "p", ["f"]).batch_size[0] == 4


def test_never_is_never(tmp_path) -> None:
    with (
        serve({"capacity_bytes": 16 * MIB, "checksums": "never"}) as server,
        connect(server.address, force_remote=True) as client,
    ):
        put(client, "p", "jagged")
        assert checksums(client, "p") is None


def test_damage_on_the_way_is_noticed(remote, monkeypatch) -> None:
    meta = put(remote, "travelled", "jagged")
    honest = UnitConnection._receive_payload

    def hurt(self: Any, *call: Any) -> Any:
        arrived = honest(self, *call)
        frame = arrived.data.copy()
        frame[len(frame) // 2] ^= 4
        return replace(arrived, data=frame)

    with monkeypatch.context() as patched:
        patched.setattr(UnitConnection, "_receive_payload", hurt)
        with pytest.raises(ChecksumError, match=r"field 'f' of sample 'd'.* storage unit 1 "):
            remote.get_data(meta, ["f"])
    assert remote.get_data(meta, ["f"]).batch_size[0] == 4
