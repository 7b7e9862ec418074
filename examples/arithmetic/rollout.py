"""The rollout actor: it answers prompts with the policy's weights and puts the responses into the data plane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import dataplane
import workers  # noqa: F401  (registers the resolver of "actor:..." addresses of the data plane)
from dataplane import BatchedDataDict, DataPlaneConfig, KVBatchMeta

from .data import Problem, reward
from .model import ModelConfig, Transformer, build
from .sampling import Generation, generate
from .tokenizer import END, PAD, CharTokenizer


@dataclass(frozen=True)
class RolloutStats:
    """Of one rollout: mean reward, prompt and response tokens, and seconds in the put."""

    reward: float
    tokens: int
    put_s: float


class Sampler:
    """A policy that answers problems in text, without Ray and data plane."""

    def __init__(self, model: Transformer, tokenizer: CharTokenizer, *, max_new_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens

    def answer(
        self, problems: Sequence[Problem], generator: torch.Generator | None = None
    ) -> tuple[Generation, list[str]]:
        """Return a response to each problem, as tokens and as text, sampled with `generator` or greedy without."""
        prompts = [self.tokenizer.encode(problem.prompt) for problem in problems]
        made = generate(self.model, prompts, max_new_tokens=self.max_new_tokens, generator=generator)
        rows = zip(made.tokens.tolist(), made.prompt_lengths.tolist(), made.lengths.tolist(), strict=True)
        return made, [self.tokenizer.decode(tokens[first:end]) for tokens, first, end in rows]

    def right(self, problems: Sequence[Problem]) -> list[float]:
        """Return for each problem 1 if the greedy answer is right, else 0."""
        _, texts = self.answer(problems)
        return [reward(problem, text) for problem, text in zip(problems, texts, strict=True)]


def response_mask(prompt_lengths: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return [N, width] float32: 1 for the tokens from the end of the prompt to the end of the response."""
    places = torch.arange(width)
    return ((places >= prompt_lengths[:, None]) & (places < lengths[:, None])).float()


def rollout_columns(made: Generation, texts: Sequence[str], rewards: Sequence[float]) -> BatchedDataDict:
    """Return the columns that a rollout puts into the data plane; per-token columns are padded [N, S]."""
    return BatchedDataDict(
        {
            "input_ids": made.tokens,
            "input_lengths": made.lengths,
            "token_mask": response_mask(made.prompt_lengths, made.lengths, made.tokens.shape[1]),
            "generation_logprobs": made.logprobs,
            "reward": torch.tensor(rewards),
            "response": list(texts),
        }
    )


def text_columns(problems: Sequence[Problem], tokenizer: CharTokenizer) -> BatchedDataDict:
    """Return problems with their answers, as columns for supervised training."""
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    rows = [
        [*prompt, *tokenizer.encode(problem.answer), END] for prompt, problem in zip(prompts, problems, strict=True)
    ]
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows]),
            "input_lengths": lengths,
            "token_mask": response_mask(torch.tensor([len(prompt) for prompt in prompts]), lengths, width),
        }
    )


class RolloutWorker:
    """A Ray actor. It returns metas to the driver, never tensors."""

    def __init__(
        self, config: ModelConfig, tokenizer: CharTokenizer, dp_cfg: DataPlaneConfig, *, max_new_tokens: int, seed: int
    ) -> None:
        torch.set_num_threads(1)
        self._client = dataplane.build_data_plane_client(dp_cfg, bootstrap=False)
        self._sampler = Sampler(build(config, seed=seed).eval(), tokenizer, max_new_tokens=max_new_tokens)
        self._generator = torch.Generator().manual_seed(seed)

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Use these weights from now on."""
        self._sampler.model.load_state_dict(weights)

    def put_texts(self, problems: list[Problem], *, partition_id: str) -> KVBatchMeta:
        """Put problems with their answers into `partition_id`."""
        names = [f"text-{number}" for number in range(len(problems))]
        return self._put(text_columns(problems, self._sampler.tokenizer), names, partition_id)

    def rollout(
        self, problems: list[Problem], *, group_size: int, step: int, partition_id: str
    ) -> tuple[KVBatchMeta, RolloutStats]:
        """Sample `group_size` responses to each problem, reward them and put them. A group's samples are
        consecutive."""
        repeated = [problem for problem in problems for _ in range(group_size)]
        made, texts = self._sampler.answer(repeated, self._generator)
        rewards = [reward(problem, text) for problem, text in zip(repeated, texts, strict=True)]
        names = [f"step-{step}/{row // group_size}/{row % group_size}" for row in range(len(repeated))]
        start = time.perf_counter()
        meta = self._put(rollout_columns(made, texts, rewards), names, partition_id)
        put_s = time.perf_counter() - start
        return meta, RolloutStats(sum(rewards) / len(rewards), int(made.lengths.sum()), put_s)

    def right(self, problems: list[Problem]) -> list[float]:
        """See `Sampler.right`."""
        return self._sampler.right(problems)

    def close(self) -> None:
        """Disconnect from the data plane."""
        self._client.close()

    def _put(self, columns: BatchedDataDict, names: list[str], partition_id: str) -> KVBatchMeta:
        return dataplane.kv_first_write(columns, sample_ids=names, dp_client=self._client, partition_id=partition_id)
