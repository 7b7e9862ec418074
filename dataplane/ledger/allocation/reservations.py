"""Space for puts: reservations, waiting for space, preallocated space, and growth of arenas in advance."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from dataplane.core.types import GRANULE_BYTES, Checksums, granules_up
from dataplane.errors import (
    CapacityTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    RequestTooLargeError,
    StaleSchemaError,
)
from dataplane.ledger.allocation.budgets import (
    REPORTED,
    Evictions,
    budget_excess,
    budget_limit,
    out_of_space,
    waits_for_larger_piece,
    waits_for_memory,
)
from dataplane.ledger.allocation.placement import (
    MAX_BYTES,
    Piece,
    advance_target,
    check_columns,
    give_back,
    growth_target,
    place,
    retry_target,
)
from dataplane.ledger.commands import (
    Allocate,
    Allocated,
    Commit,
    GrowArena,
    OnFull,
    Placement,
    Preallocate,
    Preallocated,
    WhenFull,
)
from dataplane.ledger.liveness import Liveness
from dataplane.ledger.state.arrays import total
from dataplane.ledger.state.extents import Extents
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import (
    ParkedAllocate,
    Preallocation,
    PutReservation,
    ReservedPiece,
    Session,
    Want,
)
from dataplane.ledger.state.state import Line, State, WaitQueues
from dataplane.ledger.state.units import Unit

RETRY_S = 1.0
"""How often an arena that could not grow is asked again while a put waits: other processes may have freed memory."""


class Reservations:
    """Reserves space for puts, and serves the puts that wait for it.

    Waiting puts are served first come, first served among updates and among new rows, updates first. A put that
    waits for its partition's budget does not hold up other partitions. Neither does a put that waits for a larger
    piece while enough bytes are free; it does not hold up its own partition either, if that has no budget. Moves
    (space for copies of cells that leave their unit) come last, whatever the budget. `liveness` probes silent
    sessions when a put has to wait."""

    def __init__(self, state: State, liveness: Liveness) -> None:
        self.state = state
        self.liveness = liveness
        self.evictions = Evictions(state)

    def allocate(self, session: Session, call_id: int, command: Allocate) -> Allocated | None:
        """Return the reservation of call `call_id`, or None if the call was parked. The samples that the put
        names are protected from eviction while it lasts."""
        partition = self.state.partition(command.partition)
        if not self.state.has_waiting_put(partition.account.account_id):
            partition.outlook = None  # it is kept up to date only while puts wait
        self._check_command(partition, command)
        want = Want(session, command)
        self._check_can_ever_fit(partition, want)
        parked = ParkedAllocate(session, call_id, self.state.now, command, partition, want)
        self.state.protect_targets(parked)
        try:
            return self._serve_or_park(parked)
        except Exception:
            self.state.unprotect_targets(parked)
            raise

    def _serve_or_park(self, parked: ParkedAllocate) -> Allocated | None:
        """Serve the call unless an earlier one holds it up. Otherwise park it, or raise if it does not wait."""
        held_up_by_partition, blocker = self._find_blockers(parked)
        granted = None if held_up_by_partition else self._try_to_reserve(parked, behind=blocker is not None)
        if granted is not None:
            # A put that waits only for growing arenas may have lost its space: evaluate the waiting puts again.
            if self._any_growing(self._open_units()):
                self.state.extents.freed |= any(map(_waits_for_growth_only, self.state.all_puts()))
            return granted
        self.liveness.probe_silent()  # dead sessions may hold space
        if self._fails_now(parked):
            raise self.out_of_space(parked)
        self.state.park(parked)
        parked.holds_up = self._holds_up_all(parked)
        return None

    def _find_blockers(self, asking: ParkedAllocate) -> tuple[bool, ParkedAllocate | None]:
        """Return whether a waiting put of the same partition holds up this call, and the first put of any partition
        that does (None: no put). Updates hold up updates and moves, new rows only new rows, moves only moves."""
        if asking.command.moving:  # moves of all partitions wait in one line
            return bool(self.state.moves), self._update_before_moves()
        blocker = None
        turns = WaitQueues(self._active_lines(asking.command.update, {asking.partition.account.account_id}))
        for parked in turns:
            if parked is asking:  # it waits itself, and the others are later
                break
            if not self._holds_up_partition(parked):
                continue
            if blocker is None and self._holds_up_all(parked):
                blocker = parked
            if parked.partition is asking.partition:
                return True, blocker or parked
            turns.skip_line()  # the other puts in this line wait for the same blocker
        return False, blocker

    def _holds_up_all(self, parked: ParkedAllocate) -> bool:
        """Return whether all later puts, also of other partitions, wait for this put."""
        return waits_for_memory(self.state, parked) and not waits_for_larger_piece(self.state, parked)

    def _holds_up_partition(self, parked: ParkedAllocate) -> bool:
        """Return whether later puts of its partition wait for this put. They do not if enough bytes are free in
        pieces that are too small for it: a put that fits into such a piece takes nothing from it except budget."""
        return parked.partition.budget_bytes is not None or not waits_for_larger_piece(self.state, parked)

    def _try_to_reserve(self, parked: ParkedAllocate, *, behind: bool) -> Allocated | None:
        """Return the reservation if there is space, or if the partition evicts for it. `behind`: earlier puts wait
        for the units' memory, so this one may only use memory that it freed itself. `excess`: by how many bytes the
        budget is too small; `short`: how many bytes the open units lack."""
        partition = parked.partition
        want = parked.want
        if want.moving:  # a move has no budget and evicts nothing
            return None if behind else self._take_space(parked)
        excess = budget_excess(self.state, partition, want.total, update=want.update)
        if excess <= 0 and not behind:
            granted = self._take_space(parked)
            if granted is not None or self._enough_expected(want):
                return granted  # None: growing arenas will have space, so nothing is evicted
        # Each round evicts samples, so the loop ends.
        while partition.evicts and any(unit.open for unit in self.state.units.values()):
            short = want.total - self._available_bytes(want)
            if behind or max(excess, short) <= 0:
                # The free bytes belong to earlier puts, or are in pieces that are too small.
                short = want.total
            if self.evictions.certainly_fails(partition, excess=excess, short=short, update=want.update):
                return None
            evicted = self.evictions.make_space(partition, excess=excess, short=short, update=want.update)
            if evicted is None:
                return None
            parked.evicted += evicted
            granted = self._take_space(parked)
            if granted is not None or self._enough_expected(want):
                return granted
            excess = budget_excess(self.state, partition, want.total, update=want.update)
        return None

    def _take_space(self, parked: ParkedAllocate) -> Allocated | None:
        """Return the reservation if the units have space and the budget covers the pieces, which may be larger than
        the put."""
        want = parked.want
        pieces = self._take_pieces(want)
        if pieces is None:
            return None
        nbytes = sum(piece.size for piece in pieces)
        if (
            not want.moving
            and nbytes > want.total
            and budget_excess(self.state, parked.partition, nbytes, update=want.update) > 0
        ):
            give_back(pieces)
            return None
        return self._create_reservation(parked, pieces)

    def preallocate(self, session: Session, call_id: int, command: Preallocate) -> Preallocated:
        """Reserve space for later small puts of the session, in a unit that it has mapped. Raises InvalidRequestError
        for another unit, CapacityTimeoutError if the unit is not open or has too little space for new rows, if no free
        range is large enough, or if a waiting put needs the space."""
        unit = self.state.units.get(command.unit)
        if unit is None or unit.unit_id not in session.attached:
            raise InvalidRequestError(f"session {session.session_id} has not mapped the arena of unit {command.unit}")
        if not 0 < command.nbytes <= MAX_BYTES:
            raise InvalidRequestError(f"{command.nbytes} bytes of preallocated space: must be in [1, {MAX_BYTES}]")
        nbytes = granules_up(command.nbytes)
        limit = unit.limit(update=False)
        # The request is small compared to the space for new rows, and at most half of that is used then.
        plenty = nbytes * self.state.limits.preallocated_divisor <= limit and unit.used_bytes + nbytes <= limit // 2
        allowed = plenty and unit.open and self._is_spare(nbytes)
        offset = unit.space.take(nbytes) if allowed else None
        if offset is None:
            raise CapacityTimeoutError(
                wanted_bytes=nbytes, free_bytes=max(unit.available_bytes(update=False), 0), waited_s=0.0, holders=[]
            )
        extent = self.state.extents.reserve(unit.unit_id, offset, nbytes)
        session.reservations[call_id] = Preallocation(unit.unit_id, unit.epoch, extent, offset)
        self.grow_ahead(unit)
        return Preallocated(offset=offset, checksums=_checksums_are_wanted(self.state, session, [unit]))

    def _is_spare(self, nbytes: int) -> bool:
        """Return whether `nbytes` can be reserved without taking them from a waiting put. Lines that rest are left out
        (`accounts=set()`): they wait for a budget. Puts that wait for a larger piece must keep enough."""
        lines = [line for update in (True, False) for line in self._active_lines(update, accounts=set())]
        return all(
            not waits_for_memory(self.state, parked) or waits_for_larger_piece(self.state, parked, spare=nbytes)
            for parked in chain.from_iterable(line.values() for line in (*lines, self.state.moves))
        )

    def serve_waiting(self) -> None:
        """Serve waiting puts: all of them if bytes were freed, else moves, and puts of partitions that may evict
        samples now. Repeats while that frees bytes again."""
        state = self.state
        extents = self.state.extents
        while extents.freed or extents.loosened:
            # Set again below if bytes are freed.
            all_lines = extents.freed
            extents.freed = False
            loosened = {account for account in extents.loosened if state.has_waiting_put(account)}
            extents.loosened = set()
            if all_lines or loosened:
                for update in (True, False):
                    self._serve_lines(update, loosened, all_lines=all_lines)
                self._serve_moves()

    def _active_lines(self, update: bool, accounts: set[int]) -> list[Line]:
        """Return the lines of puts (updates, or puts of new rows) of these accounts, and all lines that do not rest
        (see `State.resting`)."""
        resting = self.state.resting[update] - accounts
        return [line for account, line in self.state.space_waiters[update].items() if account not in resting]

    def _serve_lines(self, update: bool, loosened: set[int], *, all_lines: bool) -> None:
        """Serve puts of the `loosened` accounts, or with `all_lines` all puts that may gain from freed bytes, in order.
        If a put no longer holds up others, `extents.freed` is set, so that these are served in the next round."""
        # behind: an earlier put waits for the units' memory.
        behind = False
        resting = self.state.resting[update]
        turns = WaitQueues(self._active_lines(update, loosened))
        resting.difference_update(loosened)  # their accounts changed
        for parked in turns:
            partition = parked.partition
            account = partition.account.account_id
            if account in loosened and partition.outlook is not None:
                partition.outlook.gain = None  # it may be more now
            # Behind another put, only eviction can make space for this one.
            if (all_lines or account in loosened) and (not behind or partition.evicts):
                if not self._try_to_serve(parked, behind=behind):
                    continue  # it has its answer
                if self._needs_account_change(parked):
                    resting.add(account)
            held_others_up = parked.holds_up
            parked.holds_up = self._holds_up_all(parked)
            self.state.extents.freed |= held_others_up and not parked.holds_up
            if self._holds_up_partition(parked):
                turns.skip_line()
            behind = behind or parked.holds_up

    def _needs_account_change(self, parked: ParkedAllocate) -> bool:
        """Return whether only a change of its account can help this put, whatever space the units have."""
        partition = parked.partition
        want = parked.want
        excess = budget_excess(self.state, partition, want.total, update=want.update)
        return excess > 0 and (
            not partition.evicts
            or self.evictions.certainly_fails(partition, excess=excess, short=0, update=want.update)
        )

    def _serve_moves(self) -> None:
        """Serve moves in order until one must wait. None gets space while an update waits that holds up all others."""
        moves = list(self.state.moves.values())  # a copy, because served moves leave the queue
        behind = bool(moves) and self._update_before_moves() is not None
        for parked in moves:
            if self._try_to_serve(parked, behind=behind):
                return  # it still waits

    def _update_before_moves(self) -> ParkedAllocate | None:
        """Return the first update that moves wait for, or None. It need not be the first of its partition."""
        updates = WaitQueues(self.state.space_waiters[True].values())
        return next(filter(self._holds_up_all, updates), None)

    def _try_to_serve(self, parked: ParkedAllocate, *, behind: bool) -> bool:
        """Serve this waiting call if it can be served now, or end it with its error. Return whether it still waits.
        `behind`: see `_try_to_reserve`."""
        try:
            result = self._attempt(parked, behind=behind)
        except DataPlaneError as error:
            result = error
        except Exception as error:  # a waiting call must not fail the command of another client
            self.state.fail(parked, error)
            return False
        if result is not None:
            self.state.unpark(parked, result)
        return result is None

    def _attempt(self, parked: ParkedAllocate, *, behind: bool) -> Allocated | DataPlaneError | None:
        """Return the result or error that ends the wait of the call, or None if it continues to wait."""
        self._check_can_ever_fit(parked.partition, parked.want)  # budget or units may be smaller now
        granted = self._try_to_reserve(parked, behind=behind)
        if granted is None and self._fails_now(parked):
            return self.out_of_space(parked)
        return granted

    def _fails_now(self, parked: ParkedAllocate) -> bool:
        """Return whether a call that found no space fails now: it waits at most for growing arenas, and these will not
        have space for it."""
        if not _waits_for_growth_only(parked):
            return False
        want = parked.want
        over_budget = (
            not want.moving and budget_excess(self.state, parked.partition, want.total, update=want.update) > 0
        )
        return over_budget or not self._enough_expected(want)

    def _enough_expected(self, want: Want) -> bool:
        """Return whether arenas are growing, and may then have enough bytes for the put."""
        units = self._open_units()
        expected = [unit.space_requested(update=want.update) for unit in units]
        return sum(max(nbytes, 0) for nbytes in expected) >= want.total and self._any_growing(units)

    def _any_growing(self, units: list[Unit]) -> bool:
        """Return whether one of these arenas is growing."""
        return any(unit.asked for unit in units)

    def _open_units(self) -> list[Unit]:
        return [unit for unit in self.state.units.values() if unit.open]

    def _available_bytes(self, want: Want) -> int:
        return sum(max(unit.available_bytes(update=want.update), 0) for unit in self._open_units())

    def retry_at(self) -> float:
        """Return when arenas that could not grow must be ordered again to grow, for waiting puts (infinity: never)."""
        if not self.state.puts_wait:
            return float("inf")
        units = [unit for unit in self.state.units.values() if unit.problem and unit.open and not unit.asked]
        return min((unit.retry_at for unit in units), default=float("inf"))

    def grow_ahead(self, unit: Unit) -> None:
        """Order growth of the arena if little of its backed space is free."""
        self._order_growth(unit, advance_target(unit))

    def out_of_space(self, parked: ParkedAllocate) -> DataPlaneError:
        """Return the error that names the holders of the space, or the put that this one waits for."""
        command = parked.command
        waited_s = self.state.now - parked.since
        moving = command.moving
        earlier = None if moving else self._find_blockers(parked)[1]
        return out_of_space(
            self.state, parked.partition, parked.total, waited_s, update=command.update, moving=moving, earlier=earlier
        )

    def _check_command(self, partition: Partition, command: Allocate) -> None:
        """Validate the command. Raises InvalidRequestError or LimitError, or StaleSchemaError if the client encoded a
        column by a schema that the partition no longer has."""
        check_columns(self.state, [(column.name, column.sizes) for column in command.columns])
        if command.samples is not None:
            self.state.check_samples(command.samples)
        for column in command.columns:
            if column.by_schema and not partition.determines_kind(column.name):
                raise StaleSchemaError(partition=partition.name, field=column.name)
        if not command.timeout_s >= 0:  # this form also rejects NaN
            raise InvalidRequestError(f"timeout_s={command.timeout_s}: must not be negative")
        if command.moving and (len(command.columns) != 1 or not command.update):
            raise InvalidRequestError(
                f"a move requires update=True and one column, got update={command.update} and columns "
                f"{[column.name for column in command.columns[:5]]}"
            )

    def _check_can_ever_fit(self, partition: Partition, want: Want) -> None:
        """Raise RequestTooLargeError if the put exceeds its budget or the units that are not drained, or its largest
        value each of these, even without samples. Without such units there is no error: some may still register."""
        budget = None if want.moving else budget_limit(self.state, partition, update=want.update)
        if budget is not None and want.total > budget:
            raise RequestTooLargeError(
                wanted_bytes=want.total,
                limit_bytes=budget,
                what=f"this put into partition {partition.name!r}, which has a budget,",
                hint="Put fewer rows at a time or register the partition with a larger budget_bytes.",
            )
        limits = [unit.limit_at_capacity(update=want.update) for unit in self.state.units.values() if not unit.draining]
        if not limits:
            return
        if want.total > sum(limits):
            raise RequestTooLargeError(wanted_bytes=want.total, limit_bytes=sum(limits), what="this put")
        if want.largest > max(limits):
            raise RequestTooLargeError(
                wanted_bytes=want.largest, limit_bytes=max(limits), what="the largest value of this put"
            )

    def _take_pieces(self, want: Want) -> list[Piece] | None:
        """Take space for the put and return its pieces; or return None, and order arenas that can to grow."""
        if not want.whole:  # no columns
            return []
        units = self._open_units()
        if not units:
            return None
        pieces, growable = place(want, units)
        if pieces is None:
            for unit in growable:
                self._order_growth(unit, growth_target(unit, want.total))
            for unit in units:  # those that failed to grow earlier, if it is time to retry
                self._order_growth(unit, retry_target(unit, want.total, self.state.now))
            return None
        for unit in {piece.unit.unit_id: piece.unit for piece in pieces}.values():  # each unit once
            self.grow_ahead(unit)
        return pieces

    def _order_growth(self, unit: Unit, backed_bytes: int | None) -> None:
        """Order the unit to grow its arena to `backed_bytes` (None: no order)."""
        if backed_bytes is not None:
            if not unit.asked:  # a larger order keeps the time of the pending one
                unit.ordered_at = self.state.now
            unit.asked = backed_bytes
            self.state.out.append(GrowArena(unit=unit.unit_id, backed_bytes=backed_bytes))

    def _create_reservation(self, parked: ParkedAllocate, pieces: list[Piece]) -> Allocated:
        """Create the reservation from pieces that were taken, and return the result of the call. The reservation takes
        over the call's protection of samples from eviction."""
        command = parked.command
        names = [column.name for column in command.columns]
        sizes = [column.sizes for column in command.columns]
        reservation = PutReservation(parked.partition, names, sizes, update=command.update, moving=command.moving)
        reservation.samples = parked.samples
        reservation.targets = parked.targets
        parked.targets = ()
        account = None if command.moving else parked.partition.account  # moved cells are charged after the move
        placements = []
        for piece in pieces:
            unit = piece.unit
            extent = self.state.extents.reserve(unit.unit_id, piece.offset, piece.size, account)
            reservation.pieces[piece.column].append(ReservedPiece(piece.first, piece.last, extent, piece.offset))
            reservation.epochs[unit.unit_id] = unit.epoch
            placements.append(
                Placement(
                    column=piece.column, first=piece.first, last=piece.last, unit=unit.unit_id, offset=piece.offset
                )
            )
        parked.session.reservations[parked.call_id] = reservation
        with_checksums = _checksums_are_wanted(self.state, parked.session, [piece.unit for piece in pieces])
        return Allocated(placements=tuple(placements), checksums=with_checksums, evicted=parked.evicted[:REPORTED])


