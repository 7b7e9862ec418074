"""Processes of a Ray cluster find the service that one of them started, with one import line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

import dataplane.compat.transfer_queue as tq
from dataplane.compat import rendezvous
from tests.ray.plain_job import job
from workers.rendezvous import NAME, NAMESPACE, RayRendezvous

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SMALL = {"capacity_bytes": 32 << 20}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    conf = tq.init({"controller": {"polling_mode": True}, "metrics": {"enabled": True}, "dataplane": SMALL})
    yield conf
    tq.close()


@pytest.mark.slow
def test_workers_find_the_drivers_service(service: Any) -> None:
    assert service.controller.zmq_info.address.startswith("actor:")
    remote = ray.remote(num_cpus=0, max_calls=1)(job)
    assert ray.get(remote.remote("a"), timeout=120) == {"a": {"from": "a"}}
    assert set(ray.get(remote.remote("b"), timeout=120)) == {"a", "b"}
    assert tq.get_metrics_endpoint() is not None
    assert tq.kv_batch_get(["a", "b"], "p")["v"].values().tolist() == [1, 2, 3, 1, 2, 3]


def test_only_one_of_them_starts_it(service: Any) -> None:
    place = RayRendezvous()
    assert place.start(service.controller.zmq_info, lambda config, http: None) is None
    found = place.find()
    assert found is not None
    assert found.address == service.controller.zmq_info.address


@pytest.mark.slow
def test_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init({"dataplane": SMALL})
    tq.close()
    assert RayRendezvous().find() is None
    with pytest.raises(ValueError, match=NAME):
        ray.get_actor(NAME, namespace=NAMESPACE)


@pytest.mark.slow
def test_a_service_that_cannot_be_prepared_is_ended_and_not_found() -> None:
    def fail(config: object, http: str) -> None:
        raise RuntimeError("not prepared")

    place = RayRendezvous()
    with pytest.raises(RuntimeError, match="not prepared"):
        place.start(rendezvous.DataPlaneConfig.of(SMALL), fail)
    assert place.find() is None
