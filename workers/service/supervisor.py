"""The actor that starts a service's storage units, on the current nodes and on nodes that join later."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import DataPlaneConfig
from dataplane.errors import DataPlaneError, InvalidRequestError
from dataplane.ledger import commands as c
from workers.service.actors import RETRY_S, StorageUnitActor, was_restarted

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
"""Timeout for an actor of a service to stop. It is long enough for busy machines, because an actor that is killed does
not free its memory."""
CHECK_INTERVAL_S = 2.0
"""Interval of polling Ray for nodes that join or leave (Ray sends no events), and of checking the service's actors."""
LEAST_DRAIN_S = 5.0
"""Minimum timeout of the drain of a leaving node, also after the node's deadline."""
DRAIN_RETRY_S = 10.0
"""Delay before a failed drain of a leaving node is retried."""
NEVER = 1 << 62
"""Larger than every unit's id."""
SUPERVISOR_CALLS = 100_000
"""Maximum number of concurrent calls. Every storage unit has one pending call to its supervisor."""
Storage = Literal["per_node", "driver_node"]
"""Where a service has storage units: on every node, or on the driver's node only."""
State = Literal["starting", "serving", "draining"]


class ServiceStartError(RuntimeError):
    """An actor of the service did not start; the message names it. All actors of the service were ended."""


@dataclass(frozen=True, kw_only=True)
class ServiceUnit:
    """A storage unit of a service. name: also in `client.stats()`. node: Ray's id of its node. host: address of that
    node. state: "starting", "serving" or "draining"."""

    name: str
    node: str
    host: str
    state: State


