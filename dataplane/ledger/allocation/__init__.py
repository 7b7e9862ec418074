"""Rules for space: placement of puts on units, reservations, budgets, eviction, and returning memory to the machine.

Imports `state` and `commands`. Start with `reservations`.
"""
