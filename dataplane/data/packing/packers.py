"""Sequence packers: they assign sequences to bins (packed rows, micro-batches) of a fixed token capacity.

Names and arguments are those of `nemo_rl.data.packing`.
"""

from __future__ import annotations

import enum
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from dataplane.core.arguments import whole_number
from dataplane.core.types import ceil_div
from dataplane.data.packing.bins import (
    Bins,
    Int64s,
    concatenate,
    first_fit,
    first_fit_decreasing,
    modified_first_fit_decreasing,
    split,
)
from dataplane.errors import InvalidRequestError

Lengths = Sequence[int] | Int64s


class PackingAlgorithm(enum.Enum):
    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


class SequencePacker(ABC):
    """Packs sequences into bins of at most `bin_capacity` tokens.

    min_bin_count, bin_count_multiple: minimum number of bins, and the number that it must be a multiple of. If the
    sequences fill fewer bins, the fullest bins are split in two. collect_metrics: whether `pack` records metrics for
    `get_aggregated_metrics`. _totals: the recorded metrics, summed over the `pack` calls (those named min_ and max_ are
    minima and maxima), and the number of `calls`; empty before the first call.
    """

    keeps_order: ClassVar[bool] = False
    """Whether each bin is a run of consecutive sequences."""

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        self.bin_capacity = whole_number("bin_capacity", bin_capacity, 1)
        if min_bin_count is not None:
            whole_number("min_bin_count", min_bin_count, 0)
        if bin_count_multiple is not None:
            whole_number("bin_count_multiple", bin_count_multiple, 1)
        self.collect_metrics = collect_metrics
        self.min_bin_count = min_bin_count
        self.bin_count_multiple = bin_count_multiple
        self._totals: dict[str, float] = {}

    def pack(self, sequence_lengths: Lengths) -> list[list[int]]:
        """Return bins of indices into `sequence_lengths` (`[N]`, 0 or more tokens each). Each index occurs once, and no
        bin is empty.

        Raises ValueError, naming sequence, length and capacity, for a sequence that fits no bin, and ValueError if
        there are fewer sequences than required bins.
        """
        lengths = _check_lengths(sequence_lengths)
        too_long = np.flatnonzero(lengths > self.bin_capacity)
        if len(too_long):
            raise InvalidRequestError(
                f"sequence {too_long[0]} has {lengths[too_long[0]]} tokens, more than bin_capacity={self.bin_capacity}"
                + (f"; {len(too_long)} sequences are too long" if len(too_long) > 1 else "")
            )
        bins = self._pack_bins(lengths) if len(lengths) else []
        count = max(len(bins), self.min_bin_count or 0)
        multiple = self.bin_count_multiple or 1
        count = ceil_div(count, multiple) * multiple
        if count > len(lengths):
            raise InvalidRequestError(
                f"{len(lengths)} sequences cannot fill {count} bins, because each bin needs at least one; pass more "
                "sequences, or a smaller min_bin_count or bin_count_multiple"
            )
        if count > len(bins):
            bins = split(bins, lengths, count)
        if self.collect_metrics:
            self._record_metrics(self.compute_metrics(lengths, bins))
        return bins

    @abstractmethod
    def _pack_bins(self, lengths: Int64s) -> Bins:
        """Pack one or more lengths `[N]`, none of which exceeds the capacity, into bins."""

    def compute_metrics(self, sequence_lengths: Lengths, bins: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return metrics of how well `bins` are filled: counts and tokens; average_utilization and waste_ratio as
        fractions of the capacity; bin_balance, 1 minus standard deviation over mean of the tokens per bin;
        bin_efficiency, the minimum number of bins over the actual number."""
        lengths = _check_lengths(sequence_lengths)
        loads = [int(lengths[list(rows)].sum()) for rows in bins]
        tokens, capacity = sum(loads), len(bins) * self.bin_capacity  # of all bins
        fewest = ceil_div(tokens, self.bin_capacity)
        balance = 1.0 if bins else 0.0
        if len(bins) > 1 and tokens:
            balance -= statistics.stdev(loads) * len(bins) / tokens
        return {
            "num_sequences": len(lengths) if bins else 0,
            "num_bins": len(bins),
            "total_sequence_length": tokens,
            "total_bin_capacity": capacity,
            "total_waste": capacity - tokens,
            "average_utilization": tokens / capacity if bins else 0.0,
            "waste_ratio": (capacity - tokens) / capacity if bins else 0.0,
            "bin_balance": balance,
            "theoretical_min_bins": fewest,
            "bin_efficiency": fewest / len(bins) if bins else 0.0,
        }

    def get_aggregated_metrics(self) -> dict[str, float]:
        """Return the metrics of all `pack` calls since the last reset; empty without calls or `collect_metrics`."""
        totals = self._totals
        if not totals:
            return {}
        # Summed over the calls; the averages below are weighted accordingly.
        tokens, capacity, bins = (totals[name] for name in ("total_sequence_length", "total_bin_capacity", "num_bins"))
        return {
            "total_sequences": totals["num_sequences"],
            "total_bins": bins,
            "average_utilization": tokens / capacity if capacity else 0.0,
            "min_utilization": totals["min_utilization"],
            "max_utilization": totals["max_utilization"],
            "average_waste_ratio": totals["total_waste"] / capacity if capacity else 0.0,
            "min_waste_ratio": totals["min_waste_ratio"],
            "max_waste_ratio": totals["max_waste_ratio"],
            "average_bin_count": bins / totals["calls"],
            "bin_efficiency": ceil_div(tokens, self.bin_capacity) / bins if bins else 0.0,
        }

    def _record_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one `pack` call to `_totals`."""
        totals = self._totals
        for name in ("num_sequences", "num_bins", "total_sequence_length", "total_bin_capacity", "total_waste"):
            totals[name] = totals.get(name, 0) + metrics[name]
        for name, value in (
            ("utilization", metrics["average_utilization"]),
            ("waste_ratio", metrics["waste_ratio"]),
        ):
            totals[f"min_{name}"] = min(totals.get(f"min_{name}", value), value)
            totals[f"max_{name}"] = max(totals.get(f"max_{name}", value), value)
        totals["calls"] = totals.get("calls", 0) + 1

    def reset_metrics(self) -> None:
        """Discard the metrics that `pack` recorded."""
        self._totals.clear()


class ConcatenativePacker(SequencePacker):
    """Fills bins with sequences in order and starts a new bin when the next sequence does not fit."""

    keeps_order = True

    def _pack_bins(self, lengths: Int64s) -> Bins:
        return concatenate(lengths, self.bin_capacity)


class FirstFitDecreasingPacker(SequencePacker):
    """Puts sequences, longest first, each into the first bin with space for it."""

    def _pack_bins(self, lengths: Int64s) -> Bins:
        return first_fit_decreasing(lengths, self.bin_capacity)


class FirstFitShufflePacker(SequencePacker):
    """Puts sequences, in shuffled order, each into the first bin with space for it. The order depends only on the
    number of sequences, so that all processes compute the same bins."""

    def _pack_bins(self, lengths: Int64s) -> Bins:
        order = np.random.default_rng(0).permutation(len(lengths))
        return first_fit(lengths, order, self.bin_capacity)


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Modified first-fit decreasing by Johnson and Garey (1985). Never needs more bins than first-fit decreasing."""

    def _pack_bins(self, lengths: Int64s) -> Bins:
        return modified_first_fit_decreasing(lengths, self.bin_capacity)


_PACKERS: Mapping[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """Create the packer of an algorithm, given as enum or name (case-insensitive). Raises ValueError, listing the
    algorithms, for other values."""
    member = PackingAlgorithm.__members__.get(algorithm.upper()) if isinstance(algorithm, str) else algorithm
    if not isinstance(member, PackingAlgorithm):
        known = ", ".join(PackingAlgorithm.__members__)
        raise InvalidRequestError(f"unknown packing algorithm {algorithm!r}; expected one of {known}")
    return _PACKERS[member](bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)


def _check_lengths(sequence_lengths: Lengths) -> Int64s:
    """Return the lengths as an int64 array `[N]`. InvalidRequestError unless they are integers of 0 or more."""
    given = np.asarray(sequence_lengths)
    if not given.size:
        return np.zeros(0, dtype=np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"sequence_lengths must be a one-dimensional list of integers, got {given.dtype} of shape "
            f"{list(given.shape)}"
        )
    lengths = given.astype(np.int64)
    if int(lengths.min()) < 0:
        row = int(lengths.argmin())
        raise InvalidRequestError(f"sequence {row} has {lengths[row]} tokens: expected 0 or more")
    return lengths
