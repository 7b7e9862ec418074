"""The code in README and docs runs as it stands, and names flags that there are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from dataplane import connect, serve
from tests.documents import ROOT, Block, flags_of, scripts, shell_blocks

LIMIT_S = 500.0
SIDE_BY_SIDE = 3
BY_ITSELF = "test_python_that_starts_a_cluster"
NOT_RUN = 20
"""More blocks than this that nobody runs are too many."""


def starts_a_cluster(script: list[Block]) -> bool:
    """Or does something else that a process does once."""
    once = ("import ray", "Cluster(", "set_tracer_provider(", "dataplane.compat")
    return any(words in block.code for block in script for words in once)


CLUSTERS = [script for script in scripts() if starts_a_cluster(script)]
LONG = "docs/trainer.md"
"""The page with the longest of them."""
OTHERS = [script for script in scripts() if not starts_a_cluster(script)]


def code_of(script: list[Block]) -> str:
    """The blocks, on the lines that they have in their page."""
    code = ""
    for block in script:
        if not block.file:
            code += "\n" * (block.line - code.count("\n")) + block.code
    return code


def in_process_of_its_own(arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run in an empty directory, which it may fill."""
    directory = tempfile.mkdtemp(prefix="tqd", dir="/tmp")
    binaries = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "RAY_TMPDIR": directory,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": f"{directory}:{ROOT}",
        **more,
    }
    try:
        return subprocess.run(
            arguments, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_there_are_some() -> None:
    assert OTHERS
    assert CLUSTERS


@pytest.mark.integration
@pytest.mark.parametrize("script", OTHERS, ids=lambda script: script[0].name)
def test_python(script: list[Block]) -> None:
    assert not any(block.file for block in script), "files are for scripts with processes of their own"
    exec(compile(code_of(script), script[0].page, "exec"), {"__name__": "__main__"})  # noqa: S102


def run_by_itself(script: list[Block]) -> subprocess.CompletedProcess[str]:
    write = "".join(f"open({block.file!r}, 'w').write({block.code!r})\n" for block in script if block.file)
    slow_starts = "from tests.ray.slow_start import allow_slow_starts; allow_slow_starts(); "
    return in_process_of_its_own([sys.executable, "-c", slow_starts + write + code_of(script)])


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Those that tests ask for, a few side by side: a cluster that starts or ends mostly waits."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        asked = [item for item in request.session.items if isinstance(item, pytest.Function)]
        scripts = [item.callspec.params["script"] for item in asked if item.originalname == BY_ITSELF]
        begun = {script[0].name: pool.submit(run_by_itself, script) for script in scripts}
        yield begun
        pool.shutdown(cancel_futures=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=script[0].name, marks=[pytest.mark.soak] if script[0].page == LONG else [])
        for script in CLUSTERS
    ],
)
def test_python_that_starts_a_cluster(
    script: list[Block], runs: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    """In a process of its own, as a driver is in one cluster only."""
    done = runs[script[0].name].result()
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve({"capacity_bytes": 16 << 20}) as server, connect(server.address) as client:
        client.register_partition("train", ["input_ids"], num_samples=1, consumer_tasks=["policy"])
        yield server.address


RUN = [block for block in shell_blocks() if not block.why_not]


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in RUN if "pip install" not in block.code], ids=lambda b: b.name)
def test_shell(block: Block, address: str) -> None:
    done = in_process_of_its_own(["bash", "-euo", "pipefail", "-c", block.code], TQ_ADDRESS=address)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]


def test_few_blocks_are_not_run() -> None:
    left = [block.name for block in shell_blocks() if block.why_not]
    assert len(left) <= NOT_RUN, left


def test_every_flag_that_a_shell_block_names_is_there() -> None:
    for block in shell_blocks():
        for line in block.code.replace("\\\n", " ").splitlines():
            for verb, rest in re.findall(r"(?:^|\s)tq ([a-z]+)([^|;&#]*)", line.split(" #")[0]):
                wrong = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", rest)) - flags_of(verb)
                assert not wrong, f"{block.name}: tq {verb} has no {sorted(wrong)}"
