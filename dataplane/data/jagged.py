"""Torch's side of columns: dtypes by name, nested (jagged) tensors from and to rows, packing and padding.

A jagged tensor here is a `torch.nested` tensor of layout `torch.jagged` whose ragged dimension is 1: row i is
`values[offsets[i]:offsets[i + 1]]`, or the first `lengths[i]` of it where the tensor has holes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import (
    NestedTensor,  # `layout` of a nested tensor costs 25 us, its type nothing
    nested_view_from_values_offsets_lengths,  # its public wrapper loads torch.fx and logs a warning in each process
)

from dataplane.core.row_copy import WORD_TYPES, Int64s, UInt8s, address, gather_padded
from dataplane.core.schema import TOKEN_ALIGNED_FIELDS
from dataplane.core.types import DTYPE_BYTES
from dataplane.errors import InvalidRequestError

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_CARRIERS: dict[torch.dtype, str] = {
    dtype: name if hasattr(np, name) else f"uint{8 * dtype.itemsize}" for name, dtype in TORCH_DTYPES.items()
}
"""The numpy dtype that torch takes as each dtype, or as one of its size."""
_NUMPYS = frozenset(dtype for name, dtype in TORCH_DTYPES.items() if hasattr(np, name))
"""Those that numpy has, too: its views cost a fraction of torch's."""
_TYPE_STRINGS: dict[torch.dtype, str] = {dtype: np.dtype(name).str for dtype, name in _CARRIERS.items()}

Lengths = Tensor | np.ndarray[Any, Any] | Sequence[int]
"""Row lengths as callers have them; `as_lengths` makes `[N]` int64 on the CPU of them."""


def is_jagged(value: object) -> bool:
    """Whether `value` is a nested tensor of layout `torch.jagged` with ragged dimension 1."""
    return isinstance(value, NestedTensor) and _ragged_dim(value) == 1


def _ragged_dim(nested: Tensor) -> int:
    held: Any = nested
    dim: int = held._ragged_idx  # looking for the symbolic size costs 10 us
    return dim


