"""Rules for samples: registration and clearing, commits of puts, locations, draining, saving.

Imports `allocation`, `state` and `commands`. Start with `commit`.
"""
