"""Splits samples over data-parallel ranks, given only their number and lengths. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from numbers import Real
from typing import Any

import numpy as np

from dataplane.core.arguments import whole_number
from dataplane.core.schema import ELEM_COUNTS_PER_GB, INPUT_LENGTHS, MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS
from dataplane.core.types import ceil_div
from dataplane.data.meta import KVBatchMeta, require_meta
from dataplane.data.packing.balance import pack_balanced
from dataplane.data.packing.bins import Int64s
from dataplane.data.packing.packers import PackingAlgorithm, SequencePacker, get_packer
from dataplane.errors import InvalidRequestError

MAX_TOKENS = "max_tokens_per_microbatch"
ORDERS = ("packer", "largest_first")


@dataclass(frozen=True)
class Shard:
    """The share of one data-parallel rank: its `rows` `[M]`, as indices into all rows, in the order of the rank. The
    other attributes divide them into global batches and micro-batches (see `schema`); None for a plain split."""

    rows: Int64s
    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
    dynamic_batching_args: Mapping[str, Any] | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Return one meta per data-parallel rank, and the permutation that restores the original order of their rows.

    Plain split: each rank gets an equal contiguous part of every global batch of `batch_size` samples (default: the
    whole meta). With `sequence_packing_args` or `dynamic_batching_args` (see `plan_shards`; keys that name columns are
    ignored) each rank gets the same number of micro-batches, cut by `meta.sequence_lengths` and described in
    `extra_info`: "micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb". Tags, lengths, row handles and
    other `extra_info` are kept. The split equals that of `BatchedDataDict.shard_by_batch_size`, row for row.

    The second value is None if the concatenated ranks are already in the order of the meta. Otherwise it is the inverse
    permutation: row `inverse[i]` of the concatenated ranks is row i of `meta`.

    Raises ValueError, naming both numbers, for an uneven split; ValueError for a sample over the budget, by id, and for
    a meta without required lengths.
    """
    plan = plan_shards(
        require_meta(meta).size,
        lambda _: _lengths_of(meta),  # a meta has only these lengths, whatever the key
        shards=whole_number("dp_world", dp_world, 1),
        batch_size=batch_size,
        sequence_packing_args=sequence_packing_args,
        dynamic_batching_args=dynamic_batching_args,
        name=lambda row: f"sample {meta.sample_ids[row]!r}",
    )
    metas = []
    for shard in plan:
        shard_meta = meta.subset(shard.rows)
        for key, value in (
            (MICRO_BATCH_INDICES, shard.micro_batch_indices),
            (MICRO_BATCH_LENGTHS, shard.micro_batch_lengths),
            (ELEM_COUNTS_PER_GB, shard.elem_counts_per_gb),
        ):
            if value is not None:
                shard_meta.extra_info[key] = value
        metas.append(shard_meta)
    return metas, inverse_permutation(np.concatenate([shard.rows for shard in plan]))


def plan_shards(
    size: int,
    lengths_of: Callable[[str], Sequence[int] | Int64s],
    *,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    sequence_packing_args: Mapping[str, Any] | None = None,
    dynamic_batching_args: Mapping[str, Any] | None = None,
    name: Callable[[int], str] = "row {}".format,
) -> list[Shard]:
    """Assign `size` rows to `shards`, one global batch of `batch_size` rows (default: all) at a time.

    lengths_of: returns the tokens of each row, `[size]`, given the "input_lengths_key" of the arguments (default
    `schema.INPUT_LENGTHS`); called only if micro-batches are cut. name: names a row in error messages.
    allow_uneven_shards: without `batch_size`, allow a number of rows that does not divide. Plain shards then have equal
    lengths except for the last ones; packed shards have any length.

    sequence_packing_args: "max_tokens_per_microbatch", "algorithm" (a `PackingAlgorithm` or its name, default
    "modified_first_fit_decreasing"), "sequence_length_pad_multiple" (default 1) to which each length is rounded up,
    "microbatch_order": "packer" (default), or "largest_first" in each global batch of a rank. A micro-batch is one bin;
    its length is the tokens in it. Bins are dealt so that tokens per rank balance. If whole bins cannot balance, single
    rows move to bins with space ("concatenative": bin boundaries move). "budget_name": name of the budget in errors
    (default "max_tokens_per_microbatch").

    dynamic_batching_args: "max_tokens_per_microbatch", "budget_name", "sequence_length_round" (default 1). The rows of
    a global batch are dealt round-robin from the shortest to the longest. A micro-batch holds as many rows as fit the
    budget at its length: the rounded longest row of any rank. All ranks have the same micro-batch sizes and lengths.

    Raises ValueError for numbers that do not divide, both kinds of arguments at once, arguments that are missing or out
    of range, and rows over the budget.
    """
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise InvalidRequestError("sequence_packing_args and dynamic_batching_args exclude each other: pass only one")
    if allow_uneven_shards and batch_size is not None:
        raise InvalidRequestError("allow_uneven_shards cannot be combined with batch_size: omit one of them")
    # Dynamic batching cuts all shards alike, so it needs shards of the same size.
    even = not allow_uneven_shards or dynamic_batching_args is not None
    per_batch = _rows_per_batch(size, shards, batch_size, even=even)
    if sequence_packing_args is not None:
        arguments = _Arguments("sequence_packing_args", sequence_packing_args)
        budget = arguments.budget()
        multiple = arguments.count("sequence_length_pad_multiple", 1)
        order = arguments.get("microbatch_order", "packer")
        if order not in ORDERS:
            raise InvalidRequestError(f"microbatch_order must be one of {', '.join(ORDERS)}, got {order!r}")
        algorithm = arguments.get("algorithm", PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING)
        packer = get_packer(algorithm, budget, min_bin_count=shards, bin_count_multiple=shards)
        _, tokens = _lengths_and_tokens(arguments, lengths_of, size, budget, multiple, name)
        return _split_packed(tokens, packer, shards, per_batch, largest_first=order == "largest_first")
    if dynamic_batching_args is not None:
        arguments = _Arguments("dynamic_batching_args", dynamic_batching_args)
        budget = arguments.budget()
        multiple = arguments.count("sequence_length_round", 1)
        lengths, tokens = _lengths_and_tokens(arguments, lengths_of, size, budget, multiple, name)
        return _split_dynamic(lengths, tokens, budget, shards, per_batch)
    return _split_plain(size, shards, per_batch)


