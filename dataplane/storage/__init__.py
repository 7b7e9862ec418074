"""A storage unit and the ways to reach one.

`unit.StorageUnit` owns an `arena` in shared memory, serves it (`server`) and follows the controller's orders
(`controller_link`); `client` reads and writes a unit from another process, its payload by one of `transport`. Imports
`protocol`, `config`, `ledger`'s commands, `core` and `errors`. Start with `unit`.
"""
