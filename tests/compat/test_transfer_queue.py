"""Scripts that use the TransferQueue package's interface see the same of the package (0.1.11, with its SimpleStorage
in Ray actors) and of `dataplane.compat.transfer_queue`.

Where the two are meant to differ, tests of this project's alone say so (`test_transfer_queue_own.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "batches",
    "metas",
    "samplers",
    "keys",
    "errors",
    "checkpoints",
    "polling",
    "groups",
    "ranks",
    "balanced",
)
"""In this order, because the package hands out the numbers of cleared samples again: what looks at them comes first."""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def saw(module: str, directory: Path) -> dict[str, Any]:
    """What every script saw of the module, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compat.runner", module, str(directory), *SCRIPTS],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return {script: json.loads((directory / f"{script}.json").read_text()) for script in SCRIPTS}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return saw("dataplane.compat.transfer_queue", tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("transfer_queue") is None:
        pytest.skip("the package TransferQueue is not installed: make setup installs it")
    return saw("transfer_queue", tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_sees_the_same_of_both(script: str, original: dict[str, Any], ours: dict[str, Any]) -> None:
    assert "failed" not in original[script], original[script]["failed"]
    assert "failed" not in ours[script], ours[script]["failed"]
    assert ours[script] == original[script]


def test_all_scripts_are_run() -> None:
    written = {path.stem for path in (ROOT / "tests" / "compat" / "scripts").glob("*.py")}
    assert written - {"__init__"} == set(SCRIPTS)
