""""""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane.core.types import DTYPE_BYTES
from dataplane.data.batch import BatchedDataDict, materialize
from dataplane.data.jagged import is_jagged, jagged_from_values
from dataplane.data.tensor_memory import DTYPE_NAMES, TORCH_DTYPES, tensor_from_numpy, writable_alias
from tests.data.columns_helpers import nested_of, same_rows

ROWS = [torch.arange(3), torch.zeros(0, dtype=torch.int64), torch.arange(5), torch.arange(1)]


def objects(*values: Any) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def batch_of() -> BatchedDataDict[Any]:
    return BatchedDataDict(
        {
            "ids": torch.arange(12).reshape(4, 3),
            "jagged": nested_of(ROWS),
            "list": ["a", "b", "c", "d"],
            "objects": objects({"x": 1}, [1, 2], None, "s"),
            "numbers": np.arange(4),
        }
    )


def rows_of(batch: BatchedDataDict[Any]) -> list[tuple[Any, ...]]:
    return [
        (
            batch["ids"][i].tolist(),
            batch["jagged"].unbind()[i].tolist(),
            batch["list"][i],
            batch["objects"][i],
            int(batch["numbers"][i]),
        )
        for i in range(batch.size)
    ]


def test_rows_stay_together_through_every_method() -> None:
    batch, rows = batch_of(), rows_of(batch_of())
    assert rows_of(batch.slice(1, 3)) == rows[1:3]
    assert rows_of(batch.chunk(1, 2)) == rows[2:]
    assert rows_of(batch.select_indices([3, 0, 3])) == [rows[3], rows[0], rows[3]]
    assert rows_of(batch.select_indices(torch.tensor([2]))) == [rows[2]]
    assert rows_of(batch.select_indices(np.array([], dtype=np.int64))) == []
    assert rows_of(batch.repeat_interleave(2)) == [row for row in rows for _ in range(2)]
    assert rows_of(batch.get_batch(1, 3)) == rows[3:]
    assert rows_of(batch.get_batch(0, 3)) == rows[:3]
    order = [2, 0, 3, 1]
    shuffled = batch.select_indices(order)
    shuffled.reorder_data(order)
    assert rows_of(shuffled) == rows
    assert rows_of(BatchedDataDict.from_batches([batch.slice(0, 1), batch.slice(1, 4)])) == rows
    for part in (batch.slice(0, 1), batch.select_indices([0])):
        assert type(part) is BatchedDataDict
        assert part["objects"].dtype == object
        assert is_jagged(part["jagged"])


def test_object_columns_survive_every_method() -> None:
    rows = [{"x": [1, {"y": (2,)}]}, np.arange(2), None, torch.ones(2)]
    batch = BatchedDataDict({"objects": objects(*rows), "numbers": torch.arange(4), "list": list(rows)})
    packed, _ = batch.shard_by_batch_size(2, sequence_packing_args={**PACKED, "input_key": "objects"})
    dynamic, _ = batch.shard_by_batch_size(2, dynamic_batching_args={**DYNAMIC, "input_key": "objects"})
    made = [
        *batch.shard_by_batch_size(2),
        *packed,
        *dynamic,
        *(part for shard in packed for part in shard.make_microbatch_iterator_for_packable_sequences()),
        *(part for shard in dynamic for part in shard.make_microbatch_iterator_with_dynamic_shapes()),
        *batch.make_microbatch_iterator(2),
        *(batch.chunk(1, 2), batch.slice(1, 3), batch.slice(2, 2), batch.get_batch(1, 3)),
        *(batch.select_indices([3, 1, 1]), batch.select_indices([]), batch.repeat_interleave(2)),
        BatchedDataDict.from_batches([batch.slice(0, 1), batch.slice(1, 1), batch.slice(1, 4)]),
        BatchedDataDict.from_batches([batch]),
        batch.to("cpu"),
        pickle.loads(pickle.dumps(batch)),
        copy.copy(batch),
    ]
    shuffled = batch.select_indices([2, 0, 3, 1])
    shuffled.reorder_data([1, 3, 0, 2])
    shuffled.truncate_tensors(1, 1)
    for part in (*made, shuffled):
        assert part["objects"].dtype == object
        assert part["objects"].shape == (part.size,)
        assert type(part["list"]) is list
        for number, value, listed in zip(part["numbers"].tolist(), part["objects"], part["list"], strict=True):
            for found in (value, listed):
                assert type(found) is type(rows[number])
                assert repr(found) == repr(rows[number])
    assert batch.get_dict()["objects"] is batch["objects"]


