"""The reward: the share of a response's characters that are digits, which a model of any size can learn."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
