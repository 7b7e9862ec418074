"""What cuts a stage's samples into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from workers.stages import Stage, packing_arguments, stage_of

PACKING = {"enabled": True, "algorithm": "concatenative", "train_mb_tokens": 8, "logprob_mb_tokens": 16}


@pytest.mark.parametrize(("stage", "budget"), [("train", 8), ("logprob", 16)])
def test_each_stage_has_its_budget(stage: Stage, budget: int) -> None:
    packing = packing_arguments({"sequence_packing": PACKING}, stage)
    assert packing == {
        "sequence_packing_args": {"algorithm": "concatenative", "max_tokens_per_microbatch": budget},
    }
    dynamic = {"enabled": True, "sequence_length_round": 4, "train_mb_tokens": 8, "logprob_mb_tokens": 16}
    assert packing_arguments({"dynamic_batching": dynamic}, stage) == {
        "dynamic_batching_args": {"sequence_length_round": 4, "max_tokens_per_microbatch": budget},
    }


def test_one_budget_for_all_stages() -> None:
    packing = {"enabled": True, "max_tokens_per_microbatch": 32, "train_mb_tokens": 8}
    for stage, budget in (("train", 8), ("logprob", 32)):
        given = packing_arguments({"sequence_packing": packing}, stage)["sequence_packing_args"]  # type: ignore[arg-type]
        assert given["max_tokens_per_microbatch"] == budget


@pytest.mark.parametrize(
    "cfg", [None, {}, {"sequence_packing": None}, {"sequence_packing": {**PACKING, "enabled": False}}]
)
def test_nothing_is_cut_unless_it_is_enabled(cfg: Any) -> None:
    assert packing_arguments(cfg, "train") == {}


def test_what_is_passed_on() -> None:
    cfg = {
        "sequence_packing": {**PACKING, "microbatch_order": "largest_first", "input_lengths_key": "n", "other": 1},
        "make_sequence_length_divisible_by": 4,
    }
    assert packing_arguments(cfg, "train")["sequence_packing_args"] == {
        "algorithm": "concatenative",
        "microbatch_order": "largest_first",
        "input_lengths_key": "n",
        "sequence_length_pad_multiple": 4,
        "max_tokens_per_microbatch": 8,
    }
    cfg["sequence_packing"] = {**PACKING, "sequence_length_pad_multiple": 2}
    assert packing_arguments(cfg, "train")["sequence_packing_args"]["sequence_length_pad_multiple"] == 2


def test_settings_may_be_objects() -> None:
    @dataclass
    class Packing:
        enabled: bool = True
        algorithm: str = "concatenative"
        train_mb_tokens: int = 8

    @dataclass
    class Settings:
        sequence_packing: Packing = field(default_factory=Packing)

    assert packing_arguments(Settings(), "train") == {
        "sequence_packing_args": {"algorithm": "concatenative", "max_tokens_per_microbatch": 8}
    }


def test_a_budget_is_needed() -> None:
    with pytest.raises(
        ValueError, match="dynamic_batching is enabled, but its settings have neither 'train_mb_tokens'"
    ):
        packing_arguments({"dynamic_batching": {"enabled": True, "logprob_mb_tokens": 8}}, "train")


def test_the_stages_of_tasks() -> None:
    assert [stage_of(task) for task in ("prev_lp", "ref_lp", "train", None)] == ["logprob", "logprob", "train", "train"]