def test_a_slice_of_a_dense_column_is_a_view() -> None:
    batch = batch_of()
    batch.slice(1, 2)["ids"][:] = -1
    assert batch["ids"][1].tolist() == [-1, -1, -1]


def test_size_and_dict() -> None:
    batch = batch_of()
    assert batch.size == 4
    assert batch.get_dict() == dict(batch.items())
    assert type(batch.get_dict()) is dict
    assert BatchedDataDict().size == 0
    with pytest.raises(ValueError, match="'b' has 3 rows, but column 'a' has 2"):
        _ = BatchedDataDict({"a": torch.zeros(2), "b": [1, 2, 3]}).size
    with pytest.raises(ValueError, match="'a': a value of type float has no rows"):
        _ = BatchedDataDict({"a": 1.0}).size


def test_columns_are_replaced_one_after_another() -> None:
    batch: BatchedDataDict[Any] = BatchedDataDict({"a": torch.arange(4), "b": list("abcd")})
    batch["a"] = batch["a"][::2]
    with pytest.raises(ValueError, match="'b' has 4 rows, but column 'a' has 2"):
        batch.select_indices([0])
    batch["b"] = batch["b"][::2]
    assert batch.select_indices([1])["b"] == ["c"]


def test_rows_that_are_not_there() -> None:
    batch = batch_of()
    for start, end in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="slice"):
            batch.slice(start, end)
    with pytest.raises(ValueError, match="4 rows cannot be split evenly into 3"):
        batch.chunk(0, 3)
    with pytest.raises(ValueError, match="rank=2: expected a number from 0 to 1"):
        batch.chunk(2, 2)
    with pytest.raises(ValueError, match="index 4 is outside a batch of 4"):
        batch.select_indices([4])
    with pytest.raises(ValueError, match="index -1"):
        batch.select_indices([-1])
    with pytest.raises(ValueError, match="integers"):
        batch.select_indices([True, False])
    for order in ([0, 1, 2], [0, 1, 2, 2]):
        with pytest.raises(ValueError, match="order must contain"):
            batch.reorder_data(order)
    for index, size in ((2, 3), (-1, 3), (0, 0), (0, None)):
        with pytest.raises(ValueError, match="batch"):
            batch.get_batch(index, size)


def test_get_batch_of_a_shard_with_packing() -> None:
    shard = batch_of()
    shard.elem_counts_per_gb = [1, 3]
    shard.micro_batch_indices = [[[0, 1]], [[0, 2], [2, 3]]]
    shard.micro_batch_lengths = [[3], [8, 4]]
    second = shard.get_batch(1)
    assert rows_of(second) == rows_of(batch_of())[1:]
    assert second.micro_batch_indices == [[[0, 2], [2, 3]]]
    assert second.micro_batch_lengths == [[8, 4]]
    assert second.elem_counts_per_gb == [3]
    assert rows_of(shard.get_batch(1, 2)) == rows_of(second), "the shard knows its own batches"


# --- shards and micro-batches -------------------------------------------------------------------------------------

PACKED = {
    "algorithm": "first_fit_decreasing",
    "input_key": "ids",
    "input_lengths_key": "numbers",
    "sequence_length_pad_multiple": 1,
    "max_tokens_per_microbatch": 3,
}
DYNAMIC = {
    "input_key": "ids",
    "input_lengths_key": "numbers",
    "sequence_length_round": 1,
    "max_tokens_per_microbatch": 3,
}


