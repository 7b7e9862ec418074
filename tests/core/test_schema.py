from __future__ import annotations

import pytest

from dataplane.core.schema import TOKEN_ALIGNED_FIELDS, round_up
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.columns import declared_specs


def test_declared_specs() -> None:
    assert declared_specs(["input_ids", "reward"]) == {"input_ids": FieldSpec(), "reward": FieldSpec()}
    declared = declared_specs(
        {
            "advantages": FieldSpec(FieldKind.DENSE),
            "values": FieldSpec(dtype="bfloat16"),
            "returns": None,
            "image": {"kind": "ragged", "dtype": "uint8"},
        }
    )
    assert declared == {
        "advantages": FieldSpec(FieldKind.DENSE),
        "values": FieldSpec(dtype="bfloat16"),
        "returns": FieldSpec(),
        "image": FieldSpec(FieldKind.RAGGED, "uint8"),
    }
    assert declared_specs(None) == declared_specs([]) == {}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("input_ids", "not one string"),
        (["a", "a"], "twice"),
        ([1], "non-empty strings"),
        ([""], "non-empty strings"),
        ({"a": 3}, "field 'a'"),
        ({"a": {"dtype": "float99"}}, "unknown dtype"),
        ({"a": {"knid": "dense"}}, "field 'a'"),
    ],
)
def test_bad_declarations(fields: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        declared_specs(fields)  # type: ignore[arg-type]


def test_columns_of_the_document_are_token_aligned() -> None:
    assert {"input_ids", "token_mask", "generation_logprobs", "prev_logprobs", "advantages"} <= TOKEN_ALIGNED_FIELDS
    assert "input_lengths" not in TOKEN_ALIGNED_FIELDS


def test_round_up() -> None:
    assert [round_up(length, 8) for length in (0, 1, 8, 9)] == [0, 8, 8, 16]
    with pytest.raises(ValueError, match="multiple=0: must be at least 1"):
        round_up(3, 0)
