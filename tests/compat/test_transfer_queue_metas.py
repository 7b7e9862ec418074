"""What the metas of the adapter for TransferQueue do without a service: choosing, joining and looking at samples."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from dataplane.compat.transfer_queue import BatchMeta, KVBatchMeta
from dataplane.compat.transfer_queue.settings import warn_once


def batch(indexes: list[int], partition: str = "p", **extra: Any) -> BatchMeta:
    rows = [torch.zeros(index + 1) for index in indexes]
    fields: dict[str, Any] = {
        "score": torch.zeros(len(indexes)),
        "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
    }
    made = BatchMeta(indexes, [partition] * len(indexes), extra_info=extra)
    made.add_fields(TensorDict(fields, batch_size=len(indexes)))
    made.update_custom_meta([{"index": index} for index in indexes])
    return made


def keyed(keys: list[str], partition: str = "p", **extra: Any) -> KVBatchMeta:
    return KVBatchMeta(keys, [{"key": key} for key in keys], partition, ["ids"], extra)


def test_keys_are_chosen_ordered_and_cut() -> None:
    meta = keyed(["a", "b", "c"], seed=1)
    assert (meta.size, len(meta)) == (3, 3)
    chosen = meta.select_keys(["c", "a"])
    assert (chosen.keys, chosen.tags) == (["c", "a"], [{"key": "c"}, {"key": "a"}])
    assert (chosen.partition_id, chosen.fields, chosen.extra_info) == ("p", ["ids"], {"seed": 1})
    meta.reorder([2, 0, 1])
    assert meta.keys == [tag["key"] for tag in meta.tags] == ["c", "a", "b"]
    assert [part.keys for part in meta.chunk(2)] == [["c", "a"], ["b"]]
    assert [len(part) for part in meta.chunk(5)] == [1, 1, 1, 0, 0]
    assert str(meta) == "KVBatchMeta(size=3, field_names=['ids'], extra_info={'seed': 1})"


def test_keys_are_joined() -> None:
    joined = KVBatchMeta.concat([keyed(["a"], seed=1), KVBatchMeta(), keyed(["b"], top=torch.ones(2))])
    assert (joined.keys, joined.tags) == (["a", "b"], [{"key": "a"}, {"key": "b"}])
    assert joined.extra_info is not None
    assert joined.extra_info.keys() == {"seed", "top"}
    assert KVBatchMeta.concat([]).keys == []


def test_tags_of_keys_are_copies() -> None:
    tags: list[dict[str, Any]] = [{"turns": [1]}]
    meta = KVBatchMeta(["a"], tags)
    tags[0]["turns"].append(2)
    assert meta.tags == [{"turns": [1]}]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: KVBatchMeta(["a"], []), "same length.*1 keys and 0 tags"),
        (lambda: KVBatchMeta(["a", "a"], [{}, {}]), "duplicated keys"),
        (lambda: keyed(["a"]).select_keys(["a", "a"]), "duplicate keys"),
        (lambda: keyed(["a"]).reorder([0, 0]), "2 indexes, which does not match the 1 samples"),
        (lambda: keyed(["a", "b"]).reorder([0, 0]), "duplicate indexes"),
        (lambda: KVBatchMeta.concat([keyed(["a"]), keyed(["b"], "q")]), "Partition do not match: 'p' and 'q'"),
        (lambda: KVBatchMeta.concat([keyed(["a"], seed=1), keyed(["b"], seed=2)]), "extra_info"),
        (lambda: KVBatchMeta.concat([keyed(["a"], seed=1), keyed(["b"], seed=True)]), "extra_info"),
        (lambda: batch([0, 1]).select_samples([2]), r"sample_indices must be in \[0, 2\)"),
        (lambda: batch([0, 1]).reorder([0, 0]), "2 positions from 0 on once, without duplicates"),
        (lambda: batch([0]).update_custom_meta([]), "0 mappings for 1 samples"),
        (lambda: batch([0]).union(batch([1])), "global_indexes do not match"),
        (lambda: BatchMeta.concat([batch([0]), batch([1]).select_fields(["score"])]), "fields"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


def test_a_key_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"\['b'\] not found in current batch"):
        keyed(["a"]).select_keys(["b"])


def test_samples_are_chosen_with_all_that_belongs_to_them() -> None:
    meta = batch([3, 1, 2])
    chosen = meta.select_samples([2, 0])
    assert chosen.global_indexes == [2, 3]
    assert chosen.custom_meta == [{"index": 2}, {"index": 3}]
    assert [tuple(shape) for shape in chosen.get_shapes("ids")] == [(3,), (4,)]
    assert (meta[1].global_indexes, meta[-1].global_indexes, meta[1:].global_indexes) == ([1], [2], [1, 2])
    assert [part.global_indexes for part in meta.chunk(2)] == [[3, 1], [2]]
    meta.reorder([1, 2, 0])
    assert meta.global_indexes == [tags["index"] for tags in meta.custom_meta] == [1, 2, 3]
    with pytest.raises(IndexError):
        meta[3]
    with pytest.raises(TypeError):
        meta["ids"]  # type: ignore[index]


def test_fields_are_chosen() -> None:
    meta = batch([0, 1]).select_fields(["score", "unknown"])
    assert meta.field_names == ["score"]
    assert meta.get_dtypes("score") == [torch.float32] * 2
    with pytest.raises(KeyError, match="has no field 'ids'"):
        meta.get_dtypes("ids")


@pytest.mark.parametrize("meta", [batch([3, 1, 2]), keyed(["a", "b", "c"])], ids=["batch", "keys"])
def test_a_number_of_parts_below_one(meta: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The errors and the result are the package's."""
    warn_once.cache_clear()
    with pytest.raises(ZeroDivisionError, match="chunks=0: expected an integer of 1 or more"):
        meta.chunk(0)
    with pytest.raises(TypeError):
        meta.chunk(1.5)
    assert [meta.chunk(-1), meta.chunk(-2), meta.chunk(-1)] == [[], [], []]
    assert [text.partition(":")[0] for text in caplog.messages] == ["chunks=-1", "chunks=-2"]


