"""The command line as a whole: its verbs, what wrong arguments get, what it loads, and what completes."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq

from dataplane import DataPlaneClient, DataPlaneConfig, cli, connect, serve
from dataplane.cli import main
from dataplane.cli.app import app
from dataplane.cli.output import escaped
from dataplane.compat import switch
from dataplane.config import GIB, MIB
from dataplane.core import devices, memory_limits
from dataplane.core.file_locks import new_arena_name
from dataplane.core.memory_limits import AvailableMemory
from dataplane.core.private_dir import own_directory
from dataplane.storage.arena import Arena
from dataplane.storage.unit import StorageUnit
from tests.cli.service import (
    TQ,
    filled,  # noqa: F401
)
from tests.ports import free_ports

VERBS = [
    *("serve", "unit"),
    *("status", "top", "ls", "show", "why"),
    *("clear", "checkpoint", "restore", "drain", "drop"),
    "doctor",
]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_ADDRESS", "TQ_TOKEN", "TQ_REPLACE"):
        monkeypatch.delenv(name, raising=False)


def test_the_verbs_are_pinned() -> None:
    assert [command.callback.__name__ for command in app.registered_commands if command.callback] == VERBS


def test_every_module_of_a_verb_is_in_the_table() -> None:
    heads = [path.read_text(encoding="utf-8").split("\n", 1)[0] for path in Path(cli.__file__).parent.glob("*.py")]
    assert {name for head in heads for name in re.findall(r"`tq (\w+)`", head)} == set(VERBS)


def test_the_manual_has_every_verb() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in VERBS if f"tq {name}" not in manual] == []


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in VERBS)])
def test_help_is_no_failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert "Usage: tq" in told.out
    assert told.err == ""


def test_paragraphs_of_help_are_broken_where_the_terminal_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    assert main(["drain", "--help"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "The rows pass" in line]
    assert line.strip().endswith("and undoes the drain.")


def test_help_has_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "Exit codes: 0 success, 1 failure" in capsys.readouterr().out


def test_no_command_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert "checkpoint" in told.out
    assert told.err == "tq: a command is required; choose one of the above\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--capacity", "lots"], "'lots' is not a size"),
        (["serve", "--checksums", "sometimes"], "'sometimes' is not one of 'across-hosts'"),
        (["serve", "--units", "-1"], "--units"),
        (["serve", "--bogus"], "--bogus"),
        (["unit"], "ADDRESS"),
        (["status"], "set TQ_ADDRESS"),
        (["status", "127.0.0.1:1", "--address", "127.0.0.1:2"], "pass only one address"),
        (["checkpoint"], "PATH"),
        (["restore", "a", "b", "c"], "got 3"),
        (["dance"], "dance"),
        (["ls", "--limit", "0"], "--limit"),
        (["show"], "SAMPLE"),
        (["why", "train"], "TASK"),
        (["clear"], "PARTITION"),
        (["top", "127.0.0.1:1", "--interval", "0"], "--interval"),
        (["top", "127.0.0.1:1", "--interval", "inf"], "--interval"),
    ],
)
def test_wrong_arguments_get_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("tq")
    assert said in line
    assert line.endswith("--help`")


@pytest.mark.integration
def test_no_service_is_exit_1_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("verb", ["status", "ls", "show a", "why train policy", "top --once --interval 0.1"])
def test_tokens_are_shown(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secured: str
) -> None:
    # A busy machine may take longer than the default of 10 s, for which the command line has no flag.
    monkeypatch.setitem(DataPlaneConfig.__init__.__kwdefaults__, "connect_timeout_s", 60.0)
    token = tmp_path / "token"
    token.write_text("secret")
    arguments = [*verb.split(), "--address", secured]
    assert main([*arguments, "--token-file", str(token)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TQ_TOKEN", "guess")
    assert main(arguments) == 1
    assert "token" in capsys.readouterr().err
    monkeypatch.delenv("TQ_TOKEN")
    assert main(arguments) == 1
    assert "no token was given" in capsys.readouterr().err


@pytest.fixture(scope="module")
def secured() -> Iterator[str]:
    """The address of a service with a token, and a sample `a` in partition `train`."""
    settings = {"token": "secret"}
    with serve({"capacity_bytes": 8 * MIB, **settings}) as server, connect(server.address, **settings) as client:
        client.register_partition("train", ["x"], None, ["policy"])
        client.put_samples(["a"], "train", {"x": torch.zeros(1)})
        yield server.address


BAD = "\x1b[2J\x07"
"""What would clear the terminal that it is written to."""


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    """The address of a service in which every name has control characters; storage unit 2 is called so as well."""
    with (
        serve({"capacity_bytes": 8 * MIB}) as server,
        StorageUnit(DataPlaneConfig(capacity_bytes=8 * MIB), server.address, name=f"unit{BAD}"),
        connect(server.address, client_name=f"client{BAD}") as client,
    ):
        client.register_partition(f"part{BAD}", [f"field{BAD}"], None, [f"task{BAD}"])
        tags = [{f"tag{BAD}": f"value{BAD}"}]
        client.put_samples([f"sample{BAD}"], f"part{BAD}", {f"field{BAD}": torch.zeros(1)}, tags=tags)
        yield server.address


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["top", "--once", "--interval", "0.1"],
        ["ls"],
        ["ls", f"part{BAD}"],
        ["ls", f"none{BAD}"],
        ["show", f"sample{BAD}"],
        ["show", f"none{BAD}"],
        ["why", f"part{BAD}", f"task{BAD}", f"field{BAD}", "--where", f"tag{BAD} == x{BAD}"],
        ["why", f"part{BAD}", f"none{BAD}"],
        ["clear", f"part{BAD}", f"none{BAD}"],
        ["drain", f"unit{BAD}", "--undo"],
        ["drop", f"none{BAD}"],
        ["checkpoint", "PATH"],
    ],
    ids=lambda arguments: "-".join(word.removesuffix(BAD) for word in arguments[:2]),
)
def test_no_name_can_write_on_the_terminal(
    arguments: list[str], hostile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "saved") if word == "PATH" else word for word in arguments]
    main([*given, "--address", hostile])
    told = capsys.readouterr()
    assert told.out or told.err
    assert not {"\x1b", "\x07"} & set(told.out + told.err)


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--address", "{}:1"],
        ["status", "--address", "{}"],
        ["status", "127.0.0.1:1", "--address", "{}"],
        ["status", "127.0.0.1:1", "--token-file", "{}"],
        ["status", "127.0.0.1:1", "--{}"],
        ["status", "127.0.0.1:1", "--tls-cert", "{}", "--tls-key", "{}", "--tls-ca", "{}"],
        ["unit", "{}:1"],
        ["serve", "--units", "{}"],
        ["serve", "--arena-dir", "/none/{}"],
        ["serve", "--host", "{}"],
        ["top", "127.0.0.1:1", "--http", "{}"],
        ["top", "127.0.0.1:1", "--interval", "{}"],
        ["bench", "--address", "{}:1"],
        ["{}"],
    ],
    ids=" ".join,
)
def test_no_argument_can_write_on_the_terminal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.format(f"a\n{BAD}") for word in arguments]) in (1, 2)
    told = capsys.readouterr()
    assert told.out == ""
    line, end = told.err[:-1], told.err[-1:]
    assert end == "\n"
    assert line.startswith("tq")
    assert line.isprintable()


@pytest.mark.parametrize("text", ["plain – ünïcode", "a\tb\x1b[2J\x9b\u202e\udcff"])
def test_escaped_text_says_what_it_was(text: str) -> None:
    assert escaped(text).isprintable()
    assert escaped(text).encode().decode("unicode_escape" if escaped(text).isascii() else "utf-8") == text


def test_control_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dataplane.client.rpc.channel.ControllerChannel.open", interrupt)
    assert main(["ls", "--address", "127.0.0.1:1"]) == 130


@pytest.mark.integration
def test_a_reader_that_has_enough_gets_no_traceback(secured: str) -> None:
    command = [*TQ, "ls", "--address", secured]
    ours, theirs = os.pipe()
    os.close(ours)  # nobody reads
    environment = {**os.environ, "TQ_TOKEN": "secret"}
    with os.fdopen(theirs) as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.integration
def test_help_loads_nothing_heavy() -> None:
    code = (
        "import contextlib, io, sys\nfrom dataplane.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['--help'])\n"
        "print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(done.stdout.split())
    assert "typer" in loaded
    assert not loaded & {"torch", "tensordict", "numpy", "zmq", "grpc", "google", "ray", "pydantic"}


@pytest.mark.integration
def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tq 0.")


# --- `tq doctor`, on this machine as it is and as it might be.


doctor = importlib.import_module("dataplane.cli.doctor")  # the package has the verb under that name


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


@pytest.mark.integration
def test_everything_here_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = told(["--arena-dir", str(tmp_path)], capsys)
    assert list(found) == ["shared memory", "memory limit", "arenas", "open files", "imports", "ZMQ", "torch"]
    for what in ("arenas", "imports", "ZMQ", "torch"):
        assert not found[what][1], found[what]
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
def test_a_service_is_reached_and_used(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", str(filled.config.address)])
    text = capsys.readouterr().out
    assert "ok     service: 1 storage unit, 1 on this host; 64.0 KiB put and read in " in text
    assert "over ZMQ" in text
    assert "\x1b" not in text
    assert text.splitlines()[-1].startswith("all " if code == 0 else "")
    assert [part.partition for part in filled.stats().partitions] == ["train"]


@pytest.mark.integration
def test_a_service_that_does_not_answer() -> None:
    port = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        config = DataPlaneConfig(address=f"127.0.0.1:{port}", connect_timeout_s=0.2)
        found, mend = found_by("service", config=config)
    assert "does not answer in time" in found
    assert "`tq serve`" in mend


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
def test_a_directory_for_arenas_that_is_not_there(tmp_path: Path) -> None:
    for what in ("shared memory", "arenas"):
        found, mend = found_by(what, str(tmp_path / "none"))
        assert "No such file" in found
        assert "--arena-dir" in mend


@pytest.mark.integration
def test_a_directory_that_others_can_enter(tmp_path: Path) -> None:
    mine = tmp_path / f"tq-{os.geteuid()}"
    mine.mkdir(mode=0o755)
    mine.chmod(0o755)
    found, mend = found_by("arenas", str(tmp_path))
    assert "chmod 700" in found
    assert mend


@pytest.mark.integration
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


@pytest.mark.integration
def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_BYTES", 1 << 60)
    found, mend = found_by("shared memory", str(tmp_path))
    assert found.endswith(": too little")
    assert "--shm-size" in mend


@pytest.mark.integration
def test_memory_that_other_units_may_still_take(tmp_path: Path) -> None:
    with Arena.create(own_directory(tmp_path), 4 * MIB, epoch=1) as arena:
        arena.grow(MIB)
        found, _ = found_by("shared memory", str(tmp_path))
        assert "; running storage units may still take 3.0 MiB; the default capacity of a unit is " in found
    assert "running storage units" not in found_by("shared memory", str(tmp_path))[0]


@pytest.mark.integration
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


@pytest.mark.integration
@pytest.mark.parametrize(("hard", "ok"), [(1024, False), (65536, True), (-1, True)])
def test_open_files(hard: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, hard))
    assert (found_by("open files")[1] == "") is ok


@pytest.mark.integration
def test_a_zmq_that_cannot_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: name != "curve")
    found, mend = found_by("ZMQ")
    assert found.endswith("without curve")
    assert "pyzmq" in mend


@pytest.mark.integration
@pytest.mark.parametrize(("usable", "text"), [(2, ", 2 of Card"), (0, ", tensors on CPUs only")])
def test_accelerators(usable: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(device_count=lambda: usable, get_device_name=lambda number: "Card")
    monkeypatch.setattr(devices, "platform", lambda: platform if usable else None)
    found, _ = found_by("torch")
    assert found.endswith(text)


@pytest.mark.integration
def test_what_a_check_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> tuple[str, str]:
        raise RuntimeError

    monkeypatch.setattr(doctor, "_check_zmq", fails)
    assert found_by("ZMQ") == ("RuntimeError", "pip install -U --only-binary :all: pyzmq")


@pytest.mark.integration
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
