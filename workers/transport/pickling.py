"""Python objects as a pickled skeleton and runs of bytes, and back; used by messages and channels.

Tensors and arrays anywhere in an object are sent as their bytes, copied once. The rest, the skeleton, is pickled (by
value if the receiver cannot import a class or function). Both ends are workers of one job and trust each other.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from ray import cloudpickle
from torch import Tensor

from dataplane.core.buffer_pool import FROM_BYTES, BufferPool
from dataplane.data.tensor_memory import flat_bytes
from workers.errors import NotSerializableError

Bytes = npt.NDArray[np.uint8]

ALIGN_BYTES = 64
SMALL_BYTES = 1024
"""Array buffers smaller than this are pickled with their object, which is cheaper than one more run."""
_PADDING = memoryview(bytes(ALIGN_BYTES))
_DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes: a tensor's values, C-contiguous, or (if dtype is empty) a buffer of another object."""

    start: int
    nbytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    cuda: bool = False


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Positions of the parts of an object in its `nbytes` bytes: the segments, then the skeleton."""

    segments: tuple[Segment, ...]
    skeleton_from: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: int

    def check(self) -> None:
        """ValueError if a part exceeds the bytes."""
        for segment in self.segments:
            if segment.start < 0 or segment.nbytes < 0 or segment.start + segment.nbytes > self.nbytes:
                raise ValueError(
                    f"segment of {segment.nbytes} bytes at {segment.start} exceeds an object of {self.nbytes} bytes"
                )
        if self.skeleton_from > self.nbytes:
            raise ValueError(f"skeleton at {self.skeleton_from} exceeds an object of {self.nbytes} bytes")


@dataclass(frozen=True)
class Packed:
    """The result of `pack`. skeleton: empty for a single tensor; parts: one per segment, a tensor of any strides and
    device or a buffer. Parts share memory with the object, so the values are those at the time of `write` or `runs`."""

    skeleton: bytes
    layout: Layout
    parts: Sequence[Tensor | memoryview]

    @property
    def nbytes(self) -> int:
        """Size of the parts and the skeleton after them."""
        return self.layout.nbytes

    def write(self, memory: Bytes) -> None:
        """Copy everything into `memory`, [at least nbytes]. Blocks until all is copied, also from a GPU."""
        memory[self.layout.skeleton_from : self.nbytes] = np.frombuffer(self.skeleton, np.uint8)
        for segment, part in zip(self.layout.segments, self.parts, strict=True):
            if segment.nbytes == 0:
                continue
            run = _run(memory, segment)
            if isinstance(part, Tensor):
                _fill(torch.from_numpy(run), part)
            else:
                np.copyto(run, np.frombuffer(part, np.uint8))

    def runs(self) -> list[memoryview]:
        """Return the same bytes as consecutive buffers. Only tensors that are not contiguous or are on a GPU are
        copied."""
        found, end = [], 0
        for segment, part in zip(self.layout.segments, self.parts, strict=True):
            found.append(_PADDING[: segment.start - end])
            found.append(_bytes_of(part) if isinstance(part, Tensor) else part)
            end = segment.start + segment.nbytes
        return [*found, memoryview(self.skeleton)]


NOTHING = Packed(b"", Layout((), 0, 0), ())


def pack(value: Any, what: str | None = None) -> Packed:
    """Prepare `value`, any Python object, for sending. `NotSerializableError`, which names `what` or the type, if it
    cannot be pickled."""
    if type(value) is Tensor and is_plain(value):
        return pack_tensor(value)
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Return whether to pickle the buffer in line with the skeleton."""
        raw = buffer.raw()
        if raw.nbytes < SMALL_BYTES:
            return True
        buffers.append(raw)
        return False

    pickler = _Pickler(file, protocol=5, buffer_callback=keep)
    try:
        pickler.dump(value)
    except Exception as error:
        named = what or f"an object of type {type(value).__name__}"
        raise NotSerializableError(what=named, why=f"{type(error).__name__}: {error}") from error
    parts: list[Tensor | memoryview] = [*pickler.tensors, *buffers]
    return _packed(file.getvalue(), parts)


def pack_tensor(tensor: Tensor) -> Packed:
    """Prepare a single plain tensor for sending."""
    return _packed(b"", [tensor])


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor consists only of dtype, shape and values (and autograd history, which is not sent)."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