def test_keys_are_repeated_by_negative_indexes() -> None:
    meta = keyed(["a", "b", "c"])
    meta.reorder([2, -1, 0])
    assert meta.keys == [tag["key"] for tag in meta.tags] == ["c", "c", "a"]


def test_nothing_is_joined_to_nothing() -> None:
    for kind in (BatchMeta, KVBatchMeta):
        assert len(kind.concat(None)) == 0  # type: ignore[arg-type]


def test_samples_are_joined() -> None:
    joined = BatchMeta.concat([batch([0]), BatchMeta.empty(), batch([4], "q")])
    assert (joined.global_indexes, joined.partition_ids) == ([0, 4], ["p", "q"])
    assert [tuple(shape) for shape in joined.get_shapes("ids")] == [(1,), (5,)]
    assert [part.partition_ids for part in joined.chunk_by_partition()] == [["p"], ["q"]]
    assert len(BatchMeta.concat([])) == 0


def test_fields_of_the_same_samples_are_united() -> None:
    one, other = batch([0, 1], seed=1).select_fields(["ids"]), batch([0, 1], top=2).select_fields(["score"])
    both = one.union(other)
    assert both.field_names == ["ids", "score"]
    assert both.extra_info == {"seed": 1, "top": 2}
    assert one.field_names == ["ids"]
    assert one.union(BatchMeta.empty()).field_names == ["ids"]


def test_what_is_said_beside_the_samples() -> None:
    meta = batch([0], seed=1)
    meta.set_extra_info("top", 2)
    meta.update_extra_info({"end": 3})
    assert (meta.has_extra_info("seed"), meta.get_extra_info("none", 5), meta.remove_extra_info("seed")) == (True, 5, 1)
    copied = meta.get_all_extra_info()
    meta.clear_extra_info()
    assert (copied, meta.extra_info) == ({"top": 2, "end": 3}, {})
    tags = meta.get_all_custom_meta()
    meta.clear_custom_meta()
    assert (tags, meta.custom_meta) == ([{"index": 0}], [{}])


def test_one_sample_is_looked_at() -> None:
    sample = batch([2, 5]).samples[1]
    assert (sample.global_index, sample.partition_id, sample.production_status) == (5, "p", 1)
    assert sample.custom_meta == {"index": 5}
    assert tuple(sample.fields["ids"]["shape"]) == (6,)
    assert repr(sample) == "sample 5 of 'p', fields ['ids', 'score']"


def test_a_meta_is_pickled() -> None:
    meta = pickle.loads(pickle.dumps(batch([1, 2], seed=1)))
    assert (meta.global_indexes, meta.extra_info, meta.is_ready) == ([1, 2], {"seed": 1}, True)
    meta.production_status[0] = 0
    assert not meta.is_ready
    assert repr(meta).startswith("BatchMeta(size=2, field_names=['ids', 'score'], is_ready=False")
