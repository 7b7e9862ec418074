"""`BatchedDataDict`, the batch type of training code, and `materialize`, which converts a TensorDict to one."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from dataplane.core.arguments import whole_number
from dataplane.core.schema import Layout, round_up
from dataplane.data.jagged import (
    checked_pads,
    checked_width,
    is_jagged,
    jagged_from_values,
    not_per_token,
    offsets_of,
    pad_nested,
    pad_scalar,
    row_lengths,
    select_rows,
)
from dataplane.data.object_codec import object_array
from dataplane.data.packing import plan_shards
from dataplane.data.tensor_memory import compacted, once_each
from dataplane.errors import InvalidRequestError

DictT = TypeVar("DictT")


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Columns by name, all with N rows: tensors `[N, ...]`, nested (jagged) tensors, lists, numpy arrays (including
    object arrays). Methods that select rows return those of a nested tensor with another layout, or another ragged
    dimension than the first one of the rows, as a list.

    Sharding with packing sets three attributes of each shard; otherwise they are None. Each has one entry per global
    batch: `micro_batch_indices` the [first row, end row] of each micro-batch, `micro_batch_lengths` the length of each
    micro-batch (see `schema`), `elem_counts_per_gb` the number of rows of this shard. `not_per_token` names padded
    columns whose dimension 1 is not the token axis (see `materialize`). Methods that change rows return a new batch,
    over the same memory where possible, unless their docstring says that they work in place. Columns can be added and
    replaced one by one, also with a different number of rows; while row counts differ, `size` and all row operations
    raise ValueError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None
        self.not_per_token: frozenset[str] = frozenset()

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, Any] | None = None
    ) -> BatchedDataDict[Any]:
        """Concatenate the rows of `batches`, in order.

        Dense tensors that differ in dimension 1 are right-padded to the widest, with `pad_value_dict[name]` or 0.
        Jagged tensors, lists and arrays are concatenated. Batches without rows are skipped. Raises KeyError for a key
        that only some batches have, ValueError for kinds, dtypes or other dimensions that differ.
        """
        pads = checked_pads(pad_value_dict)
        # Without any rows, the first batch determines the columns.
        filled = [batch for batch in batches if _common_row_count(batch)] or list(batches[:1])
        names = list(filled[0]) if filled else []
        for number, batch in enumerate(filled):
            not_in_both = set(names) ^ set(batch)
            if not_in_both:
                raise KeyError(
                    f"all batches must have the same columns, but column {min(not_in_both)!r} is only in one of the "
                    f"batches 0 and {number} (counted without batches that have no rows)"
                )
        joined = cls({name: _concatenate(name, [batch[name] for batch in filled], pads.get(name, 0)) for name in names})
        # (A plain mapping does not name such columns.)
        joined.not_per_token = frozenset().union(*(getattr(batch, "not_per_token", ()) for batch in filled))
        return joined

    def __missing__(self, name: object) -> NoReturn:
        """Raise the KeyError for a column that this batch does not have."""
        columns = ", ".join(self.data) or "none"
        remedy = "Name it where the batch is read (`fields=`, `train_fields=`, `select_fields=`)"
        raise KeyError(f"this batch has no column {name!r}; it has {columns}. {remedy}")

    @property
    def size(self) -> int:
        """Number of rows; 0 if the batch has no columns."""
        return _common_row_count(self.data)

    def get_dict(self) -> dict[str, Any]:
        """Return the columns as a plain dict, without copying the columns."""
        return dict(self.data)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle. Views of less than half of their storage become copies: a
        pickled view carries its whole storage, for a slice the memory of all rows."""
        compact = once_each(compacted)
        columns = {name: _map_tensors(column, compact) for name, column in self.data.items()}
        return {**vars(self), "data": columns}

    # --- rows ---

    def slice(self, start: int, end: int) -> BatchedDataDict[Any]:
        """Return rows [start, end), as views where the column allows. ValueError unless 0 <= start <= end <= N."""
        start = whole_number("slice: start", start, 0)
        end = whole_number("slice: end", end, 0)
        if not start <= end <= self.size:
            raise InvalidRequestError(
                f"slice({start}, {end}): expected 0 <= start <= end <= {self.size}, the number of rows"
            )
        return self._map_columns(lambda column: _slice_column(column, start, end))

    def chunk(self, rank: int, chunks: int) -> BatchedDataDict[Any]:
        """Return part `rank` of `chunks` equal contiguous parts. ValueError if `chunks` does not divide N."""
        size = self.size
        if size % whole_number("chunks", chunks, 1):
            raise InvalidRequestError(f"{size} rows cannot be split evenly into {chunks} chunks")
        if not 0 <= rank < chunks:
            raise InvalidRequestError(
                f"rank={rank}: expected a number from 0 to {chunks - 1}, because there are {chunks} chunks"
            )
        return self.slice(rank * (size // chunks), (rank + 1) * (size // chunks))

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> BatchedDataDict[Any]:
        """Divide the rows into batches of `batch_size` (the last one may be shorter) and return batch `batch_idx`. On a
        shard with `elem_counts_per_gb`, return global batch `batch_idx` instead, with the attributes of its
        micro-batches, and ignore `batch_size`."""
        counts = self.elem_counts_per_gb  # rows of each batch
        if counts is None:
            batch_size = whole_number("batch_size", batch_size, 1)
            counts = [min(batch_size, self.size - start) for start in range(0, self.size, batch_size)]
        if not 0 <= batch_idx < len(counts):
            raise InvalidRequestError(
                f"batch_idx={batch_idx} is out of range: there are {len(counts)} batches, counted from 0"
            )
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        if self.elem_counts_per_gb is not None:
            batch.elem_counts_per_gb = [counts[batch_idx]]
        return batch

    def select_indices(self, indices: Sequence[int] | Tensor | np.ndarray[Any, Any]) -> BatchedDataDict[Any]:
        """Return a copy of the rows at `indices` (each in [0, N), any order, repeats allowed)."""
        positions = _check_indices(indices, self.size)
        return self._map_columns(lambda column: _select_rows(column, positions))

    def reorder_data(self, order: Sequence[int] | Tensor | np.ndarray[Any, Any]) -> None:
        """Move row i to position `order[i]`, in place. This reverts a reordering that moved row `order[i]` to position
        i. Raises ValueError if `order` is not a permutation of the rows."""
        targets = _check_indices(order, self.size)
        if not torch.equal(targets.sort().values, torch.arange(self.size)):
            raise InvalidRequestError(
                f"order must contain each of the row numbers 0 to {self.size - 1} once, got {len(targets)} numbers "
                f"that begin with {targets[:5].tolist()}"
            )
        sources = targets.argsort()  # the row that moves to each position
        self.data = {name: _select_rows(column, sources) for name, column in self.data.items()}

    def repeat_interleave(self, num_repeats: int) -> BatchedDataDict[Any]:
        """Repeat every row `num_repeats` times, adjacent to each other. Objects are repeated by reference."""
        repeats = whole_number("num_repeats", num_repeats, 0)
        return self.select_indices(torch.arange(self.size).repeat_interleave(repeats))

    # --- shards and micro-batches ---

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: Mapping[str, Any] | None = None,
        sequence_packing_args: Mapping[str, Any] | None = None,
    ) -> list[BatchedDataDict[Any]] | tuple[list[BatchedDataDict[Any]], list[int]]:
        """Copy the rows into `shards` shards, one per data-parallel rank. Each shard gets a part of every global batch
        of `batch_size` rows (default: all rows), in batch order.

        Without packing, the parts are equal, contiguous and in order; with `allow_uneven_shards` (and no `batch_size`)
        the last ones may be shorter. With `sequence_packing_args` or `dynamic_batching_args` (see
        `packing.plan_shards`; "input_lengths_key" names the column of lengths) every shard gets the same number of
        micro-batches, in its attributes, and the result is (shards, order). Row i of the concatenated shards is row
        `order[i]` of this batch, so `reorder_data(order)` restores the order of their results. The column that
        "input_key" names may be narrower than the length of a micro-batch, because that length is rounded up.

        Raises KeyError without the column of lengths, ValueError for numbers that do not divide and for a row over the
        token budget.
        """
        plan = plan_shards(
            self.size,
            self._length_column,
            shards=shards,
            batch_size=batch_size,
            allow_uneven_shards=allow_uneven_shards,
            sequence_packing_args=sequence_packing_args,
            dynamic_batching_args=dynamic_batching_args,
        )
        batches = []
        for shard in plan:
            batch = self.select_indices(shard.rows)
            batch.micro_batch_indices = shard.micro_batch_indices
            batch.micro_batch_lengths = shard.micro_batch_lengths
            batch.elem_counts_per_gb = shard.elem_counts_per_gb
            batches.append(batch)
        if sequence_packing_args is None and dynamic_batching_args is None:
            return batches
        return batches, [row for shard in plan for row in shard.rows.tolist()]

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[BatchedDataDict[Any]]:
        """Iterate over micro-batches of `microbatch_size` rows, in order. Raises ValueError if N is not a multiple."""
        size = self.size
        if size % whole_number("microbatch_size", microbatch_size, 1):
            expected = f"a number by which the {size} rows of this batch can be divided"
            raise InvalidRequestError(f"microbatch_size={microbatch_size}: expected {expected}")
        return (self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[BatchedDataDict[Any]]:
        """Iterate over the micro-batches that dynamic batching created for this single global batch (see `get_batch`).
        Dense tensors with dimension `sequence_dim` are truncated there to the length of the micro-batch (see
        `truncate_tensors`). Raises ValueError if the batch has no micro-batches."""
        indices, lengths = self._current_micro_batches()

        def cut(start: int, end: int, length: int) -> BatchedDataDict[Any]:
            batch = self.slice(start, end)
            batch.truncate_tensors(sequence_dim, length)
            return batch

        return (cut(start, end, length) for (start, end), length in zip(indices, lengths, strict=True))

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of micro-batches that `make_microbatch_iterator_with_dynamic_shapes` yields."""
        return len(self._current_micro_batches()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[BatchedDataDict[Any]]:
        """Iterate over the micro-batches that packing created for this single global batch (see `get_batch`): each
        holds the unmodified sequences of one bin. Raises ValueError if the batch has no micro-batches."""
        indices, _ = self._current_micro_batches()
        return (self.slice(start, end) for start, end in indices)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return (number of micro-batches of `make_microbatch_iterator_for_packable_sequences`, largest number of
        tokens in one)."""
        indices, lengths = self._current_micro_batches()
        return len(indices), max(lengths)

    def _current_micro_batches(self) -> tuple[list[list[int]], list[int]]:
        """Return ([first row, end row] of each micro-batch of this single global batch, length of each). Raises
        ValueError without micro-batches, or with those of several global batches."""
        indices = self.micro_batch_indices
        lengths = self.micro_batch_lengths
        if indices is None or lengths is None:
            raise InvalidRequestError(
                "this batch has no micro-batches: create them with the packing arguments of shard_by_batch_size"
            )
        if len(indices) != 1:
            raise InvalidRequestError(
                f"the micro-batches belong to {len(indices)} global batches: select one with get_batch first"
            )
        return indices[0], lengths[0]

    def _length_column(self, key: str) -> Any:
        """Return the lengths of the rows, which are in the column `key`. KeyError without that column,
        InvalidRequestError if it is jagged."""
        if key not in self.data:
            columns = ", ".join(self.data) or "none"
            raise KeyError(f"micro-batches need the column {key!r} of lengths; there is {columns}")
        column = self.data[key]
        if is_jagged(column):
            raise InvalidRequestError(f"column {key!r}: expected the lengths of the rows, got a jagged column")
        return column.cpu().numpy() if isinstance(column, Tensor) else column

    # --- columns ---

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate every dense tensor that has dimension `dim` to `truncated_len` there, in place, as views. For
        dimension 1, skip the columns of `not_per_token`."""
        for name, column in self.data.items():
            if dim == 1 and name in self.not_per_token:
                continue
            if isinstance(column, Tensor) and not column.is_nested and column.dim() > dim:
                self.data[name] = column.narrow(dim, 0, min(truncated_len, column.shape[dim]))

    def to(self, device: torch.device | str) -> BatchedDataDict[DictT]:
        """Move every tensor, including tensors in list columns, to `device`, in place. Return the batch itself. Jagged
        columns that share offsets still share them afterwards."""
        move = once_each(lambda tensor: tensor.to(device))
        self.data = {name: _map_tensors(column, move) for name, column in self.data.items()}
        return self

    def _map_columns(self, change: Callable[[Any], Any]) -> BatchedDataDict[Any]:
        """Return a batch with the result of `change` for every column. ValueError if row counts differ."""
        _common_row_count(self.data)  # for its check only
        changed = type(self)({name: change(column) for name, column in self.data.items()})
        changed.not_per_token = self.not_per_token
        return changed


def materialize(
    td: TensorDictBase | Mapping[str, Any],
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
    *,
    sequence_lengths: Sequence[int] | None = None,
    pad_to_multiple: int = 1,
) -> BatchedDataDict[Any]:
    """Return a batch with the columns of `td`.

    layout "padded": jagged columns become `[N, S, *inner]`, right-padded with `pad_value_dict[name]` or 0. S is the
    longest row of the column. For per-token columns, S is `pad_to_seqlen` if that is more than 0, else the longest row
    rounded up to `pad_to_multiple`. A column is per-token if `schema.TOKEN_ALIGNED_FIELDS` names it, or if its row
    lengths equal `sequence_lengths` `[N]` or those of a column that the schema names. Without either reference, all
    columns are per-token. The other jagged columns, such as images, are listed in `not_per_token` of
    the batch. Nested columns of another layout are padded like jagged ones. layout "jagged": nested columns stay
    unchanged. All other columns are passed through without padding; a NonTensorStack becomes a list if all its rows
    are tensors (ragged columns), else an object array.

    Raises ValueError, naming the field, if `pad_to_seqlen` is below the longest row of a per-token column, a dtype
    cannot hold its pad value, or rows to pad differ in more than their length. Raises ValueError if the number of
    `sequence_lengths` differs from the number of rows.
    """
    if layout not in ("padded", "jagged"):
        raise InvalidRequestError(f"layout={layout!r}: expected 'padded' or 'jagged'")
    pad_to_seqlen = checked_width(pad_to_seqlen)
    pads = checked_pads(pad_value_dict)
    batch: BatchedDataDict[Any] = BatchedDataDict()
    if not hasattr(td, "items"):
        got = type(td).__name__
        raise InvalidRequestError(f"td: expected a TensorDict or a mapping, got {got}")
    columns: dict[str, Any] = dict(td.items())
    if layout == "padded":
        columns = {name: _as_jagged(name, value) for name, value in columns.items()}
        jagged_lengths = {name: row_lengths(value).tolist() for name, value in columns.items() if is_jagged(value)}
        batch.not_per_token = not_per_token(jagged_lengths, sequence_lengths)
    for name, value in columns.items():
        if layout == "padded" and is_jagged(value):
            try:
                longest = max(jagged_lengths[name], default=0)
                # Width 0: the longest row of the column.
                width = 0 if name in batch.not_per_token else pad_to_seqlen or round_up(longest, pad_to_multiple)
                value = pad_nested(value, pads.get(name, 0), width=width)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"field {name!r}: {error}") from error
        batch[name] = _plain_column(value)
    if sequence_lengths is not None and batch and len(sequence_lengths) != batch.size:
        raise InvalidRequestError(
            f"sequence_lengths: got {len(sequence_lengths)} lengths for {batch.size} rows; pass one per row"
        )
    return batch


def _as_jagged(name: str, value: Any) -> Any:
    """Copy a nested tensor of another layout into a jagged one; return any other value unchanged. InvalidRequestError,
    naming the field, if its rows differ in more than their length."""
    if not isinstance(value, Tensor) or is_jagged(value) or not value.is_nested:
        return value
    rows = value.unbind()
    if len({row.shape[1:] for row in rows}) > 1:
        shapes = ", ".join(str(list(row.shape)) for row in rows[:5])
        raise InvalidRequestError(
            f"field {name!r}: rows to pad may differ in their first dimension only, got shapes {shapes}"
        )
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64, device=value.device)
    return jagged_from_values(torch.cat(rows) if rows else value.new_empty(0), offsets_of(lengths))


def _plain_column(value: Any) -> Any:
    """Return a TensorDict's value as a column of a batch. NonTensorData with an array becomes that array. A
    NonTensorStack becomes a list if all its rows are tensors, else an object array. Other values stay unchanged."""
    if isinstance(value, NonTensorData) and isinstance(value.data, np.ndarray):  # an array of all rows
        return value.data
    if not isinstance(value, NonTensorStack):
        return value
    rows = list(value.tolist())
    if rows and all(isinstance(row, Tensor) for row in rows):
        return rows
    return object_array(rows)


# --- one column ---------------------------------------------------------------------------------------------------


def _row_count(column: Any) -> int:
    return int(column.size(0)) if isinstance(column, Tensor) else len(column)


def _common_row_count(columns: Mapping[str, Any]) -> int:
    """Return the number of rows of all columns (0 without columns). ValueError if they differ, or for a value that has
    no rows, such as a number."""
    first: str | None = None
    rows = 0
    for name, column in columns.items():
        try:
            length = _row_count(column)
        except (TypeError, IndexError) as error:
            raise InvalidRequestError(
                f"column {name!r}: a value of type {type(column).__name__} has no rows; pass N rows"
            ) from error
        if first is None:
            first = name
            rows = length
        elif length != rows:
            raise InvalidRequestError(
                f"column {name!r} has {length} rows, but column {first!r} has {rows}; all columns need the same number"
            )
    return rows


def _slice_column(column: Any, start: int, end: int) -> Any:
    return select_rows(column, torch.arange(start, end)) if is_jagged(column) else _as_rows(column)[start:end]


def _as_rows(column: Any) -> Any:
    """Return the rows of a nested tensor that is not jagged as a list, because torch cannot select rows of one. Return
    other columns unchanged."""
    is_nested = isinstance(column, Tensor) and column.is_nested
    return list(column.unbind()) if is_nested and not is_jagged(column) else column


def _select_rows(column: Any, indices: Tensor) -> Any:
    """Copy the rows at `indices`, in that order, into a column of the same type."""
    if is_jagged(column):
        return select_rows(column, indices)
    column = _as_rows(column)
    if isinstance(column, Tensor):
        return column[indices.to(column.device)]
    if isinstance(column, np.ndarray):
        return column[indices.numpy()]
    return type(column)(column[index] for index in indices.tolist())


def _check_indices(indices: Sequence[int] | Tensor | np.ndarray[Any, Any], size: int) -> Tensor:
    """Return the indices as an int64 CPU tensor `[M]`. InvalidRequestError unless all are in [0, size)."""
    checked = torch.as_tensor(indices).cpu()
    if not checked.numel():  # an empty list would become a float tensor
        return torch.zeros(0, dtype=torch.int64)
    if checked.dim() != 1 or checked.dtype.is_floating_point or checked.dtype == torch.bool:
        raise InvalidRequestError(
            f"indices must be a one-dimensional list of integers, got {checked.dtype} of shape {list(checked.shape)}"
        )
    checked = checked.to(torch.int64)
    low = int(checked.min())
    high = int(checked.max())
    if low < 0 or high >= size:
        raise InvalidRequestError(
            f"index {low if low < 0 else high} is outside a batch of {size} rows: indices count from 0, negative ones "
            "are not supported"
        )
    return checked


def _map_tensors(column: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the column with `change` applied to its tensors; a jagged one itself if all stay."""
    if is_jagged(column):
        lengths = column.lengths()
        tensors = [column.values(), column.offsets()] + ([] if lengths is None else [lengths])
        changed = [change(tensor) for tensor in tensors]
        if all(new is old for new, old in zip(changed, tensors, strict=True)):
            return column
        return jagged_from_values(*changed[:2], lengths=None if lengths is None else changed[2])
    if isinstance(column, Tensor):
        return change(column)
    if isinstance(column, list):
        return [change(item) if isinstance(item, Tensor) else item for item in column]
    return column


def _concatenate(name: str, columns: list[Any], pad_value: Any) -> Any:
    """Concatenate the column `name` of several batches. InvalidRequestError for columns of different kinds."""
    columns = [_as_rows(column) for column in columns]
    if all(is_jagged(column) for column in columns):
        return _concatenate_jagged(columns)
    if all(isinstance(column, Tensor) and not column.is_nested for column in columns):
        return _concatenate_dense(name, columns, pad_value)
    if all(isinstance(column, np.ndarray) for column in columns):
        return np.concatenate(columns)
    if all(isinstance(column, list | tuple) for column in columns):
        return [row for column in columns for row in column]
    kinds = sorted({type(column).__name__ for column in columns})
    raise InvalidRequestError(
        f"column {name!r} has different types in the batches: {', '.join(kinds)}; convert them to one type"
    )


def _concatenate_jagged(columns: list[Tensor]) -> Tensor:
    without_holes = [select_rows(column, torch.arange(column.size(0))) for column in columns]
    lengths = torch.cat([row_lengths(column) for column in without_holes])
    return jagged_from_values(torch.cat([column.values() for column in without_holes]), offsets_of(lengths))


def _concatenate_dense(name: str, columns: list[Tensor], pad_value: Any) -> Tensor:
    """Concatenate dense tensors. Those that are narrower in dimension 1 are right-padded to the widest, with
    `pad_value`. InvalidRequestError if dtypes or other dimensions differ."""
    if len({(column.dtype, column.shape[2:], column.dim()) for column in columns}) > 1:
        shapes = [f"{str(column.dtype).removeprefix('torch.')} {list(column.shape)}" for column in columns[:5]]
        raise InvalidRequestError(
            f"column {name!r} cannot be concatenated: the batches must agree in dtype, number of dimensions and all "
            f"sizes after the second, got {'; '.join(shapes)}"
        )
    if columns[0].dim() < 2 or len({column.shape[1] for column in columns}) == 1:
        return torch.cat(columns)
    rows = sum(len(column) for column in columns)
    width = max(column.shape[1] for column in columns)
    out = columns[0].new_empty((rows, width, *columns[0].shape[2:]))
    try:
        pad = pad_scalar(pad_value, out.dtype)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"column {name!r}: {error}") from error
    start = 0
    for column in columns:
        end = start + len(column)
        out[start:end, : column.shape[1]] = column
        out[start:end, column.shape[1] :].fill_(pad)
        start = end
    return out
