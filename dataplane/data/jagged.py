"""Nested (jagged) tensors: conversion from and to rows, packing and padding.

A jagged tensor here is a `torch.nested` tensor of layout `torch.jagged` whose ragged dimension is 1. Row i is
`values[offsets[i]:offsets[i + 1]]`, or the first `lengths[i]` elements of that if the tensor has holes.
"""

from __future__ import annotations

import functools
import math
import operator
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import (
    NestedTensor,  # an isinstance check is free; reading `layout` of a nested tensor takes 25 us
    nested_view_from_values_offsets_lengths,  # its public wrapper loads torch.fx and logs a warning in each process
)

from dataplane.core import cuda_copy
from dataplane.core.row_copy import WORD_TYPES, Int64s, gather_padded
from dataplane.core.schema import TOKEN_ALIGNED_FIELDS
from dataplane.data.tensor_memory import DTYPE_NAMES, byte_view, fill, tensor_from_numpy
from dataplane.errors import InvalidRequestError

MOST_TOKENS = 1 << 40
"""Limit for numbers of tokens that a caller passes. Larger stops of token ranges are this."""

Lengths = Tensor | np.ndarray[Any, Any] | Sequence[int]
"""Row lengths as callers pass them; `as_lengths` converts them to an int64 CPU tensor `[N]`."""


def is_jagged(value: object) -> bool:
    """Return whether `value` is a nested tensor of layout `torch.jagged` with ragged dimension 1."""
    return isinstance(value, NestedTensor) and _ragged_dim(value) == 1


def _ragged_dim(nested: Tensor) -> int:
    """Return the number of the dimension whose size differs between rows."""
    untyped: Any = nested
    dim: int = untyped._ragged_idx  # finding the symbolic size in the shape takes 10 us
    return dim


def as_lengths(lengths: Lengths, *, rows: int | None = None) -> Tensor:
    """Convert `lengths` to an int64 CPU tensor `[N]`. ValueError unless they are non-negative integers, `rows` of
    them if that is given."""
    tensor = torch.as_tensor(lengths).detach()
    if tensor.numel() and (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool):
        raise InvalidRequestError(f"lengths must be integers, got {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}")
    if tensor.dim() != 1:
        raise InvalidRequestError(f"lengths must be one-dimensional [N], got shape {list(tensor.shape)}")
    if rows is not None and len(tensor) != rows:
        raise InvalidRequestError(f"got {len(tensor)} lengths for {rows} rows; pass one per row")
    tensor = tensor.to(device="cpu", dtype=torch.int64)
    if len(tensor) and int(tensor.min()) < 0:
        raise InvalidRequestError(
            f"lengths must not be negative, got {int(tensor.min())} in row {int(tensor.argmin())}"
        )
    return tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the `[N + 1]` int64 offsets of rows of these lengths, on the device of `lengths`."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def jagged_from_values(
    values: Tensor, offsets: Tensor, *, lengths: Tensor | None = None, span: tuple[int, int] | None = None
) -> Tensor:
    """Create a jagged tensor over `values`, without a copy. Tensors with the same `offsets` object can be combined.

    lengths: the row lengths of a tensor with holes, else None. span: (shortest, longest) row length if the caller knows
    them; this saves a pass over the offsets.
    """
    if span is not None and lengths is None and _needs_no_autograd(values) and _constructor_matches():
        return _construct(values, offsets, span)
    shortest, longest = span if span is not None else (None, None)
    nested: Tensor = nested_view_from_values_offsets_lengths(  # type: ignore[no-untyped-call]
        values, offsets, lengths, ragged_idx=1, min_seqlen=shortest, max_seqlen=longest
    )
    return nested


def _needs_no_autograd(values: Tensor) -> bool:
    return type(values) is Tensor and not values.requires_grad


