"""Accelerators other than CUDA's, by one that torch only believes in: "npu" with the backend "hccl"."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataplane.cli.doctor import run_checks
from dataplane.config import DataPlaneConfig
from dataplane.core import devices
from dataplane.core.buffer_pool import BufferPool
from tests import fake_npu
from tests.alone import alone
from tests.workers.messages.messengers import Here, address
from workers import Worker
from workers.groups.cluster import _count_accelerators
from workers.groups.launch import placement_environment
from workers.placement.strategies import PackedPlacementStrategy
from workers.rlinf.worker import AcceleratorType
from workers.rlinf.worker import Worker as RlinfWorker
from workers.training.replica_group import ReplicaGroup
from workers.transport import pickling


def group_devices() -> None:
    fake_npu.install()
    for backend, expected in {"gloo": "cpu", "hccl": "npu:0", "cpu:gloo,npu:hccl": "npu:0"}.items():
        with tempfile.TemporaryDirectory() as directory:
            dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=0, world_size=1)
            assert str(ReplicaGroup(dist.group.WORLD).device) == expected, backend
            dist.destroy_process_group()
    assert dist.get_default_backend_for_device("npu") == "hccl"


def received_tensors() -> None:
    platform = fake_npu.install()
    sent = {"npu": torch.arange(3.0).to("npu"), "cpu": torch.arange(2)}
    packed = pickling.pack(sent)
    assert [segment.on_accelerator for segment in packed.layout.segments] == [True, False]
    memory = np.empty(packed.layout.nbytes, np.uint8)
    packed.write(memory)
    got = pickling.unpack(packed.layout, memory, BufferPool(0), own=True).load()
    assert str(got["npu"].device) == "npu:0"
    assert got["npu"].cpu().tolist() == [0, 1, 2]
    assert devices.current_device() is None
    platform.initialized = True
    assert str(devices.current_device()) == "npu:0"
    assert devices.has_values(sent["npu"])
    assert not devices.has_values(torch.empty(1, device="meta"))
    here = Here(shared_memory=True)
    try:
        a, b = here.workers(2)
        a.send(sent, address(1), async_op=True)
        assert b.recv(address(0))["npu"].device.type == "npu"
        target = torch.zeros(3).to("npu")
        a.send_tensor(sent["npu"], address(1), async_op=True)
        b.recv_tensor(target, address(0))
    finally:
        here.close()
    assert target.cpu().tolist() == [0, 1, 2]
    assert fake_npu.Group.broadcasts == 2  # of send_tensor and recv_tensor; the other message has a tensor on the CPU
    assert fake_npu.Event.synchronized


def workers_attributes() -> None:
    platform = fake_npu.install()
    assert Worker.torch_platform is platform
    assert Worker.torch_device_type == "npu"
    assert RlinfWorker.accelerator_type is AcceleratorType.NPU
    (found,) = [finding for finding in run_checks(DataPlaneConfig(), "/dev/shm") if finding.what == "torch"]
    assert found.found.endswith(", 1 of Ascend")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "7")
        patch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,3")
        assert devices.visible_devices() == ["2", "3"]
    platform.available = False
    assert Worker.torch_platform is None
    assert Worker.torch_device_type is None
    assert RlinfWorker.accelerator_type is AcceleratorType.NO_ACCEL


@pytest.mark.integration
@pytest.mark.parametrize("check", [group_devices, received_tensors, workers_attributes])
def test_an_accelerator_from_another_package(check: Callable[[], None]) -> None:
    alone(check)


VISIBLE = """
from workers.groups.actor_class import _visible_devices
environment = {"CUDA_VISIBLE_DEVICES": "0,1", "ASCEND_RT_VISIBLE_DEVICES": "0,1", "ZE_AFFINITY_MASK": ""}
print(sorted(_visible_devices(environment).items()))
"""


@pytest.mark.integration
def test_a_worker_sees_its_part_of_what_its_node_may_use() -> None:
    environment = {"ASCEND_RT_VISIBLE_DEVICES": "4,6,7", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-c", VISIBLE], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(
        [("ASCEND_RT_VISIBLE_DEVICES", "4,6"), ("CUDA_VISIBLE_DEVICES", "0,1"), ("ZE_AFFINITY_MASK", "")]
    )


def test_the_variables_of_every_make() -> None:
    cluster = SimpleNamespace(accelerators_per_node=[0, 2])
    first, second = PackedPlacementStrategy(0, 1).get_placement(cluster)
    for placement, index in ((first, "0"), (second, "1")):
        environment = placement_environment(placement)
        assert [environment[name] for name in devices.VISIBLE_DEVICES.values()] == [index] * 3


@pytest.mark.parametrize(
    ("resources", "count"), [({"CPU": 4.0}, 0), ({"GPU": 2.0}, 2), ({"NPU": 8.0}, 8), ({"GPU": 0.0, "NPU": 1.0}, 1)]
)
def test_ray_counts_npus_apart(resources: dict[str, float], count: int) -> None:
    assert _count_accelerators(resources) == count
