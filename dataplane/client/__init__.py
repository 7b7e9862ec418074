"""The public clients: `DataPlaneClient` and `AsyncDataPlaneClient`.

Each operation is a generator of steps, written once in `operations`. `session` and `async_session` execute the
steps: commands go through `rpc` to the controller, row bytes through `unit_connections` to storage units.
`checkpoint` saves and restores partitions. This package imports `storage`, `protocol`, `data` and the packages
below. Start with `client` and `operations.put`.
"""