def _construct(values: Tensor, offsets: Tensor, span: tuple[int, int]) -> Tensor:
    """Create a jagged tensor without the view operator, which takes 50 us and is needed for autograd only."""
    # torch keeps both row lengths as the size of an empty tensor.
    shortest, longest = span
    cache = {"min_seqlen": torch.zeros(shortest, 0), "max_seqlen": torch.zeros(longest, 0)}
    return NestedTensor(values, offsets, _metadata_cache=cache)


@functools.cache
def _constructor_matches() -> bool:
    """Return whether this torch's private constructor gives the same result as its view operator."""
    values = torch.arange(3)
    offsets = torch.tensor([0, 2, 3])
    expected = nested_view_from_values_offsets_lengths(  # type: ignore[no-untyped-call]
        values, offsets, None, ragged_idx=1, min_seqlen=1, max_seqlen=2
    )
    try:
        nested = _construct(values, offsets, (1, 2))
        if vars(nested).keys() != vars(expected).keys():
            return False
        return bool(torch.equal((nested + expected).values(), values * 2))
    except (AttributeError, RuntimeError, TypeError):
        return False


def detached_values(nested: Tensor) -> Tensor:
    """Return the values buffer of a jagged tensor, detached from autograd (`nested.values()` takes 50 us)."""
    untyped: Any = nested
    values: Tensor = untyped._values
    return values.detach()


def host_starts_and_lengths(nested: Tensor) -> tuple[Int64s, Int64s]:
    """Return the `[N]` int64 start indices into `values` and `[N]` int64 lengths of a jagged tensor, on the host."""
    untyped: Any = nested
    offsets = _on_host(untyped._offsets)
    lengths = offsets[1:] - offsets[:-1] if untyped._lengths is None else _on_host(untyped._lengths)
    return offsets[:-1], lengths


def _on_host(integers: Tensor) -> Int64s:
    array: Int64s = integers.detach().cpu().numpy()
    return array.astype(np.int64, copy=False)


def row_starts(nested: Tensor) -> Tensor:
    """Return the `[N]` int64 start indices of the rows of a jagged tensor into `values`, on its device."""
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]  # torch.nested has no stubs for its tensors
    return offsets[:-1].to(torch.int64)


def row_offsets(nested: Tensor) -> Tensor | None:
    """Return the `[N + 1]` offsets object of a jagged tensor, or None if it has holes."""
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
    return offsets if nested.lengths() is None else None  # type: ignore[attr-defined]


def row_lengths(nested: Tensor) -> Tensor:
    """Return the `[N]` int64 row lengths of a jagged tensor, on its device."""
    lengths: Tensor | None = nested.lengths()  # type: ignore[attr-defined]  # None: the tensor has no holes
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
    return (offsets.diff() if lengths is None else lengths).to(torch.int64)


# --- padded rows to jagged ------------------------------------------------------------------------------------


def to_nested_by_length(padded: Tensor, lengths: Lengths) -> Tensor:
    """Pack rows `padded[i, :lengths[i]]` of `[N, S, *inner]` into a contiguous jagged tensor on the same device.

    Raises ValueError if a length exceeds S or is negative, or the number of lengths is not N. Differentiable.
    """
    row_sizes = _check_lengths("padded", padded, lengths)
    return _pack(padded, row_sizes, offsets_of(row_sizes.to(padded.device)))


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> dict[str, Any]:
    """Return `fields` with every padded per-token tensor `[N, S, *inner]` packed to `lengths`, as jagged tensors that
    share one offsets tensor.

    `token_aligned_fields` declares which fields are per-token; shapes are not used to guess. Other fields, values that
    are already jagged, lists of rows, and one-dimensional tensors (they have no token axis) are passed through.
    Raises ValueError, naming the field, if S is below the longest length or N is not the number of lengths.
    """
    return dict(_pack_fields(fields, lengths, token_aligned_fields, copy=True))


def maybe_pack_jagged(
    fields: Mapping[str, Any],
    lengths: Lengths | None = None,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> dict[str, Any]:
    """Call `pack_jagged_fields` if lengths are given; otherwise return the same values in a new dict."""
    if lengths is None:
        return dict(fields.items())
    return pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=token_aligned_fields)


