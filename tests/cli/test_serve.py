"""The commands that start, stop and drain: `tq serve`, `tq unit`, `tq drain`, and what they say of what flows."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace

import dataplane
from dataplane import DataPlaneClient, DataPlaneConfig, ServiceUnavailableError, connect, serve
from dataplane.cli import changes, main
from dataplane.cli import serve as serve_module
from dataplane.cli.top import fetch_rates, parse_http_address
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import MIB
from dataplane.core.memory_limits import AvailableMemory
from dataplane.ledger import commands as c
from dataplane.storage import capacity, unit_process
from dataplane.storage.arena_record import discard
from dataplane.storage.unit import StorageUnit
from dataplane.storage.unit_process import UnitProcesses
from tests.children import START_S, Child
from tests.cli.service import TQ, Service, child_of, complaints, filled, services  # noqa: F401
from tests.conftest import litter
from tests.ports import free_ports
from tests.restarts import wait_until
from tests.secure import tls
from tests.web_client import ask

# --- `tq serve` as a person and an init system use it: real processes, real signals.


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[DataPlaneConfig]:
    """What `tq serve` would run with: nothing is started."""
    found: list[DataPlaneConfig] = []

    def take(config: DataPlaneConfig, count: int, json: bool) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(serve_module, "_run_service", take)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "told"), [([], "across-hosts"), (["--checksums", "always"], "always")])
def test_which_rows_get_checksums_is_told_to_the_service(
    flags: list[str], told: str, settings: list[DataPlaneConfig]
) -> None:
    assert main(["serve", *flags]) == 0
    assert settings[0].checksums == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "port"),
    [
        ([], None),
        (["--ui"], 0),
        (["--metrics"], 0),
        (["--ui", "--port", "7200"], 7201),
        (["--http-port", "9000", "--port", "7200"], 9000),
    ],
)
def test_which_port_http_is_served_at(flags: list[str], port: int | None, settings: list[DataPlaneConfig]) -> None:
    assert main(["serve", *flags]) == 0
    assert settings[0].http_port == port


@pytest.mark.slow
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


@pytest.mark.slow
def test_it_says_where_it_is_as_json(services: list[Service]) -> None:
    service = Service("--metrics", "--units", "0", "--json")
    services.append(service)
    told = json.loads(service.first_line)
    assert ask(told["http"].removeprefix("http://"), "/healthz").status == 200
    with connect(told["address"]) as client:
        assert client.stats().units == ()
    assert service.end(signal.SIGTERM) == 0
    assert service.complaints == []


@pytest.mark.slow
def test_a_public_host_needs_a_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_TOKEN", raising=False)
    assert main(["serve", "--host", "0.0.0.0", "--units", "0"]) == 1
    assert "token" in capsys.readouterr().err


def control_c(service: Service) -> int:
    """As a terminal ends what runs in it; its exit code."""
    os.killpg(service.process.pid, signal.SIGINT)
    return service.end(0)


@pytest.mark.slow
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
    assert all(each.startswith("Rejected a peer: ") for each in service.complaints)
    assert not litter(service.files)


@pytest.mark.slow
def test_a_unit_that_stands_still_does_not_keep_its_service_from_ending(services: list[Service]) -> None:
    service = Service("--units", "1")
    services.append(service)
    unit = psutil.Process(child_of(service))
    unit.suspend()
    assert service.end(signal.SIGTERM) == 0
    assert service.complaints == ["Storage unit unit-0 did not stop within 12 s and is killed"]
    wait_until(lambda: not unit.is_running())
    assert not litter(service.files)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("importing", "code"), [("dataplane.cli.app", -signal.SIGINT), ("dataplane.controller.controller", 0)]
)
def test_an_interrupt_while_it_is_imported_is_no_traceback(importing: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, importing], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_arena_directory_that_is_none_is_one_line(services: list[Service], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    service = Service("--arena-dir", str(tmp_path / "file"), await_ready=False)
    services.append(service)
    assert service.process.wait(60) == 1
    service.end(signal.SIGTERM)
    (line,) = service.complaints
    assert line.startswith("tq: "), line
    assert str(tmp_path / "file") in line


@pytest.mark.slow
def test_an_arena_directory_that_is_too_small_is_one_line(services: list[Service]) -> None:
    service = Service("--capacity", "999999g", await_ready=False)
    services.append(service)
    assert service.process.wait(60) == 1
    service.end(signal.SIGTERM)
    (line,) = service.complaints
    assert line.startswith("tq: the arena needs "), line
    assert "Set a smaller --capacity or another --arena-dir" in line


@pytest.mark.slow
def test_units_that_do_not_fit_together_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = AvailableMemory(free_bytes=16 * MIB, limit="memory available on this machine")
    monkeypatch.setattr(capacity, "available_memory", lambda directory: memory)
    assert main(["serve", "--units", "3", "--capacity", "12m"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tq: the arenas of 3 storage units need {36 * MIB:,} bytes in /dev/shm, "), line
    assert "Set a smaller --capacity, fewer --units or another --arena-dir" in line


@pytest.mark.slow
def test_a_service_without_a_state_ends_with_its_memory(services: list[Service]) -> None:
    service = Service()
    services.append(service)
    os.kill(child_of(service), signal.SIGKILL)
    _, errors = service.process.communicate(timeout=60)
    assert service.process.returncode == 1
    assert "storage unit unit-0 ended with code -9; its rows are lost; the service stops" in errors
    assert not litter(service.files)


@pytest.mark.slow
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


@pytest.mark.slow
def test_units_end_when_their_service_is_killed(services: list[Service]) -> None:
    service = Service()
    services.append(service)
    with connect(service.address) as client:
        assert len(client.stats().units) == 1
    waiting = os.pidfd_open(child_of(service))
    service.process.kill()

    assert select.select([waiting], [], [], 60)[0]
    os.close(waiting)


# --- `tq unit`: one more storage unit.


@pytest.mark.integration
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


@pytest.mark.integration
def test_a_unit_says_that_it_is_ready_in_json() -> None:
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m", "--name", "extra"]
        with Child([*command, "--json"]) as unit:
            assert json.loads(unit.line()) == {"unit": "extra", "http": None}
            unit.terminate()
            code, _, errors = unit.finish()
    assert (code, complaints(errors)) == (0, [])


@pytest.mark.integration
def test_the_name_of_a_unit_cannot_write_on_the_terminal() -> None:
    with dataplane.serve({"units": 0}) as server:
        command = [sys.executable, "-m", "dataplane", "unit", server.address, "--capacity", "8m"]
        with Child([*command, "--name", "extra\n\x1b[2J"]) as unit:
            assert unit.line() == r"storage unit 'extra\n\x1b[2J' ready"
            unit.terminate()
            code, output, errors = unit.finish()
    assert (code, output, complaints(errors)) == (0, "", [])


@pytest.mark.integration
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


@pytest.mark.integration
def test_a_unit_that_waits_for_its_controller_ends_when_it_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Child([sys.executable, "-m", "dataplane", "unit", address, "--capacity", "8m"]) as unit:
            silent.settimeout(START_S)
            peer, _ = silent.accept()
            with peer:
                unit.terminate()
                assert unit.finish() == (0, "", "")


# --- `tq drain`.


OTHER = DataPlaneConfig(capacity_bytes=8 * MIB)


@pytest.mark.integration
def test_rows_move_and_the_unit_goes(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    with StorageUnit(OTHER, str(filled.config.address), name="other"):
        assert main(["drain", "unit-0"]) == 0
        assert capsys.readouterr().out.startswith("storage unit 1 unit-0 is empty: 7 cells moved (")
        assert main(["status"]) == 0
        assert "DRAINING" in capsys.readouterr().out
        assert main(["drain", "1", "--drop", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["name"], told["cells"], told["dropped"]) == ("unit-0", 0, True)
        assert [unit.name for unit in filled.stats().units] == ["other"]
        rows = filled.get_samples(["a", "b", "c"], "train", ["ids"])["ids"].unbind()
        assert [len(row) for row in rows] == [5, 2, 9]


@pytest.mark.integration
def test_a_drain_that_cannot_be_is_exit_1_and_can_be_undone(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "unit-0", "--timeout", "0.1"]) == 1
    told = capsys.readouterr().err
    assert "unit 1 is not drained: no other storage unit has space for new rows" in told
    assert "force the drain (--force)" in told
    assert not filled.stats().units[0].draining
    assert main(["drain", "unit-0", "--timeout", "0.1", "--force"]) == 1
    told = capsys.readouterr().err
    assert "unit 1" in told
    assert "(--undo)" in told
    assert filled.stats().units[0].draining
    assert main(["drain", "unit-0", "--undo"]) == 0
    assert capsys.readouterr().out == "storage unit 1 unit-0 takes new rows again\n"
    assert not filled.stats().units[0].draining


@pytest.mark.integration
def test_it_is_said_how_far_it_is(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_ELSEWHERE_S", 0.0)
    with StorageUnit(OTHER, str(filled.config.address), name="other"):
        assert main(["drain", "unit-0"]) == 0
        first, *_, last = capsys.readouterr().err.splitlines()
        assert first.startswith("storage unit 1 unit-0: ")
        assert first.endswith(" left")
        assert last.startswith("storage unit 1 unit-0: 7 cells moved (")
        assert last.endswith(", 0 left")


@pytest.mark.integration
@pytest.mark.parametrize("before", [False, True])
def test_an_interrupt_undoes_it(
    before: bool, filled: DataPlaneClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(line: object, progress: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(changes._ProgressLine, "show", interrupt)
    with StorageUnit(OTHER, str(filled.config.address), name="other"):
        if before:
            with contextlib.closing(ControllerChannel.open(filled.config)) as channel:
                channel.call(c.Drain(unit=1))
        assert main(["drain", "unit-0", "--drop"]) == 1
        told = capsys.readouterr().err
        assert "interrupted: storage unit 1 unit-0 " in told
        assert ("gets no new rows, as before" in told) is before
        assert [unit.draining for unit in filled.stats().units] == [before, False]
        rows = filled.get_samples(["a", "b", "c"], "train", ["ids"])["ids"].unbind()
        assert [len(row) for row in rows] == [5, 2, 9]


@pytest.mark.integration
def test_an_interrupt_before_it_is_dropped_does_not_say_that_nothing_was_done(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(client: object, unit: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DataPlaneClient, "drop_unit", interrupt)
    with StorageUnit(OTHER, str(filled.config.address), name="other"):
        assert main(["drain", "unit-0", "--drop"]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == (
            "tq: interrupted: storage unit 1 unit-0 is empty and gets no new rows; "
            "it may or may not have been dropped (check `tq status`, run `tq drop`)"
        )


@pytest.mark.integration
def test_ctrl_c_ends_a_drain_that_waits_for_space(filled: DataPlaneClient) -> None:
    with Child([*TQ, "drain", "unit-0", "--force"]) as process:
        wait_until(lambda: filled.stats().units[0].draining)
        process.send_signal(signal.SIGINT)
        code, output, errors = process.finish()
    assert (code, output) == (1, "")
    assert "tq: interrupted: storage unit 1 unit-0 takes new rows again" in errors
    assert "Traceback" not in errors
    assert not filled.stats().units[0].draining


@pytest.mark.integration
def test_what_contradicts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "unit-0", "--undo", "--drop", "--address", "127.0.0.1:1"]) == 2
    assert "the flags exclude each other" in capsys.readouterr().err


@pytest.mark.integration
def test_no_such_unit_is_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "zz"]) == 1
    assert "storage unit 'zz': not found" in capsys.readouterr().err


# --- What goes through a service, as `tq top --http` shows it.


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to answer than somebody who watches would wait."""
    monkeypatch.setattr("dataplane.cli.top._WAIT_S", 60.0)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("8000", ("host", 8000)),
        ("other:8000", ("other", 8000)),
        ("http://other:8000", ("other", 8000)),
        ("https://other:8000/metrics", ("other", 8000)),
        ("[::1]:8000", ("::1", 8000)),
    ],
)
def test_where_it_is(text: str, place: tuple[str, int]) -> None:
    assert parse_http_address(text, "host:7000") == place


