"""`tq doctor`, on this machine as it is and as it might be."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from dataplane import DataPlaneClient, DataPlaneConfig, serve
from dataplane.cli import main
from dataplane.compat import switch
from dataplane.config import GIB, MIB
from dataplane.core import devices, memory_limits
from dataplane.core.file_locks import new_arena_name
from dataplane.core.memory_limits import AvailableMemory
from dataplane.core.private_dir import own_directory
from dataplane.storage.arena import Arena
from tests.cli.service import filled  # noqa: F401
from tests.ports import free_ports

pytestmark = pytest.mark.integration

doctor = importlib.import_module("dataplane.cli.doctor")  # the package has the verb under that name


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_ADDRESS", "TQ_TOKEN", "TQ_REPLACE"):
        monkeypatch.delenv(name, raising=False)


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and what was found by each check with the remedy."""
    code = main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert all(each["ok"] == (not each["mend"]) for each in report["findings"])
    assert report["wrong"] == sum(not each["ok"] for each in report["findings"])
    assert code == (1 if report["wrong"] else 0)
    return code, {each["what"]: (each["found"], each["mend"]) for each in report["findings"]}


def found_by(what: str, arena_dir: str = "/dev/shm", config: DataPlaneConfig | None = None) -> tuple[str, str]:
    """What this check found, and the remedy."""
    findings = doctor.run_checks(config or DataPlaneConfig(), arena_dir)
    (finding,) = [finding for finding in findings if finding.what == what]
    return finding.found, finding.mend


def test_everything_here_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = told(["--arena-dir", str(tmp_path)], capsys)
    assert list(found) == ["shared memory", "memory limit", "arenas", "open files", "imports", "ZMQ", "torch"]
    for what in ("arenas", "imports", "ZMQ", "torch"):
        assert not found[what][1], found[what]
    assert not list(tmp_path.iterdir())


def test_a_service_is_reached_and_used(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", str(filled.config.address)])
    text = capsys.readouterr().out
    assert "ok     service: 1 storage unit, 1 on this host; 64.0 KiB put and read in " in text
    assert "over ZMQ" in text
    assert "\x1b" not in text
    assert text.splitlines()[-1].startswith("all " if code == 0 else "")
    assert [part.partition for part in filled.stats().partitions] == ["train"]


def test_a_service_that_does_not_answer() -> None:
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
        config = DataPlaneConfig(address=f"127.0.0.1:{port}", connect_timeout_s=0.2)
        found, mend = found_by("service", config=config)
    assert "does not answer in time" in found
    assert "`tq serve`" in mend


def test_a_wrong_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serve({"token": "secret", "units": 0}) as server:
        token = tmp_path / "token"
        token.write_text("guess")
        code, found = told([server.address, "--token-file", str(token)], capsys)
        assert code == 1
        assert "token" in found["service"][0]
        assert "--token-file" in found["service"][1]
        token.write_text("secret")
        code, found = told([server.address, "--token-file", str(token)], capsys)
        assert code == 1
        assert found["service"][0] == "no storage unit: puts cannot succeed"


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"connected": False}, "is not connected"),
        ({"problem": "disk full"}, "cannot grow: disk full"),
        ({"pressed": True}, "is filling up: 1.0 MiB used"),
        ({}, ""),
    ],
)
def test_units_in_trouble(state: dict[str, object], problem: str) -> None:
    healthy = {"connected": True, "problem": "", "pressed": False, "used_bytes": MIB}
    assert doctor._unit_problem(SimpleNamespace(**{**healthy, **state})) == problem


def test_a_directory_for_arenas_that_is_not_there(tmp_path: Path) -> None:
    for what in ("shared memory", "arenas"):
        found, mend = found_by(what, str(tmp_path / "none"))
        assert "No such file" in found
        assert "--arena-dir" in mend