def view_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> dict[str, Any]:
    """Do the same as `pack_jagged_fields`, but without copying CPU tensors: their jagged tensors are views of the
    padded ones, with holes. Meant for a put, which reads them once."""
    return dict(_pack_fields(fields, lengths, token_aligned_fields, copy=False))


def _pack_fields(
    fields: Mapping[str, Any], lengths: Lengths, names: Collection[str], *, copy: bool
) -> list[tuple[str, Any]]:
    """Pack the padded fields among `names`, with a copy or as views; pass other fields through. Numeric numpy arrays
    among `names` count as tensors."""
    row_sizes = as_lengths(lengths)
    shared_offsets: dict[torch.device, Tensor] = {}
    packed: list[tuple[str, Any]] = []
    for name, value in fields.items():
        if name in names and isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = tensor_from_numpy(value)
        if name in names and isinstance(value, Tensor) and not value.is_nested and value.dim() > 1:
            _check_lengths(name, value, row_sizes)  # for its errors only
            if copy or value.device.type != "cpu":  # views are for CPU tensors only
                if value.device not in shared_offsets:
                    shared_offsets[value.device] = offsets_of(row_sizes.to(value.device))
                value = _pack(value, row_sizes, shared_offsets[value.device])
            else:
                value = _view_rows(value.detach(), row_sizes)
        packed.append((name, value))
    return packed


def _check_lengths(name: str, padded: Tensor, lengths: Lengths) -> Tensor:
    """Return `lengths` as an int64 CPU tensor. InvalidRequestError, naming the field, if `padded` cannot have rows of
    these lengths."""
    if padded.is_nested or padded.dim() < 2:
        got = "a nested tensor" if padded.is_nested else f"shape {list(padded.shape)}"
        raise InvalidRequestError(f"field {name!r}: expected a padded tensor [N, S, ...], got {got}")
    row_sizes = as_lengths(lengths)
    if len(row_sizes) != len(padded):
        raise InvalidRequestError(
            f"field {name!r}: got {len(row_sizes)} lengths for {len(padded)} rows; pass one per row"
        )
    longest = int(row_sizes.max()) if len(row_sizes) else 0
    if longest > padded.shape[1]:
        raise InvalidRequestError(
            f"field {name!r}: rows have width {padded.shape[1]}, but the longest sample has {longest} tokens"
        )
    return row_sizes


def _pack(padded: Tensor, row_sizes: Tensor, offsets: Tensor) -> Tensor:
    """Copy the first `row_sizes[i]` elements of each row into a jagged tensor. offsets: those of `row_sizes`."""
    sizes = row_sizes.tolist()
    if sizes:
        values = torch.cat([row[:size] for row, size in zip(padded.unbind(), sizes, strict=True)])
    else:
        values = padded.reshape(0, *padded.shape[2:])
    return jagged_from_values(values, offsets, span=(min(sizes, default=0), max(sizes, default=0)))


def _view_rows(padded: Tensor, row_sizes: Tensor) -> Tensor:
    """Return a jagged tensor with holes over the memory of `padded` [N, S, *inner]. `padded` is copied first unless its
    row stride is a multiple of its element stride, as in any slice of a contiguous tensor along dim 1."""
    # `flat` [M, *inner] is the values buffer; `row_distance` is the distance of two row starts in it, in elements.
    rows, width = padded.shape[:2]
    step = padded.stride(1)
    if not padded.numel():  # its strides have no meaning
        padded = padded.contiguous()
        row_distance = width
        flat = padded.reshape(rows * width, *padded.shape[2:])
    elif step > 0 and padded.stride(0) > 0 and padded.stride(0) % step == 0:
        # A view. `flat` also has the elements between the rows, which no row uses.
        row_distance = padded.stride(0) // step
        flat = padded.as_strided(((rows - 1) * row_distance + width, *padded.shape[2:]), padded.stride()[1:])
    else:  # other strides, as of a transposed or expanded tensor: `reshape` copies
        row_distance = width
        flat = padded.reshape(rows * width, *padded.shape[2:])
    offsets = torch.arange(rows + 1, dtype=torch.int64) * row_distance
    offsets[-1] = len(flat)  # the last row may end before the next row would start
    return jagged_from_values(flat, offsets, lengths=row_sizes)


