"""Dynamic sampling (DAPO): only groups whose rewards differ teach anything. From metas and tags alone."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.client import DataPlaneClient
from dataplane.errors import InvalidRequestError
from dataplane.meta import KVBatchMeta
from dataplane.replay import GROUP
from dataplane.types import Scalar

REWARD = "reward"
"""Tag: a sample's reward."""


def split_by_spread(
    meta: KVBatchMeta, *, reward_tag: str = REWARD, group_tag: str = GROUP, least: float = 0.0
) -> tuple[KVBatchMeta, KVBatchMeta]:
    """(kept, dropped): samples of groups whose rewards' standard deviation is more than `least`, and the others, each
    in the meta's order. ValueError naming samples without one of the tags, or with a reward that is no number."""
    members: dict[Scalar, list[int]] = {}
    rewards: list[float] = []
    for row, (name, tags) in enumerate(zip(meta.sample_ids, _tags(meta), strict=True)):
        reward = tags.get(reward_tag)
        if group_tag not in tags or isinstance(reward, str) or reward is None:
            raise InvalidRequestError(
                f"sample {name!r} has {group_tag}={tags.get(group_tag)!r} and {reward_tag}={reward!r}: "
                "dynamic sampling needs a group and a number"
            )
        rewards.append(float(reward))
        members.setdefault(tags[group_tag], []).append(row)
    spread = [row for rows in members.values() if _deviation([rewards[r] for r in rows]) > least for row in rows]
    kept = sorted(spread)
    chosen = set(kept)
    return meta.subset(kept), meta.subset([row for row in range(meta.size) if row not in chosen])


class DynamicSampler:
    """Gathers groups with a spread of rewards until whole ones make a batch of `batch_size` samples.

    Each round's samples, tagged with rewards and groups, go to `add`; what it drops is cleared from the service at
    once, and so is the overflow of the last round. The samples kept stay where they are. `rounds` and `dropped`
    (samples) count up for ever.
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
        if batch_size < 1:
            raise InvalidRequestError(f"batch_size={batch_size}: must be at least 1")
        self._client = client
        self._batch_size = batch_size
        self._reward_tag, self._group_tag, self._least = reward_tag, group_tag, least
        self._kept: list[KVBatchMeta] = []
        self.rounds = 0
        self.dropped = 0

    @property
    def missing(self) -> int:
        """Samples still wanted, in whole groups."""
        return self._batch_size - len(self._fitting())

    def add(self, meta: KVBatchMeta) -> KVBatchMeta | None:
        """One round's samples, whole groups of them. The batch of exactly `batch_size` once it is full; else None, and
        another round is wanted. After a batch the next `add` begins a new one."""
        kept, dropped = split_by_spread(meta, reward_tag=self._reward_tag, group_tag=self._group_tag, least=self._least)
        self._clear(dropped)
        self.rounds += 1
        if kept.size:
            self._kept.append(kept)
        if self.missing:
            return None
        gathered, rows = KVBatchMeta.concat(self._kept), self._fitting()
        chosen = set(rows)
        self._clear(gathered.subset([row for row in range(gathered.size) if row not in chosen]))
        self._kept = []
        return gathered.subset(rows)

    def _fitting(self) -> list[int]:
        """Of all that is kept, rows of the first whole groups that fit the batch."""
        groups = [tags[self._group_tag] for meta in self._kept for tags in _tags(meta)]
        sizes: dict[Scalar, int] = {}
        for group in groups:
            sizes[group] = sizes.get(group, 0) + 1
        taken: set[Scalar] = set()
        total = 0
        for group, size in sizes.items():
            if total + size <= self._batch_size:
                taken.add(group)
                total += size
        return [row for row, group in enumerate(groups) if group in taken]

    def _clear(self, meta: KVBatchMeta) -> None:
        if meta.size:
            self._client.clear_samples(meta, meta.partition_id)
            self.dropped += meta.size


def _tags(meta: KVBatchMeta) -> Sequence[dict[str, Scalar]]:
    return [{} for _ in meta.sample_ids] if meta.tags is None else meta.tags


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5)
