"""The settings of a run. The defaults end within three minutes on two cores."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .data import PROBLEMS
from .learner import OptimizerConfig
from .loss import GRPOLoss


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised training until the policy answers a share `accuracy` of some training problems right, at most
    `max_rounds`.

    The target is low on purpose: reinforcement learning needs a policy that is sometimes right and can still
    improve.
    """

    accuracy: float = 0.4
    batch_size: int = 128
    updates_per_round: int = 20
    max_rounds: int = 30
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """data: problems as JSONL. out: directory of the curves. held_out: problems that are not used for training; the
    first `monitored` of them measure the accuracy after every step. capacity_bytes: of the data plane.

    A step samples `group_size` responses to each of `prompts` problems and makes `updates` optimizer steps on them.
    data_parallel x tensor_parallel policy workers train; `micro_batch_size` bounds the rows of each forward pass.
    """

    data: Path = PROBLEMS
    out: Path = Path("out")
    seed: int = 0
    held_out: int = 500
    monitored: int = 200
    steps: int = 40
    prompts: int = 64
    group_size: int = 8
    updates: int = 2
    data_parallel: int = 2
    tensor_parallel: int = 2
    micro_batch_size: int = 128
    capacity_bytes: int = 32 << 20
    width: int = 96
    layers: int = 2
    heads: int = 4
    warm_start: WarmStart = field(default_factory=WarmStart)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=4e-4, warmup_steps=8))
    loss: GRPOLoss = field(default_factory=GRPOLoss)

    def __post_init__(self) -> None:
        rows = self.prompts * self.group_size
        if rows % (self.updates * self.data_parallel):
            raise ValueError(
                f"{self.prompts} prompts x {self.group_size} responses = {rows} samples per step cannot be split into "
                f"{self.updates} updates on {self.data_parallel} data-parallel ranks; choose sizes that divide evenly"
            )
        if self.group_size < 2:
            raise ValueError("group_size must be at least 2, because advantages compare the responses to one prompt")

    @property
    def batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.prompts * self.group_size // self.updates
