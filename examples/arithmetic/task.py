"""The task of a run: its problems, and the tokenizer and model for them."""

from __future__ import annotations

from dataclasses import dataclass

from .config import JobConfig
from .data import Problem, load_problems, split
from .model import ModelConfig
from .tokenizer import CharTokenizer


@dataclass(frozen=True)
class Task:
    """max_new_tokens: length of the longest answer, its END, and one more token for wrong answers."""

    train: list[Problem]
    held_out: list[Problem]
    tokenizer: CharTokenizer
    model: ModelConfig
    max_new_tokens: int

    @classmethod
    def of(cls, config: JobConfig) -> Task:
        """Read and split the problems. OSError for an unreadable file, ValueError for too few problems."""
        problems = load_problems(config.data)
        train, held_out = split(problems, held_out=config.held_out, seed=config.seed)
        if len(train) < config.prompts:
            raise ValueError(f"{len(train)} training problems are fewer than the {config.prompts} prompts of a step")
        tokenizer = CharTokenizer.of(problem.prompt + problem.answer for problem in problems)
        max_new_tokens = max(len(problem.answer) for problem in problems) + 2
        model = ModelConfig(
            vocabulary=tokenizer.size,
            context=max(len(problem.prompt) for problem in problems) + max_new_tokens,
            width=config.width,
            layers=config.layers,
            heads=config.heads,
        )
        return cls(train, held_out, tokenizer, model, max_new_tokens)
