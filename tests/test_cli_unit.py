"""`tq unit`: one more storage unit."""

from __future__ import annotations

import subprocess
import sys

import dataplane


def test_a_unit_says_when_its_controller_is_gone() -> None:
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m", "--name", "extra"]
        command += ["--reconnect", "0"]
        unit = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert unit.stdout is not None
        assert unit.stdout.readline() == "storage unit extra ready\n"
        address = server.address
    _, errors = unit.communicate(timeout=60)
    assert unit.returncode == 1
    assert f"storage unit extra lost its controller at {address}" in errors
