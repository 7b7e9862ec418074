"""Output of a run: a row per step under a progress bar, the accuracy before and after, and the curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import matplotlib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """The metrics of one step of reinforcement learning.

    reward: mean over the samples. accuracy: of greedy answers to held-out problems, after the step. kl: per
    response token, to the reference policy. sampling_gap: mean |log-probability when sampled - when recomputed| per
    response token. tokens: prompts and responses. plane_s: in calls to the data plane (slowest rank). plane_bytes:
    stored in it.
    """

    step: int
    reward: float
    accuracy: float
    kl: float
    grad_norm: float
    sampling_gap: float
    tokens: int
    seconds: float
    plane_s: float
    plane_bytes: int


COLUMNS = {
    "step": "{:d}",
    "reward": "{:.3f}",
    "accuracy": "{:.1%}",
    "kl": "{:.4f}",
    "grad_norm": "{:.2f}",
    "tokens": "{:,d}",
    "seconds": "{:.2f}",
    "plane_s": "{:.3f}",
    "plane_bytes": "{:,d}",
}
HEADERS = {"grad_norm": "grad norm", "plane_s": "plane s", "plane_bytes": "plane B"}
WIDTHS = {"step": 4, "reward": 6, "kl": 6, "grad_norm": 9, "tokens": 6}
CURVES = {
    "reward": "mean reward of the samples",
    "accuracy": "greedy accuracy, held-out problems",
    "kl": "KL to the reference, per token",
    "grad_norm": "gradient norm",
    "seconds": "seconds per step",
    "plane_s": "of which in the data plane",
}


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A share of right answers and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, right: Sequence[float]) -> Accuracy:
        return cls(mean=statistics.fmean(right), error=_standard_error(right))

    def __str__(self) -> str:
        return f"{self.mean:.1%} ± {self.error:.1%}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Held-out accuracy before and after; `rise` is the mean of the paired differences, problem by problem."""

    before: Accuracy
    after: Accuracy
    rise: Accuracy
    steps: tuple[StepRow, ...]

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float], steps: Sequence[StepRow]) -> Result:
        rise = [b - a for a, b in zip(before, after, strict=True)]
        return cls(before=Accuracy.of(before), after=Accuracy.of(after), rise=Accuracy.of(rise), steps=tuple(steps))


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


class Reporter:
    """Prints the progress of a run. A context manager: the progress bar is shown inside the context."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("setting up", total=None)
        self._rows = 0

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, name: str, *, total: int | None = None) -> None:
        """Begin a stage of `total` parts, or of an unknown number if None."""
        self._progress.reset(self._task, description=name, total=total)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False)

    def table(self, title: str) -> None:
        """Begin a table of steps, with `title` above its header."""
        self.note(title)
        self._rows = 0

    def advance(self) -> None:
        """Record that a part of the stage is done."""
        self._progress.advance(self._task)

    def step(self, row: StepRow) -> None:
        """Print the next row of the table, and record that a part of the stage is done."""
        table = Table(box=None, show_header=self._rows == 0, pad_edge=False)
        for name in COLUMNS:
            table.add_column(HEADERS.get(name, name), justify="right", width=WIDTHS.get(name, 8), no_wrap=True)
        table.add_row(*(form.format(getattr(row, name)) for name, form in COLUMNS.items()))
        self._progress.console.print(table)
        self._rows += 1
        self.advance()

    def result(self, result: Result, curves: Path) -> None:
        """Print the accuracy before and after, and the path of the curves."""
        table = Table(title="held-out accuracy (± one standard error)")
        for name in ("before", "after", "rise"):
            table.add_column(name, justify="right")
        table.add_row(str(result.before), str(result.after), str(result.rise))
        self._console.print(table)
        self._console.print(f"curves: {curves}", highlight=False, soft_wrap=True)


def plot(steps: Sequence[StepRow], path: Path) -> Path:
    """Draw the curves of a run into the PNG file `path`, creating its directory. Return its absolute path."""
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415  (import after the backend is selected)

    figure, panels = pyplot.subplots(2, 3, figsize=(12, 6), sharex=True, layout="constrained")
    for (name, title), panel in zip(CURVES.items(), panels.flat, strict=True):
        panel.plot([row.step for row in steps], [getattr(row, name) for row in steps])
        panel.set_title(title)
        panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path.resolve()
