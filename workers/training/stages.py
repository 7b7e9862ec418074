"""The stages of a training step: their tasks, and what cuts the samples of each into micro-batches.

Settings are those of a policy, by the names that trainers give them: a mapping or an object with "sequence_packing" or
"dynamic_batching", which are mappings or objects in turn: "enabled", the budgets "train_mb_tokens", "logprob_mb_tokens"
and "max_tokens_per_microbatch" (of each stage that has none of its own), and what `dataplane.data.packing.plan_shards`
takes besides, such as "algorithm" and "sequence_length_round".
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, Literal

from dataplane import KVBatchMeta, shard_meta_for_dp

PREV_LP_TASK, REF_LP_TASK, TRAIN_TASK = "prev_lp", "ref_lp", "train"

Stage = Literal["train", "logprob"]
"""Which budget of tokens holds: "train_mb_tokens" or "logprob_mb_tokens". A forward pass alone has space for more."""

STAGES: tuple[Stage, ...] = ("train", "logprob")
BATCH_SIZES = ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")
MAX_TOKENS = "max_tokens_per_microbatch"
_PACKING_KEYS = ("algorithm", "input_key", "input_lengths_key", "sequence_length_pad_multiple", "microbatch_order")
_DYNAMIC_KEYS = ("input_key", "input_lengths_key", "sequence_length_round")


def stage_of(task_name: str | None) -> Stage:
    """The stage that a task belongs to."""
    return "logprob" if task_name in (PREV_LP_TASK, REF_LP_TASK) else "train"


def setting(settings: Any, name: str) -> Any:
    """A setting by name, None where there is none (or no settings)."""
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def enabled(cfg: Any, name: str) -> Any:
    """The settings under `name`, None unless they say that they are enabled."""
    settings = setting(cfg, name)
    return settings if setting(settings, "enabled") else None


def packing_arguments(cfg: Any, stage: Stage) -> dict[str, Any]:
    """What `shard_meta_for_dp` and `shard_by_batch_size` take for a stage: "sequence_packing_args" where sequence
    packing is enabled, "dynamic_batching_args" where dynamic batching is, nothing where neither is.

    The budget is the stage's own, else "max_tokens_per_microbatch"; ValueError without either, and where both kinds of
    cutting are enabled. A packed sequence is rounded up to "sequence_length_pad_multiple", else to the policy's
    "make_sequence_length_divisible_by".
    """
    arguments = {}
    packing, dynamic = enabled(cfg, "sequence_packing"), enabled(cfg, "dynamic_batching")
    if packing is not None and dynamic is not None:
        raise ValueError("sequence_packing and dynamic_batching are both enabled: enable one")
    if packing is not None:
        given = _given("sequence_packing", packing, _PACKING_KEYS, stage)
        divisible_by = setting(cfg, "make_sequence_length_divisible_by")
        if divisible_by is not None:
            given.setdefault("sequence_length_pad_multiple", divisible_by)
        arguments["sequence_packing_args"] = given
    if dynamic is not None:
        arguments["dynamic_batching_args"] = _given("dynamic_batching", dynamic, _DYNAMIC_KEYS, stage)
    return arguments


def check_number(name: str, value: Any) -> None:
    """ValueError unless it is a number of samples, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1):
        raise ValueError(f"{name}: expected an integer of 1 or more, or None, got {value!r}")


def check_settings(cfg: Any) -> None:
    """ValueError where `cfg` has a batch size that is no number of samples, or asks for micro-batches that no stage
    could be cut into, or that a stage whose budget it gives could not. A stage without a budget is looked at when it
    runs."""
    for name in BATCH_SIZES:
        check_number(f"cfg's {name}", setting(cfg, name))
    nothing = KVBatchMeta("", None, [], sequence_lengths=[])
    chosen = enabled(cfg, "sequence_packing") or enabled(cfg, "dynamic_batching")
    for stage in [stage for stage in STAGES if _budget_name(chosen, stage)] or STAGES:
        shard_meta_for_dp(nothing, dp_world=1, **packing_arguments(cfg, stage))


def _given(what: str, settings: Any, keys: tuple[str, ...], stage: Stage) -> dict[str, Any]:
    name = _budget_name(settings, stage)
    if name is None:
        raise ValueError(
            f"{what} is enabled, but its settings have neither '{stage}_mb_tokens' nor {MAX_TOKENS!r}: how many tokens "
            "may a micro-batch have?"
        )
    values = {key: setting(settings, key) for key in keys}
    return {
        **{key: value for key, value in values.items() if value is not None},
        MAX_TOKENS: setting(settings, name),
        "budget_name": name,
    }


def _budget_name(settings: Any, stage: Stage) -> str | None:
    """The setting that holds the stage's budget of tokens."""
    names = (f"{stage}_mb_tokens", MAX_TOKENS)
    return next((name for name in names if setting(settings, name) is not None), None)
