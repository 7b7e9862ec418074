"""Tensors as arguments of `send_tensor` and `recv_tensor`."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.messages.wire import TensorForm
from workers.transport import pickling


def form_of(tensor: Tensor) -> TensorForm:
    """Return the form of a tensor for send_tensor and recv_tensor. TypeError for anything but a plain tensor."""
    if not isinstance(tensor, Tensor) or not pickling.is_plain(tensor):
        raise TypeError(
            "send_tensor and recv_tensor expect a dense tensor (strided, not nested, not quantized, on CPU or CUDA), "
            "got a "
            f"{type(tensor).__name__}{f' ({tensor.layout}, {tensor.device})' if isinstance(tensor, Tensor) else ''}"
        )
    return TensorForm(str(tensor.dtype), tuple(tensor.shape))


def check_target(tensor: Tensor) -> None:
    """Raise ValueError for a tensor with overlapping elements, such as an expanded tensor."""
    span = 0  # distance of the first and the last element in the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # From the smallest stride on, a dimension must step over all elements of the dimensions before it.
        if tensor.numel() and size > 1:  # otherwise it has no steps
            if stride <= span:
                raise ValueError(
                    f"recv_tensor cannot write into a tensor of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}: some of its elements overlap in memory; pass a clone()"
                )
            span += stride * (size - 1)


def current_device() -> torch.device | None:
    """Return the GPU on which received tensors arrive, None for the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def record_event(target: Tensor | None) -> torch.cuda.Event | None:
    """Record and return an event on the current stream of a GPU tensor, after which the tensor may be written. None
    for other tensors."""
    if target is None or not target.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(target.device))
    return event
