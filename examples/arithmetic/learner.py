"""The trained policy: log-probabilities and optimizer steps of a (sharded) model on plain padded tensors.

This module does not depend on Ray or on the data plane. A single process is a mesh of 1 x 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .loss import Metrics, token_logprobs
from .model import ModelConfig, Transformer, build
from .parallel import clip_gradients, copy_weights, gather_weights, local, shard, sum_gradients, sum_over

Batch = Mapping[str, Tensor]
LossFunction = Callable[[Tensor, Batch, float], tuple[Tensor, Metrics]]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up over the first `warmup_steps` steps."""

    learning_rate: float = 3e-3
    warmup_steps: int = 20
    max_norm: float = 1.0


class Learner:
    """A policy and its frozen reference, both sharded over `mesh`. The same seed gives the same weights on every
    rank."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh, *, seed: int, optimizer: OptimizerConfig) -> None:
        self.mesh = mesh
        self.policy = shard(build(config, seed=seed), mesh)
        self.reference = shard(build(config, seed=seed), mesh).requires_grad_(False)
        self.set_optimizer(optimizer)

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Start a new optimizer."""
        self._max_norm = config.max_norm
        # The optimizer gets this rank's shards as plain tensors. Its arithmetic is elementwise, so the result equals
        # that on DTensors, and it is faster.
        self._shards = [local(parameter).detach() for parameter in self.policy.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._shards, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / max(1, config.warmup_steps))
        )

    def freeze_reference(self) -> None:
        """Copy the policy's current weights to the reference."""
        copy_weights(self.policy, self.reference)

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's unsharded weights. A collective over the tensor-parallel ranks."""
        return gather_weights(self.policy)

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, micro_batch_size: int, reference: bool = False) -> Tensor:
        """Return [N, S] log-probabilities of `input_ids` under the policy or its reference."""
        model = self.reference if reference else self.policy
        return torch.cat([_logprobs(model, part) for part in parts(batch, micro_batch_size)])

    def train(
        self, batch: Batch, loss_fn: LossFunction, *, batch_size: int, micro_batch_size: int, learn: bool = True
    ) -> list[Metrics]:
        """Make one optimizer step (none unless `learn`) per `batch_size` rows of this data-parallel rank, in order.

        Return the metrics of `loss_fn` for each step, the same on every rank, with `grad_norm` (before clipping; 0
        unless `learn`) and `tokens` (of responses).
        """
        return [self._step(rows, loss_fn, micro_batch_size, learn) for rows in parts(batch, batch_size)]

    def _step(self, batch: Batch, loss_fn: LossFunction, micro_batch_size: int, learn: bool) -> Metrics:
        tokens = float(sum_over(self.mesh, "dp", batch["token_mask"].sum(dtype=torch.float64)))
        sums: Metrics = defaultdict(float)
        self.policy.zero_grad()
        for part in parts(batch, micro_batch_size):
            with torch.set_grad_enabled(learn):
                loss, metrics = loss_fn(_logprobs(self.policy, part), part, tokens)
            if learn:
                loss.backward()
            for name, value in metrics.items():
                sums[name] += value
        totals = sum_over(self.mesh, "dp", torch.tensor(list(sums.values()), dtype=torch.float64))
        grad_norm = self._update() if learn else 0.0
        return dict(zip(sums, totals.tolist(), strict=True)) | {"grad_norm": grad_norm, "tokens": tokens}

    def _update(self) -> float:
        parameters = list(self.policy.parameters())
        sum_gradients(parameters, self.mesh)
        norm = clip_gradients(parameters, self.mesh, max_norm=self._max_norm)
        for mine, parameter in zip(self._shards, parameters, strict=True):
            mine.grad = local(parameter.grad)
        self._optimizer.step()
        self._schedule.step()
        return norm


def parts(batch: Batch, rows: int) -> Iterator[dict[str, Tensor]]:
    """Yield consecutive batches of `rows` rows of `batch` (the last may be smaller)."""
    total = len(batch["input_ids"])
    for start in range(0, total, rows):
        yield {name: values[start : start + rows] for name, values in batch.items()}


def _logprobs(model: Transformer, batch: Batch) -> Tensor:
    return token_logprobs(model(batch["input_ids"]), batch["input_ids"])
