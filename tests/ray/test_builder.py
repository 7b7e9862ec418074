"""The maker of workers, used without a group."""

from __future__ import annotations

import importlib.util
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from tests.logs import told
from tests.ray.standing import alive_actors, call_until_dead
from workers import RayVirtualCluster, RayWorkerBuilder

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
STARTERS = "tests.ray.actors"
INITIALIZER = "IsolatedWorkerInitializer"


@pytest.fixture(scope="module")
def place(ray_cluster: None) -> Iterator[PlacementGroup]:
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=3) as cluster:
        yield cluster.get_placement_groups()[0]


def with_variables(**values: str) -> dict[str, dict[str, dict[str, str]]]:
    return {"runtime_env": {"env_vars": values}}


def test_a_worker_of_a_call(place: PlacementGroup) -> None:
    before = alive_actors(INITIALIZER)
    worker = RayWorkerBuilder(f"{STARTERS}.Starter", more="told")(place, 0, 0, **with_variables(A="call", RANK="3"))
    assert ray.get(worker.environment.remote("A", "RANK")) == ["call", "3"]
    assert ray.get(worker.what_it_was_told.remote()) == {"more": "told"}
    assert ray.get(worker.resources.remote())["CPU"] == 1.0
    assert len(alive_actors(INITIALIZER) - before) == 1


def test_what_the_call_asks_for_is_overridden_with_a_warning(
    place: PlacementGroup, caplog: pytest.LogCaptureFixture
) -> None:
    builder = RayWorkerBuilder(f"{STARTERS}.Configured")
    options = {"num_cpus": 1, **with_variables(A_WORKER="call")}
    with caplog.at_level(logging.WARNING, logger="workers"):
        worker = builder(place, 1, 0, (0, [1, 0]), num_gpus_per_node=4, **options)
    assert told(caplog) == [
        "Configured.configure_worker overrides num_cpus=1 with 0, variable A_WORKER of the call: the class requires it",
    ]
    assert options == {"num_cpus": 1, **with_variables(A_WORKER="call")}
    assert ray.get(worker.environment.remote("A_WORKER", "RANK", "A_CLASS")) == ["worker", "77", "class"]
    assert ray.get(worker.what_it_was_told.remote()) == {
        "bundle_indices": (0, [1, 0]),
        "num_gpus": 0,
        "num_gpus_per_node": 4,
    }


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Tied", {"bundle_indices": None}),
        ("OpenMinded", {"asked": ["bundle_indices", "num_gpus", "num_gpus_per_node"]}),
    ],
)
def test_classes_are_asked_for_what_they_take(place: PlacementGroup, name: str, told: dict[str, object]) -> None:
    worker = RayWorkerBuilder(f"{STARTERS}.{name}")(place, 0, 0)
    assert ray.get(worker.what_it_was_told.remote()) == told


def test_a_maker_in_this_process(place: PlacementGroup, caplog: pytest.LogCaptureFixture) -> None:
    maker = RayWorkerBuilder.IsolatedWorkerInitializer(f"{STARTERS}.Configured", more="told")
    before = alive_actors(INITIALIZER)
    with caplog.at_level(logging.WARNING, logger="workers"):
        worker = maker.create_worker(place, 0, 0, None, **with_variables(A_CLASS="call", RANK="3"))
    assert alive_actors(INITIALIZER) <= before
    assert told(caplog) == [
        "the call overrides variable A_CLASS of Configured._default_options: the caller's options take precedence",
        "the builder overrides variable RANK of Configured.configure_worker: bundle and ranks are fixed",
    ]
    assert ray.get(worker.environment.remote("A_CLASS", "RANK")) == ["call", "3"]
    assert ray.get(worker.what_it_was_told.remote())["more"] == "told"
    assert maker.init_kwargs == {"more": "told"}


def test_an_initializer_makes_all_workers_of_a_placement_group(place: PlacementGroup) -> None:
    builder = RayWorkerBuilder(f"{STARTERS}.Starter")
    first, initializer = builder.create_worker_async(place, 0, 0, **with_variables(RANK="0"))
    second, same = builder.create_worker_async(place, 1, 0, **with_variables(RANK="1"))
    assert initializer == same
    _, other_builders = pickle.loads(pickle.dumps(builder)).create_worker_async(place, 0, 0)
    assert initializer != other_builders
    _, other_environments = builder.create_worker_async(place, 0, 0, **with_variables(A="new"))
    assert initializer != other_environments
    workers: list[ActorHandle] = ray.get([first, second])
    assert [ray.get(worker.environment.remote("RANK")) for worker in workers] == [["0"], ["1"]]
    ray.kill(initializer)
    with pytest.raises(RayActorError):
        call_until_dead(workers[0].environment, "RANK")


def test_a_class_that_cannot_be_imported(place: PlacementGroup) -> None:
    builder = RayWorkerBuilder(f"{STARTERS}.Nobody")
    with pytest.raises(ValueError, match=r"^cannot import") as caught:
        builder(place, 0, 0)
    assert not isinstance(caught.value, RayTaskError)
    assert caught.value.__notes__ == ["raised by worker of tests.ray.actors.Nobody being made"]
    future, _ = builder.create_worker_async(place, 0, 0)
    with pytest.raises(ValueError, match="cannot import"):
        ray.get(future)


def test_a_class_that_only_workers_can_import(place: PlacementGroup, tmp_path: Path) -> None:
    (tmp_path / "far_away.py").write_text(
        "class Worker:\n    def __init__(self, n): self.n = n\n    def get(self): return self.n"
    )
    worker = RayWorkerBuilder("far_away.Worker", 5)(place, 0, 0, **with_variables(PYTHONPATH=str(tmp_path)))
    assert ray.get(worker.get.remote()) == 5
    assert importlib.util.find_spec("far_away") is None
