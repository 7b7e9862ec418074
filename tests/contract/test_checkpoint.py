"""A checkpoint holds every kind and dtype bit for bit, as of one instant, and brings it back."""

from __future__ import annotations

from collections.abc import Callable
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
    Shared,
    StaleSampleError,
)
from dataplane.client.unit_connections import UnitConnections
from dataplane.core import failpoints

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
    {"n": 1 << 70, "ok": True},
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
