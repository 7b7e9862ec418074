""""""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import enum
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dataplane.core.schema import GLOBAL_FORWARD_PAD_SEQLEN, MICRO_BATCH_INDICES
from dataplane.data.conditions import Condition, conditions_of
from dataplane.data.meta import KVBatchMeta
from dataplane.data.object_codec import MAX_DEPTH, decode_object, encode_object, encode_rows
from dataplane.data.tensor_memory import TORCH_DTYPES
from dataplane.errors import InternalError, InvalidRequestError, UnsupportedValueError
from tests.data.columns_helpers import random_tensor, same_bits


def meta_of(count: int = 4, prefix: str = "s", **more: Any) -> KVBatchMeta:
    values: dict[str, Any] = {
        "partition_id": "train",
        "task_name": "policy",
        "sample_ids": [f"{prefix}{i}" for i in range(count)],
        "fields": ["input_ids", "reward"],
        "sequence_lengths": [10 + i for i in range(count)],
        "extra_info": {"step": 3},
        "tags": [{"group": i // 2} for i in range(count)],
    }
    meta = KVBatchMeta(**{**values, **more})
    return meta.with_handles(np.arange(count) + 100, np.arange(count) + 1000)


def rows_of(meta: KVBatchMeta) -> list[tuple[Any, ...]]:
    assert meta.sequence_lengths is not None
    assert meta.tags is not None
    assert meta.handles is not None
    rows, generations = meta.handles
    return list(
        zip(meta.sample_ids, meta.sequence_lengths, [tag["group"] for tag in meta.tags], rows, generations, strict=True)
    )


def test_all_that_is_per_sample_stays_aligned() -> None:
    meta = meta_of()
    rows = rows_of(meta)
    assert rows_of(meta.subset([2, 0, 2])) == [rows[2], rows[0], rows[2]]
    assert rows_of(meta.subset(np.array([True, False, False, True]))) == [rows[0], rows[3]]
    assert rows_of(meta.subset([False, True, False, False])) == [rows[1]]
    assert rows_of(meta.slice(1, 3)) == rows[1:3]
    assert rows_of(meta.drop(["s1", "s3"])) == [rows[0], rows[2]]
    assert rows_of(KVBatchMeta.concat([meta.slice(2, 4), meta.slice(0, 2)])) == rows[2:] + rows[:2]
    assert rows_of(meta.with_fields(["x"])) == rows
    assert rows_of(meta.subset([])) == []
    assert meta.size == len(meta) == 4


def test_methods_leave_the_meta_alone() -> None:
    meta, twin = meta_of(), meta_of()
    part = meta.subset([0, 1])
    part.extra_info["step"] = 9
    meta.with_fields(["x"]).extra_info["other"] = 1
    meta.stamp_tags([{"group": 7}] * 4)
    meta.drop(["s0"])
    assert meta == twin


def test_unknown_stays_unknown() -> None:
    bare = KVBatchMeta("train", None, ["a", "b"])
    assert bare.extra_info == {}
    for other in (bare.subset([1]), bare.slice(0, 1), bare.drop(["a"]), KVBatchMeta.concat([bare, bare])):
        assert (other.fields, other.sequence_lengths, other.tags, other.handles) == (None, None, None, None)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"sequence_lengths": [1, 2]}, ValueError, "sequence_lengths: got 2 values for 3 samples"),
        ({"sequence_lengths": [1, -2, 3]}, ValueError, "got -2"),
        ({"sequence_lengths": [1, 2.5, 3]}, ValueError, "got 2.5"),
        ({"sequence_lengths": [1, math.inf, 3]}, ValueError, "got inf"),
        ({"sequence_lengths": [1, math.nan, 3]}, ValueError, "got nan"),
        ({"sequence_lengths": [1, None, 3]}, ValueError, "got None"),
        ({"sequence_lengths": [1, "2", 3]}, ValueError, "got 2"),
        ({"sequence_lengths": [1, 10**400, 3]}, ValueError, "got 1000"),
        ({"tags": [{}]}, ValueError, "tags: got 1 values for 3 samples"),
        ({"tags": [1, 2, 3]}, TypeError, "mapping per sample"),
        ({"sample_ids": "abc"}, ValueError, "not one string"),
        ({"partition_id": 5}, TypeError, "argument partition_id: int 5"),
        ({"task_name": ["t"]}, TypeError, "argument task_name: list"),
        ({"tags": 5}, TypeError, "argument tags: int 5"),
        ({"sequence_lengths": 5}, TypeError, "argument sequence_lengths: int 5"),
        ({"extra_info": "x"}, TypeError, "argument extra_info: str 'x'"),
        ({"sample_ids": ["a", 1, "c"]}, TypeError, "row 1"),
        ({"fields": "abc"}, ValueError, "not one string"),
        ({"_rows": np.arange(3)}, ValueError, "consist of rows and generations"),
        ({"_rows": np.arange(2), "_generations": np.arange(2)}, ValueError, r"\[2\], expected \[3\]"),
    ],
)
def test_what_does_not_align_is_refused(change: dict[str, Any], error: type[Exception], told: str) -> None:
    values: dict[str, Any] = {"partition_id": "train", "task_name": None, "sample_ids": ["a", "b", "c"]}
    with pytest.raises(error, match=told):
        KVBatchMeta(**{**values, **change})


