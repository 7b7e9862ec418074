"""What a meta says by sample stays with its sample ids."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dataplane.data.meta import KVBatchMeta
from dataplane.errors import InvalidRequestError


def minted() -> KVBatchMeta:
    meta = KVBatchMeta("p", "train", ["a", "b", "c"], None, [1, 2, 3], tags=[{"n": 1}, {"n": 2}, {"n": 3}])
    return meta.with_handles(np.arange(3), np.arange(3) + 10).with_claims(np.array([7, 7, 8]))


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
        meta.with_claims(np.array([1]))
