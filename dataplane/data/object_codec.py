"""The codec of object rows: Python values as msgpack, without pickle, each coming back with exactly its own type.

Carried: None, bool, int (of any size), float, str, bytes, list, tuple, set, frozenset, dict and OrderedDict with str
or int keys, numpy arrays of any dtype without objects, numpy scalars (numbers, str, bytes), torch tensors of every
dtype of `types.DTYPE_BYTES` (they come back on the CPU, without grad), PIL images (they come back as `PIL.Image.Image`,
whatever file they are of), nested in one another up to `MAX_DEPTH`. Anything else, subclasses of these types included
(named tuples, enums, masked arrays), is refused before a byte is written: it would come back as something else. (A list
of a `KVBatchMeta` comes back as a plain one.)

With `pickles`, which a client of an authenticated service may set (`DataPlaneConfig.objects`), a row that is refused is
pickled instead. Only such clients read pickled rows; for others they are an error, and the service reads none.

A row is one msgpack value. Extension types: 1 tuple (msgpack array), 2 integer beyond 64 bits (two's complement,
little-endian), 3 numpy array, 4 numpy scalar, 5 torch tensor, 6 set, 7 frozenset (msgpack arrays), 8 OrderedDict
(msgpack map), 9 PIL image (msgpack array `[mode, size, palette mode, palette, transparency, raw bytes]`), 10 pickle.
3 to 5 hold a msgpack array `[dtype, shape, raw bytes]`; a dtype is torch's name, or numpy's description of it as a list
of fields or a string.
"""

from __future__ import annotations

import math
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.lib.format as npy
import torch
from msgspec.msgpack import Ext
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dataplane.data.jagged import DTYPE_NAMES, TORCH_DTYPES, byte_view
from dataplane.data.meta import FixedList
from dataplane.errors import InternalError, UnsupportedValueError

MAX_DEPTH = 64
MAX_ROW_BYTES = 1 << 30

_TUPLE, _BIG_INT, _ARRAY, _SCALAR, _TENSOR, _SET, _FROZENSET, _ORDERED, _IMAGE, _PICKLE = range(1, 11)
_ATOMS = frozenset({type(None), bool, float})
_SCALAR_KINDS = "biufcMmSU"
_PLAIN_DTYPE = re.compile(r"[<>|=][?biufcmMSUV][0-9]*(\[[0-9a-zA-Z/]+\])?")
_HINT = (
    "Object columns carry None, bool, int, float, str, bytes, list, tuple, set, dict with str or int keys, numpy "
    "arrays, torch tensors and PIL images, exactly these types; convert the value first, or set objects='pickle' in "
    "clients of a service with a token or TLS."
)
_encoder = msgspec.msgpack.Encoder()


class _RefusedValue(Exception):
    """`got` says what cannot be carried, `hint` what to do; the caller adds field and row."""

    def __init__(self, got: str, hint: str = _HINT) -> None:
        super().__init__(got)
        self.got = got
        self.hint = hint


def encode_rows(values: Iterable[object], *, field: str, pickles: bool = False) -> tuple[bytearray, list[int]]:
    """The rows' bytes one after another, and the bytes of each. UnsupportedValueError names field, row and type.
    pickles: rows that would be refused are pickled."""
    buffer = bytearray()
    sizes: list[int] = []
    for row, value in enumerate(values):
        start = len(buffer)
        try:
            _encoder.encode_into(_checked(value, MAX_DEPTH), buffer, start)
        except (_RefusedValue, UnicodeEncodeError, OverflowError, ValueError) as error:
            if not pickles:
                refused = error if isinstance(error, _RefusedValue) else _RefusedValue(f"this value ({error})")
                raise UnsupportedValueError(field=field, row=row, got=refused.got, hint=refused.hint) from None
            _encoder.encode_into(Ext(_PICKLE, _pickled(value, field, row)), buffer, start)
        sizes.append(len(buffer) - start)
        if sizes[-1] > MAX_ROW_BYTES:
            raise UnsupportedValueError(
                field=field,
                row=row,
                got=f"an object of {sizes[-1]:,} bytes",
                hint=f"A row of an object column has at most {MAX_ROW_BYTES:,}; put tensors in a field of their own.",
            )
    return buffer, sizes


def encode_object(value: object, *, field: str = "value") -> bytes:
    """One row's bytes; raises as `encode_rows`."""
    return bytes(encode_rows([value], field=field)[0])


