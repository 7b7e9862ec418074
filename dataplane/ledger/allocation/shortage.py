"""The error of a put that finds no room: what it wanted, and who holds it."""

from __future__ import annotations

from dataplane.errors import CapacityTimeoutError
from dataplane.ledger.allocation.budgets import limit_of, over
from dataplane.ledger.commands import Int32s
from dataplane.ledger.state.arrays import some
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import ParkedAllocate, Session
from dataplane.ledger.state.state import State

NAMED = 3
"""So many tasks of a partition, and holders of each kind, are named."""


def out_of_room(
    state: State,
    partition: Partition,
    wanted: int,
    waited_s: float,
    *,
    update: bool,
    moving: bool = False,
    earlier: ParkedAllocate | None = None,
) -> CapacityTimeoutError:
    """The budget is told of where that is what is missing, else the units. `earlier`: the put that this one waits for,
    if any: named where there is room for this one."""
    short = not moving and over(state, partition, wanted, update=update) > 0
    enough = is_fragmented(state, wanted, update=update)
    if short or not enough:
        earlier = None
    behind = "" if earlier is None else _put(earlier)
    if short or (earlier is not None and not waits_for_memory(state, earlier)):
        limit = limit_of(state, partition, update=update)
        assert limit is not None
        return CapacityTimeoutError(
            wanted_bytes=wanted,
            free_bytes=max(limit - partition.account.used_bytes, 0),
            waited_s=waited_s,
            holders=_ranked([(_described(partition), partition.account.live_bytes)], _sessions(state, partition)),
            partition=partition.name,
            budget_bytes=partition.budget_bytes,
            behind=behind,
        )
    units = state.units.values()
    troubles = [(unit, unit.trouble(state.now)) for unit in units]
    holes = [unit.space for unit in units if unit.open]
    largest = max((space.largest_bytes for space in holes), default=0)
    lost = [
        (
            f"storage unit {unit.number} ({unit.offer.name}), which is "
            + ("being drained," if unit.connected else "not connected,"),
            unit.space.capacity_bytes,
        )
        for unit in units
        if not unit.open
    ]
    partitions = [(_described(other), other.account.live_bytes) for other in _largest(state)]
    return CapacityTimeoutError(
        wanted_bytes=wanted,
        free_bytes=sum(max(unit.room(update=update), 0) for unit in units if unit.open),
        waited_s=waited_s,
        holders=_ranked(lost, partitions, _sessions(state, None)),
        fragments=sum(space.fragments for space in holes) if enough and not behind else 0,
        largest_free_bytes=largest,
        arena=" ".join(f"Storage unit {unit.number} cannot grow: {why}" for unit, why in troubles if why),
        behind=behind,
    )


def is_fragmented(state: State, wanted: int, *, update: bool) -> bool:
    """Whether so many bytes are free in open units: if a put of them finds no room all the same, it is in pieces. What
    a compaction has taken is free again when it has ended."""
    units = [unit for unit in state.units.values() if unit.open]
    free = [min(unit.room(update=update), unit.space.free_bytes) + state.compacting_bytes(unit) for unit in units]
    return sum(max(nbytes, 0) for nbytes in free) >= wanted


def waits_for_memory(state: State, parked: ParkedAllocate) -> bool:
    """Whether this call waits for memory of the units, not for its partition's budget, which moves do not count for."""
    command = parked.command
    return command.moving or over(state, parked.partition, parked.total, update=command.update) <= 0


def waits_for_larger_piece(state: State, parked: ParkedAllocate, *, spare: int = 0) -> bool:
    """Whether bytes enough are free for this call that waits, with `spare` left, but in pieces that are too small."""
    wanted = parked.total + spare
    return waits_for_memory(state, parked) and is_fragmented(state, wanted, update=parked.command.update)


def _ranked(*groups: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The largest of each group, group after group."""
    ranked = [sorted(group, key=lambda holder: -holder[1]) for group in groups]
    return [holder for group in ranked for holder in group[:NAMED] if holder[1]]


def _largest(state: State) -> list[Partition]:
    return sorted(state.partitions.values(), key=lambda partition: -partition.account.live_bytes)[:NAMED]


def _described(partition: Partition) -> str:
    """The partition, and who has not consumed it."""
    live = partition.rows.live
    behind = [f"{live - task.claimed} not claimed by {name!r}" for name, task in partition.tasks.items()]
    facts = ", ".join([f"{live} samples", *behind[:NAMED], *(["..."] if len(behind) > NAMED else [])])
    return f"partition {partition.name!r} ({facts})"


def _put(parked: ParkedAllocate) -> str:
    return (
        f"an earlier put of {parked.total:,} bytes into partition {parked.partition.name!r} by {_who(parked.session)}"
    )


def _who(session: Session) -> str:
    return f"session {session.number} ({session.name or 'unnamed'}, {session.state})"


def _sessions(state: State, partition: Partition | None) -> list[tuple[str, int]]:
    """What sessions hold by reservations and pins, of this partition or all."""
    found = []
    for session in state.sessions.values():
        who = _who(session)
        reserved = sum(_bytes(state, room.extents(), partition) for room in session.reservations.values())
        pinned = sum(_bytes(state, pins, partition) for pins in session.pins.values())
        found += [(f"reservations of {who}", reserved), (f"readers of {who}", pinned)]
    return found


def _bytes(state: State, numbers: Int32s, partition: Partition | None) -> int:
    extents = state.extents
    if partition is not None:
        mine = extents.owners[numbers] == partition.account.number
        if not some(mine):
            return 0
        numbers = numbers[mine]
    return extents.bytes_of(numbers)
