"""The write-back of one rank: whole rows by the leader, or parts of rows that the leader joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dataplane import DataPlaneClient, KVBatchMeta, write_columns
from dataplane.core.schema import INPUT_LENGTHS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_ALIGNED_FIELDS
from dataplane.data.columns import require_fields
from dataplane.data.jagged import is_jagged, pack_jagged_fields, padded_width
from dataplane.data.object_codec import describe_tensor, plain_tensor
from dataplane.data.row_parts import Inner, RowParts, Tokens, row_parts
from dataplane.data.tensor_memory import DTYPE_NAMES
from dataplane.errors import InvalidRequestError
from workers.training.batch_codec import as_bytes, values_and_lengths
from workers.training.replica_fetch import FetchedPart, ReplicaGroup
from workers.training.row_fetch import cut_like_fetched, encoded, meta_digest
from workers.training.row_join import FieldPart, JoinedField, PlacedPart, decode_parts, encode_parts, join_plan
from workers.training.scatter import Transfer


@dataclass(frozen=True, kw_only=True)
class RowWriteBack:
    """A write-back of columns of the samples of `meta`. client, leads, fields and pad_length are called when needed,
    because their errors are then raised on all siblings. pad_length: of the batch, 0 for this rank's longest row.
    tokens, inner: the part of the rows that the fields have, see `DataPlaneClient.get_batch`."""

    client: Callable[[], DataPlaneClient]
    leads: Callable[[], bool]
    meta: KVBatchMeta
    fields: Callable[[], Mapping[str, torch.Tensor]]
    pad_length: Callable[[], int]
    tokens: Tokens | None
    inner: Inner | None

    def store(self, replicas: Callable[[], ReplicaGroup | None]) -> None:
        """Store whole rows on the leader. Without whole rows, store those that the parts of all ranks of the replica
        group cover, or without a group, those that the parts of this rank cover."""
        group = replicas() if self.in_parts else None
        if group is not None:
            self._through(group)
        elif self.leads():
            self._alone() if self.in_parts else self._whole()

    @property
    def in_parts(self) -> bool:
        """Whether the fields have parts of rows."""
        return self.tokens is not None or self.inner is not None

    def _whole(self) -> None:
        fields = self._checked_fields()
        write_columns(self.client(), self.meta, fields, token_aligned_fields=self._per_token(fields))

    def _alone(self) -> None:
        join = _Join(self)
        for transfer in join.plan(0, [join.describe()]):
            transfer.place(transfer.piece())
        join.put()

    def _through(self, replicas: ReplicaGroup) -> None:
        join = _Join(self)
        part = FetchedPart(leads=self.leads, digest=self._digest, wanted=join.describe)
        replicas.write_back(part, join.plan, join.put)

    def own_parts(self) -> Iterator[tuple[FieldPart, torch.Tensor]]:
        """Yield the description and the values `[elements, *inner]` of this rank's part of each field."""
        fields = self._checked_fields()
        # A rank without results can pass the slices of other ranks' fields.
        names = [*fields.keys()] or self.inner or ()
        row_parts(self.tokens, self.inner, self.meta.size, names)  # for its errors
        per_token = self._per_token(fields)
        for name, value in fields.items():
            value = value.detach()
            if value.is_nested and not is_jagged(value) and len({row.shape[1:] for row in value.unbind()}) > 1:
                raise InvalidRequestError(
                    f"write-back of {name!r}: nested rows of parts may differ in their first dimension only"
                )
            rows: RowParts | None
            if self.tokens is not None and (value.is_nested or value.dim() > 1):
                rows, value = self._ranges(name, value)
            else:
                rows = row_parts(None, self._slices(name), self.meta.size, [name])
                lengths = self._lengths
                padded = name in per_token and not value.is_nested and value.dim() > 1
                # A column [N, W] whose W is sliced has no dimension of tokens, whatever W is.
                sliced = 0 if rows is None or name in TOKEN_ALIGNED_FIELDS else len(rows.slices[name])
                if padded and value.dim() >= 2 + sliced and lengths is not None:
                    value = pack_jagged_fields({name: value}, lengths=lengths, token_aligned_fields=[name])[name]
            yield self._described(name, value, rows)

    def _ranges(self, name: str, value: torch.Tensor) -> tuple[RowParts, torch.Tensor]:
        """Return this rank's part of a per-token field and its values as a jagged tensor."""
        whole = self._lengths
        if whole is None:
            raise InvalidRequestError(
                f"write-back of {name!r}: tokens= needs the lengths of the samples, but the meta has no "
                f"sequence_lengths: set them, or put the samples with the tag {INPUT_LENGTHS!r}"
            )
        tokens = cut_like_fetched(self.tokens, "jagged" if value.is_nested else "padded", self.pad_length, self.meta)
        rows = row_parts(tokens, self._slices(name), self.meta.size, [name])
        assert rows is not None
        lengths = rows.lengths(whole)
        if value.is_nested:
            given = values_and_lengths(value)[1].tolist()
            for sample, wanted, got in zip(self.meta.sample_ids, lengths, given, strict=True):
                if wanted != got:
                    raise InvalidRequestError(
                        f"write-back of {name!r}: the part of sample {sample!r} has {wanted} tokens, got a row of "
                        f"{got} (nested columns are cut as in a fetch of layout 'jagged')"
                    )
            return rows, value
        width = padded_width(np.array(lengths), rows.width)
        if value.size(1) != width:
            raise InvalidRequestError(
                f"write-back of {name!r}: the parts of {len(lengths)} samples are padded to {width} tokens, got shape "
                f"{list(value.shape)}; pass tokens and dp_aligned_seq_len as in the fetch, and store columns that are "
                "not per-token, such as dense ones, without tokens"
            )
        return rows, pack_jagged_fields({name: value}, lengths=lengths, token_aligned_fields=[name])[name]

    def _described(self, name: str, value: torch.Tensor, rows: RowParts | None) -> tuple[FieldPart, torch.Tensor]:
        lengths = None
        values = value
        if value.is_nested:
            values, counts = values_and_lengths(value)
            ranged = rows is not None and rows.ranges is not None
            lengths = b"" if ranged or counts.tolist() == self.meta.sequence_lengths else counts.numpy().tobytes()
        inner = tuple(values.shape[1:])
        if value.dtype not in DTYPE_NAMES:  # of a nested tensor, see `_checked_fields`
            raise TypeError(f"write-back of {name!r}: values of {value.dtype} cannot be stored")
        slices = () if rows is None else rows.slices.get(name, ())
        if len(slices) > len(inner) or any(min(each.start or 0, each.stop or 0) < 0 for each in slices):
            raise InvalidRequestError(
                f"write-back of {name!r}: inner={list(slices)} for elements of shape {list(inner)}: expected at most "
                f"{len(inner)} slices, with bounds of at least 0"
            )
        return FieldPart(name, encoded(rows), DTYPE_NAMES[value.dtype], inner, lengths), values

    @property
    def _lengths(self) -> list[int] | None:
        """The tokens of each sample; None if they are not known."""
        return self.meta.sequence_lengths if self.meta.size else []

    def _slices(self, name: str) -> Inner:
        return {name: self.inner[name]} if self.inner and name in self.inner else {}

    def _checked_fields(self) -> Mapping[str, torch.Tensor]:
        """Return the fields. TypeError for values other than ordinary tensors, ValueError for another number of
        rows. Errors of `require_fields`."""
        fields, samples = self.fields(), self.meta.size
        require_fields(fields)
        for name, value in fields.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"write-back of {name!r}: expected a tensor, got {type(value).__name__}")
            if value.is_meta or (not value.is_nested and plain_tensor(value) is None):
                raise TypeError(f"write-back of {name!r}: {describe_tensor(value)} cannot be stored")
            if value.dim() == 0 or value.size(0) != samples:
                got = f"{value.size(0)} nested rows" if value.is_nested else f"shape {list(value.shape)}"
                raise ValueError(
                    f"write-back of {name!r}: expected {samples} rows, one per sample of the meta, got {got}"
                )
        return fields

    def _per_token(self, fields: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names of the fields that are per-token if they are padded and whole."""
        pad_length = self.pad_length() or max(self.meta.sequence_lengths or [0])  # default: the longest sample
        padded = {name for name, value in fields.items() if not value.is_nested and value.dim() > 1}  # [N, S, ...]
        return TOKEN_ALIGNED_FIELDS | {name for name in padded if fields[name].size(1) == pad_length}

    def _digest(self) -> bytes:
        return meta_digest(self.meta, f"write-back {self.pad_length()} {self.meta.sequence_lengths}")


class _Join:
    """The state of a write-back of parts: this rank's values by field, the plan, and on the leader the joined rows."""

    def __init__(self, write_back: RowWriteBack) -> None:
        self._write_back = write_back
        self._own: dict[str, torch.Tensor] = {}
        self._fields: list[JoinedField] = []
        self._values: dict[str, torch.Tensor] = {}

    def describe(self) -> bytes:
        """Return the encoded descriptions of this rank's parts."""
        described = []
        for part, values in self._write_back.own_parts():
            described.append(part)
            self._own[part.name] = values
        return encode_parts(described)

    def plan(self, leader: int, described: list[bytes]) -> list[Transfer]:
        """Return the transfers that join the parts of all ranks."""
        self._fields = join_plan([decode_parts(data) for data in described], leader, self._write_back.meta)
        return [
            Transfer(placed.rank, placed.nbytes, partial(self._piece, field), partial(self._place, field, placed))
            for field in self._fields
            for placed in field.parts
            if placed.nbytes
        ]

    def put(self) -> None:
        """Store the joined rows."""
        columns = {}
        for field in self._fields:
            values = self._values.pop(field.name, None)
            columns[field.name] = field.column(field.empty() if values is None else values)  # None: of 0 bytes
        write_columns(self._write_back.client(), self._write_back.meta, columns, token_aligned_fields=())

    def _piece(self, field: JoinedField) -> torch.Tensor:
        return as_bytes(self._own[field.name])

    def _place(self, field: JoinedField, placed: PlacedPart, data: torch.Tensor) -> None:
        if field.name not in self._values:
            self._values[field.name] = field.empty()
        field.place(self._values[field.name], placed, data)


def result_field(
    meta: KVBatchMeta, result: Any, result_key: str, tq_field: str, *, in_parts: bool
) -> dict[str, torch.Tensor]:
    """Return `result[result_key]` of a worker method as the field `tq_field`. in_parts: `result` can be empty, on a
    rank that has none of the result; then return no field.

    TypeError if `result` is not a mapping or the value is not a tensor. KeyError if it lacks `result_key`. ValueError
    for log-probs without a token dimension. Each error names the key, the type and the shapes.
    """
    if not isinstance(result, Mapping):
        raise TypeError(f"the method must return a mapping with {result_key!r}, got {type(result).__name__}")
    keys = [*result.keys()]
    if in_parts and not keys:
        return {}
    if result_key not in keys:
        raise KeyError(f"the result has no {result_key!r}; it has {', '.join(map(str, keys)) or 'nothing'}")
    value = result[result_key]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"result[{result_key!r}] (for {tq_field!r}): expected a tensor, got {type(value).__name__}")
    if tq_field in (PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS) and not value.is_nested and value.dim() < 2:
        raise ValueError(
            f"result[{result_key!r}] (for {tq_field!r}): expected a per-token tensor [{meta.size}, S], got shape "
            f"{list(value.shape)}"
        )
    return {tq_field: value}
