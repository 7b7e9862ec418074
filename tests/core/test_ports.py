"""Ports that are taken: the error says by whom."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dataplane import DataPlaneConfig, PortTakenError, serve
from dataplane.cli import main
from dataplane.config import MIB
from dataplane.controller.controller import Controller
from dataplane.core import ports as ports_module
from dataplane.core.ports import require_free_port
from dataplane.storage.unit import StorageUnit
from tests.ports import free_ports

pytestmark = pytest.mark.integration

CONFIG = DataPlaneConfig(capacity_bytes=8 * MIB)
SELF = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"


@pytest.fixture
def first() -> int:
    """The first of three ports that are free."""
    return free_ports(3)


def test_a_port_that_is_taken_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError) as caught:
            require_free_port("127.0.0.1", port)
    error = caught.value
    assert (error.address, error.holder) == (f"127.0.0.1:{port}", SELF)
    assert str(error) == (
        f"cannot listen on 127.0.0.1:{port}: the port is in use by {SELF}. "
        "Stop the process that uses it, or choose another port."
    )
    assert isinstance(error, OSError)
    assert pickle.loads(pickle.dumps(error)).errno == error.errno
    require_free_port("127.0.0.1", port)


def test_a_holder_in_another_process_is_named() -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        with pytest.raises(PortTakenError, match=rf"in use by process {holder.pid} \(python"):
            require_free_port("127.0.0.1", int(holder.stdout.readline()))


def test_a_process_that_cannot_be_looked_into_is_told_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "_process_with", lambda link: None)
    why = f"in use by a process of user {os.geteuid()}. "
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortTakenError, match=why):
        require_free_port("127.0.0.1", taken.getsockname()[1])


def test_a_kernel_that_tells_nothing_leaves_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "_TABLES", ("/nowhere",))
    why = r"the port is in use\. Stop the process"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortTakenError, match=why):
        require_free_port("127.0.0.1", taken.getsockname()[1])


def test_an_address_that_is_not_here_is_no_port_that_is_taken() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:9000: Cannot assign") as caught:
        require_free_port("192.0.2.1", 9000)
    assert not isinstance(caught.value, PortTakenError)


@pytest.mark.parametrize(("name", "offset"), [("gRPC", 0), ("ZMQ", 1), ("HTTP", 2)])
def test_each_port_of_a_service(name: str, offset: int, first: int) -> None:
    with socket.create_server(("127.0.0.1", first + offset)), pytest.raises(PortTakenError) as caught:
        Controller(replace(CONFIG, port=first, http_port=first + 2)).start()
    assert (caught.value.address, caught.value.holder) == (f"127.0.0.1:{first + offset}", SELF)


def test_the_port_of_a_unit(first: int) -> None:
    with serve(CONFIG) as server, socket.create_server(("127.0.0.1", first)):
        unit = StorageUnit(replace(CONFIG, port=first), server.address)
        with pytest.raises(PortTakenError) as caught:
            unit.start()
    assert (caught.value.address, caught.value.holder) == (f"127.0.0.1:{first}", SELF)


def test_a_second_service_is_told_in_one_line_of_the_first(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Controller(replace(CONFIG, port=first)):
        assert main(["serve", "--port", str(first), "--units", "0"]) == 1
    text = capsys.readouterr().err
    assert text == (
        f"tq: cannot listen on 127.0.0.1:{first}: the port is in use by {SELF}. "
        "Stop the process that uses it, or choose another port.\n"
    )


def test_a_port_that_the_state_had_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.controller.controller.PORT_WAIT_S", 0.0)
    config = replace(CONFIG, state_dir=str(tmp_path))
    with Controller(config) as before:
        port = int(before.address.rpartition(":")[2])
    why = f"in use by process .*had port {port} before, and clients reconnect to it"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTakenError, match=why):
        Controller(config).start()
