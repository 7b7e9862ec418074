"""How payload travels between a client and a storage unit.

`interface` is what a transport implements, and the table of transports; `zmq` sends payload in frames, `mooncake` by
RDMA or TCP of the transfer engine. Start with `interface`.
"""
