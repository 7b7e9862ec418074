"""The wire protocol: messages, frames, authentication and encryption, HTTP.

`pb` is generated from `proto/`; `codec` converts its messages to commands and back. This package opens no session and
keeps no state between calls. Imports `ledger`'s commands, `config`, `core` and `errors`. Start with `codec` and
`zmq_frames`.
"""
