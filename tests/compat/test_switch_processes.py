"""The switch in processes of an environment that has the hook beside its packages, as an installed wheel leaves it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from dataplane.compat.switch import HOOK, VARIABLE
from tests.children import START_S

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
PACKAGES = Path(sysconfig.get_paths()["purelib"])

LOADED = (
    "import json, sys; print(json.dumps([name for name in sys.modules if name.startswith(('dataplane', 'workers'))]))"
)

JOB = """
import importlib.util, json, multiprocessing, os, subprocess, sys

def where(module="transfer_queue"):
    return importlib.util.find_spec(module).origin

if __name__ == "__main__":
    code = "import importlib.util; print(importlib.util.find_spec('transfer_queue').origin)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(where)
    name = __spec__.name if __spec__ else None
    print(json.dumps({"argv": sys.argv[1:], "spec": name, "found": [where(), child, spawned]}))
"""

USE = """
import json, logging, pickle, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import transfer_queue as tq
import transfer_queue.metadata
from transfer_queue import KVBatchMeta
from transfer_queue.metadata import BatchMeta
import dataplane.compat.transfer_queue as ours
import dataplane.compat.transfer_queue.metadata

assert tq is ours and transfer_queue.metadata is dataplane.compat.transfer_queue.metadata
assert BatchMeta is ours.BatchMeta and isinstance(KVBatchMeta(keys=["a"], tags=[{}]), ours.KVBatchMeta)
assert pickle.loads(b"ctransfer_queue.metadata\\nBatchMeta\\n.") is ours.BatchMeta
try:
    import transfer_queue.absent
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose environment has the hook, this tree, and this environment's packages."""
    return environment(tmp_path_factory.mktemp("switch"), PACKAGES)


@pytest.fixture(scope="module")
def python_without_the_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `python`, without the package TransferQueue."""
    home = tmp_path_factory.mktemp("switch")
    (home / "others").mkdir()
    for each in PACKAGES.iterdir():
        if not each.name.lower().startswith(("transfer_queue", "transferqueue")):
            (home / "others" / each.name).symlink_to(each)
    return environment(home, home / "others")


def environment(home: Path, installed: Path) -> Path:
    """The interpreter of a new one."""
    venv.create(home / "venv", with_pip=False)
    (packages,) = (home / "venv").glob("lib/python3*/site-packages")
    (packages / "others.pth").write_text(f"{installed}\n{ROOT}\n")
    shutil.copy(ROOT / "dataplane" / "compat" / HOOK, packages)
    return home / "venv" / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path | None = None, timeout_s: float = START_S, **environment: str) -> str:
    """What it prints."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TQ_", "PYTHON", "COV"))}
    done = subprocess.run(
        [python, *arguments],
        env={**own, **environment},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_variable_nothing_of_ours_is_imported(python: Path) -> None:
    for environment in ({}, {VARIABLE: ""}):
        assert json.loads(run(python, "-c", LOADED, **environment)) == []


def test_with_it_only_the_switch_is(python: Path) -> None:
    loaded = json.loads(run(python, "-c", LOADED, **{VARIABLE: "transfer_queue"}))
    assert loaded == ["dataplane", "dataplane.compat", "dataplane.compat.switch"]


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", ["python", "python_without_the_original"])
def test_a_process_that_is_not_edited(interpreter: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = request.getfixturevalue(interpreter)
    (tmp_path / "use.py").write_text(USE)
    told, lacking = run(python, "use.py", cwd=tmp_path, **{VARIABLE: "all"}).splitlines()
    assert told == f"import transfer_queue is replaced by dataplane.compat.transfer_queue: {VARIABLE}=all"
    assert lacking.startswith(f"No module named 'transfer_queue.absent': {VARIABLE}=all replaces")


@pytest.mark.slow
@pytest.mark.parametrize("form", [["-m", "job"], ["job.py"]], ids=["module", "script"])
def test_a_module_or_a_script_with_its_arguments(python: Path, tmp_path: Path, form: list[str]) -> None:
    """In it, in a program that it starts, and in a process that multiprocessing starts."""
    (tmp_path / "job.py").write_text(JOB)
    command = ["-X", "utf8", "-m", "dataplane.compat.transfer_queue", *form, "-m", "x=1"]
    saw: dict[str, Any] = json.loads(run(python, *command, cwd=tmp_path))
    assert saw["argv"] == ["-m", "x=1"]
    assert saw["spec"] == ("job" if form[0] == "-m" else None)
    assert saw["found"] == [str(ROOT / "dataplane" / "compat" / "transfer_queue" / "__init__.py")] * 3
