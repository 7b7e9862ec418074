"""Combine the workers' results of a train step in the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IS_REPLICA_LEADER = "is_replica_leader"
"""Key in the result of `finish_train_step_presharded`. Callers of every rank ignore results in which it is False."""


def aggregate_train_results(results: Sequence[Any]) -> dict[str, Any]:
    """Merge the results of the replica leaders, in data-parallel order, into one mapping.

    The values of "all_mb_metrics" (name -> values per micro-batch or step) are concatenated in that order. All other
    entries are the first leader's: workers reduce global values over data-parallel ranks. "loss" defaults to
    "global_loss". TypeError unless each result is a mapping.
    """
    for result in results:
        if not isinstance(result, Mapping):
            raise TypeError(f"a worker's train() must return a mapping of results, got {type(result).__name__}")
    merged = {name: value for name, value in results[0].items() if name != IS_REPLICA_LEADER}
    if "global_loss" in merged:
        merged.setdefault("loss", merged["global_loss"])
    if any("all_mb_metrics" in result for result in results):
        joined: dict[str, list[Any]] = {}
        for result in results:
            for name, values in result.get("all_mb_metrics", {}).items():
                joined.setdefault(name, []).extend(values)
        merged["all_mb_metrics"] = joined
    return merged
