"""What is built to be installed has all that it needs, and nothing else; and it works where only it is.

`make dist` tries the same with every dependency installed anew.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.compat.switch import HOOK
from tests.children import Child

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree without what git ignores."""
    copied = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            (copied / name).write_bytes((ROOT / name).read_bytes())
    return copied


@pytest.fixture(scope="module")
def built(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source archive, and the wheel that is built from what is in that archive."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "-o", out, copied], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def sources() -> set[str]:
    """Every file of the two packages in this tree that is no leftover of running it."""
    found = {path for package in ("dataplane", "workers") for path in (ROOT / package).rglob("*") if path.is_file()}
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_the_wheel_has_the_packages_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == {*sources(), HOOK}
        assert {"dataplane/py.typed", "workers/py.typed", "dataplane/protocol/pb/control_pb2.py"} <= names
        (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        text = wheel.read(metadata).decode()
    assert "License-Expression: Apache-2.0\n" in text
    assert "License-File: LICENSE\n" in text
    assert f"Version: {PROJECT['version']}\n" in text


def test_the_source_archive_can_be_built_and_read(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml"} <= names
    assert "proto/control.proto" in names
    assert "docs/reliability.md" in names
    assert sources() <= names
    assert not [name for name in names if name.startswith("tests")]


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel. Its dependencies are this environment's, so that nothing is
    downloaded; of this tree only the package `tests` is in reach."""
    home = tmp_path_factory.mktemp("wheel")
    venv.create(home / "venv", with_pip=False)
    python = home / "venv" / "bin" / "python"
    pip(python, "install", "-q", "--no-deps", "--no-index", only(built, "*.whl"))
    (home / "tree").mkdir()
    (home / "tree" / "tests").symlink_to(ROOT / "tests")
    packages = only(home, "venv/lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{home / 'tree'}\n")
    return python


def pip(python: Path, *arguments: str | Path) -> None:
    """This environment's, on the environment of another interpreter."""
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *arguments], check=True, env=bare(python))


def bare(python: Path) -> dict[str, str]:
    """No variable of this process's environment but those that give Ray's processes more time to start."""
    slow_starts = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    return {"PATH": "/usr/bin:/bin", "HOME": str(python.parents[2]), "RAY_AUTH_MODE": "token", **slow_starts}


@pytest.mark.soak
def test_the_wheel_works_where_only_it_is(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed, "-P", ROOT / "tests" / "wheel_trial.py"],
        cwd=tmp_path,
        env=bare(installed),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"the wheel of {PROJECT['version']} works\n"


@pytest.fixture
def cluster(installed: Path) -> Iterator[str]:
    """The address of a Ray cluster whose processes have no TQ_REPLACE in their environments."""
    directory = tempfile.mkdtemp(prefix="tqs", dir="/tmp")
    try:
        with Child([installed, "-P", "-m", "tests.ray.cluster_alone", directory], env=bare(installed)) as running:
            yield running.line()
            assert running.finish()[0] == 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def driver(python: Path, cwd: Path, *command: str | Path, **environment: str) -> dict[str, Any]:
    """What a driver saw."""
    done = subprocess.run(
        [python, "-P", *command],
        cwd=cwd,
        env={**bare(python), **environment},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    saw: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return saw


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_driver_switches_its_whole_job(installed: Path, cluster: str, tmp_path: Path) -> None:
    """And no other job of the cluster."""
    trial = ROOT / "tests" / "switch_trial.py"
    ours = str(only(installed.parents[1], "lib/python3*/site-packages") / "dataplane/compat/transfer_queue/__init__.py")
    saw = driver(installed, tmp_path, "-m", "dataplane.compat.transfer_queue", trial, cluster, "use")
    assert saw == {
        "driver": [ours, None, None],
        "implied": [[ours, None, None]],
        "plain": [[ours, None, None]],
        "job config": [[ours, "job", None]],
        "runtime env": [
            [ours, "job", None],
            [ours, "job", "here"],
            [ours, "job", None],
            [ours, "job", "here"],
            [ours, "job", "here"],
            [ours, "job", "here"],
        ],
    }
    saw = driver(installed, tmp_path, trial, cluster, TQ_REPLACE="all")
    assert saw == {"driver": [ours, None, None], "implied": [[ours, None, None]]}
    saw = driver(installed, tmp_path, trial, cluster)
    original = importlib.util.find_spec("transfer_queue")
    theirs = original.origin if original is not None else None
    assert saw == {"driver": [theirs, None, None], "implied": [[theirs, None, None]]}


def test_nothing_of_the_wheel_stays_when_it_is_uninstalled(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    packages = only(tmp_path, "venv/lib/python3*/site-packages")
    python = tmp_path / "venv" / "bin" / "python"
    pip(python, "install", "-q", "--no-deps", "--no-index", only(built, "*.whl"))
    assert (packages / HOOK).is_file()
    pip(python, "uninstall", "-q", "-y", PROJECT["name"])
    assert not [path for path in (tmp_path / "venv" / "lib").rglob("*") if path.is_file()]


def test_an_editable_installation_has_the_hook(copied: Path, tmp_path: Path) -> None:
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path / "dist"], cwd=copied, check=True, capture_output=True)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip(python, "install", "-q", "--no-deps", "--no-index", only(tmp_path, "dist/*.whl"))
    packages = only(tmp_path, "venv/lib/python3*/site-packages")
    assert (packages / HOOK).read_text() == (ROOT / "dataplane" / "compat" / HOOK).read_text()
    code = "import sys; print('dataplane.compat.switch' in sys.modules)"
    for value, loaded in (("", "False"), ("all", "True")):
        done = subprocess.run([python, "-c", code], env={"TQ_REPLACE": value}, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"{loaded}\n", "")


def test_the_changelog_knows_this_version() -> None:
    assert f"\n## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_is_imported() -> None:
    needed = {re.split("[^A-Za-z0-9_-]", requirement)[0] for requirement in PROJECT["dependencies"]}
    modules = importlib.metadata.packages_distributions()
    imported = {name for module in imports() for name in modules.get(module, ())}
    assert needed <= {name.lower().replace("_", "-") for name in imported}


def imports() -> set[str]:
    """The first words of the names of all modules that the two packages import."""
    found: set[str] = set()
    for name in sources():
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))) if name.endswith(".py") else ():
            if isinstance(node, ast.Import):
                found.update(each.name.partition(".")[0] for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found
