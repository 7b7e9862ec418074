"""What goes into the ledger and what comes out: values, each of which can be written down and replayed.

Inputs are either a `Call` (a numbered command of a client's session) or one of the unnumbered reports of the shell
and of the storage units (`OpenSession`, `Heartbeat`, `SessionSilent`, `AddUnit`, `UnitLost`, `SessionAttached`,
`SessionGone`, `SessionAlive`, `Grown`, `Shrunk`, `Compacted`, `RowsChecked`, `Restarted`, `Tick`). Outputs are answers
(`Answer`, `Opened`, `UnitAdded`), orders to units (`UnitOrder`) and words for the log (`Notice`).

Samples are named by ids or by row handles (row, generation), never both. Arrays are one-dimensional numpy arrays,
aligned with the samples unless said otherwise: rows and generations int64, lengths int64, offsets int64 (bytes from the
start of the arena), units int32, checksums uint32.
"""

from dataplane.ledger.commands.inputs import *
from dataplane.ledger.commands.inspection import *
from dataplane.ledger.commands.outputs import *
from dataplane.ledger.commands.parts import *
from dataplane.ledger.commands.requests import *
from dataplane.ledger.commands.results import *
