"""The short forms of `Commit` and `Locate` for a few samples.

Their `plan` has the columns, encoded once for many commands; `encode_plan` makes it. That of a
`LocateRows` can be complete: it has all fields that all of the samples have. They name samples by
`ids`, or by `rows` and `generations`. Values of several columns follow each other in one tuple:
those of the first column, one for each sample, then those of the second one, and so on."""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from dataplane.core.schema import columns_of, field_of
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import InvalidRequestError
from dataplane.ledger.commands.requests import Answered, Commit, Locate
from dataplane.ledger.commands.results import Committed, Located, Result
from dataplane.ledger.commands.values import (
    CommitColumn,
    Int64,
    Mode,
    Samples,
    TagColumn,
)

MAX_PLAN_BYTES = 1 << 16
PLANS = 1024
"""Maximum number of decoded plans that are cached."""


class PutRows(Answered[Committed], frozen=True, kw_only=True):
    """Put a few samples into preallocated space, or with a plan of no columns only their tags (then
    `reservation` and `offset` mean nothing), as the `Commit` that `expand` returns. Answered
    `Committed`.

    `lengths` and `checksums` (none: no checksums) are those of the values. `tags` has a value for
    each sample."""

    partition: str
    mode: Mode
    reservation: Int64
    offset: Int64
    plan: bytes
    lengths: tuple[Int64, ...]
    ids: tuple[str, ...] = ()
    rows: tuple[Int64, ...] = ()
    generations: tuple[Int64, ...] = ()
    checksums: tuple[Int64, ...] = ()
    tags: dict[str, tuple[str | bool | Int64 | float | None, ...]] = msgspec.field(default_factory=dict)
    listed: bool = False

    def expand(self) -> Commit:
        """Return the general command with the same meaning. Raises `InvalidRequestError` if the
        plan is malformed, or the lengths and checksums are not those of its columns."""
        columns = decode_plan(self.plan).columns
        count = len(self.ids) or len(self.rows)
        for what, given in (("lengths", self.lengths), ("checksums", self.checksums)):
            if len(given) != count * len(columns) and (given or what == "lengths"):
                raise InvalidRequestError(
                    f"PutRows: {len(given)} {what} for {count} samples and {len(columns)} columns"
                )
        for checksum in self.checksums:
            if not 0 <= checksum < 1 << 32:
                raise InvalidRequestError(f"PutRows: checksum {checksum}: a checksum has 32 bits")
        lengths = np.array(self.lengths, np.int64).reshape(len(columns), count)
        checksums = np.array(self.checksums, np.uint32).reshape(-1, count) if self.checksums else None
        return Commit(
            partition=self.partition,
            samples=_samples(self.ids, self.rows, self.generations),
            mode=self.mode,
            reservation=self.reservation if columns else None,
            offset=self.offset if columns else None,
            columns=tuple(
                CommitColumn(
                    name=column.name,
                    spec=column.spec,
                    lengths=lengths[position],
                    checksums=None if checksums is None else checksums[position],
                    by_schema=column.by_schema,
                )
                for position, column in enumerate(columns)
            ),
            tags=tuple(TagColumn(name=name, values=values) for name, values in self.tags.items()),
            listed=self.listed,
        )


class RowsLocated(Result, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to `LocateRows`: handles of the samples, and where the values of all columns are
    in the arena of one unit. `checksums` are those that the reader must compare (0: none; empty:
    none at all). `general`: the whole answer, if it has no short form."""

    rows: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    unit: int = 0
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()
    general: Located | None = None


class LocateRows(Answered[RowsLocated], frozen=True, kw_only=True):
    """Locate and pin a few samples, as the brief `Locate` that `expand` returns. Answered
    `RowsLocated`, in its short form only if the fields have the specs of the plan, and a complete
    plan is still complete."""

    partition: str
    plan: bytes
    ids: tuple[str, ...] = ()
    rows: tuple[Int64, ...] = ()
    generations: tuple[Int64, ...] = ()

    def expand(self) -> Locate:
        """Return the general command with the same meaning. Raises `InvalidRequestError` if the
        plan is malformed."""
        return Locate(
            partition=self.partition,
            samples=_samples(self.ids, self.rows, self.generations),
            fields=decode_plan(self.plan).names,
            brief=True,
        )


SHORT = (PutRows, LocateRows)
"""The commands that have a general form. gRPC has only that."""


def _samples(ids: tuple[str, ...], rows: tuple[int, ...], generations: tuple[int, ...]) -> Samples:
    if ids:
        return Samples(ids=ids)
    return Samples(rows=np.array(rows, np.int64), generations=np.array(generations, np.int64))


class _EncodedColumn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A column as a plan has it."""

    name: str
    kind: FieldKind | None
    dtype: str | None
    inner: tuple[int, ...] | None
    by_schema: bool


class PlanColumn:
    """A column of a plan: name, spec and `by_schema` as in `CommitColumn`."""

    def __init__(self, name: str, spec: FieldSpec, *, by_schema: bool) -> None:
        self.name = name
        self.spec = spec
        self.by_schema = by_schema
        self.unit_bytes = spec.unit_bytes if spec.settled else 0
        self.is_dense = spec.kind is FieldKind.DENSE


class Plan:
    """The columns of a short command. Many commands share it. complete: the samples have no other
    fields in common."""

    def __init__(self, columns: tuple[PlanColumn, ...], *, complete: bool) -> None:
        self.columns = columns
        self.complete = complete
        self.names = tuple([column.name for column in columns])
        # The other columns that can hold rows of these fields.
        self.others = frozenset(other for name in self.names for other in columns_of(name)[1:])
        # Whether each column occurs once, is the one of its field's name, and has a complete spec.
        distinct = len(set(self.names)) == len(self.names)
        own = all(field_of(name) == name for name in self.names)
        self.is_valid = distinct and own and all(column.spec.settled for column in columns)

    def nbytes(self, lengths: tuple[int, ...]) -> int:
        """Return the bytes of values of these lengths."""
        count = len(lengths) // max(len(self.columns), 1)
        return sum(
            [
                sum(lengths[position * count : (position + 1) * count]) * column.unit_bytes
                for position, column in enumerate(self.columns)
            ]
        )


def encode_plan(columns: tuple[PlanColumn, ...], *, complete: bool = False) -> bytes:
    """Encode the columns of short commands, for their `plan`. Equal plans have equal bytes. That of
    a complete plan ends with true."""
    encoded: list[_EncodedColumn | bool] = [
        _EncodedColumn(column.name, column.spec.kind, column.spec.dtype, column.spec.inner, column.by_schema)
        for column in columns
    ]
    return _encode([*encoded, True] if complete else encoded)


@functools.lru_cache(PLANS)
def decode_plan(plan: bytes) -> Plan:
    """Decode a plan. Raises `InvalidRequestError` for other bytes."""
    if len(plan) > MAX_PLAN_BYTES:
        raise InvalidRequestError(f"a plan of {len(plan)} bytes: it has at most {MAX_PLAN_BYTES}")
    try:
        decoded = _decode(plan)
        return Plan(
            tuple(
                PlanColumn(each.name, FieldSpec(each.kind, each.dtype, each.inner), by_schema=each.by_schema)
                for each in decoded
                if isinstance(each, _EncodedColumn)
            ),
            complete=True in decoded,
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequestError(f"malformed plan: {error}") from error


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[_EncodedColumn | bool, ...]).decode
