"""`rlinf.scheduler.cluster`: a cluster that is created from RLinf's configuration.

The names of `rlinf.scheduler.dynamic_scheduler` are here, so that RLinf's modules can be imported. Jobs
with `cluster.auto_scheduler` are not supported.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from workers.channels.discovery import NODES_VARIABLE
from workers.groups.cluster import Cluster as PlainCluster
from workers.placement.ports import HIGHEST, PortKeeper

EXTENSION_VARIABLE = "RLINF_EXT_MODULE"
UNSUPPORTED = ("node_groups",)
"""Blocks of the configuration that raise an error, because a job would not run as configured without them."""
UNUSED = ("profiling", "tracer", "net_emulation")
"""Blocks of the configuration that are ignored, with a line in the log unless they are disabled."""

log = logging.getLogger(__name__)


class Cluster(PlainCluster):
    """`workers.Cluster` with the configured number of nodes. Without arguments, it has as many nodes as the previous
    `Cluster` of this process requested, or as the cluster on which this worker's group was launched.

    cluster_cfg: RLinf's `cluster` block, of which `num_nodes` is used. ValueError if it has `node_groups`, because all
    nodes are alike here. distributed_log_dir, and `profiling`, `tracer` and `net_emulation` of the configuration, are
    ignored, with a line in the log.
    """

    _requested_nodes: ClassVar[int | None] = None  # of the previous `Cluster` of this process; None: all nodes

    def __init__(
        self,
        num_nodes: int | None = None,
        cluster_cfg: Mapping[str, Any] | None = None,
        distributed_log_dir: str | None = None,
    ) -> None:
        if cluster_cfg is not None:
            num_nodes = _read_num_nodes(cluster_cfg, num_nodes)
        if distributed_log_dir is not None:
            log.warning("distributed_log_dir=%r is ignored: workers log to the driver", distributed_log_dir)
        if num_nodes is None and self.has_initialized():
            num_nodes = Cluster._requested_nodes
        if num_nodes is None and NODES_VARIABLE in os.environ:  # in a worker: its group's cluster
            num_nodes = int(os.environ[NODES_VARIABLE])
        super().__init__(num_nodes)
        Cluster._requested_nodes = num_nodes

    @classmethod
    def has_initialized(cls) -> bool:
        """Whether this process has a cluster that is not shut down."""
        return bool(PlainCluster._connections)

    @classmethod
    def find_free_port(cls, max_port_num: int | None = None) -> int:
        """Return a port, at most `max_port_num`, that is free on this node now. `Worker.acquire_free_port` holds it."""
        keeper = PortKeeper()
        try:
            return keeper.hold(1, HIGHEST if max_port_num is None else max_port_num)[0]
        finally:
            keeper.close()

    @property
    def accelerator_ranks(self) -> list[list[int]]:
        """The numbers of the accelerators of each node. Numbers are unique in the cluster."""
        ranks, first = [], 0  # first: the number of the node's first accelerator
        for count in self.accelerators_per_node:
            ranks.append(list(range(first, first + count)))
            first += count
        return ranks

    def get_node_ip(self, node_rank: int) -> str:
        """Return the address of a node."""
        return self.nodes[node_rank].host


def _read_num_nodes(cluster_cfg: Mapping[str, Any], num_nodes: int | None) -> int:
    """Return the number of nodes in RLinf's configuration. Log ignored blocks. ValueError for an unsupported block, and
    for an argument `num_nodes` that differs from the configuration."""
    for name in UNSUPPORTED:
        if cluster_cfg.get(name):
            raise ValueError(
                f"cluster.{name} is not supported: all nodes of a cluster are alike here. "
                "Remove it, or run on RLinf's own scheduler"
            )
    for name in UNUSED:
        section = cluster_cfg.get(name)
        disabled = isinstance(section, Mapping) and section.get("enabled", True) is False  # enabled by default
        if section and not disabled:
            log.warning("cluster.%s is ignored by this scheduler", name)
    configured = int(cluster_cfg["num_nodes"])
    if num_nodes not in (None, configured):
        raise ValueError(f"num_nodes={num_nodes} conflicts with cluster_cfg.num_nodes={configured}; pass one of them")
    return configured


def load_user_extension_module(logger: logging.Logger | None = None) -> None:
    """Import the module that RLINF_EXT_MODULE names, if set, and call its `register()`, if defined. Exceptions are
    logged, not raised."""
    name = os.environ.get(EXTENSION_VARIABLE)
    if not name:
        return
    try:
        register = getattr(importlib.import_module(name), "register", None)
        if register is not None:
            register()
    except Exception:
        (logger or log).exception("loading the extension module %r (%s) failed", name, EXTENSION_VARIABLE)


def parse_rank_config(
    rank_config: str | int, available_ranks: list[int] | None = None, rank_type: str | None = None
) -> list[int]:
    """Parse a text such as "0-3,5" or "all" (all `available_ranks`) into sorted ranks. rank_type: what the ranks
    number, for errors. ValueError for a malformed text or one without ranks, for "all" if `available_ranks` is None,
    and for ranks that are not in it otherwise."""
    text = str(rank_config).strip()
    kind = rank_type or "rank"
    if text.lower() == "all":
        if available_ranks is None:  # ranks of processes, whose number is not known
            raise ValueError("'all' cannot name processes, whose number is not known: write them as FIRST-LAST")
        return sorted(available_ranks)
    ranks: set[int] = set()
    for entry in filter(None, map(str.strip, text.split(","))):
        first, _, last = entry.partition("-")
        try:
            entry_ranks = range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f"{entry!r} in {text!r}: expected a {kind}, FIRST-LAST, or 'all'") from None
        if not entry_ranks:
            raise ValueError(f"{entry!r} in {text!r} names no {kind}: the last rank is below the first")
        ranks.update(entry_ranks)
    if not ranks:
        raise ValueError(f"{text!r} names no {kind}")
    if available_ranks is not None and not ranks <= set(available_ranks):
        raise ValueError(f"{text!r} names {kind}s {sorted(ranks - set(available_ranks))}, which do not exist")
    return sorted(ranks)


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "cluster.auto_scheduler is not supported by workers.rlinf: set it to False, or run on RLinf's own scheduler"
    )


class SchedulerWorker:
    """A placeholder whose `create_group` raises NotImplementedError."""

    create_group = staticmethod(refuse)


RolloutScalingScheduler = refuse
get_scheduler_channel = refuse
get_scheduler_request_queue = refuse
get_scheduler_response_queue = refuse
get_valid_dp_sizes = refuse
