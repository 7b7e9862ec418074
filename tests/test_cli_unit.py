"""`tq unit`: one more storage unit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import dataplane
from tests.ports import free_ports


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


def test_a_unit_says_that_it_is_ready_in_json() -> None:
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m", "--name", "extra"]
        unit = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert unit.stdout is not None
        assert json.loads(unit.stdout.readline()) == {"unit": "extra", "http": None}
        unit.terminate()
        _, errors = unit.communicate(timeout=60)
    assert (unit.returncode, errors) == (0, "")


def test_a_unit_listens_where_it_is_told() -> None:
    port = str(free_ports())
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m", "--port", port]
        unit = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert unit.stdout is not None
        assert unit.stdout.readline().endswith(" ready\n")
        socket.create_connection(("127.0.0.1", int(port)), timeout=60).close()
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        unit.terminate()
        _, errors = unit.communicate(timeout=60)
    assert (unit.returncode, errors) == (0, "")
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.stderr
