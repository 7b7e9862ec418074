"""Compares the budgets of two runs: `python -m benchmarks.compare out/first.json out/bench.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPEATABLE = 1.15
"""Two runs of one tree on one idle machine differ by at most this factor."""
NEGLIGIBLE = 0.1
"""A value below this share of an upper limit counts as this share, which ignores the noise of tiny values."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A budget that is in both runs."""

    text: str
    first: float
    second: float
    least: float

    @property
    def quotient(self) -> float:
        return max(self.second, self.least) / max(self.first, self.least)

    @property
    def apart(self) -> bool:
        return max(self.quotient, 1 / self.quotient) > REPEATABLE


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Comparison]:
    """Return the budgets of two records that `report.write_json` wrote, in the order of the second."""
    before = {each["text"]: each["reached"] for each in first["budgets"]}
    return [
        Comparison(
            text=each["text"],
            first=before[each["text"]],
            second=each["reached"],
            least=NEGLIGIBLE * each["needed"] if each["most"] else 0.0,
        )
        for each in second["budgets"]
        if each["text"] in before
    ]


def main() -> int:
    """Print one line for each budget. Return 1 if any budget differs by more than `REPEATABLE`."""
    first, second = (json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:3])
    found = compare(first, second)
    for each in found:
        mark = f"  beyond {REPEATABLE:g}" if each.apart else ""
        print(f"{each.text:55} {each.first:10.4g} {each.second:10.4g} {each.quotient:6.2f}{mark}")
    return int(any(each.apart for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
