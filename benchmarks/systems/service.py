"""Our service in its own process, as in production: the measured client shares no interpreter with it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from dataplane import serve
from dataplane.storage import endpoints

READY_S = 60.0


class Service:
    """The constructor starts it with these settings of `serve`. `address` and `pid` are those of its process.

    tcp_only: the units listen on TCP alone, as on a machine whose ZMQ cannot authenticate ipc connections, so that
    a client with `force_remote` measures the connection between hosts.
    """

    def __init__(self, settings: dict[str, Any], *, tcp_only: bool = False) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process: BaseProcess = spawn.Process(target=_serve, args=(theirs, settings, tcp_only), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(READY_S):
            self._process.kill()
            raise TimeoutError(f"the service process did not start within {READY_S:.0f} s")
        self.address: str = self._pipe.recv()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        """End the process and wait until its arena is removed."""
        self._pipe.close()
        self._process.join(READY_S)


def _serve(pipe: Connection, settings: dict[str, Any], tcp_only: bool) -> None:
    if tcp_only:
        endpoints._bind_ipc = lambda router: ()
    with serve(settings) as server:
        pipe.send(server.address)
        pipe.poll(None)
