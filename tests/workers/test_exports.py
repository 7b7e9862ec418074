"""What `workers` offers, and that importing it costs a process nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import workers

pytestmark = pytest.mark.integration

NAMES = [
    "AsyncWork",
    "Channel",
    "Cluster",
    "ClusterResource",
    "CollectiveGroupOptions",
    "FetchPolicy",
    "FlexiblePlacementStrategy",
    "LaunchedService",
    "MultiWorkerFuture",
    "NamedSharding",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "PolicyWorker",
    "REPLICATED_AXES",
    "RayVirtualCluster",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "ReplicaGroupError",
    "ReplicaLostError",
    "ResourcesNotReadyError",
    "ServiceNode",
    "ServiceStartError",
    "ServiceUnit",
    "TQPolicy",
    "TQWorkerMixin",
    "Worker",
    "WorkerAddress",
    "WorkerGroup",
    "WorkerStartError",
    "launch_service",
]


def test_exported_names() -> None:
    assert sorted(NAMES) == workers.__all__
    for name in NAMES:
        assert getattr(workers, name) is not None
    assert set(NAMES) <= set(dir(workers))


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_changes_nothing_but_the_resolver() -> None:
    code = """
import logging, os, signal, sys, threading
import ray
before = (dict(os.environ), threading.active_count(), logging.root.handlers[:], signal.getsignal(signal.SIGTERM))
import workers
from workers import launch_service
after = (dict(os.environ), threading.active_count(), logging.root.handlers[:], signal.getsignal(signal.SIGTERM))
from dataplane.core.addresses import _resolvers
print(before == after, ray.is_initialized(), list(_resolvers), "torch" in sys.modules)
"""
    assert run(code) == "True False ['actor'] False"


def test_a_process_without_ray_has_channels_messages_and_replica_groups() -> None:
    code = """
import sys
sys.modules["ray"] = None  # every import of Ray fails
import workers
import workers.messages, workers.training.replica_group
from workers.channels import ChannelBroker
from workers.transport import pickling
names = ("AsyncWork", "Channel", "CollectiveGroupOptions", "FetchPolicy", "NamedSharding", "TQWorkerMixin")
print(all(getattr(workers, name) is not None for name in names))
print(pickling.pack({"value": lambda: 3}).layout.nbytes > 0)
try:
    workers.Cluster
except ImportError as error:
    print(error)
"""
    assert run(code).splitlines() == ["True", "True", "import of ray halted; None in sys.modules"]


def test_an_actor_address_without_ray_is_a_named_error() -> None:
    code = """
import dataplane, workers
try:
    dataplane.connect("actor:tq-controller@jobs")
except dataplane.errors.ServiceUnavailableError as error:
    print(error)
"""
    assert "this process is in no Ray cluster" in run(code.replace("import dataplane,", "import dataplane.errors,"))
