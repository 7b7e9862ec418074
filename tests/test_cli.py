"""`tq` as a person and an init system use it: real processes, real signals."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import dataplane
from dataplane import DataPlaneConfig, connect, unit_process
from dataplane.cli import _service_config, main, parser, size
from dataplane.kept import discard
from dataplane.unit_process import UnitProcesses
from tests.lives import wait_until

from .conftest import litter, our_files

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "count"),
    [("1048576", MIB), ("512k", MIB // 2), ("64m", 64 * MIB), ("1.5GiB", 1536 * MIB), ("2G", 2048 * MIB)],
)
def test_sizes(text: str, count: int) -> None:
    assert size(text) == count


def test_bad_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--capacity", "lots"])
    assert left.value.code == 2
    assert "lots" in capsys.readouterr().err


def test_which_rows_get_checksums_is_told_to_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert _service_config(parser().parse_args(["serve"])).checksums == "across-hosts"
    assert _service_config(parser().parse_args(["serve", "--checksums", "always"])).checksums == "always"
    with pytest.raises(SystemExit):
        main(["serve", "--checksums", "sometimes"])
    assert "sometimes" in capsys.readouterr().err


def test_no_service_is_exit_1_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_public_host_needs_a_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_TOKEN", raising=False)
    assert main(["serve", "--host", "0.0.0.0", "--units", "0"]) == 1
    assert "token" in capsys.readouterr().err


class Service:
    """A `tq serve` process; `address` is what it printed."""

    def __init__(self, *arguments: str) -> None:
        self.files = our_files()
        command = [sys.executable, "-m", "dataplane", "serve", "--capacity", "8m", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        _, self.errors = self.process.communicate(timeout=60)
        return self.process.returncode


def child_of(service: Service) -> int:
    """The process of its one storage unit."""
    (child,) = psutil.Process(service.process.pid).children()
    return int(child.pid)


@pytest.fixture
def services() -> Iterator[list[Service]]:
    started: list[Service] = []
    yield started
    for service in started:
        service.process.kill()
        service.process.wait(60)
        for stream in (service.process.stdout, service.process.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_status_and_a_clean_end(
    services: list[Service], number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert service.end(number) == 0
    assert service.errors == ""
    assert not litter(service.files)


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
    assert f"going on with what was in {state}" in second.errors
    assert len(discard(state, ["/dev/shm"])) == 2
    assert not litter(first.files)


def test_checkpoint_and_restore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "c")
    with dataplane.serve({"capacity_bytes": 8 * MIB}) as server, connect(server.address) as client:
        for name in ("train", "val"):
            client.register_partition(name, ["x"], 2, ["policy"])
            client.put_samples(["a", "b"], name, {"x": torch.arange(2)})
        assert main(["checkpoint", server.address, path, "--partition", "val", "--partition", "train"]) == 0
        assert "checkpoint of val (2 samples), train (2 samples), " in capsys.readouterr().out
        assert main(["restore", server.address, path]) == 1
        assert "partition 'val' exists already" in capsys.readouterr().err
        client.clear_samples(["a"], "train")
        client.clear_samples(None, "val")
        assert main(["restore", server.address, path, "--partition", "train", "--replace"]) == 0
        assert capsys.readouterr().out.startswith("restored train (2 samples), ")
        assert client.list_samples("train").sample_ids == ["a", "b"]
        assert [found.partition for found in client.stats().partitions] == ["train"]
        assert main(["checkpoint", server.address, path, "--partition", "none"]) == 1
        assert "unknown partition 'none'" in capsys.readouterr().err
        (tmp_path / "c" / "manifest.json").unlink()
        assert main(["restore", server.address, path]) == 1
        assert "manifest.json: missing" in capsys.readouterr().err


def test_control_c_is_no_failure(services: list[Service]) -> None:
    service = Service("--units", "2")
    services.append(service)
    os.killpg(service.process.pid, signal.SIGINT)
    _, errors = service.process.communicate(timeout=60)
    assert (service.process.returncode, errors) == (0, "")
    assert not litter(service.files)


def test_a_unit_that_dies_comes_back_with_its_rows(services: list[Service], tmp_path: Path) -> None:
    service = Service("--state-dir", str(tmp_path / "state"))
    services.append(service)
    with connect(service.address, heartbeat_s=0.2) as client:
        client.register_partition("train", ["x"], None, ["policy"])
        client.put_samples(["a"], "train", {"x": torch.arange(4)[None]})
        os.kill(child_of(service), signal.SIGKILL)
        assert client.get_samples(["a"], "train", ["x"])["x"].tolist() == [[0, 1, 2, 3]]
        client.put_samples(["b"], "train", {"x": torch.arange(4)[None]})
    assert service.end(signal.SIGTERM) == 0
    assert "storage unit unit-0 ended with code -9: starting it again" in service.errors
    assert len(discard(tmp_path / "state", ["/dev/shm"])) == 1


def test_a_service_without_a_state_ends_with_its_memory(services: list[Service]) -> None:
    service = Service()
    services.append(service)
    os.kill(child_of(service), signal.SIGKILL)
    _, errors = service.process.communicate(timeout=60)
    assert service.process.returncode == 1
    assert "storage unit unit-0 ended with code -9, and its rows with it; the service ends" in errors


def test_a_unit_that_dies_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_process, "RESTARTS", 1)
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


def test_a_wrong_token_is_refused(services: list[Service], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    service = Service("--units", "0", "--token-file", str(token))
    services.append(service)
    for wrong in ("guess", None):
        with pytest.raises(ConnectionError, match="token"):
            connect(service.address, token=wrong)
    assert service.end(signal.SIGTERM) == 0


def test_units_end_when_their_service_is_killed(services: list[Service]) -> None:
    service = Service()
    services.append(service)
    with connect(service.address) as client:
        assert len(client.stats().units) == 1
    waiting = os.pidfd_open(child_of(service))
    service.process.kill()

    assert select.select([waiting], [], [], 60)[0]
    os.close(waiting)


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
