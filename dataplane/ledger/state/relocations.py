"""What a storage unit is copying within its arena, and what follows once it has."""

from __future__ import annotations

from dataplane.ledger.commands import CompactArena, Int32s, Move
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import PutReservation


class Relocation:
    """Values of one field: the command that points their cells at the copies, the space of these, and the extents that
    are pinned until then."""

    def __init__(self, partition: Partition, command: Move, reservation: PutReservation, pinned: Int32s) -> None:
        self.partition = partition
        self.command = command
        self.reservation = reservation
        self.pinned = pinned


class Compaction:
    """`order` is what the unit was told. `window` are the extents over what was free in the stretch of `nbytes` that is
    to be emptied. `taken_bytes` were free before: these, and the space of the copies."""

    def __init__(
        self, order: CompactArena, relocations: list[Relocation], window: Int32s, nbytes: int, taken_bytes: int
    ) -> None:
        self.order = order
        self.relocations = relocations
        self.window = window
        self.nbytes = nbytes
        self.taken_bytes = taken_bytes