def _pickled(value: object, field: str, row: int) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        got, hint = f"a value that cannot be pickled ({error})", "Put what can be of it."
        raise UnsupportedValueError(field=field, row=row, got=got, hint=hint) from error


def decode_object(data: bytes | bytearray | memoryview, *, pickles: bool = False) -> Any:
    """The value that `encode_object` was given. InternalError if the bytes are no such row, whatever they are. pickles:
    what was pickled is unpickled; else it is an `UnsupportedValueError`."""
    try:
        found = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
        # RuntimeError: too deep for Python, or a shape that torch cannot have.
        raise InternalError(what=f"the bytes of an object row are damaged ({error})") from error
    if type(found) is not Ext:
        return found
    if not pickles:
        hint = "Set objects='pickle' in this client to read it, if those who put such objects may run code here."
        raise UnsupportedValueError(field="value", row=None, got="a pickled object", hint=hint)
    return pickle.loads(found.data)  # noqa: S301  # all clients of the service have shown its token, and this one asked


# --- encoding -----------------------------------------------------------------------------------------------------


def _checked(value: Any, depth: int) -> Any:
    """`value` itself, or with its parts that msgpack has no type for replaced by extensions."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is str or kind is bytes:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else _big_int(value)
    if depth == 0:
        raise _RefusedValue(f"a value nested deeper than {MAX_DEPTH} levels (or one that contains itself)")
    if kind is list or kind is FixedList:
        return [_checked(item, depth - 1) for item in value]
    if kind is dict:
        return {_checked_key(key): _checked(item, depth - 1) for key, item in value.items()}
    if kind in _CONTAINERS:
        return Ext(_CONTAINERS[kind], _encoder.encode([_checked(item, depth - 1) for item in value]))
    if kind is OrderedDict:
        pairs = {_checked_key(key): _checked(item, depth - 1) for key, item in value.items()}
        return Ext(_ORDERED, _encoder.encode(pairs))
    if kind is np.ndarray:
        return _array(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.generic) and value.dtype.kind in _SCALAR_KINDS and np.dtype(value.dtype.str).type is kind:
        return Ext(_SCALAR, _encoder.encode((value.dtype.str, (), value.tobytes())))
    image = _image(value)
    if image is None:
        raise _RefusedValue(f"a value of type {type_name(value)}")
    return Ext(_IMAGE, _encoder.encode(image))


_CONTAINERS: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}


def _image(value: Any) -> tuple[Any, ...] | None:
    """Mode, size, palette, transparency and pixels of a PIL image; None for anything else. There is none where nobody
    has imported PIL."""
    pil = sys.modules.get("PIL.Image")
    if pil is None or not isinstance(value, pil.Image):
        return None
    palette = value.getpalette("RGBA" if value.palette and value.palette.mode == "RGBA" else "RGB")
    mode = None if palette is None or value.palette is None else value.palette.mode
    clear = value.info.get("transparency")
    clear = clear if clear is None or type(clear) in (int, bytes) else None
    return value.mode, list(value.size), mode, None if palette is None else bytes(palette), clear, value.tobytes()


def _decoded_image(parts: list[Any]) -> Any:
    from PIL import Image  # noqa: PLC0415  # only where there are images

    mode, size, palette_mode, palette, clear, pixels = parts
    width, height = size
    image = Image.frombytes(mode, (width, height), pixels)
    if palette is not None:
        image.putpalette(palette, "RGBA" if palette_mode == "RGBA" else "RGB")
    if clear is not None:
        image.info["transparency"] = clear
    return image


def type_name(value: object) -> str:
    """The type's name, with its module unless it is a builtin."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _checked_key(key: Any) -> Any:
    if type(key) is str or (type(key) is int and -(1 << 63) <= key < 1 << 64):
        return key
    what = f"the key {key}" if type(key) is int else f"a key of type {type_name(key)}"
    raise _RefusedValue(f"a dict with {what}", "Keys are str, or int of 64 bits; convert them first.")


