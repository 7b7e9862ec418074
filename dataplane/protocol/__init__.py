"""The wire protocol: messages, frames, authentication and encryption, HTTP.

`zmq_frames` has the messages of clients in Python. `pb` is generated from `proto/` for gRPC;
`codec` converts its messages to those and back. This package opens no session and keeps no state
between calls. Imports `ledger`'s commands, `config`, `core` and `errors`. Start with `zmq_frames`.
"""