def as_lengths(lengths: Lengths, *, rows: int | None = None) -> Tensor:
    """`lengths` as an int64 CPU tensor `[N]`; ValueError unless they are `rows` non-negative integers."""
    tensor = torch.as_tensor(lengths).detach()
    if tensor.numel() and (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool):
        raise InvalidRequestError(f"lengths must be integers, got {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}")
    if tensor.dim() != 1:
        raise InvalidRequestError(f"lengths must be one-dimensional [N], got shape {list(tensor.shape)}")
    if rows is not None and len(tensor) != rows:
        raise InvalidRequestError(f"got {len(tensor)} lengths for {rows} rows")
    tensor = tensor.to(device="cpu", dtype=torch.int64)
    if len(tensor) and int(tensor.min()) < 0:
        raise InvalidRequestError(f"lengths must not be negative, got {int(tensor.min())}")
    return tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """`[N + 1]` offsets of rows of these lengths, on their device."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def jagged_from_values(
    values: Tensor, offsets: Tensor, *, lengths: Tensor | None = None, span: tuple[int, int] | None = None
) -> Tensor:
    """A jagged tensor over `values` (not copied). Tensors made with the same `offsets` object can be combined.

    `span` is (shortest, longest) row where the caller knows them, which spares a pass over the offsets.
    """
    if span is not None and lengths is None and _without_autograd(values) and _constructor_serves():
        return _constructed(values, offsets, span)
    shortest, longest = span if span is not None else (None, None)
    made: Tensor = nested_view_from_values_offsets_lengths(  # type: ignore[no-untyped-call]
        values, offsets, lengths, ragged_idx=1, min_seqlen=shortest, max_seqlen=longest
    )
    return made


def _without_autograd(values: Tensor) -> bool:
    return type(values) is Tensor and not values.requires_grad


def _constructed(values: Tensor, offsets: Tensor, span: tuple[int, int]) -> Tensor:
    """A jagged tensor without the view operator around its constructor: that costs 50 us and serves autograd only."""
    cache = {"min_seqlen": torch.zeros(span[0], 0), "max_seqlen": torch.zeros(span[1], 0)}
    return NestedTensor(values, offsets, _metadata_cache=cache)


@functools.cache
def _constructor_serves() -> bool:
    """Whether the constructor of this torch, no public one, makes what its view operator makes."""
    values, offsets = torch.arange(3), torch.tensor([0, 2, 3])
    wanted = nested_view_from_values_offsets_lengths(  # type: ignore[no-untyped-call]
        values, offsets, None, ragged_idx=1, min_seqlen=1, max_seqlen=2
    )
    try:
        made = _constructed(values, offsets, (1, 2))
        return vars(made).keys() == vars(wanted).keys() and bool(torch.equal((made + wanted).values(), values * 2))
    except (AttributeError, RuntimeError, TypeError):
        return False


def detached_values(nested: Tensor) -> Tensor:
    """The values buffer of a jagged tensor, outside autograd (`nested.values()` is the one within, at 50 us)."""
    held: Any = nested
    values: Tensor = held._values
    return values.detach()


def row_places(nested: Tensor) -> tuple[Int64s, Int64s]:
    """`[N]` int64 places in `values` where the rows of a jagged tensor begin, and `[N]` int64 lengths, on the host."""
    held: Any = nested
    offsets = _on_host(held._offsets)
    lengths = offsets[1:] - offsets[:-1] if held._lengths is None else _on_host(held._lengths)
    return offsets[:-1], lengths


def _on_host(integers: Tensor) -> Int64s:
    array: Int64s = integers.detach().cpu().numpy()
    return array.astype(np.int64, copy=False)


def row_starts(nested: Tensor) -> Tensor:
    """`[N]` int64 places in `values` where the rows of a jagged tensor begin, on its device."""
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]  # torch.nested has no stubs for its tensors
    return offsets[:-1].to(torch.int64)


def row_offsets(nested: Tensor) -> Tensor | None:
    """The `[N + 1]` offsets object of a jagged tensor; None if it has holes."""
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
    return offsets if nested.lengths() is None else None  # type: ignore[attr-defined]


def row_lengths(nested: Tensor) -> Tensor:
    """`[N]` int64 lengths of the rows of a jagged tensor, on its device."""
    given: Tensor | None = nested.lengths()  # type: ignore[attr-defined]
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
    return (offsets.diff() if given is None else given).to(torch.int64)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes, uint8 `[nbytes]`, of a contiguous tensor on its device, not copied."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def byte_view(tensor: Tensor) -> UInt8s:
    """The bytes `[nbytes]` of a contiguous CPU tensor, not copied; they keep its storage alive."""
    assert tensor.is_contiguous(), tensor.stride()
    plain = tensor.detach() if tensor.requires_grad else tensor
    view: UInt8s = plain.numpy().reshape(-1).view(np.uint8) if tensor.dtype in _NUMPYS else flat_bytes(plain).numpy()
    return view


def tensor_over(memory: UInt8s, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor over writable `memory`, which has exactly its bytes, aligned to the element."""
    tensor = torch.from_numpy(memory.view(_CARRIERS[dtype]).reshape(shape))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


# --- padded rows to jagged ------------------------------------------------------------------------------------


def to_nested_by_length(padded: Tensor, lengths: Lengths) -> Tensor:
    """Rows `padded[i, :lengths[i]]` of `[N, S, *inner]` as one contiguous jagged tensor on the same device.

    ValueError if a length exceeds S, is negative, or their number is not N. Gradients flow through.
    """
    counts = _checked_lengths("padded", padded, lengths)
    return _pack(padded, counts, offsets_of(counts.to(padded.device)))


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> dict[str, Any]:
    """`fields` with every padded per-token tensor `[N, S, *inner]` cut row by row to `lengths`, as jagged tensors that
    share one offsets tensor.

    Which fields are per-token is declared by `token_aligned_fields`, never guessed from shapes. All else is passed on
    as it is: other fields, values that are jagged already, lists of rows, and one-dimensional tensors, which have no
    token axis. ValueError, naming the field, if S is below the longest length or N is not the number of lengths.
    """
    return dict(_packed(fields, lengths, token_aligned_fields, copy=True))


def maybe_pack_jagged(
    fields: Mapping[str, Any],
    lengths: Lengths | None = None,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> dict[str, Any]:
    """`pack_jagged_fields` where lengths are known; without lengths, `fields` as they are."""
    if lengths is None:
        return dict(fields.items())
    return pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=token_aligned_fields)