def test_rows_that_are_not_there() -> None:
    meta = meta_of()
    for indices in ([4], [-1], np.array([0, 7])):
        with pytest.raises(ValueError, match="outside a meta of 4"):
            meta.subset(indices)
    with pytest.raises(ValueError, match="integers"):
        meta.subset([0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="mask"):
        meta.subset([True, False])
    for start, end in ((-1, 2), (2, 5), (3, 2), (0, None), (1.0, 2)):
        with pytest.raises(ValueError, match="slice"):
            meta.slice(start, end)  # type: ignore[arg-type]
    for wrong in (5, [5], [meta, {}]):
        with pytest.raises(TypeError, match="argument metas: "):
            KVBatchMeta.concat(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="argument tags: int 5"):
        meta.stamp_tags(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'nobody'"):
        meta.drop(["s0", "nobody"])
    with pytest.raises(ValueError, match="not one string"):
        meta.drop("s0")


def test_concat_of_metas_that_know_different_things() -> None:
    one, other = meta_of(2, "a"), meta_of(2, "b", fields=["reward", "x"], sequence_lengths=None, tags=None)
    joined = KVBatchMeta.concat([one, other])
    assert joined.fields == ["reward"]
    assert joined.sequence_lengths is None
    assert joined.tags == [{"group": 0}, {"group": 0}, {}, {}]
    empty = KVBatchMeta("train", None, [])
    assert KVBatchMeta.concat([empty, one, empty]) == one
    assert KVBatchMeta.concat([empty]) == empty
    assert KVBatchMeta.concat([one, dataclasses.replace(other, task_name=None)]).task_name == "policy"


def test_concat_of_what_does_not_belong_together() -> None:
    meta = meta_of()
    with pytest.raises(ValueError, match="partitions 'train', 'val'"):
        KVBatchMeta.concat([meta, meta_of(partition_id="val")])
    with pytest.raises(ValueError, match="tasks 'policy', 'critic'"):
        KVBatchMeta.concat([meta, meta_of(task_name="critic")])
    with pytest.raises(ValueError, match="0 metas"):
        KVBatchMeta.concat([])
    with pytest.raises(TypeError, match="list of metas"):
        KVBatchMeta.concat(meta)  # type: ignore[arg-type]


def test_packing_and_pad_target_hold_only_for_the_rows_they_were_made_for() -> None:
    meta = meta_of(extra_info={"step": 1, MICRO_BATCH_INDICES: [[[0, 4]]], GLOBAL_FORWARD_PAD_SEQLEN: 16})
    part = meta.slice(0, 2)
    assert part.extra_info == {"step": 1, GLOBAL_FORWARD_PAD_SEQLEN: 16}
    assert meta.with_fields(["x"]).extra_info == meta.extra_info
    assert KVBatchMeta.concat([part, meta.slice(2, 4)]).extra_info == part.extra_info
    longer = dataclasses.replace(part, extra_info={"step": 1, GLOBAL_FORWARD_PAD_SEQLEN: 32, "only": 1})
    assert KVBatchMeta.concat([part, longer]).extra_info == {"step": 1, "only": 1}
    unstamped = dataclasses.replace(part, extra_info={"step": 2})
    assert KVBatchMeta.concat([part, unstamped]).extra_info == {}


def test_stamp_tags() -> None:
    meta = meta_of()
    by_row = meta.stamp_tags([{"reward": float(i)} for i in range(4)])
    assert by_row.tags == [{"group": i // 2, "reward": float(i)} for i in range(4)]
    assert meta.stamp_tags({"reward": np.arange(4.0)}) == by_row
    assert KVBatchMeta("train", None, ["a"]).stamp_tags([{"k": None}]).tags == [{"k": None}]
    with pytest.raises(ValueError, match="3 values for 4"):
        meta.stamp_tags([{}] * 3)
    with pytest.raises(ValueError, match="tag 'reward': got 2 values for 4"):
        meta.stamp_tags({"reward": [1, 2]})


def test_equality_and_pickle() -> None:
    meta = meta_of(extra_info={"array": np.arange(3), "nested": {"x": np.zeros(2)}})
    assert meta == meta_of(extra_info={"array": np.arange(3), "nested": {"x": np.zeros(2)}})
    assert meta != meta_of(extra_info={"array": np.arange(4)})
    assert meta != meta.with_handles(np.arange(4), np.arange(4)), "other samples under the same ids"
    assert meta != "meta"
    assert pickle.loads(pickle.dumps(meta)) == meta
    with pytest.raises(TypeError):
        hash(meta)
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta.task_name = "x"  # type: ignore[misc]


def test_repr_is_short() -> None:
    text = repr(meta_of(5000))
    assert len(text) < 250
    assert "5000 samples" in text
    assert "'train'" in text
    assert "policy" in text
    assert repr(KVBatchMeta("train", None, [])) == "KVBatchMeta('train', 0 samples)"


@pytest.mark.integration
def test_meta_schema_and_packing_import_no_torch() -> None:
    program = "import sys, dataplane.data.meta, dataplane.data.packing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- What a meta says by sample stays with its sample ids.


def minted() -> KVBatchMeta:
    meta = KVBatchMeta("p", "train", ["a", "b", "c"], None, [1, 2, 3], tags=[{"n": 1}, {"n": 2}, {"n": 3}])
    made = meta.with_handles(np.arange(3), np.arange(3) + 10)
    return dataclasses.replace(made, _claims=np.array([7, 7, 8]))


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": lambda listed: listed.append(listed[0]),
    "extend": lambda listed: listed.extend(listed),
    "insert": lambda listed: listed.insert(0, listed[0]),
    "remove": lambda listed: listed.remove(listed[0]),
    "pop": lambda listed: listed.pop(),
    "clear": lambda listed: listed.clear(),
    "sort": lambda listed: listed.sort(key=str),
    "reverse": lambda listed: listed.reverse(),
    "set": lambda listed: listed.__setitem__(0, listed[1]),
    "delete": lambda listed: listed.__delitem__(0),
    "add": lambda listed: listed.__iadd__(listed),
    "multiply": lambda listed: listed.__imul__(2),
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("name", ["sample_ids", "sequence_lengths", "tags"])
@pytest.mark.parametrize(
    "made",
    [
        minted,
        lambda: minted().subset([2, 0, 1]),
        lambda: KVBatchMeta.concat([minted()]),
        lambda: copy.deepcopy(minted()),
    ],
)
def test_lists_cannot_be_changed_in_place(made: Callable[[], KVBatchMeta], name: str, change: str) -> None:
    meta = made()
    before = list(getattr(meta, name))
    with pytest.raises(TypeError, match="subset, slice, drop"):
        CHANGES[change](getattr(meta, name))
    assert getattr(meta, name) == before


def test_lists_are_lists() -> None:
    meta = minted()
    assert isinstance(meta.sample_ids, list)
    assert meta.sample_ids == ["a", "b", "c"]
    mine = list(meta.sample_ids)
    mine.reverse()
    assert sorted(mine) == meta.sample_ids[:] == [*meta.sample_ids]
    assert type(meta.sample_ids[1:]) is list


@pytest.mark.parametrize("meta", [minted(), dataclasses.replace(minted(), _rows=None, _generations=None, _claims=None)])
def test_other_ids_beside_what_belongs_to_these_are_refused(meta: KVBatchMeta) -> None:
    for ids in (["c", "b", "a"], ["a", "b"], ["x", "y", "z"]):
        with pytest.raises(InvalidRequestError, match="use subset, slice or drop"):
            dataclasses.replace(meta, sample_ids=ids)
    assert dataclasses.replace(meta, sample_ids=["a", "b", "c"]) == meta
    assert dataclasses.replace(meta, sequence_lengths=[4, 5, 6]).sequence_lengths == [4, 5, 6]


def test_ids_alone_can_be_replaced() -> None:
    meta = KVBatchMeta("p", "train", ["a", "b"])
    assert dataclasses.replace(meta, sample_ids=["c"]).sample_ids == ["c"]
    told = KVBatchMeta("p", "train", ["a", "b"], None, [1, 2])
    assert dataclasses.replace(told, sample_ids=["b", "a"], sequence_lengths=[2, 1]).sequence_lengths == [2, 1]


def test_claims_go_with_their_samples() -> None:
    meta = minted()
    assert meta.subset([2, 0]).claims.tolist() == [8, 7]  # type: ignore[union-attr]
    assert meta.slice(1, 3).claims.tolist() == [7, 8]  # type: ignore[union-attr]
    assert meta.drop(["a"]).claims.tolist() == [7, 8]  # type: ignore[union-attr]
    assert KVBatchMeta.concat([meta, meta.slice(0, 1)]).claims.tolist() == [7, 7, 8, 7]  # type: ignore[union-attr]
    assert meta.with_fields(["x"]).stamp_tags({"m": [1, 2, 3]}).claims.tolist() == [7, 7, 8]  # type: ignore[union-attr]
    for again in (pickle.loads(pickle.dumps(meta)), copy.copy(meta)):
        assert again == meta
        assert again.claims.tolist() == [7, 7, 8]
    unclaimed = KVBatchMeta("p", None, ["z"]).with_handles(np.array([9]), np.array([9]))
    assert KVBatchMeta.concat([meta, unclaimed]).claims is None
    with pytest.raises(InvalidRequestError, match="shape"):
        dataclasses.replace(meta, _claims=np.array([1]))


# --- Conditions on tags, as people write them.


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("reward > 0.5", ("reward", ">", 0.5)),
        ("  reward>=-1  ", ("reward", ">=", -1)),
        ("source == math", ("source", "==", "math")),
        ("group == 3_7", ("group", "==", "3_7")),
        ("name > 'NaN'", ("name", ">", "NaN")),
        ('source != "a b = c"', ("source", "!=", "a b = c")),
        ("source == 'a b'", ("source", "==", "a b")),
        ("tag with spaces<3", ("tag with spaces", "<", 3)),
        ("done == true", ("done", "==", True)),
        ("done == True", ("done", "==", True)),
        ("done != None", ("done", "!=", None)),
        ("done <= null", ("done", "<=", None)),
        ("begin == 1", ("begin", "==", 1)),
        ("in == 1", ("in", "==", 1)),
        ("k in [1, 2]", ("k", "in", (1, 2))),
        ("k in[1]", ("k", "in", (1,))),
        ('k in ["a"]', ("k", "in", ("a",))),
        ('k in ["a", null]', ("k", "in", ("a", None))),
    ],
)
def test_a_text_is_a_condition(text: str, condition: Condition) -> None:
    assert conditions_of(text) == (condition,)
    assert conditions_of([text, ("x", "==", 1)]) == (condition, ("x", "==", 1))


NO_JSON = ["NaN", "nan", "-nan", "inf", "Infinity", "-Infinity", ".5", "+1", "1.", "007"]


def test_values_keep_their_type() -> None:
    assert [type(conditions_of(f"k == {value}")[0][2]) for value in ("1", "1.0", "true", '"1"')] == [
        int,
        float,
        bool,
        str,
    ]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("group", "'group': expected TAG OPERATOR VALUE"),
        ("", "'': expected TAG OPERATOR VALUE"),
        ("> 3", "'> 3': expected TAG OPERATOR VALUE"),
        ("a > 1 and b > 2", "pass several conditions as a list"),
        ("a == two words", "quote a text of several words"),
        ("a = 1", "expected TAG OPERATOR VALUE"),
        ("a === 1", "quote a text"),
        ("a == [1]", "quote a text"),
        *[(f"a > {word}", f"'{re.escape(word)}' is not a number of JSON") for word in NO_JSON],
        ("a in 3", "`in` needs a JSON list"),
        ("a in [[1]]", "`in` needs a JSON list"),
        ([("a", "in", "xyz")], r"where\[0\]=.*`in` needs a list of values"),
        ([("a", "~", 1)], r"where\[0\]=.*expected text such as 'reward > 0.5', or \(tag, operator, value\)"),
        (["a > 1", 3], r"where\[1\]=3: expected"),
        (("a", ">", 1), r"where=\('a', '>', 1\): .* list of conditions, such as \[\('reward'"),
        ({"a": 1}, "where={'a': 1}: expected text .* or a list of conditions"),
        (3, "where=3: expected text"),
        (None, "where=None: expected text"),
    ],
)
def test_what_is_none_is_refused_by_name(where: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        conditions_of(where)


# --- object codec


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
