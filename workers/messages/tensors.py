"""Tensors as arguments of `send_tensor` and `recv_tensor`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dataplane.core import devices
from workers.messages.wire import TensorForm
from workers.transport import pickling


def form_of(tensor: Tensor) -> TensorForm:
    """Return the form of a tensor for send_tensor and recv_tensor. TypeError for anything but a plain tensor."""
    if not isinstance(tensor, Tensor) or not pickling.is_plain(tensor):
        raise TypeError(
            "send_tensor and recv_tensor expect a dense tensor (strided, not nested, not quantized, on the CPU or the "
            "accelerator), got a "
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


def record_event(target: Tensor | None) -> Any:
    """Record and return an event on the current stream of an accelerator's tensor, after which the tensor may be
    written. None for other tensors."""
    return None if target is None or target.is_cpu else devices.record_event(target.device)
