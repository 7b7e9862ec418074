"""The stages of a training step: their tasks, and the settings that split their samples into micro-batches.

The settings are those of a policy, with the names that trainers use: a mapping or an object with "sequence_packing" or
"dynamic_batching". Each of these is a mapping or an object with "enabled", the budgets "train_mb_tokens",
"logprob_mb_tokens" and "max_tokens_per_microbatch" (for stages without a separate budget), and the other arguments of
`dataplane.data.packing.plan_shards`, such as "algorithm" and "sequence_length_round".
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dataplane import KVBatchMeta, shard_meta_for_dp
from dataplane.core.schema import ELEM_COUNTS_PER_GB

PREV_LP_TASK = "prev_lp"
REF_LP_TASK = "ref_lp"
TRAIN_TASK = "train"
IS_REPLICA_LEADER = "is_replica_leader"
"""Key in the result of `finish_train_step_presharded`. Callers of every rank ignore results in which
it is False."""

Stage = Literal["train", "logprob"]
"""Selects the token budget: "train_mb_tokens" or "logprob_mb_tokens". A forward pass alone fits more tokens."""

STAGES: tuple[Stage, ...] = ("train", "logprob")
BATCH_SIZES = ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")
MAX_TOKENS = "max_tokens_per_microbatch"
_PACKING_KEYS = ("algorithm", "input_key", "input_lengths_key", "sequence_length_pad_multiple", "microbatch_order")
_DYNAMIC_KEYS = ("input_key", "input_lengths_key", "sequence_length_round")


def stage_of(task_name: str | None) -> Stage:
    """Return the stage of a task."""
    return "logprob" if task_name in (PREV_LP_TASK, REF_LP_TASK) else "train"


def setting(settings: Any, name: str) -> Any:
    """Return a setting by name, or None if it or `settings` is missing."""
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def enabled(cfg: Any, name: str) -> Any:
    """Return the settings under `name` if their "enabled" is true, otherwise None."""
    settings = setting(cfg, name)
    return settings if setting(settings, "enabled") else None


def packing_arguments(cfg: Any, stage: Stage) -> dict[str, Any]:
    """Return the arguments of `shard_meta_for_dp` and `shard_by_batch_size` for a stage: "sequence_packing_args" if
    sequence packing is enabled, "dynamic_batching_args" if dynamic batching is enabled, otherwise none.

    The budget is the stage's own, by default "max_tokens_per_microbatch". ValueError without either, and if packing and
    dynamic batching are both enabled. Packed sequences are rounded up to "sequence_length_pad_multiple", by default to
    the policy's "make_sequence_length_divisible_by".
    """
    arguments = {}
    packing = enabled(cfg, "sequence_packing")
    dynamic = enabled(cfg, "dynamic_batching")
    if packing is not None and dynamic is not None:
        raise ValueError("sequence_packing and dynamic_batching are both enabled; enable only one of them")
    if packing is not None:
        packing_args = _settings_with_budget("sequence_packing", packing, _PACKING_KEYS, stage)
        divisible_by = setting(cfg, "make_sequence_length_divisible_by")
        if divisible_by is not None:
            packing_args.setdefault("sequence_length_pad_multiple", divisible_by)
        arguments["sequence_packing_args"] = packing_args
    if dynamic is not None:
        arguments["dynamic_batching_args"] = _settings_with_budget("dynamic_batching", dynamic, _DYNAMIC_KEYS, stage)
    return arguments


def check_number(name: str, value: Any) -> None:
    """Raise ValueError, which names the setting or argument `name`, unless `value` is an integer of at least 1 or
    None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1):
        raise ValueError(f"{name}: expected an integer of 1 or more, or None, got {value!r}")


def check_settings(cfg: Any) -> None:
    """Raise ValueError if `cfg` has an invalid batch size, or if its settings of micro-batches are invalid for every
    stage, or for a stage with a budget. A stage without a budget is checked when it runs."""
    for name in BATCH_SIZES:
        check_number(f"cfg's {name}", setting(cfg, name))
    settings = enabled(cfg, "sequence_packing") or enabled(cfg, "dynamic_batching")
    # If no stage has a budget, all are checked: that raises if micro-batches are enabled, as each needs a budget.
    stages: Sequence[Stage] = [stage for stage in STAGES if _budget_name(settings, stage)] or STAGES
    empty = KVBatchMeta(partition_id="", task_name=None, sample_ids=[], sequence_lengths=[])
    for stage in stages:
        # Without samples, this only checks the arguments.
        shard_meta_for_dp(empty, dp_world=1, **packing_arguments(cfg, stage))


def _settings_with_budget(what: str, settings: Any, keys: tuple[str, ...], stage: Stage) -> dict[str, Any]:
    """Return the settings under `keys` that are set, and the stage's token budget. ValueError without a budget. what:
    the name of `settings` in cfg, for the message."""
    name = _budget_name(settings, stage)
    if name is None:
        raise ValueError(
            f"{what} is enabled, but its settings have neither '{stage}_mb_tokens' nor {MAX_TOKENS!r}: set the number "
            "of tokens that a micro-batch may have"
        )
    values = {key: setting(settings, key) for key in keys}
    return {
        **{key: value for key, value in values.items() if value is not None},
        MAX_TOKENS: setting(settings, name),
        "budget_name": name,  # for error messages
    }


def _budget_name(settings: Any, stage: Stage) -> str | None:
    """Return the name of the setting with the stage's token budget: the stage's own, else the one for all stages; None
    if both are missing."""
    names = (f"{stage}_mb_tokens", MAX_TOKENS)
    return next((name for name in names if setting(settings, name) is not None), None)


def rows_per_batch(counts: Sequence[int] | None) -> int | None:
    """Return the rows of each global batch, or None for one batch of all rows. ValueError if the sizes differ."""
    if not counts:
        return None
    if len(set(counts)) > 1:
        raise ValueError(f"{ELEM_COUNTS_PER_GB}={counts}: global batches of different sizes cannot be packed again")
    return counts[0]
