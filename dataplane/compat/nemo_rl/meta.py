"""NeMo-RL's `KVBatchMeta`: a mutable dataclass that names samples by id."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

log = logging.getLogger(__name__)

FRAMEWORK = "nemo_rl"
INTERFACES = "nemo_rl.data_plane.interfaces"
"""The module of NeMo-RL that defines `KVBatchMeta` and `DataPlaneClient`."""


@dataclass
class KVBatchMeta:
    """The metadata of N samples, without their data.

    partition_id: the partition of the samples. task_name: the task that claimed them, or None. sample_ids `[N]`.
    fields: names of columns. sequence_lengths `[N]`: tokens per sample. extra_info: metadata of the batch. tags `[N]`:
    scalars per sample. ValueError if there are not N tags.

    `stamp_tags` changes this meta. The other methods return new metas.
    """

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.tags is not None and len(self.tags) != len(self.sample_ids):
            raise ValueError(
                f"KVBatchMeta: got {len(self.tags)} mappings of tags for {len(self.sample_ids)} samples; pass one "
                "per sample"
            )

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.sample_ids)

    def stamp_tags(self, scalars: Mapping[str, Sequence[Any]]) -> None:
        """Set tags in this meta, one value per sample for each name. ValueError for another number of values."""
        for name, values in scalars.items():  # check all of them before the first change
            if len(values) != self.size:
                raise ValueError(
                    f"stamp_tags: tag {name!r} has {len(values)} values for {self.size} samples; pass one per sample"
                )
        self.tags = [{} for _ in self.sample_ids] if self.tags is None else self.tags
        for name, values in scalars.items():
            for tag, value in zip(self.tags, values, strict=True):
                tag[name] = value

    def subset(self, indices: Sequence[int]) -> KVBatchMeta:
        """Return the samples at these positions, in that order."""
        return self._with(
            [self.sample_ids[position] for position in indices],
            None if self.sequence_lengths is None else [self.sequence_lengths[position] for position in indices],
            None if self.tags is None else [self.tags[position] for position in indices],
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Return the samples at positions [start, stop)."""
        return self.subset(range(self.size)[start:stop])

    def drop(self, indices: Sequence[int]) -> KVBatchMeta | None:
        """Return all samples except those at these positions, or None if no sample is left."""
        dropped = set(indices)
        left = [position for position in range(self.size) if position not in dropped]
        return self.subset(left) if left else None

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """Return these samples followed by those of the others, with lengths and tags if all metas have them, and with
        this meta's task, fields and extra_info. ValueError for a meta of another partition."""
        if any(other.partition_id != self.partition_id for other in others):
            found = sorted({other.partition_id for other in others} - {self.partition_id})
            raise ValueError(f"KVBatchMeta.concat: all metas must be of partition {self.partition_id!r}, got {found}")
        metas = (self, *others)
        lengths = [meta.sequence_lengths for meta in metas if meta.sequence_lengths is not None]
        tags = [meta.tags for meta in metas if meta.tags is not None]
        return self._with(
            [name for meta in metas for name in meta.sample_ids],
            [length for each in lengths for length in each] if len(lengths) == len(metas) else None,
            [tag for each in tags for tag in each] if len(tags) == len(metas) else None,
        )

    def with_fields(self, field_names: Sequence[str]) -> KVBatchMeta:
        """Return a copy with these fields added to `fields`."""
        copied = self.subset(range(self.size))  # all samples; their tags are copied below
        copied.fields = list(dict.fromkeys([*(self.fields or ()), *field_names]))
        copied.tags = None if self.tags is None else [dict(tag) for tag in self.tags]
        return copied

    def _with(self, sample_ids: list[str], lengths: list[int] | None, tags: list[dict[str, Any]] | None) -> KVBatchMeta:
        info = dict(self.extra_info or {})
        return replace(self, sample_ids=sample_ids, sequence_lengths=lengths, tags=tags, extra_info=info)


def framework_type(name: str) -> type[Any] | None:
    """Return NeMo-RL's own class of that name, or None if NeMo-RL is not installed or its import fails.

    An already imported module is used; otherwise NeMo-RL is imported here. A failed import is logged.
    """
    module = sys.modules.get(INTERFACES)
    is_installed = FRAMEWORK in sys.modules or importlib.util.find_spec(FRAMEWORK) is not None
    if module is None and is_installed:
        try:
            module = importlib.import_module(INTERFACES)
        except Exception as error:
            log.warning("Import of %s failed, this package's %s is used instead: %s", INTERFACES, name, error)
    value = getattr(module, name, None)  # None without a module, too
    return value if isinstance(value, type) else None
