"""Python objects as a pickled skeleton and runs of bytes, and back; used by messages, channels and
replica groups.

Tensors and arrays anywhere in an object are sent as their bytes, copied once. The rest, the
skeleton, is pickled (by value if the receiver cannot import a class or function). Both ends are
workers of one job and trust each other.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataplane.core import devices
from dataplane.core.buffer_pool import FROM_BYTES, BufferPool
from dataplane.data.tensor_memory import flat_bytes, tensor_from_numpy
from workers.errors import NotSerializableError
from workers.transport.by_value import cloudpickle

Bytes = npt.NDArray[np.uint8]

ALIGN_BYTES = 64
SMALL_BYTES = 1024
"""Array buffers smaller than this are pickled with their object, which is cheaper than one more run."""
_PADDING = memoryview(bytes(ALIGN_BYTES))
_DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""Every dtype of torch by its text, such as "torch.float32"."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes: a tensor's values, C-contiguous, or (if dtype is empty) a buffer of another object. start: its
    offset in the bytes of the object; on_accelerator: whether the tensor was not on the CPU."""

    start: int
    nbytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    on_accelerator: bool = False


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


decode_layout = msgspec.msgpack.Decoder(Layout).decode


@dataclass(frozen=True)
class Packed:
    """The result of `pack`. skeleton: empty for a single tensor; blocks: one per segment, a tensor of any strides and
    device or a buffer. Parts share memory with the object, so the values are those at the time of `write` or `runs`."""

    skeleton: bytes
    layout: Layout
    blocks: Sequence[Tensor | memoryview]

    @property
    def nbytes(self) -> int:
        """Size of the parts and the skeleton after them."""
        return self.layout.nbytes

    def write(self, memory: Bytes) -> None:
        """Copy everything into `memory`, [at least nbytes]. Blocks until all is copied, also from an accelerator."""
        memory[self.layout.skeleton_from : self.nbytes] = np.frombuffer(self.skeleton, np.uint8)
        for segment, block in zip(self.layout.segments, self.blocks, strict=True):
            if segment.nbytes == 0:
                continue
            run = _segment_bytes(memory, segment)
            if isinstance(block, Tensor):
                _copy_values(block, torch.from_numpy(run))
            else:
                np.copyto(run, np.frombuffer(block, np.uint8))

    def write_tensors(self, flat: Tensor) -> None:
        """Copy the parts, which are tensors, into `flat`, uint8 [at least skeleton_from], on their device. Does not
        wait for the device."""
        for segment, block in zip(self.layout.segments, self.blocks, strict=True):
            assert isinstance(block, Tensor), segment
            if segment.nbytes:
                _copy_values(block, flat[segment.start : segment.start + segment.nbytes])

    def write_flat(self, flat: Tensor) -> None:
        """Copy everything into `flat`, uint8 [at least nbytes], on any device. Blocks only for the
        CPU's part."""
        for segment, block in zip(self.layout.segments, self.blocks, strict=True):
            run = flat[segment.start : segment.start + segment.nbytes]
            if isinstance(block, Tensor):
                if segment.nbytes:
                    _copy_values(block, run)
            else:
                run.copy_(tensor_from_numpy(np.frombuffer(block, np.uint8)))
        skeleton = tensor_from_numpy(np.frombuffer(self.skeleton, np.uint8))
        flat[self.layout.skeleton_from : self.nbytes].copy_(skeleton)

    def runs(self) -> list[memoryview]:
        """Return the same bytes as consecutive buffers. Only tensors that are not contiguous or not on the CPU
        are copied."""
        buffers = []
        end = 0
        for segment, block in zip(self.layout.segments, self.blocks, strict=True):
            buffers.append(_PADDING[: segment.start - end])  # the gap before the aligned start
            buffers.append(_bytes_of(block) if isinstance(block, Tensor) else block)
            end = segment.start + segment.nbytes
        return [*buffers, memoryview(self.skeleton)]


