"""Storage units and the client connection to them.

`unit.StorageUnit` owns an `arena` in shared memory, serves it (`server`) and executes the controller's orders
(`controller_link`). `client` reads and writes a unit from another process; `transport` moves the payload. Imports
`protocol`, `config`, `ledger`'s commands, `core` and `errors`. Start with `unit`.
"""
