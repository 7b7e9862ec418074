"""The batches that all systems move, built from a specification, and digests to compare their values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

TOKEN_FIELDS = {"input_ids": torch.int64, "token_mask": torch.int64, "generation_logprobs": torch.float32}
SCALAR_FIELDS = ("reward", "advantage")
WORDS = ("alpha", "beta", "gamma", "delta", "a longer answer with some words in it", "0")


class Shape(StrEnum):
    """TOKENS: jagged token fields and scalars, the batch of a GRPO step. DENSE: float32 fields `[rows, length]`.
    MIXED: a third of the fields dense, a third jagged, a third strings."""

    TOKENS = "tokens"
    DENSE = "dense"
    MIXED = "mixed"


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """length: elements per row, for jagged fields on average. fields: number of fields, for DENSE and MIXED."""

    shape: Shape
    rows: int
    length: int
    fields: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Columns by name: nested jagged tensors, tensors `[rows, ...]` or lists of strings."""

    ids: list[str]
    columns: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all values; strings count as UTF-8."""
        return sum(_nbytes(column) for column in self.columns.values())

    def padded_nbytes(self, parts: int) -> int:
        """Bytes of the tensors that `parts` slices become when the jagged columns of each are padded to its longest
        row."""
        edges = spans(len(self.ids), parts)
        return sum(_padded_nbytes(column, first, last) for column in self.columns.values() for first, last in edges)

    @property
    def names(self) -> list[str]:
        return list(self.columns)


@lru_cache(maxsize=2)
def build(spec: BatchSpec) -> Batch:
    """Return the same batch for the same specification, in every process. Batches of different specifications have
    different ids, and differently named dense fields if their number differs, so that a system can store both."""
    draw = torch.Generator().manual_seed(spec.rows * 31 + spec.length)
    columns: dict[str, Any] = {}
    if spec.shape is Shape.TOKENS:
        lengths = _lengths(spec, draw)
        for name, dtype in TOKEN_FIELDS.items():
            columns[name] = _jagged(lengths, dtype, draw)
        for name in SCALAR_FIELDS:
            columns[name] = torch.rand(spec.rows, generator=draw)
    elif spec.shape is Shape.DENSE:
        for number in range(spec.fields):
            columns[f"dense_{spec.fields}_{number}"] = torch.rand(spec.rows, spec.length, generator=draw)
    else:
        for number in range(max(1, spec.fields // 3)):
            columns[f"dense_{spec.fields}_{number}"] = torch.rand(spec.rows, spec.length, generator=draw)
            columns[f"jagged_{number}"] = _jagged(_lengths(spec, draw), torch.float32, draw)
            columns[f"text_{number}"] = [f"{WORDS[row % len(WORDS)]} {row} " * 4 for row in range(spec.rows)]
    return Batch(ids=[f"{spec.rows}x{spec.length}x{spec.fields}-{row}" for row in range(spec.rows)], columns=columns)


def digest(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash for each column, of its rows and their lengths, independent of the container type."""
    return {name: _digest(columns[name]) for name in sorted(columns.keys())}


def spans(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return `parts` ranges of consecutive rows, as (first, after the last), whose sizes differ by at most one."""
    edges = [rows * part // parts for part in range(parts + 1)]
    return list(pairwise(edges))


def _lengths(spec: BatchSpec, draw: torch.Generator) -> list[int]:
    low = max(1, spec.length // 8)
    drawn = torch.randint(low, 2 * spec.length - low + 1, (spec.rows,), generator=draw)
    return [int(length) for length in drawn]


def _jagged(lengths: list[int], dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    values = torch.randint(0, 50_000, (sum(lengths),), generator=draw).to(dtype)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor(lengths).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths))


def _nbytes(column: Any) -> int:
    if isinstance(column, torch.Tensor):
        values = column.values() if column.is_nested else column
        return values.numel() * values.element_size()
    return sum(len(text.encode()) for text in column)


def _padded_nbytes(column: Any, first: int, last: int) -> int:
    if not isinstance(column, torch.Tensor) or not column.is_nested:
        return _nbytes(column[first:last])
    jagged: Any = column
    longest = int(jagged.offsets()[first : last + 1].diff().max())
    return (last - first) * longest * jagged.values()[:1].numel() * column.element_size()


def _digest(column: Any) -> str:
    found = hashlib.blake2b(digest_size=8)
    for row in _rows(column):
        if isinstance(row, torch.Tensor):
            found.update(repr(tuple(row.shape)).encode())
            found.update(row.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(str(row).encode())
    return found.hexdigest()


def _rows(column: Any) -> Iterable[Any]:
    if isinstance(column, torch.Tensor):
        return column.unbind()
    return list(column)
