"""Processes of a Ray cluster find the service that one of them started, with one import line each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import ray

import dataplane.compat.transfer_queue as tq
from dataplane import serve
from dataplane.config import DataPlaneConfig
from tests.children import Child
from tests.ray.jobs import ROOT
from tests.ray.plain_job import job
from workers.service.discovery import NAME, NAMESPACE, RayRendezvous, actor_name

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SMALL = {"capacity_bytes": 32 << 20}
PROCESS_S = 400.0
"""How long a call may take that starts a process of Ray: one took more than two minutes on a busy machine."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    conf = tq.init({"controller": {"polling_mode": True}, "metrics": {"enabled": True}, "dataplane": SMALL})
    yield conf
    tq.close()


@pytest.mark.slow
@pytest.mark.timeout(900)  # two processes of Ray start, one after the other
def test_workers_find_the_drivers_service(service: Any) -> None:
    assert service.controller.zmq_info.address.startswith("actor:")
    remote = ray.remote(num_cpus=0, max_calls=1)(job)
    assert ray.get(remote.remote("a"), timeout=PROCESS_S) == {"a": {"from": "a"}}
    assert set(ray.get(remote.remote("b"), timeout=PROCESS_S)) == {"a", "b"}
    assert tq.get_metrics_endpoint() is not None
    assert tq.kv_batch_get(["a", "b"], "p")["v"].values().tolist() == [1, 2, 3, 1, 2, 3]


def test_only_one_of_them_starts_it(service: Any) -> None:
    place = RayRendezvous()
    met = place.meet(service.controller.zmq_info, lambda config, http: None)
    assert met is not None
    assert not met.started
    met.close()
    found = place.find()
    assert found is not None
    assert found.address == met.config.address == service.controller.zmq_info.address


@pytest.mark.slow
def test_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init({"dataplane": SMALL})
    tq.close()
    assert RayRendezvous().find() is None
    with pytest.raises(ValueError, match=NAME):
        ray.get_actor(actor_name(None), namespace=NAMESPACE)


@pytest.mark.slow
def test_a_service_that_cannot_be_prepared_is_ended_and_not_found() -> None:
    def fail(config: object, http: str) -> None:
        raise RuntimeError("not prepared")

    place = RayRendezvous()
    with pytest.raises(RuntimeError, match="not prepared"):
        place.meet(DataPlaneConfig.of(SMALL), fail)
    assert place.find() is None


@pytest.mark.slow
def test_a_service_that_is_given_by_its_address_is_found_by_the_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that calls `init()` without an address would start an empty one of its own else."""
    for variable in ("TQ_ADDRESS", "TQ_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    with serve({**SMALL, "token": "secret"}) as server:
        where = {"address": server.address, "token": "secret"}
        tq.init({"controller": {"polling_mode": True}, "dataplane": where})
        found = RayRendezvous().find()
        assert found is not None
        assert (found.address, found.token) == (server.address, "secret")
        remote = ray.remote(num_cpus=0, max_calls=1)(job)
        assert ray.get(remote.remote("a"), timeout=PROCESS_S) == {"a": {"from": "a"}}
        assert set(tq.kv_list("p")["p"]) == {"a"}
        tq.close()
        assert RayRendezvous().find() is None


Driver = Callable[..., Any]


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    """Two drivers with a Ray job each; they do what they are told, see tests/ray/job_of_its_own.py."""
    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if name != "TQ_ADDRESS"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.ray.job_of_its_own", address]
    with ExitStack() as stack:
        yield [_told(stack.enter_context(Child(command, env=environment)), stack) for _ in range(2)]


def _told(child: Child, stack: ExitStack) -> Driver:
    assert child.stdin is not None
    stack.callback(child.stdin.close)  # it ends then

    def tell(action: str, argument: str | None = None) -> Any:
        assert child.stdin is not None
        print(json.dumps([action, argument]), file=child.stdin, flush=True)
        return json.loads(child.line())

    return tell


@pytest.mark.soak
@pytest.mark.slow
def test_two_jobs_of_a_cluster_have_a_service_each(drivers: list[Driver]) -> None:
    one, two = drivers
    assert one("init") != two("init")
    assert one("put", "a") == ["a"]
    assert two("put", "b") == ["b"]
    assert one("put_by_worker", "c") == ["a", "c"]
    assert one("close") is False
    assert two("put_by_worker", "d") == ["b", "d"]
    two("close")


@pytest.mark.soak
@pytest.mark.slow
def test_jobs_share_a_service_under_a_name_and_so_do_their_workers(drivers: list[Driver]) -> None:
    one, two = drivers
    assert one("init", "shared") == two("init", "shared")
    assert one("put", "a") == ["a"]
    assert two("put_by_worker", "b") == ["a", "b"]
    assert two("close") is False
    assert one("put_by_worker", "c") == ["a", "b", "c"]
    assert one("close") is False
    assert two("init", "shared") is not None
    assert two("put", "d") == ["d"]
    two("close")
