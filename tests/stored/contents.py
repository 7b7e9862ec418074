"""What the stored partitions hold, how it gets there, and how a test compares it, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dataplane import DataPlaneClient, FieldSpec, KVBatchMeta, PartitionSealedError, Shared, StaleSampleError
from dataplane.client.checkpoint import manifest
from dataplane.controller import journal
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.ledger.encoding import image
from dataplane.storage import arena
from tests.contract.values import random_tensor, same_rows
from tests.restarts import wait_until

PARTITIONS = ("image", "image sealed", "journal", "journal sealed")
"""The first two are in the image of the ledger, the others in the records after it."""
IDS = [f"s{number}" for number in range(8)]
"""The last one was cleared and put again."""
TAGS: list[dict[str, Any]] = [
    {"n": 1, "kind": "a", "lag": 0.5},
    {"n": (1 << 63) - 1, "ok": True, "kind": "ü"},
    {"n": None},
    {"ok": False, "n": -(1 << 62)},
    {},
    {"lag": float("-inf"), "kind": "a"},
    {"input_lengths": 5, "group": "g"},
    {"n": 9},
]
LEASE_S = 1e6
LATE = ["s0", "s2", "s7"]
"""Those for which the field "late" was produced."""
GROUPS = [2, 0, 0, 1, 2, 1, 0, 2]
"""Which value each sample shares with others; the last one's was written anew."""
_FIELDS = {
    "dense": FieldSpec("dense", "bfloat16", (3,)),
    "jagged": FieldSpec("jagged", "int64", ()),
    "ragged": FieldSpec("ragged", "uint8"),
    "object": FieldSpec("object"),
    "shared jagged": FieldSpec("jagged", "float32", (2,)),
    "shared object": None,
    "late": None,
}
_OF_ALL = [name for name in _FIELDS if name != "late"]
_LENGTHS = (3, 0, 1, 7, 0, 2, 5, 4)
_SHAPES = ((2, 3), (0,), (), (1, 1, 4), (5,), (3, 2), (1,), (2, 0, 2))


class Held(msgspec.Struct, frozen=True):
    """Samples of a claim that are on lease: what its holder needs to acknowledge them."""

    partition: str
    task: str
    ids: list[str]
    rows: list[int]
    generations: list[int]
    claims: list[int]

    @classmethod
    def of(cls, meta: KVBatchMeta) -> Held:
        assert meta.handles is not None
        assert meta.claims is not None
        assert meta.task_name is not None
        rows, generations = meta.handles
        ids = list(meta.sample_ids)
        return cls(meta.partition_id, meta.task_name, ids, rows.tolist(), generations.tolist(), meta.claims.tolist())

    @property
    def meta(self) -> KVBatchMeta:
        rows, generations, claims = (np.array(each, np.int64) for each in (self.rows, self.generations, self.claims))
        return KVBatchMeta(self.partition, self.task, self.ids, _rows=rows, _generations=generations, _claims=claims)


def current_formats() -> dict[str, int]:
    """The version numbers of what is stored, as this version of the package writes it."""
    return {
        "PROTOCOL_VERSION in dataplane/core/types.py": PROTOCOL_VERSION,
        "FORMAT in dataplane/controller/journal.py": journal.FORMAT,
        "FORMAT in dataplane/ledger/encoding/image.py": image.FORMAT,
        "FORMAT in dataplane/storage/arena.py": arena.FORMAT,
        "FORMAT in dataplane/client/checkpoint/manifest.py": manifest.FORMAT,
    }


