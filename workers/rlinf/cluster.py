"""`rlinf.scheduler.cluster`: a cluster made from RLinf's configuration."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from workers.channels.settings import NODES_VARIABLE
from workers.groups.cluster import Cluster as PlainCluster
from workers.placement.ports import HIGHEST, PortKeeper

EXTENSION_VARIABLE = "RLINF_EXT_MODULE"
UNSUPPORTED = ("node_groups",)
"""Parts of the configuration without which a job would not run as it says."""
UNUSED = ("profiling", "tracer", "net_emulation")

log = logging.getLogger(__name__)


class Cluster(PlainCluster):
    """`workers.Cluster`, of as many nodes as the configuration says; without arguments, of as many as the process's
    first one has, or as the worker's own group was launched on.

    cluster_cfg: RLinf's `cluster` block; `num_nodes` of it is used. ValueError for `node_groups` in it: all nodes are
    alike here. distributed_log_dir, and `profiling`, `tracer` and `net_emulation` of the configuration, are not used,
    with a line in the log.
    """

    _wanted: ClassVar[int | None] = None

    def __init__(
        self,
        num_nodes: int | None = None,
        cluster_cfg: Mapping[str, Any] | None = None,
        distributed_log_dir: str | None = None,
    ) -> None:
        if cluster_cfg is not None:
            num_nodes = _configured(cluster_cfg, num_nodes)
        if distributed_log_dir is not None:
            log.warning("distributed_log_dir=%r is not used: workers log to the driver", distributed_log_dir)
        if num_nodes is None and self.has_initialized():
            num_nodes = Cluster._wanted
        if num_nodes is None and NODES_VARIABLE in os.environ:
            num_nodes = int(os.environ[NODES_VARIABLE])
        super().__init__(num_nodes)
        Cluster._wanted = num_nodes

    @classmethod
    def has_initialized(cls) -> bool:
        """Whether this process has made one."""
        return bool(PlainCluster._links)

    @classmethod
    def find_free_port(cls, max_port_num: int | None = None) -> int:
        """A port that is free now on this node; `Worker.acquire_free_port` keeps it so."""
        keeper = PortKeeper()
        try:
            return keeper.hold(1, HIGHEST if max_port_num is None else max_port_num)[0]
        finally:
            keeper.close()

    @property
    def accelerator_ranks(self) -> list[list[int]]:
        """The accelerators of each node, numbered over the whole cluster."""
        found, first = [], 0
        for count in self.accelerators_per_node:
            found.append(list(range(first, first + count)))
            first += count
        return found

    def get_node_ip(self, node_rank: int) -> str:
        """The address of a node."""
        return self.nodes[node_rank].host


def _configured(cluster_cfg: Mapping[str, Any], num_nodes: int | None) -> int:
    """The number of nodes that RLinf's configuration says."""
    for name in UNSUPPORTED:
        if cluster_cfg.get(name):
            raise ValueError(
                f"cluster.{name} is not supported: all nodes of a cluster are alike here, with NVIDIA GPUs or none. "
                "Remove it, or run on RLinf's own scheduler"
            )
    for name in UNUSED:
        part = cluster_cfg.get(name)
        if part and not (isinstance(part, Mapping) and part.get("enabled", True) is False):
            log.warning("cluster.%s is not used by this scheduler", name)
    told = int(cluster_cfg["num_nodes"])
    if num_nodes not in (None, told):
        raise ValueError(f"num_nodes={num_nodes}, but the configuration says {told}")
    return told


def load_user_extension_module(logger: logging.Logger | None = None) -> None:
    """Import the module that RLINF_EXT_MODULE names, if any, and call its `register()`, if it has one. What goes wrong
    is logged."""
    name = os.environ.get(EXTENSION_VARIABLE)
    if not name:
        return
    try:
        register = getattr(importlib.import_module(name), "register", None)
        if register is not None:
            register()
    except Exception:
        (logger or log).exception("the extension module %r (%s) could not be loaded", name, EXTENSION_VARIABLE)


def parse_rank_config(
    rank_config: str | int, available_ranks: list[int] | None = None, rank_type: str | None = None
) -> list[int]:
    """Ranks that a text such as "0-3,5" or "all" names, in order. ValueError for one that names none, or others than
    are available."""
    text = str(rank_config).strip()
    kind = rank_type or "rank"
    if text.lower() == "all":
        if available_ranks is None:
            raise ValueError(f"'all' cannot name processes: write {kind}s as FIRST-LAST")
        return sorted(available_ranks)
    found: set[int] = set()
    for part in filter(None, (each.strip() for each in text.split(","))):
        first, _, last = part.partition("-")
        try:
            ranks = range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f"{part!r} in {text!r}: expected a {kind}, FIRST-LAST, or 'all'") from None
        if not ranks:
            raise ValueError(f"{part!r} in {text!r} names no {kind}: the last one comes before the first")
        found.update(ranks)
    if not found:
        raise ValueError(f"{text!r} names no {kind}")
    if available_ranks is not None and not found <= set(available_ranks):
        raise ValueError(f"{text!r} names {kind}s {sorted(found - set(available_ranks))}, which do not exist")
    return sorted(found)
