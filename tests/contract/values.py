"""Values of every kind, and what "bit for bit" means for them."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes as `dtype` (NaN payloads included); bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, row-major."""
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def rows_of(value: Any) -> list[torch.Tensor]:
    """The rows of a nested tensor, a list or a dense tensor."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return list(value.unbind())
    return list(value)


def same_rows(left: Any, right: Any) -> bool:
    """Row by row `same`."""
    a, b = rows_of(left), rows_of(right)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
