"""Dynamic sampling (DAPO): keep only groups with differing rewards. This uses metas and tags only."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence

from dataplane.client.client import DataPlaneClient
from dataplane.core.arguments import whole_number
from dataplane.core.types import Scalar
from dataplane.data.meta import KVBatchMeta
from dataplane.errors import InvalidRequestError, first_few
from dataplane.training.replay_buffer import GROUP

log = logging.getLogger(__name__)

REWARD = "reward"
"""Tag: the reward of a sample."""


def split_by_spread(
    meta: KVBatchMeta, *, reward_tag: str = REWARD, group_tag: str = GROUP, least: float = 0.0
) -> tuple[KVBatchMeta, KVBatchMeta]:
    """Return (kept, dropped): samples of groups whose rewards have a standard deviation above `least`, and the
    others, each in the meta's order. Raise ValueError naming a sample that lacks one of the tags or whose reward is
    not a finite number."""
    members: dict[Scalar, list[int]] = {}
    rewards: list[float] = []
    for row, (name, tags) in enumerate(zip(meta.sample_ids, _tags(meta), strict=True)):
        reward = tags.get(reward_tag)
        if group_tag not in tags or isinstance(reward, str) or reward is None or not math.isfinite(reward):
            raise InvalidRequestError(
                f"sample {name!r} has {group_tag}={tags.get(group_tag)!r} and {reward_tag}={reward!r}: "
                "dynamic sampling requires a group and a reward that is a finite number"
            )
        rewards.append(float(reward))
        members.setdefault(tags[group_tag], []).append(row)
    kept: set[int] = set()
    for rows in members.values():
        if _deviation([rewards[row] for row in rows]) > least:
            kept.update(rows)
    dropped = [row for row in range(meta.size) if row not in kept]
    return meta.subset(sorted(kept)), meta.subset(dropped)


class DynamicSampler:
    """Collects groups with differing rewards until some whole groups form a batch of exactly `batch_size` samples.
    If several combinations fit, the one with the oldest groups is used.

    Pass the samples of each round, tagged with rewards and groups, to `add`. Dropped samples are cleared from the
    service immediately, as are the remaining samples when a batch is complete. Kept samples stay in the service. No
    more groups of one size are kept than fit in a batch, since more of that size are never needed. `rounds` and
    `dropped` (samples) are running totals.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        batch_size: int,
        *,
        reward_tag: str = REWARD,
        group_tag: str = GROUP,
        least: float = 0.0,
    ) -> None:
        self._client = client
        self._batch_size = whole_number("batch_size", batch_size, 1)
        self._reward_tag = reward_tag
        self._group_tag = group_tag
        self._least = least
        self._kept: list[KVBatchMeta] = []  # the kept samples, oldest first
        self.rounds = 0
        self.dropped = 0

    @property
    def missing(self) -> int:
        """The number of samples still needed, in whole groups, to complete the best combination of kept groups."""
        return self._batch_size - sum(self._best_combination(self._sizes()).values())

    def add(self, meta: KVBatchMeta) -> KVBatchMeta | None:
        """Add the samples of one round, in whole groups. Return a batch of exactly `batch_size` samples when one is
        complete, else None: another round is needed. After a batch, the next `add` starts a new one. Raise
        ValueError, without keeping or clearing any sample, for a group that is larger than a batch and for a sample
        that is already kept."""
        self._check_not_kept(meta)
        kept, dropped = split_by_spread(meta, reward_tag=self._reward_tag, group_tag=self._group_tag, least=self._least)
        self._check_sizes(kept)
        self._clear(dropped)
        self.rounds += 1
        if kept.size:
            self._kept.append(kept)
        sizes = self._sizes()
        combination = self._best_combination(sizes)
        if sum(combination.values()) == self._batch_size:
            batch = self._select_groups(combination)  # clears the other kept samples
            self._kept = []
            return batch
        useful = self._useful(sizes)
        if len(useful) < len(sizes):  # more groups of one size than fit in a batch
            self._kept = [self._select_groups(useful)]
            log.warning(
                "Groups of %s samples do not add up to a batch of %d so far; further groups of these sizes are dropped",
                first_few(sorted(set(sizes.values()))),
                self._batch_size,
            )
        return None

    def _check_not_kept(self, meta: KVBatchMeta) -> None:
        """Raise ValueError if a sample of `meta` is already kept."""
        counts = Counter(name for each in (*self._kept, meta) for name in each.sample_ids)
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise InvalidRequestError(f"samples {first_few(repeated)} were added before; add each sample once")

    def _check_sizes(self, meta: KVBatchMeta) -> None:
        """Raise ValueError if `meta` makes a group larger than a batch, together with the kept samples of the group."""
        sizes = self._sizes([*self._kept, meta] if meta.size else [])  # without new samples, no group has grown
        for group, size in sizes.items():
            if size > self._batch_size:
                raise InvalidRequestError(
                    f"group {group!r} has {size} samples, more than batch_size={self._batch_size}; increase batch_size"
                )

    def _sizes(self, metas: Sequence[KVBatchMeta] | None = None) -> dict[Scalar, int]:
        """Return the sizes of the groups of `metas` (default: of the kept ones) by group, oldest first."""
        counted = self._kept if metas is None else metas
        return dict(Counter(tags[self._group_tag] for meta in counted for tags in _tags(meta)))

    def _best_combination(self, sizes: dict[Scalar, int]) -> dict[Scalar, int]:
        """Return those of the groups (`sizes` by group) whose sizes add up to a batch, or as close below it as
        possible, preferring the oldest groups."""
        groups = list(sizes.items())
        all_bits = (1 << self._batch_size + 1) - 1  # 0 to the batch size
        # sums[i], a bit set: bit n is set if the sizes of some of the groups from the i-th on add up to n.
        sums = [1]  # of no groups: only 0
        for _, size in reversed(groups):
            sums.append((sums[-1] | sums[-1] << size) & all_bits)
        sums.reverse()
        missing = sums[0].bit_length() - 1  # the largest possible sum; below, what the combination lacks of it
        combination = {}
        for following, (group, size) in enumerate(groups, 1):
            # Take the group if some of the groups after it add up to what is then missing.
            if size <= missing and sums[following] >> (missing - size) & 1:
                combination[group] = size
                missing -= size
        return combination

    def _useful(self, sizes: dict[Scalar, int]) -> dict[Scalar, int]:
        """Return those of the groups (`sizes` by group) that may still be needed: of each size the oldest, as many as
        fit in a batch."""
        count_by_size: Counter[int] = Counter()
        useful = {}
        for group, size in sizes.items():
            count_by_size[size] += 1
            if count_by_size[size] * size <= self._batch_size:
                useful[group] = size
        return useful

    def _select_groups(self, groups: dict[Scalar, int]) -> KVBatchMeta:
        """Return the kept samples of these groups, and clear the other kept samples from the service."""
        kept = KVBatchMeta.concat(self._kept)
        selected: list[int] = []
        others: list[int] = []
        for row, tags in enumerate(_tags(kept)):
            if tags[self._group_tag] in groups:
                selected.append(row)
            else:
                others.append(row)
        self._clear(kept.subset(others))
        return kept.subset(selected)

    def _clear(self, meta: KVBatchMeta) -> None:
        """Clear the samples from the service and count them as dropped."""
        if meta.size:
            self._client.clear_samples(meta, meta.partition_id)
            self.dropped += meta.size


def _tags(meta: KVBatchMeta) -> Sequence[dict[str, Scalar]]:
    return [{} for _ in meta.sample_ids] if meta.tags is None else meta.tags


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation. It is exactly 0 for equal values, although their computed mean may differ from
    them."""
    if min(values) == max(values):
        return 0.0
    count = len(values)
    # Each term is divided first, so that no intermediate result of large values overflows.
    mean = sum(value / count for value in values)
    return math.hypot(*(value / 2 - mean / 2 for value in values)) * (2 / math.sqrt(count))
