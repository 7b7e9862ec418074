"""The rollout actor of asynchronous training: samples, judges and scores while the policy workers train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dataplane import DataPlaneConfig, KVBatchMeta

from .data import Problem, reward
from .loss import group_advantages, token_logprobs
from .model import ModelConfig, build
from .parallel import copy_weights
from .rollout import RolloutWorker, rollout_columns
from .tokenizer import CharTokenizer
from .weights import WeightLine


@dataclass(frozen=True)
class Produced:
    """Of one call: the rewards of its samples, prompt and response tokens, seconds in all and putting."""

    rewards: list[float]
    tokens: int
    seconds: float
    put_s: float


class Producer(RolloutWorker):
    """A Ray actor. Of each group it puts all that the loss needs, so that the policy workers have only to train."""

    def __init__(
        self, config: ModelConfig, tokenizer: CharTokenizer, dp_cfg: DataPlaneConfig, *, max_new_tokens: int, seed: int
    ) -> None:
        super().__init__(config, tokenizer, dp_cfg, max_new_tokens=max_new_tokens, seed=seed)
        self._reference = build(config, seed=seed).eval()
        self._version = -1

    def join(self, directory: str, listeners: int, rank: int) -> None:
        """Listen for weights, as number `rank` of `listeners`."""
        self._line = WeightLine(directory, listeners, rank=rank)

    def begin(self) -> None:
        """Begin at version 0 with the weights that are sent next, which are the reference, too."""
        self.renew(0)
        copy_weights(self._sampler.model, self._reference)

    def renew(self, version: int) -> None:
        """Answer with the weights that are sent next from now on: those of `version`."""
        self.set_weights(self._line.receive())
        self._version = version

    def produce(
        self, problems: Sequence[Problem], *, group_size: int, version: int, names: Sequence[str], partition_id: str
    ) -> tuple[KVBatchMeta, Produced]:
        """Sample `group_size` responses to each problem with weights of `version` or newer (RuntimeError where they are
        not here), judge them, and put them as `names`, a group's samples one after another."""
        if self._version < version:
            raise RuntimeError(f"asked for samples of weights {version}, but those here are {self._version}")
        start = time.perf_counter()
        repeated = [problem for problem in problems for _ in range(group_size)]
        made, texts = self._sampler.answer(repeated, self._generator)
        rewards = [reward(problem, text) for problem, text in zip(repeated, texts, strict=True)]
        columns = rollout_columns(made, texts, rewards)
        advantages = group_advantages(columns["reward"], group_size=group_size)
        columns["advantages"] = advantages[:, None].expand(made.tokens.shape)
        with torch.no_grad():
            columns["reference_policy_logprobs"] = token_logprobs(self._reference(made.tokens), made.tokens)
        put = time.perf_counter()
        meta = self._put(columns, list(names), partition_id)
        end = time.perf_counter()
        return meta, Produced(rewards, int(made.lengths.sum()), end - start, end - put)

    def close(self) -> None:
        """Leave the job and the data plane."""
        self._line.close()
        super().close()
