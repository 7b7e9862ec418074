"""The columns that a stage reads."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane import KVBatchMeta
from workers.training.policy import FORWARD_FIELDS, field_names, forward_fields

META = KVBatchMeta("train", None, ["a"], fields=["images", "input_ids", "advantages", "position_ids", "text"])


def test_a_forward_pass_reads_what_it_is_known_to_read_or_what_it_is_told() -> None:
    assert forward_fields(META, None, FORWARD_FIELDS) == ["input_ids", "position_ids"]
    assert forward_fields(META, ["images", "hidden", "images"], FORWARD_FIELDS) == ["images", "hidden"]


def test_a_forward_pass_that_would_read_nothing_is_told_how_to_say_what() -> None:
    with pytest.raises(ValueError, match=r"none of .* fields \(images, text\).*attention_mask, .*fields=\[\.\.\.\]"):
        forward_fields(META.with_fields(["images", "text"]), None, FORWARD_FIELDS)


@pytest.mark.parametrize("given", ["input_ids", [1], [""], ["input_ids", None]])
def test_fields_are_a_list_of_names(given: Any) -> None:
    with pytest.raises(TypeError, match=r"train_fields=.*pass a list of field names"):
        field_names("train_fields", given)
