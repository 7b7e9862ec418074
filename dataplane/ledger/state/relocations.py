"""Active compactions: copies of values within an arena, and the moves that follow the copies."""

from __future__ import annotations

from dataplane.ledger.commands import CompactArena, Int32s, Move
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import PutReservation


class Relocation:
    """Relocation of values of one field within an arena. `command` moves their cells to the copies, `reservation` is
    the space of the copies, and `pinned` are the old extents, which stay pinned until the cells have moved."""

    def __init__(self, partition: Partition, command: Move, reservation: PutReservation, pinned: Int32s) -> None:
        self.partition = partition
        self.command = command
        self.reservation = reservation
        self.pinned = pinned


class Compaction:
    """One active compaction. `order`: the order sent to the unit. `window`: extents over the free parts of the range of
    `nbytes` that is being emptied. `taken_bytes`: previously free bytes in use, for `window` and the copies."""

    def __init__(
        self, order: CompactArena, relocations: list[Relocation], window: Int32s, nbytes: int, taken_bytes: int
    ) -> None:
        self.order = order
        self.relocations = relocations
        self.window = window
        self.nbytes = nbytes
        self.taken_bytes = taken_bytes
