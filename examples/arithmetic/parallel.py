"""Data and tensor parallelism of the transformer on a device mesh of axes "dp" and "tp" (torch.distributed).

Each block's attention and feed-forward layers are sharded over "tp" as DTensors: `qkv` and `up` by their outputs
(heads, hidden units), `out` and `down` by their inputs, so that a block needs two all-reduces forward and two
backward. The other layers (embeddings, norms, head) are small and replicated. Over "dp" weights are replicated and
gradients summed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .model import Transformer

PLAN = {
    "blocks.*.attention.qkv": ColwiseParallel,
    "blocks.*.attention.out": RowwiseParallel,
    "blocks.*.up": ColwiseParallel,
    "blocks.*.down": RowwiseParallel,
}


def shard(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Shard `model`, whose weights are the same on every rank, over the "tp" axis of `mesh`, in place."""
    if model.config.heads % mesh["tp"].size():
        raise ValueError(
            f"{model.config.heads} heads cannot be split evenly over {mesh['tp'].size()} tensor-parallel ranks"
        )
    parallelize_module(model, mesh["tp"], {name: style() for name, style in PLAN.items()})
    return model


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the unsharded weights. A collective over "tp"."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.state_dict().items()
    }


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of `source` to `target`, which is sharded in the same way."""
    with torch.no_grad():
        for mine, other in zip(target.parameters(), source.parameters(), strict=True):
            local(mine).copy_(local(other))


def sum_over(mesh: DeviceMesh, axis: str, values: Tensor) -> Tensor:
    """Sum `values` over an axis of the mesh, in place."""
    dist.all_reduce(values, group=mesh.get_group(axis))
    return values


def sum_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sum all gradients over "dp", in one message."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    flat = sum_over(mesh, "dp", torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def clip_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh, *, max_norm: float) -> float:
    """Return the norm of all gradients together, and scale them down to at most `max_norm`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = torch.zeros(())
    replicated = torch.zeros(())
    for gradient in gradients:
        square = local(gradient).square().sum()
        if isinstance(gradient, DTensor) and any(placement.is_shard() for placement in gradient.placements):
            sharded += square
        else:
            replicated += square
    norm = float((sum_over(mesh, "tp", sharded) + replicated).sqrt())
    if norm > max_norm:
        for gradient in gradients:
            local(gradient).mul_(max_norm / norm)
    return norm
