"""What the supervisor of a service does when several things happen to a node at once. Without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from dataplane.config import DataPlaneConfig
from workers.service import service as service_module
from workers.service import supervisor as module
from workers.service.service import ANSWER_S, LaunchedService
from workers.service.supervisor import (
    RayNode,
    ServicePlan,
    ServiceStartError,
    Storage,
    SupervisorActor,
    Unit,
    next_unit,
)

HERE, THERE = RayNode(ident="here", host="10.0.0.1"), RayNode(ident="there", host="10.0.0.2")
WAIT_S = 60.0


async def nothing(*_: Any, **__: Any) -> None:
    """What an actor does that does nothing."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RayNode]:
    """The nodes that Ray tells of."""
    nodes = [HERE, THERE]
    monkeypatch.setattr(module, "was_restarted", lambda: False)
    monkeypatch.setattr(module, "living_nodes", lambda: list(nodes))
    monkeypatch.setattr(module, "leaving_nodes", dict)
    monkeypatch.setattr(module, "forget_units", lambda *_: None)
    monkeypatch.setattr(module.ray, "kill", lambda _: None)
    monkeypatch.setattr(SupervisorActor, "_start_on", nothing)
    return nodes


def supervisor(storage: Storage = "per_node", units: int = 1) -> SupervisorActor:
    config = DataPlaneConfig(address="actor:s@n", token="t", units=units)
    plan = ServicePlan(name="s", namespace="n", config=config, storage=storage, driver="here")
    return SupervisorActor(plan)


def unit_on(made: SupervisorActor, node: RayNode, drain: Callable[..., Awaitable[None]], *, serves: bool) -> Unit:
    started = asyncio.get_running_loop().create_future()
    if serves:
        started.set_result(None)
    actor: Any = SimpleNamespace(drain=SimpleNamespace(remote=drain))
    unit = Unit(name=f"unit-{node.host}-0", node=node, actor=actor, started=started)
    made._units[unit.name] = unit
    return unit


def test_a_node_that_dies_while_it_is_drained_is_told_of_as_that(told: list[RayNode]) -> None:
    async def scene() -> None:
        made = supervisor()

        async def die(*_: Any, **__: Any) -> None:
            told.remove(THERE)
            await made._reconcile()
            raise RayActorError

        unit_on(made, HERE, nothing, serves=True)
        unit_on(made, THERE, die, serves=True)
        await made._reconcile()
        with pytest.raises(RayActorError):
            await made.drain_node("there", 5.0)
        assert [unit.host for unit in await made.units()] == ["10.0.0.1"]
        assert made._drain_states == {}

    asyncio.run(scene())


