"""Generating responses with a key-value cache, for rows whose prompts differ in length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .model import KVCache, Transformer
from .tokenizer import END, PAD


@dataclass(frozen=True)
class Generation:
    """tokens: [N, S], each row its prompt, its response and padding. prompt_lengths, lengths: [N] (lengths count the
    response too, END included). logprobs: [N, S], of the response tokens under the policy that sampled them, else 0."""

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    logprobs: Tensor


@torch.inference_mode()
def generate(
    model: Transformer, prompts: list[list[int]], *, max_new_tokens: int, generator: torch.Generator | None
) -> Generation:
    """Continue every prompt until END or `max_new_tokens`. Sampled at temperature 1, or greedily without a generator."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows, width = len(prompts), int(lengths.max()) + max_new_tokens
    if width > model.config.context:
        raise ValueError(f"prompts and responses of {width} tokens do not fit the model's {model.config.context}")
    tokens = torch.full((rows, width), PAD)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    logprobs = torch.zeros(rows, width)
    caches = [KVCache.empty(rows, model.config) for _ in range(model.config.layers)]
    ends = lengths.clone()
    active = torch.arange(rows)
    seen = tokens[:, : int(lengths.max())]
    positions = torch.arange(seen.shape[1]).expand_as(seen)
    last = lengths - 1  # where in `seen` each row's last token is
    for _ in range(max_new_tokens):
        logits = model(seen, positions, caches)[torch.arange(len(active)), last]
        scores = torch.log_softmax(logits, dim=-1)
        chosen = scores.argmax(-1) if generator is None else torch.multinomial(scores.exp(), 1, generator=generator)[:, 0]
        place = ends[active]
        tokens[active, place] = chosen
        logprobs[active, place] = scores.gather(1, chosen[:, None])[:, 0]
        ends[active] += 1
        going = (chosen != END).nonzero()[:, 0]
        if len(going) == 0:
            break
        active = active[going]
        for cache in caches:
            cache.keep(going)
        seen, positions, last = chosen[going, None], place[going, None], torch.zeros(len(going), dtype=torch.long)
    return Generation(tokens[:, : int(ends.max())], lengths, ends, logprobs[:, : int(ends.max())])
