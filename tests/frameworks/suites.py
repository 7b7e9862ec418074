"""Runs a framework's own unmodified tests, once with each of two queues, and prints a table of what passes.

Each suite is one pytest session, in the framework's checkout, with a Ray cluster of its own: RAY_ADDRESS=local, as some
pass address="auto" to Ray, which must not find another cluster. Files whose imports need packages that are not
installed are counted as not collected, with the reason.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OUTCOMES = ("passed", "failed", "skipped", "not collected")
REASON_CHARACTERS = 200
LIMIT_S = 1800.0
"""Of a session."""
TEST_LIMIT_S = 600
ENDING_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Framework:
    """name: of its package; a checkout is known by it. suites: paths below `tests` for each. queues: how each is
    chosen, as arguments of Python, the original first. python_path: further directories of PYTHONPATH; relative ones
    are in the checkout. files: what lies in a new directory of PYTHONPATH, by name."""

    name: str
    tests: str
    suites: Mapping[str, tuple[str, ...]]
    queues: Mapping[str, tuple[str, ...]]
    python_path: tuple[Path, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The outcome of one test, or of one file that cannot be collected."""

    file: str
    test: str
    outcome: str
    reason: str = ""


def environment(framework: Framework, checkout: Path, directory: Path) -> dict[str, str]:
    """directory: an empty one, for Ray's files and for those of the framework."""
    for name, text in framework.files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    kept = {name: value for name, value in os.environ.items() if name not in ("TQ_REPLACE", "PYTHONPATH")}
    on_path = (checkout, *[checkout / path for path in framework.python_path], directory)
    return {
        **kept,
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(map(str, on_path)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_suite(framework: Framework, checkout: Path, suite: str, *, queue: str, work: Path) -> list[Result]:
    """The results of one pytest session; its output is in `work`."""
    name = f"{suite}-{queue}"
    report = work / f"{name}.xml"
    paths = [f"{framework.tests}/{path}" for path in framework.suites[suite]]
    arguments = ["-o", "addopts=", "-o", "junit_family=xunit1", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
    arguments += ["--continue-on-collection-errors", f"--timeout={TEST_LIMIT_S}", f"--junitxml={report}"]
    with (
        tempfile.TemporaryDirectory(prefix="tests-", dir="/tmp", ignore_cleanup_errors=True) as short,
        (work / f"{name}.log").open("w") as log,
    ):
        process = subprocess.Popen(
            [sys.executable, *framework.queues[queue], *arguments, *paths],
            cwd=checkout,
            env=environment(framework, checkout, Path(short)),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            print(f"{name}: stopped after {LIMIT_S:.0f} s", file=sys.stderr)
        finally:
            end(process, short)
    if not report.exists():
        return [Result(path, path, "not collected", f"pytest left no report, see {work / name}.log") for path in paths]
    return read_report(report)


def end(process: subprocess.Popen[bytes], marker: str) -> None:
    """End pytest and what it left: the processes whose RAY_TMPDIR is this session's."""
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RAY_TMPDIR={marker}\0".encode() in place.read_bytes():
                os.kill(int(place.parent.name), signal.SIGKILL)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue


def read_report(report: Path) -> list[Result]:
    """The results in a file of pytest's `--junitxml`. A test that passes and whose teardown fails counts as failed."""
    found: dict[tuple[str, str], Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        result = result_of(case)
        key = (result.file, result.test)
        if key not in found or found[key].outcome == "passed":
            found[key] = result
    return list(found.values())


def result_of(case: ElementTree.Element) -> Result:
    name, file = case.get("name", ""), case.get("file", "")
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        said = case.find(tag)
        if said is None:
            continue
        message = (said.get("message") or "").strip()
        if message == "collection failure":
            module = name if name.endswith(".py") else f"{name.replace('.', '/')}.py"
            return Result(module, module, "not collected", last_error(said.text or ""))
        if not file:  # the whole module was skipped
            return Result(f"{name.replace('.', '/')}.py", "(module)", outcome, message)
        return Result(file, test_name(case), outcome, message.partition("\n")[0][:REASON_CHARACTERS])
    return Result(file, test_name(case), "passed")


def test_name(case: ElementTree.Element) -> str:
    last = case.get("classname", "").rpartition(".")[2]
    return case.get("name", "") if last.startswith("test_") else f"{last}::{case.get('name', '')}"


def last_error(text: str) -> str:
    """The last line that pytest marks with E, which in an error of an import names the module."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return (lines or text.strip().splitlines() or [""])[-1][:REASON_CHARACTERS]


def table(results: dict[str, list[Result]]) -> str:
    """The number of tests of each outcome, per file and queue."""
    files = list(dict.fromkeys(result.file for found in results.values() for result in found))
    counts = {queue: Counter((result.file, result.outcome) for result in found) for queue, found in results.items()}
    lines = [" " * 68 + "".join(f"{queue:56}" for queue in results).rstrip()]
    lines.append(f"{'file':64}" + "".join(f"{outcome:>14}" for _ in results for outcome in OUTCOMES))
    totals: dict[str, Counter[str]] = {queue: Counter() for queue in results}
    for file in files:
        row = f"{file:64}"
        for queue in results:
            totals[queue].update({outcome: counts[queue][file, outcome] for outcome in OUTCOMES})
            row += "".join(f"{counts[queue][file, outcome]:14}" for outcome in OUTCOMES)
        lines.append(row)
    lines.append(f"{'all':64}" + "".join(f"{totals[queue][outcome]:14}" for queue in results for outcome in OUTCOMES))
    return "\n".join(lines)


def differences(results: dict[str, list[Result]]) -> tuple[list[str], bool]:
    """A line for each test whose outcomes differ; whether one of them passes with the original only."""
    original, adapter = ({(result.file, result.test): result for result in found} for found in results.values())
    lines, worse = [], False
    for key in dict.fromkeys([*original, *adapter]):
        first, second = original.get(key), adapter.get(key)
        outcomes = [result.outcome if result else "missing" for result in (first, second)]
        if outcomes[0] == outcomes[1]:
            continue
        worse = worse or outcomes[0] == "passed"
        why = [result.reason for result in (first, second) if result and result.reason]
        lines.append(f"{key[0]}::{key[1]}: original {outcomes[0]}, adapter {outcomes[1]}: {' | '.join(why)}")
    return lines, worse


def parsed(framework: Framework, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone or an export of the framework")
    parser.add_argument("--suite", action="append", choices=list(framework.suites), help="repeatable; all by default")
    parser.add_argument("--queue", action="append", choices=list(framework.queues), help="repeatable; both by default")
    parser.add_argument("--work", type=Path, help="where reports and logs go; by default a new directory in /tmp")
    return parser.parse_args()


def main(framework: Framework, description: str) -> int:
    """The exit status: 1 if a test passes with the original and not with the adapter."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that pytest and Ray are ended
    options = parsed(framework, description)
    checkout = options.checkout.resolve()
    if not (checkout / framework.name).is_dir():
        print(f"{checkout} has no directory {framework.name}: expected a clone or an export of it", file=sys.stderr)
        return 2
    work = (options.work or Path(tempfile.mkdtemp(prefix=f"{framework.name}-tests-", dir="/tmp"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Result]] = {queue: [] for queue in options.queue or framework.queues}
    for suite in options.suite or framework.suites:
        for queue, found in results.items():
            found += run_suite(framework, checkout, suite, queue=queue, work=work)
            print(f"{suite}, {queue}: done", file=sys.stderr, flush=True)
    print(table(results))
    missing = {(r.file, r.reason) for found in results.values() for r in found if r.outcome == "not collected"}
    print(*(f"not collected: {file}: {reason}" for file, reason in sorted(missing)), sep="\n")
    worse = False
    if len(results) == len(framework.queues):
        lines, worse = differences(results)
        print(*lines, sep="\n")
    print(f"reports and logs: {work}")
    return int(worse)