def _waits_for_growth_only(parked: ParkedAllocate) -> bool:
    """Return whether the call waits only for arenas that are growing, but not until samples are cleared: the client or
    the partition rejects puts without space."""
    rejecting = not parked.command.moving and parked.partition.when_full is WhenFull.REJECT
    return rejecting or parked.command.on_full is OnFull.REJECT


def _checksums_are_wanted(state: State, session: Session, units: Iterable[Unit]) -> bool:
    """Whether rows that the session writes to these units get checksums."""
    match state.checksums:
        case Checksums.ALWAYS:
            return True
        case Checksums.NEVER:
            return False
    # ACROSS_HOSTS
    return state.spans_several_hosts() or any(not _near(session, unit) for unit in units)


def _near(session: Session, unit: Unit) -> bool:
    """Whether the session has mapped the unit's arena or can map it: it is on the same host and
    uses shared memory (it has a `lock_path`). The mapping is only reported just before the
    session's first copy."""
    return unit.unit_id in session.attached or (bool(session.lock_path) and session.host == unit.host)


class PreallocatedPut(PutReservation):
    """The reservation of a commit into preallocated `space`, in the space's piece `piece_number`
    (None: the columns are empty). The columns are one after another from `offset`, each with
    `nbytes` in whole granules. Nothing is taken before `cut`. `space.pieces[0]` are the unused
    pieces."""

    def __init__(self, state: State, space: Preallocation, partition: Partition, command: Commit) -> None:
        if command.offset is None or command.offset % GRANULE_BYTES:
            raise InvalidRequestError(
                f"offset {command.offset}: a commit into preallocated space must begin at a multiple of {GRANULE_BYTES}"
            )
        sizes = [column.lengths * column.spec.unit_bytes for column in command.columns]
        names = [column.name for column in command.columns]
        check_columns(state, list(zip(names, sizes, strict=True)))
        super().__init__(partition, names, sizes, update=False)
        self.space = space
        self.offset = command.offset
        self.nbytes = [granules_up(total(column)) for column in sizes]
        self.total_bytes = sum(self.nbytes)
        self.piece_number = self._find_piece(state.extents)

    def _find_piece(self, extents: Extents) -> int | None:
        """Return the number of the piece that holds all columns (None: they are empty). Raises InvalidRequestError."""
        nbytes = self.total_bytes
        if not nbytes:
            return None
        for number, piece in enumerate(self.space.pieces[0]):
            end = piece.offset + int(extents.sizes[piece.extent])
            if piece.offset <= self.offset and self.offset + nbytes <= end:
                return number
        raise InvalidRequestError(
            f"{nbytes} bytes at {self.offset} are not within the unused part of the preallocated space"
        )

    def cut(self, extents: Extents) -> None:
        """Take the bytes out of the space, as one extent of all columns. The rest of the space's
        piece stays preallocated."""
        if self.piece_number is not None:
            pieces = self.space.pieces[0]
            remaining = extents.cut(pieces[self.piece_number].extent, self.offset, self.total_bytes)
            pieces[self.piece_number : self.piece_number + 1] = [
                ReservedPiece(0, 0, extent, int(extents.starts[extent])) for extent in remaining
            ]
        offset = self.offset if self.total_bytes else 0  # an extent of empty values holds no bytes
        extent = extents.reserve(self.space.unit, offset, self.total_bytes, self.partition.account)
        for number, nbytes in enumerate(self.nbytes):
            self.pieces[number].append(ReservedPiece(0, len(self.sizes[number]), extent, offset))
            offset += nbytes
