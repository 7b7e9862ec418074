"""The ledger's rules for claims: which samples a task is given, acknowledgement, and why a claim waits.

Imports `state` and `commands`. Start with `claims`.
"""
