"""Conversion of field values to bytes and back, within one process.

`columns` encodes the fields of a put and decodes the rows of a read. `batch` and `jagged` are the containers,
`tensor_memory` maps tensors to their bytes, `meta` names samples, `packing` divides samples among ranks and
micro-batches. Imports `ledger`'s commands, `config`, `core` and `errors`. Start with `meta` and `columns.encode`.
"""
