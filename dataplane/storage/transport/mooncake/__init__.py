"""Payload transport by the Mooncake transfer engine, over RDMA or TCP. Requires the extra `mooncake`."""
