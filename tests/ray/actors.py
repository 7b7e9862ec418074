"""A policy worker that the tests start by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dataplane import BatchedDataDict, KVBatchMeta
from workers import TQWorkerMixin


class Policy(TQWorkerMixin):
    """A tensor-parallel rank whose log-probs, loss and metrics are known functions of its samples."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.seen: dict[str, Any] = {}
        self.step: tuple[Any, list[int], list[float]] | None = None

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
        self.seen["micro_batches"] = micro_batches(data)
        return self._trained(data["input_ids"][:, 0].tolist(), [float(data["advantages"].sum())])

    def _trained(self, ids: list[int], sums: list[float]) -> dict[str, Any]:
        loss = torch.tensor(sum(sums))
        dist.all_reduce(loss, group=self.mesh.get_group("dp"))
        return {"global_loss": float(loss), "all_mb_metrics": {"ids": ids}}

    def begin_train_step(self, *, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """loss_fn: ("fail", where, ranks) makes these ranks raise there."""
        assert self.step is None, "a step is open"
        self._fail("begin", loss_fn)
        self.step = loss_fn, [], []
        self.seen = {"gbs": gbs, "mbs": mbs}

    def train_microbatch(self, *, data: BatchedDataDict[Any]) -> None:
        assert self.step is not None, "no step is open"
        loss_fn, ids, sums = self.step
        self._fail("train", loss_fn)
        ids += data["input_ids"][:, 0].tolist()
        sums.append(float(data["advantages"].sum()))

    def finish_train_step(self) -> dict[str, Any]:
        assert self.step is not None, "no step is open"
        loss_fn, ids, sums = self.step
        self._fail("finish", loss_fn)
        self.step = None
        return self._trained(ids, sums)

    def abort_train_step(self) -> None:
        step, self.step = self.step, None
        if step is not None:
            self._fail("abort", step[0])

    def _fail(self, here: str, loss_fn: Any) -> None:
        if isinstance(loss_fn, tuple) and loss_fn[1] == here and dist.get_rank() in loss_fn[2]:
            raise ArithmeticError(f"told to fail in {here}")

    def get_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        self.seen = {"fields": sorted(data), "micro_batch_size": micro_batch_size, "micro_batches": micro_batches(data)}
        return {"logprobs": -data["input_ids"].float()}

    def get_reference_policy_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        self.seen = {"fields": sorted(data)}
        return {"reference_logprobs": data["input_ids"].float()}

    def value_presharded(self, meta: KVBatchMeta, scale: float) -> int:
        """What a critic has besides: values of its own, as a column."""
        data = self._fetch(meta)
        cut = meta.extra_info.get("micro_batch_lengths")
        self.seen = {"fields": sorted(data), "task": meta.task_name, "micro_batches": cut}
        self._write_back_result_field(meta, {"v": scale * data["input_ids"]}, result_key="v", tq_field="values")
        return meta.size

    def what_was_seen(self) -> dict[str, Any]:
        return self.seen

    def client_config(self) -> Any:
        return self._require_dp_client().config

    def stop(self) -> None:
        self.close_data_plane()
        dist.destroy_process_group()


def micro_batches(data: BatchedDataDict[Any]) -> list[list[list[list[int]]]] | None:
    """Of each global batch, the micro-batches that its iterator gives, each as the shape of its tokens and the rows'
    first tokens; None where the batch has none."""
    if data.micro_batch_indices is None:
        return None
    batches = [data.get_batch(number) for number in range(len(data.micro_batch_indices))]
    return [
        [
            [list(part["input_ids"].shape), part["input_ids"][:, 0].tolist()]
            for part in batch.make_microbatch_iterator_with_dynamic_shapes()
        ]
        for batch in batches
    ]
