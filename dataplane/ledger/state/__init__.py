"""The tables of the ledger's state: partitions, rows, fields, extents, units, tasks, sessions.

Each table is a file and is tested alone. `state.State` is the root. Tables import each other downward only; the rules
that change them are in `samples`, `claims` and `allocation`. Start with `state` and `partition`.
"""
