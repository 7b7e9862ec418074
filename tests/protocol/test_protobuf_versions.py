"""The service runs beside each protobuf that pyproject.toml allows, and beside gRPC's own health stubs, whichever of
both is imported first."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".venv-protobuf"
OTHERS = {"5.29.1": "1.71.2", "6.33.0": "1.76.0", "7.35.1": "1.85.1"}
"""Versions of protobuf, and of a grpcio-health-checking that takes it: it takes one major version."""
TIMEOUT_S = 300.0
ORDERS = pytest.mark.parametrize("first", ["ours", "theirs"])


@ORDERS
def test_a_service_beside_grpcs_own_stubs(first: str) -> None:
    runs(importlib.metadata.version("protobuf"), first, ROOT)


@pytest.mark.slow
@ORDERS
@pytest.mark.parametrize("version", OTHERS)
def test_a_service_beside_another_protobuf(version: str, first: str) -> None:
    runs(version, first, installed(version), ROOT)


def runs(version: str, first: str, *path: Path) -> None:
    """The program ends well where these folders come before what is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-m", "tests.beside_protobuf", version, first]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def installed(version: str) -> Path:
    """A folder with that protobuf, and with what takes it; kept for the next time."""
    folder = CACHE / version
    if folder.exists():
        return folder
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        packages = [f"protobuf=={version}", f"grpcio-health-checking=={OTHERS[version]}"]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{made}/all", *packages]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            pytest.skip(f"protobuf {version} cannot be installed here: {done.stderr[-500:]}")
        try:
            Path(made, "all").rename(folder)
        except OSError:  # another test process was faster
            assert folder.exists()
    return folder