# --- jagged to padded -----------------------------------------------------------------------------------------


def pad_nested(nested: Tensor, pad_value: float | bool = 0, *, width: int = 0) -> Tensor:
    """Pad to `[N, S, *inner]` with `pad_value`, on the same device. S is `width` if that is more than 0, else the
    longest row. Raises ValueError if `width` is below the longest row, or the dtype cannot hold `pad_value`.
    """
    starts, lengths = host_starts_and_lengths(nested)
    size = padded_width(int(lengths.max(initial=0)), width)
    values = detached_values(nested)
    if values.is_cpu:
        return _pad_on_cpu(values, starts, lengths, size, pad_value)
    if values.is_cuda and cuda_copy.copy_kernel() is not None:
        return _pad_by_kernel(values, starts, lengths, size, pad_value)
    return _pad_by_mask(values, row_starts(nested), row_lengths(nested), size, pad_value)


def _pad_on_cpu(values: Tensor, starts: Int64s, lengths: Int64s, size: int, pad_value: Any) -> Tensor:
    """Return `[N, size, *inner]`: row i is the `lengths[i]` elements of `values` from `starts[i]`
    on, then padding."""
    inner = values.shape[1:]
    values = values.contiguous()
    out = torch.empty((len(lengths), size, *inner), dtype=values.dtype)
    unit_bytes = values.element_size() * inner.numel()  # of one element of a row
    gather_padded(
        [byte_view(values)],
        None,  # all rows are in this one buffer
        starts * unit_bytes,
        lengths * unit_bytes,
        byte_view(out).reshape(len(lengths), size * unit_bytes),
        pad_element(pad_value, values.dtype),
    )
    return out


def _pad_by_kernel(values: Tensor, starts: Int64s, lengths: Int64s, size: int, pad_value: Any) -> Tensor:
    """As `_pad_on_cpu`, for `values` on a CUDA device: one kernel fills with padding, a second
    copies the rows."""
    inner = values.shape[1:]
    values = values.contiguous()
    out = torch.empty((len(lengths), size, *inner), dtype=values.dtype, device=values.device)
    fill(out, pad_element(pad_value, values.dtype))
    unit_bytes = values.element_size() * inner.numel()  # of one element of a row
    sources = values.data_ptr() + starts * unit_bytes
    targets = out.data_ptr() + np.arange(len(lengths), dtype=np.int64) * (size * unit_bytes)
    cuda_copy.copy([(sources, targets, lengths * unit_bytes)], values.device)
    return out


def _pad_by_mask(values: Tensor, starts: Tensor, lengths: Tensor, size: int, pad_value: Any) -> Tensor:
    """As `_pad_on_cpu`, for tensors (`starts` included) on any accelerator: a few kernels for all
    rows together."""
    out = values.new_empty((len(lengths), size, *values.shape[1:]))
    out.fill_(pad_scalar(pad_value, values.dtype))
    columns = torch.arange(size, device=values.device)
    filled = columns < lengths.to(values.device)[:, None]  # [N, size]: False where `out` has padding
    out[filled] = values[(starts[:, None] + columns)[filled]]
    return out


def not_per_token(columns: Mapping[str, Sequence[int]], tokens: Sequence[int] | None) -> frozenset[str]:
    """Return the jagged columns that do not have one element per token. `columns` maps names to the
    lengths of their rows.

    These are the columns that `schema.TOKEN_ALIGNED_FIELDS` does not name, and whose row lengths differ from `tokens`
    and from those of every column that the schema names. Empty if there is neither."""
    others = [name for name in columns if name not in TOKEN_ALIGNED_FIELDS]
    references = [list(lengths) for name, lengths in columns.items() if name in TOKEN_ALIGNED_FIELDS]
    if tokens is not None:
        references.append(list(tokens))
    return frozenset([name for name in others if references and list(columns[name]) not in references])


