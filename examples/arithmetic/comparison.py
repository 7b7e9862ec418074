"""Output about an asynchronous run, and about the synchronous run beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .asynchronous import Course
from .report import Accuracy, StepRow

BAR = 40


@dataclass(frozen=True)
class Run:
    """after: held-out accuracy; seconds, steps: of the whole run; rows: the rows that were shown; course: of an
    asynchronous run."""

    after: Accuracy
    seconds: float
    steps: int
    rows: Sequence[StepRow]
    course: Course | None = None


def show(before: Accuracy, runs: Mapping[str, Run], console: Console | None = None) -> None:
    """Print accuracy and time of each run, and the course of the asynchronous one."""
    out = console or Console()
    table = Table("after", title="held-out accuracy (± one standard error)")
    for name in ("accuracy", "steps", "seconds"):
        table.add_column(name, justify="right")
    table.add_row("warm start", str(before), "", "")
    for name, run in runs.items():
        table.add_row(name, str(run.after), str(run.steps), f"{run.seconds:.1f}")
    out.print(table)
    if {"asynchronous", "synchronous"} <= set(runs):
        share = runs["asynchronous"].seconds / runs["synchronous"].seconds
        out.print(f"the asynchronous steps took {share:.0%} of the time of the synchronous steps", highlight=False)
    for run in runs.values():
        if run.course is not None:
            _show_course(run.course, out)


def _show_course(course: Course, out: Console) -> None:
    trained = sum(course.ages.values())
    out.print(f"overlap: {course.hidden:.0%} of the sampling time ran during training;", end=" ")
    out.print(f"the policy workers waited for samples {course.waiting:.1%} of the run")
    out.print("staleness, in weight versions:")
    for age in range(max(course.ages) + 1):
        share = course.ages[age] / trained
        out.print(f"  {age}  {course.ages[age]:>7,}  {share:>6.1%}  {'█' * round(BAR * share)}", highlight=False)
    out.print(
        f"wasted: {course.wasted} of {trained + course.wasted:,} samples ({course.evicted} too old, {course.aborted} "
        f"aborted, {course.left} unused at the end)"
    )
    if course.spared:
        out.print(
            f"sampled and not put: {course.spared:,} responses, to problems whose answers were all right or all wrong, "
            "or that no step had space for"
        )
