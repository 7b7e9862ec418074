from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from dataplane.core.schema import GLOBAL_FORWARD_PAD_SEQLEN, MICRO_BATCH_INDICES
from dataplane.data.meta import KVBatchMeta


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
    for start, end in ((-1, 2), (2, 5), (3, 2)):
        with pytest.raises(ValueError, match="slice"):
            meta.slice(start, end)
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
