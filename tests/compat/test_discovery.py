"""Which rendezvous a process has, and what a process of a cluster does without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dataplane.compat.transfer_queue as tq
from dataplane.compat import discovery
from tests.children import START_S

ROOT = Path(__file__).parents[2]

KNOWN = """
import importlib, importlib.metadata, json, sys

importlib.metadata.entry_points = lambda **_: []  # as where the project is on PYTHONPATH, and not installed
for name in sys.argv[1:]:
    importlib.import_module(name)

from dataplane.compat.discovery import is_isolated, known

print(json.dumps([[type(each).__name__ for each in known()], "workers" in sys.modules, is_isolated()]))
"""


def known_in_process(*imports: str) -> list[Any]:
    """The types of the rendezvous that a process without metadata has after these imports, whether it has imported
    `workers`, and whether it is isolated."""
    command = [sys.executable, "-c", KNOWN, *imports]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.ray
@pytest.mark.parametrize("imports", [["ray"], ["ray", "workers"], ["workers"]])
def test_rays_is_found_without_metadata(imports: list[str]) -> None:
    assert known_in_process(*imports) == [["RayRendezvous"], True, False]


@pytest.mark.integration
def test_there_is_none_without_ray() -> None:
    assert known_in_process() == [[], False, False]


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in a Ray cluster, and cannot import `workers`."""
    for name in ("TQ_ADDRESS", "TQ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(discovery, "_constructors", {})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "workers", None)  # its import fails
    for name in [name for name in sys.modules if name.startswith("workers.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.integration
@pytest.mark.usefixtures("isolated")
def test_a_service_that_others_do_not_find_is_a_warning_with_its_address(caplog: pytest.LogCaptureFixture) -> None:
    conf = tq.init({"dataplane": {"capacity_bytes": 8 << 20}})
    try:
        assert conf is not None
        address = conf["controller"]["zmq_info"].address
        (warning,) = [record.getMessage() for record in caplog.records if "of its own" in record.getMessage()]
        assert f"Started a service of its own at {address}: " in warning
        assert "PYTHONPATH" in warning
    finally:
        tq.close()


@pytest.mark.usefixtures("isolated")
def test_a_service_name_needs_workers() -> None:
    with pytest.raises(ValueError, match=r"controller.name='shared': .* cannot import the package `workers`"):
        tq.init({"controller": {"name": "shared"}})


@pytest.mark.parametrize("missing", ["workers", "workers.service", "workers.service.discovery"])
def test_another_package_named_workers_is_not_ours(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(discovery.importlib, "import_module", fail)
    assert discovery._load("workers.service.discovery:RayRendezvous") is None


def test_a_package_that_the_rendezvous_needs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'zmq'", name="zmq")

    monkeypatch.setattr(discovery.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="zmq"):
        discovery._load("workers.service.discovery:RayRendezvous")
