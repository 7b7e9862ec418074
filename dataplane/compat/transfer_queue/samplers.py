"""Which ready samples a task gets. The samplers here decide wherever `get_meta` is called; what ranks are to share is
kept in the service, so that it does not matter which process asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dataplane.data.packing.balance import deal

Lengths = Callable[[Sequence[int]], Sequence[int]]
"""The length of each of these samples."""

LENGTH_TAG = "total_lengths"


class BaseSampler(ABC):
    """Subclasses choose: `sample` gets the global indexes of the samples that are ready and unclaimed, oldest first,
    and returns those to give and those that count as consumed. It is called in the process that asks for a batch, with
    `partition=` a view of the tags (`get_custom_meta(indexes)`) and the entries of `sampling_config`. What it keeps in
    itself (`_states`) stays in that process."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """(given, consumed); nothing where there are too few."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether `_states[partition][task][dp_rank]` has this `batch_index`."""
        config = sampling_config or {}
        rank, batch = config.get("dp_rank"), config.get("batch_index")
        return rank is not None and batch in self._states.get(partition_id, {}).get(task_name, {}).get(rank, {})

    def clear_cache(self, partition_id: str) -> None:
        """Forget what was decided for this partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What `load_checkpoint` takes."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        self._states = state["_states"]


class Draw(NamedTuple):
    """What was drawn for all who share it: the samples, and the places among them of each share."""

    samples: list[int]
    shares: list[list[int]]

    @classmethod
    def whole(cls, samples: list[int]) -> Draw:
        """One share."""
        return cls(samples, [list(range(len(samples)))])

    def share(self, number: int) -> list[int]:
        """The samples of one share; none where there is no such share."""
        places = self.shares[number] if 0 <= number < len(self.shares) else []
        return [self.samples[place] for place in places]


class DrawingSampler(BaseSampler):
    """A sampler whose draws are shared: who asks with the same `draw_key` gets a share of the same draw, from whatever
    process, until the partition is cleared. `first_only`: the oldest samples are all that it looks at."""

    first_only = False

    @abstractmethod
    def draw(self, ready: list[int], batch_size: int, lengths: Lengths) -> Draw | None:
        """None where too few are ready."""

    def wanted(self, batch_size: int) -> int:
        """How many samples have to be ready before a draw can be made."""
        return batch_size

    def draw_key(self, config: Mapping[str, Any]) -> str | None:
        """Who shares a draw; None: nobody, each call draws anew."""
        if config.get("dp_rank") is None:
            return None
        return f"{config['dp_rank']}/{config.get('batch_index')}"

    def share_of(self, config: Mapping[str, Any]) -> int:
        """Which share of the draw is the caller's."""
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
        """A draw from these, or the one made before for the same `draw_key`."""
        key, share = self.draw_key(kwargs), self.share_of(kwargs)
        known = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        drawn: Draw | None = None if key is None else known.get(key)
        if drawn is None:
            drawn = self.draw(list(ready_indexes), batch_size, _lengths_from(kwargs.get("partition")))
            if drawn is None:
                return [], []
            if key is not None:
                known[key] = drawn
        given = drawn.share(share)
        return given, list(given)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None = None
    ) -> bool:
        key = self.draw_key(sampling_config or {})
        return key is not None and key in self._states.get(partition_id, {}).get(task_name, {})


class SequentialSampler(DrawingSampler):
    """The first ones, in order; each sample once."""

    first_only = True

    def draw(self, ready: list[int], batch_size: int, lengths: Lengths) -> Draw:
        return Draw.whole(ready[:batch_size])

    def draw_key(self, config: Mapping[str, Any]) -> str | None:
        return None


class GRPOGroupNSampler(DrawingSampler):
    """Whole groups only: `n_samples_per_prompt` samples that were put one after another. ValueError for a batch that is
    no multiple of it."""

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt={n_samples_per_prompt}: must be positive")
        self.n_samples_per_prompt = n_samples_per_prompt

    def draw(self, ready: list[int], batch_size: int, lengths: Lengths) -> Draw | None:
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size={batch_size}: must be a multiple of n_samples_per_prompt={size}")
        found = _runs(sorted(ready), size, batch_size // size)
        return Draw.whole(found) if len(found) == batch_size else None


class RankAwareSampler(DrawingSampler):
    """Every process of a data-parallel rank gets the same batch for the same `batch_index`. ValueError where
    `sampling_config` lacks one of the two, or the rank is negative."""

    first_only = True

    def draw(self, ready: list[int], batch_size: int, lengths: Lengths) -> Draw | None:
        return Draw.whole(ready[:batch_size]) if len(ready) >= batch_size else None

    def draw_key(self, config: Mapping[str, Any]) -> str:
        missing = [name for name in ("dp_rank", "batch_index") if config.get(name) is None]
        if missing:
            raise ValueError(f"RankAwareSampler: sampling_config lacks {' and '.join(missing)}")
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
        shared = {"dp_rank": dp_rank, "batch_index": batch_index}
        return super().sample(ready_indexes, batch_size, task_name, partition_id, **shared)


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """A step of `dp_size` batches of whole groups, dealt so that the ranks have about the same sum of the tag
    `total_lengths` (1 where a sample lacks it), each the same number of groups. `batch_size` is that of one rank. The
    whole step is consumed when its first rank asks."""

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

    def draw(self, ready: list[int], batch_size: int, lengths: Lengths) -> Draw | None:
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size={batch_size}: must be a multiple of n_samples_per_prompt={size}")
        whole = super().draw(ready, self.wanted(batch_size), lengths)
        if whole is None:
            return None
        groups = np.asarray(lengths(whole.samples), dtype=np.int64).reshape(-1, size).sum(axis=1)
        dealt = [np.array(numbers, dtype=np.int64) for numbers in deal(groups, self.dp_size)]
        return Draw(whole.samples, [(part[:, None] * size + np.arange(size)).ravel().tolist() for part in dealt])


NAMED: dict[str, type[DrawingSampler]] = {
    sampler.__name__: sampler
    for sampler in (SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler)
}
"""The samplers that a configuration can name."""


def _runs(indexes: list[int], size: int, wanted: int) -> list[int]:
    """The first `wanted` (or fewer) runs of `size` consecutive indexes, joined."""
    found: list[int] = []
    at = 0
    while at + size <= len(indexes) and len(found) < wanted * size:
        whole = indexes[at + size - 1] - indexes[at] == size - 1
        found += indexes[at : at + size] if whole else []
        at += size if whole else 1
    return found


def _lengths_from(partition: Any) -> Lengths:
    def lengths(indexes: Sequence[int]) -> list[int]:
        tags = {} if partition is None else partition.get_custom_meta(list(indexes))
        return [int(tags.get(index, {}).get(LENGTH_TAG, 1)) for index in indexes]

    return lengths
