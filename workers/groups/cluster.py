"""`Cluster`: the nodes and accelerators on which worker groups are launched, and the job's directory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
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
from workers.directory import DIRECTORY_VARIABLE, Directory, DirectoryClient
from workers.groups.started_group import kill
from workers.groups.virtual_cluster import ResourcesNotReadyError, alive_nodes
from workers.placement.environment import driver_environment
from workers.placement.ports import PortKeeper
from workers.transport.waiting import LoggedWait

NODES_TIMEOUT_S = 600.0
ANSWER_S = 120.0
"""Timeout for the answer of a node agent."""
_POLL_EVERY_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """ident: Ray's id of the node; host: its address; accelerators: the number of GPUs or NPUs that Ray counts."""

    ident: str
    host: str
    accelerators: int


class Cluster:
    """The nodes of a Ray cluster, ranked from 0: the driver's node first, the others by address.

    num_nodes: number of nodes to use; all if None or 0. Connects to the Ray cluster of this process, or else to one
    that `ray start` has started on this machine, or else starts one, which `shutdown` stops. Blocks until the
    cluster has that many nodes, up to `NODES_TIMEOUT_S` (then `ResourcesNotReadyError`).

    Nothing is reserved. Groups share nodes and accelerators and use them in turn. Workers use none of Ray's CPUs.
    All clusters of one Ray job (a driver and its workers) share one directory, in which groups, workers and channels
    find each other. It ends with the driver. While it runs, the driver's environment variable TQ_DIRECTORY has its
    address, for calls such as `Channel.create`. Thread-safe. A context manager.

    `_started_ray`: whether this object started Ray and has not stopped it yet. `_connection`: this process's
    connection to the job, shared by all `Cluster` objects of the process.
    """

    # By Ray job. At most one entry: connections to earlier jobs are closed. `_connecting` guards it.
    _connections: ClassVar[dict[str, _JobConnection]] = {}
    _connecting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, num_nodes: int | None = None) -> None:
        if num_nodes is not None and num_nodes < 0:
            raise ValueError(f"num_nodes={num_nodes}: expected a positive number, or 0 for all nodes")
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init(include_dashboard=False)
        try:
            # Rank 0 is the driver's node: that of the first agent, or this one if the job has no agent yet.
            head = _find_head_agent()
            first_id = ray.get_runtime_context().get_node_id() if head is None else _get_result(head.node.remote())
            self._nodes = _await_nodes(num_nodes or 0, first_id)
            self._connection = self._connect()
        except BaseException:
            if self._started_ray:
                ray.shutdown()
            raise

    def _connect(self) -> _JobConnection:
        """Return this process's connection to the current Ray job, with brokers for `self._nodes`. Close connections to
        earlier jobs."""
        context = ray.get_runtime_context()
        job = f"{context.gcs_address} {context.get_job_id()} {context.namespace}"
        with Cluster._connecting:
            connection = Cluster._connections.get(job)
            if connection is None:
                for old in Cluster._connections.values():
                    old.disconnect()  # not `close`: the actors of an earlier job have ended with it
                Cluster._connections.clear()
                connection = Cluster._connections[job] = _JobConnection(self._nodes[0])
            connection.start_missing_brokers(self._nodes)
            return connection

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        """The number of accelerators of all nodes."""
        return sum(self.accelerators_per_node)

    @property
    def accelerators_per_node(self) -> list[int]:
        return [node.accelerators for node in self._nodes]

    @property
    def nodes(self) -> list[Node]:
        """The nodes by rank."""
        return list(self._nodes)

    @property
    def directory(self) -> DirectoryClient:
        """This process's client of the job's directory."""
        return self._connection.directory

    def hold_port(self, node_rank: int) -> int:
        """Return a free port of that node, held until `release_port`. See `PortKeeper` for how a worker binds it. Wait
        up to `ANSWER_S` for the node's agent, then Ray's error."""
        ports: list[int] = self._connection.call_agent(self._nodes[node_rank], "hold", 1)  # a list of one port
        return ports[0]

    def release_port(self, node_rank: int, port: int) -> None:
        """Release the port. Errors are logged: a dead node holds no ports, nor does a stopped Ray cluster."""
        if not ray.is_initialized():
            return
        try:
            self._connection.call_agent(self._nodes[node_rank], "release", [port])
        except RayError as error:
            logger.warning("Cannot release port %d of node %d: %s", port, node_rank, error)

    def environment(self) -> dict[str, str]:
        """Return the variables of this process's environment that workers need and do not have by default."""
        variables = driver_environment()
        variables.pop(DIRECTORY_VARIABLE, None)  # each launch sets it
        if self.num_nodes > 1:
            return variables  # the defaults of the other nodes are unknown
        defaults = self._connection.environment
        return {name: value for name, value in variables.items() if defaults.get(name) != value}

    def await_brokers(self) -> None:
        """Wait until every node has a broker for channels. Raise the error of a broker that failed to start."""
        self._connection.await_brokers()

    def adopt(self, worker_group: Ending) -> None:
        """Have `shutdown` end `worker_group`, if it still exists."""
        self._connection.worker_groups.add(worker_group)

    # --- channels -------------------------------------------------------------------------------------------------

    def create_channel(
        self, channel_name: str, maxsize: int = 0, distributed: bool = False, node_rank: int = 0, local: bool = False
    ) -> Channel:
        """Create a channel, or return the existing one of that name if its settings are equal. See `Channel.create`."""
        if not local:  # a local channel needs no broker
            self.await_brokers()
        return Channel.create(
            channel_name,
            maxsize=maxsize,
            distributed=distributed,
            node_rank=node_rank,
            local=local,
            directory=self.directory,
            here=0,  # the driver's node
            nodes=self.num_nodes,
        )

    def connect_channel(self, channel_name: str, *, wait_s: float = 60.0) -> Channel:
        """Return the channel of that name. Wait up to `wait_s` for its creation. See `Channel.connect`."""
        return Channel.connect(channel_name, directory=self.directory, here=0, wait_s=wait_s)

    # --- shutdown -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the groups that this process launched, close its connection to the job, and stop everything that the
        connection started. In the driver these are the directory and all channels, for all processes. Stop Ray if
        this object started it. Idempotent, also after Ray has stopped."""
        with Cluster._connecting:
            for job, connection in list(Cluster._connections.items()):
                if connection is self._connection:
                    del Cluster._connections[job]
        self._connection.close()
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
    """A group that `Cluster.shutdown` ends."""

    def end_group(self) -> object: ...


class _JobConnection:
    """One process's part of the job: its directory client and the actors that it started.

    The first process of a job, the owner, starts the directory, and the brokers for channels in the background.
    environment: the variables of the first node's agent, those that Ray gives to processes by default. worker_groups:
    those that this process launched. `_agents`: only those that this process started; each process has its own for
    ports. `_brokers`: empty unless this process is the owner. `_guard` guards the entries of both.
    """

    def __init__(self, first: Node) -> None:
        self._guard = threading.Lock()
        self._agents: dict[str, ActorHandle] = {}  # by Ray node id
        self._brokers: dict[int, Future[ActorHandle]] = {}  # by node rank
        self.worker_groups: WeakSet[Ending] = WeakSet()
        head = _find_head_agent()  # it serves the directory; None: this process is the first of the job
        self._owner = head is None
        if head is None:
            head = self._agents[first.ident] = _start_agent(first, name=_head_agent_name())
        self.environment: dict[str, str] = _get_result(head.environment.remote())
        self.directory = DirectoryClient(_get_result(head.directory.remote()))
        if self._owner:
            os.environ[DIRECTORY_VARIABLE] = self.directory.address

    def start_missing_brokers(self, nodes: list[Node]) -> None:
        """Start brokers, in the background, on nodes that have none. A no-op unless this process is the owner."""
        if not self._owner:
            return
        with self._guard:
            missing = {rank: node.ident for rank, node in enumerate(nodes) if not self._has_broker(rank)}
            self._brokers.update({rank: Future() for rank in missing})  # `_start_brokers` completes them
        if missing:
            threading.Thread(target=self._start_brokers, args=(missing,), name="tq-brokers", daemon=True).start()

    def _has_broker(self, rank: int) -> bool:
        """Return whether the node's broker was started or is starting. Ray restarts a broker that dies."""
        broker = self._brokers.get(rank)
        if broker is None:
            return False
        failed = broker.done() and broker.exception() is not None
        return not failed

    def await_brokers(self) -> None:
        """Wait until all brokers that this process starts have started. Raise the error of one that failed to start."""
        for broker in list(self._brokers.values()):  # a copy: another thread may add brokers
            broker.result()

    def call_agent(self, node: Node, method: str, *args: Any) -> Any:
        """Return the result of a method of the node's agent. Start an agent if this process has none there."""
        with self._guard:
            if node.ident not in self._agents:
                self._agents[node.ident] = _start_agent(node)
            agent = self._agents[node.ident]
        return _get_result(getattr(agent, method).remote(*args))

    def close(self) -> None:
        """End the groups and all actors that this process started, and close the directory client. Wait for brokers
        that are starting."""
        if ray.is_initialized():
            for worker_group in list(self.worker_groups):
                worker_group.end_group()
        # `exception()` waits for a broker that is starting.
        started = [broker for broker in self._brokers.values() if broker.exception() is None]
        self.disconnect()
        kill([*(broker.result() for broker in started), *self._agents.values()])

    def disconnect(self) -> None:
        """Close this process's side of the connection. Its actors have ended or are about to end."""
        if self._owner and os.environ.get(DIRECTORY_VARIABLE) == self.directory.address:
            del os.environ[DIRECTORY_VARIABLE]
        self.directory.close()

    def _start_brokers(self, nodes: dict[int, str]) -> None:
        """Start a broker on each node and complete the futures in `_brokers`. nodes: Ray node ids by rank. Runs in a
        background thread."""
        try:
            started = start_brokers(nodes, self.directory.address)
        except BaseException as error:
            for rank in nodes:
                self._brokers[rank].set_exception(error)
        else:
            for rank, broker in started.items():
                self._brokers[rank].set_result(broker)