@dataclass(frozen=True, kw_only=True)
class ServiceNode:
    """A node of a service. units: names of its units. state: "serving"; "draining" while its rows move to other nodes;
    "drained", without units until `add_node`."""

    ident: str
    host: str
    state: Literal["serving", "draining", "drained"]
    units: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ServicePlan:
    """The specification of a service. name, namespace: of its controller. config: includes address and
    token. storage: see `launch_service`. driver: the id of the node with the controller. detached: the
    service outlives its driver. drain_s: timeout of a drain without a deadline."""

    name: str
    namespace: str
    config: DataPlaneConfig
    storage: Storage
    driver: str
    detached: bool = False
    drain_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node of the Ray cluster. ident: id in hex. host: address."""

    ident: str
    host: str


@dataclass(eq=False, kw_only=True)
class Unit:
    """A storage unit and its actor. started: done when the unit serves or failed to start. unit_id: its
    id at the controller, 0 until it serves; monitor_task: waits for its end."""

    name: str
    node: RayNode
    actor: ActorHandle
    started: asyncio.Future[None]
    state: State = "starting"
    unit_id: int = 0
    monitor_task: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"storage unit {self.name} on node {self.node.host}"


class SupervisorActor:
    """Start, monitor and end the storage units of a service. Calls run concurrently in one event loop.

    Units are detached actors, so that no data is lost when this actor's process dies. Ray restarts it, and it finds the
    units by their names.

    Nodes are referred to by id. `_alive`: the nodes of the Ray cluster at the last check; `_announced`: those that will
    leave, with their deadlines; `_announced_drains`: those of them that are being drained for that. `_drain_states`:
    the nodes that are being drained or are drained, for any reason; `_added`: the nodes of `add_node`.

    `_units`: by name, starting ones included. `_outdated`: ids by name of a unit; the controller has to drop units
    of that name with lower ids. `_tasks`: the background tasks. `_resumed`: whether `resume` was called.
    """

    def __init__(self, plan: ServicePlan) -> None:
        self._plan = plan
        self._alive: dict[str, RayNode] = {}
        self._units: dict[str, Unit] = {}
        self._drain_states: dict[str, Literal["draining", "drained"]] = {}
        self._announced_drains: set[str] = set()
        self._announced: dict[str, float | None] = {}
        self._added: set[str] = set()
        self._outdated: dict[str, int] = {}
        self._reconcile_lock = asyncio.Lock()  # held by `_reconcile`
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False  # `stop` was called: no units are started any more
        self._resumed = False
        if was_restarted():
            # `resume` needs the actor's event loop, which runs after this constructor.
            threading.Thread(target=_call_resume, name="tq-resume", daemon=True).start()

    # --- calls

    async def start(self, timeout_s: float) -> None:
        """Start units on the current nodes, and later on nodes that join. Return when all units serve.
        `ServiceStartError`, naming the units, if some fail to start or are not ready within `timeout_s`."""
        await self._reconcile()
        units = list(self._units.values())
        if units:
            await asyncio.wait([unit.started for unit in units], timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = [unit for unit in units if unit.started.done() and unit.started.exception() is not None]
        if failed:
            raise start_error(failed[0])
        late = sorted(str(unit) for unit in units if not unit.started.done())
        if late:
            raise ServiceStartError(
                f"{', '.join(late)}: not ready within {timeout_s:.0f} s; pass a larger timeout_s, or look for the "
                "cause in Ray's logs of these units"
            )
        self._spawn(self._watch())

    async def resume(self) -> None:
        """After a restart of this actor's process: find the running units, and monitor them again."""
        if self._resumed:
            return
        self._resumed = True
        log.warning("Supervisor of service %s restarted", self._plan.name)
        with suppress(RayError):
            added, drained = await self._controller().stored_node_choices.remote()
            self._added = set(added)
            self._drain_states = dict.fromkeys(drained, "drained")
        nodes = {node.ident: node for node in await asyncio.to_thread(living_nodes)}
        for actor in await asyncio.to_thread(unit_actors, self._plan.name, self._plan.namespace):
            with suppress(RayError, KeyError):  # the unit has ended; its node has left
                name, ident = await actor.name_and_node.remote()
                self._monitor(name, nodes[ident], actor)
        self._spawn(self._watch())

    async def units(self) -> list[ServiceUnit]:
        """Return the storage units, sorted by name."""
        units = sorted(self._units.values(), key=lambda unit: unit.name)
        return [
            ServiceUnit(name=unit.name, node=unit.node.ident, host=unit.node.host, state=unit.state) for unit in units
        ]

    async def nodes(self) -> list[ServiceNode]:
        """Return the nodes with storage units and the drained nodes, sorted by address."""
        nodes = {unit.node.ident: unit.node for unit in self._units.values()}
        nodes.update({ident: self._alive[ident] for ident in self._drain_states if ident in self._alive})
        return [
            ServiceNode(
                ident=node.ident,
                host=node.host,
                state=self._drain_states.get(node.ident, "serving"),
                units=tuple(sorted(unit.name for unit in self._units_on(node.ident))),
            )
            for node in sorted(nodes.values(), key=lambda node: (node.host, node.ident))
        ]

    async def add_node(self, ident: str, timeout_s: float) -> list[str]:
        """Start this node's units, for any `storage` of the plan. Return their names once they serve. ValueError
        for an unknown node and one that is being drained or will leave; `ServiceStartError` for a unit that fails or is
        not ready within `timeout_s`."""
        await self._reconcile()  # updates `_alive`
        if ident not in self._alive:
            raise ValueError(f"the Ray cluster has no node {ident!r}; pass the id of a running node")
        if self._drain_states.get(ident) == "draining":
            raise ValueError(f"node {ident!r} is being drained; wait until the drain ends")
        if ident in self._announced:
            raise ValueError(f"node {ident!r} gets no storage units: Ray has announced that it will leave the cluster")
        self._drain_states.pop(ident, None)
        self._added.add(ident)
        await self._store_node_choices()
        await self._reconcile()  # starts the units
        units = self._units_on(ident)
        await asyncio.wait([unit.started for unit in units], timeout=timeout_s)
        for unit in units:
            if not unit.started.done():
                hint = "its start continues, so you can call add_node again to wait"
                raise ServiceStartError(f"{unit} was not ready within {timeout_s:.0f} s; {hint}")
            if unit.started.exception() is not None:
                raise start_error(unit)
        return [unit.name for unit in units]

    async def drain_node(self, ident: str, timeout_s: float, for_good: bool = False) -> None:
        """Move every row from this node's units to other units, then end its units, and start none there until
        `add_node`. Blocks up to about `timeout_s`, including the wait for other units that are starting.

        If rows cannot be moved in time, the units stay in service and the error names the reason. With `for_good`, they
        then accept no new rows. A no-op for a drained node. ValueError for one without units or in another drain.
        """
        if self._drain_states.get(ident) == "drained":
            return
        units = self._units_on(ident)
        if ident in self._drain_states or not units:
            why = "is already being drained" if units else "has no storage unit of this service to drain"
            raise ValueError(f"node {ident!r} {why}")
        self._drain_states[ident] = "draining"
        end = time.monotonic() + timeout_s
        try:
            others = [unit.started for unit in self._units.values() if unit.node.ident != ident]
            if others:
                await asyncio.wait(others, timeout=timeout_s / 2)  # the other half is for the rows
            left_s = max(end - time.monotonic(), 0.0)
            outcomes = await asyncio.gather(
                *(self._drain_unit(unit, left_s, for_good) for unit in units), return_exceptions=True
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            self._drain_states.pop(ident, None)
            raise
        self._drain_states[ident] = "drained"
        self._added.discard(ident)
        await self._store_node_choices()
        log.warning("Node %s drained; its storage units have ended", units[0].node.host)

    async def drop_unit(self, name: str) -> None:
        """Drop a unit that will not return: its rows are lost. ValueError for a running unit."""
        if name in self._units:
            raise ValueError(f"storage unit {name} is running: use drain_node, which moves its rows and ends it")
        self._outdated[name] = NEVER  # all its ids are lower
        await self._forget_outdated()

    async def until_end(self) -> None:
        """Never return. A waiting caller gets an error when this actor has ended."""
        await asyncio.Event().wait()

    async def config(self) -> DataPlaneConfig:
        return self._plan.config

    async def stop(self) -> None:
        """End the background tasks and all units, which frees their memory. No units are started afterwards."""
        self._stopping = True
        for task in self._tasks - {asyncio.current_task()}:  # `_watch` runs this method in a task
            task.cancel()
        units = list(self._units.values())
        self._units = {}
        await asyncio.gather(*(self._stop_unit(unit) for unit in units))

    # --- background work

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run `work` as a background task. Log its exceptions."""

        async def run() -> None:
            try:
                await work
            except Exception:
                log.exception("Supervisor of service %s: a task failed; the supervisor continues", self._plan.name)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _controller(self) -> ActorHandle:
        return ray.get_actor(self._plan.name, namespace=self._plan.namespace)

    async def _store_node_choices(self) -> None:
        """Store the added and the drained nodes at the controller, for a restart of this actor."""
        drained = [ident for ident, state in self._drain_states.items() if state == "drained"]
        with suppress(RayError):
            await self._controller().store_node_choices.remote(sorted(self._added), drained)

    async def _watch(self) -> None:
        """Reconcile every `CHECK_INTERVAL_S`, and end the service when its controller has ended."""
        controller = self._controller()
        while not self._stopping:
            try:
                await self._reconcile()
                await controller.alive.remote()
            except ActorUnavailableError:
                log.info("Controller unavailable; Ray restarts it")
            except RayError:
                log.exception("Controller of service %s ended; the service ends", self._plan.name)
                self._spawn(self.stop())
                return
            except Exception:
                log.exception("Supervisor of service %s failed to check its nodes; it continues", self._plan.name)
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _reconcile(self) -> None:
        """Adapt the units to the plan and the nodes. The lock keeps an older list of nodes from replacing a newer."""
        async with self._reconcile_lock:
            await self._reconcile_locked()

    async def _reconcile_locked(self) -> None:
        """Update the nodes: handle those that left, drain those that will leave, and start missing units."""
        nodes = await asyncio.to_thread(living_nodes)
        self._alive = {node.ident: node for node in nodes}
        for unit in list(self._units.values()):  # a copy: `_handle_loss` removes units
            if unit.node.ident not in self._alive:
                self._handle_loss(unit, "its node left the Ray cluster")
        for ident in self._drain_states.keys() - self._alive.keys():
            del self._drain_states[ident]
        self._announced = await asyncio.to_thread(leaving_nodes)
        for ident, deadline in self._announced.items():
            if ident not in self._drain_states and ident not in self._announced_drains and self._units_on(ident):
                self._announced_drains.add(ident)
                self._spawn(self._drain_leaving_node(ident, deadline))
        if not self._stopping:
            await self._start_missing()
        await self._forget_outdated()

    async def _drain_leaving_node(self, ident: str, deadline: float | None) -> None:
        """Drain a node that will leave according to Ray, before its deadline if there is one."""
        left_s = self._plan.drain_s if deadline is None else max(deadline - time.time(), LEAST_DRAIN_S)
        host = self._alive[ident].host if ident in self._alive else ident
        log.warning("Node %s will leave the Ray cluster; its rows move to other nodes", host)
        try:
            await self.drain_node(ident, left_s, for_good=True)
        except (DataPlaneError, RayError, ValueError) as error:
            log.error("Drain of node %s failed, and the node will leave the Ray cluster with its rows: %s", host, error)
            await asyncio.sleep(DRAIN_RETRY_S)
        finally:
            # After a failure, the next check of the nodes drains it again.
            self._announced_drains.discard(ident)

    async def _start_missing(self) -> None:
        """Start the missing units on the nodes of the plan, the driver's node first."""
        plan = self._plan
        nodes = sorted(
            self._alive.values(),
            key=lambda node: (node.ident != plan.driver, node.host, node.ident),
        )
        for node in nodes:
            leaves = node.ident in self._drain_states or node.ident in self._announced
            gets_units = plan.storage == "per_node" or node.ident == plan.driver or node.ident in self._added
            if gets_units and not leaves:
                for _ in range(plan.config.units - len(self._units_on(node.ident))):
                    await self._start_on(node)

    async def _start_on(self, node: RayNode) -> None:
        """Create the actor of the node's next unit and monitor it. If an actor of its name exists, the
        next `_reconcile` tries again."""
        plan = self._plan
        name, index = next_unit(node.host, self._units)
        placement = NodeAffinitySchedulingStrategy(node_id=node.ident, soft=False)
        actor_class = ray.remote(StorageUnitActor).options(
            name=unit_actor_name(plan.name, name),
            namespace=units_namespace(plan.namespace),
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=placement,
        )
        supervisor = (supervisor_name(plan.name), plan.namespace)
        # The settings of unit `index` on its host. It gets the controller's address as a separate argument.
        settings = replace(plan.config.of_unit(index), address=None)
        try:
            actor = await asyncio.to_thread(actor_class.remote, settings, plan.config.address, name, supervisor)
        except ValueError as error:
            log.warning("Storage unit %s not started: an actor of that name has not ended yet (%s)", name, error)
            return
        self._monitor(name, node, actor)

    def _monitor(self, name: str, node: RayNode, actor: ActorHandle) -> None:
        """Register a unit, and start and monitor it in a background task (`_run_unit`)."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        unit = self._units[name] = Unit(name=name, node=node, actor=actor, started=started)
        unit.monitor_task = self._spawn(self._run_unit(unit))

    async def _run_unit(self, unit: Unit) -> None:
        """Start a unit, complete its `started`, and monitor it until it ends."""
        try:
            await unit.actor.start.remote()
            unit.unit_id = await unit.actor.unit_id.remote()
        except RayError as error:
            unit.started.set_exception(error)
            self._remove_unit(unit)
            log.error("%s", start_error(unit))
            return
        unit.state = "serving"
        unit.started.set_result(None)
        log.info("%s serves", unit)
        # The controller keeps a lost unit with a state directory until the unit of its name serves under a new number.
        if self._plan.config.state_dir is not None:
            self._outdated[unit.name] = unit.unit_id
        why = await self._until_ended(unit)
        if self._units.get(unit.name) is unit:  # else its end was handled or was on purpose
            self._handle_loss(unit, why)

    async def _drain_unit(self, unit: Unit, timeout_s: float, for_good: bool) -> None:
        """Move the rows of a unit to other units, then end it. If that fails, the unit stays; raises the reason.
        for_good: whether it then accepts no new rows, see `StorageUnitActor.drain`."""
        unit.state = "draining"
        try:
            await unit.actor.drain.remote(timeout_s, for_good=for_good)
        except RayTaskError as error:  # the drain failed; if the unit has ended instead, `_run_unit` handles that
            unit.state = "serving"
            raise error.cause from error
        # The unit ends on purpose: its end is not a loss.
        if self._units.pop(unit.name, None) is unit and unit.monitor_task is not None:
            unit.monitor_task.cancel()
        await self._stop_unit(unit, for_good=True)
        self._outdated[unit.name] = unit.unit_id + 1  # the controller drops this unit too

    async def _until_ended(self, unit: Unit) -> str:
        """Poll the unit, and update its `unit_id`, until its actor has ended. Return the first line of Ray's reason."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                unit.unit_id = await unit.actor.unit_id.remote()
            except ActorUnavailableError:
                continue
            except RayError as error:
                return str(error).strip().splitlines()[0]

    def _handle_loss(self, unit: Unit, why: str) -> None:
        """Handle the unexpected end of a unit's process or of its node."""
        self._remove_unit(unit)
        # Its monitor task may be the caller.
        if unit.monitor_task is not asyncio.current_task() and unit.monitor_task is not None:
            unit.monitor_task.cancel()
        if self._plan.config.state_dir is not None:
            log.error("%s was lost (%s): its rows are unreadable until it restarts there", unit, why)
            return
        log.error("%s was lost with its rows (%s)", unit, why)
        self._outdated[unit.name] = unit.unit_id + 1

    def _remove_unit(self, unit: Unit) -> None:
        """Remove a unit and kill its actor."""
        del self._units[unit.name]
        with suppress(Exception):
            ray.kill(unit.actor)

    async def _stop_unit(self, unit: Unit, *, for_good: bool = False) -> None:
        """Stop the unit, with a timeout, then kill its actor in any case. for_good: see `StorageUnit.stop`."""
        with suppress(RayError, asyncio.TimeoutError):
            await asyncio.wait_for(unit.actor.stop.remote(for_good=for_good), STOP_TIMEOUT_S)
        with suppress(Exception):
            ray.kill(unit.actor)

    def _units_on(self, ident: str) -> list[Unit]:
        return [unit for unit in self._units.values() if unit.node.ident == ident]

    # --- units to drop at the controller

    async def _forget_outdated(self) -> None:
        """Make the controller drop the `_outdated` storage units. After a failure they stay there for the next call."""
        if not self._outdated:
            return
        outdated = dict(self._outdated)
        try:
            await asyncio.to_thread(forget_units, self._plan.config, outdated, supervisor_name(self._plan.name))
        except DataPlaneError as error:
            log.warning("Service %s: reporting lost units to the controller failed: %s", self._plan.name, error)
            return
        # The entry may have changed during the request.
        for name, unit_id in outdated.items():
            if self._outdated.get(name) == unit_id:
                del self._outdated[name]


def _call_resume() -> None:
    """Call `resume` of this process's actor as soon as it accepts calls."""
    actor = ray.get_runtime_context().current_actor
    while True:
        try:
            ray.get(actor.resume.remote())
            return
        except ActorUnavailableError:
            time.sleep(RETRY_S)


def next_unit(host: str, taken: Collection[str]) -> tuple[str, int]:
    """Return the name of the next unit on a host, and its index there: the first free name of
    "unit-HOST-0", "unit-HOST-1", ...

    So a node that rejoins with another id has units of the same names, which find their state.
    """
    index = 0
    while f"unit-{host}-{index}" in taken:
        index += 1
    return f"unit-{host}-{index}", index


def start_error(unit: Unit) -> ServiceStartError:
    """Return the error for a unit whose `started` has failed."""
    error = unit.started.exception()
    cause = getattr(error, "cause", None) or error
    return ServiceStartError(f"{unit} did not start: {type(cause).__name__}: {cause}")


def supervisor_name(service: str) -> str:
    return f"{service}.supervisor"


def unit_actor_name(service: str, unit: str) -> str:
    return f"{service}.{unit}"


def units_namespace(service_namespace: str) -> str:
    """Return the namespace of the actors of storage units. It differs from the service's namespace, because Ray warns
    about detached actors in an anonymous namespace."""
    return f"{service_namespace}.units"


# --- requests to Ray and to the controller


def living_nodes() -> list[RayNode]:
    """Return the nodes of the Ray cluster that are alive."""
    return [RayNode(ident=entry["NodeID"], host=entry["NodeManagerAddress"]) for entry in ray.nodes() if entry["Alive"]]


def leaving_nodes() -> dict[str, float | None]:
    """Return the ids of the nodes that will leave the cluster according to Ray (a spot instance's notice, an
    autoscaler, `ray drain-node`), each with the time by which it leaves, in seconds since 1970 (None: unknown). Empty
    if this private Ray function is missing."""
    try:
        deadlines = ray._private.state.state.get_draining_nodes()
    except AttributeError:
        return {}
    return {ident: deadline_ms / 1000 if deadline_ms else None for ident, deadline_ms in deadlines.items()}


def forget_units(config: DataPlaneConfig, outdated: Mapping[str, int], client_name: str) -> None:
    """Make the controller drop every unit, with its rows, whose id is below that of its name in `outdated`.
    Blocks; raises the errors of a client. client_name: of this request's client."""
    channel = ControllerChannel.open(replace(config, client_name=client_name))
    try:
        _, report = channel.call(c.Stats())
        assert isinstance(report, c.StatsReport)
        for unit in report.units:
            if unit.unit >= outdated.get(unit.name, 0):  # up to date, or its name is not in `outdated`
                continue
            with suppress(InvalidRequestError):  # another client dropped it first
                channel.call(c.Forget(unit=unit.unit, force=True))
                log.warning(
                    "Storage unit %d (%s) dropped, with %d bytes of rows", unit.unit, unit.name, unit.live_bytes
                )
    finally:
        channel.close()


def living_actor(name: str, namespace: str) -> ActorHandle | None:
    """Return the actor of that name if it is running or restarting, otherwise None."""
    try:
        actor: ActorHandle = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return actor


def unit_actors(service: str, namespace: str) -> list[ActorHandle]:
    """Return the running or restarting storage unit actors of the service in `namespace`."""
    actor_namespace = units_namespace(namespace)
    prefix = unit_actor_name(service, "unit-")
    actors = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == actor_namespace and entry["name"].startswith(prefix):
            with suppress(ValueError):  # the actor ended after the listing
                actors.append(ray.get_actor(entry["name"], namespace=actor_namespace))
    return actors
