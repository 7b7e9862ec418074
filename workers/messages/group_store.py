"""The store at which the members of process groups find each other, and the file descriptors of both."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from dataplane.core.addresses import join_address
from workers.errors import OpenFilesError

OF_A_STORE = 16
"""Upper bound of the file descriptors that a store takes while it is made. torch aborts the process if none is left."""


class _FilesInUse:
    """The file descriptors that the groups and stores that this process is making may take. Each needs its own besides
    those of the others."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._count = 0

    @contextlib.contextmanager
    def files_for(self, what: str, count: int) -> Iterator[None]:
        """Run the body, which opens at most `count` files. `OpenFilesError`, which names `what`, if the process cannot
        open that many, or if the body fails because it opened too many."""
        with self._guard:
            self._count += count
            least = self._count
        try:
            with OpenFilesError.of(what, least=least):
                yield
        finally:
            with self._guard:
                self._count -= count


files_for = _FilesInUse().files_for


class StoreServer:
    """The store at which the members of this worker's groups find each other. Members may connect to `address` from the
    beginning; `serve` answers them. OSError if its port cannot be opened."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._port: int = self._listener.getsockname()[1]
        self._guard = threading.Lock()
        self._store: Any = None
        self.error: Exception | None = None

    @property
    def address(self) -> str:
        return join_address(self._host, self._port)

    def serve(self) -> None:
        """Answer members from now on. Blocks at most the timeout. Any thread may call this, any number of times.
        `OpenFilesError`; errors of torch. After an error the store is not served, and each call raises that error."""
        with self._guard:
            if self._store is None and self.error is None:
                try:
                    with self._listener, files_for("the store of process groups", OF_A_STORE):
                        self._store = self._made_store()
                except Exception as error:
                    self.error = error
            if self.error is not None:
                raise self.error

    def _made_store(self) -> Any:
        return TCPStore(
            self._host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=self._listener.detach(),
        )

    def close(self) -> None:
        self._listener.close()
        self._store = None
