"""What scripts see of the TransferQueue package and of this project's adapters, once for all tests."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dataplane.compat.transfer_queue as tq
from dataplane.client.rpc.pending_calls import Calls

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "tests" / "compat" / "scripts").glob("[a-z]*.py"))


SETTINGS = {
    "TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL": "1",
    # On a busy machine the package's actors answer late: without these it gives up after some seconds.
    "TQ_STORAGE_HANDSHAKE_RETRY_INTERVAL": "60",
    "TQ_STORAGE_HANDSHAKE_TIMEOUT": "200",
    "TQ_DATA_UPDATE_RESPONSE_TIMEOUT": "200",
}


class Side:
    """What every script sees of a module, in a process of its own that runs while the other side's does."""

    def __init__(self, module: str, directory: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
        self._directory = directory
        directory.mkdir()
        with (directory / "output").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.compat.runner", module, str(directory), *SCRIPTS],
                cwd=ROOT,
                env={**environment, "PYTHONPATH": str(ROOT), **SETTINGS},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def saw(self) -> dict[str, Any]:
        code = self._process.wait(600)
        assert code == 0, (self._directory / "output").read_text()[-4000:]
        return {script: json.loads((self._directory / f"{script}.json").read_text()) for script in (*SCRIPTS, "nemo")}

    def end(self) -> None:
        self._process.kill()
        self._process.wait(60)


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Of the package, and of the adapter."""
    if importlib.util.find_spec("transfer_queue") is None:
        pytest.skip("the package TransferQueue is not installed: make setup installs it")
    place = tmp_path_factory.mktemp("both")
    sides = [Side(module, place / module) for module in ("transfer_queue", "dataplane.compat.transfer_queue")]
    try:
        original, ours = (side.saw() for side in sides)
        yield original, ours
    finally:
        for side in sides:
            side.end()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A service of this process, which the module's functions use."""
    for name in ("TQ_ADDRESS", "TQ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    tq.init({"dataplane": {"capacity_bytes": 32 << 20}})
    yield
    tq.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the commands that clients send from now on."""
    names: list[str] = []
    begin = Calls.begin

    def seen(self: Calls, command: Any, timeout_s: float | None = None) -> Any:
        names.append(type(command).__name__)
        return begin(self, command, timeout_s)

    monkeypatch.setattr(Calls, "begin", seen)
    return names