def inverse_permutation(order: Int64s) -> list[int] | None:
    """Return `inverse` with `order[inverse[i]] == i`, or None if `order` is the identity."""
    if np.array_equal(order, np.arange(len(order))):
        return None
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.arange(len(order))
    positions: list[int] = inverse.tolist()
    return positions


# --- arguments ----------------------------------------------------------------------------------------------------


class _Arguments:
    """The settings of one argument, by name, checked on access. argument: its name for errors, "sequence_packing_args"
    or "dynamic_batching_args"."""

    def __init__(self, argument: str, settings: Mapping[str, Any]) -> None:
        self.argument = argument
        self._settings = settings

    def get(self, key: str, default: Any = None) -> Any:
        """Return the setting, or its default if it is missing or None. Raises ValueError if there is no default."""
        value = self._settings.get(key)
        if value is None and default is None:
            raise InvalidRequestError(f"{self.argument} lacks the required key {key!r}; add it")
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """Return the setting as an integer. Raises ValueError unless it is 1 or more."""
        return self._check_count(key, self.get(key, default))

    def budget(self) -> int:
        """Return the maximum number of tokens per micro-batch."""
        return self._check_count(self.budget_name, self.get(MAX_TOKENS))

    @property
    def budget_name(self) -> str:
        """The name of the budget in error messages."""
        return str(self.get("budget_name", MAX_TOKENS))

    def _check_count(self, name: str, value: Any) -> int:
        wrong = isinstance(value, bool) or not isinstance(value, Real) or value % 1 or value < 1
        if wrong:
            raise InvalidRequestError(f"{self.argument}[{name!r}]: expected an integer of 1 or more, got {value!r}")
        return int(value)


def _rows_per_batch(size: int, shards: int, batch_size: int | None, *, even: bool) -> int:
    """Return the rows per global batch (without `batch_size`: all of them, perhaps 0). even: every shard must get the
    same number of rows. InvalidRequestError for numbers that are out of range or do not divide."""
    whole_number("shards", shards, 1)
    per_batch = size if batch_size is None else whole_number("batch_size", batch_size, min(size, 1))
    if per_batch and size % per_batch:
        raise InvalidRequestError(
            f"{size} rows are not a multiple of the global batch size {per_batch}: pass a multiple of "
            f"{per_batch} rows, or another batch size"
        )
    if even and per_batch % shards:
        what = "rows"
        remedy = f"a multiple of {shards} rows"
        if batch_size is not None:
            what = "rows of a global batch"
            remedy = f"a global batch size that is a multiple of {shards}"
        raise InvalidRequestError(f"{per_batch} {what} cannot be split evenly over {shards} shards: pass {remedy}")
    return per_batch


def _lengths_of(meta: KVBatchMeta) -> list[int]:
    """Return the sequence lengths of a meta. InvalidRequestError without them."""
    if meta.sequence_lengths is None:
        raise InvalidRequestError(
            "this meta has no sequence_lengths, which micro-batches need; put samples with the tag 'input_lengths', "
            "from which claims set them"
        )
    return meta.sequence_lengths


