"""Draining a storage unit: copy its rows to other units while clients continue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dataplane.client.operations.put import release_space
from dataplane.client.operations.retry import ensure_known, with_retry
from dataplane.client.operations.steps import Operation, Post, Send, Sent, Work
from dataplane.client.session_state import SessionState
from dataplane.core.durations import as_timeout
from dataplane.core.failpoints import failpoint
from dataplane.data.columns import EncodedColumn, FlatValues, checked
from dataplane.errors import (
    CapacityTimeoutError,
    ChecksumError,
    DataPlaneError,
    DrainError,
    PartitionDroppedError,
    PartitionNotFoundError,
    RequestTooLargeError,
    ServiceRestartedError,
    StorageUnitError,
)
from dataplane.ledger import commands as c

log = logging.getLogger(__name__)

PAGE_BYTES = 64 << 20
"""Bytes moved at a time (one page), unless a single value is larger. While a page is moved, it takes space twice; if
other units do not have that space, pages get smaller."""
LOOK_S = 5.0
"""Longest wait between two scans for remaining cells, while puts, readers or a lack of space delay the drain."""
TRIES = 3
"""Maximum number of consecutive attempts to move a page when its target unit fails."""


@dataclass(frozen=True, kw_only=True)
class Drained:
    """Result of a drain. The unit has no rows; readers still hold `pinned_bytes` on it (mostly as views)."""

    unit: int
    cells: int
    moved_bytes: int
    pinned_bytes: int


@dataclass(frozen=True, kw_only=True)
class DrainProgress:
    """Progress of a drain: cells and bytes moved so far, and cells that remain."""

    unit: int
    cells: int
    moved_bytes: int
    left_cells: int


OnProgress = Callable[[DrainProgress], object]
"""Called after each page that is moved."""


class _Progress:
    """State of one drain: `page` is the last page found, `max_page_bytes` the maximum size of the next one. `cells` and
    `nbytes` have been moved, `left_cells` remain. `failures` counts consecutive failures of a target unit. `end` is the
    deadline of the drain (`time.monotonic`)."""

    def __init__(self, unit: int, timeout_s: float) -> None:
        self.unit = unit
        self.timeout_s = timeout_s
        self.end = time.monotonic() + timeout_s
        self.max_page_bytes = PAGE_BYTES
        self.cells = self.nbytes = self.failures = self.left_cells = 0
        self.page: c.FoundCells | None = None

    @property
    def left_s(self) -> float:
        return max(self.end - time.monotonic(), 0.0)

    @property
    def wait_s(self) -> float:
        """How long the next request may wait."""
        return min(self.left_s, LOOK_S)

    def snapshot(self) -> DrainProgress:
        return DrainProgress(unit=self.unit, cells=self.cells, moved_bytes=self.nbytes, left_cells=self.left_cells)

    def error(self, why: str) -> DrainError:
        """Return the error that ends the drain, with what the last page says about the unit's contents."""
        page = self.page
        return DrainError(
            unit=self.unit,
            cells=0 if page is None else page.cells,
            live={} if page is None else dict(page.live),
            reserved_bytes=0 if page is None else page.reserved_bytes,
            holders=[] if page is None else list(page.holders),
            why=why,
        )


