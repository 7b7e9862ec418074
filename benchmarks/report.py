"""The tables, the JSON and the chart of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Machine, Spread
from benchmarks.probes.base import Figure
from benchmarks.race import Outcome
from benchmarks.runner import ENTRIES
from benchmarks.targets import Results, judge

CHARTED = ("local", "remote", "journal", "TransferQueue", "ray-numpy", "memcpy-1")
COLOURS = {
    "local": "#1b6ca8",
    "remote": "#63a4cf",
    "journal": "#7fb069",
    "TransferQueue": "#d1495b",
    "ray-numpy": "#edae49",
    "memcpy-1": "#8a8f98",
}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print one line for each case: the median in milliseconds with p10 to p90, and its multiple of our local
    connection's, the median of the rounds' quotients."""
    caption = "\n".join(f"{entry.name}: {entry.how}" for entry in ENTRIES)
    table = Table(
        title="median ms, (p10-p90), first: before warm-up, x: multiple of our local connection",
        caption=caption,
        caption_justify="left",
    )
    table.add_column("work")
    table.add_column("MB", justify="right")
    columns = [entry.name for entry in ENTRIES if any(entry.name in outcome.seconds for outcome in outcomes)]
    for name in columns:
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.case.name,
            f"{outcome.nbytes / 1e6:.0f}",
            *(_cell(outcome, name) for name in columns),
        )
    console.print(table)


def show_figures(figures: Sequence[Figure], console: Console) -> None:
    """Print one line for each figure of this project."""
    table = Table(title="this project alone")
    for column in ("what", "value", "p10 - p90", "unit", "how"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for figure in figures:
        spread = Spread.of(figure.rounds)
        tenths = "" if spread.rounds == 1 else f"{spread.p10:.3g} - {spread.p90:.3g}"
        table.add_row(figure.name, f"{spread.median:,.4g}", tenths, figure.unit, figure.note)
    console.print(table)


def show_targets(outcomes: Sequence[Outcome], figures: Sequence[Figure], console: Console) -> None:
    """Print one line for each budget."""
    table = Table(title="budgets")
    for column in ("budget", "needed", "reached", "p25 - p75", ""):
        table.add_column(column, justify="right" if column in ("needed", "reached") else "left")
    for target, spread in judge(Results.of(outcomes, figures)):
        verdict = "met" if target.met(spread.median) else "[bold red]missed[/]"
        quartiles = "" if spread.rounds == 1 else f"{spread.p25:,.3g} - {spread.p75:,.3g}"
        needed = f"{'<=' if target.most else '>='} {target.needed:g}"
        table.add_row(target.text, needed, f"{spread.median:,.3g}", quartiles, verdict)
    console.print(table)


def write_json(
    path: Path, machine: Machine, outcomes: Sequence[Outcome], figures: Sequence[Figure], **more: Any
) -> None:
    """Write all measurements as JSON."""
    record = {
        "machine": asdict(machine),
        **more,
        "cases": [
            {
                "name": outcome.case.name,
                "op": outcome.case.op.value,
                "bytes": outcome.nbytes,
                "load": outcome.load,
                "cold_seconds": dict(outcome.cold),
                "seconds": {name: asdict(Spread.of(rounds)) for name, rounds in outcome.seconds.items()},
                "times_local": {name: outcome.times_local(name) for name in outcome.seconds},
            }
            for outcome in outcomes
        ],
        "figures": [{**asdict(figure), "value": figure.value} for figure in figures],
        "budgets": [
            {
                "text": target.text,
                "needed": target.needed,
                "most": target.most,
                "reached": spread.median,
                "p25": spread.p25,
                "p75": spread.p75,
                "rounds": spread.rounds,
                "met": target.met(spread.median),
            }
            for target, spread in judge(Results.of(outcomes, figures))
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, machine: Machine, outcomes: Sequence[Outcome]) -> None:
    """Draw bars by case: milliseconds on a logarithmic scale, shorter is better. Cases with fewer than two systems
    in `CHARTED` are left out. Without any case the file is removed."""
    matplotlib.use("Agg")
    shown = [outcome for outcome in outcomes if len(set(outcome.seconds) & set(CHARTED)) > 1]
    if not shown:
        path.unlink(missing_ok=True)
        return
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.5 * len(shown)))
    height = 0.8 / len(CHARTED)
    for place, name in enumerate(CHARTED):
        rows = [(row, Spread.of(outcome.seconds[name])) for row, outcome in enumerate(shown) if name in outcome.seconds]
        medians = [spread.median * 1e3 for _, spread in rows]
        errors = [
            [(spread.median - spread.p10) * 1e3 for _, spread in rows],
            [(spread.p90 - spread.median) * 1e3 for _, spread in rows],
        ]
        axes.barh(
            [row + (place - len(CHARTED) / 2 + 0.5) * height for row, _ in rows],
            medians,
            height,
            xerr=errors,
            label=name,
            color=COLOURS[name],
            error_kw={"elinewidth": 0.8},
        )
    axes.set_yticks(range(len(shown)), [outcome.case.name for outcome in shown])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds (median, p10 to p90); shorter is better")
    axes.set_title(str(machine), fontsize=9, pad=28)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(CHARTED), frameon=False)
    axes.margins(y=0.01)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _cell(outcome: Outcome, name: str) -> str:
    if name not in outcome.seconds:
        return "-"
    spread, times = Spread.of(outcome.seconds[name]), outcome.times_local(name)
    text = f"{_ms(spread.median)}\n({_ms(spread.p10)}-{_ms(spread.p90)})\nfirst {_ms(outcome.cold[name])}"
    if times is not None and name != "local":
        text += f"\n{times:.2f}x"
    return text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
