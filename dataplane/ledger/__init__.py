"""The ledger: all state that decides anything, as a pure state machine."""

from dataplane.ledger.ledger import Ledger
from dataplane.ledger.state.limits import Limits

__all__ = ["Ledger", "Limits"]
