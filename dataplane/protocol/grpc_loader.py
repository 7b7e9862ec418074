"""The one way gRPC gets into a process of ours.

gRPC's fork support, on by default, runs handlers at every fork of a process that uses gRPC, and when gRPC's threads are
busy these kill the child now and then (grpcio 1.85: 1 to 10 of 100 plain forks under load; none with support off). The
switch is an environment variable that is read when grpc is imported. So it is set for that moment, unless the user has
set it, and processes that serve nothing never import grpc at all. The same goes for what gRPC logs on standard error by
itself, a line for each handshake that fails: strangers decide how many those are.
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


def import_with_grpc(name: str) -> ModuleType:
    """The module of this name, which imports grpc. `InvalidRequestError` in a child forked from a process that served
    over gRPC: gRPC does not work there."""
    if _used_in and _used_in[0] != os.getpid():
        raise InvalidRequestError(
            "this process was forked from one that runs a data plane service; gRPC cannot serve in it. Start the "
            "service in a fresh process (multiprocessing's 'spawn', subprocess, tq serve); clients work after a fork"
        )
    with _settings():
        module = importlib.import_module(name)
    _used_in[:] = [os.getpid()]
    return module


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    ours = {} if "grpc" in sys.modules else {name: _SETTINGS[name] for name in _SETTINGS.keys() - os.environ.keys()}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
