"""How payload travels between a client and a storage unit.

`interface` is what a transport implements; `zmq` sends payload in frames, `mooncake` by RDMA or TCP of the transfer
engine. Start with `interface`.
"""
