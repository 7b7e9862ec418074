"""Codec of object rows: Python values as msgpack, without pickle. Decoding restores the exact type of each value.

Supported: None, bool, int (of any size), float, str, bytes, list, tuple, set, frozenset, dict and OrderedDict with str
or int keys, numpy arrays of any dtype without objects, numpy scalars (numbers, str, bytes), torch tensors of every
dtype of `types.DTYPE_BYTES` (decoded to the CPU, without grad), PIL images (decoded to `PIL.Image.Image` for any file
format). Values may be nested up to `MAX_DEPTH`. All other types, including subclasses of these types (named tuples,
enums, masked arrays), are rejected before any byte is written, because decoding could not restore them. One exception:
the list type of a `KVBatchMeta` is decoded as a plain list.

With `pickles`, which a client of an authenticated service may set (`DataPlaneConfig.objects`), rejected rows are
pickled instead. Only clients with this setting read pickled rows; other clients raise an error. The service never
unpickles.

A row is one msgpack value. Extension types: 1 tuple (msgpack array), 2 integer beyond 64 bits (two's complement,
little-endian), 3 numpy array, 4 numpy scalar, 5 torch tensor, 6 set, 7 frozenset (msgpack arrays), 8 OrderedDict
(msgpack map), 9 PIL image (msgpack array `[mode, size, palette mode, palette, transparency, raw bytes]`), 10 pickle.
3 to 5 hold a msgpack array `[dtype, shape, raw bytes]`. The dtype is the torch name, or the numpy description: a string
or a list of fields.
"""

from __future__ import annotations

import math
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.lib.format as npy
import torch
from msgspec.msgpack import Ext
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dataplane.data.meta import FixedList
from dataplane.data.tensor_memory import DTYPE_NAMES, TORCH_DTYPES, byte_view
from dataplane.errors import InternalError, UnsupportedValueError

MAX_DEPTH = 64
MAX_ROW_BYTES = 1 << 30

_TUPLE, _BIG_INT, _ARRAY, _SCALAR, _TENSOR, _SET, _FROZENSET, _ORDERED, _IMAGE, _PICKLE = range(1, 11)
_ATOMS = frozenset({type(None), bool, float})
_SCALAR_KINDS = "biufcMmSU"
_PLAIN_DTYPE = re.compile(r"[<>|=][?biufcmMSUV][0-9]*(\[[0-9a-zA-Z/]+\])?")
_HINT = (
    "Object columns support None, bool, int, float, str, bytes, list, tuple, set, dict with str or int keys, numpy "
    "arrays, torch tensors and PIL images, but no subclasses; convert the value first, or set objects='pickle' in "
    "clients of a service with a token or TLS."
)
_encoder = msgspec.msgpack.Encoder()


class _EncodeError(Exception):
    """Raised for a value that the codec does not support. `got` describes it, `hint` is the remedy; the caller adds
    field and row."""

    def __init__(self, got: str, hint: str = _HINT) -> None:
        super().__init__(got)
        self.got = got
        self.hint = hint


def encode_rows(values: Iterable[object], *, field: str, pickles: bool = False) -> tuple[bytearray, list[int]]:
    """Return (concatenated bytes of the rows, size of each row in bytes). UnsupportedValueError for an unsupported or
    too large row, naming field and row. pickles: pickle unsupported rows instead of rejecting them."""
    buffer = bytearray()
    sizes: list[int] = []
    for row, value in enumerate(values):
        start = len(buffer)
        try:
            _encoder.encode_into(_to_msgpack(value, MAX_DEPTH), buffer, start)
        except (_EncodeError, UnicodeEncodeError, OverflowError, ValueError) as error:
            if not pickles:
                # Besides `_EncodeError`, errors come from the msgpack encoder, such as for a str with a lone surrogate.
                why = error if isinstance(error, _EncodeError) else _EncodeError(f"this value ({error})")
                raise UnsupportedValueError(field=field, row=row, got=why.got, hint=why.hint) from None
            # From `start` on again, in place of what the failed attempt wrote.
            _encoder.encode_into(Ext(_PICKLE, _pickle_value(value, field, row)), buffer, start)
        sizes.append(len(buffer) - start)
        if sizes[-1] > MAX_ROW_BYTES:
            raise UnsupportedValueError(
                field=field,
                row=row,
                got=f"an object of {sizes[-1]:,} bytes",
                hint=f"The limit per row is {MAX_ROW_BYTES:,} bytes; put tensors in a separate field.",
            )
    return buffer, sizes


def encode_object(value: object, *, field: str = "value") -> bytes:
    """Return the bytes of one row. Raises the same errors as `encode_rows`."""
    return bytes(encode_rows([value], field=field)[0])


