"""Copies within a unit's arena, as ordered, in steps. No sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from dataplane.core.failpoints import hit
from dataplane.ledger.commands import CompactArena, Compacted, Input
from dataplane.storage.arena import Arena

log = logging.getLogger(__name__)

STEP_BYTES = 8 << 20
STEP_RANGES = 1024
"""Limits of one step, which also fsyncs its copies if rows must survive a machine restart. Between steps the server
handles requests."""


class Copies:
    """Execute compaction orders. `report` receives the outcomes. A repeated order is not executed again, because its
    target space may have another owner by then. Not thread-safe: used by the unit's thread only."""

    def __init__(self, arena: Arena, report: Callable[[Input], None]) -> None:
        self._arena = arena
        self._report = report
        self._order: CompactArena | None = None
        self._steps: Iterator[bool] = iter(())  # of `_order`, the current order
        self._last: Compacted | None = None  # the outcome of the last executed order

    @property
    def in_flight(self) -> bool:
        """Whether an order needs further steps."""
        return self._order is not None

    def begin(self, order: CompactArena) -> None:
        """Start an order, instead of another one in progress. An order that is in progress itself just continues; one
        that was executed is not executed again: its outcome is reported again, or an error if a newer one followed."""
        if self._last is not None and order.number == self._last.number:
            self._report(self._last)
        elif self._last is not None and order.number < self._last.number:
            error = f"the newer order {self._last.number} was already executed"
            self._report(Compacted(unit=order.unit, number=order.number, error=error))
        elif self._order is None or order.number != self._order.number:
            self._order, self._steps = order, self._copy(order)

    def step(self) -> None:
        """Run one step of the current order."""
        order, error = self._order, None
        assert order is not None
        try:
            if next(self._steps, False):  # True: further steps may follow
                return
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            log.exception("Storage unit %d cannot copy within its arena", order.unit)
        self._order, self._last = None, Compacted(unit=order.unit, number=order.number, error=error)
        hit("unit.before_compacted")
        self._report(self._last)

    def _copy(self, order: CompactArena) -> Iterator[bool]:
        """Execute the order, and yield True after each step. Raises ValueError for ranges outside the backed bytes."""
        sources, targets, sizes = order.sources.tolist(), order.targets.tolist(), order.sizes.tolist()
        # Check all sources and targets before the first copy.
        for first, size in zip([*sources, *targets], [*sizes, *sizes], strict=True):
            if first < 0 or size < 0 or first + size > self._arena.backed_bytes:
                raise ValueError(f"bytes {first} to {first + size}: only {self._arena.backed_bytes} bytes are backed")
        for step in _steps(sources, targets, sizes):
            for source, target, size in step:
                self._arena.data[target : target + size] = self._arena.data[source : source + size]
            if self._arena.fsynced:
                self._arena.force([target for _, target, _ in step], [size for _, _, size in step])
            hit("unit.mid_compaction")
            yield True


def _steps(sources: list[int], targets: list[int], sizes: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the ranges (source, target, bytes) of each step, in order; longer ranges are split. Sources are live and
    targets were free, so no two ranges overlap."""
    step: list[tuple[int, int, int]] = []
    left = STEP_BYTES  # for this step
    for source, target, size in zip(sources, targets, sizes, strict=True):
        copied = 0
        while copied < size:
            part = min(size - copied, left)
            step.append((source + copied, target + copied, part))
            copied += part
            left -= part
            if not left or len(step) == STEP_RANGES:
                yield step
                step, left = [], STEP_BYTES
    if step:
        yield step