def test_plain_shards() -> None:
    batch, rows = batch_of(), rows_of(batch_of())
    shards = batch.shard_by_batch_size(2)
    assert isinstance(shards, list)
    assert [rows_of(shard) for shard in shards] == [rows[:2], rows[2:]]
    shards = batch.shard_by_batch_size(2, batch_size=2)
    assert [rows_of(shard) for shard in shards] == [[rows[0], rows[2]], [rows[1], rows[3]]]
    shards[0]["ids"][:] = -1
    assert rows_of(batch) == rows, "shards are copies"
    assert all(shard.micro_batch_indices is shard.elem_counts_per_gb is None for shard in shards)


@pytest.mark.parametrize(
    ("shards", "sizes"), [(1, [4]), (2, [2, 2]), (3, [2, 2, 0]), (4, [1, 1, 1, 1]), (6, [1, 1, 1, 1, 0, 0])]
)
def test_uneven_shards(shards: int, sizes: list[int]) -> None:
    batch = batch_of()
    parts = batch.shard_by_batch_size(shards, allow_uneven_shards=True)
    assert [part.size for part in parts] == sizes
    assert [row for part in parts for row in rows_of(part)] == rows_of(batch)


def test_packed_shards() -> None:
    batch, rows = batch_of(), rows_of(batch_of())
    shards, order = batch.shard_by_batch_size(2, sequence_packing_args=PACKED)
    assert [rows_of(shard) for shard in shards] == [[rows[3], rows[0]], [rows[2], rows[1]]]
    assert [shard.micro_batch_indices for shard in shards] == [[[[0, 2]]], [[[0, 2]]]]
    assert [shard.micro_batch_lengths for shard in shards] == [[[3]], [[3]]]
    assert [shard.elem_counts_per_gb for shard in shards] == [[2], [2]]
    assert order == [3, 0, 2, 1]
    together = BatchedDataDict.from_batches(shards)
    together.reorder_data(order)
    assert rows_of(together) == rows


def test_packing_needs_no_even_number_of_rows() -> None:
    batch = batch_of().slice(1, 4)
    with pytest.raises(ValueError, match="3 rows cannot be split evenly over 2"):
        batch.shard_by_batch_size(2, sequence_packing_args=PACKED)
    shards, order = batch.shard_by_batch_size(2, allow_uneven_shards=True, sequence_packing_args=PACKED)
    assert [shard["numbers"].tolist() for shard in shards] == [[3], [2, 1]]
    assert order == [2, 1, 0]


def test_shards_that_cannot_be() -> None:
    batch = batch_of()
    with pytest.raises(ValueError, match="cannot be combined with batch_size"):
        batch.shard_by_batch_size(2, batch_size=2, allow_uneven_shards=True)
    with pytest.raises(ValueError, match="4 rows cannot be split evenly over 3"):
        batch.shard_by_batch_size(3, allow_uneven_shards=True, dynamic_batching_args=DYNAMIC)
    for key, error, told in (
        ("nowhere", KeyError, "micro-batches need the column .*nowhere"),
        ("ids", ValueError, r"'ids': expected 4 integers, one per row; got int64 of shape \[4, 3\]"),
        ("jagged", ValueError, "'jagged': expected the lengths"),
        ("objects", ValueError, "'objects': expected 4 integers"),
    ):
        with pytest.raises(error, match=told):
            batch.shard_by_batch_size(2, sequence_packing_args={**PACKED, "input_lengths_key": key})


@pytest.mark.parametrize("wrong", [[0], 0, "x"])
def test_pad_values_that_are_no_mapping_are_refused_by_name(wrong: Any) -> None:
    batch: Any = {"x": torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)}
    with pytest.raises(ValueError, match=r"pad_value_dict=.*: expected a mapping of"):
        materialize(batch, pad_value_dict=wrong)
    with pytest.raises(ValueError, match=f"td: expected .*, got {type(wrong).__name__}"):
        materialize(wrong)


def test_micro_batches_of_a_size() -> None:
    batch, rows = batch_of(), rows_of(batch_of())
    assert [rows_of(part) for part in batch.make_microbatch_iterator(2)] == [rows[:2], rows[2:]]
    expected = {3: "a number by which the 4 rows", 0: "an integer of 1 or more"}
    for size, told in expected.items():
        with pytest.raises(ValueError, match=f"microbatch_size={size}: expected {told}"):
            batch.make_microbatch_iterator(size)


