"""`tq unit`: one more storage unit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

import dataplane
from tests.children import START_S, Child
from tests.cli.service import complaints
from tests.ports import free_ports

pytestmark = pytest.mark.integration


def test_a_unit_says_when_its_controller_is_gone() -> None:
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m", "--name", "extra"]
        command += ["--reconnect", "0"]
        with Child(command) as unit:
            assert unit.line() == "storage unit extra ready"
            address = server.address
            server.close()
            code, _, errors = unit.finish()
    assert code == 1
    assert f"storage unit extra lost its controller at {address}" in errors


def test_a_unit_says_that_it_is_ready_in_json() -> None:
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m", "--name", "extra"]
        with Child([*command, "--json"]) as unit:
            assert json.loads(unit.line()) == {"unit": "extra", "http": None}
            unit.terminate()
            code, _, errors = unit.finish()
    assert (code, complaints(errors)) == (0, [])


def test_the_name_of_a_unit_cannot_write_on_the_terminal() -> None:
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m"]
        with Child([*command, "--name", "extra\n\x1b[2J"]) as unit:
            assert unit.line() == r"storage unit 'extra\n\x1b[2J' ready"
            unit.terminate()
            code, output, errors = unit.finish()
    assert (code, output, complaints(errors)) == (0, "", [])


def test_a_unit_listens_where_it_is_told() -> None:
    port = str(free_ports())
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m", "--port", port]
        with Child(command) as unit:
            assert unit.line().endswith(" ready")
            socket.create_connection(("127.0.0.1", int(port)), timeout=60).close()
            second = subprocess.run(command, capture_output=True, text=True, timeout=60)
            unit.terminate()
            code, _, errors = unit.finish()
    assert (code, complaints(errors)) == (0, [])
    assert second.returncode == 1
    assert f"tq: cannot listen on 127.0.0.1:{port}: the port is in use by process {unit.pid} (" in second.stderr


def test_a_unit_that_waits_for_its_controller_ends_when_it_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Child([sys.executable, "-m", "dataplane", "unit", address, "--capacity", "8m"]) as unit:
            silent.settimeout(START_S)
            peer, _ = silent.accept()
            with peer:
                unit.terminate()
                assert unit.finish() == (0, "", "")