def _lengths_and_tokens(
    arguments: _Arguments,
    lengths_of: Callable[[str], Sequence[int] | Int64s],
    size: int,
    budget: int,
    multiple: int,
    name: Callable[[int], str],
) -> tuple[Int64s, Int64s]:
    """Return (the length of each row, the tokens that it uses of `budget`: the length rounded up to `multiple`).
    InvalidRequestError for a row over `budget` or with a negative length. Other parameters: see `plan_shards`."""
    key = arguments.get("input_lengths_key", INPUT_LENGTHS)
    column = np.asarray(lengths_of(key))
    if column.shape != (size,) or (size and column.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"column {key!r}: expected {size} integers, one per row; got {column.dtype} of shape {list(column.shape)}"
        )
    lengths = column.astype(np.int64)
    tokens = ceil_div(lengths, multiple) * multiple
    wrong = np.flatnonzero((lengths < 0) | (tokens > budget))
    if len(wrong):
        row = int(wrong[0])
        padded = f" ({tokens[row]} rounded up to a multiple of {multiple})" if tokens[row] != lengths[row] else ""
        others = f"; {len(wrong)} lengths are out of range" if len(wrong) > 1 else ""
        raise InvalidRequestError(
            f"{name(row)} has {lengths[row]} tokens{padded}, outside 0 to {arguments.budget_name}={budget}{others}"
        )
    return lengths, tokens


# --- plain, packed and dynamic splits -----------------------------------------------------------------------------


def _split_plain(size: int, shards: int, per_batch: int) -> list[Shard]:
    """Give each shard a contiguous part of every global batch, in order."""
    per_shard = ceil_div(per_batch, shards)
    batch_starts = np.arange(0, size, per_batch or 1)[:, None]  # `per_batch` is 0 without rows
    # The part of each shard, as positions in a global batch. Only the last ones can be shorter.
    ranges = [np.arange(shard * per_shard, min((shard + 1) * per_shard, per_batch)) for shard in range(shards)]
    return [Shard((batch_starts + positions).reshape(-1)) for positions in ranges]


def _split_packed(
    tokens: Int64s,
    packer: SequencePacker,
    shards: int,
    per_batch: int,
    *,
    largest_first: bool,
) -> list[Shard]:
    """Pack each global batch into bins and assign the bins to shards. tokens: the rounded lengths;
    largest_first: order the bins of a shard by tokens, in each global batch."""
    batches = []
    for first in range(0, len(tokens), per_batch or 1):  # `per_batch` is 0 without rows
        bins, loads, dealt = pack_balanced(packer, tokens[first : first + per_batch], shards)
        # The rows of all bins one after another, from which each shard takes those of its bins.
        counts = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
        rows = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=counts.sum()) + first
        batch = []
        for shard_bins in dealt:
            numbers = np.array(shard_bins)
            if largest_first:
                numbers = numbers[np.argsort(-loads[numbers], kind="stable")]
            ends = np.cumsum(counts[numbers])
            shifts = np.cumsum(counts)[numbers] - ends  # offset of each bin in `rows` minus its offset in the shard
            positions = np.arange(ends[-1]) + np.repeat(shifts, counts[numbers])
            batch.append(
                Shard(
                    rows[positions],
                    micro_batch_indices=[_ranges(ends.tolist())],
                    micro_batch_lengths=[loads[numbers].tolist()],
                    elem_counts_per_gb=[int(ends[-1])],
                )
            )
        batches.append(batch)
    return [_join_batches([batch[shard] for batch in batches]) for shard in range(shards)]


def _split_dynamic(lengths: Int64s, tokens: Int64s, budget: int, shards: int, per_batch: int) -> list[Shard]:
    """Deal each global batch by length and cut it into micro-batches of equal shapes on all shards. tokens: the rounded
    lengths."""
    batches = []
    for first in range(0, len(tokens), per_batch or 1):  # `per_batch` is 0 without rows
        rising = first + np.argsort(lengths[first : first + per_batch], kind="stable")
        grid = rising.reshape(-1, shards)  # [rows of a shard, shards]; the last column has the longest rows
        ends, widths = _cut_micro_batches(tokens[grid[:, -1]].tolist(), budget)
        batches.append(
            [
                Shard(
                    rows,
                    micro_batch_indices=[_ranges(ends)],
                    micro_batch_lengths=[list(widths)],
                    elem_counts_per_gb=[len(rows)],
                )
                for rows in grid.T
            ]
        )
    return [_join_batches([batch[shard] for batch in batches]) for shard in range(shards)]


def _cut_micro_batches(widths: list[int], budget: int) -> tuple[list[int], list[int]]:
    """Return (end of each micro-batch, its width). Each holds as many rows as fit `budget` at the width of its last
    row. `widths`, of one row or more, must be ascending and at most `budget`."""
    ends: list[int] = []
    start = 0
    for row, width in enumerate(widths):
        if (row + 1 - start) * width > budget:  # this row does not fit: it starts the next micro-batch
            ends.append(row)
            start = row
    ends.append(len(widths))
    return ends, [widths[end - 1] for end in ends]


def _ranges(ends: list[int]) -> list[list[int]]:
    """Return the [start, end] of adjacent ranges, given their ends."""
    return [[start, end] for start, end in pairwise([0, *ends])]


def _join_batches(batches: list[Shard]) -> Shard:
    """Concatenate the global batches of one shard. batches: one per global batch."""
    return Shard(
        np.concatenate([np.zeros(0, dtype=np.int64), *(batch.rows for batch in batches)]),
        [indices for batch in batches for indices in batch.micro_batch_indices or ()],
        [lengths for batch in batches for lengths in batch.micro_batch_lengths or ()],
        [count for batch in batches for count in batch.elem_counts_per_gb or ()],
    )
