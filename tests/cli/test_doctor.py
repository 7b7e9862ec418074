"""`tq doctor`, on this machine as it is and as it might be."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from dataplane import DataPlaneClient, DataPlaneConfig, serve
from dataplane.cli import main
from dataplane.cli.checks import Finding, machine, packages
from dataplane.cli.checks.finding import run_check
from dataplane.cli.checks.trial import trial
from dataplane.compat import switch
from dataplane.config import GIB, MIB
from dataplane.core import devices
from dataplane.core.file_locks import new_arena_name
from dataplane.core.memory_limits import AvailableMemory
from dataplane.core.private_dir import own_directory
from dataplane.storage.arena import Arena
from tests.cli.service import filled  # noqa: F401
from tests.ports import free_ports

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_ADDRESS", "TQ_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Finding]]:
    """The exit code, and the last finding of each thing."""
    code = main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    found = [Finding(what=each["what"], found=each["found"], mend=each["mend"]) for each in report["findings"]]
    assert [each["ok"] for each in report["findings"]] == [finding.ok for finding in found]
    assert report["wrong"] == sum(not finding.ok for finding in found)
    assert code == (1 if report["wrong"] else 0)
    return code, {finding.what: finding for finding in found}


def test_everything_is_looked_at_and_a_service_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = told(["--arena-dir", str(tmp_path)], capsys)
    expected = ["system", "shared memory", "memory limit", "this user's directory", "arenas", "open files"]
    expected += [
        "loopback",
        "ports",
        "packages",
        "imports",
        "protobuf",
        "gRPC",
        "ZMQ",
        "Ray",
        "torch",
        "GPU",
        "a service here",
        "round trip",
    ]
    assert list(found) == expected
    for what in ("protobuf", "gRPC", "ZMQ", "torch", "a service here", "round trip"):
        assert found[what].ok, found[what]
    assert not list(tmp_path.iterdir())


def test_a_service_is_reached_and_used(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", str(filled.config.address)])
    text = capsys.readouterr().out
    assert "ok     session: open, with neither token nor TLS" in text
    assert "ok     units: 1 storage unit, 1 on this host" in text
    assert "put and read over the best connection" in text
    assert "put and read over ZMQ" in text
    assert "\x1b" not in text
    assert text.splitlines()[-1].startswith("all " if code == 0 else "")
    assert [part.partition for part in filled.stats().partitions] == ["train"]


def test_no_service_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = told(["127.0.0.1:1"], capsys)
    assert code == 1
    assert found["port 2 (ZMQ)"].found == "127.0.0.1: Connection refused"
    assert "tq serve" in found["port 2 (ZMQ)"].mend
    assert "session" not in found


def test_a_service_that_does_not_answer() -> None:
    """What would start another, or give this end a token, would not help."""
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
        found = list(trial(DataPlaneConfig(address=f"127.0.0.1:{port}", connect_timeout_s=0.2), "/dev/shm"))
    assert [finding.ok for finding in found] == [True, True, False]
    assert "does not answer in time" in found[-1].found
    assert "tq serve" not in found[-1].found
    assert "its process" in found[-1].mend
    assert "token" not in found[-1].mend


def test_a_wrong_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serve({"token": "secret", "units": 0}) as server:
        token = tmp_path / "token"
        token.write_text("guess")
        code, found = told([server.address, "--token-file", str(token)], capsys)
        assert code == 1
        assert "token" in found["session"].found
        assert "--token-file" in found["session"].mend
        token.write_text("secret")
        code, found = told([server.address, "--token-file", str(token)], capsys)
        assert code == 1
        assert found["session"].found == "open, with a token"
        assert found["units"].found == "no storage unit: puts cannot succeed"


def only(findings: Iterator[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_a_directory_for_arenas_that_is_not_there(tmp_path: Path) -> None:
    found = list(machine.machine(str(tmp_path / "none"), 0))
    for what in ("shared memory", "this user's directory"):
        assert "No such file" in only(iter(found), what).found
        assert "--arena-dir" in only(iter(found), what).mend


def test_a_directory_that_others_can_enter(tmp_path: Path) -> None:
    mine = tmp_path / f"tq-{os.geteuid()}"
    mine.mkdir(mode=0o755)
    mine.chmod(0o755)
    found = only(machine.machine(str(tmp_path), 0), "this user's directory")
    assert "chmod 700" in found.found
    assert found.mend


def test_what_a_killed_unit_left(tmp_path: Path) -> None:
    """What a process holds, and what a state directory keeps, is not of that kind."""
    folder = own_directory(tmp_path)
    record = tmp_path / "unit-0.json"
    record.touch()
    with Arena.create(folder, MIB, epoch=1):
        kept = Arena.create(folder, MIB, epoch=1, keeper=record)
        kept.close(unlink=False)
        assert only(machine._check_arenas(str(tmp_path)), "arenas").ok
    left = folder / new_arena_name()
    left.write_bytes(b"x" * 8192)
    found = only(machine._check_arenas(str(tmp_path)), "arenas")
    assert "1 arena (" in found.found
    assert left.name in found.found
    assert "`tq serve`" in found.mend
    assert kept.path.exists()
    record.unlink()
    assert "2 arenas" in only(machine._check_arenas(str(tmp_path)), "arenas").found


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ENOUGH_BYTES", 1 << 60)
    found = only(machine.machine(str(tmp_path), 0), "shared memory")
    assert found.found.endswith(": too little")
    assert "--shm-size" in found.mend


def test_memory_that_other_units_may_still_take(tmp_path: Path) -> None:
    with Arena.create(own_directory(tmp_path), 4 * MIB, epoch=1) as arena:
        arena.grow(MIB)
        found = only(machine.machine(str(tmp_path), 0), "shared memory").found
        assert "; running storage units may still take 3.0 MiB; the default capacity of a unit is " in found
    assert "running storage units" not in only(machine.machine(str(tmp_path), 0), "shared memory").found


@pytest.mark.parametrize(("free", "ok"), [(10 * MIB, False), (10 * GIB, True)])
def test_a_memory_limit(free: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [
        AvailableMemory(free_bytes=free, limit="the limit"),
        AvailableMemory(free_bytes=free + 1, limit="a wider one"),
    ]
    monkeypatch.setattr(machine, "cgroup_limits", lambda: limits)
    found = only(machine.machine("/dev/shm", 0), "memory limit")
    assert "left of the limit, which includes arenas" in found.found
    assert found.ok is ok


@pytest.mark.parametrize(("hard", "ok"), [(1024, False), (65536, True), (-1, True)])
def test_open_files(hard: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, hard))
    assert only(machine.machine("/dev/shm", 0), "open files").ok is ok


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = only(machine.machine("/dev/shm", port), "ports")
        assert f"in use by process {os.getpid()} (" in found.found
        assert str(port) in found.mend


def test_a_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(machine.machine("/dev/shm", 0), "loopback").ok

    def unreachable(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", unreachable)
    found = only(machine.machine("/dev/shm", 0), "loopback")
    assert os.strerror(errno.ENETUNREACH) in found.found
    assert "ip link set lo up" in found.mend


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")
def test_a_machine_without_loopback_is_told_in_lines(tmp_path: Path) -> None:
    """In a network of its own, where nobody has brought loopback up."""
    command = ["unshare", "--net", sys.executable, "-m", "dataplane", "doctor", "--arena-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "`ip link set lo up`" in said
    assert "Traceback" not in said
    assert 'File "' not in said


def test_several_addresses_without_a_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def unclear(host: str) -> str:
        raise ValueError("this machine has no default route; name one with --host")

    monkeypatch.setattr(machine, "reachable_host", unclear)
    assert "no default route; name one with --host" in only(machine.machine("/dev/shm", 0), "ports").found


def test_packages_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["msgspec>=99.1", "numpy<1,>=0.1", "no-such-thing>=1", "torch>=1", 'pytest>=999; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    found = only(packages.packages(), "packages")
    assert f"msgspec has version {importlib.metadata.version('msgspec')}, required is >=99.1" in found.found
    assert "numpy has version " in found.found
    assert "no-such-thing is not installed" in found.found
    assert "torch" not in found.found
    assert "pytest" not in found.found
    assert found.mend


@pytest.mark.parametrize(
    ("version", "operator", "bound", "holds"),
    [
        ("2.13.0+cpu", ">=", "2.13", True),
        ("2.9", ">=", "2.13", False),
        ("8.0.1", "<", "8", False),
        ("7.36.0", "<", "8", True),
        ("1.0", "==", "1.0.0", True),
        ("1.1", "<=", "1.0", False),
        ("3rc1", ">", "2", True),
    ],
)
def test_versions_are_compared_by_number(version: str, operator: str, bound: str, holds: bool) -> None:
    assert packages._satisfies(version, operator, bound) is holds


def test_a_zmq_that_cannot_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: name != "curve")
    found = only(packages.packages(), "ZMQ")
    assert found.found.endswith("without curve")
    assert "pyzmq" in found.mend


@pytest.mark.parametrize("kind", ["nvidia", "davinci"])
@pytest.mark.parametrize(
    ("usable", "files", "found", "ok"),
    [
        (2, 2, "2 for torch: Card", True),
        (0, 2, "2 in /dev, but torch cannot use any", False),
        (0, 0, "none; tensors on CPUs only", True),
    ],
)
def test_gpus(
    usable: int, files: int, found: str, ok: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(files):
        (tmp_path / f"{kind}{number}").touch()
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "davinci_manager").touch()
    monkeypatch.setattr(packages, "_DEVICES", tmp_path)
    platform = SimpleNamespace(device_count=lambda: usable, get_device_name=lambda number: "Card")
    monkeypatch.setattr(devices, "platform", lambda: platform if usable else None)
    gpu = only(packages.packages(), "GPU")
    assert (gpu.found, gpu.ok) == (found, ok)


def test_what_a_check_raises_is_a_finding() -> None:
    def check() -> Iterator[Finding]:
        yield Finding(what="first", found="well")
        raise RuntimeError

    first, second = run_check("thing", check, "do something")
    assert first.ok
    assert (second.what, second.found, second.mend) == ("thing", "RuntimeError", "do something")


def test_the_switch_that_replaces_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Finding:
        return only(run_check("imports", packages._check_imports, "mended so"), "imports")

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("TQ_REPLACE", raising=False)
    assert found() == Finding(what="imports", found="TQ_REPLACE is not set: no modules of other packages are replaced")
    monkeypatch.setenv("TQ_REPLACE", "transfer_queue")
    assert "has no effect" in found().found
    assert "--force-reinstall" in found().mend
    switch.install()
    assert found().ok
    assert found().found == "transfer_queue is dataplane.compat.transfer_queue (TQ_REPLACE=transfer_queue)"
    monkeypatch.setenv("TQ_REPLACE", "transferqueue")
    assert "expected 'all', or names from" in found().found
    assert found().mend == "mended so"