def _big_int(value: int) -> Ext:
    return Ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _array(array: np.ndarray[Any, Any]) -> Ext:
    if array.dtype.hasobject:
        raise _RefusedValue(
            f"a numpy array of dtype {array.dtype} inside an object", "Turn it into a list, or give it a number dtype."
        )
    description = npy.dtype_to_descr(array.dtype)
    if _described_dtype(description) != array.dtype:
        raise _RefusedValue(
            f"a numpy array of dtype {array.dtype}", "Convert it to a dtype of numpy's own, or a tensor."
        )
    return Ext(_ARRAY, _encoder.encode((description, array.shape, array.tobytes())))


def _tensor(tensor: Tensor) -> Ext:
    plain = plain_tensor(tensor)
    if plain is None:
        raise _RefusedValue(
            f"{describe_tensor(tensor)} inside an object",
            "Only dense tensors of the usual dtypes can be; put nested ones in a field of their own.",
        )
    data = byte_view(plain.cpu().contiguous())
    return Ext(_TENSOR, _encoder.encode((DTYPE_NAMES[plain.dtype], tuple(plain.shape), data.data)))


def plain_tensor(tensor: Tensor) -> Tensor | None:
    """`tensor` outside autograd and with conjugation and negation done; None if it is not an ordinary strided tensor
    with memory of its own and a dtype that columns carry (sparse, quantized, meta, DTensor and other wrappers are
    not)."""
    if type(tensor) is not Tensor:
        if tensor.is_nested or is_traceable_wrapper_subclass(tensor):
            return None
        tensor = tensor.as_subclass(Tensor)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        return None
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach() if tensor.requires_grad else tensor


def describe_tensor(tensor: Tensor) -> str:
    """The tensor for an error message: what sets it apart from an ordinary one."""
    name = "torch.Tensor" if type(tensor) is Tensor else type_name(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.layout == torch.strided else f", layout {str(tensor.layout).removeprefix('torch.')}"
    return f"a {name} ({dtype}{layout}, on {tensor.device.type})"


# --- decoding -----------------------------------------------------------------------------------------------------


def _extension(code: int, data: memoryview) -> Any:
    if code in _MADE:
        return _MADE[code](_parts(data))
    if code == _BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _ORDERED:
        pairs = _decoder.decode(data)
        if type(pairs) is not dict:
            raise ValueError("an OrderedDict without its items")
        return OrderedDict(pairs)
    if code == _PICKLE:
        return Ext(code, bytes(data))
    if code not in (_ARRAY, _SCALAR, _TENSOR):
        raise ValueError(f"unknown extension {code}")
    description, shape, raw = _parts(data)
    if code == _TENSOR:
        return _decoded_tensor(description, _shape(shape), raw)
    dtype = _described_dtype(description)
    if code == _SCALAR and not dtype.itemsize:
        return dtype.type()  # an empty str or bytes, of which numpy writes one zero
    array: np.ndarray[Any, Any] = np.ndarray(_shape(shape), dtype=dtype, buffer=raw)
    if array.nbytes != len(raw):
        raise ValueError(f"{len(raw)} bytes for an array of {array.nbytes}")
    return array[()] if code == _SCALAR else array.copy()


def _decoded_tensor(name: object, shape: tuple[int, ...], raw: bytes) -> Tensor:
    if not isinstance(name, str) or name not in TORCH_DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    dtype = TORCH_DTYPES[name]
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for a tensor of shape {list(shape)} and dtype {name}")
    if not raw:
        return torch.empty(0, dtype=dtype).reshape(shape)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _parts(data: memoryview) -> list[Any]:
    parts = _decoder.decode(data)
    if type(parts) is not list:
        raise ValueError("an extension without its parts")
    return parts


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"not a shape: {shape!r}")
    return tuple(shape)


def _described_dtype(description: Any) -> np.dtype[Any]:
    """The dtype of numpy's description of it, in which tuples may have become lists (msgpack has no tuples)."""
    dtype = npy.descr_to_dtype(_with_tuples(description))
    if dtype.hasobject:
        raise ValueError(f"not a dtype for numbers: {description!r}")
    return dtype


def _with_tuples(description: Any) -> Any:
    if isinstance(description, str):
        if not _PLAIN_DTYPE.fullmatch(description):  # numpy would parse others, some as Python
            raise ValueError(f"not a dtype: {description!r}")
        return description
    return [
        (tuple(name) if isinstance(name, list) else name, _with_tuples(kind), *map(tuple, shape))
        for name, kind, *shape in description
    ]


_MADE: dict[int, Any] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset, _IMAGE: _decoded_image}
_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
