"""Payload by the Mooncake transfer engine, RDMA or TCP. Needs the extra `mooncake`."""