def view_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> dict[str, Any]:
    """As `pack_jagged_fields`, but tensors on the CPU are not copied: the jagged ones are views of the padded ones,
    with holes. For a put, which reads them once."""
    return dict(_packed(fields, lengths, token_aligned_fields, copy=False))


def _packed(
    fields: Mapping[str, Any], lengths: Lengths, names: Collection[str], *, copy: bool
) -> list[tuple[str, Any]]:
    counts = as_lengths(lengths)
    shared: dict[torch.device, Tensor] = {}
    packed: list[tuple[str, Any]] = []
    for name, value in fields.items():
        if name in names and isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = tensor_from_numpy(value)
        if name in names and isinstance(value, Tensor) and not value.is_nested and value.dim() > 1:
            _checked_lengths(name, value, counts)
            if copy or value.device.type != "cpu":
                if value.device not in shared:
                    shared[value.device] = offsets_of(counts.to(value.device))
                value = _pack(value, counts, shared[value.device])
            else:
                value = _view_rows(value.detach(), counts)
        packed.append((name, value))
    return packed


def _checked_lengths(name: str, padded: Tensor, lengths: Lengths) -> Tensor:
    if padded.is_nested or padded.dim() < 2:
        shape = "a nested tensor" if padded.is_nested else f"shape {list(padded.shape)}"
        raise InvalidRequestError(f"field {name!r}: expected a padded tensor [N, S, ...], got {shape}")
    counts = as_lengths(lengths)
    if len(counts) != len(padded):
        raise InvalidRequestError(f"field {name!r}: {len(padded)} rows, but {len(counts)} lengths")
    longest = int(counts.max()) if len(counts) else 0
    if longest > padded.shape[1]:
        raise InvalidRequestError(
            f"field {name!r}: rows are {padded.shape[1]} wide, narrower than the longest sample of {longest} tokens"
        )
    return counts


def _pack(padded: Tensor, counts: Tensor, offsets: Tensor) -> Tensor:
    sizes = counts.tolist()
    if sizes:
        values = torch.cat([row[:size] for row, size in zip(padded.unbind(), sizes, strict=True)])
    else:
        values = padded.reshape(0, *padded.shape[2:])
    return jagged_from_values(values, offsets, span=(min(sizes, default=0), max(sizes, default=0)))


def _view_rows(padded: Tensor, counts: Tensor) -> Tensor:
    """Jagged with holes over the memory of `padded` [N, S, *inner], where its rows lie a whole number of elements
    apart (any slice of a contiguous tensor along dim 1 does); copied first where not."""
    rows, width = padded.shape[:2]
    step = padded.stride(1)
    if not padded.numel():
        padded, apart = padded.contiguous(), width
        flat = padded.reshape(rows * width, *padded.shape[2:])
    elif step > 0 and padded.stride(0) > 0 and padded.stride(0) % step == 0:
        apart = padded.stride(0) // step
        flat = padded.as_strided(((rows - 1) * apart + width, *padded.shape[2:]), padded.stride()[1:])
    else:
        apart = width
        flat = padded.reshape(rows * width, *padded.shape[2:])
    offsets = torch.arange(rows + 1, dtype=torch.int64) * apart
    offsets[-1] = len(flat)
    return jagged_from_values(flat, offsets, lengths=counts)


# --- jagged to padded -----------------------------------------------------------------------------------------


def pad_nested(nested: Tensor, pad_value: float | bool = 0, *, width: int = 0) -> Tensor:
    """`[N, S, *inner]` on the same device, S the longest row or `width` if that is more than 0; rest is `pad_value`.

    ValueError if `width` is below the longest row, or the dtype cannot hold `pad_value`.
    """
    lengths = row_lengths(nested).cpu()
    size = padded_width(lengths.numpy(), width)
    values = detached_values(nested)
    starts = row_starts(nested)
    pad_with = _pad_rows if values.is_cpu else _pad_by_mask
    return pad_with(values, starts, lengths, size, pad_value)


