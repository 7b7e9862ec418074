"""The actor that gives a service its storage units, on the nodes that there are and on those that join later."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.config import DataPlaneConfig
from dataplane.errors import DataPlaneError
from workers.service.actors import ASK_AGAIN_S, StorageUnitActor, started_again
from workers.service.nodes import RayNode, missing, next_unit, taker
from workers.service.plan import (
    STOP_TIMEOUT_S,
    ServiceNode,
    ServicePlan,
    ServiceStartError,
    ServiceUnit,
    State,
    supervisor_name,
    unit_actor_name,
    units_namespace,
)
from workers.service.queries import forget_units, leaving_nodes, living_nodes, unit_actors

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""Ray tells nobody when nodes come and go: it is asked so often, and so are the parts of the service."""
LEAST_DRAIN_S = 5.0
LEAVE_AGAIN_S = 10.0
"""Draining a node that leaves is tried again after so long, once it failed."""
NEVER = 1 << 62
"""Above every unit's number."""
LONGEST_REST_S = 60.0
"""A node where storage units do not start, or end at once, is tried again after ever longer rests, up to this."""
STEADY_S = 60.0
"""A storage unit that lived so long was no failure of its node."""
NODES_NAMED = 5
"""Of the nodes of a cluster, in an error."""
SUPERVISOR_CALLS = 100_000
"""Every storage unit has one call waiting at its supervisor."""


@dataclass(eq=False, kw_only=True)
class _Unit:
    """begun: done when it serves, or could not start. number: what the controller calls it. until it serves: 0."""

    name: str
    node: RayNode
    actor: ActorHandle
    begun: asyncio.Future[None]
    state: State = "starting"
    number: int = 0
    since: float = 0.0
    minding: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"storage unit {self.name} on node {self.node.host}"


@dataclass(kw_only=True)
class _Rest:
    """How often units of a node failed one after another, and when to try again."""

    failures: int = 0
    until: float = 0.0


