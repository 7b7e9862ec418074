"""`KVBatchMeta`: references to samples of a partition, without their data. Does not import torch."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.core.arguments import whole_number
from dataplane.core.schema import GLOBAL_FORWARD_PAD_SEQLEN, PACKING_KEYS
from dataplane.core.types import Scalar
from dataplane.errors import InvalidRequestError, UnsupportedValueError, first_few

Int64s = npt.NDArray[np.int64]
_Value = TypeVar("_Value")
_PER_SAMPLE = ("sample_ids", "sequence_lengths", "tags")
Indices = Sequence[int] | range | npt.NDArray[Any]
MAX_LENGTH = (1 << 63) - 1


class FixedList(list[_Value]):
    """A list that rejects changes in place: the per-sample lists of a meta stay aligned with its row handles."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Take the place of every method that changes a list."""
        raise UnsupportedValueError(
            field="a list of a KVBatchMeta",
            row=None,
            got="a change in place",
            hint="Create a new meta with subset, slice, drop or stamp_tags, or copy the list with list().",
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FixedList, (list(self),)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVBatchMeta:
    """References to N samples of one partition, with their metadata but without their data.

    partition_id: partition of the samples. task_name: task that claimed them, or None. sample_ids: `[N]`.
    fields: columns that the meta refers to, None if unspecified. sequence_lengths: `[N]` tokens per sample, None if
    unknown. extra_info: data about the batch as a whole (`schema` defines the keys that the library uses). tags: `[N]`
    mappings of tag name to scalar, None if unknown. Metas share these mappings: treat them as read-only.

    Every method returns a new meta and leaves this one unchanged; per-sample values stay aligned. Metas created by
    the service carry hidden row handles, which all methods and pickle preserve. The service rejects a read or an
    update through such a meta if a sample was cleared since, even if its id was put again. Metas returned by a claim
    also carry claim ids, which identify the lease for `ack`, `nack` and `extend`. Handles, lengths and tags must not
    be paired with other ids: changing a list in place is a TypeError, and replacing the ids (`dataclasses.replace`)
    is a ValueError. `extra_info` is copied (shallowly) into the new meta, without the packing keys
    (`schema.PACKING_KEYS`) if the rows changed.

    Hidden attributes: `_rows` and `_generations` are the row handles (both or neither), `_claims` the claim ids,
    `_named` the ids that the per-sample values belong to.

    Raises InvalidRequestError (a ValueError) for values that do not align, UnsupportedValueError (a TypeError) for
    wrong types.
    """

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = None  # type: ignore[assignment]  # None is taken as {}
    tags: list[dict[str, Scalar]] | None = None
    _rows: Int64s | None = None
    _generations: Int64s | None = None
    _claims: Int64s | None = None
    _named: list[str] | None = None

    def __post_init__(self) -> None:
        """Check fields, handles and per-sample values. Copy lists and dicts, per-sample lists to FixedLists."""
        name_of("partition_id", self.partition_id)
        if self.task_name is not None:
            name_of("task_name", self.task_name)
        ids = list_of_names("sample_ids", self.sample_ids)
        # `dataclasses.replace` passes on `_named`, the ids of the original meta. Values that belong to those ids are
        # row handles and FixedLists; lists from the caller are plain lists.
        inherited = self._rows is not None or FixedList in (type(self.sequence_lengths), type(self.tags))
        if inherited and self._named is not None and ids != self._named:
            raise InvalidRequestError(
                "sample_ids were replaced, but row handles, sequence_lengths or tags belong to the previous samples; "
                "use subset, slice or drop of the meta, or create a KVBatchMeta with the new ids"
            )
        fields = None if self.fields is None else list_of_names("fields", self.fields)
        tags = None if self.tags is None else _one_per_sample("tags", self.tags, len(ids))
        if tags is not None and not all(isinstance(tag, Mapping) for tag in tags):
            raise UnsupportedValueError(
                field="argument tags",
                row=None,
                got="a list of other values than mappings",
                hint="Pass one mapping per sample.",
            )
        values = {
            "sample_ids": ids,
            "fields": fields,
            "sequence_lengths": _check_lengths(self.sequence_lengths, len(ids)),
            "extra_info": _check_info(self.extra_info),
            "tags": None if tags is None else [dict(tag) for tag in tags],
            "_rows": _check_handles(self._rows, len(ids)),
            "_generations": _check_handles(self._generations, len(ids)),
            "_claims": _check_handles(self._claims, len(ids)),
        }
        if (self._rows is None) != (self._generations is None):
            raise InvalidRequestError(
                "row handles consist of rows and generations, but only one of them was given; pass both or neither"
            )
        _set(self, values)

    @classmethod
    def of_service(
        cls,
        partition: str,
        ids: list[str],
        fields: list[str] | None,
        *,
        rows: Int64s,
        generations: Int64s,
        task: str | None = None,
        claims: Int64s | None = None,
        sequence_lengths: list[int] | None = None,
        tags: list[dict[str, Scalar]] | None = None,
        extra_info: dict[str, Any] | None = None,
    ) -> KVBatchMeta:
        """Create a meta of samples that the service named, with these new lists. Nothing is checked."""
        meta = object.__new__(cls)
        _set(
            meta,
            {
                "partition_id": partition,
                "task_name": task,
                "sample_ids": ids,
                "fields": fields,
                "sequence_lengths": sequence_lengths,
                "extra_info": extra_info or {},
                "tags": tags,
                "_rows": rows,
                "_generations": generations,
                "_claims": claims,
            },
        )
        return meta

    # --- contents ---

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.sample_ids)

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def handles(self) -> tuple[Int64s, Int64s] | None:
        """(rows, generations), each `[N]`, if the service created the meta; else None."""
        return None if self._rows is None or self._generations is None else (self._rows, self._generations)

    @property
    def claims(self) -> Int64s | None:
        """`[N]` claim ids, one per sample, if a claim returned the meta; else None."""
        return self._claims

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVBatchMeta):
            return NotImplemented
        return all(
            _same(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(KVBatchMeta)
            if field.name != "_named"  # the same as sample_ids
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        samples = f"{self.size} samples"
        if self.size:
            samples += f": {first_few(self.sample_ids)}"
        words = [repr(self.partition_id), samples]
        if self.task_name is not None:
            words.append(f"task={self.task_name!r}")
        if self.fields is not None:
            words.append(f"fields={self.fields}")
        if self.sequence_lengths is not None:
            words.append(f"tokens={sum(self.sequence_lengths)}")
        if self.extra_info:
            words.append(f"extra_info={sorted(self.extra_info)}")
        return f"KVBatchMeta({', '.join(words)})"

    # --- other samples ---

    def subset(self, indices: Indices) -> KVBatchMeta:
        """Return the samples at `indices` (each in [0, N), any order, repeats allowed) or selected by a boolean mask
        `[N]`."""
        checked = _check_indices(indices, self.size)
        return self._take(checked.tolist(), checked)

    def slice(self, start: int, end: int) -> KVBatchMeta:
        """Return samples [start, end). Raises ValueError unless 0 <= start <= end <= N."""
        start = whole_number("slice: start", start, 0)
        end = whole_number("slice: end", end, 0)
        if not start <= end <= self.size:
            raise InvalidRequestError(
                f"slice({start}, {end}): expected 0 <= start <= end <= {self.size}, the number of samples"
            )
        return self._take(range(start, end), np.arange(start, end))

    def drop(self, sample_ids: Collection[str]) -> KVBatchMeta:
        """Return all samples except those with these ids. Raises ValueError if the meta lacks one of the ids. To drop
        samples by position, use `subset` with a mask."""
        dropped = set(list_of_names("sample_ids", sample_ids))
        unknown = dropped.difference(self.sample_ids)
        if unknown:
            raise InvalidRequestError(f"cannot drop samples {first_few(sorted(unknown))}: they are not in this meta")
        return self.subset([index for index, name in enumerate(self.sample_ids) if name not in dropped])

    @classmethod
    def concat(cls, metas: Iterable[KVBatchMeta]) -> KVBatchMeta:
        """Concatenate the samples of `metas`, in order. All must have the same partition and at most one task. Nothing
        else is taken from metas without samples, except from the first one if no meta has samples.

        `fields` of the result are those that every meta has. Lengths, handles, claim ids and `fields` are unknown
        (None) in the result if they are unknown in any meta; missing tags become empty. `extra_info` keeps each entry
        that is equal in all metas that have it, but the global pad target only if every meta has it.
        """
        if isinstance(metas, KVBatchMeta):
            hint = "Pass a list of metas."
            raise UnsupportedValueError(field="argument metas", row=None, got="one KVBatchMeta", hint=hint)
        given = [require_meta(meta, "metas") for meta in _iterable("metas", metas)]
        partitions = list(dict.fromkeys(meta.partition_id for meta in given))
        tasks = [task for task in dict.fromkeys(meta.task_name for meta in given) if task is not None]
        if not given:
            raise InvalidRequestError("cannot concatenate 0 metas: pass at least one")
        if len(partitions) != 1 or len(tasks) > 1:
            what = f"partitions {first_few(partitions)}" if len(partitions) != 1 else f"tasks {first_few(tasks)}"
            raise InvalidRequestError(f"cannot concatenate metas of {what}: all metas must have the same one")
        metas = [meta for meta in given if meta.size] or given[:1]  # if all are empty, the first one
        return _create(
            partition_id=partitions[0],
            task_name=tasks[0] if tasks else None,
            sample_ids=[name for meta in metas for name in meta.sample_ids],
            fields=_common_fields(metas),
            sequence_lengths=_concatenate_lists([meta.sequence_lengths for meta in metas]),
            extra_info=_common_info(metas),
            tags=_concatenate_tags(metas),
            _rows=_concatenate_arrays([meta._rows for meta in metas]),
            _generations=_concatenate_arrays([meta._generations for meta in metas]),
            _claims=_concatenate_arrays([meta._claims for meta in metas]),
        )

    # --- the same samples ---

    def with_fields(self, fields: Sequence[str] | None) -> KVBatchMeta:
        """Return a meta that refers to `fields`."""
        return self._replace(fields=None if fields is None else list_of_names("fields", fields))

    def with_handles(self, rows: Int64s, generations: Int64s) -> KVBatchMeta:
        """Return a meta with these row handles, `[N]` each, which the client receives from the service."""
        return self._replace(_rows=_check_handles(rows, self.size), _generations=_check_handles(generations, self.size))

    def stamp_tags(self, tags: Sequence[Mapping[str, Scalar]] | Mapping[str, Sequence[Scalar]]) -> KVBatchMeta:
        """Return a meta with `tags` merged in: one mapping per sample, or name -> `[N]` values. The tags stored by the
        service do not change."""
        if isinstance(tags, Mapping):
            columns = {name: _one_per_sample(f"tag {name!r}", values, self.size) for name, values in tags.items()}
            new: list[dict[str, Scalar]] = [
                {name: values[row] for name, values in columns.items()} for row in range(self.size)
            ]
        else:
            new = [dict(tag) for tag in _one_per_sample("tags", tags, self.size)]
        old = self.tags if self.tags is not None else [{}] * self.size
        return self._replace(tags=[{**old_tags, **new_tags} for old_tags, new_tags in zip(old, new, strict=True)])

    def _replace(self, **changes: Any) -> KVBatchMeta:
        """Return a meta with these values, already validated, and this meta's other values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _create(**{**values, "extra_info": dict(self.extra_info), **changes})

    def _take(self, indices: Sequence[int], array: npt.NDArray[Any]) -> KVBatchMeta:
        """Return the samples at `indices`. array: the same indices as an array."""
        lengths = self.sequence_lengths
        tags = self.tags
        return self._replace(
            sample_ids=_pick(self.sample_ids, indices),
            sequence_lengths=None if lengths is None else _pick(lengths, indices),
            extra_info={key: value for key, value in self.extra_info.items() if key not in PACKING_KEYS},
            tags=None if tags is None else _pick(tags, indices),
            _rows=None if self._rows is None else self._rows[array],
            _generations=None if self._generations is None else self._generations[array],
            _claims=None if self._claims is None else self._claims[array],
        )


def _create(**values: Any) -> KVBatchMeta:
    """Create a meta from values that are already validated."""
    meta = object.__new__(KVBatchMeta)
    _set(meta, values)
    return meta


def _set(meta: KVBatchMeta, values: dict[str, Any]) -> None:
    """Set attributes of a new meta: lists with one entry per sample as FixedLists, and `_named` to its sample ids."""
    for name, value in values.items():
        fixed = name in _PER_SAMPLE and type(value) is list
        object.__setattr__(meta, name, FixedList(value) if fixed else value)
    object.__setattr__(meta, "_named", meta.sample_ids)


def _pick(values: list[_Value], indices: Sequence[int]) -> list[_Value]:
    """Return the values at `indices`. `itemgetter` is faster than a loop, but needs two indices to return a tuple."""
    return list(itemgetter(*indices)(values)) if len(indices) > 1 else [values[index] for index in indices]


# --- checks -------------------------------------------------------------------------------------------------------


def list_of_names(what: str, names: Iterable[str]) -> list[str]:
    """Return the names, given as argument `what`, as a list. Raises InvalidRequestError for one
    string (whose characters would be taken for names), and UnsupportedValueError for other
    values."""
    if isinstance(names, str):
        raise InvalidRequestError(f"{what}={names!r}: pass a list of names, not one string")
    if not isinstance(names, Iterable):
        raise _no_names(what, None, names, "Pass a list of strings.")
    listed = list(names)
    for row, name in enumerate(listed):
        if not isinstance(name, str):
            raise _no_names(what, row, name, "Pass a list of strings.")
    return listed


def name_of(what: str, name: str) -> str:
    """Return the name, given as argument `what`. Raises UnsupportedValueError unless it is a
    string."""
    if not isinstance(name, str):
        raise _no_names(what, None, name, "Pass a string.")
    return name


def _no_names(what: str, row: int | None, got: Any, hint: str) -> UnsupportedValueError:
    shown = "None" if got is None else f"{type(got).__name__} {reprlib.repr(got)}"
    return UnsupportedValueError(field=f"argument {what}", row=row, got=shown, hint=hint)


def require_meta(meta: KVBatchMeta, what: str = "meta") -> KVBatchMeta:
    """Return the argument `what`. Raises UnsupportedValueError unless it is a `KVBatchMeta`."""
    if not isinstance(meta, KVBatchMeta):
        hint = "Pass a KVBatchMeta, as put_samples, list_samples and claim_meta return it."
        got = type(meta).__name__
        raise UnsupportedValueError(field=f"argument {what}", row=None, got=got, hint=hint)
    return meta


def _check_info(info: Any) -> dict[str, Any]:
    """Return a copy of the `extra_info` (None: {}). UnsupportedValueError for other types."""
    if info is not None and not isinstance(info, Mapping):
        raise _no_names("extra_info", None, info, "Pass a mapping.")
    return dict(info or {})


def _iterable(what: str, values: Iterable[_Value]) -> Iterable[_Value]:
    """Return the argument `what`. UnsupportedValueError unless it can be iterated over."""
    if not isinstance(values, Iterable):
        raise _no_names(what, None, values, "Pass a list.")
    return values


def _one_per_sample(what: str, values: Iterable[Any], size: int) -> list[Any]:
    """Return the values as a list. InvalidRequestError unless there is one per sample."""
    listed = list(values.tolist() if hasattr(values, "tolist") else _iterable(what, values))
    if len(listed) != size:
        raise InvalidRequestError(f"{what}: got {len(listed)} values for {size} samples; pass one per sample")
    return listed


def _check_lengths(lengths: Any, size: int) -> list[int] | None:
    """Return the lengths as ints (None: unknown). InvalidRequestError unless there is one integer of 0 to `MAX_LENGTH`
    per sample."""
    if lengths is None:
        return None
    listed = _one_per_sample("sequence_lengths", lengths, size)
    # The common case, without a Python step per value: all are plain ints.
    if not set(map(type, listed)) - {int} and min(listed, default=0) >= 0 and max(listed, default=0) <= MAX_LENGTH:
        return listed
    for length in listed:
        if not _is_length(length):
            raise InvalidRequestError(f"sequence_lengths: expected integers of 0 or more, got {str(length)[:40]}")
    return [int(length) for length in listed]


def _is_length(length: Any) -> bool:
    """Whether the value, of any type except bool, equals an integer of 0 to `MAX_LENGTH`."""
    try:
        return not isinstance(length, bool) and 0 <= int(length) <= MAX_LENGTH and int(length) == length
    except (TypeError, ValueError, OverflowError):
        return False


def _check_handles(handles: Any, size: int) -> Int64s | None:
    """Return rows, generations or claim ids as an int64 array `[size]` (None: unknown). InvalidRequestError for another
    shape."""
    if handles is None:
        return None
    array = np.asarray(handles, dtype=np.int64)
    if array.shape != (size,):
        raise InvalidRequestError(f"row handles have shape {list(array.shape)}, expected [{size}] (one per sample)")
    return array


def _check_indices(indices: Any, size: int) -> Int64s:
    """Convert indices or a boolean mask to validated int64 indices."""
    is_tensor = hasattr(indices, "tolist") and not isinstance(indices, np.ndarray)  # of torch, which is not imported
    given = np.asarray(indices.tolist() if is_tensor else indices)
    if given.dtype == np.bool_:
        if given.shape != (size,):
            raise InvalidRequestError(f"the mask has shape {list(given.shape)}, expected [{size}] (one per sample)")
        return np.flatnonzero(given)
    if not given.size:
        return np.zeros(0, dtype=np.int64)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise InvalidRequestError(
            f"indices must be a one-dimensional list of integers, got {given.dtype} of shape {list(given.shape)}"
        )
    wrong = (given < 0) | (given >= size)
    if wrong.any():
        raise InvalidRequestError(
            f"index {given[wrong][0]} is outside a meta of {size} samples: indices count from 0, negative ones are not "
            "supported"
        )
    return given.astype(np.int64)


# --- joining ------------------------------------------------------------------------------------------------------


def _concatenate_lists(lists: Sequence[list[int] | None]) -> list[int] | None:
    """Concatenate the lists. Return None if one of them is None."""
    joined: list[int] = []
    for each in lists:
        if each is None:
            return None
        joined += each
    return joined


def _concatenate_arrays(arrays: Sequence[Int64s | None]) -> Int64s | None:
    known = [array for array in arrays if array is not None]
    return np.concatenate(known) if len(known) == len(arrays) else None


def _concatenate_tags(metas: Sequence[KVBatchMeta]) -> list[dict[str, Scalar]] | None:
    """Concatenate the tags; those of a meta without tags are empty. Return None if no meta has tags."""
    if all(meta.tags is None for meta in metas):
        return None
    joined: list[dict[str, Scalar]] = []
    for meta in metas:
        joined += meta.tags if meta.tags is not None else [{} for _ in range(meta.size)]
    return joined


def _common_fields(metas: Sequence[KVBatchMeta]) -> list[str] | None:
    """Return the fields that every meta has, in the order of the first one. None if a meta does not name its fields."""
    field_lists = [meta.fields for meta in metas if meta.fields is not None]
    if len(field_lists) < len(metas):
        return None
    return [name for name in field_lists[0] if all(name in fields for fields in field_lists[1:])]


def _common_info(metas: Sequence[KVBatchMeta]) -> dict[str, Any]:
    """Return the `extra_info` of concatenated metas: each entry that is equal in all metas that have it, with two
    exceptions. The packing keys are dropped unless there is only one meta, because they describe the rows of one meta.
    The global pad target is dropped unless it is in every meta."""
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for meta in metas for key in meta.extra_info):
        values = [meta.extra_info[key] for meta in metas if key in meta.extra_info]
        if key == GLOBAL_FORWARD_PAD_SEQLEN and len(values) < len(metas):
            continue
        if key in PACKING_KEYS and len(metas) > 1:
            continue
        if all(_same(values[0], value) for value in values[1:]):
            common[key] = values[0]
    return common


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal. Arrays and tensors are compared by their elements, dicts entry by entry."""
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if hasattr(one, "tolist") and hasattr(other, "tolist"):
        return type(one) is type(other) and bool(one.tolist() == other.tolist())
    return bool(one == other)