NOTHING = Packed(b"", Layout((), 0, 0), ())
"""The parts of no object: 0 bytes."""


def pack(value: Any, what: str | None = None) -> Packed:
    """Prepare `value`, any Python object, for sending. `NotSerializableError`, which names `what` or the type, if it
    cannot be pickled."""
    if type(value) is Tensor and is_plain(value):
        return pack_tensor(value)
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def keep_in_line(buffer: pickle.PickleBuffer) -> bool:
        """Return whether to pickle the buffer in line with the skeleton. Others become parts."""
        raw = buffer.raw()
        if raw.nbytes < SMALL_BYTES:
            return True
        buffers.append(raw)
        return False

    pickler = _pickler(cloudpickle().Pickler)(file, protocol=5, buffer_callback=keep_in_line)
    try:
        pickler.dump(value)
    except Exception as error:
        description = what or f"an object of type {type(value).__name__}"
        raise NotSerializableError(what=description, why=f"{type(error).__name__}: {error}") from error
    blocks: list[Tensor | memoryview] = [*pickler.tensors, *buffers]
    return _lay_out(file.getvalue(), blocks)


def pack_tensor(tensor: Tensor) -> Packed:
    """Prepare a single plain tensor for sending."""
    return _lay_out(b"", [tensor])


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor consists only of dtype, shape and values (and autograd history, which is not sent)."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and devices.has_values(tensor)
    )


@dataclass
class Unpacked:
    """Values in this process's memory, from which `load` makes the object. skeleton: empty for a single tensor."""

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
    refer to `memory` if `own`; otherwise they are copies, large ones in memory of `pool`. Tensors from an
    accelerator of any type are put on `device`, default this thread's current accelerator, or the CPU without one.
    Blocks until all is copied."""
    unpacked = Unpacked(memory[layout.skeleton_from : layout.nbytes].tobytes())
    for segment in layout.segments:
        run = _segment_bytes(memory, segment)
        if not segment.dtype:  # a buffer of another object
            unpacked.buffers.append(run if own else _copy(run, pool))
            continue
        tensor_device = (device or devices.accelerator() or devices.CPU) if segment.on_accelerator else devices.CPU
        if segment.nbytes == 0:
            unpacked.tensors.append(torch.empty(segment.shape, dtype=_DTYPES[segment.dtype], device=tensor_device))
            continue
        if tensor_device.type == "cpu":
            flat = torch.from_numpy(run if own else _copy(run, pool))
        else:
            flat = torch.empty(segment.nbytes, dtype=torch.uint8, device=tensor_device)
            flat.copy_(torch.from_numpy(run))
        unpacked.tensors.append(flat.view(_DTYPES[segment.dtype]).view(segment.shape))
    _synchronize(unpacked.tensors)
    return unpacked


def tensors_of(layout: Layout, flat: Tensor) -> list[Tensor]:
    """Return the tensors that `Packed.write_tensors` wrote into `flat`, without a copy."""
    return [
        flat[segment.start : segment.start + segment.nbytes].view(_DTYPES[segment.dtype]).view(segment.shape)
        for segment in layout.segments
    ]


def load_flat(layout: Layout, flat: Tensor) -> Any:
    """Return the object that `Packed.write_flat` wrote into `flat`. Its tensors are views of
    `flat`, whatever device they were on; other buffers are copies. `NotSerializableError` if its
    classes cannot be imported."""
    unpacked = Unpacked(flat[layout.skeleton_from : layout.nbytes].cpu().numpy().tobytes())
    for segment in layout.segments:
        run = flat[segment.start : segment.start + segment.nbytes]
        if segment.dtype:
            unpacked.tensors.append(run.view(_DTYPES[segment.dtype]).view(segment.shape))
        else:
            unpacked.buffers.append(np.array(run.cpu().numpy()))
    return unpacked.load()


def copy_tensor(target: Tensor, tensor: Tensor) -> None:
    """Copy a tensor to `target`, of the same shape and dtype, on any device and with any strides. Blocks until it is
    copied."""
    # Tensors made in inference mode can be written only in it.
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(tensor)
    _synchronize([target])


def copy_into(target: Tensor, layout: Layout, memory: Bytes) -> None:
    """Copy the single tensor that `Packed.write` wrote into `memory` to `target`, of the same shape and dtype, on any
    device and with any strides. Blocks until it is copied."""
    (segment,) = layout.segments
    if segment.nbytes:
        flat = torch.from_numpy(_segment_bytes(memory, segment))
        copy_tensor(target, flat.view(_DTYPES[segment.dtype]).view(segment.shape))


def fresh(nbytes: int, pool: BufferPool) -> Bytes:
    """Return uninitialized bytes that belong to this process. Large ones are memory of `pool`."""
    if nbytes >= FROM_BYTES:
        return pool.take(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8).numpy()


def _copy(run: Bytes, pool: BufferPool) -> Bytes:
    copy = fresh(run.size, pool)
    torch.from_numpy(copy).copy_(torch.from_numpy(run))
    return copy


def _synchronize(tensors: Sequence[Tensor]) -> None:
    """Wait for copies to accelerators that this thread started."""
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        devices.current_stream(device).synchronize()


def _lay_out(skeleton: bytes, blocks: Sequence[Tensor | memoryview]) -> Packed:
    """Place the parts one after another, each aligned to `ALIGN_BYTES`, and the skeleton after them."""
    segments = []
    end = 0
    for block in blocks:
        start = -(-end // ALIGN_BYTES) * ALIGN_BYTES  # rounded up
        if isinstance(block, Tensor):
            nbytes = block.numel() * block.element_size()
            segments.append(Segment(start, nbytes, str(block.dtype), tuple(block.shape), not block.is_cpu))
        else:
            nbytes = block.nbytes
            segments.append(Segment(start, nbytes))
        end = start + nbytes
    return Packed(skeleton, Layout(tuple(segments), end, end + len(skeleton)), blocks)


def _segment_bytes(memory: Bytes, segment: Segment) -> Bytes:
    """Return the segment's part of `memory`, without a copy."""
    return memory[segment.start : segment.start + segment.nbytes]


