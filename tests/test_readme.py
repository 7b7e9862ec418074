"""The README's code runs as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


DRIVERS = [block for block in BLOCKS if "import ray" in block or "Cluster(" in block]
OTHERS = [block for block in BLOCKS if block not in DRIVERS]


def test_there_are_blocks() -> None:
    assert OTHERS
    assert DRIVERS


@pytest.mark.parametrize("block", OTHERS, ids=[str(n) for n in range(len(OTHERS))])
def test_block(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102


@pytest.mark.ray
@pytest.mark.parametrize("block", DRIVERS, ids=[str(n) for n in range(len(DRIVERS))])
def test_block_that_starts_a_cluster(block: str) -> None:
    """In a process of its own, as a driver is in one cluster only."""
    directory = tempfile.mkdtemp(prefix="tqd", dir="/tmp")
    try:
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": directory},
            capture_output=True,
            text=True,
            timeout=150,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_path_that_the_layout_table_names_exists() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| folder |")[1].split("\n\n")[0]
    for cell in re.findall(r"^\| (`[^|]+`) \|", table, re.M):
        first, *others = cell.strip("`").split()
        assert (ROOT / first).exists(), first
        for other in others:
            assert (ROOT / Path(first).parent / other).exists(), other