def test_micro_batches_with_dynamic_shapes() -> None:
    batch, rows = batch_of(), rows_of(batch_of())
    (shard,), order = batch.shard_by_batch_size(1, batch_size=2, dynamic_batching_args=DYNAMIC)
    assert order == [0, 1, 2, 3]
    assert shard.micro_batch_lengths == [[1], [2, 3]]
    second = shard.get_batch(1, batch_size=2)
    assert second.get_microbatch_iterator_dynamic_shapes_len() == 2
    parts = list(second.make_microbatch_iterator_with_dynamic_shapes())
    assert [part["ids"].tolist() for part in parts] == [[rows[2][0][:2]], [rows[3][0]]]
    assert [part["objects"].tolist() for part in parts] == [[None], ["s"]]
    assert [part["jagged"].unbind()[0].tolist() for part in parts] == [rows[2][1], rows[3][1]]
    (whole,) = shard.get_batch(0).make_microbatch_iterator_with_dynamic_shapes(sequence_dim=2)
    assert whole["ids"].shape == (2, 3)


def test_micro_batches_of_packable_sequences() -> None:
    batch, rows = batch_of(), rows_of(batch_of())
    (shard,), _ = batch.shard_by_batch_size(1, sequence_packing_args=PACKED)
    assert shard.get_microbatch_iterator_for_packable_sequences_len() == (2, 3)
    parts = [rows_of(part) for part in shard.make_microbatch_iterator_for_packable_sequences()]
    assert parts == [[rows[3], rows[0]], [rows[2], rows[1]]]


def test_micro_batches_are_those_of_one_global_batch() -> None:
    (shard,), _ = batch_of().shard_by_batch_size(1, batch_size=2, sequence_packing_args=PACKED)
    for batch, told in ((batch_of(), "has no micro-batches"), (shard, "2 global batches: select one with get_batch")):
        for method in (
            batch.make_microbatch_iterator_with_dynamic_shapes,
            batch.get_microbatch_iterator_dynamic_shapes_len,
            batch.make_microbatch_iterator_for_packable_sequences,
            batch.get_microbatch_iterator_for_packable_sequences_len,
        ):
            with pytest.raises(ValueError, match=told):
                method()


def test_from_batches_pads_token_columns() -> None:
    wide, narrow = {"ids": torch.ones(1, 4), "n": torch.ones(1)}, {"ids": torch.ones(2, 2), "n": torch.ones(2)}
    joined = BatchedDataDict.from_batches([wide, narrow], pad_value_dict={"ids": 7})
    assert joined["ids"].tolist() == [[1, 1, 1, 1], [1, 1, 7, 7], [1, 1, 7, 7]]
    assert joined["n"].tolist() == [1, 1, 1]
    masks = BatchedDataDict.from_batches([{"m": torch.ones(1, 1, dtype=torch.bool)}, {"m": torch.ones(1, 2).bool()}])
    assert masks["m"].tolist() == [[True, False], [True, True]]


def test_from_batches_that_do_not_match() -> None:
    one = {"a": torch.zeros(1, 2)}
    with pytest.raises(KeyError, match="'b'"):
        BatchedDataDict.from_batches([one, {"a": torch.zeros(1, 2), "b": torch.zeros(1)}])
    with pytest.raises(KeyError, match="'a'"):
        BatchedDataDict.from_batches([one, {}, {"c": torch.zeros(1)}])
    for other in (torch.zeros(1, 2, dtype=torch.int8), torch.zeros(1, 2, 1), torch.zeros(1), [0], nested_of([ROWS[0]])):
        with pytest.raises(ValueError, match="'a'"):
            BatchedDataDict.from_batches([one, {"a": other}])
    with pytest.raises(ValueError, match="column 'a': the pad value must be a number, got str"):
        BatchedDataDict.from_batches([one, {"a": torch.zeros(1, 3)}], {"a": "x"})
    assert BatchedDataDict.from_batches([{}, one]).size == 1
    assert BatchedDataDict.from_batches([]).size == 0


