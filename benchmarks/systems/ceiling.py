"""The limit of the machine: one memcpy of the same bytes into a warm buffer."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measure import cores
from benchmarks.payload import Batch, spans
from benchmarks.systems.base import Span

Bytes = npt.NDArray[np.uint8]


class Ceiling:
    """`put` and `read` copy the batch's number of bytes, with one thread or with one on every core."""

    def __init__(self, *, threads: int | None = None) -> None:
        self._threads = cores() if threads is None else threads
        self._pool = ThreadPoolExecutor(self._threads)
        self._source: Bytes = np.empty(0, np.uint8)
        self._target: Bytes = np.empty(0, np.uint8)

    def open(self) -> None:
        """Do nothing: there is no process to start."""

    def put(self, batch: Batch, held: Span | None = None) -> Span:
        if len(self._source) != batch.nbytes:
            self._source, self._target = np.full(batch.nbytes, 1, np.uint8), np.full(batch.nbytes, 2, np.uint8)
        self._copy(Span.of(batch))
        return Span.of(batch)

    def part(self, held: Span, first: int, last: int) -> Span:
        return held.part(first, last)

    def read(self, held: Span, names: list[str]) -> Mapping[str, Any]:
        self._copy(held)
        return {}

    def read_padded(self, held: Span, names: list[str]) -> Mapping[str, Any]:
        return self.read(held, names)

    def drop(self, held: Span) -> None:
        """Do nothing: no batch is stored."""

    def close(self) -> None:
        self._pool.shutdown()

    def _copy(self, span: Span) -> None:
        if self._threads == 1:
            self._part(span.first, span.last)
            return
        parts = [
            (span.first + first, span.first + last) for first, last in spans(span.last - span.first, self._threads)
        ]
        list(self._pool.map(lambda part: self._part(*part), parts))

    def _part(self, first: int, last: int) -> None:
        np.copyto(self._target[first:last], self._source[first:last])
