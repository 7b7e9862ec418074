"""The ledger: all state and all decisions of the service, as a pure state machine."""

from dataplane.ledger.ledger import Ledger
from dataplane.ledger.state.sessions import Limits

__all__ = ["Ledger", "Limits"]