def drain(
    session_state: SessionState,
    unit: int,
    timeout_s: float | None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> Operation[Drained]:
    """Mark the unit, so that no new rows are placed on it, and move its rows until none remain. Raise `DrainError` if
    that takes longer than `timeout_s` or is impossible. force: mark the unit even if no other unit accepts new rows.
    on_progress: called after each page but the last; a page may be empty while puts are in progress."""
    timeout_s = as_timeout("timeout_s", timeout_s)
    yield Send(c.Drain(unit=unit, force=force))
    progress = _Progress(unit, timeout_s)
    while True:
        try:
            page = yield from _move_page(session_state, progress)
        except (CapacityTimeoutError, RequestTooLargeError) as error:
            yield from _handle_lack_of_space(progress, error)
        except (PartitionNotFoundError, PartitionDroppedError) as error:
            log.debug("Cells to move were removed: %s", error)
        except (StorageUnitError, ServiceRestartedError) as error:
            progress.failures += 1
            # If the drained unit itself fails, its rows cannot be read; a failed target unit can be replaced. An error
            # without a unit counts as a failure of the drained unit.
            if progress.failures == TRIES or getattr(error, "unit", unit) == unit:
                raise progress.error(str(error)) from error
        else:
            if not len(page.rows) and not page.reserved:  # no rows, and no put in progress that would add some
                return Drained(
                    unit=unit, cells=progress.cells, moved_bytes=progress.nbytes, pinned_bytes=page.pinned_bytes
                )
            if on_progress is not None:
                on_progress(progress.snapshot())
        if not progress.left_s:
            raise progress.error(f"The drain did not finish within timeout_s={timeout_s:g} s")


def undrain(session_state: SessionState, unit: int) -> Operation[None]:
    """Remove the drain mark of the unit."""
    yield Send(c.Drain(unit=unit, undo=True))


def forget(session_state: SessionState, unit: int, force: bool) -> Operation[None]:
    """Remove the unit from the service. force: also if it has rows, which are then cleared."""
    yield Send(c.Forget(unit=unit, force=force))


def _sizes(page: c.FoundCells) -> c.Int64s:
    """Return the size of each value of the page in bytes."""
    sizes: c.Int64s = page.lengths * page.spec.unit_bytes
    return sizes


def _allocate(page: c.FoundCells, on_full: c.OnFull, timeout_s: float) -> c.Allocate:
    """Return the command that reserves space on other units for the values of the page."""
    return c.Allocate(
        partition=page.partition,
        columns=(c.ColumnSizes(name=page.field, sizes=_sizes(page)),),
        update=True,  # copies may use the space reserved for updates
        moving=True,  # no budget counts the space, and nothing is evicted for it
        on_full=on_full,
        timeout_s=timeout_s,
    )


def _handle_lack_of_space(progress: _Progress, error: CapacityTimeoutError | RequestTooLargeError) -> Operation[None]:
    """Halve the maximum size of the next page. If that is impossible, because not even one value finds space, wait for
    space for up to `progress.wait_s`. Raise `DrainError` if the value can never fit or the drain has no time left."""
    page = progress.page
    assert page is not None
    if len(page.lengths) > 1 and progress.max_page_bytes > 1:
        progress.max_page_bytes = max(min(int(_sizes(page).sum()), progress.max_page_bytes) // 2, 1)
        return
    if isinstance(error, RequestTooLargeError) or not progress.left_s:
        raise progress.error(str(error)) from error
    try:
        allocated = yield Send(_allocate(page, c.OnFull.WAIT, progress.wait_s))
    except (CapacityTimeoutError, PartitionNotFoundError, PartitionDroppedError) as failure:
        log.debug("Got no space for cells to move: %s", failure)
        # Cells of a partition that was removed need no space.
        if isinstance(failure, CapacityTimeoutError) and not progress.left_s:
            raise progress.error(str(failure)) from failure
    else:
        # There is space now. The next attempt finds the page again and reserves for it.
        yield Post(c.Abort(reservation=allocated.call_id))


@with_retry
def _move_page(session_state: SessionState, progress: _Progress) -> Operation[c.FoundCells]:
    """Find a page, preferably of the same field as the last one, move it and return it. It is empty if the unit has no
    cells; while puts or readers use the unit, the service returns an empty page only after `progress.wait_s`."""
    last_page = progress.page
    find = c.FindCells(
        unit=progress.unit,
        max_bytes=progress.max_page_bytes,
        partition="" if last_page is None else last_page.partition,
        field="" if last_page is None else last_page.field,
        timeout_s=progress.wait_s,
    )
    found = yield Send(find)
    page: c.FoundCells = found.result
    progress.page = page
    if len(page.rows):
        moved: c.Moved = yield from _move(session_state, progress.unit, found)
        progress.failures = 0
        progress.max_page_bytes = min(2 * progress.max_page_bytes, PAGE_BYTES)  # after a lack of space, grow again
        progress.cells += moved.cells
        progress.left_cells = page.cells - moved.cells
        progress.nbytes += int(_sizes(page).sum()) if moved.cells else 0  # 0: all were cleared or rewritten
    return page


def _move(session_state: SessionState, unit: int, found: Sent) -> Operation[c.Moved]:
    """Copy the page's values to new space, point its cells there, and release the pin on the page, which `FindCells`
    took. found: the outcome of `FindCells`. If the move fails, free the new space (see `release_space`)."""
    page: c.FoundCells = found.result
    unfinished: set[int] = set()  # units that may still write to the new space, kept up to date by the copy
    try:
        allocated = yield Send(_allocate(page, c.OnFull.REJECT, 0.0))
        try:
            placements: tuple[c.Placement, ...] = allocated.result.placements
            yield from ensure_known(session_state, {unit, *[placement.unit for placement in placements]})
            try:
                yield Work(partial(_copy, session_state, unit, page, placements, allocated.call_id, unfinished))
            except ChecksumError as error:
                raise (yield from _with_sample_id(error, page)) from error
            failpoint("move.before_switch")
            return (yield Send(move_of(page, unit, located=found.call_id, reservation=allocated.call_id))).result  # type: ignore[no-any-return]
        except BaseException:
            yield from release_space(session_state, allocated.call_id, unfinished)
            raise
    finally:
        yield Post(c.Release(located=found.call_id))


def _copy(
    session_state: SessionState,
    unit: int,
    page: c.FoundCells,
    placements: tuple[c.Placement, ...],
    reservation: int,
    unfinished: set[int],
) -> None:
    """Copy the values' bytes to their new places, after comparing them with their checksums. reservation, unfinished:
    see `UnitConnections.write`."""
    sizes = _sizes(page)
    units = np.full(len(page.lengths), unit, np.int32)
    located = c.FieldLocations(
        name=page.field,
        spec=page.spec,
        units=units,
        offsets=page.offsets,
        lengths=page.lengths,
        checksums=page.checksums,
    )
    # In place of sample ids: a checksum error names the number of the value, which `_with_sample_id` replaces.
    numbers = [str(number) for number in range(len(page.lengths))]
    sources = checked(session_state.connections.gather([located], {unit}), [located], page.partition, numbers)
    source = sources[page.field]
    # All values come from one unit, and therefore lie in one buffer.
    memory = source.buffers[0 if source.which is None else int(source.which[0])]
    if source.check is not None:
        source.check(memory, source.offsets, slice(None))  # all values
    column = EncodedColumn(
        page.field, page.spec, page.lengths, sizes, index=None, values=FlatValues(memory, source.offsets, sizes)
    )
    failpoint("move.mid_copy")
    session_state.connections.write(placements, [column], reservation, unfinished)


def move_of(page: c.FoundCells, unit: int, *, located: int, reservation: int) -> c.Move:
    """Return the command that points the found cells at their copies. unit: their old storage unit. located: id
    of the `FindCells` call. reservation: id of the call that allocated the space of the copies."""
    same = ("partition", "field", "rows", "generations", "index", "offsets", "lengths")
    return c.Move(**{name: getattr(page, name) for name in same}, unit=unit, located=located, reservation=reservation)


def _with_sample_id(error: ChecksumError, page: c.FoundCells) -> Operation[DataPlaneError]:
    """Return the error of `_copy` with the id of a sample that has the damaged value, in place of the value's number.
    Return it unchanged if the service does not list the sample."""
    cell = int(np.flatnonzero(page.index == int(error.facts["sample"]))[0])  # the first that has the value
    samples = c.Samples(rows=page.rows[cell : cell + 1], generations=page.generations[cell : cell + 1])
    try:
        listed = yield Send(c.List(partition=page.partition, samples=samples))
    except DataPlaneError:
        return error
    return ChecksumError(**{**error.facts, "sample": listed.result.ids[0]})
