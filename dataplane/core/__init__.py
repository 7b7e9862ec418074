"""Shared types, standard names and operating-system helpers for all packages.

Contains field types, standard names, addresses, file locks, memory limits, row copies, checksums and failpoints.
The modules are independent of samples and the ledger. They import only `errors` from this project. Start with `types`
and `schema`.
"""
