"""Worker classes that the tests start by name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dataplane import BatchedDataDict
from workers import TQWorkerMixin


class Echo:
    """Says what it was told and where it is."""

    def __init__(self, greeting: str = "hello", fail_on_rank: int | None = None) -> None:
        self.greeting = greeting
        self.cleaned = False
        if fail_on_rank is not None and self.rank() == fail_on_rank:
            raise ValueError("this constructor always fails")

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.rank(), args, kwargs

    def count_to(self, number: int) -> Iterator[int]:
        for value in range(number):  # noqa: UP028 (Ray drives generators with send())
            yield value

    def fail_on(self, rank: int) -> int:
        if self.rank() == rank:
            raise KeyError("told to fail")
        return self.rank()

    def stop(self) -> None:
        if self.rank() == 0:
            raise RuntimeError("rank 0 cannot stop")

    def hang(self) -> None:
        time.sleep(600)


class Configured(Echo):
    @staticmethod
    def configure_worker(
        num_gpus: float, bundle_indices: tuple[int, list[int]] | None
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        return (
            {"num_cpus": 0},
            {"CONFIGURED": str(bundle_indices), "SHARED": "class", "RANK": "77"},
            {"greeting": "configured"},
        )

    def greet(self) -> str:
        return self.greeting


class Policy(TQWorkerMixin):
    """A tensor-parallel rank whose log-probs, loss and metrics are known functions of its samples."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.seen: dict[str, Any] = {}

    def _get_replica_group(self) -> Any:
        return self.mesh.get_group("tp")

    def _local_coords(self) -> dict[str, int]:
        return {"data_parallel": self.mesh.get_local_rank("dp"), "tensor_parallel": self.mesh.get_local_rank("tp")}

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        self.seen = {"fields": sorted(data), "shape": list(data["input_ids"].shape), "gbs": gbs, "mbs": mbs}
        loss = data["advantages"].sum()
        dist.all_reduce(loss, group=self.mesh.get_group("dp"))
        return {"global_loss": float(loss), "all_mb_metrics": {"ids": data["input_ids"][:, 0].tolist()}}

    def get_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        self.seen = {"fields": sorted(data), "micro_batch_size": micro_batch_size}
        return {"logprobs": -data["input_ids"].float()}

    def get_reference_policy_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        return {"reference_logprobs": data["input_ids"].float()}

    def what_was_seen(self) -> dict[str, Any]:
        return self.seen

    def client_config(self) -> Any:
        return self._require_dp_client().config

    def stop(self) -> None:
        self.close_data_plane()
        dist.destroy_process_group()
