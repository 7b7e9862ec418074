"""Pickles of batches carry the rows of the batch, not the memory that it is a slice of."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane.data.batch import BatchedDataDict
from dataplane.data.jagged import jagged_from_values
from tests.data.columns_helpers import same_rows

ROWS = 64
WIDTH = 4096
ROW_BYTES = 4 * WIDTH
OVERHEAD_BYTES = 8192
"""More than a pickle of a few small tensors takes beside their elements."""

Batch = BatchedDataDict[Any]


def whole_batch() -> Batch:
    """A padded column of 1 MiB, and the same rows as a list and as a jagged column."""
    padded = torch.arange(ROWS * WIDTH, dtype=torch.int32).reshape(ROWS, WIDTH)
    jagged = jagged_from_values(padded.reshape(-1), torch.arange(ROWS + 1) * WIDTH)
    return BatchedDataDict({"padded": padded, "list": list(padded.unbind()), "jagged": jagged})


PARTS: dict[str, Callable[[Batch], Batch]] = {
    "slice": lambda batch: batch.slice(3, 5),
    "chunk": lambda batch: batch.chunk(1, ROWS // 2),
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
    batch: Batch = BatchedDataDict({"padded": torch.ones(ROWS, WIDTH)})
    batch.truncate_tensors(1, 8)
    pickled = pickle.dumps(batch)
    assert len(pickled) < ROWS * 8 * 4 + OVERHEAD_BYTES
    assert torch.equal(pickle.loads(pickled)["padded"], torch.ones(ROWS, 8))


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
    offsets = torch.arange(ROWS + 1)
    piece = memory[:ROWS]
    values_a = memory[100 : 100 + ROWS]
    values_b = memory[200 : 200 + ROWS]
    batch: Batch = BatchedDataDict(
        {
            "a": jagged_from_values(values_a, offsets),
            "b": jagged_from_values(values_b, offsets),
            "c": piece,
            "d": piece,
            "list": [piece] * ROWS,
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
    weighted = torch.ones(ROWS, 2).requires_grad_()
    batch: Batch = BatchedDataDict({"x": weighted, "y": torch.ones(ROWS)})
    again = pickle.loads(pickle.dumps(batch.slice(0, 2)))
    assert again["x"].requires_grad
    assert not again["y"].requires_grad
    assert torch.equal(again["x"], torch.ones(2, 2))


def test_a_sparse_column_is_pickled_unchanged() -> None:
    batch: Batch = BatchedDataDict({"x": torch.eye(4).to_sparse()})
    again = pickle.loads(pickle.dumps(batch))["x"]
    assert again.is_sparse
    assert torch.equal(again.to_dense(), torch.eye(4))
