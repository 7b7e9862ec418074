"""Samplers, which choose the ready samples that a task gets. A sampler runs in the process that
calls `get_meta`. Draws that ranks share are stored in the service, so that any process can request
them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dataplane.data.packing.balance import deal

T = TypeVar("T")
Draw: TypeAlias = list[list[int]]
"""A draw that several callers share: the global indexes of the samples of each share."""

LENGTH_TAG = "total_lengths"


class BaseSampler(ABC):
    """Base class of samplers. `sample` gets the global indexes of the ready and unclaimed samples,
    oldest first. It returns the samples to give and the samples that count as consumed. It is
    called in the process that requests a batch, with `partition=` a view of the tags
    (`get_custom_meta(indexes)`) and the entries of `sampling_config`. Its state (`_states`, by
    partition and task) stays in that process."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Return (given, consumed), both empty if too few samples are ready."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether the sampler has stored a result for the `dp_rank` and `batch_index` of
        `sampling_config`, as `_states[partition][task][dp_rank][batch_index]`."""
        config = sampling_config or {}
        rank = config.get("dp_rank")
        batch_index = config.get("batch_index")
        if rank is None:
            return False
        return batch_index in self._states.get(partition_id, {}).get(task_name, {}).get(rank, {})

    def clear_cache(self, partition_id: str) -> None:
        """Delete the cached results of this partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """Return the state for `load_checkpoint`."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        self._states = state["_states"]


class DrawingSampler(BaseSampler):
    """A sampler with shared draws: all calls with the same `draw_key`, from any process, get a
    share of the same draw, until the partition is cleared. `first_only`: the sampler uses the
    oldest samples only.

    For the classes in `NAMED`, `get_meta` calls `draw` and stores shared draws in the service. For
    subclasses of them it calls `sample`, which keeps shared draws in this process, as
    `_states[partition][task][draw_key]`."""

    first_only = False

    @abstractmethod
    def draw(self, ready: list[int], batch_size: int, partition: Any) -> Draw | None:
        """Draw from the ready samples (global indexes, oldest first). Return None if too few are
        ready. partition: a view of their tags (None: without tags)."""

    def wanted(self, batch_size: int) -> int:
        """Return the number of ready samples that a draw needs."""
        return batch_size

    def draw_key(self, config: Mapping[str, Any]) -> str | None:
        """Return the key of a shared draw, or None if each call makes a new draw."""
        if config.get("dp_rank") is None:
            return None
        return f"{config['dp_rank']}/{config.get('batch_index')}"

    def share_of(self, config: Mapping[str, Any]) -> int:
        """Return the number of the caller's share of the draw."""
        return 0

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """Draw from `ready_indexes`, or reuse the earlier draw of the same `draw_key`. kwargs:
        further entries of `sampling_config`, and `partition`; args are ignored."""
        key = self.draw_key(kwargs)
        share_number = self.share_of(kwargs)
        draws_by_key = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        draw: Draw | None = None if key is None else draws_by_key.get(key)
        if draw is None:
            draw = self.draw(list(ready_indexes), batch_size, kwargs.get("partition"))
            if draw is None:
                return [], []
            if key is not None:
                draws_by_key[key] = draw
        given = share(draw, share_number)
        return list(given), list(given)  # all given samples are consumed

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether this sampler has made the draw that `sampling_config` selects."""
        key = self.draw_key(sampling_config or {})
        return key is not None and key in self._states.get(partition_id, {}).get(task_name, {})


class SequentialSampler(DrawingSampler):
    """Return the oldest samples, in order, each once."""

    first_only = True

    def draw(self, ready: list[int], batch_size: int, partition: Any) -> Draw:
        return [ready[:batch_size]]

    def draw_key(self, config: Mapping[str, Any]) -> str | None:
        return None


class GRPOGroupNSampler(DrawingSampler):
    """Return complete groups only. A group is `n_samples_per_prompt` samples with consecutive
    indexes. ValueError for a batch size that is not a multiple of the group size."""

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt={n_samples_per_prompt}: must be positive")
        self.n_samples_per_prompt = n_samples_per_prompt

    def draw(self, ready: list[int], batch_size: int, partition: Any) -> Draw | None:
        """Draw the oldest complete groups. Return None if they are fewer than a batch."""
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size={batch_size}: must be a multiple of n_samples_per_prompt={size}")
        samples = _complete_groups(sorted(ready), size, batch_size // size)
        return [samples] if len(samples) == batch_size else None


class RankAwareSampler(DrawingSampler):
    """Return the same batch to every process of a data-parallel rank, for the same `batch_index`.
    ValueError if `sampling_config` lacks `dp_rank` or `batch_index`, or if the rank is negative."""

    first_only = True

    def draw(self, ready: list[int], batch_size: int, partition: Any) -> Draw | None:
        return [ready[:batch_size]] if len(ready) >= batch_size else None

    def draw_key(self, config: Mapping[str, Any]) -> str:
        """Return the key of the batch that all processes of this rank share."""
        missing = [name for name in ("dp_rank", "batch_index") if config.get(name) is None]
        if missing:
            raise ValueError(f"RankAwareSampler: sampling_config lacks {' and '.join(missing)}; add them")
        if config["dp_rank"] < 0:
            raise ValueError(f"dp_rank={config['dp_rank']}: must be greater than or equal to 0")
        return f"{config['dp_rank']}/{config['batch_index']}"

    def sample(  # type: ignore[override]  # the original's order
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """See `DrawingSampler.sample`. Further arguments are ignored: `draw` reads no tags."""
        shared = {"dp_rank": dp_rank, "batch_index": batch_index}
        return super().sample(ready_indexes, batch_size, task_name, partition_id, **shared)


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Draw a step of `dp_size` batches of complete groups. All ranks get the same number of groups
    and about the same sum of the tag `total_lengths` (1 for a sample without the tag). `batch_size`
    is that of one rank. The first rank's request consumes the whole step."""

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size

    def wanted(self, batch_size: int) -> int:
        return batch_size * self.dp_size

    def draw_key(self, config: Mapping[str, Any]) -> str:
        return f"*/{config.get('batch_index', 0)}"

    def share_of(self, config: Mapping[str, Any]) -> int:
        return int(config.get("dp_rank", 0))

    def draw(self, ready: list[int], batch_size: int, partition: Any) -> Draw | None:
        """Draw a step: one share per rank."""
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size={batch_size}: must be a multiple of n_samples_per_prompt={size}")
        whole = super().draw(ready, self.wanted(batch_size), partition)
        if whole is None:
            return None
        groups = np.array(whole[0], np.int64).reshape(-1, size)  # of global indexes
        tags = {} if partition is None else partition.get_custom_meta(whole[0])
        lengths = [int(tags.get(index, {}).get(LENGTH_TAG, 1)) for index in whole[0]]
        group_lengths = np.array(lengths, np.int64).reshape(-1, size).sum(axis=1)
        # The groups of each rank, with about equal sums.
        return [groups[numbers].ravel().tolist() for numbers in deal(group_lengths, self.dp_size)]


NAMED: dict[str, type[DrawingSampler]] = {
    sampler.__name__: sampler
    for sampler in (SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler)
}
"""The samplers that a configuration can select by name."""


def _complete_groups(indexes: list[int], size: int, count: int) -> list[int]:
    """Return the samples of the first `count` complete groups in the sorted `indexes`, or of all if
    there are fewer. A group is `size` consecutive numbers."""
    samples: list[int] = []
    position = 0
    while position + size <= len(indexes) and len(samples) < count * size:
        is_group = indexes[position + size - 1] - indexes[position] == size - 1
        if is_group:
            samples += indexes[position : position + size]
            position += size
        else:
            position += 1
    return samples


def share(draw: Sequence[T], number: int) -> T | Sequence[Any]:
    """Return one share of a draw; empty for an unknown share."""
    return draw[number] if 0 <= number < len(draw) else ()
