"""What is built to be installed has all that it needs, and nothing else; and it works where only it is.

`make dist` tries the same with every dependency installed anew.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source archive, and the wheel that is built from what is in that archive."""
    out = tmp_path_factory.mktemp("dist")
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
        assert names == sources()
        assert {"dataplane/py.typed", "workers/py.typed", "dataplane/pb/control_pb2.py"} <= names
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


def test_the_wheel_works_where_only_it_is(built: Path, tmp_path: Path) -> None:
    """Its dependencies are this environment's, so that nothing is downloaded; this tree's packages are not in reach."""
    home = tmp_path / "venv"
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, only(built, "*.whl")], check=True, env=bare)
    packages = only(home, "lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done = subprocess.run(
        [python, "-P", ROOT / "tests" / "wheel_trial.py"],
        cwd=tmp_path,
        env=bare,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"the wheel of {PROJECT['version']} works\n"


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
