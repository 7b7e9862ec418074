"""Parts of rows: what is read is what the same slices select of the whole rows, by every road and in every form."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataplane import ContextParallel, DataPlaneClient
from dataplane.errors import InvalidRequestError

pytestmark = pytest.mark.integration

FIELDS = {
    "input_ids": (),
    "routed_experts": (7, 3),
    "pooled": (5, 2),  # dense
    "turns": (),  # jagged, but not one element for each token
}
DTYPES = (torch.int64, torch.bfloat16, torch.bool, torch.int8, torch.float64)


def values(chance: random.Random, lengths: Sequence[int]) -> dict[str, Any]:
    def some(*shape: int) -> Tensor:
        return torch.randint(0, 100, shape, dtype=torch.int64).to(dtype)

    fields: dict[str, Any] = {}
    for name, inner in FIELDS.items():
        dtype = torch.int64 if name == "input_ids" else chance.choice(DTYPES)
        if name == "pooled":
            fields[name] = some(len(lengths), *inner)
        elif name == "turns":
            fields[name] = [some(length % 3 + 1) for length in lengths]
        else:
            fields[name] = [some(length, *inner) for length in lengths]
    return fields


def random_slices(chance: random.Random, inner: Sequence[int]) -> tuple[slice, ...]:
    def one(size: int) -> slice:
        return slice(*(chance.choice([None, *range(-size, size + 1)]) for _ in range(2)), chance.choice([None, 1, 2]))

    return tuple(one(size) for size in inner[: chance.randrange(len(inner) + 1)])


def random_tokens(chance: random.Random, lengths: Sequence[int]) -> Any:
    size = chance.randrange(1, 5)
    zigzag = chance.random() < 0.5
    chunks = 2 * size if zigzag else size
    longest = max(lengths, default=0)
    pad_to = chance.choice([0, -(-max(longest, 1) // chunks) * chunks])
    ranges = [tuple(sorted(chance.randrange(longest + 2) for _ in range(2))) for _ in lengths]
    return chance.choice(
        [
            None,
            (2, 5),
            (0, 0),
            ranges,
            ContextParallel(rank=chance.randrange(size), size=size, zigzag=zigzag, pad_to=pad_to),
        ]
    )


def chunks_of(row: Tensor, cp: ContextParallel) -> Tensor:
    """The rank's chunks as Megatron cuts them: of the padded row."""
    count = cp.chunks
    padded = cp.pad_to or -(-len(row) // count) * count
    pieces = [row[number * (padded // count) : (number + 1) * (padded // count)] for number in range(count)]
    numbers = [cp.rank, count - 1 - cp.rank] if cp.zigzag else [cp.rank]
    return torch.cat([pieces[number] for number in numbers])


def part_of(name: str, rows: Sequence[Tensor], tokens: Any, inner: dict[str, Any]) -> list[Tensor]:
    slices = inner.get(name, ())
    if name == "pooled":
        return [row[slices] for row in rows]
    cut = list(rows)
    if name != "turns":
        if isinstance(tokens, ContextParallel):
            cut = [chunks_of(row, tokens) for row in rows]
        elif tokens is not None:
            ranges = [tokens] * len(rows) if isinstance(tokens, tuple) else tokens
            cut = [row[start:stop] for row, (start, stop) in zip(rows, ranges, strict=True)]
    return [row[(slice(None), *slices)] for row in cut]


def rows_of(value: Any) -> list[Tensor]:
    return list(value.unbind()) if isinstance(value, Tensor) else list(value)


@pytest.mark.parametrize("seed", range(12))
def test_a_part_is_what_the_slices_select(client: DataPlaneClient, partition: str, seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [chance.choice([0, 1, 2, 7, 30]) for _ in range(chance.choice([1, 3, 60]))]
    if not any(lengths):
        lengths[0] = 3
    fields = values(chance, lengths)
    client.register_partition(partition, [*FIELDS], None, [])
    meta = client.put_samples([f"s{n}" for n in range(len(lengths))], partition, fields)
    order = chance.sample(range(len(lengths)), len(lengths))
    lengths = [lengths[place] for place in order]
    meta = dataclasses.replace(meta.subset(order), sequence_lengths=lengths)
    whole = {name: [rows_of(column)[place] for place in order] for name, column in fields.items()}
    for _ in range(6):
        tokens = random_tokens(chance, lengths)
        inner = {name: random_slices(chance, FIELDS[name]) for name in ("routed_experts", "pooled")}
        expected = {name: part_of(name, rows, tokens, inner) for name, rows in whole.items()}
        wanted = chance.sample([*FIELDS], chance.randrange(1, len(FIELDS) + 1))
        chosen = {name: each for name, each in inner.items() if name in wanted}
        parts: dict[str, Any] = {"tokens": tokens, "inner": chosen}
        for copy in (True, False):
            got = client.get_samples(meta, partition, wanted, copy=copy, **parts)
            for name in wanted:
                assert all(map(torch.equal, rows_of(got[name]), expected[name])), (name, parts, copy)
        jagged = client.get_batch(meta, wanted, layout="jagged", **parts)
        padded = client.get_batch(meta, wanted, pad_value_dict={"input_ids": 9}, **parts)
        for name in wanted:
            assert all(map(torch.equal, rows_of(jagged[name]), expected[name])), (name, parts)
            if name == "pooled":
                assert torch.equal(padded[name], torch.stack(expected[name]))
                continue
            width = max(len(row) for row in expected[name])
            if isinstance(tokens, ContextParallel) and name != "turns":
                width = max(width, tokens.pad_to // tokens.size)
            assert padded[name].shape[1] == width
            for row, part in zip(padded[name], expected[name], strict=True):
                assert torch.equal(row[: len(part)], part), (name, parts)
                assert (row[len(part) :] == (9 if name == "input_ids" else 0)).all()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"tokens": 5}, "one .start, stop. for each sample"),
        ({"tokens": (1.0, 2.0)}, "one .start, stop. for each sample"),
        ({"tokens": [(0, 1, 2)]}, "one .start, stop. for each sample"),
        ({"tokens": [(0, 1), (2,)]}, "one .start, stop. for each sample"),
        ({"tokens": [(0, 1)] * 3}, "3 ranges for 2 samples"),
        ({"tokens": (-1, 2)}, "0 <= start <= stop"),
        ({"tokens": [(0, 1), (3, 2)]}, r"\[3, 2\]: expected 0 <= start <= stop"),
        ({"tokens": ContextParallel(rank=0, size=1, pad_to=2)}, "sample 1 has 5 tokens, more than pad_to"),
        ({"inner": {"other": slice(1)}}, r"\['other'\], which are not among the fields"),
        ({"inner": {"x": 3}}, "expected a slice"),
        ({"inner": [slice(1)]}, "expected a mapping of field names to slices"),
        ({"inner": {"x": slice(0.5)}}, r"inner\['x'\].*float"),
        ({"inner": {"x": slice(None, None, -1)}}, "steps must be positive"),
        ({"inner": {"x": [slice(1), slice(1)]}}, "2 slices, but the field is jagged int64 inner shape .4."),
        ({"inner": {"label": slice(1)}}, "1 slices, but the field is object"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_words(
    client: DataPlaneClient, partition: str, parts: dict[str, Any], why: str
) -> None:
    client.register_partition(partition, ["x", "label"], None, [])
    meta = client.put_samples(
        ["a", "b"], partition, {"x": [torch.zeros(3, 4).long(), torch.zeros(5, 4).long()], "label": ["a", "b"]}
    )
    with pytest.raises(InvalidRequestError, match=why):
        client.get_samples(meta, partition, ["x", "label"], **parts)
    with pytest.raises(InvalidRequestError, match=why):
        client.get_batch(meta, ["x", "label"], **parts)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rank": 2, "size": 2}, "0 <= rank < size"),
        ({"rank": -1, "size": 2}, "0 <= rank < size"),
        ({"rank": 0, "size": 2, "pad_to": 6}, "multiple of the 4 chunks"),
        ({"rank": 0, "size": 2, "pad_to": -4}, "multiple of the 4 chunks"),
        ({"rank": 0.5, "size": 2}, "rank=0.5: expected an integer"),
        ({"rank": 0, "size": 2, "zigzag": "no"}, "zigzag='no': expected True or False"),
        ({"rank": 0, "size": "2"}, "size='2': expected an integer"),
        ({"rank": 0, "size": 1, "pad_to": 1 << 62}, "limited to"),
    ],
)
def test_a_rank_outside_its_group_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        ContextParallel(**settings)


@pytest.mark.parametrize("step", [4, 5, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_a_step_beyond_the_size_selects_one_element(client: DataPlaneClient, partition: str, step: int) -> None:
    client.register_partition(partition, ["x", "image"], None, [])
    fields = {"x": [torch.arange(12).view(3, 4), torch.arange(4).view(1, 4)], "image": torch.arange(16).view(2, 4, 2)}
    meta = client.put_samples(["a", "b"], partition, fields)
    inner = {"x": slice(1, None, step), "image": slice(None, None, step)}
    rows = client.get_samples(meta, partition, ["x", "image"], inner=inner)
    assert [row.tolist() for row in rows["x"].unbind()] == [[[1], [5], [9]], [[1]]]
    assert rows["image"].tolist() == [[[0, 1]], [[8, 9]]]
    assert client.get_batch(meta, ["image"], inner={"image": inner["image"]})["image"].tolist() == [[[0, 1]], [[8, 9]]]


@pytest.mark.parametrize("width", [-1, 1.5, "8", None, 1 << 70])
@pytest.mark.parametrize("parts", [{}, {"tokens": (0, 2)}, {"tokens": ContextParallel(rank=0, size=2, pad_to=8)}])
def test_a_width_that_is_none_is_refused(
    client: DataPlaneClient, partition: str, width: Any, parts: dict[str, Any]
) -> None:
    client.register_partition(partition, ["x", "reward"], None, [])
    meta = client.put_samples(["a"], partition, {"x": [torch.arange(3)], "reward": torch.zeros(1)})
    for fields in (["x"], ["reward"]):
        with pytest.raises(InvalidRequestError, match=r"pad_to_seqlen=.*: expected an integer from 0 to"):
            client.get_batch(meta, fields, pad_to_seqlen=width, **parts)
    assert client.get_batch(meta, ["x"], pad_to_seqlen=np.int64(4), **parts)["x"].shape[1] == 4  # type: ignore[arg-type]


def test_integers_of_numpy_and_huge_ranges(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, [])
    meta = client.put_samples(["a"], partition, {"x": [torch.arange(2000)]})
    cp = ContextParallel(rank=np.uint8(3), size=np.uint8(200))  # type: ignore[arg-type]
    assert client.get_batch(meta, ["x"], tokens=cp)["x"].tolist() == [[*range(15, 20), *range(1980, 1985)]]
    assert client.get_batch(meta, ["x"], tokens=(1998, 10**30))["x"].tolist() == [[1998, 1999]]
    with pytest.raises(InvalidRequestError, match="expected 0 <= start <= stop"):
        client.get_batch(meta, ["x"], tokens=(-(10**30), 10**30))
    for stop in (1 << 62, np.array([5, (1 << 64) - 1], np.uint64)[1]):
        ranges: Any = np.array([[1998, stop]], np.uint64)
        assert client.get_batch(meta, ["x"], tokens=ranges)["x"].tolist() == [[1998, 1999]]


def test_fields_as_long_as_the_ids_are_cut_when_the_lengths_of_the_meta_are_old(
    client: DataPlaneClient, partition: str
) -> None:
    client.register_partition(partition, ["input_ids", "hidden", "turns"], None, [])

    def values(*lengths: int) -> dict[str, Any]:
        shapes = {"input_ids": (), "hidden": (3,), "turns": (2,)}
        return {name: [torch.ones(n + (name == "turns"), *shape) for n in lengths] for name, shape in shapes.items()}

    client.put_samples(["a", "b"], partition, values(8, 5), tags=[{"input_lengths": 8}, {"input_lengths": 5}])
    client.put_samples(["a", "b"], partition, values(2, 2), mode="append")
    meta = client.list_samples(partition)
    assert meta.sequence_lengths == [8, 5]
    rows = client.get_samples(meta, partition, ["input_ids", "hidden", "turns"], tokens=(2, 6))
    assert [[len(row) for row in rows[name].unbind()] for name in ("input_ids", "hidden")] == [[4, 4]] * 2
    assert [len(row) for row in rows["turns"].unbind()] == [12, 9]
    batch = client.get_batch(meta, ["input_ids", "hidden"], tokens=ContextParallel(rank=0, size=2, pad_to=16))
    assert (batch["input_ids"].shape, batch["hidden"].shape) == ((2, 8), (2, 8, 3))
