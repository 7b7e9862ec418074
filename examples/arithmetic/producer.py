"""The rollout actor of asynchronous training: it samples, rewards and scores while the policy workers train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dataplane import BatchedDataDict, DataPlaneConfig, KVBatchMeta

from .data import Problem, reward
from .loss import group_advantages, token_logprobs
from .model import ModelConfig, build
from .parallel import copy_weights
from .rollout import RolloutWorker, rollout_columns
from .tokenizer import PAD, CharTokenizer
from .weights import WeightLine


@dataclass(frozen=True)
class Produced:
    """Result of one call: rewards of the samples put, and of all samples; prompt and response tokens of the samples
    put; total seconds, and seconds in the put."""

    rewards: list[float]
    sampled: list[float]
    tokens: int
    seconds: float
    put_s: float


def groups_to_keep(rewards: Sequence[Sequence[float]], count: int) -> list[int]:
    """Return `count` group indices, or fewer if there are fewer, in ascending order. Groups whose rewards differ
    come first, because the others have no advantages."""
    alike = [len(set(group)) == 1 for group in rewards]
    return sorted(sorted(range(len(rewards)), key=alike.__getitem__)[:count])


class Producer(RolloutWorker):
    """A Ray actor. It puts all inputs of the loss for each group, so that the policy workers only train."""

    def __init__(
        self, config: ModelConfig, tokenizer: CharTokenizer, dp_cfg: DataPlaneConfig, *, max_new_tokens: int, seed: int
    ) -> None:
        super().__init__(config, tokenizer, dp_cfg, max_new_tokens=max_new_tokens, seed=seed)
        self._reference = build(config, seed=seed).eval()
        self._version = -1

    def join(self, directory: str, listeners: int, rank: int) -> None:
        """Join the job as listener number `rank` of `listeners`, to receive weights."""
        self._line = WeightLine(directory, listeners, rank=rank)

    def begin(self) -> None:
        """Receive the next weights as version 0 and as the reference."""
        self.renew(0)
        copy_weights(self._sampler.model, self._reference)

    def renew(self, version: int) -> None:
        """Receive the next weights, and sample with them as `version` from now on."""
        self.set_weights(self._line.receive())
        self._version = version

    def produce(
        self, problems: Sequence[Problem], *, group_size: int, version: int, names: Sequence[str], partition_id: str
    ) -> tuple[KVBatchMeta, Produced]:
        """Sample `group_size` responses to problems with weights of `version` or newer (RuntimeError if the actor
        has older ones), reward them, and put those of one problem for every `group_size` of `names`, with a group's
        samples consecutive.

        It samples `problems` until enough groups have neither only right nor only wrong responses. If there are too
        few such groups, others are put too.
        """
        if self._version < version:
            raise RuntimeError(
                f"samples of weight version {version} requested, but this producer has version {self._version}"
            )
        start = time.perf_counter()
        wanted = len(names) // group_size
        parts: list[BatchedDataDict] = []
        groups: list[list[float]] = []
        while problems and (missing := wanted - sum(len(set(group)) > 1 for group in groups)) > 0:
            now, problems = problems[: 2 * missing], problems[2 * missing :]
            parts.append(self._sampled([problem for problem in now for _ in range(group_size)]))
            groups += parts[-1]["reward"].view(-1, group_size).tolist()
        kept = groups_to_keep(groups, wanted)
        columns = BatchedDataDict.from_batches(parts, {"input_ids": PAD})
        columns = columns.select_indices([group * group_size + row for group in kept for row in range(group_size)])
        tokens = columns["input_ids"]
        columns["advantages"] = group_advantages(columns["reward"], group_size=group_size)[:, None].expand(tokens.shape)
        with torch.no_grad():
            columns["reference_policy_logprobs"] = token_logprobs(self._reference(tokens), tokens)
        put = time.perf_counter()
        meta = self._put(columns, list(names), partition_id)
        end = time.perf_counter()
        sampled = [reward for group in groups for reward in group]
        length = int(columns["input_lengths"].sum())
        return meta, Produced(columns["reward"].tolist(), sampled, length, end - start, end - put)

    def _sampled(self, problems: Sequence[Problem]) -> BatchedDataDict:
        """Return a response to each problem, as `rollout_columns`."""
        made, texts = self._sampler.answer(problems, self._generator)
        rewards = [reward(problem, text) for problem, text in zip(problems, texts, strict=True)]
        return rollout_columns(made, texts, rewards)

    def close(self) -> None:
        """Disconnect from the job and the data plane."""
        self._line.close()
        super().close()
