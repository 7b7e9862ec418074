"""Runs NeMo-RL's own unmodified tests, once with each queue, and prints a table of what passes:

    git --git-dir=NEMO_RL.git archive HEAD | tar x -C /tmp/nemo-rl
    python run.py /tmp/nemo-rl                                             # all suites
    python run.py /tmp/nemo-rl --suite data_plane --queue adapter

`original` is NeMo-RL's adapter and the package TransferQueue; `adapter` is `dataplane.compat.nemo_rl` by its switch.
Nothing of NeMo-RL is edited. Each suite is one pytest session with a Ray cluster of its own; NeMo-RL's tests write
their results (`unit_results`, `test_assets`) into that directory. Files whose imports need packages that are not
installed (megatron, nccl, vllm, ...) are counted as not collected, with the reason. NeMo-RL's own `conftest.py` leaves
out tests with the marks mcore, hf_gated, automodel, vllm, sglang, trtllm and nemo_gym.

The exit status is 1 if a test passes with the original and not with the adapter.
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
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUITES = {
    "data_plane": ("data_plane",),
    "single_controller": ("single_controller",),
    "packing": ("data/packing", "data/test_llm_message_utils.py"),
    "async": ("algorithms/test_async_utils.py", "algorithms/test_grpo_router_replay_async.py"),
    "algorithms": tuple(f"algorithms/test_{name}.py" for name in ("grpo", "ppo", "opd")),
    "sglang": ("models/generation/sglang/test_utils_smoke.py",),
}
"""NeMo-RL's tests of its data plane and of what uses it: each is one pytest session over these paths in tests/unit."""
QUEUES = {"original": ("-m", "pytest"), "adapter": ("-m", "dataplane.compat.nemo_rl", "-m", "pytest")}
OUTCOMES = ("passed", "failed", "skipped", "not collected")
REASON_CHARACTERS = 200
LIMIT_S = 1800.0
TEST_LIMIT_S = 600
"""NeMo-RL's own adapter has Ray copy the whole virtual environment in the first test that uses a queue."""
PACKAGE = "Metadata-Version: 2.1\nName: nemo-rl\nVersion: 0.0.0\nRequires-Dist: TransferQueue==0.1.11\n"
"""NeMo-RL's adapter reads which TransferQueue is to be installed for actors of NeMo-RL's package, which is no wheel."""
ENDING_S = 30.0


@dataclass(frozen=True)
class Result:
    """The outcome of one test, or of one file that cannot be collected."""

    file: str
    test: str
    outcome: str
    reason: str = ""


def environment(checkout: Path, directory: Path) -> dict[str, str]:
    """RAY_ADDRESS=local: NeMo-RL passes address="auto" to Ray, which must not find another cluster.

    directory: an empty one, for Ray's files and for the metadata of NeMo-RL's package.
    """
    described = directory / "nemo_rl-0.0.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(PACKAGE)
    kept = {name: value for name, value in os.environ.items() if name not in ("TQ_REPLACE", "PYTHONPATH")}
    return {
        **kept,
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(checkout), str(HERE / "python311"), str(directory)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_suite(checkout: Path, suite: str, *, queue: str, work: Path) -> list[Result]:
    """The results of one pytest session; its output is in `work`."""
    name = f"{suite}-{queue}"
    report = work / f"{name}.xml"
    paths = [f"tests/unit/{path}" for path in SUITES[suite]]
    arguments = ["-o", "addopts=", "-o", "junit_family=xunit1", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
    arguments += ["--continue-on-collection-errors", f"--timeout={TEST_LIMIT_S}", f"--junitxml={report}"]
    with (
        tempfile.TemporaryDirectory(prefix="nemo-", dir="/tmp", ignore_cleanup_errors=True) as short,
        (work / f"{name}.log").open("w") as log,
    ):
        process = subprocess.Popen(
            [sys.executable, *QUEUES[queue], *arguments, *paths],
            cwd=checkout,
            env=environment(checkout, Path(short)),
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
    original = {(result.file, result.test): result for result in results["original"]}
    adapter = {(result.file, result.test): result for result in results["adapter"]}
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


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone or an export of NeMo-RL")
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="repeatable; all by default")
    parser.add_argument("--queue", action="append", choices=list(QUEUES), help="repeatable; both by default")
    parser.add_argument("--work", type=Path, help="where reports and logs go; by default a new directory in /tmp")
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that pytest and Ray are ended
    options = parsed()
    checkout = options.checkout.resolve()
    if not (checkout / "nemo_rl").is_dir():
        print(f"{checkout} has no directory nemo_rl: expected a clone or an export of NeMo-RL", file=sys.stderr)
        return 2
    work = (options.work or Path(tempfile.mkdtemp(prefix="nemo-rl-tests-", dir="/tmp"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Result]] = {queue: [] for queue in options.queue or QUEUES}
    for suite in options.suite or SUITES:
        for queue, found in results.items():
            found += run_suite(checkout, suite, queue=queue, work=work)
            print(f"{suite}, {queue}: done", file=sys.stderr, flush=True)
    print(table(results))
    missing = {(r.file, r.reason) for found in results.values() for r in found if r.outcome == "not collected"}
    print(*(f"not collected: {file}: {reason}" for file, reason in sorted(missing)), sep="\n")
    worse = False
    if len(results) == len(QUEUES):
        lines, worse = differences(results)
        print(*lines, sep="\n")
    print(f"reports and logs: {work}")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
