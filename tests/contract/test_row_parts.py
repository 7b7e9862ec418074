"""Parts of rows: what is read is what the same slices select of the whole rows, by every road and in every form."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataplane import (
    ContextParallel,
    DataPlaneClient,
    KVBatchMeta,
    SampleNotFoundError,
    Shared,
    StaleSampleError,
    read_columns,
    write_columns,
)
from dataplane.core.addresses import boot_id
from dataplane.errors import (
    ClaimTimeoutError,
    FieldNotProducedError,
    InvalidRequestError,
    RowsChangedError,
)

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


# --- Where samples are: `locate` gives their rows and hosts.


@pytest.fixture
def meta(client: DataPlaneClient) -> KVBatchMeta:
    client.register_partition("p", ["x", "empty"], None, ["train"])
    fields = {"x": [torch.arange(n) for n in (3, 1)], "empty": [torch.zeros(0), torch.ones(2)]}
    return client.put_samples(["a", "b"], "p", fields)


def test_samples_have_the_host_that_stores_their_bytes(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    found, hosts = client.locate(KVBatchMeta("p", None, ["b", "a"], ["x"]))
    assert hosts == [boot_id()] * 2
    assert client.locate(meta, ["empty"]).hosts == [None, boot_id()], "a sample without bytes is nowhere"
    assert found.sample_ids == ["b", "a"]
    client.clear_samples(["a"], "p")
    client.put_samples(["a"], "p", {"x": [torch.arange(2)]})
    with pytest.raises(StaleSampleError):
        client.get_data(found)


def test_nothing_stays_pinned(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    client.locate(meta)
    client.clear_samples(meta.sample_ids, "p")
    assert [unit.retired_bytes for unit in client.stats().units] == [0]


def test_what_is_missing_cannot_be_located(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    client.put_samples(["half"], "p", {"x": [torch.arange(1)]})
    with pytest.raises(FieldNotProducedError):
        client.locate(client.list_samples("p"), ["empty"])
    with pytest.raises(SampleNotFoundError):
        client.locate(KVBatchMeta("p", None, ["nobody"]), ["x"])


# --- A sample id may be used again; a sample never.


NAMES = ["a", "b", "c"]


def test_three_steps_with_late_write_backs(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    earlier = None
    for step in range(3):
        meta = client.put_samples(NAMES, partition, {"x": torch.full((3,), step)})
        if earlier is not None:
            with pytest.raises(StaleSampleError, match="'a'"):
                write_columns(client, earlier, {"logprobs": torch.full((3,), -1.0)})
            with pytest.raises(KeyError):
                read_columns(client, earlier, ["x"])
            with pytest.raises(KeyError, match="logprobs"):
                client.get_samples(NAMES, partition, ["logprobs"])
        write_columns(client, meta, {"logprobs": torch.full((3,), float(step))})
        assert client.get_data(meta, ["x", "logprobs"])["logprobs"].tolist() == [float(step)] * 3
        client.clear_samples(meta, partition)
        with pytest.raises(KeyError):
            write_columns(client, meta, {"logprobs": torch.zeros(3)})
        assert client.list_samples(partition).size == 0
        earlier = meta


def test_a_stale_meta_clears_nothing(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    old = client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    client.clear_samples(old, partition)
    client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    client.clear_samples(old, partition)
    assert client.list_samples(partition).sample_ids == NAMES


def test_handles_survive_transformations(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    meta = client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    turned = meta.subset([2, 0])
    client.clear_samples(["a"], partition)
    client.put_samples(["a"], partition, {"x": torch.tensor([9])})
    with pytest.raises(StaleSampleError, match="'a'"):
        client.get_data(turned, ["x"])
    assert client.get_data(turned.subset([0]), ["x"])["x"].tolist() == [2]
    fresh = client.claim_meta(partition, "train", ["x"], 3)
    assert client.get_data(fresh, ["x"])["x"].tolist() == [1, 2, 9]


def test_a_dropped_partition_makes_its_metas_stale(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    old = client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    client.clear_samples(None, partition)
    client.register_partition(partition, ["x"], None, ["train"])
    client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    with pytest.raises(StaleSampleError):
        client.get_data(old, ["x"])


def test_a_rewrite_is_seen_whole(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    meta = client.put_samples(NAMES, partition, {"x": [torch.zeros(4)] * 3})
    client.put_samples(["b"], partition, {"x": [torch.ones(7)]})
    rows = client.get_data(meta, ["x"])["x"].unbind()
    assert [row.tolist() for row in rows] == [[0.0] * 4, [1.0] * 7, [0.0] * 4]


# --- Rows that grow: samples whose generation is interrupted and resumed.


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows(client: DataPlaneClient, partition: str, names: list[str], field: str = "input_ids") -> list[list[int]]:
    return [row.tolist() for row in client.get_samples(names, partition, [field])[field].unbind()]


@pytest.fixture
def partition(client: DataPlaneClient, partition: str) -> str:
    client.register_partition(partition, ["input_ids", "token_mask", "seen"], None, ["train"])
    return partition


def test_pieces_stand_one_behind_the_other(client: DataPlaneClient, partition: str) -> None:
    first = client.put_samples(["a"], partition, {"input_ids": [ints(1, 2)], "seen": ints(0)}, mode="append")
    assert first.sequence_lengths == [2]
    more = {"input_ids": [ints(3), ints(7, 8)], "seen": ints(1, 1)}
    second = client.put_samples(["a", "b"], partition, more, tags=[{"v": 1}, {"v": 1}], mode="append")
    assert second.sequence_lengths == [3, 2]
    third = client.put_samples(second, partition, {"input_ids": [ints(), ints(9)]}, mode="append")
    assert third.sequence_lengths == [3, 3]
    assert rows(client, partition, ["a", "b"]) == [[1, 2, 3], [7, 8, 9]]
    assert client.get_samples(["a", "b"], partition, ["seen"])["seen"].tolist() == [1, 1]
    assert client.get_data(second, ["input_ids"])["input_ids"].unbind()[1].tolist() == [7, 8, 9]


def test_a_field_that_is_new_to_some_rows(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["a"], partition, {"input_ids": [ints(1)], "token_mask": [ints(1)]})
    client.put_samples(["b"], partition, {"input_ids": [ints(2)]})
    shared = Shared([ints(5, 6)], [0, 0])
    more = {"input_ids": shared, "token_mask": [ints(0, 0), ints(1)], "fresh": [ints(4), ints(4)]}
    client.put_samples(["a", "b"], partition, more, mode="append")
    assert rows(client, partition, ["a", "b"]) == [[1, 5, 6], [2, 5, 6]]
    assert rows(client, partition, ["b", "a"], "token_mask") == [[1], [1, 0, 0]]


def test_finished_is_a_tag_that_predicates_see_with_the_last_piece(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["a", "b"], partition, {"input_ids": [ints(1), ints(2)]}, tags=[{"finished": False}] * 2)
    done = [("finished", "==", True)]
    with pytest.raises(ClaimTimeoutError) as caught:
        client.claim_meta(partition, "train", ["input_ids"], 1, timeout_s=0.1, where=done)
    assert caught.value.filtered == {"finished == True": 2}
    client.put_samples(["b"], partition, {"input_ids": [ints(3)]}, tags=[{"finished": True}], mode="append")
    meta = client.claim_meta(partition, "train", ["input_ids"], 1, where=done)
    assert meta.sample_ids == ["b"]
    assert client.get_data(meta)["input_ids"].unbind()[0].tolist() == [2, 3]


def test_tags_alone_and_dense_fields_alone(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["a"], partition, {"input_ids": [ints(1)]}, mode="append")
    client.put_samples(["a"], partition, tags=[{"n": 2}], mode="append")
    client.put_samples(["a"], partition, {"seen": ints(4)}, mode="append")
    assert client.list_samples(partition).tags == [{"n": 2}]
    assert rows(client, partition, ["a"]) == [[1]]


def test_through_a_stale_meta_nothing_is_appended(client: DataPlaneClient, partition: str) -> None:
    meta = client.put_samples(["a"], partition, {"input_ids": [ints(1)]})
    client.clear_samples(["a"], partition)
    client.put_samples(["a"], partition, {"input_ids": [ints(5)]})
    with pytest.raises(StaleSampleError, match="'a'"):
        client.put_samples(meta, partition, {"input_ids": [ints(2)]}, mode="append")
    assert rows(client, partition, ["a"]) == [[5]]


def test_a_wrong_dtype_is_an_error_and_leaves_the_row(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["a"], partition, {"input_ids": [ints(1)]})
    with pytest.raises(ValueError, match="input_ids"):
        client.put_samples(["a"], partition, {"input_ids": [torch.ones(2)]}, mode="append")
    with pytest.raises(ValueError, match="append"):
        client.put_samples(["a"], partition, {"input_ids": [ints(1)]}, mode="appendix")
    assert rows(client, partition, ["a"]) == [[1]]


def test_appends_of_two_clients_are_whole_and_each_in_its_order(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    def work(who: int) -> None:
        mine = open_client()
        for turn in range(10):
            piece = [ints(who, turn, who), ints(who)]
            while True:
                try:
                    mine.put_samples(["a", "b"], partition, {"input_ids": piece}, mode="append")
                    break
                except RowsChangedError:
                    continue

    threads = [threading.Thread(target=work, args=(who,)) for who in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    long, short = rows(client, partition, ["a", "b"])
    pieces = [tuple(long[i : i + 3]) for i in range(0, len(long), 3)]
    assert all(piece[0] == piece[2] for piece in pieces)
    assert short == [piece[0] for piece in pieces]
    for who in (1, 2):
        assert [turn for one, turn, _ in pieces if one == who] == list(range(10))


def test_old_views_stay_as_they_were_and_no_bytes_are_lost(client: DataPlaneClient, partition: str) -> None:
    def live() -> Any:
        return sum(part.live_bytes for part in client.stats().partitions if part.partition == partition)

    client.put_samples(["a"], partition, {"input_ids": [torch.arange(1000)]})
    before = live()
    view = client.get_samples(["a"], partition, ["input_ids"], copy=False)["input_ids"].unbind()[0]
    for _ in range(5):
        client.put_samples(["a"], partition, {"input_ids": [torch.arange(1000)]}, mode="append")
    assert torch.equal(view, torch.arange(1000))
    assert rows(client, partition, ["a"]) == [torch.arange(1000).repeat(6).tolist()]
    assert live() <= 7 * before


def test_rows_of_no_bytes_grow_too(client: DataPlaneClient, partition: str) -> None:
    for count in (3, 0, 2):
        client.put_samples(["a"], partition, {"empty": [torch.zeros(count, 0)]}, mode="append")
    assert list(client.get_samples(["a"], partition, ["empty"])["empty"].unbind()[0].shape) == [5, 0]
