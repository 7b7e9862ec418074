"""The service process: the ledger behind sockets, with a journal.

`controller.Controller` is the composition: one thread (`event_loop`) applies commands to the ledger, and the ZMQ, gRPC
and HTTP servers hand commands to it. Imports `protocol`, `ledger`, `config`, `core` and `errors`; never `client` or
`storage`. Start with `controller` and `event_loop`.
"""