def checked_width(pad_to_seqlen: Any) -> int:
    """Return the width as an int. InvalidRequestError unless it is an integer from 0 to `MOST_TOKENS`."""
    try:
        width = operator.index(pad_to_seqlen)
    except TypeError:
        width = -1
    if not 0 <= width <= MOST_TOKENS:
        raise InvalidRequestError(
            f"pad_to_seqlen={reprlib.repr(pad_to_seqlen)}: expected an integer from 0 to {MOST_TOKENS:,}"
        )
    return width


def checked_pads(pad_value_dict: Any) -> Mapping[str, Any]:
    """Return the pad values by column (None: none). InvalidRequestError for another type."""
    if pad_value_dict is not None and not isinstance(pad_value_dict, Mapping):
        shown = reprlib.repr(pad_value_dict)
        expected = "a mapping of column names to pad values, or None"
        raise InvalidRequestError(f"pad_value_dict={shown}: expected {expected}")
    return pad_value_dict or {}


def padded_width(longest: int, width: int) -> int:
    """Return the width to pad rows to, of which the longest has `longest` elements: `width`, or
    `longest` if `width` is 0. InvalidRequestError if `width` is negative, or too small."""
    if width and width < longest:
        raise InvalidRequestError(
            f"cannot pad to length {width}: the longest row has {longest} elements; pad to at least {longest}"
        )
    if width < 0:
        raise InvalidRequestError(f"cannot pad to length {width}: expected 0 or more")
    return width or longest


def pad_scalar(pad_value: Any, dtype: torch.dtype) -> bool | int | float | complex:
    """Convert `pad_value` to a Python number. ValueError if it is not a number, or `dtype` cannot represent it."""
    try:
        value = pad_value.item() if hasattr(pad_value, "item") else pad_value
    except (RuntimeError, ValueError) as error:
        shape = f"{type(pad_value).__name__} of shape {list(pad_value.shape)}"
        raise InvalidRequestError(f"the pad value must be a number, got a {shape}") from error
    if not isinstance(value, bool | int | float | complex):
        raise InvalidRequestError(f"the pad value must be a number, got {type(pad_value).__name__}")
    if not _can_represent(dtype, value):
        raise InvalidRequestError(
            f"pad value {str(value)[:40]} cannot be represented as {DTYPE_NAMES[dtype]}, the dtype of the column"
        )
    if dtype.is_complex:
        return value
    return float(value) if dtype.is_floating_point else int(value)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _can_represent(dtype: torch.dtype, value: bool | int | float | complex) -> bool:
    """Return whether `dtype` can represent `value`: exactly for integers and bool, else by its range (`_is_within`)."""
    if dtype.is_complex or dtype.is_floating_point:
        components = (value.real, value.imag) if dtype.is_complex else (value,)
        # A part is complex only if `dtype` is real and `value` is not.
        return all(not isinstance(component, complex) and _is_within(component, dtype) for component in components)
    if isinstance(value, complex):
        return False
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return low <= value <= high and int(value) == value  # in this order: NaN and infinities are out of range


def _is_within(number: int | float, dtype: torch.dtype) -> bool:
    """Whether a floating-point or complex `dtype` has the number in its range. NaN counts as within."""
    if number in (math.inf, -math.inf):
        return dtype != torch.float8_e4m3fn  # this dtype has no infinity
    return number != number or abs(number) <= torch.finfo(dtype).max


_ZERO = {itemsize: np.zeros((), word) for itemsize, word in WORD_TYPES.items()}
"""The bits of 0 in any dtype, by its size."""
for _element in _ZERO.values():
    _element.flags.writeable = False


