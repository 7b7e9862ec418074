"""`BatchMeta`, which names samples by global index, and `KVBatchMeta`, which names samples by key. Neither holds
their data."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from dataplane.compat.transfer_queue.columns import FieldSchema, extract_field_schema
from dataplane.compat.transfer_queue.settings import warn_once

Int8s = npt.NDArray[np.int8]


class BatchMeta:
    """The metadata of N samples.

    global_indexes `[N]`: the number of each sample, never reused. partition_ids `[N]`. field_schema: per field,
    "dtype", "shape" of a row (None if rows differ), "is_nested", "is_non_tensor", and "per_sample_shapes" `[N]` if rows
    differ. production_status `[N]`: 1 if the sample has all fields. extra_info: metadata of the batch. custom_meta
    `[N]`: the tags of each sample.

    A meta that the service returned identifies exact samples. It is rejected once these samples were cleared.
    ValueError for lists of different lengths.

    _names, _rows `[N]`: the id and the row of each sample, if the meta comes from the service (see `_with_handles`);
    otherwise None, and the service looks the samples up by global index. _custom_backend_meta `[N]`: as in the
    original, whose storage backends keep their own data of each sample there.
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
        self.field_schema = {name: dict(schema) for name, schema in (field_schema or {}).items()}
        self.extra_info = dict(extra_info or {})
        status = np.zeros(size) if production_status is None else production_status
        self.production_status: Int8s = np.array(status, dtype=np.int8)
        self.custom_meta = [dict(tags) for tags in custom_meta] if custom_meta else [{} for _ in range(size)]
        backend = [dict(item) for item in _custom_backend_meta] if _custom_backend_meta else [{} for _ in range(size)]
        self._custom_backend_meta = backend
        self._names: list[str] | None = None
        self._rows: list[int] | None = None
        self._check_lengths(size)

    def _check_lengths(self, size: int) -> None:
        """ValueError for a list that does not have one value per sample."""
        lists: dict[str, Any] = {
            "partition_ids": self.partition_ids,
            "production_status": self.production_status,
            "custom_meta": self.custom_meta,
            "_custom_backend_meta": self._custom_backend_meta,
        }
        for name, schema in self.field_schema.items():
            if schema.get("per_sample_shapes") is not None:
                lists[f"per_sample_shapes of field {name!r}"] = schema["per_sample_shapes"]
        for what, values in lists.items():
            if len(values) != size:
                raise ValueError(f"BatchMeta: got {len(values)} {what} for {size} global_indexes; pass one per sample")

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
        schema = self._schema_of(field_name)
        shapes = schema.get("per_sample_shapes")
        return [schema.get("shape")] * self.size if shapes is None else list(shapes)

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
        """Merge one mapping per sample into this meta's tags; None has no effect. The client's `set_custom_meta` and
        `put` send them to the service. ValueError for another number of mappings."""
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(
                f"custom_meta: got {len(custom_meta)} mappings for {self.size} samples; pass one per sample"
            )
        for tags, new_tags in zip(self.custom_meta, custom_meta, strict=True):
            tags.update(new_tags)

    def clear_custom_meta(self) -> None:
        """Remove the tags from this meta; the service keeps them."""
        self.custom_meta = [{} for _ in range(self.size)]

    # --- selecting fields and samples

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Add the fields of `tensor_dict` `[N]` and, with `set_all_ready`, mark all samples ready. Return this meta. A
        TensorDict without rows has no effect."""
        count = int(tensor_dict.batch_size[0])
        if count and count != self.size:
            raise ValueError(
                f"add_fields: got a TensorDict of {count} rows for {self.size} samples; pass one row per sample"
            )
        if count:
            self.field_schema.update(extract_field_schema(tensor_dict))
            if set_all_ready:
                self.production_status[:] = 1
        return self

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """Return a copy with these fields only. Unknown fields are ignored."""
        copied = self.copy()
        copied.field_schema = {name: copied.field_schema[name] for name in field_names if name in copied.field_schema}
        # As in the original: the entries of these fields stay, and those whose name starts with "_".
        copied._custom_backend_meta = [
            {name: value for name, value in sample.items() if name.startswith("_") or name in field_names}
            for sample in copied._custom_backend_meta
        ]
        return copied

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """Return the samples at these positions, in that order. ValueError for positions outside [0, N)."""
        if any(not 0 <= position < self.size for position in sample_indices):
            raise ValueError(
                f"select_samples: sample_indices must be in [0, {self.size}), got {reprlib.repr(list(sample_indices))}"
            )
        return self._select(list(sample_indices))

    def reorder(self, indices: Sequence[int]) -> None:
        """Reorder the samples in place. `indices` is a permutation of 0..N-1, otherwise ValueError."""
        if sorted(indices) != list(range(self.size)):
            raise ValueError(
                f"reorder: expected each of the {self.size} positions from 0 on once, without "
                f"duplicates, got {reprlib.repr(list(indices))}"
            )
        reordered = self._select(list(indices))
        for name in self.__slots__:  # all attributes
            setattr(self, name, getattr(reordered, name))

    def _select(self, positions: list[int]) -> BatchMeta:
        """Return a meta of the samples at these positions, in that order. Tags are copied."""
        selected = BatchMeta(
            [self.global_indexes[position] for position in positions],
            [self.partition_ids[position] for position in positions],
            {name: _schema_at(schema, positions) for name, schema in self.field_schema.items()},
            self.production_status[positions],
            self.extra_info,
            [copy.deepcopy(self.custom_meta[position]) for position in positions],
            [copy.deepcopy(self._custom_backend_meta[position]) for position in positions],
        )
        return selected._with_handles(
            None if self._names is None else [self._names[position] for position in positions],
            None if self._rows is None else [self._rows[position] for position in positions],
        )

    def _with_handles(self, names: list[str] | None, rows: list[int] | None) -> BatchMeta:
        """Set the id and the row of each sample (None: unknown). With its global index (the generation), a row is a
        handle by which the service finds exactly this sample. Return this meta."""
        self._names = names
        self._rows = rows
        return self

    def copy(self) -> BatchMeta:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def __getitem__(self, item: int | slice) -> BatchMeta:
        """Return a meta of one sample (negative positions count from the end), or of a slice."""
        if isinstance(item, slice):
            return self._select(list(range(*item.indices(self.size))))
        if not isinstance(item, int | np.integer):
            raise TypeError(f"BatchMeta indexes must be integers or slices, not {type(item).__name__}")
        if not -self.size <= item < self.size:
            raise IndexError(f"index {item} is out of range for a BatchMeta of {self.size} samples")
        return self._select([int(item) % self.size])

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Split into `chunks` parts whose sizes differ by at most one, longer parts first. Parts
        can be empty. ZeroDivisionError for 0; no parts for a negative number."""
        return [self._select(list(positions)) for positions in ranges_of(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Split into one meta per partition."""
        positions_by_partition: dict[str, list[int]] = {}
        for position, partition in enumerate(self.partition_ids):
            positions_by_partition.setdefault(partition, []).append(position)
        return [self._select(positions) for positions in positions_by_partition.values()]

    # --- joining

    def union(self, other: BatchMeta) -> BatchMeta:
        """Return the same samples with the fields of both metas. Entries of `other` take precedence. A sample is ready
        if it is ready in both. ValueError if the samples differ. An empty meta on either side is ignored."""
        if not other or not self:
            return (other if other else self).copy()
        for name in ("global_indexes", "partition_ids"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"BatchMeta.union: {name} do not match ({reprlib.repr(getattr(self, name))} and "
                    f"{reprlib.repr(getattr(other, name))}); pass the same samples in the same order"
                )
        joined = self.copy()
        joined.field_schema |= copy.deepcopy(other.field_schema)
        joined.production_status &= other.production_status
        joined.extra_info |= other.extra_info
        joined.update_custom_meta(copy.deepcopy(other.custom_meta))
        for own_data, other_data in zip(joined._custom_backend_meta, other._custom_backend_meta, strict=True):
            own_data.update(copy.deepcopy(other_data))
        if joined._rows is None:  # use the handles of `other`, which can be None, too
            joined._with_handles(other._names, other._rows)
        return joined

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """Join the samples of all metas, in order. Empty metas are ignored. ValueError if entries of extra_info differ,
        and with `validate` also if fields or their dtypes differ; otherwise the fields are those of the first meta."""
        metas = [meta for meta in data or () if meta]
        if not metas:
            return cls.empty()
        if validate:
            _check_same_fields(metas)
        joined = BatchMeta(
            [index for meta in metas for index in meta.global_indexes],
            [partition for meta in metas for partition in meta.partition_ids],
            {name: _joined_schema(name, metas) for name in metas[0].field_schema},
            np.concatenate([meta.production_status for meta in metas]),
            joined_info([meta.extra_info for meta in metas], "BatchMeta.concat"),
            [tags for meta in metas for tags in meta.custom_meta],
            [item for meta in metas for item in meta._custom_backend_meta],
        )
        if any(meta._names is None or meta._rows is None for meta in metas):
            return joined  # without handles: the service looks the samples up by global index
        return joined._with_handles(
            [name for meta in metas for name in meta._names or ()], [row for meta in metas for row in meta._rows or ()]
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

    __slots__ = ("_batch", "_position")

    def __init__(self, batch: BatchMeta, position: int) -> None:
        self._batch = batch
        self._position = position

    @property
    def global_index(self) -> int:
        return self._batch.global_indexes[self._position]

    @property
    def partition_id(self) -> str:
        return self._batch.partition_ids[self._position]

    @property
    def production_status(self) -> int:
        return int(self._batch.production_status[self._position])

    @property
    def custom_meta(self) -> MappingProxyType[str, Any]:
        return MappingProxyType(self._batch.custom_meta[self._position])

    @property
    def fields(self) -> MappingProxyType[str, MappingProxyType[str, Any]]:
        """The schema of this sample's row, by field."""
        schemas = {}
        for name, batch_schema in self._batch.field_schema.items():
            schema = _schema_at(batch_schema, [self._position])
            shapes = schema.pop("per_sample_shapes", None)
            if shapes is not None:
                schema["shape"] = shapes[0]  # of the only position
            schemas[name] = MappingProxyType(schema)
        return MappingProxyType(schemas)

    def __repr__(self) -> str:
        return f"sample {self.global_index} of {self.partition_id!r}, fields {sorted(self.fields)}"


class SampleViews(Sequence[SampleView]):
    """A read-only view of the samples of a `BatchMeta`."""

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, position: Any) -> Any:
        return SampleView(self._batch, range(len(self))[position])

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, position) for position in range(len(self)))


