"""The service as Ray actors."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import dataplane
from dataplane.errors import AuthenticationError, ServiceUnavailableError, TlsError
from dataplane.folder import own_path
from tests.secure import tls
from workers import LaunchedService, ServiceStartError, launch_service
from workers.resolver import resolve_actor

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
SMALL = {"capacity_bytes": 16 << 20}


@pytest.fixture(scope="module")
def service(ray_cluster: None) -> Iterator[LaunchedService]:
    with launch_service(SMALL) as running:
        yield running


def test_a_client_attaches_by_name_and_token(service: LaunchedService) -> None:
    assert service.address == "actor:tq-controller@tests"
    assert len(service.token) >= 32
    with dataplane.connect(service.address, token=service.token) as client:
        client.register_partition("a", ["x"], 2, ["t"])
        meta = client.put_samples(["s", "t"], "a", {"x": torch.ones(2, 3)})
        assert client.get_batch(meta, ["x"])["x"].equal(torch.ones(2, 3))
        client.clear_samples(None, "a")


@pytest.mark.parametrize("token", [None, "guess"])
def test_without_the_token_nobody_gets_in(service: LaunchedService, token: str | None) -> None:
    with pytest.raises(AuthenticationError):
        dataplane.connect(service.address, token=token)


def test_settings_of_tls_reach_every_part_and_the_clients_config(ray_cluster: None) -> None:
    named = tls("named", tls_server_name="tq.test")
    with launch_service({**SMALL, **named}, name="secure") as secure:
        assert len(secure.token) >= 32
        with pytest.raises(TlsError, match="speaks TLS"):
            dataplane.connect(secure.address, token=secure.token)
        with dataplane.build_data_plane_client(replace(secure.config, force_remote=True), bootstrap=False) as client:
            client.register_partition("a", ["x"], 2, ["t"])
            meta = client.put_samples(["s", "t"], "a", {"x": torch.ones(2, 3)})
            assert client.get_batch(meta, ["x"])["x"].equal(torch.ones(2, 3))


def test_the_service_takes_no_cpu(service: LaunchedService) -> None:
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


def test_units_are_on_every_node_and_use_shared_memory(service: LaunchedService) -> None:
    with dataplane.build_data_plane_client(service.config, bootstrap=False) as client:
        units = client.stats().units
        assert len(units) == len(ray.nodes())
        assert all(unit.capacity_bytes == 16 << 20 for unit in units)


@ray.remote(num_cpus=0)
class User:
    """A process that uses a client it was sent, or makes one."""

    def __init__(self, config: dataplane.DataPlaneConfig) -> None:
        self.client = dataplane.build_data_plane_client(config, bootstrap=False)

    def put(self, name: str) -> dataplane.KVBatchMeta:
        return self.client.put_samples([name], "users", {"x": torch.ones(1, 2)})

    def read(self, client: dataplane.DataPlaneClient, meta: dataplane.KVBatchMeta) -> torch.Tensor:
        with client:
            return client.get_batch(meta, ["x"])["x"]

    def close(self) -> None:
        self.client.close()


def test_one_worker_closing_its_client_affects_nobody_else(service: LaunchedService) -> None:
    with dataplane.build_data_plane_client(service.config, bootstrap=False) as client:
        client.register_partition("users", ["x"], 3, ["t"])
        first, second = User.remote(service.config), User.remote(service.config)  # type: ignore[attr-defined]
        meta = ray.get(first.put.remote("one"))
        ray.get(first.close.remote())
        ray.get(second.put.remote("two"))
        assert client.get_batch(meta, ["x"])["x"].equal(torch.ones(1, 2))
        assert ray.get(second.read.remote(client, meta)).equal(torch.ones(1, 2))
        ray.get(second.close.remote())
        client.clear_samples(None, "users")
        for user in (first, second):
            ray.kill(user)


def test_attaching_where_no_controller_runs_is_an_error(service: LaunchedService) -> None:
    with pytest.raises(ServiceUnavailableError, match="no controller actor of that name"):
        dataplane.connect("actor:nobody@tests", token="x")
    with pytest.raises(ServiceUnavailableError, match="no controller actor of that name"):
        dataplane.connect("actor:tq-controller@elsewhere", token=service.token)


def test_a_second_service_needs_another_name(service: LaunchedService, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'tq-controller' is in namespace 'tests' already: attach to actor:"):
        launch_service(SMALL)
    with pytest.raises(ValueError, match="attach there"):
        launch_service({"address": service.address})
    with launch_service({**SMALL, "arena_dir": str(tmp_path)}, name="another") as other:
        assert other.token != service.token
        assert list(own_path(tmp_path).iterdir())
        with pytest.raises(AuthenticationError):
            dataplane.connect(other.address, token=service.token)
    other.shutdown()
    assert not own_path(tmp_path).exists()
    with pytest.raises(ServiceUnavailableError):
        resolve_actor("another@tests")


def test_a_token_of_the_callers(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("my own secret\n")
    with launch_service({**SMALL, "token_file": str(secret)}, name="own-token") as running:
        assert running.token == "my own secret"
        with dataplane.connect(running.address, token="my own secret") as client:
            assert client.stats().units


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"arena_dir": "/no/such/directory"}, "storage unit unit-.* on node .* did not start: FileNotFoundError"),
        ({"capacity_bytes": 1 << 50}, "storage unit unit-.* did not start: ArenaSpaceError"),
    ],
)
def test_a_unit_that_does_not_start_is_named_and_nothing_is_left(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceStartError, match=message):
        launch_service({**SMALL, **config}, name="broken")
    with pytest.raises(ServiceUnavailableError):
        resolve_actor("broken@tests")


def test_a_controller_that_does_not_start_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ServiceStartError, match="the controller did not start"):
            launch_service({**SMALL, "port": taken.getsockname()[1]}, name="broken")
    with pytest.raises(ServiceUnavailableError):
        resolve_actor("broken@tests")


def test_a_deadline_names_what_is_late() -> None:
    with pytest.raises(ServiceStartError, match=r"not ready within 0 s: the controller"):
        launch_service(SMALL, name="late", timeout_s=0.0)
    with pytest.raises(ServiceUnavailableError):
        resolve_actor("late@tests")
