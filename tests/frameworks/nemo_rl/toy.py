"""The parts of the toy GRPO in `toy_grpo.py` that run in NeMo-RL's Ray actors: model, worker, sampler, environment.

The task is a sum, as "3+4=". A completion has two turns: after a first answer without reward the environment says
"?". The model is split over two tensor-parallel siblings, which sum their logits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.experience.interfaces import Completion, PromptGroupRecord
from nemo_rl.experience.rollouts import run_multi_turn_rollout
from torch import Tensor

CHARACTERS = "\0\n0123456789+=?"
PAD, END = 0, 1
HIDDEN = 16
"""Of each sibling."""
PROMPTS, GROUP = 4, 4
TURNS, TURN_TOKENS, MAX_TOKENS = 2, 5, 48
LEARNING_RATE = 0.01

Weights = list[dict[str, Tensor]]
"""Of the siblings, in their order."""


@dataclass
class Encoded:
    input_ids: Tensor


class Tokenizer:
    """A token per character."""

    pad_token_id = PAD

    def __call__(self, text: str, **_: Any) -> Encoded:
        return Encoded(torch.tensor([[CHARACTERS.index(character) for character in text]]))

    def batch_decode(self, rows: list[Tensor], **_: Any) -> list[str]:
        return ["".join(CHARACTERS[token] for token in row.tolist()) for row in rows]


class Shard(torch.nn.Module):
    """A sibling's part of the language model: logits of the next token, to be summed over the siblings."""

    def __init__(self, index: int) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(index)
        self.embedding = torch.nn.Parameter(torch.randn(len(CHARACTERS), HIDDEN, generator=source) / 4)
        self.output = torch.nn.Parameter(torch.randn(HIDDEN, len(CHARACTERS), generator=source) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embedding[ids]
        mean = embedded.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return torch.tanh(embedded + mean) @ self.output


class SumOverSiblings(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@ray.remote
class Worker(TQWorkerMixin):
    """A policy worker with NeMo-RL's mixin: what `TQPolicy` calls, on CPU and with Gloo."""

    def __init__(
        self, cfg: dict[str, Any], *, tokenizer: Tokenizer, worker_sharding_annotations: Any, **_: Any
    ) -> None:
        torch.set_num_threads(1)
        torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0  # they raise in a torch without CUDA
        dist.init_process_group("gloo")  # by the variables of NeMo-RL's RayWorkerGroup
        self.cfg, self.tokenizer = cfg, tokenizer
        coordinates = [worker_sharding_annotations.get_worker_coords(rank) for rank in range(dist.get_world_size())]
        self.coordinates = coordinates[dist.get_rank()]
        self.siblings, self.replicas = (self.group(coordinates, axis) for axis in ("data_parallel", "tensor_parallel"))
        self.model = Shard(self.coordinates["tensor_parallel"])
        self.reference = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.trained_ids: list[str] = []

    def group(self, coordinates: list[dict[str, int]], axis: str) -> dist.ProcessGroup:
        """The group of the ranks that have this rank's place on the axis."""
        groups = {}
        for place in sorted({at[axis] for at in coordinates}):
            groups[place] = dist.new_group([rank for rank, at in enumerate(coordinates) if at[axis] == place])
        return groups[self.coordinates[axis]]

    # --- what the mixin asks of a worker

    def _get_replica_group(self) -> dist.ProcessGroup:
        return self.siblings

    def _local_coords(self) -> dict[str, int]:
        return self.coordinates

    def _attach_or_repack_pack_metadata(self, data: Any, meta: Any) -> Any:
        if meta.task_name == "train":
            self.trained_ids += meta.sample_ids
        return super()._attach_or_repack_pack_metadata(data, meta)

    # --- what the mixin delegates to

    def log_probabilities(self, model: Shard, ids: Tensor) -> Tensor:
        """`[N, S - 1]`: of each token but the first."""
        logits = SumOverSiblings.apply(model(ids), self.siblings)
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    @torch.no_grad()
    def get_logprobs(self, data: Any, micro_batch_size: int | None = None) -> Any:
        found = self.log_probabilities(self.model, data["input_ids"])
        return BatchedDataDict({"logprobs": torch.nn.functional.pad(found, (1, 0))})

    @torch.no_grad()
    def get_reference_policy_logprobs(self, data: Any, micro_batch_size: int | None = None) -> Any:
        found = self.log_probabilities(self.reference, data["input_ids"])
        return BatchedDataDict({"reference_logprobs": torch.nn.functional.pad(found, (1, 0))})

    def train(self, data: Any, loss_fn: Any, eval_mode: bool, gbs: int, mbs: int) -> dict[str, Any]:
        self.begin_train_step(loss_fn, gbs, mbs)
        self.train_microbatch(data)
        return self.finish_train_step()

    def begin_train_step(self, loss_fn: Any, gbs: int, mbs: int) -> None:
        self.loss_fn, self.microbatch = loss_fn, mbs
        self.losses: list[float] = []
        self.optimizer.zero_grad()

    def train_microbatch(self, data: Any) -> None:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        valid = torch.stack([data["sample_mask"].sum(), mask.sum()]).double()
        dist.all_reduce(valid, group=self.replicas)
        for start in range(0, data.size, self.microbatch):
            part = data.slice(start, start + self.microbatch)
            loss, _ = self.loss_fn(self.log_probabilities(self.model, part["input_ids"]), part, *valid)
            loss.backward()
            self.losses.append(loss.item())

    def finish_train_step(self) -> dict[str, Any]:
        loss = torch.tensor(sum(self.losses), dtype=torch.float64)
        dist.all_reduce(loss, group=self.replicas)
        squares = torch.zeros(())
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.replicas)
            squares += parameter.grad.square().sum()
        dist.all_reduce(squares, group=self.siblings)
        self.optimizer.step()
        return {"global_loss": loss, "grad_norm": squares.sqrt(), "all_mb_metrics": {"loss": self.losses}}

    # --- of the toy

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def trained(self) -> list[str]:
        return self.trained_ids

    def shutdown(self) -> bool:
        return True


class Generation:
    """Samples from the model, as NeMo-RL's `GenerationInterface`. workers: the siblings whose weights are used from the
    start of each rollout of `SyncRolloutActor` on; without them, those last given to `load`."""

    def __init__(self, workers: list[Any], *, seed: int) -> None:
        self.workers = workers
        self.source = torch.Generator().manual_seed(seed)
        self.shards: list[Shard] = []

    def load(self, weights: Weights) -> None:
        torch.set_num_threads(1)
        self.shards = [Shard(index) for index in range(len(weights))]
        for shard, values in zip(self.shards, weights, strict=True):
            shard.load_state_dict(values)

    def clear_logger_metrics(self) -> None:
        self.load(ray.get([worker.weights.remote() for worker in self.workers]))

    def get_logger_metrics(self) -> dict[str, Any]:
        return {}

    def finish_generation(self) -> bool:
        return True

    @torch.no_grad()
    def generate(self, data: Any, greedy: bool) -> Any:
        prompts = [row[:length] for row, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)]
        rows, log_probabilities = zip(*map(self.complete, prompts), strict=True)
        lengths = torch.tensor([len(row) for row in rows])
        return BatchedDataDict(
            {
                "output_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD),
                "generation_lengths": lengths - data["input_lengths"],
                "unpadded_sequence_lengths": lengths,
                "logprobs": torch.nn.utils.rnn.pad_sequence(log_probabilities, batch_first=True),
            }
        )

    def complete(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """The prompt with what follows, and the log-probabilities, which are 0 for the prompt."""
        ids, log_probabilities = prompt, torch.zeros(len(prompt))
        for _ in range(TURN_TOKENS):
            logits = sum(shard(ids[None])[0, -1] for shard in self.shards)
            logits[PAD] = -torch.inf
            token = torch.multinomial(logits.softmax(-1), 1, generator=self.source)
            ids = torch.cat([ids, token])
            log_probabilities = torch.cat([log_probabilities, logits.log_softmax(-1)[token]])
            if token == END:
                break
        return ids, log_probabilities


@ray.remote
class Sums:
    """The environment: rewards digits of the sum, and ends with the first reward or the last turn."""

    def step(self, messages: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        rewards = torch.tensor(
            [reward(log[-1]["content"], at["sum"]) for log, at in zip(messages, metadata, strict=True)]
        )
        over = (rewards > 0) | torch.tensor([at["turn"] + 1 == TURNS for at in metadata])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "" if done else "?"} for done in over.tolist()],
            metadata=[{**at, "turn": at["turn"] + 1} for at in metadata],
            next_stop_strings=[None] * len(metadata),
            rewards=rewards,
            terminateds=over,
            answers=[str(at["sum"]) for at in metadata],
        )


