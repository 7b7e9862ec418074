"""The results of a run as Markdown, as in this folder's README: `python -m benchmarks.markdown out/bench.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OTHERS = ("remote", "TransferQueue", "ray-numpy", "ray-tensors", "raw-zmq", "memcpy-1", "memcpy-all")


def markdown(record: dict[str, Any]) -> str:
    """Return the budgets, the ratios by case and the figures of this project, from a record that
    `report.write_json` wrote."""
    return "\n".join([*_budgets(record), "", *_ratios(record), "", *_figures(record), ""])


def _budgets(record: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            each["text"],
            f"{'at most' if each['most'] else 'at least'} {each['needed']:g}",
            f"{each['reached']:,.3g}",
            f"{each['p25']:,.3g}-{each['p75']:,.3g}" if each["rounds"] > 1 else "",
            _met(each),
        )
        for each in record["budgets"]
    ]
    yield from _table(("budget", "needed", "reached", "p25-p75", ""), rows)


def _met(budget: dict[str, Any]) -> str:
    return "met" if budget["met"] else "**missed**"


def _ratios(record: dict[str, Any]) -> Iterator[str]:
    """Yield the other systems' times over those of our local connection. Above 1 our local connection is faster."""
    rows = []
    for case in record["cases"]:
        ours = case["seconds"].get("local")
        if ours is None or len(case["seconds"]) < 2:
            continue
        spread = f"{ours['p10'] / ours['median']:.2f}-{ours['p90'] / ours['median']:.2f}"
        ratios = [f"{case['times_local'][name]:.2f}" if name in case["times_local"] else "" for name in OTHERS]
        rows.append((case["name"], f"{case['bytes'] / 1e6:.0f}", spread, *ratios))
    yield from _table(("work", "MB", "our p10-p90", *OTHERS), rows)


def _figures(record: dict[str, Any]) -> Iterator[str]:
    rows = [(each["name"], f"{each['value']:,.4g} {each['unit']}".strip()) for each in record["figures"]]
    yield from _table(("this project alone", ""), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
