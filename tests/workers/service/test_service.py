"""The handle of a launched service, whose actors are objects of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from dataplane.config import DataPlaneConfig
from workers.service import service as service_module
from workers.service.service import ANSWER_S, LaunchedService
from workers.service.supervisor import ServiceStartError

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