@pytest.mark.integration
@pytest.mark.parametrize("text", ["", "http://other", "host:port", "http://[::1"])
def test_what_is_no_place(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:1", "--http", text]) == 2
    assert "is not a URL" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("security", [{}, {"token": "secret"}, {"token": "secret", **tls()}])
def test_samples_and_bytes_a_second(security: dict[str, Any]) -> None:
    with serve({"capacity_bytes": 8 * MIB, "http_port": 0, **security}) as server:
        config = DataPlaneConfig(address=server.address, **security)
        with connect(server.address, token=security.get("token")) as client:
            client.register_partition("train", ["x"], None, ["policy"])
            client.put_samples(["a", "b"], "train", {"x": torch.zeros(2, 256)})
            client.get_samples(["a"], "train", ["x"])
        place = parse_http_address(server.http_address, server.address)
        wait_until(lambda: fetch_rates(place, config, 60).gets > 0)
        found = fetch_rates(place, config, 60)
        assert found.puts == pytest.approx(2 / 60)
        assert found.put_bytes == pytest.approx(2048 / 60)
        assert found.gets == pytest.approx(1 / 60)


@pytest.mark.integration
def test_top_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with serve({"capacity_bytes": 8 * MIB, "http_port": 0}) as server:
        arguments = ["top", server.address, "--once", "--interval", "0.1", "--http"]
        assert main([*arguments, f"http://{server.http_address}/"]) == 0
        assert "per second: 0 samples put (0 B), 0 got (0 B), 0 claimed, 0 cleared" in capsys.readouterr().out
        assert main([*arguments, server.http_address.rpartition(":")[2], "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["flow"]
        assert told == {"puts": 0, "put_bytes": 0, "gets": 0, "get_bytes": 0, "claims": 0, "clears": 0}


@pytest.mark.integration
def test_a_wrong_token_is_said() -> None:
    with (
        serve({"units": 0, "http_port": 0, "token": "secret"}) as server,
        pytest.raises(ServiceUnavailableError, match="401"),
    ):
        fetch_rates(parse_http_address(server.http_address, ""), DataPlaneConfig(token="guess"), 1)


@pytest.mark.integration
def test_the_wrong_port_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serve({"units": 0}) as server:
        assert main(["top", server.address, "--once", "--http", "1"]) == 1
        assert "Connection refused" in capsys.readouterr().err


@contextmanager
def web_server(body: bytes) -> Iterator[tuple[str, int]]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[0], server.server_port  # type: ignore[misc]
        server.shutdown()
        thread.join()


@pytest.mark.integration
@pytest.mark.parametrize("body", [b"", b"<html>", b'{"puts": 1}'])
def test_something_else_that_answers_is_said(body: bytes) -> None:
    with web_server(body) as place, pytest.raises(ServiceUnavailableError, match="pass the port that"):
        fetch_rates(place, DataPlaneConfig(), 1)


# --- `tq status`.


UNIT = c.UnitStats(
    unit=3,
    name="left",
    host="here",
    connected=True,
    capacity_bytes=1000,
    unbacked_bytes=50,
    free_bytes=243,
    reserved_bytes=202,
    live_bytes=101,
    retired_bytes=404,
    pinned_bytes=55,
    used_bytes=707,
    peak_used_bytes=808,
)
PARTITION = c.PartitionStats(
    partition="train",
    live=5,
    born=7,
    num_samples=9,
    sealed=True,
    live_bytes=111,
    produced={"x": 4, "y": 3},
    claimed={"policy": 2},
    waiting_claims=14,
    version=None,
    dropped=0,
    used_bytes=222,
    peak_used_bytes=333,
    budget_bytes=444,
    evicted=11,
    evicted_unconsumed=12,
    waiting_puts=13,
    pressed=True,
)
SESSION = c.SessionStats(
    session=1, name="me", host="here", state="live", silent_s=0.0, parked=0, reservations=0, pins=0
)
FULL = replace(UNIT, unit=4, connected=False, pressed=True, draining=True, problem="no memory")
PLAIN = c.PartitionStats(
    partition="plain",
    live=1,
    born=8,
    num_samples=None,
    sealed=False,
    live_bytes=64,
    produced={},
    claimed={},
    waiting_claims=0,
    version=None,
    dropped=0,
)
REPORT = c.StatsReport(
    epoch=6,
    now=0.0,
    units=(UNIT, FULL),
    partitions=(PARTITION, PLAIN),
    sessions=(SESSION, SESSION),
    waiting_allocations=15,
    partition_count=18,
)
"""Figures that could be taken for each other differ."""
SAID = """\
data plane service at here:1, epoch 6
  unit 3 left: 707 B of 1000 B used (101 B live, 202 B reserved, 55 B pinned), peak 808 B
  unit 4 left: 707 B of 1000 B used (101 B live, 202 B reserved, 55 B pinned), peak 808 B, FILLING UP, DRAINING, \
NOT CONNECTED
    cannot grow: no memory
  partition train: 5 live (111 B), 7 of 9 born, sealed
    222 B of a budget of 444 B used, peak 333 B, FILLING UP
    11 evicted, plus 12 evicted unconsumed
    13 puts waiting for space
    field x: 4 produced
    field y: 3 produced
    task policy: 2 of 5 claimed
    14 claims waiting
  partition plain: 1 live (64 B), 8 born
  and 16 more partitions; `tq ls` lists them
  2 sessions, 15 puts waiting for space"""


def test_every_figure_stands_where_it_belongs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.cli.inspection.session", contextlib.nullcontext)
    monkeypatch.setattr("dataplane.cli.inspection.stats", lambda _: REPORT)
    assert main(["status", "here:1"]) == 0
    assert capsys.readouterr().out == f"{SAID}\n"


@pytest.mark.integration
def test_partitions_fields_and_tasks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({"capacity_bytes": 8 * MIB}) as server, connect(server.address) as client:
        client.register_partition("train", ["x"], 4, ["policy"], budget_bytes=MIB)
        client.put_samples(["a", "b"], "train", {"x": torch.arange(2)})
        client.claim_meta("train", "policy", ["x"], 1)
        monkeypatch.setenv("TQ_ADDRESS", server.address)
        assert main(["status"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"data plane service at {server.address}, epoch ")
        for part in (
            "partition train: 2 live (64 B), 2 of 4 born",
            "64 B of a budget of 1.0 MiB used",
            "field x: 2 produced",
            "task policy: 1 of 2 claimed",
        ):
            assert part in text
        assert main(["status", "--json", "--address", server.address]) == 0
        assert json.loads(capsys.readouterr().out)["partitions"][0]["produced"] == {"x": 2}
