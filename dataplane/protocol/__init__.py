"""What crosses a socket: messages, frames, authentication and encryption, HTTP.

`pb` is generated from `proto/`; `codec` converts its messages to commands and back. Nothing here opens a session or
keeps state between calls. Imports `ledger`'s commands, `config`, `core` and `errors`. Start with `codec` and
`zmq_frames`.
"""
