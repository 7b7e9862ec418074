"""A checkpoint holds every kind and dtype bit for bit, as of one instant, and brings it back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataplane import (
    CheckpointError,
    DataPlaneClient,
    FieldSpec,
    PartitionExistsError,
    PartitionNotFoundError,
    SchemaError,
    Server,
    Shared,
    StaleSampleError,
    connect,
    serve,
)
from dataplane.client.unit_connections import UnitConnections
from dataplane.core import failpoints
from dataplane.errors import ChecksumError
from dataplane.ledger import commands as c
from dataplane.storage.client import UnitConnection
from tests.contract.conftest import MIB, Blocking, unit_transport
from tests.restarts import wait_until

from .values import DTYPES, random_tensor, same, same_rows

pytestmark = pytest.mark.integration


MORE_DTYPES = [*DTYPES, torch.uint64, torch.complex128]
IDS = [f"s{number}" for number in range(5)]


def every_kind() -> dict[str, Any]:
    """Five rows of each; lengths of 0 among them."""
    fields: dict[str, Any] = {}
    for number, dtype in enumerate(MORE_DTYPES):
        name = str(dtype).removeprefix("torch.")
        fields[f"dense {name}"] = random_tensor((5, 3), dtype, number)
        fields[f"jagged {name}"] = [random_tensor((n, 2), dtype, n) for n in (3, 0, 1, 7, 0)]
        fields[f"ragged {name}"] = [random_tensor(shape, dtype) for shape in ((2, 3), (0,), (), (1, 1, 4), (5,))]
    fields["wide"] = torch.arange(5 * 70_000, dtype=torch.float32).reshape(5, 70_000)
    fields["scalars"] = torch.arange(5)
    fields["empty"] = torch.zeros(5, 0)
    fields["shared"] = Shared([torch.arange(4), torch.arange(0), torch.arange(2)], [2, 0, 2, 1, 0])
    fields["shared objects"] = Shared([{"prompt": ("a", 1 << 70)}, None], [1, 0, 0, 1, 0])
    return fields


TAGS: list[dict[str, Any]] = [
    {"n": 1, "kind": "a", "lag": 0.5},
    {"n": (1 << 63) - 1, "ok": True},
    {"n": None},
    {},
    {"n": -3, "kind": "ü", "lag": float("-inf")},
]


def assert_same(client: DataPlaneClient, partition: str, ids: list[str], fields: dict[str, Any]) -> None:
    found = client.get_samples(ids, partition, list(fields))
    for name, value in fields.items():
        if isinstance(value, Shared):
            value = [value.values[place] for place in value.index]
        if isinstance(value[0], torch.Tensor):
            assert same_rows(found[name], value), name
        else:
            assert found[name] == value, name


def test_everything_comes_back(client: DataPlaneClient, partition: str, tmp_path: Path) -> None:
    fields = every_kind()
    declared = {"declared": None, "scalars": None}
    client.register_partition(
        partition, declared, 9, ["train", "score"], 2, {"kind": ["a", "ü"]}, budget_bytes=1 << 30, when_full="reject"
    )
    before = client.put_samples(IDS, partition, fields, TAGS)
    client.put_samples(["late", "s1"], partition, {"some": torch.arange(2)})
    client.put_samples(["bare"], partition)
    client.clear_samples(["s3"], partition)
    client.set_version(partition, 4)
    assert client.claim_meta(partition, "train", ["wide"], 2).sample_ids == ["s0", "s1"]
    leased = client.claim_meta(partition, "score", [], 1, lease_s=600.0)
    done = client.checkpoint(tmp_path / "saved", [partition])
    assert done.partitions == {partition: 6}
    client.nack(leased)
    client.clear_samples(None, partition)
    assert client.restore(tmp_path / "saved") == done
    meta = client.list_samples(partition)
    kept = [0, 1, 2, 4]
    assert meta.sample_ids == ["s0", "s1", "s2", "s4", "late", "bare"]
    assert meta.tags == [*(TAGS[place] for place in kept), {}, {}]
    rows: dict[str, Any] = {}
    for name, value in fields.items():
        value = [value.values[place] for place in value.index] if isinstance(value, Shared) else value
        rows[name] = [value[place] for place in kept]
    assert_same(client, partition, [IDS[place] for place in kept], rows)
    assert_same(client, partition, ["s1", "late"], {"some": [torch.tensor(1), torch.tensor(0)]})
    (stats,) = [found for found in client.stats().partitions if found.partition == partition]
    assert (stats.live, stats.born, stats.num_samples, stats.sealed, stats.version) == (6, 7, 9, False, 4)
    assert (stats.budget_bytes, stats.when_full) == (1 << 30, "reject")
    assert stats.claimed == {"train": 2, "score": 0}
    assert stats.produced["some"] == 2
    assert stats.produced["declared"] == 0
    assert client.claim_meta(partition, "train", ["wide"], 9, blocking=False).sample_ids == ["s2", "s4"]
    assert client.claim_meta(partition, "score", [], 1, blocking=False).sample_ids == ["s0"]
    with pytest.raises(StaleSampleError):
        client.get_data(before, ["scalars"])
    with pytest.raises(ValueError, match="values declared with enums"):
        client.set_tags(["s0"], partition, [{"kind": "c"}])
    client.put_samples(["s0"], partition, {"scalars": torch.tensor([9])}, mode="update")
    assert client.get_samples(["s0"], partition, ["scalars"])["scalars"].tolist() == [9]


@pytest.mark.usefixtures("poison")
def test_what_happens_meanwhile_is_not_in_it(
    client: DataPlaneClient, open_client: Callable[[], DataPlaneClient], partition: str, tmp_path: Path
) -> None:
    """Between the instant and the copying: rows change, are claimed, are cleared, the partition goes and comes."""
    other = open_client()
    values = torch.arange(50.0).reshape(5, 10)
    client.register_partition(partition, ["x"], 5, ["train"])
    client.put_samples(IDS, partition, {"x": values}, TAGS)

    def disturb() -> None:
        failpoints.disarm()
        other.put_samples(IDS[:2], partition, {"x": -values[:2]}, [{"n": 7}, {"n": 7}])
        other.claim_meta(partition, "train", ["x"], 5)
        other.list_samples(partition)
        other.clear_samples(["s2"], partition)
        other.clear_samples(None, partition)
        other.register_partition(partition, ["y"], 1, ["other"])
        other.put_samples(["new"], partition, {"y": torch.zeros(1, 1000)})

    failpoints.arm("checkpoint.saved", disturb)
    client.checkpoint(tmp_path / "saved", [partition])
    with pytest.raises(PartitionExistsError):
        client.restore(tmp_path / "saved")
    assert client.list_samples(partition).sample_ids == ["new"]
    client.restore(tmp_path / "saved", replace=True)
    meta = client.claim_meta(partition, "train", ["x"], 5)
    assert (meta.sample_ids, meta.tags) == (IDS, TAGS)
    assert same(client.get_data(meta)["x"], values)


def test_a_failure_half_way_leaves_nothing(
    client: DataPlaneClient, partition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.register_partition(partition, ["x"], 5, ["train"])
    client.put_samples(IDS, partition, {"x": torch.ones(5, 9), "y": torch.ones(5)})
    client.checkpoint(tmp_path / "saved", [partition])
    before = [found.partition for found in client.stats().partitions]
    honest, calls = UnitConnections.write, []

    def write(self: UnitConnections, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("the mapping broke")
        honest(self, *arguments)

    monkeypatch.setattr(UnitConnections, "write", write)
    with pytest.raises(OSError, match="the mapping broke"):
        client.restore(tmp_path / "saved", replace=True)
    assert len(calls) == 2
    assert [found.partition for found in client.stats().partitions] == before
    assert client.get_samples(IDS, partition, ["y"])["y"].tolist() == [1.0] * 5


def test_a_restored_partition_has_the_schema_of_its_checkpoint(
    client: DataPlaneClient, open_client: Callable[[], DataPlaneClient], partition: str, tmp_path: Path
) -> None:
    """Not the one of the partition that it replaces, which clients may remember."""
    rows = [torch.arange(3), torch.arange(2)]
    client.register_partition(partition, {"x": FieldSpec("jagged")}, None, ["train"], strict=True)
    client.put_samples(["a", "b"], partition, {"x": rows})
    client.checkpoint(tmp_path / "saved", [partition])
    client.clear_samples(None, partition)
    client.register_partition(partition, {"x": FieldSpec("dense"), "later": None}, 5, ["train", "other"])
    other = open_client()
    for writer in (client, other):
        writer.put_samples(["a", "b"], partition, {"x": torch.ones(2, 2), "later": torch.ones(2)})
    client.restore(tmp_path / "saved", replace=True)
    for reader in (client, other):
        assert same_rows(reader.get_samples(["a", "b"], partition, ["x"])["x"], rows)
    (stats,) = [found for found in other.stats().partitions if found.partition == partition]
    assert (set(stats.produced), set(stats.claimed), stats.num_samples) == ({"x"}, {"train"}, None)
    for writer in (client, other):
        with pytest.raises(SchemaError, match="later"):
            writer.put_samples(["a", "b"], partition, {"later": torch.ones(2)})
        with pytest.raises(SchemaError, match="float32"):
            writer.put_samples(["a", "b"], partition, {"x": torch.ones(2, 2)})
        writer.put_samples(["a", "b"], partition, {"x": torch.arange(4).view(2, 2)})
        assert writer.get_samples(["a", "b"], partition, ["x"])["x"].is_nested


def test_some_partitions_of_it(client: DataPlaneClient, partition: str, tmp_path: Path) -> None:
    client.register_partition(partition, ["x"], 1, ["train"])
    client.register_partition(f"{partition}-b", ["x"], 1, ["train"])
    client.put_samples(["a"], f"{partition}-b", {"x": np.array(["text"], object)})
    client.checkpoint(tmp_path / "saved", [partition, f"{partition}-b"])
    client.clear_samples(None, f"{partition}-b")
    with pytest.raises(PartitionNotFoundError, match="nowhere"):
        client.checkpoint(tmp_path / "other", [partition, "nowhere"])
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    with pytest.raises(PartitionNotFoundError, match="nowhere"):
        client.restore(tmp_path / "saved", ["nowhere"])
    for method in (client.checkpoint, client.restore):
        with pytest.raises(ValueError, match="at least one"):
            method(tmp_path / "saved", [])
        with pytest.raises(ValueError, match="not one string"):
            method(tmp_path / "saved", partition)
    assert client.restore(tmp_path / "saved", [f"{partition}-b"]).partitions == {f"{partition}-b": 1}
    assert client.get_samples(["a"], f"{partition}-b", ["x"])["x"] == ["text"]
    client.clear_samples(None, f"{partition}-b")
    with pytest.raises(CheckpointError, match="the checkpoint does not exist"):
        client.restore(tmp_path / "elsewhere")


# --- Rows that are damaged after they were written: readers notice, and say which.


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
CHECKED = ["a", "b", "c", "d"]
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
        call_id, located = connection._channel.call(locate)
        (found,) = located.fields
        connection._channel.post(c.Release(located=call_id))
        connection.session_state.connections.learn(connection._channel.call(c.Units())[1].units)
        arena = connection.session_state.connections.connection(int(found.units[0])).arena
        return arena.writable(int(found.offsets[0]), int(found.lengths[0]) * found.spec.unit_bytes)

    yield find
    looking.close()


def put(client: DataPlaneClient, partition: str, kind: str) -> Any:
    client.register_partition(partition, ["f"], None, ["task"])
    meta = client.put_samples(CHECKED, partition, {"f": VALUES[kind]()})
    if kind == GROWN:
        meta = client.put_samples(CHECKED, partition, {"f": [torch.full((2,), 9)] * 4}, mode="append")
    return meta


def reads(client: DataPlaneClient, meta: Any, partition: str) -> dict[str, Callable[[], Any]]:
    return {
        "get_samples": lambda: client.get_samples(CHECKED, partition, ["f"]),
        "views": lambda: client.get_samples(CHECKED, partition, ["f"], copy=False),
        "get_data": lambda: client.get_data(meta, ["f"]),
        "padded": lambda: client.get_batch(meta, ["f"]),
        "jagged": lambda: client.get_batch(meta, ["f"], layout="jagged"),
    }


@pytest.mark.parametrize("kind", VALUES)
def test_a_damaged_row_is_an_error_that_names_it(client, partition, cell, kind) -> None:
    meta = put(client, partition, kind)
    whole = {name: read() for name, read in reads(client, meta, partition).items()}
    stored = cell(partition, CHECKED[HURT], "f")
    stored[-1] ^= 1
    for name, read in reads(client, meta, partition).items():
        with pytest.raises(ChecksumError) as raised:
            read()
        error = raised.value
        shared = kind == "shared"
        found = (error.partition, error.sample, error.field, error.unit, error.total)
        assert found == (
            partition,
            CHECKED[1] if shared else CHECKED[HURT],
            "f",
            1,
            2 if shared else 1,
        ), name
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
    client.put_samples(CHECKED, partition, {"g": torch.arange(4)})
    cell(partition, CHECKED[HURT], "f")[0] ^= 0x80
    others = [name for name in CHECKED if name != CHECKED[HURT]]
    assert client.get_samples(others, partition, ["f", "g"]).batch_size[0] == 3
    assert client.get_samples(CHECKED, partition, ["g"])["g"].tolist() == [0, 1, 2, 3]


def test_nothing_is_appended_to_a_damaged_row(client, partition, cell) -> None:
    put(client, partition, GROWN)
    cell(partition, CHECKED[HURT], "f")[0] ^= 1
    more = {"f": [torch.full((2,), 7)] * 4}
    with pytest.raises(ChecksumError, match=f"sample '{CHECKED[HURT]}'"):
        client.put_samples(CHECKED, partition, more, mode="append")
    cell(partition, CHECKED[HURT], "f")[0] ^= 1
    client.put_samples(CHECKED, partition, more, mode="append")
    assert [len(row) for row in client.get_samples(CHECKED, partition, ["f"])["f"].unbind()] == [7, 5, 9, 6]


def test_a_row_that_is_written_again_is_whole_again(client, partition, cell) -> None:
    meta = put(client, partition, "jagged")
    cell(partition, CHECKED[HURT], "f")[0] ^= 1
    client.put_samples([CHECKED[HURT]], partition, {"f": [torch.arange(9)]})
    assert len(client.get_data(meta, ["f"])["f"].unbind()[HURT]) == 9


@pytest.mark.parametrize("kind", ["dense", "jagged", "object", "shared"])
def test_a_checkpoint_of_a_damaged_row_is_refused(client, partition, cell, kind, tmp_path) -> None:
    put(client, partition, kind)
    stored = cell(partition, CHECKED[HURT], "f")
    stored[-1] ^= 1
    with pytest.raises(ChecksumError) as raised:
        client.checkpoint(tmp_path / "saved", [partition])
    assert (raised.value.sample, raised.value.field) == (
        CHECKED[1] if kind == "shared" else CHECKED[HURT],
        "f",
    )
    assert not (tmp_path / "saved").exists()
    stored[-1] ^= 1
    client.checkpoint(tmp_path / "saved", [partition])


def test_restored_rows_have_checksums(client, partition, cell, tmp_path) -> None:
    put(client, partition, "jagged")
    client.checkpoint(tmp_path / "saved", [partition])
    client.restore(tmp_path / "saved", [partition], replace=True)
    cell(partition, CHECKED[HURT], "f")[0] ^= 1
    with pytest.raises(ChecksumError):
        client.get_samples(CHECKED, partition, ["f"])


def test_small_puts_into_preallocated_space_have_checksums(client, partition, cell) -> None:
    client.register_partition(partition, ["f"], None, ["task"])
    for name in CHECKED:
        client.put_samples([name], partition, {"f": torch.arange(5).reshape(1, 5)})
    for name in CHECKED:
        cell(partition, name, "f")[0] ^= 1
    with pytest.raises(ChecksumError) as raised:
        client.get_samples(CHECKED, partition, ["f"])
    assert raised.value.total == 4


# --- by default ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with serve({"capacity_bytes": 64 * MIB}) as running:
        yield running


def checksums(client: Any, partition: str) -> Any:
    """Those the service would have this client compare."""
    inner = client._client if isinstance(client, Blocking) else client
    locate = c.Locate(partition=partition, samples=c.Samples(ids=tuple(CHECKED)), fields=("f",))
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
    local.get_samples(CHECKED, "here", ["f"])
    assert checksums(local, "here") is None
    assert checksums(remote, "here") is None
    put(remote, "there", "jagged")
    assert (checksums(remote, "there") > 0).all()
    wait_until(lambda: checksums(local, "there") is None, "who maps the memory does not compare")


def test_a_local_put_over_a_travelled_one_takes_its_checksum_away(local, remote) -> None:
    put(remote, "mixed", "jagged")
    local.put_samples(["b"], "mixed", {"f": [torch.arange(4)]})
    assert (checksums(remote, "mixed") > 0).tolist() == [True, False, True, True]
    assert remote.get_samples(CHECKED, "mixed", ["f"]).batch_size[0] == 4


def test_the_unit_that_holds_the_row_is_named() -> None:
    with (
        serve({"capacity_bytes": 8 * MIB, "units": 2, "checksums": "always"}) as server,
        connect(server.address) as client,
    ):
        client.register_partition("p", ["f"], None, ["task"])
        for name in CHECKED[:2]:
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
