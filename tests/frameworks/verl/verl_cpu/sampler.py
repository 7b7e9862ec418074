"""verl's replay buffer, with each batch in the order of its keys: `trainer.v1.sampler.custom_sampler` names it. The
queues list keys in orders of their own, and sums of floating-point numbers depend on it.

VERL_CPU_SAMPLED is the name of a file to which each batch adds a line: its partition, step and keys."""

import json
import os
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class _Ordered:
    """`sampler_kwargs` has the arguments that verl's trainer passes to its own buffers only."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | dict(settings["sampler_kwargs"] or {}))

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        batch.reorder(sorted(range(len(batch.keys)), key=lambda place: batch.keys[place]))
        if file := os.environ.get("VERL_CPU_SAMPLED"):
            with open(file, "a") as lines:
                record = {"partition": partition_id, "step": global_steps, "keys": list(batch.keys)}
                lines.write(json.dumps(record) + "\n")
        return batch, metrics


class OrderedReplayBuffer(_Ordered, ReplayBuffer):
    """For `trainer_mode=sync`."""


class OrderedReplayBufferAsync(_Ordered, ReplayBufferAsync):
    """For the asynchronous modes."""