def _is_raw(tensor: Tensor) -> bool:
    """Return whether the tensor's memory is its values in C order, without a pending conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy_values(tensor: Tensor, flat: Tensor) -> None:
    """Copy the values of `tensor` into `flat`, uint8 of the same size in bytes, in C order."""
    source = tensor.detach()
    if _is_raw(source):
        flat.copy_(flat_bytes(source))
    else:
        flat.view(source.dtype).view(source.shape).copy_(source)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of `tensor` in C order: its own memory if that has them on the CPU, else a copy."""
    if not tensor.numel():
        return memoryview(b"")
    source = tensor.detach()
    if not _is_raw(source):
        source = source.resolve_conj().resolve_neg().contiguous()
    data: memoryview = flat_bytes(source.cpu()).numpy().data
    return data


class _TensorsApart:
    """Lets a pickler replace each plain tensor by its index in `tensors`. Other tensors reduce to plain ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensors: list[Tensor] = []
        self._index_of: dict[int, int] = {}  # index in `tensors` by the id of the tensor

    def persistent_id(self, value: Any) -> int | None:
        """Return the index of a plain tensor, or None for any other value, which pickle then handles itself."""
        if type(value) is not Tensor or not is_plain(value):
            return None
        index = self._index_of.get(id(value))
        if index is None:
            index = self._index_of[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return index


@functools.cache
def _pickler(base: type) -> Any:
    """Return the class of picklers that keep tensors apart, on top of `base`."""
    return type("_Pickler", (_TensorsApart, base), {})


class _Unpickler(pickle.Unpickler):
    """The counterpart of `_pickler`. tensors: by the indices in the pickle; the caller sets them before `load`."""

    tensors: list[Tensor]

    def persistent_load(self, index: int) -> Tensor:
        return self.tensors[index]
