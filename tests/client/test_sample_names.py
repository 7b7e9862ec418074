"""Samples and tags as callers name them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dataplane.client.operations.sample_names import ids_of, tag_columns, tags_of
from dataplane.data.columns import require_fields
from dataplane.data.meta import KVBatchMeta, list_of_names
from dataplane.errors import InvalidRequestError, UnsupportedValueError


@pytest.mark.parametrize("fields", [[torch.zeros(1)], torch.zeros(1), "x", 5])
def test_fields_without_names_are_refused(fields: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="Pass a TensorDict or a mapping"):
        require_fields(fields)


@pytest.mark.parametrize("tags", [["a"], [None], [["score", 1]], {"score": 1}, 5])
def test_tags_that_are_no_list_of_mappings_are_refused(tags: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"Pass (a mapping of tag names|one mapping of tags)"):
        tag_columns(tags, 1)


def test_as_many_tags_as_samples() -> None:
    with pytest.raises(InvalidRequestError, match="got 1 mappings for 2 samples"):
        tag_columns([{"score": 1}], 2)


@pytest.mark.parametrize("names", ["a", b"a", 5, [5], [b"a"]])
def test_sample_ids_that_are_no_list_of_strings_are_refused(names: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        ids_of(names)


def test_tags_come_back_as_they_were_whatever_samples_lack_them() -> None:
    tags: list[dict[str, Any]] = [{"n": 1, "text": "x"}, {}, {"n": 2.5, "flag": True}, {"text": None}]
    assert tags_of(tag_columns(tags, 4), 4) == tags
    assert tag_columns([{"n": 1}, {"n": 2}], 2)[0].positions is None
    assert tags_of((), 2) == [{}, {}]


def test_only_what_is_no_plain_number_is_converted() -> None:
    def convert(name: str, row: int, value: Any) -> str:
        return f"{name} {row} {value}"

    tags = [{"a": 1, "b": None}, {"a": "x", "b": [1]}]
    assert tags_of(tag_columns(tags, 2, convert), 2) == [{"a": 1, "b": None}, {"a": "a 1 x", "b": "b 1 [1]"}]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (5, "argument fields: 5"),
        (None, "argument fields: None"),
        ([5], "argument fields, row 0: 5"),
        (["x", None], "argument fields, row 1: None"),
        (b"x", "argument fields, row 0: 120"),
    ],
)
def test_other_names_than_strings_are_refused_with_their_value(names: Any, text: str) -> None:
    with pytest.raises(UnsupportedValueError, match=f"{text} is not supported"):
        list_of_names("fields", names)


def test_one_string_is_no_list_of_names() -> None:
    with pytest.raises(InvalidRequestError, match="fields='ids': pass a list of names"):
        list_of_names("fields", "ids")
    with pytest.raises(InvalidRequestError, match="sample_ids='ids': pass a list of names"):
        KVBatchMeta("p", None, "ids")


@pytest.mark.parametrize("name", [5, None, b"x", ("x",), ""])
def test_other_names_of_fields_than_strings_are_refused_with_their_value(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"non-empty strings, got {name!r}")):
        require_fields({name: [torch.zeros(1)]})
