"""Who waits although they could be served: everybody who waits is judged again, whatever has changed or not."""

from __future__ import annotations

from dataplane.errors import DataPlaneError
from dataplane.ledger import Ledger
from dataplane.ledger.commands import Answer, Result

Name = tuple[int, int]


def overlooked(ledger: Ledger) -> dict[Name, Result | DataPlaneError]:
    """The answers that waiting calls would get now, by session and call id; `ledger` stays as it is."""
    state = ledger._state
    if not state.parked:
        return {}
    again = Ledger.restored(ledger.image())
    found = _claims(again)
    for partition in again._state.partitions.values():
        partition.outlook = None
        again._state.extents.loosened.add(partition.account.account_id)
    again._state.extents.freed = True
    again._reservations.serve_waiting()
    found.update({(o.session, o.call_id): o.result for o in again._state.out if isinstance(o, Answer)})
    return found | _claims(again)


def _claims(ledger: Ledger) -> dict[Name, Result | DataPlaneError]:
    found: dict[Name, Result | DataPlaneError] = {}
    for partition in list(ledger._state.partitions.values()):
        for parked in ledger._state.waiting_claims(partition):
            assert parked.ready_index is not None
            try:
                result: Result | DataPlaneError | None = ledger._claims._attempt(parked, parked.ready_index)
            except DataPlaneError as error:
                result = error
            if result is not None:
                found[parked.key] = result
    return found
