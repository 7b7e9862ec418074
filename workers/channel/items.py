"""Python objects as a head and buffers, so that the bytes of tensors and arrays are copied once, and never pickled.

A tensor by itself is described in a few bytes. Anything else is pickled (by value where the class cannot be imported
elsewhere, as Ray does it) with its tensors and arrays left out: each is a buffer. Both ends are workers of one job,
which trust each other.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from ray import cloudpickle

from workers.channel.wire import ALIGN_BYTES
from workers.errors import NotSerializableError

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 1024
"""Buffers below this are pickled with their object: cheaper than one more buffer."""

_TENSOR, _PICKLE = b"t", b"p"
_pack = msgspec.msgpack.Encoder().encode
_unpack: msgspec.msgpack.Decoder[tuple[str, tuple[int, ...], bool]] = msgspec.msgpack.Decoder(
    tuple[str, tuple[int, ...], bool]
)
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode(value: object, what: str) -> tuple[bytes, list[memoryview]]:
    """A head, and the value's buffers as they lie in memory now: nothing is copied that is contiguous already, CUDA
    tensors are copied to this host's memory. `NotSerializableError`, naming `what`, with the reason as its cause."""
    if type(value) is torch.Tensor and _is_plain(value):
        return _TENSOR + _pack(_describe(value)), [_bytes_of(value)]
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SMALL_BYTES:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    file.write(_PICKLE)
    try:
        _Pickler(file, protocol=5, buffer_callback=take).dump(value)
    except Exception as error:
        raise NotSerializableError(what=what, why=f"{type(error).__name__}: {error}") from error
    return file.getvalue(), buffers


def decode(head: bytes, buffers: Sequence[Bytes]) -> Any:
    """The value. Its tensors and arrays lie in `buffers`, writable. Tensors that were on a CUDA device go to this
    process's current one, where it has any. Raises whatever building the objects raises."""
    if head[:1] == _TENSOR:
        return _build(*_unpack.decode(head[1:]), buffers[0])
    return pickle.loads(head[1:], buffers=buffers)  # noqa: S301


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins, and the bytes of all."""
    ends = list(accumulate((-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes), initial=0))
    return ends[:-1], ends[-1]


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _build, (*_describe(obj), pickle.PickleBuffer(_bytes_of(obj)))
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is its dtype, shape and bytes, and nothing else."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype in _NAMES
        and not tensor.is_quantized
        and not tensor.requires_grad
        and tensor.device.type in ("cpu", "cuda")
    )


def _describe(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bool]:
    return _NAMES[tensor.dtype], tuple(tensor.shape), tensor.is_cuda


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _build(dtype: str, shape: tuple[int, ...], cuda: bool, buffer: Any) -> torch.Tensor:
    view = memoryview(buffer)
    if not view.nbytes:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
    else:
        tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=_DTYPES[dtype]).reshape(shape)
    return tensor.cuda() if cuda and torch.cuda.is_available() else tensor