def _pickle_value(value: object, field: str, row: int) -> bytes:
    """Return the pickle of a value. UnsupportedValueError, naming field and row, if it has none."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        got = f"a value that cannot be pickled ({error})"
        hint = "Put only the parts that can be pickled."
        raise UnsupportedValueError(field=field, row=row, got=got, hint=hint) from error


def decode_object(data: bytes | bytearray | memoryview, *, pickles: bool = False) -> Any:
    """Return the value that `encode_object` encoded. Raises InternalError for any malformed bytes. pickles: unpickle
    pickled rows; otherwise they raise `UnsupportedValueError`."""
    try:
        value = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
        # RuntimeError: recursion limit of Python, or a shape that torch does not accept.
        raise InternalError(what=f"the bytes of an object row are damaged ({error})") from error
    if type(value) is not Ext:
        return value
    # The decoder returns only the extension of a pickle undecoded; see `_decode_extension`.
    if not pickles:
        hint = "Set objects='pickle' in this client to read it. This lets the programs that put objects run code here."
        raise UnsupportedValueError(field="a stored value", row=None, got="a pickled object", hint=hint)
    return pickle.loads(value.data)  # noqa: S301  # this client enabled it, and all clients are authenticated


def object_array(values: Sequence[object]) -> np.ndarray[Any, Any]:
    """Return the values as an object array `[N]`. (`np.array` would unpack values that are sequences.)"""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


# --- encoding -----------------------------------------------------------------------------------------------------


def _to_msgpack(value: Any, depth: int) -> Any:
    """Return `value` with every part that has no msgpack type replaced by an extension. `_EncodeError` if that is
    not possible. depth: the remaining levels of nesting."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is str or kind is bytes:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else _encode_big_int(value)
    if depth == 0:  # checked for all values but the plain ones above
        raise _EncodeError(f"a value nested deeper than {MAX_DEPTH} levels (or one that contains itself)")
    if kind is list or kind is FixedList:
        return [_to_msgpack(item, depth - 1) for item in value]
    if kind is dict:
        return {_check_key(key): _to_msgpack(item, depth - 1) for key, item in value.items()}
    if kind in _CONTAINERS:
        return Ext(_CONTAINERS[kind], _encoder.encode([_to_msgpack(item, depth - 1) for item in value]))
    if kind is OrderedDict:
        pairs = {_check_key(key): _to_msgpack(item, depth - 1) for key, item in value.items()}
        return Ext(_ORDERED, _encoder.encode(pairs))
    if kind is np.ndarray:
        return _encode_array(value)
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    # The last condition excludes subclasses of numpy's scalar types.
    if isinstance(value, np.generic) and value.dtype.kind in _SCALAR_KINDS and np.dtype(value.dtype.str).type is kind:
        return Ext(_SCALAR, _encoder.encode((value.dtype.str, (), value.tobytes())))
    image = _image_fields(value)
    if image is None:
        raise _EncodeError(f"a value of type {type_name(value)}")
    return Ext(_IMAGE, _encoder.encode(image))


_CONTAINERS: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}


def _image_fields(value: Any) -> tuple[Any, ...] | None:
    """Return mode, size, palette mode, palette, transparency and pixels of a PIL image; None for other values. Without
    an imported PIL, no value can be an image."""
    pil = sys.modules.get("PIL.Image")
    if pil is None or not isinstance(value, pil.Image):
        return None
    palette = value.getpalette("RGBA" if value.palette and value.palette.mode == "RGBA" else "RGB")
    # `palette` is None for a mode without a palette.
    palette_mode = None if palette is None or value.palette is None else value.palette.mode
    palette_bytes = None if palette is None else bytes(palette)
    transparency = value.info.get("transparency")
    if type(transparency) not in (int, bytes):  # a value of another type is not kept
        transparency = None
    return value.mode, list(value.size), palette_mode, palette_bytes, transparency, value.tobytes()