def test_a_node_that_leaves_may_be_gone_before_its_drain_fails(
    told: list[RayNode], caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        made = supervisor()
        made._alive = {"there": THERE}

        async def fails(*_: Any, **__: Any) -> None:
            del made._alive["there"]
            raise RayActorError

        unit_on(made, THERE, fails, serves=True)
        made._announced_drains.add("there")
        leaving = asyncio.ensure_future(made._drain_leaving_node("there", None))
        await asyncio.wait([leaving], timeout=0.2)
        assert not leaving.done(), "it is tried again after a while"
        leaving.cancel()

    with caplog.at_level("ERROR"):
        asyncio.run(scene())
    assert "Drain of node 10.0.0.2 failed, and the node will leave the Ray cluster with its rows" in caplog.text


def test_units_that_start_are_waited_for_within_the_time_there_is(told: list[RayNode]) -> None:
    async def scene() -> None:
        made, left = supervisor(), []

        async def drain(timeout_s: float, **_: Any) -> None:
            left.append(timeout_s)
            raise RayActorError

        unit_on(made, HERE, nothing, serves=False)
        unit_on(made, THERE, drain, serves=True)
        with pytest.raises(RayActorError):
            await made.drain_node("there", 0.2)
        assert left[0] <= 0.1

    asyncio.run(scene())


def test_what_was_asked_earlier_does_not_overrule_what_was_asked_later(
    told: list[RayNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look asks before a node is there, and is answered after the second."""
    asked, answer, answers = threading.Event(), threading.Event(), [[HERE], [HERE, THERE]]

    def slow() -> list[RayNode]:
        found = answers.pop(0)
        if not asked.is_set():
            asked.set()
            assert answer.wait(WAIT_S)
        return found

    async def scene() -> None:
        made = supervisor()
        monkeypatch.setattr(module, "living_nodes", slow)
        unit_on(made, HERE, nothing, serves=True)
        unit_on(made, THERE, nothing, serves=True)
        first = asyncio.ensure_future(made._reconcile())
        assert await asyncio.to_thread(asked.wait, WAIT_S)
        second = asyncio.ensure_future(made._reconcile())
        await asyncio.wait([second], timeout=0.2)
        answer.set()
        await asyncio.gather(first, second)
        assert set(made._alive) == {"here", "there"}

    asyncio.run(scene())


def test_units_end_when_the_controller_is_gone_for_good(told: list[RayNode], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        made = supervisor()
        stopped = asyncio.Event()

        async def stop(**_: Any) -> None:
            await asyncio.sleep(0)
            stopped.set()

        async def die() -> None:
            raise RayActorError

        actor: Any = SimpleNamespace(alive=SimpleNamespace(remote=die))
        monkeypatch.setattr(made, "_controller", lambda: actor)
        unit_on(made, HERE, nothing, serves=True).actor.stop = SimpleNamespace(remote=stop)
        await made._watch()
        await asyncio.wait_for(stopped.wait(), WAIT_S)
        assert await made.units() == []

    asyncio.run(scene())


def test_a_node_that_will_leave_gets_no_units(told: list[RayNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "leaving_nodes", lambda: {"there": None})

    async def scene() -> None:
        made = supervisor()
        with pytest.raises(ValueError, match="'there' gets no storage units: Ray has announced that it will leave"):
            await made.add_node("there", 5.0)
        assert not made._added

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("storage", "units", "running", "added", "expected"),
    [
        ("per_node", 1, [], [], ["here", "there"]),
        ("per_node", 2, [HERE], [], ["here", "there", "there"]),
        ("driver_node", 2, [], [], ["here", "here"]),
        ("driver_node", 1, [HERE], [], []),
        ("driver_node", 1, [HERE], ["there"], ["there"]),
    ],
)
def test_what_is_missing(
    told: list[RayNode],
    monkeypatch: pytest.MonkeyPatch,
    storage: Storage,
    units: int,
    running: list[RayNode],
    added: list[str],
    expected: list[str],
) -> None:
    started: list[str] = []

    async def start_on(_: SupervisorActor, node: RayNode) -> None:
        started.append(node.ident)

    monkeypatch.setattr(SupervisorActor, "_start_on", start_on)

    async def scene() -> None:
        made = supervisor(storage, units)
        made._added.update(added)
        for node in running:
            unit_on(made, node, nothing, serves=True)
        await made._reconcile()

    asyncio.run(scene())
    assert started == expected


def test_names_are_of_the_host_and_used_again() -> None:
    names: list[str] = []
    for _ in range(3):
        names.append(next_unit("10.0.0.1", names)[0])
    assert names == ["unit-10.0.0.1-0", "unit-10.0.0.1-1", "unit-10.0.0.1-2"]
    assert next_unit("10.0.0.1", [names[0], names[2]]) == (names[1], 1)
    assert next_unit("10.0.0.10", names) == ("unit-10.0.0.10-0", 0)


# --- The handle of a launched service, whose actors are objects of this process.


CONFIG = DataPlaneConfig(address="actor:tq@here", token="secret")


class FakeActor:
    """Every method exists: it notes its call and returns what `results` has for it, or raises it."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], **results: Any) -> None:
        self._name, self._calls, self._results = name, calls, results

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Callable[[], Any]:
            def result() -> Any:
                self._calls.append((f"{self._name}.{method}", *arguments))
                outcome = self._results.get(method)
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome

            return result

        return type("Method", (), {"remote": staticmethod(remote)})


class FakeRay:
    """The functions of ray that the handle uses. `timeouts` has those of `get`."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.timeouts: list[float | None] = []
        self._calls = calls

    def is_initialized(self) -> bool:
        return True

    def get(self, result: Callable[[], Any], timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        return result()

    def kill(self, actor: FakeActor) -> None:
        self._calls.append((f"{actor._name} is killed",))


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]) -> FakeRay:
    made = FakeRay(calls)
    monkeypatch.setattr(service_module, "ray", made)
    monkeypatch.setattr(service_module, "unit_actors", lambda name, namespace: [FakeActor("unit", calls)])
    return made


def service(calls: list[tuple[Any, ...]], **results: Any) -> LaunchedService:
    return LaunchedService(
        CONFIG, "tq", "here", FakeActor("supervisor", calls, **results), FakeActor("controller", calls)
    )


def test_the_supervisor_has_the_time_that_the_call_has(calls: list[tuple[Any, ...]], fake_ray: FakeRay) -> None:
    handle = service(calls, units=["u"], nodes=["n"], add_node=["u-2"])
    assert (handle.units(), handle.nodes(), handle.add_node("n", timeout_s=5)) == (["u"], ["n"], ["u-2"])
    handle.drain_node("n", timeout_s=7)
    handle.drop_unit("u")
    assert fake_ray.timeouts == [ANSWER_S, ANSWER_S, ANSWER_S + 5, ANSWER_S + 7, ANSWER_S]
    assert calls[2:] == [
        ("supervisor.add_node", "n", 5.0),
        ("supervisor.drain_node", "n", 7.0),
        ("supervisor.drop_unit", "u"),
    ]
    with pytest.raises(ValueError, match="timeout_s"):
        handle.drain_node("n", timeout_s=-1)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (RayTaskError("drop_unit", "trace", ValueError("unit u is running")), ValueError),
        (RayTaskError("add_node", "trace", ServiceStartError("no unit")), ServiceStartError),
        (RayTaskError("units", "trace", GetTimeoutError("slow")), RayTaskError),
        (RayActorError(), RayActorError),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_supervisors_errors_are_raised_as_they_are(
    calls: list[tuple[Any, ...]], fake_ray: FakeRay, raised: Exception, seen: type[Exception]
) -> None:
    with pytest.raises(seen) as caught:
        service(calls, units=raised).units()
    assert type(caught.value) is seen


def test_shutdown_ends_every_actor_once_though_none_answers(
    calls: list[tuple[Any, ...]], fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "living_actor", lambda name, namespace: None)
    with service(calls, stop=RayActorError()) as handle:
        pass
    handle.shutdown()
    assert calls == [
        ("supervisor.stop",),
        ("supervisor is killed",),
        ("unit is killed",),
        ("controller.stop",),
        ("controller is killed",),
    ]


def test_shutdown_leaves_a_later_service_with_the_name_alone(
    calls: list[tuple[Any, ...]], fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "living_actor", lambda name, namespace: FakeActor("later controller", calls))
    service(calls).shutdown()
    assert calls == []