def test_truncate_tensors() -> None:
    batch = batch_of()
    batch.truncate_tensors(1, 2)
    assert batch["ids"].shape == (4, 2)
    assert same_rows(batch["jagged"], ROWS)
    batch.truncate_tensors(1, 5)
    assert batch["ids"].shape == (4, 2)


def test_to_moves_tensors_in_place_and_keeps_offsets_shared() -> None:
    jagged = nested_of(ROWS)
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {"a": jagged, "b": jagged * 2, "dense": torch.zeros(4), "list": [torch.zeros(1)] * 4, "text": ["x"] * 4}
    )
    assert batch.to("meta") is batch
    assert batch["dense"].device.type == batch["a"].device.type == batch["list"][0].device.type == "meta"
    assert batch["a"].offsets() is batch["b"].offsets()
    assert batch["text"] == ["x"] * 4


# --- materialize --------------------------------------------------------------------------------------------------


def td_of() -> TensorDict:
    return TensorDict(
        {
            "ids": nested_of(ROWS),
            "fixed": torch.ones(4, 2),
            "reward": torch.ones(4),
            "text": NonTensorStack("a", {"b": 1}, None, [1]),
            "ragged": NonTensorStack(torch.zeros(1, 2), torch.zeros(2, 1), torch.zeros(0), torch.zeros(())),
        },
        batch_size=[4],
    )


def test_materialize_pads_jagged_fields_only() -> None:
    td = td_of()
    batch = materialize(td, pad_value_dict={"ids": 9}, pad_to_seqlen=6)
    assert list(batch) == list(td.keys())
    assert batch["ids"].shape == (4, 6)
    assert batch["ids"][3].tolist() == [0, 9, 9, 9, 9, 9]
    assert batch["fixed"].shape == (4, 2)
    assert batch["reward"].shape == (4,)
    assert batch["text"].dtype == object
    assert batch["text"].tolist() == ["a", {"b": 1}, None, [1]]
    assert [list(row.shape) for row in batch["ragged"]] == [[1, 2], [2, 1], [0], []]
    assert materialize(td)["ids"].shape == (4, 5), "the longest row"


PATCHES = [torch.ones(patches, 2) for patches in (12, 0, 3, 1)]
"""More of one image than the sample has tokens."""


def images_of() -> TensorDict:
    """ROWS are per token; scores are by their lengths."""
    columns = {"input_ids": nested_of(ROWS), "scores": nested_of(ROWS), "patches": nested_of(PATCHES)}
    return TensorDict(columns, batch_size=[4])


@pytest.mark.parametrize("width", [0, 6, 16])
def test_columns_that_are_not_per_token_are_padded_to_their_own_longest_row(width: int) -> None:
    batch = materialize(images_of(), pad_value_dict={"patches": 7}, pad_to_seqlen=width)
    assert batch["input_ids"].shape == batch["scores"].shape == (4, width or 5)
    assert batch["patches"].shape == (4, 12, 2)
    assert batch["patches"][2, 3:].eq(7).all()
    alone = TensorDict({"patches": nested_of(PATCHES)}, batch_size=[4])
    told = materialize(alone, pad_to_seqlen=width, sequence_lengths=[len(row) for row in ROWS])
    assert told["patches"].shape == (4, 12, 2)
    assert materialize(alone, pad_to_seqlen=16)["patches"].shape == (4, 16, 2), "nothing tells the tokens"


def test_columns_that_are_not_per_token_are_not_cut_to_a_micro_batch() -> None:
    batch = materialize(images_of(), pad_to_seqlen=12)
    assert batch.not_per_token == {"patches"}
    for part in (batch.slice(0, 2), batch.select_indices([1, 0]), BatchedDataDict.from_batches([batch, batch])):
        part.truncate_tensors(1, 5)
        assert part["scores"].shape[1] == 5
        assert part["patches"].shape[1] == 12