def test_a_directory_that_others_can_enter(tmp_path: Path) -> None:
    mine = tmp_path / f"tq-{os.geteuid()}"
    mine.mkdir(mode=0o755)
    mine.chmod(0o755)
    found, mend = found_by("arenas", str(tmp_path))
    assert "chmod 700" in found
    assert mend


def test_what_a_killed_unit_left(tmp_path: Path) -> None:
    """What a process holds, and what a state directory keeps, is not of that kind."""
    folder = own_directory(tmp_path)
    record = tmp_path / "unit-0.json"
    record.touch()
    with Arena.create(folder, MIB, epoch=1):
        kept = Arena.create(folder, MIB, epoch=1, keeper=record)
        kept.close(unlink=False)
        assert not found_by("arenas", str(tmp_path))[1]
    left = folder / new_arena_name()
    left.write_bytes(b"x" * 8192)
    found, mend = found_by("arenas", str(tmp_path))
    assert "1 arena, " in found
    assert left.name in found
    assert "`tq serve`" in mend
    assert kept.path.exists()
    record.unlink()
    assert "2 arenas" in found_by("arenas", str(tmp_path))[0]


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_BYTES", 1 << 60)
    found, mend = found_by("shared memory", str(tmp_path))
    assert found.endswith(": too little")
    assert "--shm-size" in mend


def test_memory_that_other_units_may_still_take(tmp_path: Path) -> None:
    with Arena.create(own_directory(tmp_path), 4 * MIB, epoch=1) as arena:
        arena.grow(MIB)
        found, _ = found_by("shared memory", str(tmp_path))
        assert "; running storage units may still take 3.0 MiB; the default capacity of a unit is " in found
    assert "running storage units" not in found_by("shared memory", str(tmp_path))[0]


@pytest.mark.parametrize(("free", "ok"), [(10 * MIB, False), (10 * GIB, True)])
def test_a_memory_limit(free: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [
        AvailableMemory(free_bytes=free, limit="the limit"),
        AvailableMemory(free_bytes=free + 1, limit="a wider one"),
    ]
    monkeypatch.setattr(memory_limits, "cgroup_limits", lambda: limits)
    found, mend = found_by("memory limit")
    assert "left of the limit, which includes arenas" in found
    assert (mend == "") is ok


@pytest.mark.parametrize(("hard", "ok"), [(1024, False), (65536, True), (-1, True)])
def test_open_files(hard: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, hard))
    assert (found_by("open files")[1] == "") is ok


def test_a_zmq_that_cannot_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: name != "curve")
    found, mend = found_by("ZMQ")
    assert found.endswith("without curve")
    assert "pyzmq" in mend


@pytest.mark.parametrize(("usable", "text"), [(2, ", 2 of Card"), (0, ", tensors on CPUs only")])
def test_accelerators(usable: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(device_count=lambda: usable, get_device_name=lambda number: "Card")
    monkeypatch.setattr(devices, "platform", lambda: platform if usable else None)
    found, _ = found_by("torch")
    assert found.endswith(text)


def test_what_a_check_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> tuple[str, str]:
        raise RuntimeError

    monkeypatch.setattr(doctor, "_check_zmq", fails)
    assert found_by("ZMQ") == ("RuntimeError", "pip install -U --only-binary :all: pyzmq")


def test_the_switch_that_replaces_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert found_by("imports") == ("TQ_REPLACE is not set: no modules of other packages are replaced", "")
    monkeypatch.setenv("TQ_REPLACE", "transfer_queue")
    found, mend = found_by("imports")
    assert "has no effect" in found
    assert "--force-reinstall" in mend
    switch.install()
    found, mend = found_by("imports")
    assert (found, mend) == ("transfer_queue is dataplane.compat.transfer_queue (TQ_REPLACE=transfer_queue)", "")
    monkeypatch.setenv("TQ_REPLACE", "transferqueue")
    found, mend = found_by("imports")
    assert "expected 'all', or names from" in found
    assert mend == "correct TQ_REPLACE, or unset it"