def _rows(partition: str) -> dict[str, list[Any]]:
    """The rows of every field, by sample."""
    seed = 100 * PARTITIONS.index(partition)
    tensors = [random_tensor((length, 2), torch.float32, seed + length) for length in (3, 1, 2)]
    objects = [{"prompt": ("a", 1 << 70), "of": partition}, None, [1.5, {"deep": frozenset({"er"})}]]
    return {
        "dense": list(random_tensor((8, 3), torch.bfloat16, seed + 4)),
        "jagged": [random_tensor((length,), torch.int64, seed + 10 + row) for row, length in enumerate(_LENGTHS)],
        "ragged": [random_tensor(shape, torch.uint8, seed + 20 + row) for row, shape in enumerate(_SHAPES)],
        "object": [None, {"a": (), 3: b"\0"}, partition, seed, "ü" * 40, [True, {"b": [{}]}], -1.25, b"bytes"],
        "shared jagged": [tensors[group] for group in GROUPS],
        "shared object": [objects[group] for group in GROUPS],
        "late": list(random_tensor((8,), torch.int16, seed + 30)),
    }


def _put_values(rows: dict[str, list[Any]], places: Sequence[int], fields: Sequence[str]) -> dict[str, Any]:
    """The fields of the samples at these places, as `put_samples` takes them."""
    found: dict[str, Any] = {}
    for name in fields:
        values = [rows[name][place] for place in places]
        if name.startswith("shared"):
            groups = [GROUPS[place] for place in places]
            kinds = sorted(set(groups))
            found[name] = Shared(
                [values[groups.index(group)] for group in kinds], [kinds.index(group) for group in groups]
            )
        else:
            found[name] = torch.stack(values) if name in ("dense", "late") else values
    return found


def fill(client: DataPlaneClient, partition: str) -> list[Held]:
    """Register the partition and bring it to what `check` expects. What stays on lease."""
    rows = _rows(partition)
    client.register_partition(
        partition,
        _FIELDS,
        None,
        ["policy", "critic", "reward"],
        4,
        {"kind": ["a", "ü"]},
        budget_bytes=1 << 18,
        when_full="evict",
    )
    begun = dict(rows, jagged=[row[:2] for row in rows["jagged"]], dense=rows["dense"][::-1])
    client.put_samples(IDS, partition, _put_values(begun, range(8), _OF_ALL), TAGS)
    client.put_samples(IDS, partition, {"jagged": [row[2:] for row in rows["jagged"]]}, mode="append")
    client.put_samples(client.list_samples(partition), partition, {"dense": torch.stack(rows["dense"])})
    client.clear_samples(IDS[-1:], partition)
    client.put_samples(IDS[-1:], partition, _put_values(rows, [7], _OF_ALL), [{}], mode="create")
    client.set_tags(IDS[-1:], partition, TAGS[-1:])
    client.put_samples(LATE, partition, _put_values(rows, [IDS.index(name) for name in LATE], ["late"]))
    client.set_version(partition, 4)
    if partition.endswith("sealed"):
        client.seal(partition)
    return _claim(client, partition)


def _claim(client: DataPlaneClient, partition: str) -> list[Held]:
    """ "policy" has two samples for good; "critic" has acknowledged the first, holds two and gave one back; of a step
    of "reward" the first of two ranks holds its share, and the second has not asked."""
    assert client.claim_meta(partition, "policy", ["dense"], 2).sample_ids == IDS[:2]
    critic = client.claim_meta(partition, "critic", ["jagged"], 4, lease_s=LEASE_S)
    client.ack(critic.subset([0]))
    client.nack(critic.subset([3]))
    reward = _share(client, partition, 0)
    client.extend(reward, LEASE_S + 1)
    return [Held.of(critic.subset([1, 2])), Held.of(reward)]


def _share(client: DataPlaneClient, partition: str, rank: int) -> KVBatchMeta:
    return client.claim_meta(partition, "reward", [], 4, dp_rank=rank, dp_world=2, step=0, lease_s=LEASE_S)


def wait_in_image(client: DataPlaneClient, partition: str) -> None:
    """A claim of more samples than there will be waits from now on, in a thread that ends with the process."""
    claim = partial(client.claim_meta, partition, "policy", ["dense"], 99, where="kind != 'none'")
    Thread(target=claim, daemon=True).start()
    wait_until(lambda: any(each.waiting_claims for each in client.stats().partitions), "a claim waits")