def test_materialize_jagged_leaves_them() -> None:
    td = td_of()
    batch = materialize(td, layout="jagged")
    assert is_jagged(batch["ids"])
    assert same_rows(batch["ids"], ROWS)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_materialize_pads_nested_columns_of_any_layout() -> None:
    strided = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    batch = materialize({"x": strided}, pad_value_dict={"x": 7})
    assert batch["x"].shape == (2, 4, 3)
    assert batch["x"][0, 2:].eq(7).all()
    assert materialize({"x": strided}, layout="jagged")["x"] is strided


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_materialize_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"'ids'.*cannot pad to length 4.*longest row has 5"):
        materialize(td_of(), pad_to_seqlen=4)
    with pytest.raises(ValueError, match=r"'ids'.*cannot be represented"):
        materialize(td_of(), pad_value_dict={"ids": 0.5})
    with pytest.raises(ValueError, match=r"'ids': the pad value must be a number, got a Tensor of shape \[2\]"):
        materialize(td_of(), pad_value_dict={"ids": torch.tensor([7, 8])})
    with pytest.raises(ValueError, match=r"'ids': the pad value must be a number, got a ndarray of shape \[2\]"):
        materialize(td_of(), pad_value_dict={"ids": np.array([7, 8])})
    with pytest.raises(ValueError, match="sequence_lengths: got 1 lengths for 3 rows"):
        materialize({"x": torch.zeros(3, 2)}, sequence_lengths=[2])
    with pytest.raises(ValueError, match="'x': rows to pad may differ in their first dimension only"):
        materialize({"x": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 5)])})
    with pytest.raises(ValueError, match="layout"):
        materialize(td_of(), layout="packed")  # type: ignore[arg-type]


