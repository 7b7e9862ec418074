"""Samples and tags as callers name them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplane.columns import require_fields
from dataplane.errors import InvalidRequestError, UnsupportedValueError
from dataplane.samples import ids_of, tag_columns


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
