"""Runs scripts with a module: `python -m tests.compat.runner MODULE DIRECTORY SCRIPT...` leaves what each saw as
DIRECTORY/SCRIPT.json, and after them what NeMo-RL's saw as DIRECTORY/nemo.json."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from tests.compat import nemo_script

ORIGINAL = "transfer_queue"


def plain(value: Any) -> Any:
    """What JSON can hold of it, nothing that matters left out."""
    if isinstance(value, Tensor):
        layout = "dense" if not value.is_nested else str(value.layout)
        rows = [row.tolist() for row in value.float().unbind()] if value.is_nested else value.float().tolist()
        return {"tensor": str(value.dtype), "layout": layout, "rows": rows}
    if isinstance(value, NonTensorStack | NonTensorData):
        return {"objects": plain(value.tolist() if isinstance(value, NonTensorStack) else value.data)}
    if isinstance(value, TensorDictBase):
        fields = {name: plain(value.get(name)) for name in sorted(value.keys())}
        return {"batch_size": list(value.batch_size), "fields": fields}
    if isinstance(value, np.ndarray):
        return {"array": str(value.dtype), "rows": plain(value.tolist())}
    if isinstance(value, np.generic):
        return {"scalar": str(value.dtype), "value": plain(value.item())}
    if hasattr(value, "getpixel"):
        return {"image": value.mode, "size": value.size, "pixels": value.tobytes().hex()}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    assert value is None or isinstance(value, str | int | float | bool), type(value)
    return value


class Ours:
    """This project's adapter: a service for each script."""

    nemo = "dataplane.compat.nemo_rl"

    def __init__(self, module: Any) -> None:
        self.module = module

    def prepare(self, script: Any) -> Any:
        """What `init` returns."""
        sampler = script.sampler(self.module) if hasattr(script, "sampler") else "SequentialSampler"
        wanted = {"sampler": sampler, "polling_mode": script.POLLING}
        return self.module.init({"controller": wanted, "dataplane": {"capacity_bytes": 64 << 20}})

    def after(self) -> None:
        """Nothing of the script is left."""
        self.module.close()

    def close(self) -> None:
        self.module.close()


def _as_new(controller: Any, polling: bool) -> None:
    """An emptied controller of the package's counts samples from 0 again, not in the order in which they went."""
    controller.polling_mode = polling
    controller.index_manager = type(controller.index_manager)()


class Original:
    """The package: its actors take long to start and end, so all scripts share a service, which is told each script's
    sampler and whether it polls, and emptied after it."""

    nemo = "tests.compat.nemo_reference"

    def __init__(self, module: Any) -> None:
        from omegaconf import OmegaConf  # noqa: PLC0415

        self.module = module
        backend = {"SimpleStorage": {"num_data_storage_units": 1}}
        self.conf = module.init(OmegaConf.create({"backend": backend}))

    def prepare(self, script: Any) -> Any:
        """What `init` returned."""
        import ray  # noqa: PLC0415

        sampler = script.sampler(self.module) if hasattr(script, "sampler") else self.module.SequentialSampler()
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        ray.get(controller.register_sampler.remote(sampler))
        ray.get(controller.__ray_call__.remote(_as_new, script.POLLING))
        self.conf.controller.polling_mode = script.POLLING
        return self.conf

    def after(self) -> None:
        client = self.module.get_client()
        for partition in client.get_partition_list():
            client.clear_partition(partition)

    def close(self) -> None:
        self.module.close()


def main(name: str, directory: Path, scripts: list[str]) -> None:
    module = importlib.import_module(name)
    side = Original(module) if name == ORIGINAL else Ours(module)
    for script in scripts:
        written = importlib.import_module(f"tests.compat.scripts.{script}")
        _leave(directory, script, functools.partial(run_script, side, written))
    if isinstance(side, Original):
        side.prepare(nemo_script)  # the driver attaches to what is there; ours starts a service
    _leave(directory, "nemo", lambda: nemo_script.run(importlib.import_module(side.nemo).build_data_plane_client))
    side.close()


def run_script(side: Ours | Original, script: Any) -> Any:
    """Return what the script saw, once nothing of it is left."""
    saw = script.run(side.module, side.prepare(script))
    side.after()
    return saw


def _leave(directory: Path, script: str, run: Callable[[], Any]) -> None:
    try:
        saw = plain(run())
    except Exception:
        saw = {"failed": traceback.format_exc()}
    (directory / f"{script}.json").write_text(json.dumps(saw))


def with_ray(name: str, directory: Path, scripts: list[str]) -> None:
    """The original keeps its controller and its storage in Ray actors."""
    import ray  # noqa: PLC0415

    from tests.ray.slow_start import allow_slow_starts  # noqa: PLC0415

    allow_slow_starts()
    place = tempfile.mkdtemp(prefix="tqc", dir="/tmp")
    try:
        ray.init(num_cpus=8, num_gpus=0, include_dashboard=False, _temp_dir=place, log_to_driver=False)
        main(name, directory, scripts)
    finally:
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, package, where, *names = sys.argv
    (with_ray if package == ORIGINAL else main)(package, Path(where), names)
