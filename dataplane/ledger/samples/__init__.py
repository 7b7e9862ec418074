"""The ledger's rules for samples: registering and clearing them, committing puts, locating, draining, saving.

Imports `allocation`, `state` and `commands`. Start with `commit`.
"""