@dataclass
class Unpacked:
    """Values in this process's memory, from which `load` makes the object."""

    skeleton: bytes
    tensors: list[Tensor] = field(default_factory=list)
    buffers: list[Bytes] = field(default_factory=list)

    def load(self) -> Any:
        """Return the object. `NotSerializableError` if its classes cannot be imported or its own code fails."""
        if not self.skeleton:
            return self.tensors[0]
        try:
            loader = _Unpickler(io.BytesIO(self.skeleton), buffers=self.buffers)
            loader.tensors = self.tensors
            return loader.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise NotSerializableError(what="a received object", why=why, verb="loaded") from error


def unpack(
    layout: Layout,
    memory: Bytes,
    pool: BufferPool,
    *,
    own: bool,
    device: torch.device | None = None,
) -> Unpacked:
    """Return the parts of an object that `Packed.write` wrote into `memory`, [at least nbytes]. Tensors and buffers
    refer to `memory` if `own`, and are copies otherwise; large ones use memory of `pool`. Tensors from a GPU are put
    on `device`, default this thread's current GPU, or on the CPU if there is none. Blocks until all is copied."""
    unpacked = Unpacked(memory[layout.skeleton_from : layout.nbytes].tobytes())
    for segment in layout.segments:
        run = _run(memory, segment)
        if not segment.dtype:
            unpacked.buffers.append(run if own else _copied(run, pool))
            continue
        place = _device_or_default(device) if segment.cuda else torch.device("cpu")
        if segment.nbytes == 0:
            unpacked.tensors.append(torch.empty(segment.shape, dtype=_DTYPES[segment.dtype], device=place))
            continue
        if place.type == "cpu":
            flat = torch.from_numpy(run if own else _copied(run, pool))
        else:
            flat = torch.empty(segment.nbytes, dtype=torch.uint8, device=place)
            flat.copy_(torch.from_numpy(run))
        unpacked.tensors.append(flat.view(_DTYPES[segment.dtype]).view(segment.shape))
    _synchronize(unpacked.tensors)
    return unpacked


def copy_into(target: Tensor, layout: Layout, memory: Bytes) -> None:
    """Copy the tensor of a message into `target`, of the same shape and dtype, on any device and with any strides."""
    (segment,) = layout.segments
    if segment.nbytes:
        flat = torch.from_numpy(_run(memory, segment))
        with torch.no_grad():
            target.copy_(flat.view(_DTYPES[segment.dtype]).view(segment.shape))
        _synchronize([target])


def fresh(nbytes: int, pool: BufferPool) -> Bytes:
    """Return uninitialized bytes that belong to this process."""
    if nbytes >= FROM_BYTES:
        return pool.take(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8).numpy()


def _copied(run: Bytes, pool: BufferPool) -> Bytes:
    own = fresh(run.size, pool)
    torch.from_numpy(own).copy_(torch.from_numpy(run))
    return own


def _synchronize(tensors: Sequence[Tensor]) -> None:
    """Wait for copies to GPUs that this thread started."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _packed(skeleton: bytes, parts: Sequence[Tensor | memoryview]) -> Packed:
    """Lay out the parts, each aligned to `ALIGN_BYTES`, followed by the skeleton."""
    segments, end = [], 0
    for part in parts:
        start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        if isinstance(part, Tensor):
            nbytes = part.numel() * part.element_size()
            segments.append(Segment(start, nbytes, str(part.dtype), tuple(part.shape), part.is_cuda))
        else:
            nbytes = part.nbytes
            segments.append(Segment(start, nbytes))
        end = start + nbytes
    return Packed(skeleton, Layout(tuple(segments), end, end + len(skeleton)), parts)


def _run(memory: Bytes, segment: Segment) -> Bytes:
    return memory[segment.start : segment.start + segment.nbytes]


def _is_raw(tensor: Tensor) -> bool:
    """Return whether the tensor's memory is its values in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _fill(flat: Tensor, tensor: Tensor) -> None:
    """Copy the values of `tensor` into `flat`, uint8 of the same size in bytes."""
    source = tensor.detach()
    if _is_raw(source):
        flat.copy_(flat_bytes(source))
    else:
        flat.view(source.dtype).view(source.shape).copy_(source)


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    source = tensor.detach()
    if not _is_raw(source):
        source = source.resolve_conj().resolve_neg().contiguous()
    data: memoryview = flat_bytes(source.cpu()).numpy().data
    return data


def _device_or_default(device: torch.device | None) -> torch.device:
    return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Replaces each plain tensor by its index. Other kinds of tensors reduce to plain ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or not is_plain(value):
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