def job_directory() -> str:
    """Return the address of the directory of the current Ray job. Find or start both as `Cluster()` does, and wait
    for the brokers of channels."""
    cluster = Cluster()
    cluster.await_brokers()
    return cluster.directory.address


def _get_result(reference: ObjectRef) -> Any:
    """Return the result of a call of a node agent. Ray's error if it failed or is not done within `ANSWER_S`."""
    return ray.get(reference, timeout=ANSWER_S)


def _start_agent(node: Node, name: str | None = None) -> ActorHandle:
    """Start an agent on the node. name: under which other processes find it."""
    on_node = NodeAffinitySchedulingStrategy(node_id=node.ident, soft=False)
    actor_class = ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=on_node, name=name)
    agent: ActorHandle = actor_class.remote(node.host)
    return agent


def _head_agent_name() -> str:
    """Return a name with the job id, so that jobs in one namespace do not share an agent."""
    return f"tq-node-agent-{ray.get_runtime_context().get_job_id()}"


def _find_head_agent() -> ActorHandle | None:
    """Return the agent of the job's first node, which serves the directory, or None before it has started."""
    try:
        agent: ActorHandle = ray.get_actor(_head_agent_name())
    except ValueError:
        return None
    return agent


def _await_nodes(count: int, first_id: str) -> list[Node]:
    """Wait until Ray has `count` nodes, and return that many (0: wait for one, return all): first the node `first_id`,
    then the others by address. ResourcesNotReadyError after `NODES_TIMEOUT_S`."""
    wait = LoggedWait(NODES_TIMEOUT_S)
    least = max(count, 1)
    alive = alive_nodes()
    while len(alive) < least:
        if wait.over(f"Ray has {len(alive)} of {least} requested nodes"):
            raise ResourcesNotReadyError(
                f"the cluster needs {least} nodes, but after {wait.waited_s:.0f} s Ray only has {len(alive)}; start "
                "more nodes, or request fewer (num_nodes)"
            )
        time.sleep(wait.step_s(_POLL_EVERY_S))
        alive = alive_nodes()
    # False sorts before True, so the node `first_id` comes first.
    alive.sort(key=lambda node: (node["NodeID"] != first_id, node["NodeManagerAddress"], node["NodeID"]))
    chosen = alive[:count] if count else alive
    return [Node(node["NodeID"], node["NodeManagerAddress"], _count_accelerators(node["Resources"])) for node in chosen]


def _count_accelerators(resources: Mapping[str, float]) -> int:
    """Return the number of a node's accelerators. Ray counts Ascend NPUs as "NPU", those of other makers as "GPU"."""
    return int(resources.get("GPU") or resources.get("NPU") or 0)


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
