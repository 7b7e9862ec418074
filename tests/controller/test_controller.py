"""The controller as a whole: where it listens, what it imports, and that it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dataplane import connect, serve
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import DataPlaneConfig
from dataplane.controller import controller as controller_module
from dataplane.controller.controller import Controller
from dataplane.core.addresses import split_address
from dataplane.errors import ServiceUnavailableError
from dataplane.ledger import commands as c
from tests.controller.service import ScriptedLedger
from tests.ports import free_ports

pytestmark = pytest.mark.integration

CONFIG = DataPlaneConfig(heartbeat_s=0.1)


def test_it_listens_where_it_is_told() -> None:
    port = free_ports(2)
    with Controller(replace(CONFIG, port=port)) as controller:
        assert controller.address == f"127.0.0.1:{port}"
        for each in (port, port + 1):
            socket.create_connection(("127.0.0.1", each), timeout=5).close()


@pytest.mark.parametrize("which", [0, 1], ids=["grpc", "zmq"])
def test_a_port_that_is_taken_is_an_error_and_leaves_nothing(which: int) -> None:
    port = free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + which))
        taken.listen()
        with pytest.raises(OSError, match=f"cannot listen on 127.*:{port + which}"):
            Controller(replace(CONFIG, port=port)).start()
    with Controller(replace(CONFIG, port=port)):
        pass


def test_two_services_never_share_a_port() -> None:
    with Controller(CONFIG) as first:
        port = split_address(first.address)[1]
        with pytest.raises(OSError, match="cannot listen"):
            Controller(replace(CONFIG, port=port)).start()


def test_beyond_loopback_it_needs_a_token_and_gives_an_address_for_others() -> None:
    with pytest.raises(ValueError, match="a token"):
        Controller(replace(CONFIG, host="0.0.0.0")).start()
    with Controller(replace(CONFIG, host="0.0.0.0", token="secret")) as controller:
        host, port = split_address(controller.address)
        assert host != "0.0.0.0"
        channel = ControllerChannel.open(replace(CONFIG, address=f"127.0.0.1:{port}", token="secret"))
        channel.call(c.Units())
        channel.close()


def test_beyond_loopback_without_any_guard_it_must_be_told_to_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with serve({"host": "0.0.0.0", "insecure": True, "capacity_bytes": 1 << 20}) as server:
        assert [record.message for record in caplog.records if "insecure" in record.message] == [
            "insecure: any client that can connect to 0.0.0.0 can read, change and drop all data of this service"
        ]
        port = split_address(server.address)[1]
        connect(f"127.0.0.1:{port}").close()
    caplog.clear()
    with Controller(replace(CONFIG, insecure=True)):
        assert "insecure" not in caplog.text


def test_stopping_ends_everything_and_answers_parked_calls() -> None:
    ledger = ScriptedLedger(lambda call: None)
    controller = Controller(CONFIG, ledger=ledger, epoch=1).start()
    address = controller.address
    controller.stop()
    controller.stop()
    with pytest.raises(ServiceUnavailableError):
        ControllerChannel.open(replace(CONFIG, address=address))


def test_epochs_grow_from_run_to_run() -> None:
    epochs = []
    for _ in range(2):
        with Controller(CONFIG) as controller:
            channel = ControllerChannel.open(replace(CONFIG, address=controller.address))
            epochs.append(channel.epoch)
            channel.close()
    assert epochs[0] < epochs[1]


def imported_after(code: str) -> set[str]:
    script = code + "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_the_controller_imports_no_torch_and_leaves_the_environment_alone() -> None:
    modules = imported_after(
        "import os; before = dict(os.environ)\n"
        "from dataplane.config import DataPlaneConfig; from dataplane.controller.controller import Controller\n"
        "Controller(DataPlaneConfig()).start().stop()\n"
        "assert dict(os.environ) == before"
    )
    assert "grpc" in modules
    assert not modules & {"torch", "tensordict", "ray"}


def test_a_client_imports_no_grpc() -> None:
    modules = imported_after("import dataplane.client.rpc.channel, dataplane.client.rpc.async_channel")
    assert "zmq" in modules
    assert not modules & {"grpc", "torch", "ray"}


def test_a_service_with_state_keeps_its_port(tmp_path: Path) -> None:
    config = DataPlaneConfig(state_dir=str(tmp_path))
    with Controller(config) as first:
        address = first.address
    with Controller(config) as second:
        assert second.address == address
        assert second.recovered
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert int(address.rpartition(":")[2]) + 1 < first_ephemeral


def test_a_port_that_is_taken_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "PORT_WAIT_S", 0.0)
    config = DataPlaneConfig(state_dir=str(tmp_path))
    with Controller(config) as first:
        host, _, port = first.address.rpartition(":")
    taken = f"had port {port} before, and clients reconnect to it"
    with socket.create_server((host, int(port))), pytest.raises(OSError, match=taken):
        Controller(config).start()
    with Controller(config) as again:
        assert again.address == f"{host}:{port}"
