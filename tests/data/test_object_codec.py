from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dataplane.data.object_codec import MAX_DEPTH, decode_object, encode_object, encode_rows
from dataplane.data.tensor_memory import TORCH_DTYPES
from dataplane.errors import InternalError, UnsupportedValueError
from tests.data.columns_helpers import random_tensor, same_bits


def same(one: Any, other: Any) -> bool:
    """Equal in value and in every type, NaN being itself, arrays and tensors bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            type(a) is type(b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    return bool(one == other)


number_arrays = npst.arrays(
    dtype=st.one_of(
        npst.boolean_dtypes(),
        npst.integer_dtypes(endianness="?"),
        npst.floating_dtypes(endianness="?"),
        npst.complex_number_dtypes(endianness="?"),
        npst.datetime64_dtypes(endianness="?"),
        npst.unicode_string_dtypes(endianness="?"),
    ),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
scalars = st.sampled_from(
    [np.float64(1.5), np.float32("nan"), np.int64(-3), np.uint8(7), np.bool_(True), np.complex64(1j), np.float16(0.1)]
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 200), max_value=1 << 200),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    number_arrays,
    scalars,
)
keys = st.one_of(st.text(max_size=4), st.integers(min_value=-(1 << 63), max_value=(1 << 64) - 1))
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(value=values)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    assert same(decode_object(encode_object(value)), value)


def test_integers_that_just_fill_their_bytes() -> None:
    edges = [sign * ((1 << bits) - less) for bits in range(60, 140) for less in (0, 1) for sign in (1, -1)]
    assert same(decode_object(encode_object(edges)), edges)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_tensors_inside(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape, dtype)
    assert same(decode_object(encode_object({"t": [tensor]})), {"t": [tensor]})


def test_tensors_inside_lose_grad_strides_and_subclass_only() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    for tensor in (base.t(), base.clone().requires_grad_(), torch.nn.Parameter(base), base[:, 1], base.expand(2, 2, 3)):
        back = decode_object(encode_object(tensor))
        assert type(back) is torch.Tensor
        assert same_bits(back, tensor.detach().clone(memory_format=torch.contiguous_format))
        back += 1  # memory of its own, writable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3)[:, ::-1],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4, dtype=">i4"),
        np.array(5),
        np.zeros((0, 3)),
        np.zeros(3, dtype="V5"),
        np.array([b"a", b"bc"]),
        np.zeros(2, dtype=[("a", "<i4"), ("b", ">f8", (2, 2)), ("c", [("d", "u1")])]),
        np.zeros(2, dtype=np.dtype({"names": ["x", "y"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 24})),
        np.array(["2020-01-01", "NaT"], dtype="M8[ns]"),
        np.array([1, 2], dtype="m8[s]"),
        np.array([1.5], dtype=np.longdouble),
    ],
    ids=lambda array: str(array.dtype) + str(array.shape),
)
def test_arrays_inside(array: np.ndarray[Any, Any]) -> None:
    back = decode_object(encode_object([array]))[0]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    if array.dtype.names is None:  # between the fields of a record lie bytes that nobody defines
        assert back.tobytes() == array.tobytes()
    assert repr(back.tolist()) == repr(array.tolist())
    assert back.flags.writeable
    assert back.base is None


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset(),
        frozenset({(1, "a"), None}),
        {"in": [{"a"}, (frozenset({2}),)]},
        collections.OrderedDict([("b", 1), ("a", {1})]),
        np.str_("word"),
        np.bytes_(b"x\x00y"),
        np.bytes_(b""),
        np.str_(""),
    ],
    ids=lambda value: type(value).__name__,  # the repr of a set differs between test processes
)
def test_standard_containers_come_back(value: Any) -> None:
    back = decode_object(encode_object(value))
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | frozenset | dict)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_images_come_back(mode: str) -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new(mode, (5, 3))
    raw = bytes(range(256))
    image.frombytes(raw[: len(image.tobytes())])
    if mode == "P":
        image.putpalette(raw[:30])
        image.info["transparency"] = 2
    back = decode_object(encode_object([image]))[0]
    assert (back.mode, back.size) == (image.mode, image.size)
    assert back.tobytes() == image.tobytes()
    assert back.getpalette() == image.getpalette()
    assert back.info == image.info


class Odd:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def test_what_is_not_carried_is_pickled_by_whoever_may() -> None:
    rows = [Odd(1), {"in": Odd(2)}, {1.5: "key"}, ["plain"]]
    buffer, sizes = encode_rows(rows, field="f", pickles=True)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    encoded = [bytes(buffer[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    assert [decode_object(row, pickles=True) for row in encoded] == rows
    assert decode_object(encoded[3]) == ["plain"]
    assert encoded[3] == encode_object(["plain"])
    with pytest.raises(UnsupportedValueError, match="objects='pickle'"):
        decode_object(encoded[0])
    with pytest.raises(UnsupportedValueError, match="objects='pickle'"):
        encode_object(Odd(1))
    with pytest.raises(UnsupportedValueError, match="cannot be pickled"):
        encode_rows([lambda: 1], field="f", pickles=True)


Point = collections.namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Name(enum.StrEnum):
    A = "a"


class MyInt(int):
    pass


class MyDict(dict[str, int]):
    pass


@dataclasses.dataclass
class Data:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Point(1, 2), "Point"),
        (Color.RED, "Color"),
        (Level.LOW, "Level"),
        (Name.A, "Name"),
        (MyInt(3), "MyInt"),
        (MyDict(a=1), "MyDict"),
        (Data(), "Data"),
        (bytearray(b"x"), "bytearray"),
        (memoryview(b"x"), "memoryview"),
        (1j, "complex"),
        (decimal.Decimal(1), "decimal.Decimal"),
        (range(3), "range"),
        (len, "builtin_function_or_method"),
        (int, "type"),
        (np.array([1, "a"], dtype=object), "dtype object"),
        (np.zeros(1, dtype=[("a", "O")]), "dtype"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (np.longlong(1) if np.dtype("q").char != np.dtype("l").char else np.void(b"x"), "numpy."),
        (np.zeros(1, dtype=[("a", "i4")])[0], "numpy.void"),
        ({1.5: 1}, "key of type float"),
        ({None: 1}, "key of type NoneType"),
        ({True: 1}, "key of type bool"),
        ({(1, 2): 1}, "key of type tuple"),
        ({1 << 70: 1}, "key 1180591620717411303424"),
        ({Name.A: 1}, "key of type"),
        ({MyInt(1): 1}, "key of type"),
        ("\ud800", "surrogates"),
        ({"\udfff": 1}, "surrogates"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.nested.as_nested_tensor([torch.zeros(1)], layout=torch.jagged), "inside an object"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_any_other_type_is_refused_by_name(value: Any, told: str) -> None:
    for nested in (value, [1, (value,)], {"a": [value]}):
        with pytest.raises(UnsupportedValueError) as caught:
            encode_rows(["fine", nested], field="extras")
        assert "field 'extras', row 1" in str(caught.value)
        assert told in str(caught.value)


def nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else (value,)
    return value


def test_depth_is_bounded() -> None:
    assert decode_object(encode_object(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    loop: list[Any] = []
    loop.append(loop)
    for value in (nested(MAX_DEPTH + 1), loop):
        with pytest.raises(UnsupportedValueError, match="deeper than 64"):
            encode_object(value)


def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.data.object_codec.MAX_ROW_BYTES", 100)
    with pytest.raises(UnsupportedValueError, match="row 1"):
        encode_rows([b"x" * 90, b"x" * 101], field="x")


def test_rows_are_encoded_one_after_another() -> None:
    rows = ["a", [1, 2], None, b"\0" * 300]
    buffer, sizes = encode_rows(rows, field="x")
    assert len(buffer) == sum(sizes)
    ends = np.cumsum(sizes).tolist()
    assert [decode_object(buffer[end - size : end]) for end, size in zip(ends, sizes, strict=True)] == rows


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=80))
def test_garbage_is_a_named_error_or_a_value(data: bytes) -> None:
    try:
        decode_object(data)
    except InternalError as error:
        assert "damaged" in str(error)  # noqa: PT017


@settings(max_examples=300, deadline=None)
@given(value=values, data=st.data())
def test_flipped_bytes_are_a_named_error_or_a_value(value: Any, data: st.DataObject) -> None:
    good = bytearray(encode_object([value]))
    place = data.draw(st.integers(0, len(good) - 1))
    good[place] ^= data.draw(st.integers(1, 255))
    try:
        decode_object(good)
    except InternalError as error:
        assert "damaged" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 100_000,
        b"\xa1\xff",
        b"\xc0\xc0",
        b"\xd4\x63\x00",
        b"\xd4\x01\x00",
        b"\xd4\x03\x93",
        b"\xc7\x07\x03\x93\xa1O\x91\x01\xc4\x00",
        b"\xc7\x09\x05\x93\xa3int\x91\x01\xc4\x00",
        b"\xc7\x0a\x03\x93\xa3<f8\x91\xff\xc4\x00",
    ],
    ids=lambda data: repr(data[:6]),
)
def test_garbage_of_note(data: bytes) -> None:
    with pytest.raises(InternalError, match="damaged"):
        decode_object(data)


def test_tuples_nested_too_deep_in_damaged_bytes() -> None:
    data = b"\xc0"
    for _ in range(2000):
        data = b"\xc9" + (len(data) + 1).to_bytes(4, "big") + b"\x01" + b"\x91" + data
    with pytest.raises(InternalError, match="damaged"):
        decode_object(data)


def test_a_tensor_of_another_size_than_its_bytes_is_damage() -> None:
    whole = encode_object(torch.arange(4, dtype=torch.int16).reshape(2, 2))
    assert whole.count(b"\x92\x02\x02") == 1
    for shape in (b"\x92\x02\x01", b"\x92\x02\x03", b"\x92\x00\x02"):
        with pytest.raises(InternalError, match="damaged"):
            decode_object(whole.replace(b"\x92\x02\x02", shape))


@pytest.mark.parametrize("name", [b",i2", b"i2,", b"O", b"|O", b"(2)i", b"<i2\n", b"int16"])
def test_a_dtype_that_is_not_plain_is_damage(name: bytes) -> None:
    row = b"\x93" + bytes([0xA0 + len(name)]) + name + b"\x91\x01\xc4\x02ab"
    with pytest.raises(InternalError, match="not a dtype"):
        decode_object(b"\xc7" + bytes([len(row)]) + b"\x03" + row)
