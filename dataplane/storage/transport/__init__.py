"""Payload transports between a client and a storage unit.

`interface` declares the protocols of a transport. `zmq` sends payload in ZMQ frames; `mooncake` uses RDMA or TCP of the
transfer engine. Start with `interface`.
"""