def pad_element(pad_value: Any, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Return the bits of `pad_value` in `dtype` as a read-only 0-d array of the dtype in `row_copy.WORD_TYPES`."""
    if type(pad_value) is int and not pad_value:
        return _ZERO[dtype.itemsize]
    scalar = pad_scalar(pad_value, dtype)
    return _bits_of(repr(scalar), scalar, dtype)


@functools.lru_cache(maxsize=256)
def _bits_of(text: str, scalar: bool | int | float | complex, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Compute the bits of `scalar`. `text` is part of the cache key because 0.0 and -0.0 compare equal."""
    # torch.tensor cannot create each dtype directly: wide unsigned ones go through numpy, 8-bit ones are converted.
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        element = torch.from_numpy(np.array([scalar], dtype=DTYPE_NAMES[dtype]))
    elif dtype.itemsize == 1:
        element = torch.tensor([scalar]).to(dtype)
    else:
        element = torch.tensor([scalar], dtype=dtype)
    bits = byte_view(element).view(WORD_TYPES[dtype.itemsize]).reshape(())
    bits.flags.writeable = False
    return bits


# --- selected rows --------------------------------------------------------------------------------------------


def select_rows(nested: Tensor, indices: Tensor) -> Tensor:
    """Copy the rows `indices` [M] of a jagged tensor, in that order, into a contiguous jagged tensor."""
    indices = indices.to(device=nested.device, dtype=torch.int64)
    lengths = row_lengths(nested)[indices]
    starts = row_starts(nested)[indices]
    return _gather_rows(nested, starts, lengths, offsets_of(lengths))


def _gather_rows(nested: Tensor, starts: Tensor, lengths: Tensor, offsets: Tensor) -> Tensor:
    """Return a jagged tensor with these `offsets`. Row i is `nested.values()[starts[i]:][:lengths[i]]`, copied."""
    total = int(offsets[-1])
    # Element j of row i goes from `starts[i] + j` to `offsets[i] + j`.
    sources = torch.arange(total, device=nested.device)
    sources += torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return jagged_from_values(nested.values()[sources], offsets)


def response_from_nested(full: Tensor, response_mask: Tensor) -> Tensor:
    """Extract the model outputs that refer to response tokens from outputs over the whole sequence.

    `full` is jagged with rows `[prompt_i + response_i, *inner]`: output t of a row refers to token t + 1 (log-probs,
    values, logits). `response_mask` is jagged with rows `[response_i]`; only its row lengths r_i are used. Row i of
    the result is `full_i[len_i - r_i - 1 : len_i - 1]`: the response slice, shifted left by one, so that element j
    refers to response token j. The result shares the offsets of `response_mask` (unless that has holes, or does not
    start at 0) and can be combined with it. Differentiable.

    Raises ValueError if the numbers of rows differ, or if no token precedes a response.
    """
    for name, value in (("full", full), ("response_mask", response_mask)):
        if not is_jagged(value):
            got = _describe(value)
            raise InvalidRequestError(f"{name}: expected a nested tensor of layout torch.jagged, got {got}")
    if full.size(0) != response_mask.size(0):
        raise InvalidRequestError(
            f"full has {full.size(0)} rows, but response_mask has {response_mask.size(0)} rows: they must match"
        )
    response_lengths = row_lengths(response_mask)
    lengths = row_lengths(full)
    too_short = (response_lengths > 0) & (response_lengths >= lengths)
    if bool(too_short.any()):
        row = int(too_short.nonzero()[0])
        raise InvalidRequestError(
            f"row {row}: the response has {int(response_lengths[row])} tokens, the full sequence {int(lengths[row])}; "
            "at least one token must precede the response"
        )
    offsets = row_offsets(response_mask)
    if offsets is None or int(offsets[0]):  # the mask has holes, or its first row does not start at 0
        offsets = offsets_of(response_lengths)
    starts = row_starts(full) + lengths - response_lengths - 1
    return _gather_rows(full, starts, response_lengths, offsets)


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
