"""What a channel was made with: all that another process needs to use it."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from typing import Any

from workers.directory import DirectoryEntry, Facts

BROKER_NAME = "@broker/"
"""The directory has a node's broker under this and the node's rank, among the channels."""
NODE_RANK_VARIABLE = "TQ_NODE_RANK"
"""Where a worker's process finds the rank of its node."""
NODES_VARIABLE = "TQ_NODES"
"""And how many there are."""


def broker_name(node_rank: int) -> str:
    return f"{BROKER_NAME}{node_rank}"


def node_rank_here() -> int:
    """What the environment says."""
    return int(os.environ.get(NODE_RANK_VARIABLE, "0"))


def check_name(name: Any) -> None:
    """TypeError or ValueError unless a channel may have that name."""
    if not isinstance(name, str):
        raise TypeError(f"channel name {name!r}: expected a str, got {type(name).__name__}")
    if not name or name.startswith(BROKER_NAME[0]):
        raise ValueError(f"channel name {name!r}: it must not be empty or begin with {BROKER_NAME[0]!r}")


def as_maxsize(value: Any) -> int:
    """`value` as one; TypeError or ValueError if it is none."""
    maxsize = _integer("maxsize", value)
    if not 0 <= maxsize < 2**63:
        raise ValueError(f"maxsize is {maxsize}; it is 0 for no bound, or more, and less than 2**63")
    return maxsize


def as_node_rank(value: Any, nodes: int | None) -> int:
    """`value` as the rank of a node; TypeError or ValueError if it is none. nodes: how many there are, by default what
    the environment says; where it says nothing, any rank is taken."""
    rank = _integer("node_rank", value)
    if nodes is None and NODES_VARIABLE in os.environ:
        nodes = int(os.environ[NODES_VARIABLE])
    if rank < 0 or (nodes is not None and rank >= nodes):
        there = "nodes are" if nodes is None else f"the cluster has {nodes} nodes,"
        raise ValueError(f"node {rank} was named; {there} counted from 0")
    return rank


def _integer(name: str, value: Any) -> int:
    """Of any type of integers."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected an int, got {type(value).__name__}")
    return operator.index(value)


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
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
    def of(cls, entry: DirectoryEntry, directory: str) -> ChannelSettings:
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
