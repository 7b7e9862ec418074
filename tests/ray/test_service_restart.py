"""Actors of a service with a state directory are started again, and go on with what they held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import dataplane
from dataplane.errors import StateDirError
from dataplane.storage.arena_record import discard
from workers import LaunchedService, launch_service
from workers.service.supervisor import unit_actors

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
LIMIT_S = 150.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[str]:
    """A state directory, discarded when its service has ended."""
    yield str(tmp_path)
    discard(tmp_path, ["/dev/shm"])


def connected(service: LaunchedService) -> dataplane.DataPlaneClient:
    """A client that waits for actors which a busy machine starts again."""
    settings = {"heartbeat_s": 0.2, "call_timeout_s": LIMIT_S, "reconnect_s": LIMIT_S}
    return dataplane.connect(service.address, token=service.token, **settings)


def test_what_was_put_outlives_controller_and_units(state: str) -> None:
    settings = {"capacity_bytes": 8 << 20, "state_dir": state, "heartbeat_s": 0.2}
    with (
        launch_service(settings, name="lasting") as service,
        connected(service) as client,
    ):
        client.register_partition("p", ["x"], None, ["t"])
        meta = client.put_samples(["a", "b"], "p", {"x": [torch.arange(3), torch.arange(5)]})
        ray.kill(service._controller, no_restart=False)
        assert client.list_samples("p").sample_ids == ["a", "b"]
        more = client.put_samples(["c"], "p", {"x": [torch.arange(2)]})
        assert client.claim_meta("p", "t", ["x"], 3).sample_ids == ["a", "b", "c"]
        (unit,) = unit_actors("lasting", service.namespace)
        ray.kill(unit)
        rows = client.get_samples([*meta.sample_ids, *more.sample_ids], "p", ["x"])["x"].unbind()
        assert [row.tolist() for row in rows] == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1]]
        client.put_samples(["d"], "p", {"x": [torch.arange(4)]})


def test_a_controller_that_cannot_go_on_gives_its_place_to_another(state: str) -> None:
    def breaks(actor: Any) -> None:
        def fail() -> None:
            raise StateDirError(directory=state, why="the disk is broken")

        actor._controller._ledger_thread._sync = fail

    settings = {"capacity_bytes": 8 << 20, "state_dir": state, "heartbeat_s": 0.2}
    with (
        launch_service(settings, name="broken") as service,
        connected(service) as client,
    ):
        client.register_partition("p", ["x"], None, ["t"])
        ray.get(service._controller.__ray_call__.remote(breaks))
        client.put_samples(["a"], "p", {"x": [torch.arange(3)]})
        assert client.list_samples("p").sample_ids == ["a"]