def reward(answer: str, expected: int) -> float:
    """The share of the answer's characters that are the last digit of the sum, less a little for every character."""
    return answer.count(str(expected % 10)) / max(1, len(answer)) - 0.05 * len(answer)


def prompts(step: int) -> Any:
    """The batch of one step, in which every prompt is there once per completion."""
    pairs = [((step + place) % 5, (2 * step + 3 * place) % 5) for place in range(PROMPTS) for _ in range(GROUP)]
    texts = [f"{first}+{second}=" for first, second in pairs]
    logs = [[{"role": "user", "content": text, "token_ids": Tokenizer()(text).input_ids[0]}] for text in texts]
    return BatchedDataDict(
        {
            "message_log": logs,
            "length": torch.tensor([len(text) for text in texts]),
            "loss_multiplier": torch.ones(len(texts)),
            "extra_env_info": [{"sum": first + second, "turn": 0} for first, second in pairs],
            "task_name": ["sums"] * len(texts),
            "idx": list(range(len(texts))),
        }
    )


@ray.remote
class Rollouts:
    """Rollouts whose records the driver commits to NeMo-RL's replay buffer."""

    def __init__(self, environment: Any, *, seed: int) -> None:
        self.environment = environment
        self.generation = Generation([], seed=seed)

    def groups(self, step: int, weights: Weights) -> list[PromptGroupRecord]:
        self.generation.load(weights)
        batch, metrics = run_multi_turn_rollout(
            policy_generation=self.generation,
            input_batch=prompts(step),
            tokenizer=Tokenizer(),
            task_to_env={"sums": self.environment},
            max_seq_len=MAX_TOKENS,
            max_rollout_turns=TURNS,
        )
        completions = [
            Completion(message_log=log, env_extras=extras, truncated=bool(truncated), reward=float(total))
            for log, extras, truncated, total in zip(
                batch["message_log"], batch["extra_env_info"], batch["truncated"], batch["total_reward"], strict=True
            )
        ]
        return [
            PromptGroupRecord(
                prompt_idx=place,
                prompt=completions[place * GROUP].message_log[:1],
                extra_env_info=None,
                metadata={},
                completions=completions[place * GROUP : (place + 1) * GROUP],
                rollout_metrics=metrics,
            )
            for place in range(PROMPTS)
        ]
