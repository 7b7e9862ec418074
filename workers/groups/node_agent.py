"""A node's helper of a cluster, as an actor there: it holds ports, and on the first node it serves the directory."""

from __future__ import annotations

import os

import ray

from workers.directory import Directory
from workers.placement.ports import PortKeeper


class NodeAgent(PortKeeper):
    """host: the address of the node that others reach. Ends with its process."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host
        self._served: Directory | None = None

    def directory(self) -> str:
        """The address of the job's directory, served from the first call on."""
        if self._served is None:
            self._served = Directory.serve(self._host)
        return self._served.address

    def node(self) -> str:
        """Ray's id of the node."""
        ident: str = ray.get_runtime_context().get_node_id()
        return ident

    def environment(self) -> dict[str, str]:
        """What processes on this node have without being given anything."""
        return dict(os.environ)
