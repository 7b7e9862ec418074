"""Problems with checkable answers: reading, splitting, and the script that made the shipped file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROBLEMS = Path(__file__).parent / "data" / "problems.jsonl"
"""Shipped with the example; made by `python -m arithmetic.data` in `examples/`."""


@dataclass(frozen=True)
class Problem:
    """A prompt and its only right continuation."""

    prompt: str
    answer: str


def load_problems(path: Path) -> list[Problem]:
    """Read one problem per line, `{"prompt": ..., "answer": ...}`. Blank lines are skipped. ValueError names a
    malformed line."""
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, answer = row["prompt"], row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{path}, line {number}: expected {{"prompt": "...", "answer": "..."}}') from error
        if not (isinstance(prompt, str) and isinstance(answer, str) and prompt and answer):
            raise ValueError(f"{path}, line {number}: prompt and answer must be non-empty strings")
        problems.append(Problem(prompt, answer))
    if not problems:
        raise ValueError(f"{path} contains no problem")
    return problems


def split(problems: list[Problem], *, held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Shuffle by `seed` and return (for training, held out). Duplicate prompts are removed."""
    by_prompt = {problem.prompt: problem for problem in problems}
    unique = list(by_prompt.values())
    if len(unique) < 2 * held_out:
        raise ValueError(
            f"{len(unique)} different prompts are too few to hold out {held_out}; at least twice as many are needed"
        )
    random.Random(seed).shuffle(unique)
    return unique[held_out:], unique[:held_out]


def reward(problem: Problem, response: str) -> float:
    """Return 1 for the right answer, else 0."""
    return float(response == problem.answer)


def sums(*, count: int, below: int, seed: int) -> list[Problem]:
    """Return `count` different sums of two numbers in [0, below), in random order."""
    pairs = random.Random(seed).sample([(a, b) for a in range(below) for b in range(below)], count)
    return [Problem(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write a file for `load_problems`."""
    lines = (json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_problems(PROBLEMS, sums(count=6000, below=100, seed=0))
