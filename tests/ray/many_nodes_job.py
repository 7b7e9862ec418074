"""A driver on a cluster whose nodes come and go; run by test_many_nodes.py in a process of its own. Prints what it
found."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import dataplane
from dataplane.errors import DataPlaneError, ServiceUnavailableError
from dataplane.storage.arena_record import discard
from tests.ray.hosts import VARIABLE
from tests.ray.slow_start import allow_slow_starts
from workers import LaunchedService, launch_service

LIMIT_S = 150.0
SMALL = {"capacity_bytes": 16 << 20, "heartbeat_s": 0.5, "reconnect_s": 20.0}
PARTITION = "p"


Samples = dataplane.KVBatchMeta | list[str]


def read(client: dataplane.DataPlaneClient, samples: Samples) -> list[float]:
    return [row.mean().item() for row in client.get_samples(samples, PARTITION, ["x"])["x"].unbind()]


@ray.remote(num_cpus=0)
class Client:
    """A client in a process of its own, on some node."""

    def __init__(self, config: dataplane.DataPlaneConfig) -> None:
        self.client = dataplane.build_data_plane_client(config, bootstrap=False)

    def put(self, ids: list[str], value: float) -> None:
        self.client.put_samples(ids, PARTITION, {"x": [torch.full((1000,), value) for _ in ids]})

    def read(self, samples: Samples) -> list[float]:
        return read(self.client, samples)


class Scene:
    """A cluster, a service on it, and a client on the driver's node."""

    def __init__(self, nodes: Cluster, service: LaunchedService) -> None:
        self.nodes = nodes
        self.service = service
        self.client = dataplane.build_data_plane_client(service.config, bootstrap=False)
        self.client.register_partition(PARTITION, ["x"], None, ["t"])
        self.there: Any = None

    def client_on(self, node: Any) -> Any:
        """One in a process of its own."""
        place = NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
        return Client.options(scheduling_strategy=place).remote(self.service.config)  # type: ignore[attr-defined]

    def units_of(self, node: Any) -> list[str]:
        return [unit.name for unit in self.service.units() if unit.node == node.node_id and unit.state == "serving"]

    def read(self, samples: Samples) -> list[float]:
        return read(self.client, samples)

    def live(self) -> dict[str, int]:
        """Bytes by unit."""
        return {unit.name: unit.live_bytes for unit in self.client.stats().units}

    def wait(self, until: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + LIMIT_S
        while not (found := until()):
            if time.monotonic() > end:
                raise TimeoutError(f"{what}; nodes {self.service.nodes()}, units {self.service.units()}")
            time.sleep(0.1)
        return found

    def close(self) -> None:
        self.client.close()


def joined(nodes: Cluster, host: str) -> Any:
    return nodes.add_node(num_cpus=1, env_vars={VARIABLE: host})


def each_node_has_a_unit(scene: Scene, other: Any) -> dict[str, Any]:
    """A client's rows go to that of its own host."""
    scene.client.put_samples(["a", "b"], PARTITION, {"x": [torch.full((1000,), 1.0) for _ in range(2)]})
    live = scene.live()
    homes = [scene.units_of(scene.nodes.head_node), scene.units_of(other)]
    return {"units": [len(home) for home in homes], "rows": [live[unit] // 4000 for (unit,) in homes]}


def a_node_joins(scene: Scene) -> tuple[Any, dict[str, Any]]:
    node = joined(scene.nodes, "third")
    (unit,) = scene.wait(lambda: scene.units_of(node), "a unit on the node that joined")
    scene.there = scene.client_on(node)
    ray.get(scene.there.put.remote(["c", "d", "e"], 3.0))
    reads = [scene.read(["e", "a", "c"]), ray.get(scene.there.read.remote(["b", "d"]))]
    return node, {"rows": scene.live()[unit] // 4000, "read": reads}


def a_node_is_drained(scene: Scene, node: Any) -> dict[str, Any]:
    """And gets a unit again when it is to."""
    before = scene.client.list_samples(PARTITION)
    (unit,) = scene.units_of(node)
    scene.service.drain_node(node.node_id)
    scene.wait(lambda: unit not in scene.live(), "the unit of the drained node is forgotten")
    (state,) = [each for each in scene.service.nodes() if each.ident == node.node_id]
    found = {"state": state.state, "units": list(state.units), "read": scene.read(before)}
    added = scene.service.add_node(node.node_id)
    scene.client.put_samples(["f"], PARTITION, {"x": [torch.full((1000,), 5.0)]})
    return {**found, "added": added == scene.units_of(node), "live": len(scene.live())}


def a_node_dies(scene: Scene, node: Any) -> dict[str, Any]:
    """Without a state directory, its rows are gone and all else goes on."""
    (unit,) = scene.units_of(node)
    ray.get(scene.there.put.remote(["lost"], 4.0))
    listed = scene.client.list_samples(PARTITION)
    scene.nodes.remove_node(node, allow_graceful=False)
    scene.wait(lambda: unit not in scene.live(), "the unit of the node that died is dropped")
    found: dict[str, Any] = {"units": len(scene.service.units())}
    for name, samples in (("meta", listed.subset([listed.size - 1])), ("id", ["lost"])):
        try:
            scene.read(samples)
        except DataPlaneError as error:
            found[name] = f"{type(error).__name__}: {error}"
    scene.client.put_samples(["more"], PARTITION, {"x": [torch.ones(1000)]})
    found["ids"] = scene.client.list_samples(PARTITION).sample_ids
    return found


def a_node_leaves(scene: Scene, node: Any) -> dict[str, Any]:
    """Ray says so, as it does for a spot instance whose time is over."""
    before = scene.client.list_samples(PARTITION)
    preempted, deadline_ms = 2, int((time.time() + LIMIT_S) * 1000)  # the unit imports torch, to drain
    told = ray._raylet.GcsClient(address=scene.nodes.gcs_address).drain_node(node.node_id, preempted, "", deadline_ms)
    scene.wait(lambda: len(scene.live()) == 1, "the node that leaves has no unit any more")
    states = [each.state for each in scene.service.nodes()]
    return {"told": told[0], "states": sorted(states), "read": scene.read(before)}


def the_supervisor_dies(scene: Scene) -> dict[str, Any]:
    """Its units live on, and it watches them again."""
    before = scene.live()
    pid = ray.get(scene.service._supervisor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    scene.wait(lambda: again(scene.service, len(before)), "the supervisor is back")
    return {
        "units": sorted(unit.name for unit in scene.service.units()) == sorted(before),
        "rows": scene.live() == before,
    }


def again(service: LaunchedService, units: int) -> bool:
    try:
        return [unit.state for unit in service.units()] == ["serving"] * units
    except ray.exceptions.RayError:
        return False


def a_node_comes_back(nodes: Cluster, directory: str) -> dict[str, Any]:
    """With a state directory, with all that its unit held; until it is given up."""
    state = Path(directory, "state")
    node = nodes.add_node(num_cpus=1, env_vars={VARIABLE: "fourth"})
    with launch_service(SMALL, name="lasting", state_dir=str(state)) as service:
        for other in service.nodes():
            if other.ident != node.node_id:
                service.drain_node(other.ident)
        scene = Scene(nodes, service)
        names = [scene.units_of(node)]
        scene.client.put_samples(["a", "b"], PARTITION, {"x": [torch.full((1000,), 6.0) for _ in range(2)]})
        nodes.remove_node(node, allow_graceful=False)
        scene.wait(lambda: not service.units(), "the unit of the node that died is no unit any more")
        node = nodes.add_node(num_cpus=1, env_vars={VARIABLE: "fourth"})
        names.append(scene.wait(lambda: scene.units_of(node), "a unit on the node that came back"))
        read = scene.read(["a", "b"])
        nodes.remove_node(node, allow_graceful=False)
        scene.wait(lambda: not service.units(), "the unit of a node that died is no unit any more")
        waited_for = list(scene.live()) == names[0]
        service.drop_unit(names[0][0])
        outcome = {"same name": names[0] == names[1], "units": len(names[0]), "read": read}
        dropped = scene.wait(lambda: not scene.live(), "the unit that was given up is forgotten")
        outcome |= {"waited for": waited_for, "dropped": dropped}
        scene.close()
    discard(state, ["/dev/shm"])
    return outcome


def a_service_outlasts_its_driver(nodes: Cluster) -> dict[str, Any]:
    """Where it is launched to; anyone finds it."""
    service = launch_service(SMALL, name="stays", storage="driver_node", detached=True)
    with dataplane.build_data_plane_client(service.config, bootstrap=False) as client:
        client.register_partition(PARTITION, ["x"], None, ["t"])
        client.put_samples(["a"], PARTITION, {"x": [torch.full((1000,), 7.0)]})
    ray.shutdown()
    service.shutdown()
    ray.init(address=nodes.address, namespace="other", log_to_driver=False)
    with LaunchedService.find("stays", "many") as found:
        units = [unit.state for unit in found.units()]
        with dataplane.connect(found.address, token=found.token) as client:
            outcome = {"read": read(client, ["a"]), "units": units}
    try:
        LaunchedService.find("stays", "many")
    except ServiceUnavailableError as error:
        outcome["error"] = str(error)
    return outcome


def main(directory: str) -> None:
    allow_slow_starts()
    hook = {"worker_process_setup_hook": "tests.ray.hosts.live_there"}
    began = time.monotonic()

    def took(what: str) -> None:
        print(f"{what}: {time.monotonic() - began:.1f} s", file=sys.stderr)

    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "include_dashboard": False,
            "temp_dir": directory,
            "_system_config": {"health_check_period_ms": 300, "health_check_failure_threshold": 5},
        },
    )
    try:
        other = joined(nodes, "second")
        ray.init(address=nodes.address, namespace="many", log_to_driver=False, runtime_env=hook)
        took("cluster")
        found = {}
        with launch_service(SMALL) as service:
            took("service")
            scene = Scene(nodes, service)
            found["each"] = each_node_has_a_unit(scene, other)
            took("each")
            third, found["joins"] = a_node_joins(scene)
            took("joins")
            found["supervisor"] = the_supervisor_dies(scene)
            took("supervisor")
            found["drained"] = a_node_is_drained(scene, third)
            took("drained")
            found["dies"] = a_node_dies(scene, third)
            took("dies")
            found["leaves"] = a_node_leaves(scene, other)
            took("leaves")
            scene.close()
        found["back"] = a_node_comes_back(nodes, directory)
        took("back")
        found["stays"] = a_service_outlasts_its_driver(nodes)
        took("stays")
    finally:
        ray.shutdown()
        nodes.shutdown()
    took("end")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