class SupervisorActor:
    """Starts, watches and ends the storage units of a service. Its calls run side by side, in one event loop.

    Units are actors that outlive this one's process, so that nothing is lost when it dies: Ray starts it again, and it
    finds them by their names.
    """

    def __init__(self, plan: ServicePlan) -> None:
        self._plan = plan
        self._takes = taker(plan.nodes)
        self._alive: dict[str, RayNode] = {}
        self._units: dict[str, _Unit] = {}
        self._leaving: dict[str, Literal["draining", "drained"]] = {}
        self._leaves: set[str] = set()
        self._rays: dict[str, float | None] = {}
        self._asked: set[str] = set()
        self._rests: dict[str, _Rest] = {}
        self._outdated: dict[str, int] = {}
        self._looking = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._going_on = False
        if started_again():
            threading.Thread(target=_go_on, name="tq-go-on", daemon=True).start()

    # --- what it is told

    async def start(self, timeout_s: float) -> None:
        """Start units on the nodes that there are, and go on with those that join. Returns when all serve;
        `ServiceStartError` naming those that could not start, or did not within `timeout_s`."""
        await self._look()
        units = list(self._units.values())
        if not units:
            self._check_nodes()
        else:
            await asyncio.wait([unit.begun for unit in units], timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = [unit for unit in units if unit.begun.done() and unit.begun.exception() is not None]
        if failed:
            raise _start_error(failed[0])
        late = sorted(str(unit) for unit in units if not unit.begun.done())
        if late:
            raise ServiceStartError(f"not ready within {timeout_s:.0f} s: {', '.join(late)}")
        self._spawn(self._watch())

    def _check_nodes(self) -> None:
        """`ServiceStartError` where no node is to have storage units."""
        plan = self._plan
        nodes = sorted(self._alive.values(), key=lambda node: (node.host, node.ident))
        if plan.storage == "driver_node":
            nodes = [node for node in nodes if node.ident == plan.driver]
        if not any(self._takes(node) for node in nodes):
            raise ServiceStartError(
                f"no storage unit can start: nodes={plan.nodes!r} with storage={plan.storage!r} takes none of "
                f"{'; '.join(map(str, nodes[:NODES_NAMED])) or 'no node'}"
            )

    async def go_on(self) -> None:
        """After this actor's process died: find the units that live, and watch again."""
        if self._going_on:
            return
        self._going_on = True
        log.warning("the supervisor of service %s was started again", self._plan.name)
        with suppress(RayError):
            asked, drained = await self._controller().remembered.remote()
            self._asked = set(asked)
            self._leaving = dict.fromkeys(drained, "drained")
        nodes = {node.ident: node for node in await asyncio.to_thread(living_nodes)}
        for actor in await asyncio.to_thread(unit_actors, self._plan.name, self._plan.namespace):
            with suppress(RayError, KeyError):
                name, ident = await actor.where.remote()
                self._mind(name, nodes[ident], actor)
        self._spawn(self._watch())

    async def units(self) -> list[ServiceUnit]:
        """By name."""
        found = sorted(self._units.values(), key=lambda unit: unit.name)
        return [
            ServiceUnit(name=unit.name, node=unit.node.ident, host=unit.node.host, state=unit.state) for unit in found
        ]

    async def nodes(self) -> list[ServiceNode]:
        """Those that have units or were drained, by address."""
        nodes = {unit.node.ident: unit.node for unit in self._units.values()}
        nodes.update({ident: self._alive[ident] for ident in self._leaving if ident in self._alive})
        return [
            ServiceNode(
                ident=node.ident,
                host=node.host,
                state=self._leaving.get(node.ident, "serving"),
                units=tuple(sorted(unit.name for unit in self._on(node.ident))),
            )
            for node in sorted(nodes.values(), key=lambda node: (node.host, node.ident))
        ]

    async def add_node(self, ident: str, timeout_s: float) -> list[str]:
        """Give this node its units, whatever the service takes by itself; their names once they serve."""
        await self._look()
        if ident not in self._alive:
            raise ValueError(f"no node {ident!r} is in the Ray cluster")
        if self._leaving.get(ident) == "draining":
            raise ValueError(f"node {ident!r} is being drained")
        self._leaving.pop(ident, None)
        self._rests.pop(ident, None)
        self._asked.add(ident)
        await self._remember()
        await self._look()
        units = self._on(ident)
        await asyncio.wait([unit.begun for unit in units], timeout=timeout_s)
        for unit in units:
            if not unit.begun.done():
                raise ServiceStartError(f"not ready within {timeout_s:.0f} s: {unit}; it goes on starting")
            if unit.begun.exception() is not None:
                raise _start_error(unit)
        return [unit.name for unit in units]

    async def drain_node(self, ident: str, timeout_s: float, for_good: bool = False) -> None:
        """Move every row from this node's units to others, then end them, and start none there until `add_node`. Within
        about `timeout_s`, in which others that start are waited for, too.

        Where rows cannot be moved in time, all is as before, but that units that are to leave `for_good` take no new
        rows; the error says why. ValueError for a node without units.
        """
        if self._leaving.get(ident) == "drained":
            return
        units = self._on(ident)
        if ident in self._leaving or not units:
            raise ValueError(f"node {ident!r} {'is being drained' if units else 'has no storage unit of this service'}")
        self._leaving[ident] = "draining"
        end = time.monotonic() + timeout_s
        try:
            await self._start_missing()
            others = [unit.begun for unit in self._units.values() if unit.node.ident != ident]
            if others:
                await asyncio.wait(others, timeout=timeout_s / 2)
            left_s = max(end - time.monotonic(), 0.0)
            outcomes = await asyncio.gather(
                *(self._drain(unit, left_s, for_good) for unit in units), return_exceptions=True
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            self._leaving.pop(ident, None)
            raise
        self._leaving[ident] = "drained"
        self._asked.discard(ident)
        await self._remember()
        log.warning("node %s is drained: it has no storage unit any more", units[0].node.host)

    async def drop_unit(self, name: str) -> None:
        """Give up a unit that will not come back: its rows are lost. ValueError for one that lives."""
        if name in self._units:
            raise ValueError(f"storage unit {name} lives: drain_node moves its rows elsewhere and ends it")
        self._outdated[name] = NEVER
        await self._forget_outdated()

    async def until_end(self) -> None:
        """Returns never: who waits learns that this actor has ended."""
        await asyncio.Event().wait()

    async def config(self) -> DataPlaneConfig:
        return self._plan.config

    async def stop(self) -> None:
        """End all units, which gives their memory back. Nobody starts any from now on."""
        self._stopping = True
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        units, self._units = list(self._units.values()), {}
        await asyncio.gather(*(self._end(unit) for unit in units))

    # --- what it does by itself

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run beside all else; a fault is logged."""

        async def run() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("the supervisor of service %s failed, and goes on", self._plan.name)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _controller(self) -> ActorHandle:
        return ray.get_actor(self._plan.name, namespace=self._plan.namespace)

    async def _remember(self) -> None:
        """What this actor was told outlives its process."""
        drained = [ident for ident, state in self._leaving.items() if state == "drained"]
        with suppress(RayError):
            await self._controller().remember.remote(sorted(self._asked), drained)

    async def _watch(self) -> None:
        controller = self._controller()
        while not self._stopping:
            try:
                await self._look()
                await controller.alive.remote()
            except ActorUnavailableError:
                log.info("the controller is not there; Ray starts it again")
            except RayError:
                log.exception("the controller of service %s is gone for good: the service ends", self._plan.name)
                self._spawn(self.stop())
                return
            except Exception:
                log.exception("the supervisor of service %s could not look after it, and goes on", self._plan.name)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        """Compare what there is with what there should be. One at a time: what an earlier one asked is older."""
        async with self._looking:
            await self._look_around()

    async def _look_around(self) -> None:
        nodes = await asyncio.to_thread(living_nodes)
        self._alive = {node.ident: node for node in nodes}
        for unit in list(self._units.values()):
            if unit.node.ident not in self._alive:
                self._lost(unit, "its node left the Ray cluster")
        for ident in self._leaving.keys() - self._alive.keys():
            del self._leaving[ident]
        self._rays = await asyncio.to_thread(leaving_nodes)
        for ident, deadline in self._rays.items():
            if ident not in self._leaving and ident not in self._leaves and self._on(ident):
                self._leaves.add(ident)
                self._spawn(self._leave(ident, deadline))
        if not self._stopping:
            await self._start_missing()
        await self._forget_outdated()

    async def _leave(self, ident: str, deadline: float | None) -> None:
        """Ray says that the node will leave."""
        left_s = self._plan.drain_s if deadline is None else max(deadline - time.time(), LEAST_DRAIN_S)
        host = self._alive[ident].host if ident in self._alive else ident
        log.warning("node %s will leave the Ray cluster: its rows move to other nodes", host)
        try:
            await self.drain_node(ident, left_s, for_good=True)
        except (DataPlaneError, RayError, ValueError) as error:
            log.error("node %s will leave the Ray cluster, and its rows with it: %s", host, error)
            await asyncio.sleep(LEAVE_AGAIN_S)
        finally:
            self._leaves.discard(ident)

    async def _start_missing(self) -> None:
        async with self._starting:
            for node in self._lacking():
                await self._start_on(node)

    def _lacking(self) -> list[RayNode]:
        """The nodes to start units on, one as often as it lacks some."""
        plan, now = self._plan, time.monotonic()
        able = [
            node
            for node in sorted(
                self._alive.values(), key=lambda node: (node.ident != plan.driver, node.host, node.ident)
            )
            if node.ident not in self._leaving
            and node.ident not in self._rays
            and (node.ident in self._asked or self._takes(node))
        ]
        running = {node.ident: len(self._on(node.ident)) for node in able}
        lacking = missing(
            plan.storage,
            [node.ident for node in able],
            running,
            each=plan.config.units,
            driver=plan.driver,
            asked=self._asked,
        )
        return [
            self._alive[ident]
            for ident, count in lacking.items()
            if self._rests.get(ident, _Rest()).until <= now
            for _ in range(count)
        ]

    async def _start_on(self, node: RayNode) -> None:
        plan = self._plan
        name, number = next_unit(node.host, self._units)
        place = NodeAffinitySchedulingStrategy(node_id=node.ident, soft=False)
        maker = ray.remote(StorageUnitActor).options(
            name=unit_actor_name(plan.name, name),
            namespace=units_namespace(plan.namespace),
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=place,
        )
        supervisor = (supervisor_name(plan.name), plan.namespace)
        settings = replace(plan.config.of_unit(number), address=None)
        try:
            actor = await asyncio.to_thread(maker.remote, settings, plan.config.address, name, supervisor)
        except ValueError as error:
            log.warning("%s: an actor of that name has not ended yet (%s)", name, error)
            self._rest(node.ident)
            return
        self._mind(name, node, actor)

    def _mind(self, name: str, node: RayNode, actor: ActorHandle) -> None:
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        unit = self._units[name] = _Unit(name=name, node=node, actor=actor, begun=begun)
        unit.minding = self._spawn(self._live(unit))

    async def _live(self, unit: _Unit) -> None:
        """A unit from its start to its end."""
        try:
            await unit.actor.start.remote()
            unit.number = await unit.actor.number.remote()
        except RayError as error:
            unit.begun.set_exception(error)
            self._drop(unit)
            log.error("%s", _start_error(unit))
            return
        unit.state, unit.since = "serving", time.monotonic()
        unit.begun.set_result(None)
        log.info("%s serves", unit)
        if self._plan.config.state_dir is not None:
            self._outdated[unit.name] = unit.number
        why = await self._until_dead(unit)
        if self._units.get(unit.name) is unit:
            self._lost(unit, why)

    async def _drain(self, unit: _Unit, timeout_s: float, for_good: bool) -> None:
        unit.state = "draining"
        try:
            await unit.actor.drain.remote(timeout_s, for_good=for_good)
        except RayTaskError as error:
            unit.state = "serving"
            raise error.cause from error
        if self._units.pop(unit.name, None) is unit and unit.minding is not None:
            unit.minding.cancel()
        await self._end(unit, for_good=True)
        self._outdated[unit.name] = unit.number + 1

    async def _until_dead(self, unit: _Unit) -> str:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                unit.number = await unit.actor.number.remote()
            except ActorUnavailableError:
                continue
            except RayError as error:
                return str(error).strip().splitlines()[0]

    def _lost(self, unit: _Unit, why: str) -> None:
        """The unit's process has ended by itself, or its node has."""
        self._drop(unit)
        if unit.minding is not asyncio.current_task() and unit.minding is not None:
            unit.minding.cancel()
        if self._plan.config.state_dir is not None:
            log.error("%s is gone (%s): its rows cannot be read until it is back there", unit, why)
            return
        log.error("%s is gone (%s), and its rows with it", unit, why)
        self._outdated[unit.name] = unit.number + 1

    def _drop(self, unit: _Unit) -> None:
        """Have it no longer, and let its node rest if this goes on and on."""
        del self._units[unit.name]
        if unit.since and time.monotonic() - unit.since > STEADY_S:
            self._rests.pop(unit.node.ident, None)
        self._rest(unit.node.ident)
        with suppress(Exception):
            ray.kill(unit.actor)

    def _rest(self, ident: str) -> None:
        rest = self._rests.setdefault(ident, _Rest())
        rest.failures += 1
        rest.until = time.monotonic() + min(2.0 ** (rest.failures - 2), LONGEST_REST_S)

    async def _end(self, unit: _Unit, *, for_good: bool = False) -> None:
        """Stop the unit, giving it a moment, then kill it, whatever it did."""
        with suppress(RayError, asyncio.TimeoutError):
            await asyncio.wait_for(unit.actor.stop.remote(for_good=for_good), STOP_TIMEOUT_S)
        with suppress(Exception):
            ray.kill(unit.actor)

    def _on(self, ident: str) -> list[_Unit]:
        return [unit for unit in self._units.values() if unit.node.ident == ident]

    # --- what the controller is to forget

    async def _forget_outdated(self) -> None:
        """Have the controller forget storage units whose memory is gone. What it cannot take now, it is told again."""
        if not self._outdated:
            return
        outdated = dict(self._outdated)
        try:
            await asyncio.to_thread(forget_units, self._plan.config, outdated, supervisor_name(self._plan.name))
        except DataPlaneError as error:
            log.warning("service %s: the controller cannot be told what is lost: %s", self._plan.name, error)
            return
        for name, before in outdated.items():
            if self._outdated.get(name) == before:
                del self._outdated[name]


def _go_on() -> None:
    """Tell this process's actor to, as soon as it takes calls."""
    this = ray.get_runtime_context().current_actor
    while True:
        try:
            ray.get(this.go_on.remote())
            return
        except ActorUnavailableError:
            time.sleep(ASK_AGAIN_S)


def _start_error(unit: _Unit) -> ServiceStartError:
    error = unit.begun.exception()
    cause = getattr(error, "cause", None) or error
    return ServiceStartError(f"{unit} did not start: {type(cause).__name__}: {cause}")
