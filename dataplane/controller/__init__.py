"""The service process: the ledger, its journal and the servers in front of it.

`controller.Controller` composes them: one thread (`event_loop`) applies commands to the ledger, and the ZMQ, gRPC and
HTTP servers submit commands to that thread. Imports `protocol`, `ledger`, `config`, `core` and `errors`, but neither
`client` nor `storage`. Start with `controller` and `event_loop`.
"""