def _pad_rows(values: Tensor, starts: Tensor, lengths: Tensor, size: int, pad_value: Any) -> Tensor:
    inner = values.shape[1:]
    values = values.contiguous()
    out = torch.empty((len(lengths), size, *inner), dtype=values.dtype)
    unit = values.element_size() * inner.numel()
    gather_padded(
        [byte_view(values)],
        None,
        starts.numpy() * unit,
        lengths.numpy() * unit,
        byte_view(out).reshape(len(lengths), size * unit),
        pad_element(pad_value, values.dtype),
    )
    return out


def _pad_by_mask(values: Tensor, starts: Tensor, lengths: Tensor, size: int, pad_value: Any) -> Tensor:
    """The same with a few kernels for all rows together, for accelerators."""
    out = values.new_empty((len(lengths), size, *values.shape[1:]))
    out.fill_(pad_scalar(pad_value, values.dtype))
    places = torch.arange(size, device=values.device)
    filled = places < lengths.to(values.device)[:, None]
    out[filled] = values[(starts[:, None] + places)[filled]]
    return out


def not_per_token(columns: Mapping[str, Int64s], tokens: Sequence[int] | None) -> frozenset[str]:
    """Which of these jagged columns, given the lengths of their rows `[N]`, have not one element per token of the
    samples: neither does `schema.TOKEN_ALIGNED_FIELDS` name them, nor are their rows as long as `tokens` `[N]` (where
    None, as the first column that it names). None of them where nothing tells the tokens."""
    named = (lengths for name, lengths in columns.items() if name in TOKEN_ALIGNED_FIELDS)
    counts = next(named, None) if tokens is None else tokens
    if counts is None:
        return frozenset()
    return frozenset(
        name
        for name, lengths in columns.items()
        if name not in TOKEN_ALIGNED_FIELDS and not np.array_equal(lengths, counts)
    )


def padded_width(lengths: Int64s, width: int) -> int:
    """The width that rows of `lengths` are padded to: `width`, or the longest row when `width` is 0."""
    longest = int(lengths.max()) if len(lengths) else 0
    if width and width < longest:
        raise InvalidRequestError(f"cannot pad to {width}: the longest row has {longest}")
    if width < 0:
        raise InvalidRequestError(f"cannot pad to {width}")
    return width or longest


def pad_scalar(pad_value: Any, dtype: torch.dtype) -> bool | int | float | complex:
    """`pad_value` as a Python number that `dtype` holds without wrapping or becoming infinite; ValueError otherwise."""
    try:
        value = pad_value.item() if hasattr(pad_value, "item") else pad_value
    except (RuntimeError, ValueError) as error:
        shape = f"{type(pad_value).__name__} of shape {list(pad_value.shape)}"
        raise InvalidRequestError(f"a pad value is a number, got a {shape}") from error
    if not isinstance(value, bool | int | float | complex):
        raise InvalidRequestError(f"a pad value is a number, got {type(pad_value).__name__}")
    if not _holds(dtype, value):
        raise InvalidRequestError(f"pad value {str(value)[:40]} does not fit {DTYPE_NAMES[dtype]}")
    if dtype.is_complex:
        return value
    return float(value) if dtype.is_floating_point else int(value)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _holds(dtype: torch.dtype, value: bool | int | float | complex) -> bool:
    """Whether the value is within the range of `dtype`: only what is infinite becomes infinite."""
    if dtype.is_complex or dtype.is_floating_point:
        parts = (value.real, value.imag) if dtype.is_complex else (value,)
        return all(not isinstance(part, complex) and _is_within(part, dtype) for part in parts)
    if isinstance(value, complex):
        return False
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return value == value and low <= value <= high and int(value) == value


def _is_within(number: int | float, dtype: torch.dtype) -> bool:
    if number in (math.inf, -math.inf):
        return dtype != torch.float8_e4m3fn  # it has none
    return number != number or abs(number) <= torch.finfo(dtype).max


