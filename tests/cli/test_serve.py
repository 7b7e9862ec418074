"""`tq serve` as a person and an init system use it: real processes, real signals."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import dataplane
from dataplane import DataPlaneConfig, connect
from dataplane.cli import main
from dataplane.cli import serve as serve_module
from dataplane.config import MIB
from dataplane.core.memory_limits import AvailableMemory
from dataplane.storage import capacity, unit_process
from dataplane.storage.arena_record import discard
from dataplane.storage.unit_process import UnitProcesses
from tests.cli.service import Service, child_of, services  # noqa: F401
from tests.conftest import litter
from tests.ports import free_ports
from tests.restarts import wait_until
from tests.web_client import ask

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[DataPlaneConfig]:
    """What `tq serve` would run with: nothing is started."""
    found: list[DataPlaneConfig] = []

    def take(config: DataPlaneConfig, count: int, json: bool) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(serve_module, "_run_service", take)
    return found


@pytest.mark.parametrize(("flags", "told"), [([], "across-hosts"), (["--checksums", "always"], "always")])
def test_which_rows_get_checksums_is_told_to_the_service(
    flags: list[str], told: str, settings: list[DataPlaneConfig]
) -> None:
    assert main(["serve", *flags]) == 0
    assert settings[0].checksums == told


@pytest.mark.parametrize(
    ("flags", "port"),
    [
        ([], None),
        (["--ui"], 0),
        (["--metrics"], 0),
        (["--ui", "--port", "7200"], 7202),
        (["--http-port", "9000", "--port", "7200"], 9000),
    ],
)
def test_which_port_http_is_served_at(flags: list[str], port: int | None, settings: list[DataPlaneConfig]) -> None:
    assert main(["serve", *flags]) == 0
    assert settings[0].http_port == port


def test_it_says_where_it_is_as_text(services: list[Service]) -> None:
    service = Service("--ui", "--units", "1")
    services.append(service)
    assert service.first_line == f"data plane service at {service.address}\n"
    assert service.process.stdout is not None
    words = service.process.stdout.readline().split()
    assert words[:2] == ["page", "at"]
    address = words[2].removeprefix("http://").rstrip("/,")
    assert ask(address, "/healthz").text == "ok\n"
    assert 'tq_unit_connected{name="unit-0",unit="1"} 1.0' in ask(address, "/metrics").text
    assert service.end(signal.SIGTERM) == 0
    assert service.complaints == []


def test_it_says_where_it_is_as_json(services: list[Service]) -> None:
    service = Service("--metrics", "--units", "0", "--json")
    services.append(service)
    told = json.loads(service.first_line)
    assert ask(told["http"].removeprefix("http://"), "/healthz").status == 200
    with connect(told["address"]) as client:
        assert client.stats().units == ()
    assert service.end(signal.SIGTERM) == 0
    assert service.complaints == []


def test_a_public_host_needs_a_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_TOKEN", raising=False)
    assert main(["serve", "--host", "0.0.0.0", "--units", "0"]) == 1
    assert "token" in capsys.readouterr().err


def control_c(service: Service) -> int:
    """As a terminal ends what runs in it; its exit code."""
    os.killpg(service.process.pid, signal.SIGINT)
    return service.end(0)


@pytest.mark.parametrize("end", [lambda service: service.end(signal.SIGTERM), control_c], ids=["SIGTERM", "Ctrl-C"])
def test_serve_status_and_a_clean_end(
    services: list[Service],
    end: Callable[[Service], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    service = Service("--units", "2", "--token-file", str(token))
    services.append(service)
    with connect(service.address, token="secret") as client:
        client.register_partition("train", ["x"], 4, ["policy"])
        client.put_samples(["a", "b"], "train", {"x": torch.arange(2)})
        assert main(["status", service.address, "--token-file", str(token)]) == 0
        text = capsys.readouterr().out
        assert "partition train: 2 live" in text
        assert "2 of 4 born" in text
        assert main(["status", service.address, "--token-file", str(token), "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert len(report["units"]) == 2
        assert report["partitions"][0]["produced"] == {"x": 2}
    for wrong in ("guess", None):
        with pytest.raises(ConnectionError, match="token"):
            connect(service.address, token=wrong)
    assert end(service) == 0
    assert service.complaints == []
    assert not litter(service.files)


def test_a_unit_that_stands_still_does_not_keep_its_service_from_ending(services: list[Service]) -> None:
    service = Service("--units", "1")
    services.append(service)
    unit = psutil.Process(child_of(service))
    unit.suspend()
    assert service.end(signal.SIGTERM) == 0
    assert service.complaints == ["Storage unit unit-0 did not stop within 12 s and is killed"]
    wait_until(lambda: not unit.is_running())
    assert not litter(service.files)


def test_a_service_whose_units_are_starting_ends_when_it_is_told(services: list[Service]) -> None:
    service = Service("--units", "2", await_ready=False)
    services.append(service)
    serving = psutil.Process(service.process.pid)

    def started() -> list[psutil.Process]:
        return [each for each in serving.children() if "dataplane.storage.unit_process" in each.cmdline()]

    wait_until(lambda: len(started()) == 2)
    units = started()
    for unit in units:
        unit.suspend()
    assert service.end(signal.SIGTERM) == 0
    wait_until(lambda: not any(unit.is_running() for unit in units))
    assert not litter(service.files)


def test_more_units_than_there_is_space_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--units", "99999999"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("tq: cannot start 99,999,999 storage units, at most "), text
    assert text.count("\n") == 1


_INTERRUPTED = """
import os, signal, sys
import dataplane.cli

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.exit(dataplane.cli.main(["serve", "--units", "0"]))
"""


@pytest.mark.parametrize(
    ("importing", "code"), [("dataplane.cli.app", -signal.SIGINT), ("dataplane.controller.controller", 0)]
)
def test_an_interrupt_while_it_is_imported_is_no_traceback(importing: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, importing], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_killed_service_goes_on_with_its_state(services: list[Service], tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = Service("--units", "2", "--state-dir", str(state))
    services.append(first)
    with connect(first.address, heartbeat_s=0.2) as client:
        client.register_partition("train", ["x"], None, ["policy"])
        client.put_samples(["a", "b"], "train", {"x": [torch.arange(2), torch.arange(3)]})
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(60)
        second = Service("--units", "2", "--state-dir", str(state))
        services.append(second)
        assert second.address == first.address
        rows = client.get_samples(["a", "b"], "train", ["x"])["x"].unbind()
        assert [row.tolist() for row in rows] == [[0, 1], [0, 1, 2]]
        client.put_samples(["c"], "train", {"x": [torch.arange(1)]})
        assert client.claim_meta("train", "policy", ["x"], 3).sample_ids == ["a", "b", "c"]
    assert second.end(signal.SIGTERM) == 0
    assert f"restored the state in {state}" in second.errors
    assert len(discard(state, ["/dev/shm"])) == 2
    assert not litter(first.files)


def test_a_capacity_that_comes_too_late_is_told(services: list[Service], tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    for more, warnings in (((), 0), ((), 0), (("--capacity", "16m"), 1)):
        service = Service("--state-dir", state, *more)
        services.append(service)
        assert service.end(signal.SIGTERM) == 0
        told = [line for line in service.complaints if "the configured capacity of" in line]
        assert len(told) == warnings
    assert told[0].startswith(
        "Storage unit unit-0 keeps its arena of 8,388,608 bytes; the configured capacity of 16,777,216"
    )
    assert "`tq drain unit-0`" in told[0]
    discard(tmp_path / "state", ["/dev/shm"])


def test_a_unit_that_dies_comes_back_with_its_rows(services: list[Service], tmp_path: Path) -> None:
    service = Service("--state-dir", str(tmp_path / "state"))
    services.append(service)
    with connect(service.address, heartbeat_s=0.2) as client:
        client.register_partition("train", ["x"], None, ["policy"])
        client.put_samples(["a"], "train", {"x": torch.arange(4)[None]})
        killed = child_of(service)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: [one.pid for one in psutil.Process(service.process.pid).children()] not in ([], [killed]))
        assert client.get_samples(["a"], "train", ["x"])["x"].tolist() == [[0, 1, 2, 3]]
        client.put_samples(["b"], "train", {"x": torch.arange(4)[None]})
    assert service.end(signal.SIGTERM) == 0
    assert "Storage unit unit-0 ended with code -9; restarting it" in service.errors
    assert len(discard(tmp_path / "state", ["/dev/shm"])) == 1


@pytest.mark.parametrize("state", [True, False])
def test_a_unit_that_cannot_start_is_one_line(services: list[Service], tmp_path: Path, state: bool) -> None:
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first + 1)):
        where = ("--state-dir", str(tmp_path)) if state else ()
        service = Service("--http-port", str(first), "--units", "2", *where, await_ready=False)
        services.append(service)
        assert service.process.wait(60) == 1
    service.end(signal.SIGTERM)
    (line,) = service.complaints
    assert line.startswith("tq: storage unit unit-0 cannot start: "), line
    assert str(first + 1) in line
    assert not service.output
    discard(tmp_path, ["/dev/shm"])


def test_an_arena_directory_that_is_none_is_one_line(services: list[Service], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    service = Service("--arena-dir", str(tmp_path / "file"), await_ready=False)
    services.append(service)
    assert service.process.wait(60) == 1
    service.end(signal.SIGTERM)
    (line,) = service.complaints
    assert line.startswith("tq: "), line
    assert str(tmp_path / "file") in line


def test_an_arena_directory_that_is_too_small_is_one_line(services: list[Service]) -> None:
    service = Service("--capacity", "999999g", await_ready=False)
    services.append(service)
    assert service.process.wait(60) == 1
    service.end(signal.SIGTERM)
    (line,) = service.complaints
    assert line.startswith("tq: the arena needs "), line
    assert "Set a smaller --capacity or another --arena-dir" in line


def test_units_that_do_not_fit_together_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = AvailableMemory(free_bytes=16 * MIB, limit="memory available on this machine")
    monkeypatch.setattr(capacity, "available_memory", lambda directory: memory)
    assert main(["serve", "--units", "3", "--capacity", "12m"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tq: the arenas of 3 storage units need {36 * MIB:,} bytes in /dev/shm, "), line
    assert "Set a smaller --capacity, fewer --units or another --arena-dir" in line


def test_a_service_without_a_state_ends_with_its_memory(services: list[Service]) -> None:
    service = Service()
    services.append(service)
    os.kill(child_of(service), signal.SIGKILL)
    _, errors = service.process.communicate(timeout=60)
    assert service.process.returncode == 1
    assert "storage unit unit-0 ended with code -9; its rows are lost; the service stops" in errors
    assert not litter(service.files)


def test_a_unit_that_dies_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_process, "RESTARTS", 1)
    monkeypatch.setattr(unit_process, "WITHIN_S", 3600.0)
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    config = DataPlaneConfig(units=0, capacity_bytes=8 * MIB, state_dir=str(tmp_path / "state"))
    with dataplane.serve(config) as server:
        units = UnitProcesses(server.address, config, ended.put)
        units.start(1)
        for _ in range(2):
            first = units.pid("unit-0")
            os.kill(first, signal.SIGKILL)
            wait_until(lambda first=first: not ended.empty() or units.pid("unit-0") != first)
        assert "storage unit unit-0 ended 2 times" in ended.get(timeout=60)
        units.stop()
    discard(tmp_path / "state", ["/dev/shm"])


def test_units_end_when_their_service_is_killed(services: list[Service]) -> None:
    service = Service()
    services.append(service)
    with connect(service.address) as client:
        assert len(client.stats().units) == 1
    waiting = os.pidfd_open(child_of(service))
    service.process.kill()

    assert select.select([waiting], [], [], 60)[0]
    os.close(waiting)