def _schema_at(schema: FieldSchema, positions: Sequence[int]) -> FieldSchema:
    """Return a copy of a field's schema for the samples at these positions."""
    selected = dict(schema)
    shapes = schema.get("per_sample_shapes")
    if shapes is not None:
        selected["per_sample_shapes"] = [shapes[position] for position in positions]
    return selected


def _check_same_fields(metas: Sequence[BatchMeta]) -> None:
    """ValueError unless all parts have the same fields with the same dtypes."""
    first = metas[0]
    for meta in metas[1:]:
        if meta.field_names != first.field_names:
            raise ValueError(f"BatchMeta.concat: fields do not match: {first.field_names} and {meta.field_names}")
        for name, schema in first.field_schema.items():
            dtype = schema.get("dtype")
            other_dtype = meta.field_schema[name].get("dtype")
            if dtype != other_dtype:
                raise ValueError(
                    f"BatchMeta.concat: field {name!r} is {dtype} in one part and {other_dtype} in another"
                )


def _joined_schema(name: str, metas: Sequence[BatchMeta]) -> FieldSchema:
    """Join the field's schemas of all parts. The dtype is that of the first part. If any part is nested, the result is
    nested, without a common shape. If any part is nested or has shapes per sample, the result has shapes per sample."""
    schemas = [meta.field_schema.get(name, {}) for meta in metas]
    nested = any(schema.get("is_nested") for schema in schemas)
    joined = {**schemas[0], "is_nested": nested, "shape": None if nested else schemas[0].get("shape")}
    joined.pop("per_sample_shapes", None)
    if nested or any(schema.get("per_sample_shapes") is not None for schema in schemas):
        joined["per_sample_shapes"] = [shape for meta in metas for shape in _shapes_of(meta, name)]
    return joined