def pad_element(pad_value: Any, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """The bits of `pad_value` in `dtype`, as a read-only 0-d array of the numpy dtype of `row_copy.WORD_TYPES`."""
    scalar = pad_scalar(pad_value, dtype)
    return _bits_of(repr(scalar), scalar, dtype)


@functools.lru_cache(maxsize=256)
def _bits_of(text: str, scalar: bool | int | float | complex, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """`text` tells apart the zeros, which are equal."""
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        element = torch.from_numpy(np.array([scalar], dtype=DTYPE_NAMES[dtype]))
    else:
        element = torch.tensor([scalar]).to(dtype) if dtype.itemsize == 1 else torch.tensor([scalar], dtype=dtype)
    bits = byte_view(element).view(WORD_TYPES[dtype.itemsize]).reshape(())
    bits.flags.writeable = False
    return bits


# --- other --------------------------------------------------------------------------------------------------------


def select_rows(nested: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices` [M] of a jagged tensor, in that order, as a contiguous one of their own."""
    indices = indices.to(device=nested.device, dtype=torch.int64)
    lengths = row_lengths(nested)[indices]
    starts = row_starts(nested)[indices]
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    places = torch.arange(total, device=nested.device)
    places += torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return jagged_from_values(nested.values()[places], offsets)


def response_from_nested(full: Tensor, response_mask: Tensor) -> Tensor:
    """What a model said *about* each response token, from its outputs over the whole sequence.

    `full` is jagged with rows `[prompt_i + response_i, *inner]`: output t of a row speaks of token t + 1 (log-probs,
    values, logits). `response_mask` is jagged with rows `[response_i]`; only its row lengths r_i are looked at. Row i
    of the result is `full_i[len_i - r_i - 1 : len_i - 1]`: the response slice, shifted left by one, so that its element
    j speaks of response token j. The result shares the offsets of `response_mask` (unless that has holes) and can be
    combined with it. Gradients flow through.

    ValueError if the rows differ in number, or a response leaves no token before it.
    """
    for name, value in (("full", full), ("response_mask", response_mask)):
        if not is_jagged(value):
            raise InvalidRequestError(f"{name}: expected a nested tensor of layout torch.jagged, got {_shown(value)}")
    if full.size(0) != response_mask.size(0):
        raise InvalidRequestError(f"full has {full.size(0)} rows, response_mask {response_mask.size(0)}")
    wanted, have = row_lengths(response_mask), row_lengths(full)
    short = (wanted > 0) & (wanted >= have)
    if bool(short.any()):
        row = int(short.nonzero()[0])
        raise InvalidRequestError(
            f"row {row}: a response of {int(wanted[row])} tokens in a sequence of {int(have[row])}; "
            "at least one token must come before it"
        )
    offsets = row_offsets(response_mask)
    if offsets is None or int(offsets[0]):
        offsets = offsets_of(wanted)
    total = int(wanted.sum())
    starts = row_starts(full) + have - wanted - 1
    places = torch.arange(total, device=full.device)
    places += torch.repeat_interleave(starts - offsets[:-1], wanted, output_size=total)
    return jagged_from_values(full.values()[places], offsets)


def _shown(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def tensor_from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A CPU tensor of the array's values: over its memory where torch can, else over a copy (byte order, alignment,
    negative strides). Meant for reading: memory that numpy marks read-only must not be written through it."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    strides_fit = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if not strides_fit or array.__array_interface__["data"][0] % array.itemsize:
        array = array.copy()
    return torch.from_numpy(array if array.flags.writeable else writable_alias(array))


class _Window:
    """Memory of `owner` offered under the array interface as writable, so that torch takes it without a warning."""

    def __init__(self, place: int, shape: tuple[int, ...], typestr: str, owner: object, strides: Any = None) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (place, False),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "version": 3,
        }


def writable_alias(array: np.ndarray[Any, Any], owner: object = None) -> np.ndarray[Any, Any]:
    """The same memory as an array that does not say it is read-only (writing through it may crash the process).

    torch has no read-only tensors and warns about read-only arrays. The result, and every tensor over it, keeps `owner`
    (the array itself by default) alive through its storage.
    """
    place, shape, typestr, strides = address(array), array.shape, array.dtype.str, array.strides
    return np.asarray(_Window(place, shape, typestr, array if owner is None else owner, strides))


def tensor_at(place: int, shape: tuple[int, ...], dtype: torch.dtype, owner: object) -> Tensor:
    """A CPU tensor over the memory at address `place`, aligned to the element. Its storage is that memory alone and
    keeps `owner` alive, which keeps the memory; if that is read-only, writing to the tensor crashes the process."""
    tensor = torch.from_numpy(np.asarray(_Window(place, shape, _TYPE_STRINGS[dtype], owner)))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
