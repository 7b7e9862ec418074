"""Rules for claims: selection of samples, acknowledgement, leases, and the reasons why a claim waits.

Imports `state` and `commands`. Start with `claims`.
"""
