"""What is shown of an asynchronous run, and of the synchronous one beside it."""

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
    """Held-out accuracy after it, seconds of all its steps, how many; rows: what was shown of them; course: of an
    asynchronous one."""

    after: Accuracy
    seconds: float
    steps: int
    rows: Sequence[StepRow]
    course: Course | None = None


def show(before: Accuracy, runs: Mapping[str, Run], console: Console | None = None) -> None:
    """Print accuracy and time of each run, and how the asynchronous one went."""
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
        out.print(f"the asynchronous steps took {share:.0%} of the time of the synchronous ones", highlight=False)
    for run in runs.values():
        if run.course is not None:
            _show_course(run.course, out)


def _show_course(course: Course, out: Console) -> None:
    trained = sum(course.ages.values())
    out.print(f"overlap: {course.hidden:.0%} of the time spent sampling the policy workers trained, too;", end=" ")
    out.print(f"they waited for samples {course.waiting:.1%} of the run")
    out.print("staleness, in weight versions:")
    for age in range(max(course.ages) + 1):
        share = course.ages[age] / trained
        out.print(f"  {age}  {course.ages[age]:>7,}  {share:>6.1%}  {'█' * round(BAR * share)}", highlight=False)
    out.print(
        f"wasted: {course.wasted} of {trained + course.wasted:,} samples ({course.evicted} too old, {course.aborted} "
        f"given up while they were made, {course.left} left over)"
    )
    if course.spared:
        out.print(
            f"sampled besides: {course.spared:,} responses to problems that were answered all right or all wrong, or "
            "that no step had space for"
        )
