"""The settings of a channel: all that another process needs to use it."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from typing import Any

from workers.directory import DirectoryEntry, Facts

BROKER_NAME = "@broker/"
"""Prefix of a broker's name in the directory. The rank of the broker's node follows."""
NODE_RANK_VARIABLE = "TQ_NODE_RANK"
"""Environment variable with the rank of the worker's node."""
NODES_VARIABLE = "TQ_NODES"
"""Environment variable with the number of nodes."""


def broker_name(node_rank: int) -> str:
    return f"{BROKER_NAME}{node_rank}"


def node_rank_here() -> int:
    """Return the rank of this process's node from the environment, by default 0."""
    return int(os.environ.get(NODE_RANK_VARIABLE, "0"))


def check_name(name: Any) -> None:
    """Raise TypeError or ValueError unless `name` is valid for a channel."""
    if not isinstance(name, str):
        raise TypeError(f"channel name {name!r}: expected a str, got {type(name).__name__}")
    if not name or name.startswith(BROKER_NAME[0]):
        raise ValueError(f"channel name {name!r}: must not be empty or begin with {BROKER_NAME[0]!r}")


def as_maxsize(value: Any) -> int:
    """Return `value` as a maxsize. TypeError or ValueError if it is invalid."""
    maxsize = _integer("maxsize", value)
    if not 0 <= maxsize < 2**63:
        raise ValueError(f"maxsize={maxsize}: expected 0 (no bound) or more, and less than 2**63")
    return maxsize


def as_node_rank(value: Any, nodes: int | None) -> int:
    """Return `value` as the rank of a node. TypeError or ValueError if it is invalid. nodes: the number of nodes, by
    default from the environment; if that does not name it, any rank from 0 on is valid."""
    rank = _integer("node_rank", value)
    if nodes is None and NODES_VARIABLE in os.environ:
        nodes = int(os.environ[NODES_VARIABLE])
    if rank < 0 or (nodes is not None and rank >= nodes):
        range_text = "nodes are" if nodes is None else f"the cluster has {nodes} nodes,"
        raise ValueError(f"node_rank={rank} is out of range; {range_text} counted from 0")
    return rank


def _integer(name: str, value: Any) -> int:
    """Return an integer of any type as an int."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected an int, got {type(value).__name__}")
    return operator.index(value)


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
    """The settings of a channel. ident: unique, never reused; nodes: ranks of the nodes with a part of the channel, the
    first of which maps keys to parts; endpoints: of the broker on each of these nodes; directory: the address of the
    directory that has the name, None if none has it; incarnation: of the directory's entry."""

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
        """The settings that the directory stores with the name. `of` reads them."""
        return {
            "ident": self.ident,
            "maxsize": self.maxsize,
            "distributed": self.distributed,
            "nodes": list(self.nodes),
        }

    @classmethod
    def of(cls, entry: DirectoryEntry, directory: str) -> ChannelSettings:
        """Return the settings of the channel that `entry` registers in the directory at the address `directory`."""
        facts = entry.facts
        nodes, maxsize = facts["nodes"], facts["maxsize"]
        assert isinstance(nodes, list)
        assert isinstance(maxsize, int)
        return cls(
            name=entry.name,
            ident=str(facts["ident"]),
            maxsize=maxsize,
            distributed=bool(facts["distributed"]),
            nodes=tuple(int(node) for node in nodes),
            endpoints=entry.endpoints,
            directory=directory,
            incarnation=entry.incarnation,
        )

    def __str__(self) -> str:
        where = f"distributed over nodes {list(self.nodes)}" if self.distributed else f"on node {self.nodes[0]}"
        return f"maxsize={self.maxsize}, {where}"
