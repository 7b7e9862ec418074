"""The switch with packages that are laid out as NeMo-RL and RLinf are, in processes that import these."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from dataplane.compat.switch import VARIABLE
from tests.compat.test_nemo_rl import INTERFACES
from tests.compat.test_switch_processes import PACKAGES, ROOT, environment, run

pytestmark = [pytest.mark.integration, pytest.mark.slow]

JOB_S = 1000.0
"""A job that starts a Ray cluster, on a busy machine."""

ORIGINAL = "raise AssertionError('the original was imported')\n"
NEMO = {
    "nemo_rl/__init__.py": "",
    "nemo_rl/data_plane/__init__.py": "from nemo_rl.data_plane.factory import build as build\n",
    "nemo_rl/data_plane/interfaces.py": INTERFACES,
    "nemo_rl/data_plane/factory.py": """
def build(cfg, *, bootstrap=True):
    from nemo_rl.data_plane.adapters.transfer_queue import TQDataPlaneClient

    return TQDataPlaneClient(cfg, bootstrap=bootstrap)
""",
    "nemo_rl/data_plane/adapters/__init__.py": "",
    "nemo_rl/data_plane/adapters/transfer_queue.py": ORIGINAL,
    "train.py": """
import dataclasses, json, sys
from tensordict import NonTensorStack, TensorDict
from nemo_rl.data_plane import build
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta

cfg = {"enabled": True, "impl": "transfer_queue", "backend": "simple", "storage_capacity": 100, "num_storage_units": 2,
       "claim_meta_poll_interval_s": 0.5, "dataplane": {"capacity_bytes": 32 << 20}}
driver, worker = build(cfg, bootstrap=True), build(cfg, bootstrap=False)
driver.register_partition("train", [], 1, ["policy"])
driver.put_samples(["a"], "train", tags=[{"input_lengths": 3}])
meta = worker.claim_meta("train", "policy", [], 1)
assert type(meta) is KVBatchMeta and isinstance(driver, DataPlaneClient)


@dataclasses.dataclass
class Info:
    turns: int


driver.put_samples(["a"], "train", TensorDict({"extra_env_info": NonTensorStack(Info(2))}, batch_size=[1]))
(info,) = worker.get_samples(["a"], "train", ["extra_env_info"]).get("extra_env_info").tolist()
assert info == Info(2), info
worker.close()
driver.close()
print(json.dumps([type(driver).__module__, meta.sequence_lengths, sys.argv[1:]]))
""",
}
RLINF = {
    "rlinf/__init__.py": "",
    "rlinf/scheduler/__init__.py": ORIGINAL,
    "rlinf/scheduler/net_emulation.py": ORIGINAL,
    "rlinf/workers.py": """
from rlinf.scheduler import Channel, Worker, split_batch
from rlinf.scheduler.worker.worker import Worker as Same

assert Same is Worker


class Rollout(Worker):
    def __init__(self, cfg):
        Worker.__init__(self)
        self.cfg = cfg

    @Worker.timer("rollout/generate")
    def generate(self, channel: Channel):
        self.log_info(f"{self.cfg} on {self._rank}")
        channel.put((self._rank, Worker.__module__), async_op=True).wait()

    async def collect(self, channel: Channel):
        return sorted([await channel.get(async_op=True).async_wait() for _ in range(2)])
""",
    "main.py": """
import json, sys
from tests.ray.slow_start import allow_slow_starts
from rlinf.scheduler import Channel, Cluster, ComponentPlacement
from rlinf.workers import Rollout

try:
    from rlinf.scheduler import FrankaHWInfo
except ImportError as error:
    missing = str(error)
try:
    import rlinf.scheduler.net_emulation
except ModuleNotFoundError as error:
    absent = str(error)


class Config:
    class cluster:
        component_placement = {"rollout": "0:0-1"}


allow_slow_starts()
cluster = Cluster(cluster_cfg={"num_nodes": 1, "component_placement": Config.cluster.component_placement})
strategy = ComponentPlacement(Config, cluster).get_strategy("rollout")
rollout = Rollout.create_group("cfg").launch(cluster, name="rollout", placement_strategy=strategy)
channel = Channel.create("Rollout")
call = rollout.generate(channel)
call.wait()
assert call.consume_durations()["rollout/generate"] > 0
shown = str(channel)
got = rollout.execute_on(0).collect(channel).wait()[0]
cluster.shutdown()
print(json.dumps([missing, absent, shown, got, sys.argv[1:]]))
""",
}


def written(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("switch"), PACKAGES)


def test_a_job_that_is_written_for_nemo_rl(python: Path, tmp_path: Path) -> None:
    written(NEMO, tmp_path)
    said = run(python, "-m", "dataplane.compat.nemo_rl", "train.py", "grpo.seed=1", cwd=tmp_path)
    assert json.loads(said.splitlines()[-1]) == ["dataplane.compat.nemo_rl.adapter", [3], ["grpo.seed=1"]]


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_job_that_is_written_for_rlinf(python: Path, tmp_path: Path) -> None:
    written(RLINF, tmp_path)
    directory = tempfile.mkdtemp(prefix="tqr", dir="/tmp")
    command = ["-m", "workers.rlinf", "main.py", "runner.seed=1"]
    try:
        said = run(
            python, *command, cwd=tmp_path, timeout_s=JOB_S, RAY_TMPDIR=directory, PYTHONPATH=f"{tmp_path}:{ROOT}"
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    missing, absent, shown, got, arguments = json.loads(said.splitlines()[-1])
    assert missing.startswith("cannot import 'FrankaHWInfo' from rlinf.scheduler")
    assert absent.startswith(f"No module named 'rlinf.scheduler.net_emulation': {VARIABLE}=rlinf.scheduler makes")
    assert "(0, 'workers.rlinf.worker')" in shown
    assert got == [[0, "workers.rlinf.worker"], [1, "workers.rlinf.worker"]]
    assert arguments == ["runner.seed=1"]
