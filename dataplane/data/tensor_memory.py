"""Tensors and their memory: dtypes by name, tensors viewed as bytes, and CPU tensors over given memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataplane.core.row_copy import UInt8s, address
from dataplane.core.types import DTYPE_BYTES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_CARRIERS: dict[torch.dtype, str] = {
    dtype: name if hasattr(np, name) else f"uint{8 * dtype.itemsize}" for name, dtype in TORCH_DTYPES.items()
}
"""The numpy dtype that carries each torch dtype: the same one if numpy has it, else an unsigned one of equal size."""
_NUMPY_DTYPES = frozenset(dtype for name, dtype in TORCH_DTYPES.items() if hasattr(np, name))
"""Dtypes that numpy has too: a numpy view costs a fraction of a torch view."""
_TYPE_STRINGS: dict[torch.dtype, str] = {dtype: np.dtype(name).str for dtype, name in _CARRIERS.items()}


def flat_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as uint8 `[nbytes]`, on its device."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def byte_view(tensor: Tensor) -> UInt8s:
    """View a contiguous CPU tensor as a uint8 array `[nbytes]`. The view keeps the tensor's storage alive."""
    assert tensor.is_contiguous(), tensor.stride()
    plain = tensor.detach() if tensor.requires_grad else tensor
    view: UInt8s
    if tensor.dtype in _NUMPY_DTYPES:
        view = plain.numpy().reshape(-1).view(np.uint8)
    else:
        view = flat_bytes(plain).numpy()
    return view


_SIGNED = {1: "i1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}
_FILLED_AS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By element size, the dtypes of numpy and of torch in which elements are written, which keep every bit pattern."""


def fill(tensor: Tensor, element: np.ndarray[Any, Any]) -> None:
    """Set all elements of a contiguous tensor to the bits of `element` (0-d), which has the size of its elements."""
    tensor.view(_FILLED_AS[element.itemsize]).fill_(element.view(_SIGNED[element.itemsize]).item())


def compacted(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor if it is a view of less than half of its storage, else itself."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        return tensor
    if 2 * tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes():
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def once_each(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `change` with a cache, so that columns with a common tensor, such as offsets, still
    share its result."""
    results: dict[int, tuple[Tensor, Tensor]] = {}
    """By id: the tensor, whose id is not used again while it is here, and its result."""

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in results:
            results[id(tensor)] = (tensor, change(tensor))
        return results[id(tensor)][1]

    return changed


def tensor_over(memory: UInt8s, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Create a CPU tensor over writable `memory`, which must have exactly its size and element alignment."""
    return _as_dtype(memory.view(_CARRIERS[dtype]).reshape(shape), dtype)


def tensor_from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Create a CPU tensor over the array's memory, or over a copy if torch does not support its byte order, alignment
    or negative strides. Treat the tensor as read-only if numpy marks the memory as read-only."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    strides_fit = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if not strides_fit or array.__array_interface__["data"][0] % array.itemsize:  # or the address is not aligned
        array = array.copy()
    return torch.from_numpy(array if array.flags.writeable else writable_alias(array))


def tensor_of_numbers(numbers: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return plain numbers, which all fit the dtype, as a tensor `[N]`."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor([float(number) for number in numbers], dtype=torch.float64).to(dtype)
    return torch.from_numpy(np.array([int(number) for number in numbers], dtype=DTYPE_NAMES[dtype]))


class _Window:
    """Exposes memory of `owner` through the array interface as writable, so that torch accepts it without a warning.
    The array over it keeps the window, and so `owner`, alive. start: the address of the memory. typestr: the numpy
    dtype string. strides: in bytes (None: contiguous)."""

    def __init__(self, start: int, shape: tuple[int, ...], typestr: str, owner: object, strides: Any = None) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (start, False),  # (address, whether it is read-only)
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "version": 3,
        }


def writable_alias(array: np.ndarray[Any, Any], owner: object = None) -> np.ndarray[Any, Any]:
    """Return an array over the same memory that is marked writable. Writing through it may crash the process.

    torch has no read-only tensors and warns about read-only arrays. The result, and every tensor over it, keeps `owner`
    (by default the array itself) alive through its storage.
    """
    start = address(array)
    shape = array.shape
    typestr = array.dtype.str
    strides = array.strides
    return np.asarray(_Window(start, shape, typestr, array if owner is None else owner, strides))


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, owner: object) -> Tensor:
    """Create a CPU tensor over the memory at `address`, which must be aligned to the element. The storage covers
    exactly this memory and keeps `owner`, which owns the memory, alive. If the memory is read-only, writing to the
    tensor crashes the process."""
    return _as_dtype(np.asarray(_Window(address, shape, _TYPE_STRINGS[dtype], owner)), dtype)


def _as_dtype(carrier: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(carrier)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