def test_materialize_takes_object_arrays_of_a_tensordict() -> None:
    td = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    td["o"] = objects("a", 1)
    assert materialize(td)["o"].tolist() == ["a", 1]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_nested_tensors_that_are_not_jagged_are_selected_as_a_list(layout: torch.layout) -> None:
    rows = [torch.full((4, n), float(n)) for n in (7, 9, 2)]
    batch: BatchedDataDict[Any] = BatchedDataDict({"x": torch.nested.nested_tensor(rows, layout=layout)})
    for changed, numbers in (
        (batch.select_indices([2, 0]), [2, 0]),
        (batch.slice(1, 3), [1, 2]),
        (batch.chunk(1, 3), [1]),
        (batch.repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (BatchedDataDict.from_batches([batch, batch]), [0, 1, 2, 0, 1, 2]),
    ):
        assert isinstance(changed["x"], list)
        assert same_rows(changed["x"], [rows[number] for number in numbers])


# --- Pickles of batches carry the rows of the batch, not the memory that it is a slice of.


PICKLED = 64
WIDTH = 4096
ROW_BYTES = 4 * WIDTH
OVERHEAD_BYTES = 8192
"""More than a pickle of a few small tensors takes beside their elements."""

Batch = BatchedDataDict[Any]


def whole_batch() -> Batch:
    """A padded column of 1 MiB, and the same rows as a list and as a jagged column."""
    padded = torch.arange(PICKLED * WIDTH, dtype=torch.int32).reshape(PICKLED, WIDTH)
    jagged = jagged_from_values(padded.reshape(-1), torch.arange(PICKLED + 1) * WIDTH)
    return BatchedDataDict({"padded": padded, "list": list(padded.unbind()), "jagged": jagged})


PARTS: dict[str, Callable[[Batch], Batch]] = {
    "slice": lambda batch: batch.slice(3, 5),
    "chunk": lambda batch: batch.chunk(1, PICKLED // 2),
    "get_batch": lambda batch: batch.get_batch(2, 2),
    "micro-batch": lambda batch: next(batch.make_microbatch_iterator(2)),
    "select_indices": lambda batch: batch.select_indices([7, 9]),
}


@pytest.mark.parametrize("part_of", PARTS.values(), ids=PARTS)
def test_a_pickled_part_carries_its_own_rows_only(part_of: Callable[[Batch], Batch]) -> None:
    part = part_of(whole_batch())
    pickled = pickle.dumps(part)
    assert len(pickled) < len(part) * 2 * ROW_BYTES + OVERHEAD_BYTES  # two rows in each column
    again = pickle.loads(pickled)
    assert torch.equal(again["padded"], part["padded"])
    assert torch.equal(torch.stack(again["list"]), part["padded"])
    assert torch.equal(again["jagged"].values(), part["padded"].reshape(-1))


def test_truncated_rows_are_pickled_as_they_are() -> None:
    batch: Batch = BatchedDataDict({"padded": torch.ones(PICKLED, WIDTH)})
    batch.truncate_tensors(1, 8)
    pickled = pickle.dumps(batch)
    assert len(pickled) < PICKLED * 8 * 4 + OVERHEAD_BYTES
    assert torch.equal(pickle.loads(pickled)["padded"], torch.ones(PICKLED, 8))


def test_a_jagged_column_over_a_part_of_a_larger_memory_is_pickled_without_the_rest() -> None:
    memory = torch.arange(10 * WIDTH, dtype=torch.int32)
    values = memory[WIDTH : 2 * WIDTH]
    batch: Batch = BatchedDataDict({"x": jagged_from_values(values, torch.tensor([0, 5, WIDTH]))})
    pickled = pickle.dumps(batch)
    assert len(pickled) < ROW_BYTES + OVERHEAD_BYTES
    assert same_rows(pickle.loads(pickled)["x"], list(batch["x"].unbind()))


def test_a_jagged_column_with_holes_keeps_its_rows() -> None:
    memory = torch.arange(10 * WIDTH, dtype=torch.int32)
    lengths = torch.tensor([2, 3])
    column = jagged_from_values(memory[:WIDTH], torch.tensor([0, 5, WIDTH]), lengths=lengths)
    pickled = pickle.dumps(BatchedDataDict({"x": column}))
    assert len(pickled) < ROW_BYTES + OVERHEAD_BYTES
    assert same_rows(pickle.loads(pickled)["x"], [memory[:2], memory[5:8]])


def test_columns_that_share_a_tensor_share_it_after_pickling() -> None:
    memory = torch.arange(1000.0)
    offsets = torch.arange(PICKLED + 1)
    piece = memory[:PICKLED]
    values_a = memory[100 : 100 + PICKLED]
    values_b = memory[200 : 200 + PICKLED]
    batch: Batch = BatchedDataDict(
        {
            "a": jagged_from_values(values_a, offsets),
            "b": jagged_from_values(values_b, offsets),
            "c": piece,
            "d": piece,
            "list": [piece] * PICKLED,
        }
    )
    batch.micro_batch_lengths = [[4]]
    for again in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert torch.equal((again["a"] + again["b"]).values(), values_a + values_b)
        assert again["c"] is again["d"]
        assert all(row is again["c"] for row in again["list"])
        assert again.micro_batch_lengths == [[4]]
    assert batch["c"] is piece  # the pickled batch itself is unchanged


def test_a_copied_view_requires_a_gradient_as_before() -> None:
    weighted = torch.ones(PICKLED, 2).requires_grad_()
    batch: Batch = BatchedDataDict({"x": weighted, "y": torch.ones(PICKLED)})
    again = pickle.loads(pickle.dumps(batch.slice(0, 2)))
    assert again["x"].requires_grad
    assert not again["y"].requires_grad
    assert torch.equal(again["x"], torch.ones(2, 2))


def test_a_sparse_column_is_pickled_unchanged() -> None:
    batch: Batch = BatchedDataDict({"x": torch.eye(4).to_sparse()})
    again = pickle.loads(pickle.dumps(batch))["x"]
    assert again.is_sparse
    assert torch.equal(again.to_dense(), torch.eye(4))


# --- tensor memory


def test_dtypes_by_name() -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BYTES) == set(DTYPE_NAMES.values())
    for name, dtype in TORCH_DTYPES.items():
        assert str(dtype) == f"torch.{name}"
        assert dtype.itemsize == DTYPE_BYTES[name]


def test_read_only_memory_without_a_warning_and_kept_alive() -> None:
    array = np.frombuffer(bytes(range(8)), dtype=np.uint8)
    assert tensor_from_numpy(array).tolist() == list(range(8))
    alias = writable_alias(array)
    assert alias.__array_interface__["data"] == (array.__array_interface__["data"][0], False)
    assert tensor_from_numpy(np.arange(3, dtype=">i8")).tolist() == [0, 1, 2]