def _shapes_of(meta: BatchMeta, name: str) -> list[Any]:
    """Return the shape of each row of a field; None for each sample if the part does not have the field."""
    return meta.get_shapes(name) if name in meta.field_schema else [None] * meta.size


@dataclass
class KVBatchMeta:
    """The keys `[N]` and tags `[N]` (one mapping each) of samples of one partition.

    partition_id: None if unknown. fields: names of the fields that the meta refers to, None if unspecified. extra_info:
    metadata of the batch. ValueError for lists of different lengths and for duplicate names.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the lists, and copy tags and extra_info, so that the caller's stay independent."""
        if len(self.keys) != len(self.tags):
            raise ValueError(
                f"KVBatchMeta: keys and tags must have same length, one mapping per key; got {len(self.keys)} keys and "
                f"{len(self.tags)} tags"
            )
        for what, names in (("key", self.keys), ("field", self.fields or ())):
            if len(set(names)) != len(names):
                raise ValueError(
                    f"KVBatchMeta: Got duplicated {what}s; each must be unique, got {reprlib.repr(list(names))}"
                )
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @classmethod
    def of_put(
        cls,
        keys: list[str],
        tags: list[dict[str, Any]],
        partition_id: str,
        fields: list[str],
    ) -> KVBatchMeta:
        """Return the meta of stored samples. Nobody else has these lists, which are neither checked
        nor copied."""
        meta = cls.__new__(cls)
        meta.keys = keys
        meta.tags = tags
        meta.partition_id = partition_id
        meta.fields = fields
        meta.extra_info = {}
        return meta

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _select(self, positions: Sequence[int]) -> KVBatchMeta:
        keys = [self.keys[position] for position in positions]
        tags = [self.tags[position] for position in positions]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """Return these keys, in this order. ValueError for duplicates, RuntimeError for a key that the meta lacks."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError(
                f"select_keys: Contain duplicate keys; each must be unique, got {reprlib.repr(list(keys_to_select))}"
            )
        positions = {key: position for position, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in positions]
        if unknown:
            raise RuntimeError(f"select_keys: {unknown[:5]} not found in current batch")
        return self._select([positions[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Reorder the samples in place. ValueError for duplicates and for another number of indexes
        than samples. Negative indexes count from the end; as in the original, -1 and N - 1 do not
        count as duplicates."""
        if len(indexes) != self.size:
            raise ValueError(f"reorder: {len(indexes)} indexes, which does not match the {self.size} samples")
        if len(set(indexes)) != len(indexes):
            raise ValueError(
                f"reorder: Contain duplicate indexes; each must be unique, got {reprlib.repr(list(indexes))}"
            )
        self.keys = [self.keys[position] for position in indexes]
        self.tags = [self.tags[position] for position in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split into `chunks` parts whose sizes differ by at most one, longer parts first. Parts
        can be empty. ZeroDivisionError for 0; no parts for a negative number."""
        return [self._select(positions) for positions in ranges_of(self.size, chunks)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Join the samples of all metas, in order. Empty metas are ignored. ValueError if partitions, fields or entries
        of extra_info differ."""
        metas = [meta for meta in data or () if meta]
        if not metas:
            return cls()
        first = metas[0]
        for meta in metas:
            if meta.partition_id != first.partition_id:
                raise ValueError(
                    f"KVBatchMeta.concat: Partition do not match: {first.partition_id!r} and {meta.partition_id!r}"
                )
            # After the first meta, one without fields matches any.
            if meta.fields is not None and set(meta.fields) != set(first.fields or ()):
                raise ValueError(f"KVBatchMeta.concat: Field names do not match: {first.fields} and {meta.fields}")
        return cls(
            [key for meta in metas for key in meta.keys],
            [tag for meta in metas for tag in meta.tags],
            first.partition_id,
            first.fields,
            joined_info([meta.extra_info or {} for meta in metas], "KVBatchMeta.concat") or None,
        )


def joined_info(infos: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """Merge the entries of all mappings. ValueError if two values of a key differ. what: the caller, for the error."""
    joined: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in joined and not _same(joined[key], value):
                raise ValueError(
                    f"{what}: extra_info[{key!r}] has conflicting values, {reprlib.repr(joined[key])} and "
                    f"{reprlib.repr(value)}"
                )
            joined.setdefault(key, value)
    return joined


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, with the same type; arrays and tensors by shape and elements."""
    if type(one) is not type(other):
        return False
    if hasattr(one, "tolist"):
        return bool(one.shape == other.shape and one.tolist() == other.tolist())
    return bool(one == other)


def ranges_of(size: int, chunks: int) -> list[range]:
    """Split the positions 0..size-1 into `chunks` ranges of nearly equal length. As in the
    original, ZeroDivisionError for 0, and no ranges for a negative number, here with a warning."""
    if chunks == 0:
        raise ZeroDivisionError("chunks=0: expected an integer of 1 or more")
    if chunks < 0:
        warn_once(f"chunks={chunks}: expected an integer of 1 or more; the result has no samples")
    length, longer_count = divmod(size, chunks)  # the first `longer_count` ranges have one position more
    ends = [number * length + min(number, longer_count) for number in range(chunks + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
