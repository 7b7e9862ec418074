"""Values to bytes and back, for samples in one process.

`columns` encodes fields for a put and decodes what was read, `batch` and `jagged` are the containers, `meta` is what
names samples, `packing` divides samples among ranks and micro-batches. Imports `ledger`'s commands, `config`, `core`
and `errors`. Start with `meta` and `columns.encode`.
"""
