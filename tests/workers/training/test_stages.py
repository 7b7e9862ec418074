"""What cuts a stage's samples into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from workers.training.stages import Stage, check_settings, packing_arguments, stage_of

PACKING = {"enabled": True, "algorithm": "concatenative", "train_mb_tokens": 8, "logprob_mb_tokens": 16}


@pytest.mark.parametrize(("stage", "budget"), [("train", 8), ("logprob", 16)])
def test_each_stage_has_its_budget(stage: Stage, budget: int) -> None:
    packing = packing_arguments({"sequence_packing": PACKING}, stage)
    named = {"max_tokens_per_microbatch": budget, "budget_name": f"{stage}_mb_tokens"}
    assert packing == {"sequence_packing_args": {"algorithm": "concatenative", **named}}
    dynamic = {"enabled": True, "sequence_length_round": 4, "train_mb_tokens": 8, "logprob_mb_tokens": 16}
    assert packing_arguments({"dynamic_batching": dynamic}, stage) == {
        "dynamic_batching_args": {"sequence_length_round": 4, **named},
    }


def test_one_budget_for_all_stages() -> None:
    packing = {"enabled": True, "max_tokens_per_microbatch": 32, "train_mb_tokens": 8}
    for stage, budget in (("train", 8), ("logprob", 32)):
        given = packing_arguments({"sequence_packing": packing}, stage)["sequence_packing_args"]  # type: ignore[arg-type]
        assert given["max_tokens_per_microbatch"] == budget
        assert given["budget_name"] == ("train_mb_tokens" if stage == "train" else "max_tokens_per_microbatch")


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
        "budget_name": "train_mb_tokens",
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

    given = packing_arguments(Settings(), "train")["sequence_packing_args"]
    assert (given["algorithm"], given["max_tokens_per_microbatch"]) == ("concatenative", 8)


def test_a_budget_is_needed() -> None:
    with pytest.raises(
        ValueError, match="dynamic_batching is enabled, but its settings have neither 'train_mb_tokens'"
    ):
        packing_arguments({"dynamic_batching": {"enabled": True, "logprob_mb_tokens": 8}}, "train")


BOTH = {"sequence_packing": PACKING, "dynamic_batching": {"enabled": True, "train_mb_tokens": 8}}


@pytest.mark.parametrize(
    ("cfg", "told"),
    [
        (BOTH, "sequence_packing and dynamic_batching are both enabled; enable only one of them"),
        ({"sequence_packing": {"enabled": True}}, "neither 'train_mb_tokens' nor 'max_tokens_per_microbatch'"),
        ({"sequence_packing": {**PACKING, "train_mb_tokens": 0}}, "'train_mb_tokens'.*1 or more, got 0"),
        ({"dynamic_batching": {"enabled": True, "logprob_mb_tokens": -8}}, "'logprob_mb_tokens'.*1 or more, got -8"),
        ({"sequence_packing": {**PACKING, "logprob_mb_tokens": "8"}}, "'logprob_mb_tokens'.*1 or more, got '8'"),
        ({"sequence_packing": {**PACKING, "algorithm": "best"}}, "unknown packing algorithm 'best'"),
    ],
)
def test_settings_that_cannot_be(cfg: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_settings(cfg)


@pytest.mark.parametrize("stages", [["train"], ["logprob"], ["train", "logprob"], ["max"]])
def test_settings_need_no_algorithm_and_no_budget_of_a_stage_that_is_not_used(stages: list[str]) -> None:
    budgets = {"max_tokens_per_microbatch" if stage == "max" else f"{stage}_mb_tokens": 8 for stage in stages}
    check_settings({"sequence_packing": {"enabled": True, **budgets}})
    check_settings({})


def test_the_stages_of_tasks() -> None:
    assert [stage_of(task) for task in ("prev_lp", "ref_lp", "train", None)] == ["logprob", "logprob", "train", "train"]


@pytest.mark.parametrize("name", ["train_global_batch_size", "train_micro_batch_size", "logprob_batch_size"])
@pytest.mark.parametrize("number", [0, -1, 2.0, "4", True])
def test_batch_sizes_that_cannot_be_are_refused(name: str, number: Any) -> None:
    with pytest.raises(ValueError, match=f"cfg's {name}: expected an integer of 1 or more, or None, got {number!r}"):
        check_settings({name: number})
    check_settings({name: 4})
