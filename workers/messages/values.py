"""Objects as a skeleton and runs of bytes, and back. Tensors and arrays anywhere in an object go as their bytes; what
is left, the skeleton, is pickled (by value where a class or function cannot be imported)."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from torch import Tensor

from dataplane.warm import FROM_BYTES, WarmMemory
from workers.errors import NotSerializableError
from workers.messages.wire import FaultForm, Form, ObjectForm, Segment, TensorForm

_ALIGN = 64
_DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True)
class Packed:
    """What `pack` made of an object. parts: one per segment, a tensor of any strides and device or a buffer."""

    form: Form
    skeleton: bytes
    segments: tuple[Segment, ...]
    parts: Sequence[Tensor | memoryview]
    nbytes: int

    def write(self, memory: Tensor) -> None:
        """Copy the values into `memory`, uint8 [at least nbytes]. Blocks until they are there, from a GPU too."""
        for segment, part in zip(self.segments, self.parts, strict=True):
            if segment.nbytes == 0:
                continue
            if isinstance(part, Tensor):
                _view(memory, segment).copy_(part.detach())
            else:
                _bytes(memory, segment)[...] = np.frombuffer(part, dtype=np.uint8)


def fault(why: str) -> Packed:
    """A message that says that there is none."""
    return Packed(FaultForm(why), b"", (), (), 0)


def pack(value: Any) -> Packed:
    """`value`, any Python object, to be sent. `NotSerializableError` if it cannot be."""
    return _pack(value, ObjectForm())


def pack_with_payload(value: Any, payload: Any) -> Packed:
    """The same with a payload beside it."""
    return _pack((value, payload), ObjectForm(piggyback=True))


def pack_tensor(tensor: Tensor) -> Packed:
    """A tensor for `recv_tensor`. TypeError for anything that is not a plain one."""
    if not isinstance(tensor, Tensor) or not _is_plain(tensor):
        raise TypeError(f"send_tensor and recv_tensor take a strided tensor, not {type(tensor).__name__}")
    segments, nbytes = _lay_out([tensor])
    return Packed(tensor_form(tensor), b"", segments, [tensor], nbytes)


def tensor_form(tensor: Tensor) -> TensorForm:
    return TensorForm(str(tensor.dtype), tuple(tensor.shape))


@dataclass
class Unpacked:
    """A message's values once they are here; `load` makes the object."""

    skeleton: bytes
    tensors: list[Tensor] = field(default_factory=list)
    buffers: list[bytearray] = field(default_factory=list)

    def load(self) -> Any:
        """The object. `NotSerializableError` if its classes cannot be had here, or its own code fails."""
        try:
            loader = _Unpickler(io.BytesIO(self.skeleton), buffers=self.buffers)
            loader.tensors = self.tensors
            return loader.load()
        except Exception as error:
            raise NotSerializableError(what="a received object", why=f"{type(error).__name__}: {error}") from error


def copy_out(
    skeleton: bytes, segments: Sequence[Segment], memory: Tensor, device: torch.device | None, warm: WarmMemory
) -> Unpacked:
    """The values in tensors and buffers of their own. What came from a GPU goes to `device`, or else to this thread's
    current one; to CPU memory where there is none. Large tensors are in memory of `warm`."""
    unpacked = Unpacked(skeleton)
    for segment in segments:
        if not segment.dtype:
            buffer = bytearray(segment.nbytes)
            if segment.nbytes:
                np.frombuffer(buffer, dtype=np.uint8)[...] = _bytes(memory, segment)
            unpacked.buffers.append(buffer)
            continue
        where = _place(device) if segment.cuda else torch.device("cpu")
        if segment.nbytes >= FROM_BYTES and where.type == "cpu":
            tensor = torch.from_numpy(warm.take(segment.nbytes)).view(_DTYPES[segment.dtype]).view(segment.shape)
        else:
            tensor = torch.empty(segment.shape, dtype=_DTYPES[segment.dtype], device=where)
        if segment.nbytes:
            tensor.copy_(_view(memory, segment))
        unpacked.tensors.append(tensor)
    settle(unpacked.tensors)
    return unpacked


def copy_into(target: Tensor, segments: Sequence[Segment], memory: Tensor) -> None:
    """The one tensor of a message into `target`, of the same shape and dtype, wherever it is and whatever its
    strides."""
    (segment,) = segments
    if segment.nbytes:
        with torch.no_grad():
            target.copy_(_view(memory, segment))
        settle([target])


def settle(tensors: Sequence[Tensor]) -> None:
    """Wait for the copies to GPUs that this thread began."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _pack(value: Any, form: Form) -> Packed:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _Pickler(file, protocol=5, buffer_callback=buffers.append)
    try:
        pickler.dump(value)
    except Exception as error:
        what = f"an object of type {type(value).__name__}"
        raise NotSerializableError(what=what, why=f"{type(error).__name__}: {error}") from error
    parts: list[Tensor | memoryview] = [*pickler.tensors, *(buffer.raw() for buffer in buffers)]
    segments, nbytes = _lay_out(parts)
    return Packed(form, file.getvalue(), segments, parts, nbytes)


def _lay_out(parts: Sequence[Tensor | memoryview]) -> tuple[tuple[Segment, ...], int]:
    segments, end = [], 0
    for part in parts:
        start = -(-end // _ALIGN) * _ALIGN
        if isinstance(part, Tensor):
            nbytes = part.numel() * part.element_size()
            segments.append(Segment(start, nbytes, str(part.dtype), tuple(part.shape), part.is_cuda))
        else:
            nbytes = part.nbytes
            segments.append(Segment(start, nbytes))
        end = start + nbytes
    return tuple(segments), end


def _place(device: torch.device | None) -> torch.device:
    return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _view(memory: Tensor, segment: Segment) -> Tensor:
    flat = memory[segment.start : segment.start + segment.nbytes]
    return flat.view(_DTYPES[segment.dtype]).view(segment.shape)


def _bytes(memory: Tensor, segment: Segment) -> Any:
    return memory[segment.start : segment.start + segment.nbytes].numpy()


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves plain tensors out, each once; other kinds of tensors take themselves apart into plain ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or not _is_plain(value):
            return None
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return place


class _Unpickler(pickle.Unpickler):
    tensors: list[Tensor]

    def persistent_load(self, place: int) -> Tensor:
        return self.tensors[place]
