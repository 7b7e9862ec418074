"""What a channel was made with: all that another process needs to use it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from workers.directory import Entry, Facts

BROKER_NAME = "@broker/"
"""The directory has a node's broker under this and the node's rank, among the channels."""
NODE_RANK_VARIABLE = "TQ_NODE_RANK"
"""Where a worker's process finds the rank of its node."""


def broker_name(node_rank: int) -> str:
    return f"{BROKER_NAME}{node_rank}"


def node_rank_here() -> int:
    """What the environment says."""
    return int(os.environ.get(NODE_RANK_VARIABLE, "0"))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """ident: unique for ever; nodes: ranks of the nodes that hold it, the first of which knows where keys are;
    endpoints: of the broker on each; directory: the address of the one that knows the name, None where none does."""

    name: str
    ident: str
    maxsize: int
    distributed: bool
    nodes: tuple[int, ...]
    endpoints: tuple[str, ...]
    directory: str | None = None
    incarnation: int | None = None

    @property
    def facts(self) -> Facts:
        return {
            "ident": self.ident,
            "maxsize": self.maxsize,
            "distributed": self.distributed,
            "nodes": list(self.nodes),
        }

    @classmethod
    def of(cls, entry: Entry, directory: str) -> Settings:
        """What `facts` and the entry's endpoints tell."""
        facts = entry.facts
        nodes = facts["nodes"]
        assert isinstance(nodes, list)
        return cls(
            name=entry.name,
            ident=str(facts["ident"]),
            maxsize=int(str(facts["maxsize"])),
            distributed=bool(facts["distributed"]),
            nodes=tuple(int(node) for node in nodes),
            endpoints=entry.endpoints,
            directory=directory,
            incarnation=entry.incarnation,
        )

    def __str__(self) -> str:
        where = f"distributed over nodes {list(self.nodes)}" if self.distributed else f"on node {self.nodes[0]}"
        return f"maxsize={self.maxsize}, {where}"
