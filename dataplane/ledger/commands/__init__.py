"""Inputs and outputs of the ledger: plain values that can be serialized and replayed.

Inputs are either a `Call` (a command of a client's session, with its call id) or a report, without an id, of the
shell or of a storage unit (`OpenSession`, `Heartbeat`, `SessionSilent`, `AddUnit`, `UnitLost`, `SessionAttached`,
`SessionGone`, `SessionAlive`, `Grown`, `Restarted`, `Tick`). Outputs are
answers (`Answer`, `Opened`, `UnitAdded`), orders to units (`UnitOrder`) and log entries (`Notice`).

Samples are named by ids or by row handles (row, generation), never both. Arrays are one-dimensional numpy
arrays, aligned with the samples unless stated otherwise: rows and generations int64, lengths int64, offsets
int64 (bytes from the start of the arena), units int32, checksums uint32.
"""

from dataplane.ledger.commands.inputs import *
from dataplane.ledger.commands.inspection import *
from dataplane.ledger.commands.requests import *
from dataplane.ledger.commands.results import *
from dataplane.ledger.commands.short import *
from dataplane.ledger.commands.values import *
