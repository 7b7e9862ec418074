"""The policy worker actor: a learner that reads its batches from the data plane and writes its log-probabilities to
it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dataplane import BatchedDataDict, KVBatchMeta
from workers import TQWorkerMixin

from .config import JobConfig
from .learner import Batch, Learner, LossFunction, OptimizerConfig
from .model import ModelConfig
from .parallel import copy_weights
from .tokenizer import PAD


class PolicyWorker(TQWorkerMixin):
    """One rank of data_parallel x tensor_parallel.

    The driver calls the mixin's `*_presharded` entrypoints with a meta of this data-parallel rank's samples. The
    mixin fetches them on the first tensor-parallel rank and broadcasts them to its siblings, calls `train`,
    `get_logprobs` or `get_reference_policy_logprobs` below on every rank, and writes log-probabilities back on the
    first.
    """

    def __init__(self, config: JobConfig, model: ModelConfig) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")  # rank, size and address are in the environment, set by RayWorkerGroup
        self.config = config
        self.mesh = init_device_mesh("cpu", (config.data_parallel, config.tensor_parallel), mesh_dim_names=("dp", "tp"))
        self.learner = Learner(model, self.mesh, seed=config.seed, optimizer=config.warm_start.optimizer)
        self._plane_s = 0.0

    # Methods that the mixin requires.

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Make an optimizer step per `gbs` samples over all data-parallel ranks (all samples if None), in their
        order; no step in `eval_mode`. Return `loss` and `grad_norm`, means over the steps, and `all_mb_metrics`,
        lists with a value per step; all are the same on every rank."""
        rows = len(data["input_ids"]) if gbs is None else gbs // self.mesh["dp"].size()
        steps = self.learner.train(
            tensors(data),
            loss_fn,
            batch_size=rows,
            micro_batch_size=mbs or self.config.micro_batch_size,
            learn=not eval_mode,
        )
        means = {name: sum(step[name] for step in steps) / len(steps) for name in ("loss", "grad_norm")}
        return means | {"all_mb_metrics": {name: [step[name] for step in steps] for name in steps[0]}}

    def get_logprobs(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """Return `logprobs` [N, S] of the tokens under the policy."""
        rows = micro_batch_size or self.config.micro_batch_size
        return BatchedDataDict({"logprobs": self.learner.logprobs(tensors(data), micro_batch_size=rows)})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """Return `reference_logprobs` [N, S] of the tokens under the frozen reference policy."""
        rows = micro_batch_size or self.config.micro_batch_size
        logprobs = self.learner.logprobs(tensors(data), micro_batch_size=rows, reference=True)
        return BatchedDataDict({"reference_logprobs": logprobs})

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group("tp") if self.mesh["tp"].size() > 1 else None

    def _local_coords(self) -> dict[str, int]:
        return {"tensor_parallel": self.mesh.get_local_rank("tp")}

    def _pad_value_dict(self) -> dict[str, Any]:
        return {"input_ids": PAD}

    # Methods that this example's driver calls.

    def begin_reinforcement(self) -> None:
        """Copy the policy's weights to the reference, and start a new optimizer with the settings for reinforcement
        learning."""
        self.learner.freeze_reference()
        self.learner.set_optimizer(self.config.optimizer)

    def restart(self, optimizer: OptimizerConfig | None = None) -> None:
        """Restart reinforcement learning: copy the reference's weights to the policy, and start a new optimizer, by
        default with the settings for reinforcement learning."""
        copy_weights(self.learner.reference, self.learner.policy)
        self.learner.set_optimizer(optimizer or self.config.optimizer)

    def weights(self) -> dict[str, Tensor] | None:
        """Return the unsharded weights on the first rank, None on the others. Call this on all ranks."""
        whole = self.learner.weights()
        return whole if dist.get_rank() == 0 else None

    def take_plane_s(self) -> float:
        """Return the seconds that this rank spent fetching and writing back since the last call."""
        spent, self._plane_s = self._plane_s, 0.0
        return spent

    def shutdown(self) -> None:
        """Disconnect from the data plane and the process group."""
        self.close_data_plane()
        dist.destroy_process_group()

    def _fetch(self, meta: KVBatchMeta, **how: Any) -> BatchedDataDict[Any]:
        start = time.perf_counter()
        data = super()._fetch(meta, **how)
        self._plane_s += time.perf_counter() - start
        return data

    def _write_back_result_field(self, meta: KVBatchMeta, result: Any, **how: Any) -> None:
        start = time.perf_counter()
        super()._write_back_result_field(meta, result, **how)
        self._plane_s += time.perf_counter() - start


def tensors(data: BatchedDataDict[Any]) -> Batch:
    """Return the tensor columns of a batch."""
    return {name: column for name, column in data.items() if isinstance(column, Tensor)}
