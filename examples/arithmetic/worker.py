"""The policy worker actor: a learner whose batches come from, and whose log-probabilities go to, the data plane."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dataplane import BatchedDataDict, KVBatchMeta
from workers import TQWorkerMixin

from .config import JobConfig
from .learner import Learner, LossFunction, OptimizerConfig
from .model import ModelConfig
from .tokenizer import PAD


class PolicyWorkerImpl(TQWorkerMixin):
    """One rank of `data_parallel x tensor_parallel`. Ranks of one tensor-parallel group fetch together and compute
    together; the mixin's `*_presharded` entrypoints call `train`, `get_logprobs` and
    `get_reference_policy_logprobs` below with what they fetched."""

    def __init__(self, config: JobConfig, model: ModelConfig) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")  # its place is in the environment, set by RayWorkerGroup
        self.cfg = config
        self.mesh = init_device_mesh(
            "cpu", (config.data_parallel, config.tensor_parallel), mesh_dim_names=("dp", "tp")
        )
        self.learner = Learner(model, self.mesh, seed=config.seed, optimizer=config.warm_start.optimizer)
        self._plane_s = 0.0
