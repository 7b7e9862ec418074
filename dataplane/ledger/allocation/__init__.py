"""The ledger's rules for space: placement of a put on units, reservations, quotas, eviction, giving memory back.

Imports `state` and `commands`. Start with `reservations`.
"""
