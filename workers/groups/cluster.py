"""The nodes and accelerators that worker groups are launched on, and the job's directory."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.channels import Channel, start_brokers
from workers.directory import DIRECTORY_VARIABLE, DirectoryClient
from workers.groups.node_agent import NodeAgent
from workers.groups.started_group import kill
from workers.groups.virtual_cluster import ResourcesNotReadyError, alive_nodes
from workers.placement.environment import driver_environment
from workers.transport.waiting import LoggedWait

NODES_TIMEOUT_S = 600.0
ANSWER_S = 120.0
_LOOK_EVERY_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """ident: Ray's; host: its address; accelerators: how many Ray counts there."""

    ident: str
    host: str
    accelerators: int


class Cluster:
    """Nodes of a Ray cluster, ranked from 0: the driver's first, the others by address.

    num_nodes: how many to use; all there are if None or 0. Connects to the Ray cluster that this process is in, else
    to one started here with `ray start`, else starts one (which `shutdown` ends). Blocks until so many nodes are there,
    up to `NODES_TIMEOUT_S` (`ResourcesNotReadyError`).

    Nothing is reserved: groups share nodes and accelerators, as they take turns. Workers take none of Ray's CPUs.
    All clusters of one Ray job (a driver, and the workers that it launched) have one directory, by which groups,
    workers and channels know each other; it ends with the driver. The driver's environment names it as long as there
    is one (TQ_DIRECTORY), for `Channel.create` and the like. Safe to use from several threads. A context manager.
    """

    _links: ClassVar[dict[str, _Link]] = {}
    _linking: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, num_nodes: int | None = None) -> None:
        if num_nodes is not None and num_nodes < 0:
            raise ValueError(f"num_nodes={num_nodes}: 0 for all nodes, or more")
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init(include_dashboard=False)
        try:
            head = _head()
            first = ray.get_runtime_context().get_node_id() if head is None else _answer(head.node.remote())
            self._nodes = _nodes(num_nodes or 0, first)
            self._link = self._linked()
        except BaseException:
            if self._started_ray:
                ray.shutdown()
            raise

    def _linked(self) -> _Link:
        """This process's link to the directory of the Ray job that it is in; an older one is closed."""
        context = ray.get_runtime_context()
        job = f"{context.gcs_address} {context.get_job_id()} {context.namespace}"
        with Cluster._linking:
            link = Cluster._links.get(job)
            if link is None:
                for old in Cluster._links.values():
                    old.forget()
                Cluster._links.clear()
                link = Cluster._links[job] = _Link(self._nodes[0])
            link.cover(self._nodes)
            return link

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        """Over all nodes."""
        return sum(self.accelerators_per_node)

    @property
    def accelerators_per_node(self) -> list[int]:
        return [node.accelerators for node in self._nodes]

    @property
    def nodes(self) -> list[Node]:
        """By rank."""
        return list(self._nodes)

    @property
    def directory(self) -> DirectoryClient:
        """This process's client of the job's directory."""
        return self._link.directory

    def hold_port(self, node_rank: int) -> int:
        """A port that is free on that node and stays so until `release_port`; for the worker that will bind it (see
        `PortKeeper`)."""
        ports: list[int] = self._link.ask(self._nodes[node_rank], "hold", 1)
        return ports[0]

    def release_port(self, node_rank: int, port: int) -> None:
        """Hold it no longer. What goes wrong is logged: a node that is gone, or Ray, holds nothing."""
        if not ray.is_initialized():
            return
        try:
            self._link.ask(self._nodes[node_rank], "release", [port])
        except RayError as error:
            logger.warning("cannot release port %d of node %d: %s", port, node_rank, error)

    def environment(self) -> dict[str, str]:
        """What workers need of this process's environment: what they would not have by themselves."""
        wanted = driver_environment()
        wanted.pop(DIRECTORY_VARIABLE, None)
        if self.num_nodes > 1:
            return wanted
        there = self._link.environment
        return {name: value for name, value in wanted.items() if there.get(name) != value}

    def await_brokers(self) -> None:
        """Wait until there are brokers for channels on all nodes; raises why there are none."""
        self._link.await_brokers()

    def adopt(self, group: Ending) -> None:
        """Have `shutdown` end `group`, if it is still there."""
        self._link.groups.add(group)

    # --- channels -------------------------------------------------------------------------------------------------

    def create_channel(
        self, channel_name: str, maxsize: int = 0, distributed: bool = False, node_rank: int = 0, local: bool = False
    ) -> Channel:
        """A new channel, or that of the name if it has the same settings. See `Channel.create`."""
        if not local:
            self.await_brokers()
        return Channel.create(
            channel_name,
            maxsize=maxsize,
            distributed=distributed,
            node_rank=node_rank,
            local=local,
            directory=self.directory,
            here=0,
            nodes=self.num_nodes,
        )

    def connect_channel(self, channel_name: str, *, wait_s: float = 60.0) -> Channel:
        """The channel of that name, once there is one: waits for it for up to `wait_s`. See `Channel.connect`."""
        return Channel.connect(channel_name, directory=self.directory, here=0, wait_s=wait_s)

    # --- the end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the groups launched by this process, its link to the job, and what that started: if this is the driver,
        the directory and all channels, for everybody; and Ray, if it was started here. Idempotent, also after Ray is
        gone."""
        with Cluster._linking:
            for job, link in list(Cluster._links.items()):
                if link is self._link:
                    del Cluster._links[job]
        self._link.close()
        if self._started_ray:
            self._started_ray = False
            ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


ClusterResource = Cluster


class Ending(Protocol):
    def end_group(self) -> object: ...


class _Link:
    """One process's part in the job: its client of the directory, and the actors that it started. The first process to
    have one starts the directory, and brokers for channels, in the background."""

    def __init__(self, first: Node) -> None:
        self._guard = threading.Lock()
        self._agents: dict[str, ActorHandle] = {}
        self._brokers: dict[int, Future[ActorHandle]] = {}
        self.groups: WeakSet[Ending] = WeakSet()
        head = _head()
        self._owner = head is None
        if head is None:
            head = self._agents[first.ident] = _agent(first, name=_agent_name())
        self.environment: dict[str, str] = _answer(head.environment.remote())
        self.directory = DirectoryClient(_answer(head.directory.remote()))
        if self._owner:
            os.environ[DIRECTORY_VARIABLE] = self.directory.address

    def cover(self, nodes: list[Node]) -> None:
        """Begin to start brokers where there are none."""
        if not self._owner:
            return
        with self._guard:
            new = {rank: node.ident for rank, node in enumerate(nodes) if not self._has_broker(rank)}
            self._brokers.update({rank: Future() for rank in new})
        if new:
            threading.Thread(target=self._start_brokers, args=(new,), name="tq-brokers", daemon=True).start()

    def _has_broker(self, rank: int) -> bool:
        """Whether one was started, or is being; Ray starts it again should it die."""
        broker = self._brokers.get(rank)
        return broker is not None and not (broker.done() and broker.exception() is not None)

    def await_brokers(self) -> None:
        for broker in list(self._brokers.values()):
            broker.result()

    def ask(self, node: Node, method: str, *args: Any) -> Any:
        """What the agent of that node answers; starts one if this process has none there."""
        with self._guard:
            if node.ident not in self._agents:
                self._agents[node.ident] = _agent(node)
            agent = self._agents[node.ident]
        return _answer(getattr(agent, method).remote(*args))

    def close(self) -> None:
        if ray.is_initialized():
            for group in list(self.groups):
                group.end_group()
        started = [broker for broker in self._brokers.values() if broker.exception() is None]
        self.forget()
        kill([*(broker.result() for broker in started), *self._agents.values()])

    def forget(self) -> None:
        """Close what there is of it in this process; its actors are gone, or about to be."""
        if self._owner and os.environ.get(DIRECTORY_VARIABLE) == self.directory.address:
            del os.environ[DIRECTORY_VARIABLE]
        self.directory.close()

    def _start_brokers(self, nodes: dict[int, str]) -> None:
        try:
            started = start_brokers(nodes, self.directory.address)
        except BaseException as error:
            for rank in nodes:
                self._brokers[rank].set_exception(error)
        else:
            for rank, broker in started.items():
                self._brokers[rank].set_result(broker)


def job_directory() -> str:
    """The address of the directory of the Ray job that this process is in, as `Cluster()` finds or starts both; waits
    for the brokers of channels."""
    cluster = Cluster()
    cluster.await_brokers()
    return cluster.directory.address


def _answer(reference: ObjectRef) -> Any:
    return ray.get(reference, timeout=ANSWER_S)


def _agent(node: Node, name: str | None = None) -> ActorHandle:
    place = NodeAffinitySchedulingStrategy(node_id=node.ident, soft=False)
    maker = ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=place, name=name)
    agent: ActorHandle = maker.remote(node.host)
    return agent


def _agent_name() -> str:
    """One for each driver: jobs that share a namespace are apart."""
    return f"tq-node-agent-{ray.get_runtime_context().get_job_id()}"


def _head() -> ActorHandle | None:
    """The agent of the job's first node, where the directory is; None if there is none yet."""
    try:
        found: ActorHandle = ray.get_actor(_agent_name())
    except ValueError:
        return None
    return found


def _nodes(wanted: int, first: str) -> list[Node]:
    """The first `wanted` nodes, all if 0, once there are as many."""
    wait = LoggedWait(NODES_TIMEOUT_S)
    while len(alive := alive_nodes()) < max(wanted, 1):
        if wait.over(f"{wanted} nodes of Ray, of which there are {len(alive)}"):
            raise ResourcesNotReadyError(f"asked for {wanted} nodes; after {wait.waited_s:.0f} s Ray has {len(alive)}")
        time.sleep(_LOOK_EVERY_S)
    alive.sort(key=lambda node: (node["NodeID"] != first, node["NodeManagerAddress"], node["NodeID"]))
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
        for node in alive[: wanted or None]
    ]
