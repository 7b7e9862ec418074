"""`python -m benchmarks`: measure, print, and write bench.json, bench.md and bench.png into ./out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.markdown import markdown
from benchmarks.measure import Machine, quieten
from benchmarks.plan import plan
from benchmarks.probes.all import PROBES
from benchmarks.probes.base import Figure
from benchmarks.race import Outcome, Race
from benchmarks.runner import ENTRIES


def main() -> int:
    arguments = _arguments()
    quieten()
    console = Console(width=None if sys.stdout.isatty() else 180)
    machine = Machine.here()
    groups = [group for group in plan(quick=arguments.quick) if arguments.only in group.name]
    console.print(f"{machine}; load {machine.load} before the start")
    begun = time.monotonic()

    def progress(name: str) -> None:
        console.print(f"[{time.monotonic() - begun:5.0f} s] {name}", markup=False, highlight=False)

    outcomes: list[Outcome] = []
    if groups:
        needed = {name for group in groups for case in group.cases for name in case.systems}
        with Race([name for name in arguments.systems if name in needed]) as race:
            outcomes = race.run(groups, progress)
    figures: list[Figure] = []
    for name, probe in PROBES.items():
        if arguments.only in name:
            progress(name)
            figures += probe(quick=arguments.quick)
    report.show(outcomes, console)
    report.show_figures(figures, console)
    report.show_targets(outcomes, figures, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report.write_json(arguments.out / "bench.json", machine, outcomes, figures, quick=arguments.quick)
    record = json.loads((arguments.out / "bench.json").read_text(encoding="utf-8"))
    (arguments.out / "bench.md").write_text(markdown(record), encoding="utf-8")
    report.draw(arguments.out / "bench.png", machine, outcomes)
    made = ", ".join(sorted(path.name for path in arguments.out.glob("bench.*")))
    console.print(f"{time.monotonic() - begun:.0f} s; in {arguments.out}: {made}")
    return 0


def _arguments() -> argparse.Namespace:
    names = [entry.name for entry in ENTRIES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run every budget with smaller sweeps and fewer rounds")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only rows whose name contains TEXT")
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory of the output files")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