def check(client: DataPlaneClient, partition: str) -> None:
    """The partition holds what `fill` put there."""
    rows, listed = _rows(partition), client.list_samples(partition)
    assert listed.sample_ids == IDS
    assert listed.tags == TAGS
    assert [{name: type(tag) for name, tag in tags.items()} for tags in listed.tags] == [
        {name: type(tag) for name, tag in tags.items()} for tags in TAGS
    ]
    assert set(listed.fields or ()) == set(_OF_ALL)
    for samples in (IDS, listed):
        _check_rows(client.get_samples(samples, partition, _OF_ALL), rows, range(8))
    _check_rows(client.get_samples(LATE, partition, ["late"]), rows, [IDS.index(name) for name in LATE])
    with pytest.raises(KeyError, match="late"):
        client.get_samples(IDS, partition, ["late"])
    offsets = [_offset_of(client, name, partition, "shared jagged") for name in listed.sample_ids]
    places = dict(zip(GROUPS[:-1], offsets, strict=False))
    assert [places[group] for group in GROUPS[:-1]] == offsets[:-1], "rows that were shared are not"
    (stats,) = [found for found in client.stats().partitions if found.partition == partition]
    sealed = partition.endswith("sealed")
    assert (stats.live, stats.num_samples, stats.sealed, stats.version) == (8, None, sealed, 4)
    assert (stats.budget_bytes, stats.when_full) == (1 << 18, "evict")
    assert stats.produced == {name: len(LATE) if name == "late" else 8 for name in _FIELDS}
    with pytest.raises(ValueError, match="values declared with enums"):
        client.set_tags(["s0"], partition, [{"kind": "c"}])
    if sealed:
        with pytest.raises(PartitionSealedError):
            client.put_samples(["new"], partition, {"dense": torch.zeros(1, 3, dtype=torch.bfloat16)})


def _offset_of(client: DataPlaneClient, name: str, partition: str, field: str) -> int:
    """Where the cell is in the arena."""
    (cell,) = [cell for cell in client.show_sample(name, partition).cells if cell.field == field]
    return cell.offset


def _check_rows(found: Any, rows: dict[str, list[Any]], places: Sequence[int]) -> None:
    for name in found.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        values, expected = found[name], [rows[name][place] for place in places]
        if name in ("object", "shared object"):
            assert repr(list(values)) == repr(expected), name
        else:
            assert same_rows(values, expected), name


def claimable(client: DataPlaneClient, partition: str, task: str) -> list[str]:
    """What the task can claim now, claimed for good."""
    return list(client.claim_meta(partition, task, ["dense"], 99, blocking=False).sample_ids)


def check_claims(client: DataPlaneClient, partition: str, held: Sequence[Held]) -> None:
    """Cursors and leases are as `fill` left them; they are used up."""
    critic, reward = (one.meta for one in held)
    assert claimable(client, partition, "policy") == IDS[2:]
    assert claimable(client, partition, "critic") == IDS[3:]
    assert claimable(client, partition, "reward") == IDS[4:]
    assert sorted([*reward.sample_ids, *_share(client, partition, 1).sample_ids]) == IDS[:4]
    with pytest.raises(ValueError, match="rank 0"):
        _share(client, partition, 0)
    assert client.ack(critic.subset([0])) == []
    with pytest.raises(StaleSampleError, match=critic.sample_ids[0]):
        client.ack(critic.subset([0]))
    client.extend(critic.subset([1]), 0.001)
    assert client.claim_meta(partition, "critic", [], 1).sample_ids == ["s2"]
    assert client.nack(reward) == []
    assert claimable(client, partition, "reward") == sorted(reward.sample_ids)


def check_restored_claims(client: DataPlaneClient, partition: str) -> None:
    """What was on lease is not claimed in a checkpoint."""
    assert claimable(client, partition, "policy") == IDS[2:]
    assert claimable(client, partition, "critic") == IDS[1:]
    assert claimable(client, partition, "reward") == IDS
