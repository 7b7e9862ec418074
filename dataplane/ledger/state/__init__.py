"""Tables of the ledger's state: partitions, rows, fields, extents, units, tasks, sessions.

Each table has its own module and tests. `state.State` is the root. Imports between tables have one direction. The
rules that change the tables are in `samples`, `claims` and `allocation`. Start with `state` and `partition`.
"""
