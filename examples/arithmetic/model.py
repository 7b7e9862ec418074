"""A small decoder-only transformer whose weights can be sharded by heads and by hidden units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes of the model. `vocabulary` and `context` are counts of tokens."""

    vocabulary: int
    context: int
    width: int = 96
    layers: int = 2
    heads: int = 4

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass
class KVCache:
    """Keys and values of one layer, each [B, heads, context, head_width]; filled at the positions of processed
    tokens."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, rows: int, config: ModelConfig) -> KVCache:
        shape = (rows, config.heads, config.context, config.head_width)
        return cls(torch.zeros(shape), torch.zeros(shape))

    def store(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [B, heads, T, head_width] at `positions` [B, T]."""
        where = positions[:, None, :, None].expand_as(keys)
        self.keys.scatter_(2, where, keys)
        self.values.scatter_(2, where, values)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows` [B']."""
        self.keys, self.values = self.keys[rows], self.values[rows]


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` are ordered by head, so that a tensor-parallel rank can have whole
    heads; the number of heads is derived from the projection's width."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, positions: Tensor | None, cache: KVCache | None) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        q, k, v = heads  # each [B, heads, T, head_width]
        if cache is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            assert positions is not None
            cache.store(positions, k, v)
            seen = torch.arange(cache.keys.shape[2]) <= positions[:, None, :, None]  # [B, 1, T, context]
            mixed = F.scaled_dot_product_attention(q, cache.keys, cache.values, attn_mask=seen)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, positions: Tensor | None, cache: KVCache | None) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, cache)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Maps tokens [B, T] to logits [B, T, vocabulary] of the token that follows each.

    Rows are padded on the right, so that no real token attends to padding. With caches (one per layer) the tokens
    are at `positions` [B, T] and attend to the cached tokens up to there; without, they are at 0..T-1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, caches: list[KVCache] | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.tokens(tokens) + self.places(places)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, None if caches is None else caches[layer])
        return self.head(self.norm(x))


def build(config: ModelConfig, *, seed: int) -> Transformer:
    """Return a model whose initial weights depend on `seed` alone. The global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(config)
