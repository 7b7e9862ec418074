"""Plain numbers: their dtype holds each of them, and what it fits into does, too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.plain_numbers import DIGITS, LARGEST, RANGES, fits, joined_dtype, number_fits, numbers_dtype
from dataplane.core.types import DTYPE_BYTES
from dataplane.data.tensor_memory import TORCH_DTYPES, tensor_of_numbers

numbers = st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.integers(-300, 300)


@given(st.lists(numbers, min_size=1), st.lists(numbers, min_size=1), st.sampled_from(sorted(DTYPE_BYTES)))
def test_what_fits_a_dtype_converts_to_it(first: list[Any], second: list[Any], dtype: str) -> None:
    joined = joined_dtype(numbers_dtype(first), numbers_dtype(second))
    if joined is None or not fits(joined, dtype):
        return
    torch_dtype = TORCH_DTYPES[dtype]
    both = first + second
    assert all(number_fits(number, dtype) for number in both)
    converted = tensor_of_numbers(both, torch_dtype)
    assert converted.dtype is torch_dtype
    for number, stored in zip(both, converted.to(torch.complex128).real.tolist(), strict=True):
        assert math.isfinite(stored) == math.isfinite(number)
        assert isinstance(number, float) or stored == float(number), "integers are exact"


@pytest.mark.parametrize("values", [[], ["a"], [1, None], [1 << 64], [-1, 1 << 63], [0.5, 1 << 60], [1 + 2j], [[1]]])
def test_other_values_have_no_dtype(values: list[Any]) -> None:
    assert numbers_dtype(values) is None


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([True, False], "bool"),
        ([0, 255], "uint8"),
        ([-1, 255], "int16"),
        ([0.5, 2], "float16"),
        ([float("nan"), 1e300], "float64"),
        ([1, 1e5], "float32"),
        ([1 << 30, 0.5], "float64"),
    ],
)
def test_the_smallest_dtype(values: list[Any], dtype: str) -> None:
    assert numbers_dtype(values) == dtype


@pytest.mark.parametrize(
    ("numbers", "dtype", "expected"),
    [
        ("bool", "bool", True),
        ("bool", "int8", True),
        ("bool", "float8_e4m3fn", True),
        ("uint8", "bool", False),
        ("uint8", "int8", False),
        ("uint8", "int16", True),
        ("float16", "int64", False),
        ("float16", "bfloat16", True),
        ("float32", "float16", False),
        ("uint16", "float16", False),
        ("int64", "float32", False),
        ("int16", "float32", True),
        ("uint8", "bfloat16", True),
    ],
)
def test_what_a_dtype_holds(numbers: str, dtype: str, expected: bool) -> None:
    assert fits(numbers, dtype) is expected


def test_the_largest_numbers_are_those_of_torch() -> None:
    for name, largest in LARGEST.items():
        dtype = TORCH_DTYPES[name]
        real = torch.finfo(dtype.to_real() if dtype.is_complex else dtype)
        assert real.max == largest
        assert real.eps == 2.0 ** (1 - DIGITS[name])
    for name, (low, high) in RANGES.items():
        if name != "bool":
            limits = torch.iinfo(TORCH_DTYPES[name])
            assert (limits.min, limits.max) == (low, high)
