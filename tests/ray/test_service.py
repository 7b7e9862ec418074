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
from dataplane.core.private_dir import own_path
from dataplane.errors import AuthenticationError, DrainError, ServiceUnavailableError
from tests.children import START_S
from tests.metrics_read import scrape
from tests.restarts import wait_until
from tests.web_client import ask
from workers import LaunchedService, ServiceStartError, launch_service
from workers.service.service import resolve_actor
from workers.service.supervisor import unit_actors

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
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


def test_encryption_of_rows_reaches_every_part(ray_cluster: None) -> None:
    with launch_service({**SMALL, "encrypt_rows": True}, name="secure") as secure:
        assert len(secure.token) >= 32
        with dataplane.build_data_plane_client(replace(secure.config, force_remote=True), bootstrap=False) as client:
            client.register_partition("a", ["x"], 2, ["t"])
            meta = client.put_samples(["s", "t"], "a", {"x": torch.ones(2, 3)})
            assert client.get_batch(meta, ["x"])["x"].equal(torch.ones(2, 3))
            assert all(unit.curve_key for unit in client._connections.get()._channel.units)


def test_page_and_metrics_of_a_service_want_its_token(ray_cluster: None) -> None:
    with launch_service({**SMALL, "http_port": 0}, name="watched") as watched:
        address = watched.http_url.removeprefix("http://")
        assert ask(address, "/healthz").text == "ok\n"
        assert ask(address, "/metrics").status == 401
        metrics = scrape(address, Authorization=f"Bearer {watched.token}")
        assert len(metrics.labels("tq_unit_connected", "unit")) == len(ray.nodes())


def test_the_service_takes_no_cpu(ray_cluster: None) -> None:
    """All CPUs that were free before it started can be used at once beside it."""
    free = ray.available_resources()["CPU"]
    with launch_service(SMALL, name="free"):
        assert ray.get(ray.remote(num_cpus=free)(lambda: "ran").remote(), timeout=START_S) == "ran"


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


def test_what_there_is_of_a_service(service: LaunchedService) -> None:
    (node,) = service.nodes()
    (unit,) = service.units()
    assert (node.ident, node.state, node.units) == (ray.nodes()[0]["NodeID"], "serving", (unit.name,))
    assert (unit.node, unit.host, unit.state) == (node.ident, node.host, "serving")
    assert unit.name == f"unit-{node.host}-0"


def test_settings_are_keywords_too() -> None:
    with launch_service(
        {"heartbeat_s": 1.0}, name="several", units=3, capacity_bytes=8 << 20, reserve_fraction=0.5
    ) as several:
        assert len(several.units()) == 3
        with dataplane.build_data_plane_client(several.config, bootstrap=False) as client:
            units = client.stats().units
            assert sorted(unit.name for unit in units) == [unit.name for unit in several.units()]
            assert [(unit.capacity_bytes, unit.limit_bytes) for unit in units] == [(8 << 20, 4 << 20)] * 3


def test_a_unit_whose_process_dies_is_dropped_and_another_is_started() -> None:
    with (
        launch_service(SMALL, name="mended") as mended,
        dataplane.build_data_plane_client(mended.config, bootstrap=False) as client,
    ):
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["lost"], "p", {"x": torch.ones(1, 2)})
        (before,) = client.stats().units
        (actor,) = unit_actors("mended", mended.namespace)
        ray.kill(actor)
        wait_until(lambda: [unit.unit for unit in client.stats().units] == [before.unit + 1], "another unit")
        client.put_samples(["kept"], "p", {"x": torch.ones(1, 2)})
        assert client.list_samples("p").sample_ids == ["kept"]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"capacity": 1 << 30}, TypeError, "launch_service.. has no setting capacity; settings are address, "),
        ({"storage": "everywhere"}, ValueError, "storage='everywhere': expected \"per_node\" or"),
    ],
)
def test_what_cannot_be_launched(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        launch_service(name="wrong", **arguments)
    with pytest.raises(ServiceUnavailableError):
        resolve_actor("wrong@tests")


def test_nodes_that_cannot_be_added_drained_or_dropped(service: LaunchedService) -> None:
    with pytest.raises(ValueError, match="the Ray cluster has no node 'nowhere'"):
        service.add_node("nowhere")
    with pytest.raises(ValueError, match="node 'nowhere' has no storage unit of this service"):
        service.drain_node("nowhere")
    with pytest.raises(ValueError, match="is running: use drain_node, which moves its rows"):
        service.drop_unit(service.units()[0].name)


def test_rows_that_have_nowhere_to_go_stay(service: LaunchedService) -> None:
    (node,) = service.nodes()
    with dataplane.build_data_plane_client(service.config, bootstrap=False) as client:
        client.register_partition("stuck", ["x"], None, ["t"])
        meta = client.put_samples(["a"], "stuck", {"x": torch.ones(1, 2)})
        with pytest.raises(DrainError, match="storage unit"):
            service.drain_node(node.ident, timeout_s=1.0)
        assert [each.state for each in service.nodes()] == ["serving"]
        client.put_samples(["b"], "stuck", {"x": torch.ones(1, 2)})
        assert client.get_batch(meta, ["x"])["x"].equal(torch.ones(1, 2))
        client.clear_samples(None, "stuck")


def test_attaching_where_no_controller_runs_is_an_error(service: LaunchedService) -> None:
    with pytest.raises(ServiceUnavailableError, match="no controller actor of that name"):
        dataplane.connect("actor:nobody@tests", token="x")
    with pytest.raises(ServiceUnavailableError, match="no controller actor of that name"):
        dataplane.connect("actor:tq-controller@elsewhere", token=service.token)


def test_a_second_service_needs_another_name(service: LaunchedService, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'tq-controller' is in namespace 'tests' already: attach to actor:"):
        launch_service(SMALL)
    with pytest.raises(ValueError, match="attach to it"):
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


def test_a_service_whose_controller_died_is_not_found_and_another_has_its_name() -> None:
    def over() -> bool:
        try:
            LaunchedService.find("dead")
        except ServiceUnavailableError as error:
            return "its controller has ended; start another service with launch_service(name='dead')" in str(error)
        return False

    first = launch_service(SMALL, name="dead")
    assert LaunchedService.find("dead").token == first.token
    ray.kill(first._controller)
    wait_until(over, "the service is over")
    with launch_service(SMALL, name="dead") as second, second.connect() as client:
        assert LaunchedService.find("dead").token == second.token != first.token
        client.register_partition("p", ["x"], None, ["t"])
        (unit,) = client.stats().units
        first.shutdown()
        client.put_samples(["kept"], "p", {"x": torch.ones(1, 2)})
        assert [each.unit for each in client.stats().units] == [unit.unit], "it is not the first one's to end"


@pytest.mark.parametrize(("name", "kind"), [("", ValueError), ("a@b", ValueError), (3, TypeError)])
def test_names_that_cannot_be(name: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"name={name!r}"):
        launch_service(SMALL, name=name)


def test_a_token_of_the_callers(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("my own secret\n")
    with launch_service({**SMALL, "token_file": str(secret)}, name="own-token") as running:
        assert running.token == "my own secret"
        with running.connect(client_name="mine") as client:
            assert [session.name for session in client.stats().sessions] == ["mine"]
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
    with pytest.raises(ServiceStartError, match="the controller was not ready within 0 s"):
        launch_service(SMALL, name="late", timeout_s=0.0)
    with pytest.raises(ServiceUnavailableError):
        resolve_actor("late@tests")
