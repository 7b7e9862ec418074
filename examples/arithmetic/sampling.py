"""Generation of responses with a key-value cache, for rows whose prompts differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import KVCache, Transformer
from .tokenizer import END, PAD


@dataclass(frozen=True)
class Generation:
    """tokens: [N, S], each row its prompt, its response and padding. prompt_lengths, lengths: [N] (lengths include
    the response and its END). logprobs: [N, S], of the response tokens under the policy that sampled them, else
    0."""

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    logprobs: Tensor


@torch.no_grad()
def generate(
    model: Transformer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, generator: torch.Generator | None
) -> Generation:
    """Continue every prompt until END or `max_new_tokens`, sampled at temperature 1, or greedily without a
    generator.

    ValueError if prompt and response could exceed the model's context.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    width = longest + max_new_tokens
    if width > model.config.context:
        raise ValueError(
            f"prompts and responses of {width} tokens exceed the model's context of {model.config.context}"
        )
    tokens = torch.tensor([[*prompt, *[PAD] * (width - len(prompt))] for prompt in prompts])
    logprobs = torch.zeros(tokens.shape)
    ends = lengths.clone()
    caches = [KVCache.empty(len(prompts), model.config) for _ in range(model.config.layers)]
    rows = torch.arange(len(prompts))  # unfinished rows; the caches have only these
    seen, places = tokens[:, :longest], torch.arange(longest).expand(len(prompts), -1)
    scores = model(seen, places, caches)[rows, lengths - 1].log_softmax(-1)
    for left in reversed(range(max_new_tokens)):
        chosen = _choose(scores, generator)
        place = ends[rows]
        tokens[rows, place] = chosen
        logprobs[rows, place] = scores.gather(1, chosen[:, None])[:, 0]
        ends[rows] += 1
        going = (chosen != END).nonzero()[:, 0]
        if left == 0 or len(going) == 0:
            break
        rows = rows[going]
        for cache in caches:
            cache.keep(going)
        scores = model(chosen[going, None], place[going, None], caches)[:, 0].log_softmax(-1)
    used = int(ends.max())
    return Generation(tokens[:, :used], lengths, ends, logprobs[:, :used])


def _choose(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return scores.argmax(-1)
    return torch.multinomial(scores.exp(), 1, generator=generator)[:, 0]
