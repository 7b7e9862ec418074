"""`NodeAgent`, the actor of a cluster on a node. It holds ports, and on the first node it serves the directory."""

from __future__ import annotations

import os

import ray

from workers.directory import Directory
from workers.placement.ports import PortKeeper


class NodeAgent(PortKeeper):
    """Holds ports of its node (see `PortKeeper`). host: the address at which other nodes reach this node. `_served`:
    the directory, only in the agent of the job's first node."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host
        self._served: Directory | None = None

    def directory(self) -> str:
        """Return the address of the job's directory, which this process serves from the first call on."""
        if self._served is None:
            self._served = Directory.serve(self._host)
        return self._served.address

    def node(self) -> str:
        """Return Ray's id of the node."""
        ident: str = ray.get_runtime_context().get_node_id()
        return ident

    def environment(self) -> dict[str, str]:
        """Return the environment that Ray gives to processes on this node."""
        return dict(os.environ)
