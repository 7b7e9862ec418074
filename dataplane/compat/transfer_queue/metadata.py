"""`BatchMeta`, which names samples by global index and does not hold their data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from dataplane.compat.transfer_queue.columns import FieldSchema, extract_field_schema
from dataplane.compat.transfer_queue.keyed import KVBatchMeta as KVBatchMeta
from dataplane.compat.transfer_queue.keyed import joined_info, parts_of

Int8s = npt.NDArray[np.int8]


class BatchMeta:
    """The metadata of N samples.

    global_indexes `[N]`: the number of each sample, never reused. partition_ids `[N]`. field_schema: per field,
    "dtype", "shape" of a row (None if rows differ), "is_nested", "is_non_tensor", and "per_sample_shapes" `[N]` if rows
    differ. production_status `[N]`: 1 if the sample has all fields. extra_info: metadata of the batch. custom_meta
    `[N]`: the tags of each sample.

    A meta that the service returned identifies exact samples. It is rejected once these samples were cleared.
    ValueError for lists of different lengths.
    """

    __slots__ = (
        "_custom_backend_meta",
        "_names",
        "_rows",
        "custom_meta",
        "extra_info",
        "field_schema",
        "global_indexes",
        "partition_ids",
        "production_status",
    )

    def __init__(
        self,
        global_indexes: Sequence[int],
        partition_ids: Sequence[str],
        field_schema: Mapping[str, FieldSchema] | None = None,
        production_status: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.global_indexes = list(global_indexes)
        size = len(self.global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema = {name: dict(known) for name, known in (field_schema or {}).items()}
        self.extra_info = dict(extra_info or {})
        status = np.zeros(size) if production_status is None else production_status
        self.production_status: Int8s = np.array(status, dtype=np.int8)
        self.custom_meta = [dict(tags) for tags in custom_meta] if custom_meta else [{} for _ in range(size)]
        backend = [dict(kept) for kept in _custom_backend_meta] if _custom_backend_meta else [{} for _ in range(size)]
        self._custom_backend_meta = backend
        self._names: list[str] | None = None
        self._rows: list[int] | None = None
        self._check(size)

    def _check(self, size: int) -> None:
        given: dict[str, Any] = {
            "partition_ids": self.partition_ids,
            "production_status": self.production_status,
            "custom_meta": self.custom_meta,
            "_custom_backend_meta": self._custom_backend_meta,
        }
        for name, shapes in self._shapes().items():
            given[f"per_sample_shapes of field {name!r}"] = shapes
        for what, values in given.items():
            if len(values) != size:
                raise ValueError(f"BatchMeta: got {len(values)} {what} for {size} global_indexes")

    def _shapes(self) -> dict[str, list[Any]]:
        found = {name: known.get("per_sample_shapes") for name, known in self.field_schema.items()}
        return {name: shapes for name, shapes in found.items() if shapes is not None}

    # --- properties

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def field_names(self) -> list[str]:
        """The names of the fields, sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether the meta has samples and all of them have all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> SampleViews:
        """A read-only view of each sample."""
        return SampleViews(self)

    def get_dtypes(self, field_name: str) -> list[Any]:
        """Return the field's dtype N times. KeyError for an unknown field."""
        return [self._schema_of(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """Return the shape of each row. KeyError for an unknown field."""
        known = self._schema_of(field_name)
        shapes = known.get("per_sample_shapes")
        return [known.get("shape")] * self.size if shapes is None else list(shapes)

    def _schema_of(self, name: str) -> FieldSchema:
        if name not in self.field_schema:
            raise KeyError(f"BatchMeta has no field {name!r}; its fields are {self.field_names}")
        return self.field_schema[name]

    # --- extra_info and custom_meta

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """Return a deep copy of `extra_info`."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Remove an entry. Return its value, or None if it did not exist."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """Return a deep copy of the tags, one mapping per sample."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        """Merge one mapping per sample into this meta's tags. `set_custom_meta` or `put` send them to the service."""
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(f"custom_meta: got {len(custom_meta)} mappings for {self.size} samples")
        for mine, new in zip(self.custom_meta, custom_meta, strict=True):
            mine.update(new)

    def clear_custom_meta(self) -> None:
        """Remove the tags from this meta; the service keeps them."""
        self.custom_meta = [{} for _ in range(self.size)]

    # --- selecting fields and samples

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Add the fields of `tensor_dict` `[N]` and, by default, mark all samples ready. Return this meta."""
        count = int(tensor_dict.batch_size[0])
        if count and count != self.size:
            raise ValueError(f"add_fields: got a TensorDict of {count} rows for {self.size} samples")
        if count:
            self.field_schema.update(extract_field_schema(tensor_dict))
            if set_all_ready:
                self.production_status[:] = 1
        return self

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """Return a copy with these fields only. Unknown fields are ignored."""
        made = self.copy()
        made.field_schema = {name: made.field_schema[name] for name in field_names if name in made.field_schema}
        made._custom_backend_meta = [
            {name: kept for name, kept in sample.items() if name.startswith("_") or name in field_names}
            for sample in made._custom_backend_meta
        ]
        return made

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """Return the samples at these positions, in that order. ValueError for positions outside [0, N)."""
        if any(not 0 <= place < self.size for place in sample_indices):
            raise ValueError(f"select_samples: sample_indices must be in [0, {self.size})")
        return self._picked(list(sample_indices))

    def reorder(self, indices: Sequence[int]) -> None:
        """Reorder the samples in place. `indices` is a permutation of 0..N-1, otherwise ValueError."""
        if sorted(indices) != list(range(self.size)):
            raise ValueError(f"reorder: expected a permutation of {self.size} positions, got {len(indices)} positions")
        picked = self._picked(list(indices))
        for name in self.__slots__:
            setattr(self, name, getattr(picked, name))

    def _picked(self, places: list[int]) -> BatchMeta:
        made = BatchMeta(
            [self.global_indexes[place] for place in places],
            [self.partition_ids[place] for place in places],
            {name: _picked_schema(known, places) for name, known in self.field_schema.items()},
            self.production_status[places],
            self.extra_info,
            [copy.deepcopy(self.custom_meta[place]) for place in places],
            [copy.deepcopy(self._custom_backend_meta[place]) for place in places],
        )
        return made._named(
            None if self._names is None else [self._names[place] for place in places],
            None if self._rows is None else [self._rows[place] for place in places],
        )

    def _named(self, names: list[str] | None, rows: list[int] | None) -> BatchMeta:
        """Set the id and the row of each sample, by which the service finds them. Return this meta."""
        self._names, self._rows = names, rows
        return self

    def copy(self) -> BatchMeta:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self._picked(list(range(*item.indices(self.size))))
        if not isinstance(item, int | np.integer):
            raise TypeError(f"BatchMeta indexes must be integers or slices, not {type(item).__name__}")
        if not -self.size <= item < self.size:
            raise IndexError(f"index {item} is out of range for a BatchMeta of {self.size} samples")
        return self._picked([int(item) % self.size])

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Split into `chunks` parts whose sizes differ by at most one, longer parts first. Parts can be empty."""
        return [self._picked(list(part)) for part in parts_of(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Split into one meta per partition."""
        places: dict[str, list[int]] = {}
        for place, partition in enumerate(self.partition_ids):
            places.setdefault(partition, []).append(place)
        return [self._picked(mine) for mine in places.values()]

    # --- joining

    def union(self, other: BatchMeta) -> BatchMeta:
        """Return the same samples with the fields of both metas. Entries of `other` take precedence. A sample is ready
        if it is ready in both. ValueError if the samples differ. An empty meta on either side is ignored."""
        if not other or not self:
            return (other if other else self).copy()
        for name in ("global_indexes", "partition_ids"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"BatchMeta.union: {name} do not match; pass the same samples in the same order")
        made = self.copy()
        made.field_schema |= copy.deepcopy(other.field_schema)
        made.production_status &= other.production_status
        made.extra_info |= other.extra_info
        made.update_custom_meta(copy.deepcopy(other.custom_meta))
        for mine, theirs in zip(made._custom_backend_meta, other._custom_backend_meta, strict=True):
            mine.update(copy.deepcopy(theirs))
        return made if made._rows is not None else made._named(other._names, other._rows)

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """Join the samples of all metas, in order. Empty metas are ignored. ValueError if fields, their dtypes or
        entries of extra_info differ."""
        parts = [part for part in data if part]
        if not parts:
            return cls.empty()
        if validate:
            _check_alike(parts)
        made = BatchMeta(
            [index for part in parts for index in part.global_indexes],
            [partition for part in parts for partition in part.partition_ids],
            {name: _joined_schema(name, parts) for name in parts[0].field_schema},
            np.concatenate([part.production_status for part in parts]),
            joined_info([part.extra_info for part in parts], "BatchMeta.concat"),
            [tags for part in parts for tags in part.custom_meta],
            [kept for part in parts for kept in part._custom_backend_meta],
        )
        if any(part._names is None or part._rows is None for part in parts):
            return made
        return made._named(
            [name for part in parts for name in part._names or ()], [row for part in parts for row in part._rows or ()]
        )

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """Return a meta without samples."""
        return cls([], [], extra_info=extra_info)

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)
        self.production_status = np.array(self.production_status)  # unpickled arrays can be read-only

    def __repr__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )


class SampleView:
    """A read-only view of one sample of a `BatchMeta`."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: BatchMeta, place: int) -> None:
        self._batch = batch
        self._place = place

    @property
    def global_index(self) -> int:
        return self._batch.global_indexes[self._place]

    @property
    def partition_id(self) -> str:
        return self._batch.partition_ids[self._place]

    @property
    def production_status(self) -> int:
        return int(self._batch.production_status[self._place])

    @property
    def custom_meta(self) -> MappingProxyType[str, Any]:
        return MappingProxyType(self._batch.custom_meta[self._place])

    @property
    def fields(self) -> MappingProxyType[str, MappingProxyType[str, Any]]:
        """The schema of this sample's row, by field."""
        found = {}
        for name, known in self._batch.field_schema.items():
            mine = _picked_schema(known, [self._place])
            shapes = mine.pop("per_sample_shapes", None)
            found[name] = MappingProxyType(mine if shapes is None else {**mine, "shape": shapes[0]})
        return MappingProxyType(found)

    def __repr__(self) -> str:
        return f"sample {self.global_index} of {self.partition_id!r}, fields {sorted(self.fields)}"


class SampleViews(Sequence[SampleView]):
    """A read-only view of the samples of a `BatchMeta`."""

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, place: Any) -> Any:
        return SampleView(self._batch, range(len(self))[place])

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, place) for place in range(len(self)))


def _picked_schema(known: FieldSchema, places: Sequence[int]) -> FieldSchema:
    shapes = known.get("per_sample_shapes")
    picked = dict(known)
    return picked if shapes is None else {**picked, "per_sample_shapes": [shapes[place] for place in places]}


def _check_alike(parts: Sequence[BatchMeta]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if part.field_names != first.field_names:
            raise ValueError(f"BatchMeta.concat: fields do not match: {first.field_names} and {part.field_names}")
        for name, known in first.field_schema.items():
            dtype, other = known.get("dtype"), part.field_schema[name].get("dtype")
            if dtype != other:
                raise ValueError(f"BatchMeta.concat: field {name!r} is {dtype} in one part and {other} in another")


def _joined_schema(name: str, parts: Sequence[BatchMeta]) -> FieldSchema:
    """Join the field's schemas of all parts."""
    known = [part.field_schema.get(name, {}) for part in parts]
    nested = any(schema.get("is_nested") for schema in known)
    joined = {**known[0], "is_nested": nested, "shape": None if nested else known[0].get("shape")}
    joined.pop("per_sample_shapes", None)
    if nested or any(schema.get("per_sample_shapes") is not None for schema in known):
        joined["per_sample_shapes"] = [shape for part in parts for shape in _shapes_of(part, name)]
    return joined


def _shapes_of(part: BatchMeta, name: str) -> list[Any]:
    return part.get_shapes(name) if name in part.field_schema else [None] * part.size
