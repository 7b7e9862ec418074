"""The only place that imports gRPC.

gRPC's fork support, on by default, runs handlers at every fork of a process that uses gRPC. While gRPC's threads are
busy, these handlers sometimes kill the child (grpcio 1.85: 1 to 10 of 100 plain forks under load; none with support
off). An environment variable, read when grpc is imported, disables the support. It is therefore set during the import,
unless the user has set it, and processes that serve nothing never import grpc. Likewise gRPC's logging to standard
error is reduced, because it writes a line for each failed handshake, and any peer could cause many.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

from dataplane.errors import InvalidRequestError

_SETTINGS = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "ERROR"}
_used_in: list[int] = []
"""The id of the process that has imported gRPC; empty before the import."""


def import_with_grpc(name: str) -> ModuleType:
    """Import the module of this name, which imports grpc. Raises `InvalidRequestError` in a child forked from a process
    that used gRPC, because gRPC does not work there."""
    if _used_in and _used_in[0] != os.getpid():
        raise InvalidRequestError(
            "gRPC does not work in this process, because it was forked from a process that runs a data plane service. "
            "Start the service in a new process (multiprocessing's 'spawn', subprocess, tq serve); clients work here"
        )
    with _grpc_settings():
        module = importlib.import_module(name)
    _used_in[:] = [os.getpid()]
    return module


@contextlib.contextmanager
def _grpc_settings() -> Iterator[None]:
    """Set the environment variables of gRPC in the body, unless the user has set them or gRPC is already imported."""
    ours: dict[str, str] = {}
    if "grpc" not in sys.modules:
        ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
