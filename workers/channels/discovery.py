"""Settings of channels, and how a process finds brokers and joins a job.

A channel's settings are all that another process needs to use it. Brokers are looked up in the job's directory.
A process without a directory in its environment joins its job through a function that `workers` registers.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from workers.directory import DIRECTORY_VARIABLE, DirectoryClient, DirectoryEntry, Facts, Kind
from workers.errors import NameNotFoundError, WorkerLostError

FIND_S = 60.0
"""How long to wait for a broker that is starting or restarting."""
NOTICE_S = 15.0
"""How long the directory may take to detect a lost broker."""
_joins: list[Callable[[], str]] = []
"""The registered function, or nothing."""
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
    """The settings of a channel. ident: unique, never reused; nodes: ranks of the nodes with a branch of the channel,
    the first of which maps keys to branches; endpoints: of the broker on each of these nodes; directory: the address of
    the directory that has the name, None if none has it; incarnation: of the directory's entry."""

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
        nodes = facts["nodes"]
        maxsize = facts["maxsize"]
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


@contextlib.contextmanager
def directory_or_default(directory: DirectoryClient | None, *, join: bool = False) -> Iterator[DirectoryClient]:
    """Yield `directory`, or else a temporary client: of the directory that the environment names, or, with `join`, if
    it names none, of the directory of this process's job. LookupError if there is none."""
    if directory is not None:
        yield directory
        return
    if join and not os.environ.get(DIRECTORY_VARIABLE):
        temporary = DirectoryClient(job_directory())
    else:
        temporary = DirectoryClient.from_environment()
    with temporary:
        yield temporary


def find_brokers(directory: DirectoryClient, node_rank: int | None) -> dict[int, str]:
    """Return the endpoints of brokers by the rank of their node: that of one node's broker, after waiting for it, or
    with `node_rank` None those of all present brokers (if there are none, node 0's, after waiting for it).
    `NameNotFoundError` after `FIND_S`, with a note that lists the nodes that have a broker."""
    if node_rank is None:
        brokers = _registered_brokers(directory)
        if brokers:
            return brokers
        node_rank = 0
    try:
        return {node_rank: directory.lookup_channel(broker_name(node_rank), FIND_S).endpoints[0]}
    except NameNotFoundError as error:
        nodes = list(_registered_brokers(directory))
        error.add_note(f"node {node_rank} has no channel broker; nodes with a broker: {nodes}")
        raise


def _registered_brokers(directory: DirectoryClient) -> dict[int, str]:
    """Return the endpoints of all registered brokers by the rank of their node, in the order of ranks."""
    entries = [entry for entry in directory.listing(Kind.CHANNEL) if entry.name.startswith(BROKER_NAME)]
    brokers = {int(entry.name.removeprefix(BROKER_NAME)): entry.endpoints[0] for entry in entries}
    return dict(sorted(brokers.items()))


def await_broker_change(directory: DirectoryClient, brokers: dict[int, str], until: float) -> bool:
    """Return whether the directory removed or replaced one of `brokers` (endpoints by node rank). Blocks until it does,
    at most until `until`."""
    endpoints_by_name = {broker_name(rank): endpoint for rank, endpoint in brokers.items()}
    changed = threading.Event()

    def notice_end(entry: DirectoryEntry) -> None:
        if entry.name in endpoints_by_name:
            changed.set()

    unsubscribe = directory.subscribe(notice_end)  # before the lookups, so that no end is missed
    try:
        # The directory reports the end of the entries that this client has looked up.
        for name, endpoint in endpoints_by_name.items():
            if directory.lookup_channel(name).endpoints != (endpoint,):
                return True
        return changed.wait(max(0.0, until - time.monotonic()))
    except (NameNotFoundError, WorkerLostError):  # it was removed before its lookup
        return True
    finally:
        unsubscribe()


def register_job(join: Callable[[], str]) -> None:
    """Make `job_directory` return the result of `join`: the address of the directory of this process's job, once its
    brokers are registered."""
    _joins[:] = [join]


def job_directory() -> str:
    """Return the address of the job's directory. LookupError if none is registered; raises the errors of `join`."""
    if not _joins:
        raise LookupError("this process has not joined a cluster of workers: import workers, or set TQ_DIRECTORY")
    return _joins[0]()