def _decode_image(items: list[Any]) -> Any:
    """Create the PIL image that `_image_fields` took apart."""
    from PIL import Image  # noqa: PLC0415  # PIL is optional

    mode, size, palette_mode, palette, transparency, pixels = items
    width, height = size
    image = Image.frombytes(mode, (width, height), pixels)
    if palette is not None:
        image.putpalette(palette, "RGBA" if palette_mode == "RGBA" else "RGB")
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def type_name(value: object) -> str:
    """Return the name of the value's type, with its module unless it is a builtin."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _check_key(key: Any) -> Any:
    """Return the key of a dict. `_EncodeError` for a key that msgpack cannot represent."""
    if type(key) is str or (type(key) is int and -(1 << 63) <= key < 1 << 64):
        return key
    what = f"the key {key}" if type(key) is int else f"a key of type {type_name(key)}"
    raise _EncodeError(f"a dict with {what}", "Keys must be str, or int of at most 64 bits; convert them first.")


def _encode_big_int(value: int) -> Ext:
    return Ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _encode_array(array: np.ndarray[Any, Any]) -> Ext:
    """Encode an array. `_EncodeError` for a dtype that decoding could not restore."""
    if array.dtype.hasobject:
        raise _EncodeError(
            f"a numpy array of dtype {array.dtype} inside an object", "Convert it to a list or to a numeric dtype."
        )
    description = npy.dtype_to_descr(array.dtype)
    if _parse_dtype(description) != array.dtype:
        raise _EncodeError(
            f"a numpy array of dtype {array.dtype}", "Convert it to a built-in numpy dtype or to a tensor."
        )
    return Ext(_ARRAY, _encoder.encode((description, array.shape, array.tobytes())))


def _encode_tensor(tensor: Tensor) -> Ext:
    """Encode an ordinary dense tensor. `_EncodeError` for any other kind of tensor."""
    plain = plain_tensor(tensor)
    if plain is None:
        raise _EncodeError(
            f"{describe_tensor(tensor)} inside an object",
            "Objects may contain only dense tensors of the standard dtypes; put nested tensors in a separate field.",
        )
    raw = byte_view(plain.cpu().contiguous())
    return Ext(_TENSOR, _encoder.encode((DTYPE_NAMES[plain.dtype], tuple(plain.shape), raw.data)))  # encoded as bytes


def plain_tensor(tensor: Tensor) -> Tensor | None:
    """Return `tensor` detached from autograd, with conjugation and negation resolved. Return None unless it is an
    ordinary strided tensor with memory and a dtype that columns support (sparse, quantized, meta, DTensor and other
    wrapper tensors give None)."""
    if type(tensor) is not Tensor:
        if tensor.is_nested or is_traceable_wrapper_subclass(tensor):
            return None
        tensor = tensor.as_subclass(Tensor)  # for example of a Parameter
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        return None
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach() if tensor.requires_grad else tensor


def describe_tensor(tensor: Tensor) -> str:
    """Describe the tensor's type, dtype, layout and device for an error message."""
    name = "torch.Tensor" if type(tensor) is Tensor else type_name(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.layout == torch.strided else f", layout {str(tensor.layout).removeprefix('torch.')}"
    return f"a {name} ({dtype}{layout}, on {tensor.device.type})"


# --- decoding -----------------------------------------------------------------------------------------------------


def _decode_extension(code: int, data: memoryview) -> Any:
    """Decode one msgpack extension; a pickle stays encoded. Raises ValueError if it is malformed."""
    if code in _CONSTRUCTORS:  # tuple, set, frozenset or image
        return _CONSTRUCTORS[code](_decode_array(data))
    if code == _BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _ORDERED:
        pairs = _decoder.decode(data)
        if type(pairs) is not dict:
            raise ValueError("an OrderedDict extension does not contain a map")
        return OrderedDict(pairs)
    if code == _PICKLE:  # `decode_object` unpickles it, or raises
        return Ext(code, bytes(data))
    if code not in (_ARRAY, _SCALAR, _TENSOR):
        raise ValueError(f"unknown extension {code}")
    description, shape, raw = _decode_array(data)
    if code == _TENSOR:
        return _decode_tensor(description, _check_shape(shape), raw)
    dtype = _parse_dtype(description)
    if code == _SCALAR and not dtype.itemsize:
        return dtype.type()  # an empty str or bytes, for which numpy writes one zero byte
    array: np.ndarray[Any, Any] = np.ndarray(_check_shape(shape), dtype=dtype, buffer=raw)
    if array.nbytes != len(raw):
        raise ValueError(f"{len(raw)} bytes for an array of {array.nbytes}")
    if code == _SCALAR:
        return array[()]  # the scalar in an array without dimensions
    return array.copy()  # writable, unlike `raw`


def _decode_tensor(name: object, shape: tuple[int, ...], raw: bytes) -> Tensor:
    """Create a tensor of the dtype `name` from its bytes. ValueError if they do not have the size of the tensor."""
    if not isinstance(name, str) or name not in TORCH_DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    dtype = TORCH_DTYPES[name]
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for a tensor of shape {list(shape)} and dtype {name}")
    if not raw:  # torch.frombuffer rejects an empty buffer
        return torch.empty(0, dtype=dtype).reshape(shape)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _decode_array(data: memoryview) -> list[Any]:
    items = _decoder.decode(data)
    if type(items) is not list:
        raise ValueError("an extension does not contain an array")
    return items


def _check_shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"not a shape: {shape!r}")
    return tuple(shape)


def _parse_dtype(description: Any) -> np.dtype[Any]:
    """Return the dtype for a numpy description, in which tuples may have become lists (msgpack has no tuples). Raises
    ValueError for a dtype with objects."""
    dtype = npy.descr_to_dtype(_to_numpy_description(description))
    if dtype.hasobject:
        raise ValueError(f"not a numeric dtype: {description!r}")
    return dtype


def _to_numpy_description(description: Any) -> Any:
    """Restore the tuples in a dtype description: a str, or a list of fields (name, description, optional shape), whose
    name may be a pair (title, name)."""
    if isinstance(description, str):
        if not _PLAIN_DTYPE.fullmatch(description):  # numpy parses other strings too, some as Python code
            raise ValueError(f"not a dtype such as '<f4': {description!r}")
        return description
    return [
        (tuple(name) if isinstance(name, list) else name, _to_numpy_description(kind), *map(tuple, shape))
        for name, kind, *shape in description
    ]


_CONSTRUCTORS: dict[int, Any] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset, _IMAGE: _decode_image}
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_extension)
