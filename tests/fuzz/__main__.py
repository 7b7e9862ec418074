"""`make fuzz`: every target under atheris for a while, each in a process of its own, and a table of what came of it.

`python -m tests.fuzz --reproduce TARGET FILE` runs one input again, with its traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import TARGETS

OUT = Path("out/fuzz")
LONGEST_INPUT_BYTES = 1 << 15
INPUT_S = 30
RSS_MIB = 2048
GRACE_S = 900.0
"""Beyond its time: imports, which take minutes on a busy machine, seeds, and the last input."""
SHOWN_LINES = 25


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one target. findings: files of inputs; why: the end of its log, where it ended badly."""

    target: str
    executions: int
    coverage: int
    corpus: int
    findings: tuple[Path, ...]
    why: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.findings or self.why)


def fuzz(name: str, seconds: int) -> Outcome:
    """Run a target, from its seeds and what earlier runs found interesting."""
    folder = OUT / name
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    for number, seed in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    settings = {
        "max_total_time": seconds,
        "max_len": LONGEST_INPUT_BYTES,
        "timeout": INPUT_S,
        "rss_limit_mb": RSS_MIB,
        "print_final_stats": 1,
        "artifact_prefix": f"{folder}/",
    }
    command = [sys.executable, "-m", "tests.fuzz.one", name, str(corpus)]
    command += [f"-{key}={value}" for key, value in settings.items()]
    log = folder / "log"
    with log.open("wb") as file:
        try:
            streams = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL}
            code = subprocess.run(command, timeout=seconds + GRACE_S, **streams).returncode
        except subprocess.TimeoutExpired:
            code = -1
    said = log.read_text(errors="replace")
    found = tuple(sorted(path for path in set(folder.iterdir()) - before if path not in (corpus, log)))
    return Outcome(
        target=name,
        executions=_last(r"stat::number_of_executed_units: (\d+)", said) or _last(r"^#(\d+)", said),
        coverage=_last(r"cov: (\d+)", said),
        corpus=len(list(corpus.iterdir())),
        findings=found,
        why=_end_of(said) if code or found else "",
    )


def _last(pattern: str, text: str) -> int:
    numbers = re.findall(pattern, text, re.MULTILINE)
    return int(numbers[-1]) if numbers else 0


def _end_of(said: str) -> str:
    """The traceback, without libFuzzer's own lines."""
    lines = [line for line in said.splitlines() if not re.match(r"#\d+|stat::|INFO:|\s*NEW_FUNC|artifact|Base64", line)]
    return "\n".join(lines[-SHOWN_LINES:]) or "it ended without a word"


def report(outcomes: list[Outcome]) -> None:
    """What was found, how to see it again, and the table."""
    for outcome in outcomes:
        if outcome.failed:
            print(f"\n=== {outcome.target}\n{outcome.why}")
        for finding in outcome.findings:
            print(f"    again: {sys.executable} -m tests.fuzz --reproduce {outcome.target} {finding}")
    print(f"\n{'target':<20}{'executions':>12}{'branches':>10}{'corpus':>8}{'findings':>10}")
    for outcome in outcomes:
        found = len(outcome.findings) or int(outcome.failed)
        print(f"{outcome.target:<20}{outcome.executions:>12,}{outcome.coverage:>10,}{outcome.corpus:>8,}{found:>10}")
    total = sum(outcome.executions for outcome in outcomes)
    bad = sum(outcome.failed for outcome in outcomes)
    print(f"{len(outcomes)} targets, {total:,} inputs, {bad} targets with findings")


def reproduce(name: str, path: str) -> None:
    """Raises what the input makes the target raise."""
    TARGETS[name].attempt(Path(path).read_bytes())
    print(f"{name} takes {path} as it should")


def parser() -> argparse.ArgumentParser:
    """Of `python -m tests.fuzz`."""
    made = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    made.add_argument("--seconds", type=int, default=600, help="for all targets together (default: 600)")
    made.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="targets at once")
    made.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one; may be given again")
    made.add_argument("--reproduce", nargs=2, metavar=("TARGET", "FILE"), help="run one input again")
    return made


def main() -> int:
    """1 where something was found."""
    arguments = parser().parse_args()
    if arguments.reproduce:
        reproduce(*arguments.reproduce)
        return 0
    names = arguments.target or list(TARGETS)
    rounds = -(-len(names) // arguments.jobs)
    seconds = max(1, arguments.seconds // rounds)
    print(f"{len(names)} targets, {seconds} s each, {arguments.jobs} at once; inputs are kept in {OUT}", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda name: fuzz(name, seconds), names))
    report(outcomes)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
