"""What programs call: `DataPlaneClient` and `AsyncDataPlaneClient`.

An operation is a generator of steps, written once in `operations`; `session` and `async_session` run its steps, over
`rpc` to the controller and over `unit_connections` to storage units. `checkpoint` saves and restores partitions.
Imports `storage`, `protocol`, `data` and the packages below. Start with `client` and `operations.put`.
"""
